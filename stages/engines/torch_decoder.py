"""A Hugging Face causal LM as a decoder of one changing batch: each prompt's KV once, each row's own KV apart.

    prefill([prompt, …]) ─▶ Prompt handles, logits of the first token      (packed: no padding in the linear layers)
    join(prompt)         ─▶ a new last row that shares the prompt's KV (and may bring KV of tokens that it has already)
    decode([token, …])   ─▶ logits of every row's next token               (all rows in one forward)
    leave(row)           ─▶ the last row takes its place; a prompt goes with its last holder

Attention of a row is one softmax over two parts: [prompt KV, shared by the group | own KV]. The prompt's part is one
matmul per prompt for all of its rows, so its keys are read once per group and never copied. The model's own modules do
everything else, through transformers' attention interface, so any decoder that uses that interface is served; the
constructor compares a short sequence with the model's plain forward and refuses a model that does not agree.

On CPU the weights of linear layers are kept in oneDNN's blocked layout (measured on 2 cores, 135M parameters, float32:
a step of 64 rows takes 92 ms instead of 140 in linear layers). Weights are replaced by preparing a second set beside
the running one and exchanging references.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stages.engines.protocols import WeightMismatch

ATTENTION = "asyncdock_two_part"
PACK_ROWS = 64  # the layout that oneDNN chooses for so many rows is as fast as any from 1 row to 256 (measured)
WeightSet = list[tuple[nn.Module, str, torch.Tensor]]


@dataclass(eq=False)
class Prompt:
    """A prefilled prompt: its place in the pool, its tokens, and how many hold it."""

    slot: int
    length: int
    holders: int = 1


@dataclass(eq=False)
class Row:
    """A response in the batch: the prompt it shares and how many of its own tokens have KV."""

    prompt: Prompt
    length: int = 0


@dataclass(frozen=True)
class _Prefill:
    """Where the packed tokens of one prefill belong: ``padded`` int64 [g, P] indexes the packed tokens, ``packed``
    int64 [T] indexes the flattened padded ones, ``first`` is the pool slot of the first of the g prompts."""

    padded: torch.Tensor
    packed: torch.Tensor
    first: int


@dataclass(frozen=True)
class _Sharing:
    """Which rows share which prompt: ``members`` int64 [g, n] rows of each prompt (padded with 0), ``place`` int64 [R]
    indexes the flattened members, ``prompt_lengths`` int64 [R], ``longest`` of all prompts."""

    members: torch.Tensor
    place: torch.Tensor
    prompt_lengths: torch.Tensor
    longest: int


@dataclass(frozen=True)
class _Decode:
    """One decode step: ``rows`` and ``own`` int64 [R] say where each new KV goes, ``bias`` [R, 1, 1, P + L] masks."""

    sharing: _Sharing
    rows: torch.Tensor
    own: torch.Tensor
    bias: torch.Tensor
    longest: int


class PackedLinear(nn.Module):
    """A linear layer whose weight is kept in oneDNN's blocked layout."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.inputs = linear.in_features
        self.bias = linear.bias
        self.packed = self.pack(linear.weight.detach())

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(hidden, self.packed, self.bias, "none", [], "")


class GatedPackedMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))`` of packed layers, with the activation and the product inside the matmuls."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.gate: Any = mlp.gate_proj
        self.up: Any = mlp.up_proj
        self.down: Any = mlp.down_proj

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        linear = torch.ops.mkldnn._linear_pointwise
        gate = linear(hidden, self.gate.packed, self.gate.bias, "swish", [], "")
        return self.down(linear.binary(hidden, gate, self.up.packed, self.up.bias, "mul"))

    @classmethod
    def instead_of(cls, mlp: nn.Module) -> GatedPackedMLP | None:
        """A faster ``mlp``, or None when ``mlp`` is anything else than such a product of packed layers."""
        if not all(
            isinstance(getattr(mlp, name, None), PackedLinear) for name in ("gate_proj", "up_proj", "down_proj")
        ):
            return None
        fused, gate = cls(mlp), mlp.gate_proj
        probe = torch.linspace(-1, 1, 3 * gate.inputs, dtype=gate.packed.dtype).view(3, -1)  # type: ignore
        expected = mlp(probe)
        close = torch.finfo(expected.dtype).eps ** 0.5 * max(1.0, float(expected.abs().max()))
        return fused if bool((fused(probe) - expected).abs().max() <= close) else None


class TorchDecoder:
    """Owns ``model`` (a transformers ``PreTrainedModel``, changed in place) and the KV of the batch it decodes.

    All calls but :meth:`check` and :meth:`prepare` come from one thread. Raises ``ValueError`` for a model whose
    attention it cannot stand in for.
    """

    def __init__(self, model: Any, device: torch.device) -> None:
        self.model = model.to(device).eval().requires_grad_(False)
        self.device = device
        self.dtype: torch.dtype = model.dtype
        self.vocabulary: int = model.get_input_embeddings().weight.shape[0]
        self.max_context: int = getattr(model.config, "max_position_embeddings", 2**31)
        self.rows: list[Row] = []
        self.prompts: list[Prompt] = []
        self._prompt_kv: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # layer: K, V [slots, KV heads, room, D]
        self._row_kv: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # layer: K, V [slots, KV heads, room, D]
        self._sharing: _Sharing | None = None
        self._step: _Prefill | _Decode | None = None
        self._refuse_unsteady_rope()
        self._shapes = {name: (p.shape, p.dtype) for name, p in model.named_parameters()}
        with torch.inference_mode():
            probe = torch.arange(8, device=device) * 7919 % self.vocabulary
            expected = model(input_ids=probe[None], use_cache=False).logits[0].float()
            self._take_over()
            self._compare(probe, expected)

    # -- the batch -------------------------------------------------------------------------------------------------

    def prefill(self, prompts: Sequence[torch.Tensor]) -> tuple[list[Prompt], torch.Tensor]:
        """Compute the KV of ``prompts`` (each int64 [P]) in one forward. Returns their handles, each held once by the
        caller, and the float32 [g, V] logits of the first response token."""
        lengths = torch.tensor([len(ids) for ids in prompts])
        ends = lengths.cumsum(0)
        longest = int(lengths.max())
        columns = torch.arange(longest)
        padded = (ends - lengths)[:, None] + torch.minimum(columns[None], lengths[:, None] - 1)
        packed = (columns[None] < lengths[:, None]).flatten().nonzero()[:, 0]
        positions = columns.expand(len(prompts), -1).flatten()[packed]
        self._step = _Prefill(self._put(padded), self._put(packed), first=len(self.prompts))
        logits = self._forward(torch.cat([ids.cpu() for ids in prompts]), positions, self._put(ends - 1))
        handles = [Prompt(len(self.prompts) + i, int(length)) for i, length in enumerate(lengths)]
        self.prompts += handles
        self._sharing = None
        return handles, logits

    def score(self, prompt_ids: torch.Tensor, response_ids: torch.Tensor) -> torch.Tensor:
        """float32 [T, V] logits that predict each of ``response_ids`` [T] after ``prompt_ids``. Leaves nothing behind."""
        ids = torch.cat([prompt_ids, response_ids[:-1]]).cpu()
        positions = torch.arange(len(ids))
        self._step = _Prefill(self._put(positions[None]), self._put(positions), first=len(self.prompts))
        return self._forward(ids, positions, self._put(positions[len(prompt_ids) - 1 :]))

    def join(self, prompt: Prompt, begun: Prompt | None = None) -> None:
        """Append a row that continues ``prompt``. ``begun`` was prefilled with the prompt and the tokens that the row has
        already: their KV becomes the row's own, and the caller's hold on ``begun`` ends."""
        prompt.holders += 1
        self.rows.append(Row(prompt))
        self._sharing = None
        if begun is None:
            return
        row, tokens = self.rows[-1], slice(prompt.length, begun.length)
        row.length = begun.length - prompt.length
        for layer, pool in self._prompt_kv.items():
            k, v = (kv[None, begun.slot, :, tokens] for kv in pool)  # [1, KV heads, T, D]
            keys, values = self._room(self._row_kv, layer, len(self.rows), row.length, k, v)
            keys[len(self.rows) - 1, :, : row.length], values[len(self.rows) - 1, :, : row.length] = k[0], v[0]
        self.release(begun)

    def leave(self, row: int) -> None:
        """Drop row number ``row``; the last row takes its number."""
        gone, last = self.rows[row], self.rows.pop()
        if gone is not last:
            self.rows[row] = last
            # A row that has only joined has no KV yet, and perhaps no room for it either.
            for keys, values in self._row_kv.values() if last.length else ():
                for kv in (keys, values):
                    kv[row, :, : last.length] = kv[len(self.rows), :, : last.length]
        self._sharing = None
        self.release(gone.prompt)

    def release(self, prompt: Prompt) -> None:
        """Give up one hold on ``prompt``; with the last one its room is free and the last prompt takes it."""
        prompt.holders -= 1
        if prompt.holders:
            return
        last = self.prompts.pop()
        if prompt is not last:
            for keys, values in self._prompt_kv.values():
                for kv in (keys, values):
                    kv[prompt.slot, :, : last.length] = kv[last.slot, :, : last.length]
            self.prompts[prompt.slot] = last
            last.slot = prompt.slot
        self._sharing = None

    def decode(self, tokens: Sequence[int]) -> torch.Tensor:
        """Feed each row its newest token; float32 [R, V] logits of the next one."""
        sharing = self._sharing = self._sharing or self._who_shares()
        own = torch.tensor([row.length for row in self.rows])
        longest = int(own.max()) + 1
        prompt_part = torch.arange(sharing.longest)[None] >= sharing.prompt_lengths[:, None]
        own_part = torch.arange(longest)[None] > own[:, None]
        bias = torch.zeros(len(self.rows), sharing.longest + longest)
        bias.masked_fill_(torch.cat([prompt_part, own_part], 1), -torch.inf)
        rows = torch.arange(len(self.rows))
        self._step = _Decode(sharing, self._put(rows), self._put(own), self._put(bias)[:, None, None], longest)
        logits = self._forward(torch.tensor(tokens), sharing.prompt_lengths + own, self._put(rows))
        for row in self.rows:
            row.length += 1
        return logits

    def clear(self) -> None:
        """Forget every row and prompt and free their KV."""
        self.rows, self.prompts, self._prompt_kv, self._row_kv, self._sharing = [], [], {}, {}, None

    # -- weights ---------------------------------------------------------------------------------------------------

    def check(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Raise ``WeightMismatch`` unless ``weights`` are the model's parameters in name, shape and dtype."""
        missing, unknown = self._shapes.keys() - weights.keys(), weights.keys() - self._shapes.keys()
        problems = [f"{name}: missing" for name in sorted(missing)] + [f"{name}: unknown" for name in sorted(unknown)]
        for name, (shape, dtype) in self._shapes.items():
            given = weights.get(name)
            if given is not None and given.shape != shape:
                problems.append(f"{name}: shape {tuple(given.shape)}, the model has {tuple(shape)}")
            elif given is not None and given.dtype != dtype:
                problems.append(f"{name}: dtype {given.dtype}, the model has {dtype}")
        if problems:
            more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
            raise WeightMismatch(
                "; ".join(problems[:5]) + more + "; offer the parameters of the same model, tied ones once"
            )

    @torch.no_grad()
    def prepare(self, weights: Mapping[str, torch.Tensor]) -> WeightSet:
        """A second set of weights on the device, in the layout the modules use, while the first goes on running."""
        prepared: WeightSet = []
        for name, places in self._places.items():
            for module, attribute in places:
                if isinstance(module, PackedLinear) and attribute == "weight":
                    prepared.append((module, attribute, module.pack(weights[name].detach().to(self.device))))
                else:
                    prepared.append((module, attribute, weights[name].detach().to(self.device, copy=True)))
        return prepared

    def install(self, prepared: WeightSet) -> list[torch.Tensor]:
        """Use ``prepared`` from the next forward on; KV already computed stays. Returns what was replaced: giving back
        that much memory takes longer than all the rest, and is better done elsewhere."""
        replaced = []
        for module, attribute, tensor in prepared:
            if isinstance(module, PackedLinear) and attribute == "weight":
                replaced.append(module.packed)
                module.packed = tensor
            else:
                parameter = getattr(module, attribute)
                replaced.append(parameter.data)
                parameter.data = tensor
        return replaced

    # -- inside ----------------------------------------------------------------------------------------------------

    def _put(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device)

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        out = self.model(
            input_ids=self._put(ids)[None],
            position_ids=self._put(positions)[None],
            use_cache=False,
            logits_to_keep=keep,
            decoder=self,
        )
        return out.logits[0].float()

    def _who_shares(self) -> _Sharing:
        members: list[list[int]] = [[] for _ in self.prompts]
        for number, row in enumerate(self.rows):
            members[row.prompt.slot].append(number)
        most = max(len(rows) for rows in members)
        padded = torch.tensor([rows + [0] * (most - len(rows)) for rows in members])
        place = torch.empty(len(self.rows), dtype=torch.int64)
        for slot, rows in enumerate(members):
            for i, number in enumerate(rows):
                place[number] = slot * most + i
        lengths = torch.tensor([row.prompt.length for row in self.rows])
        longest = max(prompt.length for prompt in self.prompts)
        return _Sharing(self._put(padded), self._put(place), lengths, longest)

    def _room(
        self,
        pool: dict[int, tuple[torch.Tensor, torch.Tensor]],
        layer: int,
        slots: int,
        tokens: int,
        kv: torch.Tensor,
        v: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's K and V with room for ``slots`` × ``tokens``; grown by copying. Zeros, because a masked place is
        multiplied by probability 0 and must be finite."""
        have = pool.get(layer)
        if have is not None and have[0].shape[0] >= slots and have[0].shape[2] >= tokens:
            return have
        old_slots, old_tokens = (have[0].shape[0], have[0].shape[2]) if have else (0, 0)
        slots, tokens = _grow(slots, old_slots, 8), _grow(tokens, old_tokens, 32)
        grown = (
            kv.new_zeros(slots, kv.shape[1], tokens, kv.shape[-1]),
            v.new_zeros(slots, v.shape[1], tokens, v.shape[-1]),
        )
        if have is not None:
            for new, old in zip(grown, have, strict=True):
                new[:old_slots, :, :old_tokens] = old
        pool[layer] = grown
        return grown

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """Attention of the packed tokens of this step: ``query`` [1, H, T, D], ``key`` and ``value`` [1, KV heads, T,
        D]; the result is [1, T, H, D of the values]. Stores the keys and values."""
        if isinstance(self._step, _Prefill):
            return self._attend_prefill(self._step, layer, query, key, value, scaling)
        assert self._step is not None
        return self._attend_decode(self._step, layer, query, key, value, scaling)

    def _attend_prefill(
        self, step: _Prefill, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        g, longest = step.padded.shape
        q, k, v = (x[0][:, step.padded].transpose(0, 1) for x in (query, key, value))  # [g, heads, P, D]
        keys, values = self._room(self._prompt_kv, layer, step.first + g, longest, key, value)
        keys[step.first : step.first + g, :, :longest] = k
        values[step.first : step.first + g, :, :longest] = v
        # Padding stands at the right, where a causal query of a real token never looks.
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)[step.packed][None]

    def _attend_decode(
        self, step: _Decode, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        members, place = step.sharing.members.flatten(), step.sharing.place
        (g, n), shared, own, rows = step.sharing.members.shape, step.sharing.longest, step.longest, len(place)
        heads, width = key.shape[1], query.shape[1] // key.shape[1]
        keys, values = self._room(self._row_kv, layer, rows, own, key, value)
        keys[step.rows, :, step.own] = key[0].transpose(0, 1)
        values[step.rows, :, step.own] = value[0].transpose(0, 1)
        prompt_keys, prompt_values = self._prompt_kv[layer]

        def by_prompt(x: torch.Tensor) -> torch.Tensor:  # [R, heads, width, X] -> [g, heads, n * width, X]
            return (
                x.index_select(0, members).view(g, n, heads, width, -1).transpose(1, 2).reshape(g, heads, n * width, -1)
            )

        def by_row(x: torch.Tensor) -> torch.Tensor:  # and back
            return x.view(g, heads, n, width, -1).transpose(1, 2).flatten(0, 1).index_select(0, place)

        q = query[0].transpose(0, 1).reshape(rows, heads, width, -1) * scaling
        of_prompt = by_row(by_prompt(q) @ prompt_keys[:g, :, :shared].transpose(-1, -2))
        of_own = q @ keys[:rows, :, :own].transpose(-1, -2)
        weights = torch.cat([of_prompt, of_own], -1).float().add_(step.bias).softmax(-1).to(q.dtype)
        out = weights[..., shared:] @ values[:rows, :, :own]
        out = out + by_row(by_prompt(weights[..., :shared]) @ prompt_values[:g, :, :shared])
        return out.flatten(1, 2)[None]

    def _take_over(self) -> None:
        """Put the two-part attention into the model, and its linear layers into the packed layout on CPU."""
        from transformers import AttentionInterface

        AttentionInterface.register(ATTENTION, _two_part_attention)
        self.model.set_attn_implementation(ATTENTION)
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        self._places: dict[str, list[tuple[nn.Module, str]]] = {name: [] for name in self._shapes}
        pack = self.device.type == "cpu" and torch.backends.mkldnn.is_available()
        for module_name, module in list(self.model.named_modules()):
            place = module
            if pack and type(module) is nn.Linear:
                place = PackedLinear(module)
                self._replace(module_name, place)
            for attribute, parameter in module.named_parameters(recurse=False):
                self._places[names[id(parameter)]].append((place, attribute))

        for module_name, module in list(self.model.named_modules()):
            fused = GatedPackedMLP.instead_of(module)
            if fused is not None:
                self._replace(module_name, fused)

    def _replace(self, name: str, module: nn.Module) -> None:
        parent, _, attribute = name.rpartition(".")
        setattr(self.model.get_submodule(parent), attribute, module)

    def _refuse_unsteady_rope(self) -> None:
        rope = getattr(self.model.config, "rope_parameters", None) or {}
        kind = rope.get("rope_type", "default")
        if kind in ("dynamic", "longrope"):
            raise ValueError(
                f"model: rope_type {kind!r} changes its angles with the longest sequence of the batch, so a row would "
                "depend on its company; use a model with a fixed rope type"
            )

    def _compare(self, probe: torch.Tensor, expected: torch.Tensor) -> None:
        """Prefill part of ``probe``, decode the rest in two rows, compare with the plain forward's logits [8, V]."""
        kind = type(self.model).__name__
        try:
            (prompt,), first = self.prefill([probe[:5]])
            self.join(prompt)
            self.join(prompt)
            got = torch.cat([first, *(self.decode([int(token)] * 2) for token in probe[5:])])
        except Exception as error:
            raise ValueError(
                f"model: {kind} does not work through transformers' attention interface: {error!r}"
            ) from error
        self.clear()
        wanted = expected[[4, 5, 5, 6, 6, 7, 7]]
        gap = float((got - wanted).abs().max())
        limit = torch.finfo(self.dtype).eps ** 0.5 * max(1.0, float(wanted.abs().max()))
        if not gap <= limit:
            raise ValueError(
                f"model: two-part attention gives {kind} logits that are off by {gap:.2g} (limit {limit:.2g})"
            )


def _grow(need: int, have: int, step: int) -> int:
    """Room for ``need``: by half at least, so that growing token by token copies little."""
    return have if need <= have else max(-(-need // step) * step, have + have // 2)


def _two_part_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface, served by the :class:`TorchDecoder` whose forward this is."""
    decoder: TorchDecoder = options["decoder"]
    for name in ("softcap", "s_aux"):
        if options.get(name) is not None:
            raise NotImplementedError(f"attention option {name}")
    if sliding_window is not None:  # inside the window it is full attention: longer requests are refused
        decoder.max_context = min(decoder.max_context, sliding_window)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return decoder.attend(module.layer_idx, query, key, value, scale), None  # type: ignore[arg-type]
