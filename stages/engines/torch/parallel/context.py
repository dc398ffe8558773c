"""Context parallelism: the tokens of a packed micro-batch divided over the ``cp`` ranks of a
replica.

    the same micro-batch of S tokens on each rank ─▶ about S / cp of them through embeddings, layers and head;
                                                     in attention the ranks exchange what it needs (ulysses.py, ring.py)
    logprobs of own tokens ─▶ gathered: [T] on each rank, so that algorithms see whole rows;
                              backward: each rank follows the gradient of its own part

The loss is the same on each rank, and its gradient reaches the weights through the tokens of each
rank alone, so gradients add up over the ranks as those of data-parallel ones do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence

from stages.engines.torch.model.packing import PackedBatch
from stages.engines.torch.parallel.collectives import Join
from stages.engines.torch.parallel.ring import Ring, inverse
from stages.engines.torch.parallel.runner import Share
from stages.engines.torch.parallel.ulysses import attention_by_heads
from stages.parallel.options import ContextParallel


def divide(packed: PackedBatch, group: dist.ProcessGroup, method: ContextParallel) -> Share:
    """Return the share of this rank of ``group`` in ``packed``, which is the same on all of them.

    Ranks have equally many tokens: some feed the first one again, where nothing reads it.
    """
    size = group.size()
    rank = group.rank()
    device = packed.ids.device
    count = packed.ids.shape[1]
    attend: Callable[..., torch.Tensor]
    if method == "ring":
        ring = Ring(packed, group)
        parts = ring.tokens
        attend = ring.attention
    else:
        parts = pad_sequence(
            list(torch.arange(count).tensor_split(size)), batch_first=True, padding_value=-1
        )
        attend = partial(attention_by_heads, group, inverse(parts, count).to(device))
    # [T]: places among the tokens of all ranks
    predicts = inverse(parts, count)[packed.places[packed.source].cpu()]
    of_ranks = [(predicts // parts.shape[1] == at).nonzero()[:, 0] for at in range(size)]
    targets = pad_sequence(of_ranks, batch_first=True, padding_value=-1)
    places, source = (predicts[targets[rank]] % parts.shape[1]).unique(return_inverse=True)
    local_tokens = parts[rank].clamp(min=0).to(device)
    fed = replace(
        packed,
        ids=packed.ids[:, local_tokens],
        positions=packed.positions[:, local_tokens],
        places=places.to(device),
        source=source.to(device),
        targets=packed.targets[targets[rank].to(device)],
        experts=None if packed.experts is None else packed.experts[local_tokens],
        attend=attend,
        counted=_own_counted(packed.counted, parts[rank].to(device)),
    )
    return Share(fed, partial(_whole, inverse(targets, len(predicts)).to(device), group))


def _own_counted(counted: torch.Tensor | None, own: torch.Tensor) -> torch.Tensor | None:
    """Return those of ``counted`` at the places ``own``, which are -1 for tokens fed again."""
    return None if counted is None else counted[own.clamp(min=0)] & (own >= 0)


def _whole(predicted: torch.Tensor, group: dist.ProcessGroup, own: torch.Tensor) -> torch.Tensor:
    """Join the numbers of all ranks from those of this rank, ``own``; empty ones stay so.
    ``predicted`` int64 [T]: where each token is among those that the ranks predict."""
    if not len(own):
        return own
    joined = Join.apply(own, group.size() * len(own), group)  # type: ignore[no-untyped-call]
    return joined.index_select(0, predicted)  # type: ignore[no-any-return]
