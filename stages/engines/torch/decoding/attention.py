"""Attention with a KV cache in two parts: one prompt's keys and values shared by its rows, and each
row's own.

    prefill ─▶ prompt pool [slots, KV heads, P, D]  ──┐
    extend  ─┬▶ row pool   [slots, KV heads, L, D]  ──┴─▶ softmax over [prompt keys | own keys] of each row
    decode  ─┘  (one token of each row, or with drafts several)

The prompt's part is one matmul for all rows of a prompt, so its keys are read once per group and
never copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from stages import device as devices
from stages.engines.torch.model.attention import Scores, attend, merge

Pool = dict[int, tuple[torch.Tensor, torch.Tensor]]  # layer: K and V [slots, KV heads, room, D]


@dataclass(frozen=True)
class PrefillStep:
    """Index tensors of one prefill of g prompts with T tokens in all, padded to P tokens each."""

    padded: torch.Tensor  # int64 [g, P]: index of the packed token at each padded place
    packed: torch.Tensor  # int64 [T]: index of each packed token in the flattened padded ones
    first: int  # pool slot of the first prompt


@dataclass(frozen=True)
class Extension:
    """The next ``count`` tokens of a row, which has ``begin`` of its own after its prompt."""

    row: int  # pool slot
    prompt: int  # pool slot
    prompt_length: int
    begin: int
    count: int


@dataclass(frozen=True)
class ExtendStep:
    """Packed tokens that continue some rows, in the order of ``rows``."""

    rows: Sequence[Extension]


@dataclass(frozen=True)
class SharedPrompts:
    """The prompts that rows share: R rows, g prompts, at most n rows a prompt."""

    members: torch.Tensor  # int64 [g, n]: rows of each prompt, padded with 0
    place: torch.Tensor  # int64 [R]: index of each row in the flattened members
    prompt_lengths: torch.Tensor  # int64 [R]
    longest: int  # room for the longest prompt
    straight: bool  # members are 0, 1, 2, …: nothing has to be gathered


@dataclass(frozen=True)
class DecodeStep:
    """Index tensors of one decode step: T packed tokens of R rows, at most C of a row, which has at
    most L tokens of its own. T = R and C = 1 but for rows with drafts."""

    sharing: SharedPrompts
    rows: torch.Tensor  # int64 [T]: pool slot of each token's row
    own: torch.Tensor  # int64 [T]: place of its key and value
    longest: int  # L
    padded: torch.Tensor | None = (
        None  # int64 [R, C]: index of the packed token at each padded place
    )
    packed: torch.Tensor | None = None  # int64 [T]: index of each one in the flattened padded ones
    biases: dict[int | None, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, sharing: SharedPrompts, own: torch.Tensor, longest: int) -> DecodeStep:
        return cls(sharing, torch.arange(len(own), device=own.device), own, longest)

    @classmethod
    def of_several(
        cls, sharing: SharedPrompts, lengths: Sequence[int], counts: Sequence[int], room: int
    ) -> DecodeStep:
        """Return the step in which rows with ``lengths`` tokens of their own are fed ``counts``
        tokens; ``longest`` is a multiple of ``room``."""
        device = sharing.place.device
        each, own = torch.tensor(counts), torch.tensor(lengths)
        columns = torch.arange(int(each.max()))
        rows = torch.arange(len(each)).repeat_interleave(each)
        packed = (columns[None] < each[:, None]).flatten().nonzero()[:, 0]
        padded = (each.cumsum(0) - each)[:, None] + torch.minimum(columns[None], each[:, None] - 1)
        places = own[rows] + columns.repeat(len(each))[packed]
        longest = -(-int((own + each).max()) // room) * room
        rows, places, padded, packed = (
            devices.put(x, device) for x in (rows, places, padded, packed)
        )
        return cls(sharing, rows, places, longest, padded, packed)

    @property
    def positions(self) -> torch.Tensor:
        """Int64 [T]: of the tokens in their sequences."""
        return self.sharing.prompt_lengths[self.rows] + self.own

    @property
    def count(self) -> int:
        """The most tokens of a row: C."""
        return 1 if self.padded is None else self.padded.shape[1]

    def pad(self, x: torch.Tensor) -> torch.Tensor:
        """Return packed [T, heads, D] as [R, heads, C, D]."""
        return x[:, :, None] if self.padded is None else x[self.padded].transpose(1, 2)

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """Return padded [R, heads, C, D] as [T, heads * D]."""
        rows = x.transpose(1, 2).flatten(0, 1).flatten(1)
        return rows if self.packed is None else rows[self.packed]

    def bias(self, window: int | None) -> torch.Tensor:
        """Return float32 [R, 1, C, P + L]: 0, or -inf where a key is masked, also beyond
        ``window``.

        Computed on the device, once a window, without a synchronisation.
        """
        if window not in self.biases:
            sharing = self.sharing
            newest = self.own[:, None] if self.padded is None else self.own[self.padded]
            newest = newest[..., None]  # [R, C, 1]
            device = self.own.device
            lengths = sharing.prompt_lengths[:, None, None]
            columns = torch.arange(max(sharing.longest, self.longest), device=device)
            of_prompt = columns[: sharing.longest]
            of_own = columns[: self.longest]
            prompt_part = (of_prompt >= lengths).expand(-1, self.count, -1)
            own_part = of_own > newest
            if window is not None:
                prompt_part = prompt_part | (of_prompt <= lengths + newest - window)
                own_part |= of_own <= newest - window
            hidden = torch.cat([prompt_part, own_part], -1)
            bias = torch.zeros(hidden.shape, device=device).masked_fill_(hidden, -torch.inf)
            self.biases[window] = bias[:, None]
        return self.biases[window]


class TwoPartAttention:
    """KV cache of prompts and rows, and the attention over it.

    ``step`` is what :meth:`attend` computes next. ``layers``: how each layer makes weights from
    queries and keys, and its sinks [H] if it has them.

    ``grown`` counts how often a pool was replaced by a larger one: recorded steps read the old one
    and are void then.
    """

    def __init__(self) -> None:
        self.prompts: Pool = {}
        self.rows: Pool = {}
        self.layers: dict[int, tuple[Scores, torch.Tensor | None]] = {}
        self.step: PrefillStep | ExtendStep | DecodeStep | None = None
        self.grown = 0

    def clear(self) -> None:
        self.prompts = {}
        self.rows = {}
        self.step = None
        self.grown += 1

    def nbytes(self) -> int:
        """Return the number of bytes of the keys and values that the pools have room for."""
        return nbytes_of(self.prompts) + self.row_nbytes()

    def row_nbytes(self) -> int:
        """Return the number of those for rows' own tokens."""
        return nbytes_of(self.rows)

    def move(self, pool: Pool, source: int, target: int, tokens: int) -> None:
        """Copy the first ``tokens`` keys and values of slot ``source`` to slot ``target``, in every
        layer."""
        for pair in pool.values() if tokens else ():  # a row without keys may have no room either
            for kv in pair:
                kv[target, :, :tokens] = kv[source, :, :tokens]

    def exchange(self, row: int) -> None:
        """Exchange the keys and values of ``row`` with those of the first one, in every layer."""
        for layer, (keys, values) in list(self.rows.items()):
            for kv in self._room(self.rows, layer, row + 1, keys.shape[2], keys, values):
                kv[[0, row]] = kv[[row, 0]]

    def copy_row(self, row: int, tokens: int) -> Pool:
        """Return copies of the first ``tokens`` keys and values of ``row``, by layer [KV heads, T,
        D]."""
        return {
            layer: (keys[row, :, :tokens].clone(), values[row, :, :tokens].clone())
            for layer, (keys, values) in self.rows.items()
        }

    def put_row(self, row: int, copied: Pool, tokens: int) -> None:
        """Make the first ``tokens`` of ``copied`` the first keys and values of ``row``."""
        for layer, pair in copied.items():
            k, v = (kv[None, :, :tokens] for kv in pair)
            keys, values = self._room(self.rows, layer, row + 1, tokens, k, v)
            keys[row, :, :tokens], values[row, :, :tokens] = k[0], v[0]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Store the step's keys and values, and attend: ``query`` [T, H, D], ``key`` [T, KV heads,
        D] and ``value`` [T, KV heads, E] of its packed tokens. Returns [T, H * E]."""
        step = self.step
        if isinstance(step, DecodeStep):
            return self._attend_decode(step, layer, query, key, value)
        if isinstance(step, ExtendStep):
            return self._attend_extend(step, layer, query, key, value)
        assert step is not None
        g, longest = step.padded.shape
        q, k, v = (x[step.padded].transpose(1, 2) for x in (query, key, value))  # [g, heads, P, D]
        keys, values = self._room(self.prompts, layer, step.first + g, longest, k, v)
        keys[step.first : step.first + g, :, :longest] = k
        values[step.first : step.first + g, :, :longest] = v
        # Padding is on the right, where causal queries of real tokens do not attend.
        scores, sinks = self.layers[layer]
        inside = scores.window is None or longest <= scores.window
        if inside and scores.softcap is None and sinks is None and q.shape[-1] == v.shape[-1]:
            scale = scores.scaling
            out = nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale, enable_gqa=True
            )
        else:
            out = self._attend_all(layer, q, k, v, torch.arange(longest))
        return out.transpose(1, 2).flatten(0, 1)[step.packed].flatten(1)

    def _attend_all(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, at: torch.Tensor
    ) -> torch.Tensor:
        """Return the attention of the queries at the positions ``at`` over ``k`` and ``v``, with
        the layer's sinks; shapes as in :func:`~stages.engines.torch.model.attention.attend`."""
        scores, sinks = self.layers[layer]
        out, total = attend(q, k, v, at, scores)
        if sinks is None:
            return out
        return merge(out, total, None, sinks.to(total.dtype)[:, None])[0]

    def _attend_extend(
        self,
        step: ExtendStep,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        slots = max(row.row for row in step.rows) + 1
        room = max(row.begin + row.count for row in step.rows)
        pool = self._room(self.rows, layer, slots, room, key, value)
        counts = [row.count for row in step.rows]
        outputs = []
        for row, *new in zip(
            step.rows, *(x.split(counts) for x in (query, key, value)), strict=True
        ):
            q, *own = (x.transpose(0, 1) for x in new)  # [heads, T, D]
            end = row.begin + row.count
            seen = []
            for kv, prompts, rows in zip(own, self.prompts[layer], pool, strict=True):
                rows[row.row, :, row.begin : end] = kv
                of_prompt = prompts[row.prompt, :, : row.prompt_length]
                seen.append(torch.cat([of_prompt, rows[row.row, :, :end]], 1)[None])
            at = torch.arange(row.count) + row.prompt_length + row.begin
            out = self._attend_all(layer, q[None], seen[0], seen[1], at)
            outputs.append(out[0].transpose(0, 1).flatten(1))
        return torch.cat(outputs)

    def _attend_decode(
        self,
        step: DecodeStep,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        scores, sinks = self.layers[layer]
        sharing = step.sharing
        (g, n), longest_prompt, longest_row, rows = (
            sharing.members.shape,
            sharing.longest,
            step.longest,
            len(sharing.place),
        )
        heads = key.shape[1]
        # queries of a KV head: of each of its query heads, and of each token of the row
        width = query.shape[1] // heads * step.count
        keys, values = self._room(self.rows, layer, rows, longest_row, key, value)
        prompt_keys, prompt_values = self._room(self.prompts, layer, g, longest_prompt, key, value)
        keys[step.rows, :, step.own] = key
        values[step.rows, :, step.own] = value

        # [R, heads, width, X] -> [g * heads, n * width, X]
        def by_prompt(x: torch.Tensor) -> torch.Tensor:
            x = x if sharing.straight else x.index_select(0, sharing.members.flatten())
            if n > 1:
                x = x.view(g, n, heads, width, -1).transpose(1, 2)
            return x.reshape(g * heads, n * width, -1)

        def by_row(x: torch.Tensor) -> torch.Tensor:  # and back
            if n > 1:
                x = x.view(g, heads, n, width, -1).transpose(1, 2)
            x = x.reshape(g * n, heads, width, -1)
            return x if sharing.straight else x.index_select(0, sharing.place)

        # bmm of [heads of all rows or prompts, …]: matmul would take as long as it before it calls
        # it, with one row.
        q = step.pad(query * scores.scaling).reshape(rows, heads, width, -1)
        of_prompt = by_row(
            torch.bmm(by_prompt(q), _flat(prompt_keys, g, longest_prompt).transpose(1, 2))
        )
        of_own = torch.bmm(q.flatten(0, 1), _flat(keys, rows, longest_row).transpose(1, 2)).view(
            rows, heads, width, longest_row
        )
        # [R, query heads, C, P + L]
        weights = (
            torch.cat([of_prompt, of_own], -1)
            .float()
            .view(rows, -1, step.count, longest_prompt + longest_row)
        )
        if scores.softcap is not None:
            weights = weights.div_(scores.softcap).tanh_().mul_(scores.softcap)
        weights.add_(step.bias(scores.window))
        if sinks is not None:
            sink = sinks.float().view(-1, 1, 1).expand(rows, -1, step.count, 1)
            weights = torch.cat([weights, sink], -1).softmax(-1)[..., :-1].to(q.dtype)
        else:
            weights = weights.softmax(-1).to(q.dtype)
        weights = weights.view(rows, heads, width, -1)
        out = torch.bmm(
            weights[..., longest_prompt:].flatten(0, 1), _flat(values, rows, longest_row)
        )
        of_prompt = torch.bmm(
            by_prompt(weights[..., :longest_prompt]), _flat(prompt_values, g, longest_prompt)
        )
        out = out.view(rows, heads, width, -1).add_(by_row(of_prompt))
        return step.pack(out.view(rows, query.shape[1], step.count, -1))

    def _room(
        self, pool: Pool, layer: int, slots: int, tokens: int, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the layer's keys and values with room for ``slots`` × ``tokens`` like ``k`` and
        ``v`` [any, KV heads, …, D], grown by copying where needed. New room is zero: a masked value
        is multiplied by probability 0 and must be finite."""
        have = pool.get(layer)
        if have is not None and have[0].shape[0] >= slots and have[0].shape[2] >= tokens:
            return have
        old_slots, old_tokens = (have[0].shape[0], have[0].shape[2]) if have else (0, 0)
        slots = _grow(slots, old_slots, 8)
        tokens = _grow(tokens, old_tokens, 32)
        grown = (
            k.new_zeros(slots, k.shape[1], tokens, k.shape[-1]),
            v.new_zeros(slots, v.shape[1], tokens, v.shape[-1]),
        )
        if have is not None:
            for new, old in zip(grown, have, strict=True):
                new[:old_slots, :, :old_tokens] = old
        pool[layer] = grown
        self.grown += 1
        return grown


def nbytes_of(pool: Pool) -> int:
    return sum(kv.untyped_storage().nbytes() for pair in pool.values() for kv in pair)


def _flat(pool: torch.Tensor, slots: int, tokens: int) -> torch.Tensor:
    """Return the first ``tokens`` of the first ``slots`` as [slots * KV heads, tokens, D], without
    a copy."""
    return pool.flatten(0, 1)[: slots * pool.shape[1], :tokens]


def _grow(need: int, have: int, step: int) -> int:
    """Return room for ``need``, in multiples of ``step``: at least half more than ``have``, so that
    growth copies little."""
    return have if need <= have else max(-(-need // step) * step, have + have // 2)
