"""Ring attention (arXiv 2310.01889) with shared prompts: each rank computes the attention of its
own tokens, all heads.

    keys and values of prompts   ─ all-gather ─▶ read by all their rows
    of responses                 ─ from rank to rank ─▶ a part of the attention at each stop, merged by log-sum-exps

Each sequence is cut into 2 · ranks parts, of which a rank has the r-th and the r-th from the end,
so that causal attention is as much work for each (zigzag). Nothing that was received is kept for
the backward pass: it is sent again, and gradients of keys and values travel with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.utils.rnn import pad_sequence

from stages.engines.torch.model.attention import Scores, attend, attend_backward, merge, wide
from stages.engines.torch.model.packing import PackedBatch, as_batch, put


@dataclass(frozen=True, order=True)
class Segment:
    """Neighbouring tokens of a sequence, the prompt (``row`` -1) or a response of ``piece``.

    ``first``: position of the first of them; ``start``: its place among the packed tokens.
    """

    piece: int
    row: int
    first: int
    start: int
    length: int


@dataclass(frozen=True)
class Tile:
    """Own ``queries`` and the ``keys`` of a buffer that they may see.

    ``at`` int64, on the CPU: positions of the queries, counted from the first key.
    """

    queries: slice
    keys: slice
    at: Tensor


def _tile(own: Segment, at: int, first: int, keys: slice) -> Tile:
    """Return the tile of ``own``, which is at ``at``, over ``keys``, of which the first one has
    position ``first``."""
    return Tile(
        slice(at, at + own.length),
        keys,
        torch.arange(own.first - first, own.first - first + own.length),
    )


class Ring:
    """The plan by which the ranks of ``group`` compute the attention of ``packed`` together.

    ``tokens`` int64 [ranks, n]: which of them each has, its parts of ``prompts`` first, then those
    of responses; -1: none. ``of_prompts``: this rank's tiles over the keys of all prompts;
    ``steps``: over the responses' keys of each rank in turn, from its own to those of the next one.
    """

    def __init__(self, packed: PackedBatch, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = group.size()
        rank = group.rank()
        held = [list(_zigzag(packed, self.size, at)) for at in range(self.size)]
        prompts, rows = (
            [[s for s in some if (s.row < 0) is wanted] for some in held]
            for wanted in (True, False)
        )
        of_prompts = _places(prompts)
        self.tokens = torch.cat([of_prompts, _places(rows)], 1)
        self.prompts = of_prompts.shape[1]
        order = inverse(of_prompts, packed.ids.shape[1])
        # of the gathered keys, those of each prompt in turn
        self.order = order[order >= 0].to(packed.ids.device)
        lengths = [piece.prompt.stop - piece.prompt.start for piece in packed.pieces]
        begins = list(accumulate(lengths, initial=0))
        self.of_prompts = []
        for segment, at in _offsets(prompts[rank]):
            # its own keys, and all before them
            for first, length in ((segment.first, segment.length), (0, segment.first)):
                keys = slice(begins[segment.piece] + first, begins[segment.piece] + first + length)
                self.of_prompts += [_tile(segment, at, first, keys)] if length else []
        row_segments = list(_offsets(rows[rank], self.prompts))
        for piece, members in groupby(row_segments, key=lambda member: member[0].piece):
            some = list(members)
            seen = torch.cat(
                [torch.arange(segment.first, segment.first + segment.length) for segment, _ in some]
            )
            queries = slice(some[0][1], some[0][1] + len(seen))
            self.of_prompts.append(Tile(queries, slice(*begins[piece : piece + 2]), seen))
        self.steps = []
        for step in range(self.size if any(rows) else 0):
            theirs: dict[tuple[int, int], list[tuple[Segment, int]]] = {}
            for other, at in _offsets(rows[(rank - step) % self.size]):
                theirs.setdefault((other.piece, other.row), []).append((other, at))
            pairs = [
                (*query, *other)
                for query in row_segments
                for other in theirs.get((query[0].piece, query[0].row), ())
            ]
            tiles = (
                _tile(query, at, key.first, slice(to, to + key.length))
                for query, at, key, to in pairs
                if key <= query
            )
            self.steps.append(list(tiles))

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        packed: PackedBatch,
        scores: Scores,
    ) -> Tensor:
        """Compute :func:`~stages.engines.torch.model.packing.attention` of this rank's tokens."""
        return _RingAttention.apply(q, torch.cat([k, v], -1), sinks, self, scores)  # type: ignore[no-any-return, no-untyped-call]

    def all_prompts(self, kv: Tensor) -> Tensor:
        """Return the keys and values of all prompts, one prompt after the other."""
        ranks = [torch.empty_like(kv[: self.prompts]) for _ in range(self.size)]
        dist.all_gather(ranks, kv[: self.prompts].contiguous(), group=self.group)
        return torch.cat(ranks).index_select(0, self.order)

    def sum_prompts(self, gradient: Tensor) -> Tensor:
        """Return the gradient of this rank's tokens of prompts, summed over the ranks, from that of
        all prompts."""
        ranks = gradient.new_zeros(self.size * self.prompts, *gradient.shape[1:]).index_copy_(
            0, self.order, gradient
        )
        local_sum = torch.empty_like(ranks[: self.prompts])
        dist.reduce_scatter(local_sum, list(ranks.chunk(self.size)), group=self.group)
        return local_sum

    def pass_on(self, sent: Tensor, tag: int = 0) -> tuple[Tensor, list[dist.Work]]:
        """Begin to send ``sent`` to the next rank.

        Returns what the rank before sends, when the work is done.
        """
        incoming = torch.empty_like(sent)
        rank = self.group.rank()
        after, before = (
            dist.get_global_rank(self.group, (rank + by) % self.size) for by in (1, -1)
        )
        calls = [
            dist.P2POp(dist.isend, sent, after, self.group, tag),
            dist.P2POp(dist.irecv, incoming, before, self.group, tag),
        ]
        return incoming, dist.batch_isend_irecv(calls)


class _RingAttention(torch.autograd.Function):
    """Of ``q`` [n, H, D] over ``kv`` [n, KV heads, D + E], keys beside values."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, kv: Tensor, sinks: Tensor | None, ring: Ring, scores: Scores
    ) -> Tensor:
        dtype = wide(q)
        width = q.shape[2]
        out = q.new_zeros(*q.shape[:2], kv.shape[2] - width, dtype=dtype)
        total = q.new_full(
            q.shape[:2], torch.finfo(dtype).min, dtype=dtype
        )  # of no key; finite, so that it can be merged

        def add(tiles: Iterable[Tile], buffer: Tensor) -> None:
            for tile in tiles:
                keys = as_batch(buffer, tile.keys)
                tile_out, sums = attend(
                    as_batch(q, tile.queries), keys[..., :width], keys[..., width:], tile.at, scores
                )
                before = as_batch(out, tile.queries), as_batch(total, tile.queries)
                put(out, total, tile.queries, *merge(*before, tile_out.to(dtype), sums))

        held = kv[ring.prompts :].contiguous()
        coming, work = ring.pass_on(held) if ring.steps else (held, [])
        add(ring.of_prompts, ring.all_prompts(kv))
        for step, tiles in enumerate(ring.steps, 1):
            add(tiles, held)
            for call in work:
                call.wait()
            held = coming
            coming, work = ring.pass_on(held) if step < ring.size - 1 else (held, [])
        if sinks is not None:
            out, total = merge(out, total, None, sinks.to(dtype))
        out = out.to(q.dtype)
        ctx.save_for_backward(q, kv, sinks, out, total)
        ctx.ring = ring
        ctx.scores = scores
        return out

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, sinks, out, total = ctx.saved_tensors
        ring = ctx.ring
        dtype = wide(q)
        width = q.shape[2]
        to_q = torch.zeros_like(q, dtype=dtype)

        def add(tiles: Iterable[Tile], buffer: Tensor, to_buffer: Tensor) -> Tensor:
            for tile in tiles:
                g, queries, o, t = (as_batch(x, tile.queries) for x in (gradient, q, out, total))
                keys = as_batch(buffer, tile.keys)
                arguments = keys[..., :width], keys[..., width:], o, t, tile.at, ctx.scores
                of_query, *of_keys = attend_backward(g, queries, *arguments)
                to_q[tile.queries] += of_query[0].transpose(0, 1)
                to_buffer[tile.keys] += torch.cat(of_keys, -1)[0].transpose(0, 1)
            return to_buffer

        held = kv[ring.prompts :].contiguous()
        to_held = torch.zeros_like(held, dtype=dtype)
        for step, tiles in enumerate(ring.steps, 1):
            coming, work = ring.pass_on(held) if step < ring.size else (held, [])
            # After the last step the sums go to the rank whose keys they are of.
            to_held, sums = ring.pass_on(add(tiles, held, to_held), tag=1)
            for call in [*work, *sums]:
                call.wait()
            held = coming
        prompts = ring.all_prompts(kv)
        to_prompts = ring.sum_prompts(
            add(ring.of_prompts, prompts, torch.zeros_like(prompts, dtype=dtype))
        )
        to_sinks = None
        if sinks is not None:
            weight = (sinks.to(dtype) - total).exp()
            to_sinks = -(weight * (gradient * out).sum(-1, dtype=dtype)).sum(0).to(sinks.dtype)
        return to_q.to(q.dtype), torch.cat([to_prompts, to_held]).to(kv.dtype), to_sinks, None, None


def _zigzag(packed: PackedBatch, ranks: int, rank: int) -> Iterator[Segment]:
    """Yield the parts that ``rank`` has of each prompt and response.

    With each sequence ranks change places: where one is shorter than the parts are many, some get
    none.
    """
    sequences = []
    for piece, packed_piece in enumerate(packed.pieces):
        length = packed_piece.prompt.stop - packed_piece.prompt.start
        start = packed_piece.prompt.stop
        sequences.append(Segment(piece, -1, 0, packed_piece.prompt.start, length))
        for row, tokens in enumerate(packed_piece.rows):
            sequences.append(Segment(piece, row, length, start, tokens))
            start += tokens
    for number, whole in enumerate(sequences):
        at = (rank + number) % ranks
        for part in (at, 2 * ranks - 1 - at):
            begin, end = (whole.length * edge // (2 * ranks) for edge in (part, part + 1))
            if begin < end:
                yield replace(
                    whole, first=whole.first + begin, start=whole.start + begin, length=end - begin
                )


def _places(segments: Sequence[Sequence[Segment]]) -> Tensor:
    """Return int64 [ranks, n]: places of the tokens of each rank's ``segments``; -1 where it has
    fewer than others."""
    parts = [
        [torch.arange(s.start, s.start + s.length) for s in (*some, Segment(0, 0, 0, 0, 0))]
        for some in segments
    ]
    return pad_sequence([torch.cat(ranges) for ranges in parts], batch_first=True, padding_value=-1)


def inverse(parts: Tensor, count: int) -> Tensor:
    """Return int64 [count]: where each of ``count`` tokens is in ``parts`` [ranks, n], flat; -1 of
    one that is in none."""
    flat = parts.flatten()
    where = torch.full((count,), -1)
    where[flat[flat >= 0]] = (flat >= 0).nonzero()[:, 0]
    return where


def _offsets(segments: Sequence[Segment], start: int = 0) -> Iterator[tuple[Segment, int]]:
    """Return each of ``segments`` and where it begins, when they lie side by side from ``start``
    on."""
    return zip(segments, accumulate((s.length for s in segments), initial=start), strict=False)
