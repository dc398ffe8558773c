"""Rewards within a response: what a function returns by turn or by token, and where it counts.

a number      of the whole response: at its last generated token
K numbers     as many as the response has turns: each at the last generated token of its turn
T numbers     as many as it has tokens: each at its token; None: no reward there

Importing this needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# A function's score of a response: a number, or its numbers by the tokens where they count.
Placed = float | dict[int, float]


def turn_ends(starts: Sequence[int], mask: Sequence[bool]) -> list[int]:
    """Return the last generated token of each turn; of a row without turns, the last token.
    ``starts``: the column turn_starts of the row, ``mask``: its loss_mask.

    >>> turn_ends([0, 3], [True, True, False, True, False])
    [1, 3]
    """
    turns = pairwise([*(starts or [0]), len(mask)])
    return [
        max((token for token in range(begin, end) if mask[token]), default=end - 1)
        for begin, end in turns
    ]


def placed(
    numbers: Sequence[float | None], ends: Sequence[int], tokens: int
) -> dict[int, float] | None:
    """Return ``numbers`` by the tokens where they count, of a response of so many ``tokens`` with
    turns that have ``ends``; None where they are neither one a turn nor one a token."""
    if len(numbers) not in (len(ends), tokens):
        return None
    places = ends if len(numbers) == len(ends) else range(tokens)
    pairs = zip(places, numbers, strict=True)
    return {place: number for place, number in pairs if number is not None}


def total(score: Placed) -> float:
    """Return the score of the whole response; NaN where the function does not apply to it."""
    if not isinstance(score, dict):
        return score
    return math.fsum(score.values()) + 0.0 if score else math.nan  # -0.0 says that it failed


def weighted(
    scores: Sequence[Placed], weights: Sequence[float], last: int, tokens: int
) -> torch.Tensor:
    """Return the reward of each of so many ``tokens``, float32 [T]: the weighted sum of what the
    functions give there; NaN where none gives one. ``last``: the last generated token."""
    import torch

    rewards: dict[int, float] = {}
    for score, weight in zip(scores, weights, strict=True):
        numbers = score if isinstance(score, dict) else {last: score}
        for token, number in numbers.items():
            if math.isfinite(number):
                rewards[token] = rewards.get(token, 0.0) + weight * number
    row = torch.full((tokens,), math.nan)
    if tokens:
        row[[*rewards]] = torch.tensor([*rewards.values()])
    return row
