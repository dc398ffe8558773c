"""Micro-batches packed without padding, in which each group's prompt is computed once.

    [ prompt A | response A0 | response A1 | … | prompt B | response B0 | … ]      one row of tokens

Attention of a response is causal over [keys of its prompt; its own keys], and gradients flow into
the shared prompt: the prompt's keys are read where they are by all its rows at once, and merged
with the rows' own (stages/engines/torch/ attention.py). The last token of a response predicts
nothing, so it is not fed; logits are computed only where a response token is predicted. A row may
have branches, which share tokens of it (branched.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import nn
from torch.autograd.function import once_differentiable

from pipeline.data.columns import Packed, indexes_of
from stages.algorithms.batch import ragged
from stages.branches import Branch, PackedBranch, Strand, branches_of
from stages.engines.plans import GroupShape, Piece
from stages.engines.torch.model.attention import (
    FEW_KEYS,
    Scores,
    attend,
    attend_backward,
    merge,
    wide,
)
from stages.engines.torch.model.attention_interface import state_of
from stages.flow.catalogue import BRANCHES, MASK

# name of shared_prompt_attention in transformers' attention interface
ATTENTION = "asyncdock_shared_prompt"
# of a response int64 [T] uint8 [T, V / 8]: bits of the tokens that could have been at each place
MasksOf = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class AttentionBlock:
    """Rows ``start:end`` of the packed tokens, which attend to themselves in one call: ``count``
    rows padded to ``longest`` tokens. ``joined``: tokens of the prompt, which rows of few keys
    attend to in the same call, over a copy for each row (faster for them than to merge two
    outputs), or 0. ``real`` int64 has the places of their tokens in the padded block; None: all
    rows are equally long."""

    start: int
    end: int
    count: int
    longest: int
    joined: int
    real: torch.Tensor | None

    def padded(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rows [count, heads, longest, …] of the packed tokens ``x`` [S, heads, …], with
        zeros as padding."""
        x = x[self.start : self.end]
        if self.real is not None:
            x = x.new_zeros(self.count * self.longest, *x.shape[1:]).index_copy_(0, self.real, x)
        return x.unflatten(0, (self.count, self.longest)).transpose(1, 2)

    def keys(self, x: torch.Tensor, prompt: torch.Tensor) -> torch.Tensor:
        """Return those of the packed keys or values ``x`` that the rows see here.

        ``prompt`` [1, heads, P, D]: its own.
        """
        rows = self.padded(x)
        return torch.cat([prompt.expand(self.count, -1, -1, -1), rows], 2) if self.joined else rows

    def places(self) -> torch.Tensor:
        """Return int64 [longest]: positions of a row's tokens, counted from the first of
        :meth:`keys`."""
        return torch.arange(self.joined, self.joined + self.longest)

    def packed(self, x: torch.Tensor) -> torch.Tensor:
        """Return the inverse of :meth:`padded`: their tokens [end - start, heads, …]."""
        x = x.transpose(1, 2).flatten(0, 1)
        return x if self.real is None else x.index_select(0, self.real)


@dataclass(frozen=True)
class PackedPiece:
    """A prompt among the packed tokens, and its rows.

    ``apart``: those of blocks that do not join the prompt; they attend to it in one call.
    ``positions`` int64, on the CPU: of the tokens ``apart``. ``rows``: fed tokens of each row.
    ``branches`` are packed between the prompt and the rows.
    """

    prompt: slice
    blocks: tuple[AttentionBlock, ...]
    apart: slice
    positions: torch.Tensor
    rows: tuple[int, ...]
    branches: tuple[PackedBranch, ...] = ()


@dataclass(frozen=True)
class PackedBatch:
    """A micro-batch on the device: S fed tokens, U places where logits are needed, T predicted
    response tokens."""

    ids: torch.Tensor  # int64 [1, S]
    positions: torch.Tensor  # int64 [1, S]
    pieces: tuple[PackedPiece, ...]
    places: torch.Tensor  # int64 [U], which of the S
    source: torch.Tensor  # int64 [T], which of the U predicts the token
    # int64 [T]; or [T, 1 + k]: with others whose logprobs are wanted at the same place
    targets: torch.Tensor
    longest: int  # tokens of a sequence that are fed
    # uint8 or int16 [S, layers * top-k] that routers choose; None: as they do
    experts: torch.Tensor | None = None
    # bool [S]: generated tokens, whose experts are balanced; None: they are not counted
    counted: torch.Tensor | None = None
    # instead of attention(), where ranks have a part of the S each
    attend: Callable[..., torch.Tensor] | None = None
    # uint8 [U, V / 8]: bits of the tokens that have a probability; None: all
    masks: torch.Tensor | None = None


@dataclass
class Feeding:
    """The packed batch that a model is fed: its attention reads it, in the forward and where that
    is computed again for the backward. ``limit``: tokens of a sequence at most; ``fused``: by the
    device's fused attention where it has one."""

    limit: int
    fused: bool = True
    packed: PackedBatch | None = None

    def feed(self, packed: PackedBatch) -> None:
        if packed.longest > self.limit:
            raise NotImplementedError(
                f"a sequence of {packed.longest} tokens, where rope changes at {self.limit}"
            )
        self.packed = packed


@dataclass(frozen=True, eq=False)
class Group:
    """One group of a batch, or this rank's part of it: its number and prompt, its responses'
    places, and their row numbers in the batch."""

    number: int
    prompt: torch.Tensor
    places: tuple[int, ...]
    rows: tuple[int, ...]
    shape: GroupShape

    def part(self, places: Collection[int]) -> Group:
        """Return the group with the rows at ``places`` alone, those that are repeated several
        times; places that this rank does not have are left out."""
        at_place = {place: at for at, place in enumerate(self.places)}
        members = [at_place[place] for place in sorted(places) if place in at_place]
        return Group(
            self.number,
            self.prompt,
            tuple(self.places[at] for at in members),
            tuple(self.rows[at] for at in members),
            GroupShape(self.shape.prompt, tuple(self.shape.responses[at] for at in members)),
        )


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of a batch that a rank has, as micro-batches are packed of them: ``groups``, and by
    row number the responses and the experts that their tokens go to."""

    groups: Sequence[Group]
    column: Packed
    """The responses, as they lie in the batch."""

    responses: Sequence[torch.Tensor]
    experts: Sequence[torch.Tensor]
    """Empty where routers choose."""

    device: torch.device
    masks_of: MasksOf | None = None

    branches: Mapping[int, Sequence[Branch]] = field(default_factory=dict)
    """By row number, of those that have some."""

    expanded: bool = False
    """Branches are fed with their paths."""

    candidates: torch.Tensor | None = None
    """Integers [T, k]: tokens whose logprobs are wanted beside that of each response token."""

    generated: Sequence[torch.Tensor] | None = None
    """Bool, by row number: which tokens of a response the policy has generated. None: these are not
    counted."""

    @classmethod
    def of(
        cls,
        batch: TensorDictBase,
        device: torch.device,
        experts: Sequence[torch.Tensor] = (),
        masks_of: MasksOf | None = None,
        *,
        expanded: bool = False,
        counted: bool = False,
    ) -> Rows:
        """Return the rows of ``batch``: groups in the order of their numbers, their rows by place.

        Raises ValueError.
        """
        prompts = ragged(batch, "prompt_ids").rows()
        column = ragged(batch, "response_ids")
        lengths = column.lengths().tolist()
        branches = _branches(batch, lengths)
        if branches and experts:
            raise ValueError("branches: rows with routed_experts cannot have any")
        by_group: dict[int, list[tuple[int, int]]] = {}
        for number, (group, place) in enumerate(
            zip(batch["group"].tolist(), batch["place"].tolist(), strict=True)
        ):
            by_group.setdefault(group, []).append((place, number))
        groups = []
        for group, members in sorted(by_group.items()):
            places, numbers = zip(*sorted(members), strict=True)
            prompt = prompts[numbers[0]]
            for number in numbers:
                if not torch.equal(prompts[number], prompt):
                    raise ValueError(
                        f"prompt_ids: rows {numbers[0]} and {number} of group {group} do "
                        f"not share one prompt"
                    )
                if len(prompt) < 1 or lengths[number] < 1:
                    raise ValueError(
                        f"row {number} of group {group}: prompt_ids and response_ids need "
                        f"at least one token"
                    )
            fed = (_fed(branches.get(n, ()), lengths[n], expanded=expanded) for n in numbers)
            shape = GroupShape(len(prompt), tuple(1 + tokens for tokens in fed))
            groups.append(Group(group, prompt, places, numbers, shape))
        responses = column.rows()
        generated = None
        if counted:
            has_masks = MASK in batch and not branches
            generated = (
                ragged(batch, MASK).rows()
                if has_masks
                else [torch.ones_like(response, dtype=torch.bool) for response in responses]
            )
        return cls(
            *(groups, column, responses, experts, device, masks_of, branches),
            expanded=expanded,
            generated=generated,
        )

    def numbers(self, piece: Piece) -> list[int]:
        """Return the row numbers of ``piece``, which is of :attr:`groups`."""
        return [self.groups[piece.group].rows[row] for row in piece.rows]

    def pack(self, pieces: Sequence[Piece]) -> PackedBatch:
        """Return the micro-batch of ``pieces``: their response tokens piece by piece, row by
        row."""
        numbers = [self.numbers(piece) for piece in pieces]
        responses, experts = (
            [[values[number] for number in of_piece] for of_piece in numbers if values]
            for values in (self.responses, self.experts)
        )
        prompts = [self.groups[piece.group].prompt for piece in pieces]
        branches = [[self.branches.get(number, ()) for number in of_piece] for of_piece in numbers]
        has_branches = any(any(of_piece) for of_piece in branches)
        generated = None
        if (of_row := self.generated) is not None:
            generated = [[of_row[number] for number in of_piece] for of_piece in numbers]
        packed = pack(
            prompts,
            responses,
            self.device,
            experts,
            self.masks_of,
            branches if has_branches else (),
            expanded=self.expanded,
            generated=generated,
        )
        if self.candidates is None:
            return packed
        index = self.column.indexes([number for of_piece in numbers for number in of_piece])
        others = self.candidates[index].to(packed.targets)
        return replace(packed, targets=torch.cat([packed.targets[:, None], others], 1))


def _branches(batch: TensorDictBase, lengths: Sequence[int]) -> dict[int, list[Branch]]:
    """Return by row number the branches of those rows that have some."""
    if BRANCHES not in batch:
        return {}
    columns = ragged(batch, BRANCHES).lists()
    pairs = enumerate(zip(columns, lengths, strict=True))
    return {row: branches_of(column, length) for row, (column, length) in pairs if column}


def _fed(branches: Sequence[Branch], length: int, *, expanded: bool) -> int:
    """Return how many tokens of a row with ``length`` and ``branches`` are fed."""
    if not branches:
        return length - 1
    from stages.engines.torch.model.branched import fed_tokens

    return sum(fed_tokens(branch, branches, expanded=expanded) for branch in branches)


def pack(
    prompts: Sequence[torch.Tensor],
    rows: Sequence[Sequence[torch.Tensor]],
    device: torch.device,
    experts: Sequence[Sequence[torch.Tensor]] = (),
    masks_of: MasksOf | None = None,
    branches: Sequence[Sequence[Sequence[Branch]]] = (),
    *,
    expanded: bool = False,
    generated: Sequence[Sequence[torch.Tensor]] | None = None,
) -> PackedBatch:
    """Pack ``rows[i]``, the responses to ``prompts[i]``, longer ones first. The T tokens are
    counted in this order. ``experts[i]``: the choices that routers follow, of the fed tokens of
    these rows; a prompt takes those of its first. ``branches[i]``: of these rows; ``expanded``: each
    is fed with its path. ``masks_of``: see :class:`PackedBatch`. ``generated[i]``: of these rows,
    the tokens that are counted."""
    if branches:
        from stages.engines.torch.model.branched import in_order_of_rows, places_of, strands_of

        strands = [
            strands_of(responses, of_piece, expanded=expanded)
            for responses, of_piece in zip(rows, branches, strict=True)
        ]
    else:
        strands = [
            [Strand(row, ids, len(ids) - 1, len(ids)) for row, ids in enumerate(responses)]
            for responses in rows
        ]
    ids = []
    lengths: list[int] = []  # of the prompts and rows, in the order in which they are packed
    firsts: list[int] = []  # positions of their first tokens: 0 for prompts alone
    ends: list[int] = []  # of what each row or branch follows
    at = 0
    for prompt, of_piece in zip(prompts, strands, strict=True):
        ids += [prompt, *(strand.ids[: strand.fed] for strand in of_piece)]
        length = prompt.numel()
        fed = [strand.fed for strand in of_piece]
        lengths += [length, *fed]
        firsts += [0, *(length + len(strand.path) for strand in of_piece)]
        has_paths = any(strand.path for strand in of_piece)
        places = places_of(of_piece, at + length) if has_paths else {}
        ends += [
            int(places[strand.row][strand.path[-1]]) + 1 if strand.path else at + length
            for strand in of_piece
        ]
        at += length + sum(fed)
    sizes = np.array(lengths)
    is_row = np.array(firsts) > 0
    positions = torch.from_numpy(indexes_of(np.array(firsts), sizes))
    counts = np.array([len(strand.ids) for of_piece in strands for strand in of_piece])
    source = _predicting((np.cumsum(sizes) - sizes)[is_row], counts, ends)
    targets = torch.cat([strand.ids for of_piece in strands for strand in of_piece])
    if branches:
        order = in_order_of_rows(strands, rows)
        source = source[order.numpy()]
        targets = targets[order]
    is_place = np.zeros(at, bool)
    is_place[source] = True
    source_place = torch.from_numpy((np.cumsum(is_place) - 1)[source])
    masks = None
    if masks_of is not None:
        of_targets = torch.cat([masks_of(response) for responses in rows for response in responses])
        masks = of_targets.new_empty(int(is_place.sum()), of_targets.shape[1])
        masks[source_place] = of_targets  # first tokens of one prompt have the same
    pairs = zip(prompts, experts, strict=False)
    chosen = [
        part
        for prompt, row_experts in pairs
        for part in (row_experts[0][: len(prompt)], *(row[len(prompt) :] for row in row_experts))
    ]
    counted: list[torch.Tensor] = []
    for prompt, of_piece, of_rows in zip(prompts, strands, generated or (), strict=False):
        counted.append(torch.zeros(len(prompt), dtype=torch.bool))
        counted += [of_rows[strand.row][: strand.fed] for strand in of_piece]
    return PackedBatch(
        ids=torch.cat(ids)[None].to(device),
        positions=positions[None].to(device),
        pieces=tuple(_pieces(prompts, strands, positions, device)),
        places=torch.from_numpy(np.flatnonzero(is_place)).to(device),
        source=source_place.to(device),
        targets=targets.to(device),
        longest=int((np.array(firsts) + sizes).max()),
        experts=torch.cat(chosen).to(device) if chosen else None,
        masks=None if masks is None else masks.to(device),
        counted=torch.cat(counted).to(device) if counted else None,
    )


def _predicting(starts: np.ndarray, counts: np.ndarray, ends: Sequence[int]) -> np.ndarray:
    """Return int64, the packed token that predicts each of the ``counts`` tokens of the rows, which
    begin at ``starts``: a row's first is predicted by the token before ``ends``."""
    source = indexes_of(starts - 1, counts)
    source[np.cumsum(counts) - counts] = np.array(ends) - 1
    return source


def _pieces(
    prompts: Sequence[torch.Tensor],
    strands: Sequence[Sequence[Strand]],
    positions: torch.Tensor,
    device: torch.device,
) -> Iterable[PackedPiece]:
    """Yield the pieces of a micro-batch, whose tokens have these ``positions``."""
    at = 0
    for prompt, of_piece in zip(prompts, strands, strict=True):
        of_prompt = slice(at, at + prompt.numel())
        branches: tuple[PackedBranch, ...] = ()
        if any(strand.path for strand in of_piece):
            from stages.engines.torch.model.branched import packed_branches

            branches = tuple(packed_branches(of_piece, of_prompt, device))
        start = of_prompt.stop + sum(strand.fed for strand in of_piece if strand.path)
        fed = tuple(strand.fed for strand in of_piece if not strand.path)
        blocks = tuple(_blocks(start, prompt.numel(), fed, device))
        apart = slice(start, max([start, *(block.end for block in blocks if not block.joined)]))
        yield PackedPiece(of_prompt, blocks, apart, positions[apart], fed, branches)
        at = start + sum(fed)


def _blocks(
    start: int, prompt: int, lengths: Sequence[int], device: torch.device
) -> Iterable[AttentionBlock]:
    """Yield the blocks of the rows of a ``prompt`` of so many tokens, packed from ``start`` on,
    longest first. Within a block no row is padded to more than twice its length. Rows without fed
    tokens are in none."""
    first = 0
    count = sum(length > 0 for length in lengths)
    while first < count:
        longest = lengths[first]
        last = first + sum(2 * length >= longest for length in lengths[first:count])
        members = np.array(lengths[first:last])
        end = start + int(members.sum())
        real = None
        if lengths[last - 1] < longest:
            places = indexes_of(np.arange(last - first) * longest, members)
            real = torch.from_numpy(places).to(device)
        joined = prompt if prompt + longest <= FEW_KEYS else 0
        yield AttentionBlock(start, end, last - first, longest, joined, real)
        first = last
        start = end


def shared_prompt_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Serve as transformers' attention function over the micro-batch of a :class:`Feeding`:
    ``query`` [1, H, S, D], ``key`` [1, KV heads, S, D], ``value`` [1, KV heads, S, E]. ``s_aux``
    [H]: attention sinks. Returns [1, S, H, E]."""
    feeding = state_of(module)
    sinks = options.get("s_aux")
    packed = feeding.packed
    scores = Scores.of(query, options, feeding.fused)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [S, heads, D]
    return (packed.attend or attention)(q, k, v, sinks, packed, scores)[None], None


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    packed: PackedBatch,
    scores: Scores,
) -> torch.Tensor:
    """Return the attention [S, H, E] of ``q`` [S, H, D] over ``k`` [S, KV heads, D] and ``v`` [S,
    KV heads, E]."""
    return _SharedPromptAttention.apply(q, k, v, sinks, packed, scores)  # type: ignore[no-any-return, no-untyped-call]


class _SharedPromptAttention(torch.autograd.Function):
    """Keeps queries, keys, values, outputs and log-sum-exps: memory linear in the tokens."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        packed: PackedBatch,
        scores: Scores,
    ) -> torch.Tensor:
        out = q.new_empty(*q.shape[:2], v.shape[2])
        total = q.new_empty(q.shape[:2], dtype=wide(q))
        for piece in packed.pieces:
            of_prompt = as_batch(k, piece.prompt), as_batch(v, piece.prompt)
            put(
                out,
                total,
                piece.prompt,
                *attend(as_batch(q, piece.prompt), *of_prompt, _places(piece.prompt), scores),
            )
            for block in piece.blocks:
                keys, values = (
                    block.keys(x, prompt_part)
                    for x, prompt_part in zip((k, v), of_prompt, strict=True)
                )
                outputs = attend(block.padded(q), keys, values, block.places(), scores)
                out[block.start : block.end], total[block.start : block.end] = (
                    block.packed(x) for x in outputs
                )
            if len(piece.positions):
                outputs = attend(as_batch(q, piece.apart), *of_prompt, piece.positions, scores)
                put(
                    out,
                    total,
                    piece.apart,
                    *merge(as_batch(out, piece.apart), as_batch(total, piece.apart), *outputs),
                )
            for branch in piece.branches:
                put(
                    out,
                    total,
                    branch.tokens,
                    *attend(
                        as_batch(q, branch.tokens),
                        as_batch(k, branch.path),
                        as_batch(v, branch.path),
                        branch.positions,
                        scores,
                    ),
                )
        if sinks is not None:
            out, total = merge(out, total, None, sinks.to(total.dtype))
        ctx.save_for_backward(q, k, v, sinks, out, total)
        ctx.packed = packed
        ctx.scores = scores
        return out

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sinks, out, total = ctx.saved_tensors
        to_q, to_k, to_v = (torch.empty_like(x) for x in (q, k, v))
        of_queries = gradient, q, out, total
        for piece in ctx.packed.pieces:
            g, queries, o, t = (as_batch(x, piece.prompt) for x in of_queries)
            keys = as_batch(k, piece.prompt)
            values = as_batch(v, piece.prompt)
            to_prompt = attend_backward(
                g, queries, keys, values, o, t, _places(piece.prompt), ctx.scores
            )
            for block in piece.blocks:
                g, queries, o, t = (block.padded(x) for x in of_queries)
                seen = block.keys(k, keys), block.keys(v, values)
                of_row, *to_keys_values = attend_backward(
                    g, queries, *seen, o, t, block.places(), ctx.scores
                )
                to_q[block.start : block.end] = block.packed(of_row)
                for whole, part in zip((to_k, to_v), to_keys_values, strict=True):
                    whole[block.start : block.end] = block.packed(part[:, :, block.joined :])
                if block.joined:
                    shared = (
                        part[:, :, : block.joined].sum(0, keepdim=True) for part in to_keys_values
                    )
                    to_prompt = (
                        to_prompt[0],
                        *(a + b for a, b in zip(to_prompt[1:], shared, strict=True)),
                    )
            if len(piece.positions):
                g, queries, o, t = (as_batch(x, piece.apart) for x in of_queries)
                of_row, *to_keys_values = attend_backward(
                    g, queries, keys, values, o, t, piece.positions, ctx.scores
                )
                to_q[piece.apart] += of_row[0].transpose(0, 1)
                to_prompt = (
                    to_prompt[0],
                    *(a + b for a, b in zip(to_prompt[1:], to_keys_values, strict=True)),
                )
            for whole, part in zip((to_q, to_k, to_v), to_prompt, strict=True):
                whole[piece.prompt] = part[0].transpose(0, 1)
            for branch in piece.branches:
                to_k[branch.tokens] = to_v[branch.tokens] = 0
            for branch in piece.branches:
                g, queries, o, t = (as_batch(x, branch.tokens) for x in of_queries)
                seen = as_batch(k, branch.path), as_batch(v, branch.path)
                of_row, *to_keys_values = attend_backward(
                    g, queries, *seen, o, t, branch.positions, ctx.scores
                )
                to_q[branch.tokens] = of_row[0].transpose(0, 1)
                for whole, part in zip((to_k, to_v), to_keys_values, strict=True):
                    whole.index_add_(0, branch.path, part[0].transpose(0, 1).to(whole.dtype))
        to_sinks = None
        if sinks is not None:
            weight = (sinks.to(total.dtype) - total).exp()
            to_sinks = (
                -(weight * (gradient * out).sum(-1, dtype=total.dtype)).sum(0).to(sinks.dtype)
            )
        return to_q, to_k, to_v, to_sinks, None, None


def as_batch(x: torch.Tensor, tokens: slice | torch.Tensor) -> torch.Tensor:
    """Return ``tokens`` of ``x`` [S, heads, …] as a batch of one row, [1, heads, n, …]."""
    return x[tokens].transpose(0, 1)[None]


def put(
    out: torch.Tensor,
    total: torch.Tensor,
    tokens: slice,
    found: torch.Tensor,
    found_total: torch.Tensor,
) -> None:
    out[tokens], total[tokens] = found[0].transpose(0, 1), found_total[0].transpose(0, 1)


def _places(tokens: slice) -> torch.Tensor:
    return torch.arange(tokens.stop - tokens.start)
