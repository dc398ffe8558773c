"""Context parallelism: the tokens of a packed micro-batch divided over the ``cp`` ranks of a replica.

    the same micro-batch of S tokens on each rank ─▶ about S / cp of them through embeddings, layers and head;
                                                     in attention the ranks exchange what it needs (ulysses.py, ring.py)
    logprobs of own tokens ─▶ gathered: [T] on each rank, so that algorithms see whole rows;
                              backward: each rank follows the gradient of its own part

The loss is the same on each rank, and its gradient reaches the weights through the tokens of each rank alone, so gradients
add up over the ranks as those of data-parallel ones do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist

from stages.engines.torch.packing import PackedBatch
from stages.engines.torch.parallel.ring import Ring, dealt
from stages.engines.torch.parallel.ulysses import attention_by_heads

ContextParallel = Literal["ulysses", "ring"]


@dataclass(frozen=True)
class Share:
    """This rank's tokens of a micro-batch, ``fed``, as a model takes them, and where each of the T predicted tokens is among
    those that the ranks predict: ``answers`` int64 [T]."""

    fed: PackedBatch
    answers: torch.Tensor
    group: dist.ProcessGroup

    def whole(self, own: torch.Tensor) -> torch.Tensor:
        """The numbers of all ranks in the order of the micro-batch, [T], from those of this rank; empty ones stay so."""
        if not len(own):
            return own
        gathered: torch.Tensor = _Gather.apply(own, self.group)  # type: ignore[no-untyped-call]
        return gathered.index_select(0, self.answers)


def divide(packed: PackedBatch, group: dist.ProcessGroup, method: ContextParallel) -> Share:
    """Returns the share of this rank of ``group`` in ``packed``, which is the same on all of them. Ranks have equally many
    tokens: some feed one that belongs to nobody."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    device, count = packed.ids.device, packed.ids.shape[1]
    attend: Callable[..., torch.Tensor]
    if method == "ring":
        segments = dealt(packed, size)
        parts = [own.tokens() for own in segments]
        attend = Ring(group, segments, device).attention
    else:
        parts = list(torch.arange(count).tensor_split(size))
    most = max(map(len, parts))
    where = torch.empty(count, dtype=torch.int64)  # of each token, with ``most`` for each rank
    for at, part in enumerate(parts):
        where[part] = torch.arange(len(part)) + at * most
    if method == "ulysses":
        attend = partial(attention_by_heads, group, where.to(device))
    predicts = where[packed.places[packed.source].cpu()]  # [T]
    of_rank = [(predicts // most == at).nonzero()[:, 0] for at in range(size)]
    longest = max(map(len, of_rank))
    answers = torch.empty(len(predicts), dtype=torch.int64)
    for at, some in enumerate(of_rank):
        answers[some] = torch.arange(len(some)) + at * longest
    places, source = _filled(predicts[of_rank[rank]] - rank * most, longest).unique(return_inverse=True)
    own = _filled(parts[rank], most).to(device)
    fed = replace(
        packed,
        ids=packed.ids[:, own],
        positions=packed.positions[:, own],
        places=places.to(device),
        source=source.to(device),
        targets=packed.targets[_filled(of_rank[rank], longest).to(device)],
        experts=None if packed.experts is None else packed.experts[own],
        attend=attend,
    )
    return Share(fed, answers.to(device), group)


def _filled(values: torch.Tensor, count: int) -> torch.Tensor:
    return torch.cat([values, values.new_zeros(count - len(values))])


class _Gather(torch.autograd.Function):
    """[n] of each rank ─▶ [ranks · n]. All ranks compute the same from it, so each one's gradient is that of its part."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, own.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0].chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)], None


def heads_problem(heads: int, tp: int, cp: int, method: ContextParallel) -> str:
    """Why ``cp`` ranks cannot divide the ``heads`` of queries that each of ``tp`` ranks has, or ""."""
    if method != "ulysses" or heads // tp % cp == 0:
        return ""
    return f"{heads} attention heads on {tp} tensor-parallel ranks are {heads // tp} each, which {cp} ranks cannot share evenly"
