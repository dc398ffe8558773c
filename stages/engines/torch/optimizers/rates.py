"""Learning rates of the train batches of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

Schedule = Literal["constant", "linear", "cosine"]


def learning_rate_at(
    step: int,
    *,
    peak: float,
    total_steps: int,
    warmup_steps: int,
    schedule: Schedule,
    floor: float = 0.0,
) -> float:
    """Return the learning rate of train batch ``step`` (from 0; skipped ones count): it rises over
    ``warmup_steps`` to ``peak`` at batch ``warmup_steps - 1``, then is constant, or falls to
    ``floor`` × ``peak`` at batch ``total_steps``.

    >>> [learning_rate_at(s, peak=1.0, total_steps=6, warmup_steps=2, schedule="linear") for s in range(7)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "constant":
        return peak
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    share = 1 - progress if schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return peak * (floor + (1 - floor) * share if floor else share)


def learning_rates_at(
    version: int, schedule: Mapping[str, Any], peaks: tuple[float, float], policy_begins: int
) -> tuple[float, float]:
    """Return the learning rates of the policy and of its value head for the train batch
    ``version``.

    ``schedule``: arguments of :func:`learning_rate_at`. The value head's rate goes by it from the
    first train batch on; the policy's from ``policy_begins`` on, and is 0 before. ``peaks``: of the
    policy and of the value head."""
    of_policy = {
        **schedule,
        "peak": peaks[0],
        "total_steps": schedule["total_steps"] - policy_begins,
    }
    policy_rate = (
        learning_rate_at(version - policy_begins, **of_policy) if version >= policy_begins else 0.0
    )
    return policy_rate, learning_rate_at(version, **{**schedule, "peak": peaks[1]})
