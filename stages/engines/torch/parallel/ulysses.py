"""Ulysses (arXiv 2309.14509): each rank computes the attention of some heads, over all tokens.

    own tokens, all heads ─ all-to-all ─▶ all tokens, own heads ─▶ attention as on one rank ─ all-to-all ─▶ own tokens

Where there are fewer heads of keys than ranks, each is sent to the ranks whose queries read it.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from stages.engines.torch.model.attention import Scores
from stages.engines.torch.model.packing import PackedBatch, attention
from stages.engines.torch.parallel.collectives import AllToAll


def attention_by_heads(
    group: dist.ProcessGroup,
    where: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    packed: PackedBatch,
    scores: Scores,
) -> Tensor:
    """Compute :func:`~stages.engines.torch.model.packing.attention` of this rank's n tokens: ``q`` [n, H,
    D], ``k`` [n, KV heads, D], ``v`` [n, KV heads, E]. ``where`` int64 [S]: place of each packed
    token among those of all ranks, [ranks · n]."""
    size = group.size()
    even = [len(q)] * group.size()
    copies = math.lcm(k.shape[1], size) // k.shape[1]
    # [ranks, n, heads of a rank, …]: for each rank its heads
    rank_heads = [
        x.unflatten(1, (size, -1)).transpose(0, 1)
        for x in (q, *(x.repeat_interleave(copies, 1) for x in (k, v)))
    ]
    sent = torch.cat([x.flatten(2) for x in rank_heads], -1).flatten(0, 1)
    all_tokens = AllToAll.apply(sent, even, even, group).index_select(0, where)  # type: ignore[no-untyped-call]
    parts = all_tokens.split([x.shape[2] * x.shape[3] for x in rank_heads], 1)
    own_q, own_k, own_v = [
        part.unflatten(1, x.shape[2:]) for part, x in zip(parts, rank_heads, strict=True)
    ]
    out = attention(
        own_q,
        own_k,
        own_v,
        None if sinks is None else sinks.chunk(size)[group.rank()],
        packed,
        scores,
    )
    back = out.new_zeros(size * len(q), out[0].numel()).index_copy(0, where, out.flatten(1))
    heads = AllToAll.apply(back, even, even, group)  # type: ignore[no-untyped-call]
    return heads.unflatten(0, (size, -1)).transpose(0, 1).reshape(len(q), q.shape[1], -1)  # type: ignore[no-any-return]
