"""Ring attention (arXiv 2310.01889) with shared prompts: each rank computes the attention of its own tokens, all heads.

    keys and values of prompts ─ all-gather ─▶ read by all their rows
    of a long response         ─ from rank to rank ─▶ a part of the attention at each stop, merged by log-sum-exps

A sequence that is divided is cut into 2 · ranks pieces, of which rank r has the r-th and the r-th from the end, so that causal
attention is as much work for each (zigzag). Prompts are divided, and of responses as few as make the ranks' tokens even, the
longest ones; others lie on one rank and travel nowhere. Nothing that was received is kept for the backward pass: it is sent
again, and gradients of keys and values travel with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from stages.engines.plans import EVEN
from stages.engines.torch.attention import Scores, attend, attend_backward, merge, wide
from stages.engines.torch.packing import PackedBatch, as_batch, put

Buffers = tuple[torch.Tensor, torch.Tensor]  # of keys and values, or of their gradients: [n, KV heads, …]


@dataclass(frozen=True)
class Segment:
    """Neighbouring tokens of a sequence: ``start``, the first one's place among the packed tokens, and ``first``, its
    position. ``row``: number of the response in its piece; -1: the prompt."""

    piece: int
    row: int
    first: int
    start: int
    length: int

    def part(self, begin: int, end: int) -> Segment:
        return Segment(self.piece, self.row, self.first + begin, self.start + begin, end - begin)


@dataclass
class Held:
    """The segments of one rank, in the order in which it feeds them."""

    prompts: list[Segment]
    cut: list[Segment]
    whole: list[Segment]

    @property
    def all(self) -> list[Segment]:
        return [*self.prompts, *self.cut, *self.whole]

    def tokens(self) -> torch.Tensor:
        """Their places, int64."""
        return torch.cat([torch.arange(0), *(torch.arange(s.start, s.start + s.length) for s in self.all)])


def dealt(packed: PackedBatch, ranks: int) -> list[Held]:
    """Deal the tokens of ``packed`` to ``ranks``."""
    prompts, rows = [], []
    positions = packed.positions[0].cpu()
    for number, piece in enumerate(packed.pieces):
        length, end = piece.prompt.stop - piece.prompt.start, max([piece.prompt.stop, *(b.end for b in piece.blocks)])
        prompts.append(Segment(number, -1, 0, piece.prompt.start, length))
        starts = (positions[piece.prompt.stop : end] == length).nonzero()[:, 0] + piece.prompt.stop
        edges = [*starts.tolist(), end]
        rows += [Segment(number, row, length, a, edges[row + 1] - a) for row, a in enumerate(edges[:-1])]
    order = sorted(rows, key=lambda row: -row.length)
    best: list[Held] = []
    for count in range(len(order) + 1):
        cut = sorted(order[:count], key=lambda row: row.start)
        found = [Held(list(_zigzag(prompts, ranks, at)), list(_zigzag(cut, ranks, at)), []) for at in range(ranks)]
        for row in order[count:]:
            min(found, key=_tokens).whole.append(row)
        if not best or max(map(_tokens, found)) < max(map(_tokens, best)):
            best = found
        if max(map(_tokens, best)) <= EVEN * len(positions) / ranks:
            break
    for held in best:
        held.whole.sort(key=lambda row: row.start)
    return best


def _zigzag(sequences: Iterable[Segment], ranks: int, rank: int) -> Iterator[Segment]:
    for one in sequences:
        for number in (rank, 2 * ranks - 1 - rank):
            begin, end = (one.length * at // (2 * ranks) for at in (number, number + 1))
            if begin < end:
                yield one.part(begin, end)


def _tokens(held: Held) -> int:
    return sum(segment.length for segment in held.all)


@dataclass(frozen=True)
class Tile:
    """Own ``queries`` and the ``keys`` of a buffer that they may see. ``at`` int64, on the CPU: positions of the queries,
    counted from the first key."""

    queries: slice
    keys: slice
    at: torch.Tensor


class Ring:
    """How the ranks of ``group``, which hold ``segments``, compute attention together. Makes the tiles of this rank:
    ``own`` over its own keys, ``of_prompts`` over those of all prompts, and ``steps``, over the divided responses' keys of
    each rank in turn, from its own to those of the next one. Within each list a query's own segment comes first: the output
    begins with keys that it sees."""

    def __init__(self, group: dist.ProcessGroup, segments: Sequence[Held], device: torch.device) -> None:
        self.group, self.size, rank = group, len(segments), dist.get_rank(group)
        mine = segments[rank]
        self.prompts, self.cut = (sum(s.length for s in some) for some in (mine.prompts, mine.cut))
        self.most_prompts, self.most_cut = (
            max(sum(s.length for s in some) for some in lists)
            for lists in ([held.prompts for held in segments], [held.cut for held in segments])
        )
        # The prompts' tokens in order, each where the gathered buffer of all ranks has it.
        places = [
            (segment.piece, segment.first, at * self.most_prompts + offset, segment.length)
            for at, held in enumerate(segments)
            for segment, offset in _offsets(held.prompts)
        ]
        of_prompt = {
            piece: [(first, torch.arange(at, at + length)) for _, first, at, length in found]
            for piece, found in groupby(sorted(places), key=lambda place: place[0])
        }
        ordered = {piece: torch.cat([part for _, part in found]) for piece, found in of_prompt.items()}
        self.order = torch.cat(list(ordered.values())).to(device)
        begins = dict(zip(ordered, accumulate(map(len, ordered.values()), initial=0), strict=False))
        local = list(_offsets(mine.all))
        self.own = [
            Tile(slice(o, o + s.length), slice(o, o + s.length), torch.arange(s.length))
            for s, o in local[len(local) - len(mine.whole) :]
        ]
        self.of_prompts: list[Tile] = []
        for segment, offset in local[: len(mine.prompts)]:
            begin, queries = begins[segment.piece], slice(offset, offset + segment.length)
            at = torch.arange(segment.length)
            self.of_prompts.append(
                Tile(queries, slice(begin + segment.first, begin + segment.first + segment.length), at)
            )
            if segment.first:
                self.of_prompts.append(Tile(queries, slice(begin, begin + segment.first), at + segment.first))
        first_cut, first_whole = len(mine.prompts), len(mine.prompts) + len(mine.cut)
        for rows in (local[first_cut:first_whole], local[first_whole:]):
            for piece, members in groupby(rows, key=lambda member: member[0].piece):
                some = list(members)
                at = torch.cat([torch.arange(s.first, s.first + s.length) for s, _ in some])
                begin, keys = some[0][1], slice(begins[piece], begins[piece] + len(ordered[piece]))
                self.of_prompts.append(Tile(slice(begin, begin + len(at)), keys, at))
        self.steps = [
            [
                Tile(slice(o, o + q.length), slice(at, at + k.length), torch.arange(q.length) + q.first - k.first)
                for q, o in local[first_cut:first_whole]
                for k, at in reversed(list(_offsets(segments[(rank - step) % self.size].cut)))
                if (k.piece, k.row) == (q.piece, q.row) and k.first <= q.first
            ]
            for step in range(self.size if self.most_cut else 0)
        ]

    def attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        packed: PackedBatch,
        scores: Scores,
    ) -> torch.Tensor:
        """As :func:`~stages.engines.torch.packing.attention`, of this rank's tokens."""
        return _RingAttention.apply(q, k, v, sinks, self, scores)  # type: ignore[no-any-return, no-untyped-call]

    def all_prompts(self, k: torch.Tensor, v: torch.Tensor) -> Buffers:
        """Keys and values of all prompts, in order."""
        own = _padded(_joined(k[: self.prompts], v[: self.prompts]), self.most_prompts)
        gathered = own.new_empty(self.size * len(own), own.shape[1])
        dist.all_gather(list(gathered.chunk(self.size)), own, group=self.group)
        return _parted(gathered.index_select(0, self.order), k, v)

    def sum_prompts(self, to_k: torch.Tensor, to_v: torch.Tensor) -> Buffers:
        """The gradients of this rank's tokens of prompts, summed over the ranks, from those of all."""
        joined = _joined(to_k, to_v)
        ranks = joined.new_zeros(self.size * self.most_prompts, joined.shape[1]).index_copy_(0, self.order, joined)
        own = joined.new_empty(self.most_prompts, joined.shape[1])
        dist.reduce_scatter(own, list(ranks.chunk(self.size)), group=self.group)
        return _parted(own[: self.prompts], to_k, to_v)

    def divided(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """What this rank has of divided responses, to send it around."""
        rows = slice(self.prompts, self.prompts + self.cut)
        return _padded(_joined(k[rows], v[rows]), self.most_cut)

    def pass_on(self, sent: torch.Tensor, tag: int = 0) -> tuple[torch.Tensor, list[dist.Work]]:
        """Begin to send ``sent`` to the next rank. Returns what the rank before sends, when the work is done."""
        found, rank = torch.empty_like(sent), dist.get_rank(self.group)
        after, before = (dist.get_global_rank(self.group, (rank + by) % self.size) for by in (1, -1))
        calls = [
            dist.P2POp(dist.isend, sent, after, self.group, tag),
            dist.P2POp(dist.irecv, found, before, self.group, tag),
        ]
        return found, dist.batch_isend_irecv(calls)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        ring: Ring,
        scores: Scores,
    ) -> torch.Tensor:
        dtype = wide(q)
        out = q.new_zeros(*q.shape[:2], v.shape[2], dtype=dtype)
        total = q.new_full(q.shape[:2], -torch.inf, dtype=dtype)

        def add(tiles: Iterable[Tile], keys: torch.Tensor, values: torch.Tensor) -> None:
            for tile in tiles:
                part = as_batch(q, tile.queries), as_batch(keys, tile.keys), as_batch(values, tile.keys)
                found, found_total = attend(*part, tile.at, scores)
                before = as_batch(out, tile.queries), as_batch(total, tile.queries)
                put(out, total, tile.queries, *merge(*before, found.to(dtype), found_total))

        held = ring.divided(k, v)
        for step, tiles in enumerate(ring.steps or [[]]):
            last = step >= len(ring.steps) - 1
            coming, work = (held, []) if last else ring.pass_on(held)
            add(tiles, *_parted(held, k, v))
            if step == 0:
                add(ring.own, k, v)
                add(ring.of_prompts, *ring.all_prompts(k, v))
            for call in work:
                call.wait()
            held = coming
        if sinks is not None:
            out, total = merge(out, total, None, sinks.to(dtype))
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, total)
        ctx.ring, ctx.scores = ring, scores
        return out

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sinks, out, total = ctx.saved_tensors
        ring, dtype = ctx.ring, wide(q)
        to_q, to_k, to_v = (torch.zeros_like(x, dtype=dtype) for x in (q, k, v))

        def add(tiles: Iterable[Tile], keys: Buffers, to_keys: Buffers) -> None:
            for tile in tiles:
                g, queries, o, t = (as_batch(x, tile.queries) for x in (gradient, q, out, total))
                given = *(as_batch(x, tile.keys) for x in keys), o, t, tile.at, ctx.scores
                of_query, *of_keys = attend_backward(g, queries, *given)
                to_q[tile.queries] += of_query[0].transpose(0, 1)
                for whole, part in zip(to_keys, of_keys, strict=True):
                    whole[tile.keys] += part[0].transpose(0, 1)

        held = ring.divided(k, v)
        to_held = torch.zeros_like(held, dtype=dtype)
        for step, tiles in enumerate(ring.steps):
            coming, work = ring.pass_on(held) if step < ring.size - 1 else (held, [])
            add(tiles, _parted(held, k, v), _parted(to_held, k, v))
            to_held, sums = ring.pass_on(to_held, tag=1)  # after the last step to the rank whose keys they are of
            for call in [*work, *sums]:
                call.wait()
            held = coming
        rows = slice(ring.prompts, ring.prompts + ring.cut)
        for whole, part in zip((to_k, to_v), _parted(to_held[: ring.cut], k, v), strict=True):
            whole[rows] = part
        add(ring.own, (k, v), (to_k, to_v))
        prompts = ring.all_prompts(k, v)
        to_prompts = [torch.zeros_like(x, dtype=dtype) for x in prompts]
        add(ring.of_prompts, prompts, (to_prompts[0], to_prompts[1]))
        for whole, part in zip((to_k, to_v), ring.sum_prompts(*to_prompts), strict=True):
            whole[: ring.prompts] = part
        to_sinks = None
        if sinks is not None:
            weight = (sinks.to(dtype) - total).exp()
            to_sinks = -(weight * (gradient * out).sum(-1, dtype=dtype)).sum(0).to(sinks.dtype)
        return to_q.to(q.dtype), to_k.to(k.dtype), to_v.to(v.dtype), to_sinks, None, None


def _offsets(segments: Sequence[Segment]) -> Iterable[tuple[Segment, int]]:
    return zip(segments, accumulate((s.length for s in segments), initial=0), strict=False)


def _joined(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.cat([k.flatten(1), v.flatten(1)], 1)


def _parted(joined: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Buffers:
    """Views of ``joined`` as keys and values like ``k`` and ``v``."""
    heads, width = k.shape[1], k.shape[1] * k.shape[2]
    return joined[:, :width].unflatten(1, (heads, -1)), joined[:, width:].unflatten(1, (heads, -1))


def _padded(x: torch.Tensor, count: int) -> torch.Tensor:
    return x if len(x) == count else torch.cat([x, x.new_zeros(count - len(x), *x.shape[1:])])
