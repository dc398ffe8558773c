"""Thresholds of a number of each token over the trained tokens of the whole train batch, on all
ranks.

values [T] of this rank ─▶ how many are above a cut, added up over ranks ─▶ bisected: the same cut on each of them
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from stages.algorithms.batch import TrainBatch


def cut_below(batch: TrainBatch, values: torch.Tensor, most: float) -> float:
    """Return the largest number for which the mean of those ``values`` [T], not below 0, that are
    not above it is at most ``most``."""

    def has_room(cut: float) -> bool:
        small = values[batch.is_trained & (values <= cut)].double()
        sums = small.new_tensor([len(small), float(small.sum())])
        count, total = batch.total(sums).tolist()
        return bool(total <= most * count)

    return bisected(has_room)


def cut_above(batch: TrainBatch, values: torch.Tensor, share: float) -> float:
    """Return the number above which is the ``share`` of ``values`` [T]: one of them at least."""
    return _cut_of(batch, values, max(1.0, share * _trained_tokens(batch)))


def in_top(batch: TrainBatch, values: torch.Tensor, share: float) -> torch.Tensor:
    """Return bool [T]: the trained tokens whose value is at or above the quantile ``1 - share``,
    interpolated linearly as torch.quantile does."""
    count = 1 + math.floor(share * (_trained_tokens(batch) - 1) + 1e-9)
    return batch.is_trained & (values > _cut_of(batch, values, count))


def _trained_tokens(batch: TrainBatch) -> float:
    return batch.total(batch.is_trained.sum().double()).item()


def _cut_of(batch: TrainBatch, values: torch.Tensor, count: float) -> float:
    """Return the largest number above which are ``count`` of ``values`` [T] at least."""

    def has_room(cut: float) -> bool:
        above = (batch.is_trained & (values > cut)).sum().double()
        return bool(batch.total(above).item() >= count)

    return bisected(has_room)


def bisected(has_room: Callable[[float], bool]) -> float:
    """Return the largest number that ``has_room``, where all smaller ones have it too, to a
    billionth of itself. Ranks that call it side by side make the same calls."""

    def number(place: float) -> float:
        return math.copysign(math.expm1(abs(place)), place)  # as exact near 0 as far from it

    low, high = -40.0, 40.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if has_room(number(middle)) else (low, middle)
    return number(low)
