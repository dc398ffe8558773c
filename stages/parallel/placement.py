"""Placements: which rank holds which box of which parameter, and where in its local tensors.

    Hugging Face config ──▶ model_state() ──▶ parameters, each whole and unfused
    Layout (stages/parallel/layout.py) ───────────────┐
    names of an engine ("hf", "vllm") ────────────────┴─▶ place() ──▶ for each rank: local tensors, made of pieces

A *parameter* is a weight that no engine splits by meaning: q, k and v each, gate and up each. A
*tensor* is what an engine stores: several parameters side by side (``qkv_proj``), or one. All of it
is arithmetic on sizes; nothing is allocated here. The train engine splits no expert (etp); plans
are computed for all layouts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from math import inf, prod
from typing import Any, Literal

import torch

from stages.parallel.layout import Layout, LayoutError, RankCoordinates

Range = tuple[int, int]
Box = tuple[Range, ...]  # start and end along each dimension; () is the box of a scalar
Names = Literal["hf", "vllm"]
Rule = Literal["chunk", "query", "key_value"]


# --- boxes
# --------------------------------------------------------------------------------------------------


def volume(box: Box) -> int:
    """Return the number of elements in ``box``."""
    return prod(end - start for start, end in box)


def intersect(a: Box, b: Box) -> Box | None:
    """Return the intersection of ``a`` and ``b``; None when it is empty."""
    common = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return common if all(start < end for start, end in common) else None


def subtract(box: Box, hole: Box) -> Iterator[Box]:
    """Yield disjoint boxes that cover ``box`` without ``hole``, which is inside it.

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
    """Return part ``i`` by torch's rule (``torch.chunk``, DTensor ``Shard``, FSDP2): parts of
    ceil(size / parts), the last ones shorter or empty.

    >>> [chunk(5, 4, i) for i in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    step = -(-size // parts)
    return min(index * step, size), min((index + 1) * step, size)


def head_ranges(heads: int, kv_heads: int, tp: int, rank: int) -> tuple[Range, Range]:
    """Return the query heads and key-value heads of tensor-parallel rank ``rank``.

    Heads are never split, and a rank has the key-value heads that its query heads attend to. With
    more ranks than ``kv_heads``, several ranks hold the same one, as in vLLM.

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


# --- parameters
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Split:
    """The way in which tensor parallelism splits a parameter: along ``dim`` in units of ``unit``
    elements, by torch's chunk rule or by the model's heads."""

    dim: int
    unit: int = 1
    rule: Rule = "chunk"


@dataclass(frozen=True)
class Parameter:
    """A whole parameter.

    ``expert``: its dimension 0 counts experts. ``split`` None: every tensor-parallel rank has all
    of it. ``rule_known`` False: how tensor parallelism splits it is not known.
    """

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
    """All parameters of a model, and the tensors that hold them under Hugging Face's names.

    ``tied``: names that share a parameter, and its name (``lm_head.weight`` with the embeddings).
    ``chosen``: experts that a token uses, of each layer; 0: not known.
    """

    parameters: tuple[Parameter, ...]
    tensors: tuple[Tensor, ...]
    layers: int
    heads: int
    kv_heads: int
    tied: tuple[tuple[str, str], ...] = ()
    chosen: int = 0

    @cached_property
    def costs(self) -> tuple[float, ...]:
        """The cost of a token in each layer: the weights that it meets there.

        The output head is counted in the last one, of embeddings one row in the first.
        """
        costs = [0.0] * self.layers
        tied_sources = {source for _, source in self.tied}
        for parameter in self.parameters:
            size = float(prod(parameter.shape))
            if parameter.layer is None:
                is_embedding = "embed" in parameter.name
                costs[0] += parameter.shape[-1] if is_embedding else 0.0
                costs[-1] += size if not is_embedding or parameter.name in tied_sources else 0.0
            else:
                used = (
                    (self.chosen or parameter.shape[0]) / parameter.shape[0]
                    if parameter.expert
                    else 1.0
                )
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

    def named(self, names: Names) -> tuple[Tensor, ...]:
        """Return the tensors of an engine that uses these names."""
        return self.tensors if names == "hf" else tuple(_fused(self))


_COLUMN = re.compile(r"(gate_proj|up_proj|lm_head|embed_tokens)\.(weight|bias)$")
_ROW = re.compile(r"down_proj\.weight$")
_HEADS = re.compile(r"self_attn\.([qkv])_proj\.(weight|bias)$")
_REPLICATED = re.compile(
    r"(norm\.weight|mlp\.gate\.weight|shared_expert_gate\.weight|(o_proj|down_proj)\.bias)$"
)
_LAYER = re.compile(r"\.layers\.(\d+)\.")


def model_state(config: Any, dtype: torch.dtype | None = None) -> ModelState:
    """Return the parameters of the causal language model of ``config`` (a transformers config),
    read from a model on the meta device: no weights are made or loaded. ``dtype`` None: the
    config's. Raises :class:`LayoutError` for a config without attention heads, or with heads that
    do not form groups."""
    from transformers import AutoModelForCausalLM

    text = config.get_text_config()
    if not (heads := getattr(text, "num_attention_heads", None)):
        problem = f"{config.model_type} has none"
        raise LayoutError("num_attention_heads", problem, "use a decoder with attention")
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    if heads % kv_heads:
        raise LayoutError(
            "num_attention_heads",
            f"{heads} is no multiple of num_key_value_heads = {kv_heads}",
            "query heads share key-value heads in equal groups, so correct the config",
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
        (name, source)
        for name, source in (getattr(model, "_tied_weights_keys", None) or {}).items()
        if name not in known and source in known
    )
    chosen = int(getattr(text, "num_experts_per_tok", None) or 0)
    return ModelState(
        tuple(parameters), tuple(tensors), text.num_hidden_layers, heads, kv_heads, tied, chosen
    )


def _parts(
    name: str, shape: tuple[int, ...], heads: int, kv_heads: int
) -> tuple[list[tuple[str, tuple[int, ...]]], int]:
    """Return the parameters of the Hugging Face tensor ``name``, and the dimension along which they
    are joined."""
    if name.endswith("experts.gate_up_proj"):
        of_expert = (shape[0], shape[1] // 2, shape[2])
        return [
            (name.replace("gate_up_proj", projection), of_expert)
            for projection in ("gate_proj", "up_proj")
        ], 1
    if "mlp.gate_up_proj." in name:
        half = (shape[0] // 2, *shape[1:])
        return [
            (name.replace("gate_up_proj", projection), half)
            for projection in ("gate_proj", "up_proj")
        ], 0
    if "self_attn.qkv_proj." in name:
        unit = shape[0] // (heads + 2 * kv_heads)
        sizes = {"q_proj": heads * unit, "k_proj": kv_heads * unit, "v_proj": kv_heads * unit}
        return [
            (name.replace("qkv_proj", projection), (size, *shape[1:]))
            for projection, size in sizes.items()
        ], 0
    return [(name, shape)], 0


def _parameter(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, heads: int, kv_heads: int
) -> Parameter:
    layer = int(match[1]) if (match := _LAYER.search(name)) else None
    if re.search(r"experts\.(gate|up|down)_proj$", name):
        return Parameter(
            name, shape, dtype, layer, Split(2 if name.endswith("down_proj") else 1), expert=True
        )
    split = None
    known = True
    if match := _HEADS.search(name):
        count = heads if match[1] == "q" else kv_heads
        split = Split(0, shape[0] // count, "query" if match[1] == "q" else "key_value")
    elif name.endswith("self_attn.o_proj.weight"):
        split = Split(1, shape[1] // heads, "query")
    elif _COLUMN.search(name):
        split = Split(0)
    elif _ROW.search(name):
        split = Split(1)
    else:
        known = len(shape) < 2 or bool(_REPLICATED.search(name))
    return Parameter(name, shape, dtype, layer, split, rule_known=known)


# what a parameter's name contains: what stands there instead, the parameters fused, along which
# dimension
_FUSED = {
    "self_attn.q_proj.": ("self_attn.qkv_proj.", ("q_proj", "k_proj", "v_proj"), 0),
    "mlp.gate_proj.": ("mlp.gate_up_proj.", ("gate_proj", "up_proj"), 0),
    ".shared_expert.gate_proj.": (".shared_expert.gate_up_proj.", ("gate_proj", "up_proj"), 0),
    ".experts.gate_proj": (".experts.w13_weight", ("gate_proj", "up_proj"), 1),
    ".experts.down_proj": (".experts.w2_weight", ("down_proj",), 0),
}


def _fused(model: ModelState) -> Iterator[Tensor]:
    """Yield the tensors under vLLM's names."""
    done: set[str] = set()
    for parameter in model.parameters:
        name = parameter.name
        if name in done:
            continue
        tensor = Tensor(name, (name,))
        if (key := next((key for key in _FUSED if key in name), None)) is not None:
            instead, parts, dim = _FUSED[key]
            first = parts[0]
            tensor = Tensor(
                name.replace(key, instead), tuple(name.replace(first, part) for part in parts), dim
            )
        done.update(tensor.parts)
        yield tensor


# --- placements
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """The ``box`` of ``parameter`` that is at offset ``at`` of a local tensor."""

    parameter: str
    box: Box
    at: tuple[int, ...]


@dataclass(frozen=True)
class LocalTensor:
    """A tensor as one rank holds it: ``shape`` is the local one, and its pieces fill it without
    gaps or overlaps."""

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

    ranks: tuple[tuple[LocalTensor, ...], ...]

    @property
    def world(self) -> int:
        return len(self.ranks)

    def nbytes(self, rank: int) -> int:
        """Return the number of bytes of the tensors of ``rank``; 0 for a rank outside the
        layout."""
        return sum(tensor.nbytes for tensor in self.ranks[rank]) if rank < self.world else 0


def place(
    model: ModelState, layout: Layout, *, names: Names = "hf", dtype: torch.dtype | None = None
) -> Placement:
    """Return what each rank of ``layout`` holds of ``model``, in an engine's tensors.

    ``dtype`` None keeps the parameters' own. Raises :class:`LayoutError` when the layout does not
    fit the model.
    """
    _check(model, layout)
    tensors = model.named(names)
    # ranks with the same places along them hold the same
    by_axes: dict[tuple[int, ...], tuple[LocalTensor, ...]] = {}
    ranks = []
    for rank in range(layout.world):
        at = layout.coordinates(rank)
        axes = (at.stage, at.shard, at.tp, at.ep, at.etp, at.expert_shard)
        if axes not in by_axes:
            tensors_of_rank = (_local(model, at, tensor, dtype) for tensor in tensors)
            by_axes[axes] = tuple(local for local in tensors_of_rank if local is not None)
        ranks.append(by_axes[axes])
    return Placement(tuple(ranks))


def train_placement(model: ModelState, layout: Layout) -> Placement:
    """Return what each rank of the train engine holds of ``model``: layers are split over tp and
    then over data-parallel ranks, the other parameters over all ranks of their pipeline stage. With
    tp, not of a tensor that :func:`fused` names."""
    layout = replace(layout, etp=1)
    layers = place(model, layout)
    rest = place(model, replace(layout, dp_shard=layout.dp_shard * layout.tp, tp=1, ep=1))
    in_layers = {
        tensor.name for tensor in model.tensors if model.by_name[tensor.parts[0]].layer is not None
    }
    ranks = []
    for of_layers, others in zip(layers.ranks, rest.ranks, strict=True):
        pairs = zip(of_layers, others, strict=True)
        ranks.append(tuple(layer if layer.name in in_layers else other for layer, other in pairs))
    return Placement(tuple(ranks))


def fused(model: ModelState) -> str:
    """Return the first tensor of a layer that has several matrices in one, or "".

    Tensor-parallel ranks cut its rows, not each matrix; experts they do not cut.
    """
    firsts = (
        (tensor.name, model.by_name[tensor.parts[0]])
        for tensor in model.tensors
        if len(tensor.parts) > 1
    )
    return next(
        (name for name, first in firsts if first.layer is not None and not first.expert), ""
    )


def check_stages(model: ModelState, layout: Layout) -> None:
    """Raise :class:`LayoutError` for more virtual stages than layers."""
    if layout.virtual_stages > model.layers:
        stages = f"{layout.pp} stages" + (f" of {layout.vpp} parts" if layout.vpp > 1 else "")
        problem = f"{stages} are more than the {model.layers} layers"
        raise LayoutError("pp", problem, f"use pp <= {model.layers // layout.vpp}")


def _check(model: ModelState, layout: Layout) -> None:
    check_stages(model, layout)
    experts = max((p.shape[0] for p in model.parameters if p.expert), default=0)
    if layout.ep > 1 and layout.ep > experts:
        have = f"{experts} experts" if experts else "no experts"
        problem = f"{layout.ep} for a model with {have}"
        raise LayoutError("ep", problem, f"use ep <= {max(experts, 1)}")
    if layout.tp > 1:
        for parameter in model.parameters:
            if not parameter.rule_known:
                cut = f"{parameter.name} {list(parameter.shape)}"
                raise LayoutError(
                    "tp",
                    f"{layout.tp}, but how tensor parallelism cuts {cut} is not known",
                    "use tp=1, or add its rule to stages/parallel/placement.py",
                )


@lru_cache(maxsize=64)
def stage_layers(costs: tuple[float, ...], stages: int) -> tuple[range, ...]:
    """Return the layers of each virtual stage, in order and at least one: those with the least sum
    of the squares of the stages' costs, so that none takes much longer than the others. ``costs``:
    of each layer.

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
                (
                    (best[at][0] + (before[end] - before[at]) ** 2, (*best[at][1], at))
                    for at in range(count - 1, end)
                ),
                default=(inf, ()),
            )
            for end in range(len(before))
        ]
    firsts = (*best[-1][1], len(costs))
    return tuple(range(*pair) for pair in pairwise(firsts))


def _stages(model: ModelState, layout: Layout, parameter: Parameter) -> set[int]:
    """Return the pipeline stages that hold ``parameter``: the first for embeddings, the last for
    what follows the layers. Both hold tied embeddings."""
    if parameter.layer is not None:
        parts = stage_layers(model.costs, layout.virtual_stages)
        return {layout.stage_of(at) for at, layers in enumerate(parts) if parameter.layer in layers}
    if any(source == parameter.name for _, source in model.tied):
        return {0, layout.last_stage}
    return {0} if "embed" in parameter.name else {layout.last_stage}


def _local(
    model: ModelState, at: RankCoordinates, tensor: Tensor, dtype: torch.dtype | None
) -> LocalTensor | None:
    layout = at.layout
    parts = [model.by_name[name] for name in tensor.parts]
    if at.stage not in _stages(model, layout, parts[0]):
        return None
    pieces: list[Piece] = []
    offset = 0  # along tensor.dim
    for part in parts:
        box = _cut(model, at, part)
        pieces.append(
            Piece(
                part.name, box, tuple(offset if dim == tensor.dim else 0 for dim in range(len(box)))
            )
        )
        offset += box[tensor.dim][1] - box[tensor.dim][0] if box else 0
    shape = [end - start for start, end in pieces[0].box]
    if shape:
        shape[tensor.dim] = offset
    is_expert = parts[0].expert
    shards = layout.expert_shard if is_expert else layout.fsdp
    if shape and shards > 1:
        rows = chunk(shape[0], shards, at.expert_shard if is_expert else at.shard)
        pieces = list(_shard(pieces, rows))
        shape[0] = rows[1] - rows[0]
    filled_pieces = tuple(piece for piece in pieces if volume(piece.box))
    return LocalTensor(tensor.name, tuple(shape), dtype or parts[0].dtype, filled_pieces)


def _cut(model: ModelState, at: RankCoordinates, parameter: Parameter) -> Box:
    """Return the box that tensor and expert parallelism leave of ``parameter``."""
    layout = at.layout
    box = list(whole(parameter.shape))
    tp, rank = (layout.expert_tp, at.etp) if parameter.expert else (layout.tp, at.tp)
    if parameter.expert:
        box[0] = chunk(parameter.shape[0], layout.ep, at.ep)
    if (split := parameter.split) is not None and tp > 1:
        if split.rule == "chunk":
            units = chunk(parameter.shape[split.dim] // split.unit, tp, rank)
        else:
            query, key_value = head_ranges(model.heads, model.kv_heads, tp, rank)
            units = query if split.rule == "query" else key_value
        box[split.dim] = (units[0] * split.unit, units[1] * split.unit)
    return tuple(box)


def _shard(pieces: Iterable[Piece], rows: Range) -> Iterator[Piece]:
    """Yield the pieces within ``rows`` of the local tensor's dimension 0."""
    for piece in pieces:
        (start, end), first = piece.box[0], piece.at[0]
        low = max(rows[0], first)
        high = min(rows[1], first + end - start)
        if low < high:
            box = ((start + low - first, start + high - first), *piece.box[1:])
            yield Piece(piece.parameter, box, (low - rows[0], *piece.at[1:]))
