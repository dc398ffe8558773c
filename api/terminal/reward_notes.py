"""Remarks on the reward functions of a run: why its reward may not rise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from api.terminal.numbers import lost_text

DOMINANT = 0.9  # of the reward's variance in groups: the other functions hardly count
OPPOSED = -0.3  # correlation with the rest of the reward
OFTEN = 0.05  # of the responses: each costs its group


def reward_notes(rewards: Mapping[str, Mapping[str, Any]], steps: int) -> list[str]:
    """Return what stands out in ``rewards`` of the summary, whose last ``steps`` steps they are of.

    >>> figures = {"last_steps": 0.0, "std": 0.0, "share": None, "correlation": None}
    >>> reward_notes({"right": {**figures, "responses": 9, "lost": 3, "again": 7}}, 5)
    ['right could not score 3 of 9 responses (33%), called again 7 times: logs/flow-0.log has the errors.']
    """
    notes = []
    ending = f"in the last {steps} steps"
    for name, figures in rewards.items():
        share, correlation = figures["share"], figures["correlation"]
        if figures["lost"] > OFTEN * figures["responses"]:
            notes.append(
                f"{name} {lost_text(figures)}, called again {figures['again']:,.0f} times: "
                f"logs/flow-0.log has the errors."
            )
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
