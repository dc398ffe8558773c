"""Policy Filtration for PPO (arXiv 2409.06957): responses whose rewards are unreliable weigh less."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from stages.algorithms.policy_gradient.ppo import PPO
from stages.flow.declarations import Columns


class PFPPO(PPO):
    """PPO in which each response of a group is weighted by the rank of its reward. A reward model errs most where responses
    are mediocre; its best and its worst ones are most surely good and bad."""

    name: ClassVar[str] = "pf_ppo"
    least_group_size: ClassVar[int] = 2

    filtration: Literal["best_worst", "best_random", "best"] = Field(
        default="best_worst",
        description="Weight by rank of N responses, times N: half each for the first and the last; half for the first, the "
        "other half for all others; or all for the first (section 4).",
    )

    @property
    def credit_makes(self) -> Columns:
        return {"row_weight": "float32 finite"}

    def credit(self, group: Mapping[str, Any]) -> Mapping[str, Any]:
        """The weights, whose mean is 1. Responses with equal rewards share those of their ranks."""
        rewards = group["reward"].float()
        count = len(rewards)
        ranked = rewards.new_zeros(count)
        match self.filtration:
            case "best_worst":
                ranked[0] = ranked[-1] = 0.5
            case "best_random":
                ranked[:] = 0.5 / (count - 1)
                ranked[0] = 0.5
            case "best":
                ranked[0] = 1.0
        order = rewards.argsort(descending=True, stable=True)
        weights = rewards.new_zeros(count)
        weights[order] = ranked * count
        for value in rewards.unique():
            same = rewards == value
            weights[same] = weights[same].mean()
        return {"row_weight": weights}
