"""Collective calls through which gradients flow back: what ranks have slices of, and rows that go
to other ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def own_slice(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return this rank's slice of ``x`` [T, ...] by torch's chunk rule."""
    step = -(-len(x) // group.size())
    return x[group.rank() * step : (group.rank() + 1) * step]


def _joined(part: torch.Tensor, count: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the slices of all ranks, ``count`` rows."""
    step = -(-count // group.size())
    padded = part.new_zeros(step, *part.shape[1:])
    padded[: len(part)] = part
    parts = [torch.empty_like(padded) for _ in range(group.size())]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([rank_part[: max(0, count - at * step)] for at, rank_part in enumerate(parts)])


class Join(torch.autograd.Function):
    """The whole of all ranks' slices. Each rank has the same gradient of it, and takes its
    slice."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, count: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _joined(part, count, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return own_slice(gradients[0], ctx.group), None, None


class AllToAll(torch.autograd.Function):
    """Rows to the ranks of ``group``: so many to each, in order, and so many from each.

    Gradients go back.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.sent = sent
        ctx.received = received
        ctx.group = group
        return _exchanged(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _exchanged(gradients[0], ctx.received, ctx.sent, ctx.group), None, None, None


def _exchanged(
    rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    out = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
    return out
