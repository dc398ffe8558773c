"""Layouts: which rank holds which box of which parameter, and where in its local tensors.

    Hugging Face config ──▶ model_state() ──▶ parameters, each whole and unfused
    Layout (dp_replicate, dp_shard, tp, ep, etp, pp) ─┐
    names of an engine ("hf", "vllm") ────────────────┴─▶ place() ──▶ for each rank: local tensors, made of pieces

A *parameter* is a weight that no engine splits by meaning: q, k and v each, gate and up each. A *tensor* is what an engine
stores: several parameters side by side (``qkv_proj``), or one. All of it is arithmetic on sizes; nothing is allocated here.

Ranks are counted with pipeline stages outermost, then data-parallel replicas, then data-parallel shards, then
tensor-parallel ranks. The experts of a stage use the same ranks in an order of their own:

    dense    (pp, dp_replicate, dp_shard, tp)
    experts  (pp, data-parallel rest, ep, etp), or with ``ep_order = "outer"`` (pp, ep, data-parallel rest, etp)

Context parallelism splits sequences, not weights: its ranks are further data-parallel shards (``dp_shard`` is dp · cp, cp
counting faster, as in torchtitan), so a layout has no ``cp``. The train engine has no etp; plans are computed for all of
these.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from math import inf, prod
from typing import Any, Literal, get_args

import torch

from stages.parallel.schedules import Kind, holder

Range = tuple[int, int]
Box = tuple[Range, ...]  # start and end along each dimension; () is the box of a scalar
Names = Literal["hf", "vllm"]
Side = Literal["train", "rollout"]
EpOrder = Literal["inner", "outer"]
_WORDS: dict[str, Any] = {"pipeline": Kind, "ep_order": EpOrder}  # fields of a layout that are no number of ranks
Rule = Literal["chunk", "query", "key_value"]


class LayoutError(ValueError):
    """A layout that is not valid or does not fit its model. The message names the field, the value and the fix."""


# --- boxes -----------------------------------------------------------------------------------------------------------


def volume(box: Box) -> int:
    """Number of elements in ``box``."""
    return prod(end - start for start, end in box)


def intersect(a: Box, b: Box) -> Box | None:
    """The intersection of ``a`` and ``b``; None when it is empty."""
    common = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return common if all(start < end for start, end in common) else None


def subtract(box: Box, hole: Box) -> Iterator[Box]:
    """Disjoint boxes that cover ``box`` without ``hole``, which is inside it.

    >>> list(subtract(((0, 4), (0, 4)), ((1, 2), (0, 3))))
    [((0, 1), (0, 4)), ((2, 4), (0, 4)), ((1, 2), (3, 4))]
    """
    for dim, ((start, end), (cut, stop)) in enumerate(zip(box, hole, strict=True)):
        for rest in ((start, cut), (stop, end)):
            if rest[0] < rest[1]:
                yield (*hole[:dim], rest, *box[dim + 1 :])


def whole(shape: Sequence[int]) -> Box:
    return tuple((0, size) for size in shape)


def chunk(size: int, parts: int, index: int) -> Range:
    """Part ``i`` by torch's rule (``torch.chunk``, DTensor ``Shard``, FSDP2): parts of ceil(size / parts), the last ones
    shorter or empty.

    >>> [chunk(5, 4, i) for i in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    step = -(-size // parts)
    return min(index * step, size), min((index + 1) * step, size)


def head_ranges(heads: int, kv_heads: int, tp: int, rank: int) -> tuple[Range, Range]:
    """Query heads and key-value heads of tensor-parallel rank ``rank``. Heads are never split, and a rank has the key-value
    heads that its query heads attend to. With more ranks than ``kv_heads``, several ranks hold the same one, as in vLLM.

    >>> [head_ranges(8, 2, 4, rank) for rank in range(4)]
    [((0, 2), (0, 1)), ((2, 4), (0, 1)), ((4, 6), (1, 2)), ((6, 8), (1, 2))]
    >>> [head_ranges(9, 3, 2, rank) for rank in range(2)]
    [((0, 6), (0, 2)), ((6, 9), (2, 3))]
    """
    group = heads // kv_heads
    if tp <= kv_heads:
        start, end = chunk(kv_heads, tp, rank)
        return (start * group, end * group), (start, end)
    start, end = chunk(heads, tp, rank)
    return (start, end), (start // group, -(-end // group)) if start < end else (0, 0)


# --- parameters -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Split:
    """How tensor parallelism splits a parameter: along ``dim`` in units of ``unit`` elements, by torch's chunk rule or by
    the model's heads."""

    dim: int
    unit: int = 1
    rule: Rule = "chunk"


@dataclass(frozen=True)
class Parameter:
    """A whole parameter. ``expert``: its dimension 0 counts experts. ``split`` None: every tensor-parallel rank has all of
    it. ``rule_known`` False: how tensor parallelism splits it is not known."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    layer: int | None = None
    split: Split | None = None
    expert: bool = False
    rule_known: bool = True

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Tensor:
    """A tensor as an engine names it: the parameters ``parts`` side by side along ``dim``."""

    name: str
    parts: tuple[str, ...]
    dim: int = 0


@dataclass(frozen=True)
class ModelState:
    """All parameters of a model, and the tensors that hold them under Hugging Face's names. ``tied``: names that share a
    parameter, and its name (``lm_head.weight`` with the embeddings). ``chosen``: experts that a token uses, of each layer;
    0: not known."""

    parameters: tuple[Parameter, ...]
    tensors: tuple[Tensor, ...]
    layers: int
    heads: int
    kv_heads: int
    tied: tuple[tuple[str, str], ...] = ()
    chosen: int = 0

    @cached_property
    def costs(self) -> tuple[float, ...]:
        """What a token costs in each layer: the weights that it meets there. The output head is counted in the last one, of
        embeddings one row in the first."""
        costs, of = [0.0] * self.layers, {of for _, of in self.tied}
        for parameter in self.parameters:
            size = float(prod(parameter.shape))
            if parameter.layer is None:
                is_embedding = "embed" in parameter.name
                costs[0] += parameter.shape[-1] if is_embedding else 0.0
                costs[-1] += size if not is_embedding or parameter.name in of else 0.0
            else:
                used = (self.chosen or parameter.shape[0]) / parameter.shape[0] if parameter.expert else 1.0
                costs[parameter.layer] += size * used
        return tuple(costs)

    @cached_property
    def by_name(self) -> dict[str, Parameter]:
        return {parameter.name: parameter for parameter in self.parameters}

    @property
    def nbytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.parameters)

    @property
    def expert_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.parameters if parameter.expert)

    @property
    def split_bytes(self) -> int:
        """Bytes of the dense parameters that tensor parallelism splits: TW of MindSpeed RL, Eq. 3."""
        return sum(p.nbytes for p in self.parameters if p.split and not p.expert)

    def named(self, names: Names) -> tuple[Tensor, ...]:
        """The tensors of an engine that uses these names."""
        return self.tensors if names == "hf" else tuple(_fused(self))


_COLUMN = re.compile(r"(gate_proj|up_proj|lm_head|embed_tokens)\.(weight|bias)$")
_ROW = re.compile(r"down_proj\.weight$")
_HEADS = re.compile(r"self_attn\.([qkv])_proj\.(weight|bias)$")
_REPLICATED = re.compile(r"(norm\.weight|mlp\.gate\.weight|shared_expert_gate\.weight|(o_proj|down_proj)\.bias)$")
_LAYER = re.compile(r"\.layers\.(\d+)\.")


def model_state(config: Any, dtype: torch.dtype | None = None) -> ModelState:
    """Returns the parameters of the causal language model of ``config`` (a transformers config), read from a model on the
    meta device: no weights are made or loaded. ``dtype`` None: the config's. Raises :class:`LayoutError` for a config
    without attention heads, or with heads that do not form groups."""
    from transformers import AutoModelForCausalLM

    text = config.get_text_config()
    if not (heads := getattr(text, "num_attention_heads", None)):
        raise LayoutError(f"num_attention_heads: {config.model_type} has none; use a decoder with attention")
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    if heads % kv_heads:
        raise LayoutError(
            f"num_attention_heads: {heads} is no multiple of num_key_value_heads = {kv_heads}; "
            "query heads share key-value heads in equal groups, so correct the config"
        )
    with torch.device("meta"):
        wanted = {"dtype": dtype} if dtype else {}
        model = AutoModelForCausalLM.from_config(config, **wanted, trust_remote_code=False)
    dtype = dtype or model.dtype  # of every parameter, as load_model makes it
    parameters: list[Parameter] = []
    tensors: list[Tensor] = []
    for name, value in model.named_parameters():
        parts, dim = _parts(name, tuple(value.shape), heads, kv_heads)
        for part, shape in parts:
            parameters.append(_parameter(part, shape, dtype, heads, kv_heads))
        tensors.append(Tensor(name, tuple(part for part, _ in parts), dim))
    known = {name for name, _ in model.named_parameters()}
    tied = tuple(
        (name, of)
        for name, of in (getattr(model, "_tied_weights_keys", None) or {}).items()
        if name not in known and of in known
    )
    chosen = int(getattr(text, "num_experts_per_tok", None) or 0)
    return ModelState(tuple(parameters), tuple(tensors), text.num_hidden_layers, heads, kv_heads, tied, chosen)


def _parts(
    name: str, shape: tuple[int, ...], heads: int, kv_heads: int
) -> tuple[list[tuple[str, tuple[int, ...]]], int]:
    """The parameters of the Hugging Face tensor ``name``, and the dimension along which they are joined."""
    if name.endswith("experts.gate_up_proj"):
        of_expert = (shape[0], shape[1] // 2, shape[2])
        return [(name.replace("gate_up_proj", which), of_expert) for which in ("gate_proj", "up_proj")], 1
    if "mlp.gate_up_proj." in name:
        half = (shape[0] // 2, *shape[1:])
        return [(name.replace("gate_up_proj", which), half) for which in ("gate_proj", "up_proj")], 0
    if "self_attn.qkv_proj." in name:
        unit = shape[0] // (heads + 2 * kv_heads)
        sizes = {"q_proj": heads * unit, "k_proj": kv_heads * unit, "v_proj": kv_heads * unit}
        return [(name.replace("qkv_proj", which), (size, *shape[1:])) for which, size in sizes.items()], 0
    return [(name, shape)], 0


def _parameter(name: str, shape: tuple[int, ...], dtype: torch.dtype, heads: int, kv_heads: int) -> Parameter:
    layer = int(found[1]) if (found := _LAYER.search(name)) else None
    if re.search(r"experts\.(gate|up|down)_proj$", name):
        return Parameter(name, shape, dtype, layer, Split(2 if name.endswith("down_proj") else 1), expert=True)
    split, known = None, True
    if found := _HEADS.search(name):
        count = heads if found[1] == "q" else kv_heads
        split = Split(0, shape[0] // count, "query" if found[1] == "q" else "key_value")
    elif name.endswith("self_attn.o_proj.weight"):
        split = Split(1, shape[1] // heads, "query")
    elif _COLUMN.search(name):
        split = Split(0)
    elif _ROW.search(name):
        split = Split(1)
    else:
        known = len(shape) < 2 or bool(_REPLICATED.search(name))
    return Parameter(name, shape, dtype, layer, split, rule_known=known)


_FUSED = {  # what a parameter's name contains: what stands there instead, the parameters fused, along which dimension
    "self_attn.q_proj.": ("self_attn.qkv_proj.", ("q_proj", "k_proj", "v_proj"), 0),
    "mlp.gate_proj.": ("mlp.gate_up_proj.", ("gate_proj", "up_proj"), 0),
    ".shared_expert.gate_proj.": (".shared_expert.gate_up_proj.", ("gate_proj", "up_proj"), 0),
    ".experts.gate_proj": (".experts.w13_weight", ("gate_proj", "up_proj"), 1),
    ".experts.down_proj": (".experts.w2_weight", ("down_proj",), 0),
}


def _fused(model: ModelState) -> Iterator[Tensor]:
    """The tensors under vLLM's names."""
    done: set[str] = set()
    for parameter in model.parameters:
        name = parameter.name
        if name in done:
            continue
        tensor = Tensor(name, (name,))
        if (key := next((key for key in _FUSED if key in name), None)) is not None:
            instead, parts, dim = _FUSED[key]
            first = parts[0]
            tensor = Tensor(name.replace(key, instead), tuple(name.replace(first, part) for part in parts), dim)
        done.update(tensor.parts)
        yield tensor


# --- layouts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """A product of parallelisms over ``world`` ranks. Every field is a number of ranks, except ``ep_order``.

    ``dp_replicate`` copies. ``dp_shard`` splits dimension 0 of what tensor parallelism left (FSDP2, ZeRO-3). ``tp`` splits
    columns and rows. ``ep`` deals experts over the data- and tensor-parallel ranks of a stage, and ``etp`` splits each
    expert (default: ``tp`` while ``ep`` is 1, else 1). ``pp`` deals layers to stages, in ``vpp`` parts each. ``ep_order``:
    ``inner`` as Megatron-Core, torchtitan and vLLM count, neighbours hold different experts; ``outer``: the same.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    ep: int = 1
    etp: int | None = None
    pp: int = 1
    vpp: int = 1
    pipeline: Kind = "auto"
    ep_order: EpOrder = "inner"

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in _WORDS:
                if value not in (known := get_args(_WORDS[field.name])):
                    raise LayoutError(f"{field.name}: {value!r} is unknown; use {' or '.join(map(repr, known))}")
            elif not isinstance(value, int | None) or (value is not None and value < 1):
                raise LayoutError(f"{field.name}: {value!r} is no number of ranks; use a whole number >= 1")
        if self.pipeline == "zbv" and (self.pp == 1 or self.vpp != 2):
            raise LayoutError(f"pipeline: 'zbv' with pp={self.pp},vpp={self.vpp}; use pp > 1 and vpp=2, or 'auto'")
        shared = self.dp_shard * self.tp if self.dp_shard > 1 else self.dp_replicate * self.tp
        among = "dp_shard · tp" if self.dp_shard > 1 else "dp_replicate · tp"
        if shared % (self.ep * self.expert_tp):
            raise LayoutError(
                f"ep: {self.ep} with etp = {self.expert_tp} does not divide the {shared} ranks of {among} that experts "
                f"are dealt out to; use a divisor of {shared} for ep · etp"
            )

    @property
    def expert_tp(self) -> int:
        return self.etp if self.etp is not None else (self.tp if self.ep == 1 else 1)

    @property
    def expert_shard(self) -> int:
        """Data-parallel shards of an expert."""
        return self.dp_shard * self.tp // (self.ep * self.expert_tp) if self.dp_shard > 1 else 1

    @property
    def stage_ranks(self) -> int:
        return self.dp_replicate * self.dp_shard * self.tp

    @property
    def world(self) -> int:
        return self.pp * self.stage_ranks

    def __str__(self) -> str:
        shown = ("pp", "vpp", "dp_replicate", "dp_shard", "tp", "ep", "etp")
        given = [f"{name}={value}" for name in shown if (value := getattr(self, name)) not in (None, 1)]
        words = [f"{name}={value}" for name in _WORDS if (value := getattr(self, name)) not in ("auto", "inner")]
        return ",".join([*given, *words]) or "one rank"

    def seat(self, rank: int) -> Seat:
        """The coordinates of ``rank``."""
        stage, within = divmod(rank, self.stage_ranks)
        rest, tp = divmod(within, self.tp)
        etp_rest, etp = divmod(within, self.expert_tp)
        others = self.stage_ranks // (self.ep * self.expert_tp)
        if self.ep_order == "inner":
            expert_dp, ep = divmod(etp_rest, self.ep)
        else:
            ep, expert_dp = divmod(etp_rest, others)
        return Seat(stage, rest % self.dp_shard, tp, ep, etp, expert_dp % self.expert_shard)


@dataclass(frozen=True)
class Seat:
    """The coordinates of a rank along each axis that decides what it holds."""

    stage: int
    shard: int
    tp: int
    ep: int
    etp: int
    expert_shard: int


def parse_layout(text: str, side: Side) -> Layout:
    """Parse a layout such as ``dp=2,tp=2``. As in a recipe, ``dp`` is ``dp_shard`` for training and ``dp_replicate`` for
    generation. Raises :class:`LayoutError`."""
    known = [field.name for field in fields(Layout)]
    values: dict[str, Any] = {}
    for item in filter(None, (item.strip() for item in text.split(","))):
        key, equals, value = (part.strip() for part in item.partition("="))
        name = {"dp": "dp_shard" if side == "train" else "dp_replicate"}.get(key, key)
        if name == "cp":
            raise LayoutError(f"{side}.cp: cuts no weights, its ranks share dp_shard; give dp times cp as dp_shard")
        if name not in known:
            raise LayoutError(f"{side}.{key}: is no part of a layout; use dp, {', '.join(known)}, as in 'dp=2,tp=2'")
        if name in values:
            raise LayoutError(f"{side}.{key}: {item!r} gives {name} a second time; give it once")
        if name in _WORDS:
            values[name] = value
            continue
        if not equals or not value.isdecimal():
            raise LayoutError(f"{side}.{key}: {value!r} is no number of ranks; write for example {key}=2")
        values[name] = int(value)
    try:
        return Layout(**values)
    except LayoutError as error:
        raise LayoutError(f"{side}.{error}") from None


# --- placements ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """The ``box`` of ``parameter`` that is at offset ``at`` of a local tensor."""

    parameter: str
    box: Box
    at: tuple[int, ...]


@dataclass(frozen=True)
class LocalTensor:
    """A tensor as one rank holds it: ``shape`` is the local one, and its pieces fill it without gaps or overlaps."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Placement:
    """The local tensors of each rank."""

    layout: Layout
    ranks: tuple[tuple[LocalTensor, ...], ...]

    @property
    def world(self) -> int:
        return len(self.ranks)

    def nbytes(self, rank: int) -> int:
        """Bytes of the tensors of ``rank``; 0 for a rank outside the layout."""
        return sum(tensor.nbytes for tensor in self.ranks[rank]) if rank < self.world else 0


def place(model: ModelState, layout: Layout, *, names: Names = "hf", dtype: torch.dtype | None = None) -> Placement:
    """Returns what each rank of ``layout`` holds of ``model``, in an engine's tensors. ``dtype`` None keeps the parameters'
    own. Raises :class:`LayoutError` when the layout does not fit the model."""
    _check(model, layout)
    tensors = model.named(names)
    made: dict[Seat, tuple[LocalTensor, ...]] = {}
    ranks = []
    for rank in range(layout.world):
        seat = layout.seat(rank)
        if seat not in made:
            found = (_local(model, layout, seat, tensor, dtype) for tensor in tensors)
            made[seat] = tuple(local for local in found if local is not None)
        ranks.append(made[seat])
    return Placement(layout, tuple(ranks))


def _check(model: ModelState, layout: Layout) -> None:
    if layout.pp * layout.vpp > model.layers:
        of = f"{layout.pp} stages" + (f" of {layout.vpp} parts" if layout.vpp > 1 else "")
        raise LayoutError(f"pp: {of} are more than the {model.layers} layers; use pp <= {model.layers // layout.vpp}")
    experts = max((p.shape[0] for p in model.parameters if p.expert), default=0)
    if layout.ep > 1 and layout.ep > experts:
        have = f"{experts} experts" if experts else "no experts"
        raise LayoutError(f"ep: {layout.ep} for a model with {have}; use ep <= {max(experts, 1)}")
    if layout.tp > 1:
        for parameter in model.parameters:
            if not parameter.rule_known:
                raise LayoutError(
                    f"tp: {layout.tp}, but how tensor parallelism cuts {parameter.name} {list(parameter.shape)} is "
                    "not known; use tp=1, or add its rule to stages/parallel/placement.py"
                )


@lru_cache(maxsize=64)
def stage_layers(costs: tuple[float, ...], stages: int) -> tuple[range, ...]:
    """The layers of each virtual stage, in order and at least one: those with the least sum of the squares of the stages'
    costs, so that none takes much longer than the others. ``costs``: of each layer.

    >>> stage_layers((1.0, 1.0, 1.0, 1.0, 1.0, 4.0), 2)
    (range(0, 4), range(4, 6))
    """
    before = [0.0, *accumulate(costs)]
    best: list[tuple[float, tuple[int, ...]]] = [
        (cost**2, (0,)) for cost in before
    ]  # of layers 0 .. n - 1 in one stage
    for count in range(2, stages + 1):
        best = [
            min(
                ((best[at][0] + (before[end] - before[at]) ** 2, (*best[at][1], at)) for at in range(count - 1, end)),
                default=(inf, ()),
            )
            for end in range(len(before))
        ]
    firsts = (*best[-1][1], len(costs))
    return tuple(range(*pair) for pair in pairwise(firsts))


def _stages(model: ModelState, layout: Layout, parameter: Parameter) -> set[int]:
    """The pipeline stages that hold ``parameter``: the first for embeddings, the last for what follows the layers. Both hold
    tied embeddings."""
    stages = layout.pp * layout.vpp
    last = holder(stages - 1, layout.pp, layout.pipeline)
    if parameter.layer is not None:
        parts = stage_layers(model.costs, stages)
        return {holder(at, layout.pp, layout.pipeline) for at, some in enumerate(parts) if parameter.layer in some}
    if any(of == parameter.name for _, of in model.tied):
        return {0, last}
    return {0} if "embed" in parameter.name else {last}


def _local(
    model: ModelState, layout: Layout, seat: Seat, tensor: Tensor, dtype: torch.dtype | None
) -> LocalTensor | None:
    parts = [model.by_name[name] for name in tensor.parts]
    if seat.stage not in _stages(model, layout, parts[0]):
        return None
    pieces: list[Piece] = []
    at = 0  # along tensor.dim
    for part in parts:
        box = _cut(model, layout, seat, part)
        pieces.append(Piece(part.name, box, tuple(at if dim == tensor.dim else 0 for dim in range(len(box)))))
        at += box[tensor.dim][1] - box[tensor.dim][0] if box else 0
    shape = [end - start for start, end in pieces[0].box]
    if shape:
        shape[tensor.dim] = at
    shards, shard = (layout.expert_shard, seat.expert_shard) if parts[0].expert else (layout.dp_shard, seat.shard)
    if shape and shards > 1:
        rows = chunk(shape[0], shards, shard)
        pieces = list(_shard(pieces, rows))
        shape[0] = rows[1] - rows[0]
    kept = tuple(piece for piece in pieces if volume(piece.box))
    return LocalTensor(tensor.name, tuple(shape), dtype or parts[0].dtype, kept)


def _cut(model: ModelState, layout: Layout, seat: Seat, parameter: Parameter) -> Box:
    """The box that tensor and expert parallelism leave of ``parameter``."""
    box = list(whole(parameter.shape))
    tp, rank = (layout.expert_tp, seat.etp) if parameter.expert else (layout.tp, seat.tp)
    if parameter.expert:
        box[0] = chunk(parameter.shape[0], layout.ep, seat.ep)
    if (split := parameter.split) is not None and tp > 1:
        if split.rule == "chunk":
            units = chunk(parameter.shape[split.dim] // split.unit, tp, rank)
        else:
            query, key_value = head_ranges(model.heads, model.kv_heads, tp, rank)
            units = query if split.rule == "query" else key_value
        box[split.dim] = (units[0] * split.unit, units[1] * split.unit)
    return tuple(box)


def _shard(pieces: Iterable[Piece], rows: Range) -> Iterator[Piece]:
    """The pieces within ``rows`` of the local tensor's dimension 0."""
    for piece in pieces:
        (start, end), first = piece.box[0], piece.at[0]
        low, high = max(rows[0], first), min(rows[1], first + end - start)
        if low < high:
            box = ((start + low - first, start + high - first), *piece.box[1:])
            yield Piece(piece.parameter, box, (low - rows[0], *piece.at[1:]))
