"""Ulysses (arXiv 2309.14509): each rank computes the attention of some heads, over all tokens.

    own tokens, all heads ─ all-to-all ─▶ all tokens, own heads ─▶ attention as on one rank ─ all-to-all ─▶ own tokens

Where there are fewer heads of keys than ranks, each is sent to the ranks whose queries read it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from stages.engines.torch.attention import Scores
from stages.engines.torch.packing import PackedBatch, attention


def attention_by_heads(
    group: dist.ProcessGroup,
    where: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    packed: PackedBatch,
    scores: Scores,
) -> torch.Tensor:
    """:func:`~stages.engines.torch.packing.attention` of this rank's n tokens: ``q`` [n, H, D], ``k`` [n, KV heads, D],
    ``v`` [n, KV heads, E]. ``where`` int64 [S]: of the ranks' tokens, one rank's after the other's, each of the packed."""
    size, rank, own = dist.get_world_size(group), dist.get_rank(group), len(q)
    copies = math.lcm(k.shape[1], size) // k.shape[1]
    given = [q, *(x.repeat_interleave(copies, 1) if copies > 1 else x for x in (k, v))]
    # [ranks, n, …]: for each rank its heads of queries, keys and values
    sent = torch.cat([x.unflatten(1, (size, -1)).transpose(0, 1).flatten(2) for x in given], -1)
    found = _exchanged(sent, group).flatten(0, 1).index_select(0, where)
    widths = [x.shape[1] // size * x.shape[2] for x in given]
    parts = [x.unflatten(1, (-1, of.shape[2])) for x, of in zip(found.split(widths, 1), given, strict=True)]
    if sinks is not None:
        sinks = sinks.chunk(size)[rank]
    out = attention(*parts, sinks, packed, scores)
    back = out.new_zeros(size * own, out[0].numel()).index_copy(0, where, out.flatten(1))
    heads = _exchanged(back.unflatten(0, (size, own)), group)
    return heads.transpose(0, 1).flatten(1).unflatten(1, (q.shape[1], -1))


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        x = x.contiguous()
        dist.all_to_all_single(found := torch.empty_like(x), x, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _AllToAll.forward(ctx, gradients[0], ctx.group), None


def _exchanged(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[ranks, …]: what each rank sends to this one, of what each has for each."""
    return _AllToAll.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]
