"""A Hugging Face causal LM as a decoder of one changing batch: each prompt's KV once, each row's own KV apart.

    prefill([prompt, …]) ─▶ Prompt handles, logits of the first token      (packed: no padding in the linear layers)
    join(prompt)         ─▶ a new last row that shares the prompt's KV (and may bring KV of tokens that it has already)
    decode([token, …])   ─▶ logits of every row's next token               (all rows in one forward)
    leave(row)           ─▶ the last row takes its place; a prompt goes with its last holder

Attention of a row is one softmax over two parts: [prompt KV, shared by the group | own KV]. The prompt's part is one
matmul per prompt for all of its rows, so its keys are read once per group and never copied. Everything else is done by
:class:`LlamaForward` for a model of that kind, and by the model's own modules, through transformers' attention
interface, for any other. The constructor compares a short sequence with the model's plain forward: what does not agree
is not used, and a model that agrees in neither way is refused.

On CPU the weights of linear layers are kept in oneDNN's blocked layout (measured on 2 cores, 135M parameters, float32:
a step of 64 rows takes 92 ms instead of 140 in linear layers). Weights are replaced by preparing a second set beside
the running one and exchanging references; on an accelerator they are copied in place, where recorded steps read them.

Static steps (on an accelerator): a decode step is padded to one of few sizes, its inputs are copied into tensors that
stay where they are, and the device replays a recording of it, so that a step costs the host a handful of calls:

    rows 13, prompts 3 of ≤ 5 rows, prompt ≤ 45, own ≤ 20 tokens ─▶ size (16, 4, 8, 64, 64) ─▶ its recording, or record
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stages import device as devices
from stages.engines.protocols import WeightMismatch
from stages.engines.torch.head import use_float32
from stages.engines.torch.llama_forward import LlamaForward, PackedLinear, own_places

ATTENTION = "asyncdock_two_part"
STATIC_ROWS, STATIC_TOKENS = 8, 64  # the least sizes of a static step; it doubles from there
WeightSet = list[tuple[Any, str, torch.Tensor]]  # holder, attribute, what it is to be


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
    indexes the flattened members, ``prompt_lengths`` int64 [R], ``longest`` room for the longest prompt. ``straight``:
    members are 0, 1, 2, …, so nothing need be gathered."""

    members: torch.Tensor
    place: torch.Tensor
    prompt_lengths: torch.Tensor
    longest: int
    straight: bool


@dataclass(frozen=True)
class _Decode:
    """One decode step: ``rows`` and ``own`` int64 [R] say where each new KV goes, ``bias`` [R, 1, 1, P + L] masks,
    ``longest`` is L."""

    sharing: _Sharing
    rows: torch.Tensor
    own: torch.Tensor
    bias: torch.Tensor
    longest: int


@dataclass(frozen=True)
class _Recorded:
    """A static step: its ``inputs`` (tokens, own lengths, sharing) are copied into, ``replay`` fills ``logits``."""

    inputs: tuple[torch.Tensor, ...]
    replay: Callable[[], None]
    logits: torch.Tensor


class TorchDecoder:
    """Owns ``model`` (a transformers ``PreTrainedModel``, changed in place) and the KV of the batch it decodes.

    All calls but :meth:`check` and :meth:`prepare` come from one thread. Raises ``ValueError`` for a model whose
    attention it cannot stand in for. ``static``: decode steps come in few sizes and are recorded where the device can
    (None: on an accelerator). ``packed``: weights are copied into oneDNN's layout (None: on a CPU that has it).
    """

    def __init__(
        self, model: Any, device: torch.device, static: bool | None = None, packed: bool | None = None
    ) -> None:
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
        self._static = device.type != "cpu" if static is None else static
        can_pack = device.type == "cpu" and torch.backends.mkldnn.is_available()
        self._packed = can_pack if packed is None else packed
        self._recorded: dict[tuple[int, ...], _Recorded] = {}
        self._step: _Prefill | _Decode | None = None
        self._refuse_unsteady_rope()
        self._shapes = {name: (p.shape, p.dtype) for name, p in model.named_parameters()}
        with torch.inference_mode():
            probe = torch.arange(8, device=device) * 7919 % self.vocabulary
            expected = model(input_ids=probe[None], use_cache=False).logits[0].float()
            self._take_over(probe, expected)

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

    def decode(self, tokens: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """Feed each row its newest token (int64 [R], may be on the device); float32 [R, V] logits of the next one,
        to be used before the next call, which may write them anew."""
        count = len(self.rows)
        rows, longest = count, max(row.length for row in self.rows) + 1
        if self._static:
            rows, longest = _size(rows, STATIC_ROWS), _size(longest, STATIC_TOKENS)
        if self._sharing is None or len(self._sharing.place) != rows:
            self._sharing = self._who_shares(rows)
        own = self._put(torch.tensor([row.length for row in self.rows] + [0] * (rows - count)))
        newest = torch.zeros(rows, dtype=torch.int64, device=self.device)
        newest[:count] = self._put(torch.as_tensor(tokens))
        step = self._decode_recorded if self._static else self._decode_step
        logits = step(newest, own, self._sharing, longest)[:count]
        for row in self.rows:
            row.length += 1
        return logits

    def _decode_step(self, tokens: torch.Tensor, own: torch.Tensor, sharing: _Sharing, longest: int) -> torch.Tensor:
        """Enqueues a whole step without asking the device anything; float32 [R, V]."""
        columns = torch.arange(max(sharing.longest, longest), device=self.device)[None]
        prompt_part = columns[:, : sharing.longest] >= sharing.prompt_lengths[:, None]
        own_part = columns[:, :longest] > own[:, None]
        hidden = torch.cat([prompt_part, own_part], 1)
        bias = torch.zeros(hidden.shape, device=self.device).masked_fill_(hidden, -torch.inf)
        rows = torch.arange(len(tokens), device=self.device)
        self._step = _Decode(sharing, rows, own, bias[:, None, None], longest)
        return self._forward(tokens, sharing.prompt_lengths + own, None)

    def _decode_recorded(
        self, tokens: torch.Tensor, own: torch.Tensor, sharing: _Sharing, longest: int
    ) -> torch.Tensor:
        inputs = (tokens, own, sharing.members, sharing.place, sharing.prompt_lengths)
        size = (*tokens.shape, *sharing.members.shape, sharing.longest, longest)
        recorded = self._recorded.get(size)
        if recorded is None:
            fixed = tuple(tensor.clone() for tensor in inputs)
            tokens, own, members, place, lengths = fixed
            sharing = _Sharing(members, place, lengths, sharing.longest, straight=False)
            self._decode_step(tokens, own, sharing, longest)  # makes room and chooses kernels, which no recording may
            replay, logits = devices.record(self.device, lambda: self._decode_step(tokens, own, sharing, longest))
            recorded = self._recorded[size] = _Recorded(fixed, replay, logits)
        for fixed_tensor, tensor in zip(recorded.inputs, inputs, strict=True):
            fixed_tensor.copy_(tensor)
        recorded.replay()
        return recorded.logits

    def clear(self) -> None:
        """Forget every row and prompt and free their KV."""
        self.rows, self.prompts, self._prompt_kv, self._row_kv, self._sharing = [], [], {}, {}, None
        self._recorded, self._step = {}, None

    def cache_bytes(self) -> int:
        """Bytes of the keys and values that it has room for."""
        pools = (*self._prompt_kv.values(), *self._row_kv.values())
        return sum(kv.untyped_storage().nbytes() for pair in pools for kv in pair)

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

    def tensors(self) -> dict[str, torch.Tensor]:
        """The very weights that are computed with, which may be written to between two calls: by Hugging Face's names, and
        where several are one tensor by vLLM's (:attr:`fused`). Raises ValueError when they are packed."""
        if self._packed:
            raise ValueError("packed: the weights are copies in oneDNN's layout; make the decoder with packed=False")
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        found, parts = dict[str, torch.Tensor](), set[str]()
        for linear in self._llama.joined() if self._llama else ():
            for kind, whole in (("weight", linear.weight), ("bias", linear.bias)):
                if whole is not None:
                    of = [names[id(getattr(layer, kind))] for layer in linear.layers]
                    found[of[0].replace(".q_proj.", ".qkv_proj.").replace(".gate_proj.", ".gate_up_proj.")] = whole
                    parts.update(of)
        return found | {n: p.detach() for n, p in self.model.named_parameters() if n not in parts}

    @property
    def fused(self) -> bool:
        """Whether q, k and v, and gate and up, are one tensor each."""
        return self._llama is not None

    @torch.no_grad()
    def prepare(self, weights: Mapping[str, torch.Tensor]) -> WeightSet:
        """A second set of weights on the device, in the layout that is computed with, while the first goes on running."""
        return [
            (place.holder, place.attribute, place.build([weights[n].detach().to(self.device) for n in place.names]))
            for place in self._places
        ]

    def install(self, prepared: WeightSet) -> list[torch.Tensor]:
        """Use ``prepared`` from the next forward on; KV already computed stays. Returns what was replaced: giving back
        that much memory takes longer than all the rest, and is better done elsewhere."""
        replaced = []
        for holder, attribute, tensor in prepared:
            current = getattr(holder, attribute)
            if not self._packed:
                current.data.copy_(tensor)
                replaced.append(tensor)
            elif isinstance(current, nn.Parameter):
                replaced.append(current.data)
                current.data = tensor
            else:
                replaced.append(current)
                setattr(holder, attribute, tensor)
        return replaced

    # -- inside ----------------------------------------------------------------------------------------------------

    def _put(self, tensor: torch.Tensor) -> torch.Tensor:
        return devices.put(tensor, self.device)

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor | None) -> torch.Tensor:
        """float32 [K, V] logits of the tokens ``keep`` of ``ids`` [T] (None: of all)."""
        if self._llama is not None:
            return self._llama(self._put(ids), self._put(positions), keep, self.attend).float()
        out = self.model(
            input_ids=self._put(ids)[None],
            position_ids=self._put(positions)[None],
            use_cache=False,
            logits_to_keep=0 if keep is None else keep,
            decoder=self,
        )
        return out.logits[0].float()

    def _who_shares(self, count: int) -> _Sharing:
        """For the rows and, up to ``count``, rows that only fill a static step."""
        members: list[list[int]] = [[] for _ in self.prompts]
        for number, row in enumerate(self.rows):
            members[row.prompt.slot].append(number)
        prompts, most = len(members), max(len(rows) for rows in members)
        longest = max(prompt.length for prompt in self.prompts)
        if self._static:
            prompts, most, longest = _size(prompts, 1), _size(most, 1), _size(longest, STATIC_TOKENS)
        padded = torch.zeros(prompts, most, dtype=torch.int64)
        place = torch.zeros(count, dtype=torch.int64)
        lengths = torch.zeros(count, dtype=torch.int64)
        for slot, rows in enumerate(members):
            padded[slot, : len(rows)] = torch.tensor(rows, dtype=torch.int64)
            place[rows] = torch.arange(len(rows)) + slot * most
            lengths[rows] = self.prompts[slot].length
        straight = padded.numel() == count and torch.equal(padded.flatten(), torch.arange(count))
        return _Sharing(self._put(padded), self._put(place), self._put(lengths), longest, straight)

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
        self._recorded = {}  # they read the old ones
        return grown

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """Attention of the packed tokens of this step: ``query`` [T, H, D], ``key`` and ``value`` [T, KV heads, D]; the
        result is [T, H * D of the values]. Stores the keys and values."""
        if isinstance(self._step, _Prefill):
            return self._attend_prefill(self._step, layer, query, key, value, scaling)
        assert self._step is not None
        return self._attend_decode(self._step, layer, query, key, value, scaling)

    def _attend_prefill(
        self, step: _Prefill, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        g, longest = step.padded.shape
        q, k, v = (x[step.padded].transpose(1, 2) for x in (query, key, value))  # [g, heads, P, D]
        keys, values = self._room(self._prompt_kv, layer, step.first + g, longest, k, v)
        keys[step.first : step.first + g, :, :longest] = k
        values[step.first : step.first + g, :, :longest] = v
        # Padding stands at the right, where a causal query of a real token never looks.
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)[step.packed].flatten(1)

    def _attend_decode(
        self, step: _Decode, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        sharing = step.sharing
        members, place, straight = sharing.members.flatten(), sharing.place, sharing.straight
        (g, n), shared, own, rows = sharing.members.shape, sharing.longest, step.longest, len(place)
        heads, width = key.shape[1], query.shape[1] // key.shape[1]
        keys, values = self._room(self._row_kv, layer, rows, own, key[:, :, None], value[:, :, None])
        prompt_keys, prompt_values = self._room(self._prompt_kv, layer, g, shared, key[:, :, None], value[:, :, None])
        keys[step.rows, :, step.own] = key
        values[step.rows, :, step.own] = value

        def by_prompt(x: torch.Tensor) -> torch.Tensor:  # [R, heads, width, X] -> [g, heads, n * width, X]
            x = x if straight else x.index_select(0, members)
            return x.view(g, n, heads, width, -1).transpose(1, 2).reshape(g, heads, n * width, -1)

        def by_row(x: torch.Tensor) -> torch.Tensor:  # and back
            x = x.view(g, heads, n, width, -1).transpose(1, 2).flatten(0, 1)
            return x if straight else x.index_select(0, place)

        q = (query * scaling).view(rows, heads, width, -1)
        of_prompt = by_row(by_prompt(q) @ prompt_keys[:g, :, :shared].transpose(-1, -2))
        of_own = q @ keys[:rows, :, :own].transpose(-1, -2)
        weights = torch.cat([of_prompt, of_own], -1).float().add_(step.bias).softmax(-1).to(q.dtype)
        out = weights[..., shared:] @ values[:rows, :, :own]
        of_prompt = by_prompt(weights[..., :shared].contiguous()) @ prompt_values[:g, :, :shared]
        return out.add_(by_row(of_prompt)).flatten(1)

    def _take_over(self, probe: torch.Tensor, expected: torch.Tensor) -> None:
        """Put the two-part attention into the model, then the quickest forward that agrees with ``expected``."""
        from transformers import AttentionInterface

        AttentionInterface.register(ATTENTION, _two_part_attention)
        self.model.set_attn_implementation(ATTENTION)
        head = self.model.get_output_embeddings()
        if type(head) is nn.Linear and self.dtype != torch.float32:
            use_float32(head)
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        self._llama: LlamaForward | None = None
        self._compare(probe, expected)
        self._llama = LlamaForward.of(self.model, self._packed)
        if self._llama is not None and self._gap(probe, expected) > self._limit(expected):
            self._llama = None
        if not self._packed:
            self._places = own_places(self.model.modules(), names)
        elif self._llama is not None:
            self._places = self._llama.places(names)
            plain = {place.names[0] for place in self._places if isinstance(place.holder, nn.Embedding | nn.Linear)}
            for name, parameter in self.model.named_parameters():
                if parameter.dim() == 2 and name not in plain:
                    parameter.data = parameter.data.new_empty(0)  # the packed copy is the weight now
        else:
            self._pack_modules(names)
            self._compare(probe, expected)

    def _pack_modules(self, names: Mapping[int, str]) -> None:
        self._places, kept = [], []
        head = None if self.dtype == torch.float32 else self.model.get_output_embeddings()
        for module_name, module in list(self.model.named_modules()):
            if type(module) is nn.Linear and module is not head:
                place = PackedLinear(module)
                parent, _, attribute = module_name.rpartition(".")
                setattr(self.model.get_submodule(parent), attribute, place)
                self._places += place.places(names)
            else:
                kept.append(module)
        self._places += own_places(kept, names)

    def _refuse_unsteady_rope(self) -> None:
        rope = getattr(self.model.config, "rope_parameters", None) or {}
        kind = rope.get("rope_type", "default")
        if kind in ("dynamic", "longrope"):
            raise ValueError(
                f"model: rope_type {kind!r} changes its angles with the longest sequence of the batch, so a row would "
                "depend on its company; use a model with a fixed rope type"
            )

    def _compare(self, probe: torch.Tensor, expected: torch.Tensor) -> None:
        """Raises ``ValueError`` unless two-part attention gives the plain forward's logits ``expected`` [8, V]."""
        kind = type(self.model).__name__
        try:
            gap = self._gap(probe, expected)
        except Exception as error:
            raise ValueError(
                f"model: {kind} does not work through transformers' attention interface: {error!r}"
            ) from error
        limit = self._limit(expected)
        if not gap <= limit:
            raise ValueError(
                f"model: two-part attention gives {kind} logits that are off by {gap:.2g} (limit {limit:.2g})"
            )

    def _gap(self, probe: torch.Tensor, expected: torch.Tensor) -> float:
        """Prefill part of ``probe``, decode the rest in two rows; the largest difference to ``expected``."""
        (prompt,), first = self.prefill([probe[:5]])
        self.join(prompt)
        self.join(prompt)
        got = torch.cat([first, *(self.decode([int(token)] * 2).clone() for token in probe[5:])])
        self.clear()
        return float((got - expected[[4, 5, 5, 6, 6, 7, 7]]).abs().max())

    def _limit(self, expected: torch.Tensor) -> float:
        return torch.finfo(self.dtype).eps ** 0.5 * max(1.0, float(expected.abs().max()))


def _size(need: int, least: int) -> int:
    """The size of a static step for ``need``: ``least`` doubled as often as it takes."""
    while least < need:
        least *= 2
    return least


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
    packed_query, packed_key, packed_value = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, heads, D]
    out = decoder.attend(module.layer_idx, packed_query, packed_key, packed_value, scale)  # type: ignore[arg-type]
    return out.view(1, len(out), query.shape[1], -1), None
