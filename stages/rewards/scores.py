"""Scores of responses: which of them are a number, and which responses have a reward.

score [B, K]    a number   the function's
                NaN        the function does not apply to the response (it returned None)
                inf        the function failed, and the response's group is dropped
                -0.0       the function failed, and counts as 0
A response has a reward when a function applies to it and none has failed on it. Others are in no
mean.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

# no function returns these: see number_of
FAILED = math.inf
FAILED_AS_ZERO = -0.0


def number_of(score: float) -> float:
    """Return ``score`` in float32, with a plain zero in place of -0.0."""
    return ctypes.c_float(score).value + 0.0


def has_failed(scores: torch.Tensor) -> torch.Tensor:
    """Return bool [B, K]: where a function failed."""
    return scores.isinf() | ((scores == 0) & scores.signbit())


def is_scored(scores: torch.Tensor) -> torch.Tensor:
    """Return bool [B, K]: where a function applies and has not failed."""
    return ~(scores.isnan() | has_failed(scores))


def has_reward(scores: torch.Tensor) -> torch.Tensor:
    """Return bool [B]: where a function applies and none has failed."""
    return ~(has_failed(scores).any(dim=1) | scores.isnan().all(dim=1))


def mean_of(values: torch.Tensor, counted: torch.Tensor) -> float | None:
    """Return the mean of ``values`` [B] where ``counted`` bool [B]; None where nothing is."""
    return float(values[counted].double().mean()) if bool(counted.any()) else None


@dataclass(frozen=True)
class RewardScores:
    """The scores of B responses. ``scores`` float32 [B, K]: one column per function. ``total``
    float32 [B]: the sum of score times weight, to which functions that failed or do not apply add
    nothing. ``by_token``: where it is asked for, the parts of that sum by token, float32 [T] of
    each response; NaN where no function gives a reward."""

    scores: torch.Tensor
    total: torch.Tensor
    by_token: Sequence[torch.Tensor] = ()

    @property
    def failed(self) -> torch.Tensor:
        """bool [B, K]: failures for which the group is dropped."""
        return self.scores.isinf()

    @property
    def counted(self) -> torch.Tensor:
        """bool [B]: the responses that have a reward."""
        return has_reward(self.scores)

    def means(self, names: Sequence[str]) -> dict[str, float | None]:
        """Return the mean score of each function: of the responses that it applies to and has not
        failed on."""
        scored = is_scored(self.scores)
        return {name: mean_of(self.scores[:, k], scored[:, k]) for k, name in enumerate(names)}
