"""Remarks on the reward functions of a run: why its reward may not rise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DOMINANT = 0.9  # of the reward's variance in groups: the other functions hardly count
OPPOSED = -0.3  # correlation with the rest of the reward
OFTEN = 0.1  # of calls that fail


def reward_notes(rewards: Mapping[str, Mapping[str, Any]], steps: int) -> list[str]:
    """Return what stands out in ``rewards`` of the summary, whose last ``steps`` steps they are of.

    >>> figures = {"last_steps": 0.0, "std": 0.0, "share": None, "correlation": None}
    >>> reward_notes({"right": {**figures, "calls": 9, "failed": 3}}, 5)
    ['right failed in 3 of 9 calls: logs/flow-0.log has the errors.']
    """
    notes = []
    ending = f"in the last {steps} steps"
    for name, figures in rewards.items():
        share, correlation = figures["share"], figures["correlation"]
        if figures["failed"] > OFTEN * figures["calls"]:
            calls = f"{figures['failed']:,.0f} of {figures['calls']:,.0f} calls"
            notes.append(f"{name} failed in {calls}: logs/flow-0.log has the errors.")
        if len(rewards) > 1 and figures["std"] == 0:
            score = format(figures["last_steps"], ".3g")
            notes.append(f"{name} scores all responses with {score} {ending}: it teaches nothing.")
        if share is not None and share > DOMINANT:
            notes.append(
                f"{name} makes {share:.0%} of the differences between the rewards of a group "
                f"{ending}: the other functions hardly count. Their weights are in "
                f"reward.functions."
            )
        is_minor = share is not None and share * len(rewards) <= 1
        if is_minor and correlation is not None and correlation < OPPOSED:
            notes.append(
                f"{name} pulls against the rest of the reward {ending}: in a group its scores "
                f"correlate with that by {correlation:.2f}, so one rises as the other falls."
            )
    return notes
