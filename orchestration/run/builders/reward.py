"""A further reward worker, for ``reward.workers`` above 1."""

from __future__ import annotations

from orchestration.recipe.flow import flow_of
from orchestration.run.builders.job import Job
from stages.rewards.stage import Reward


class RewardJob(Job):
    """Computes the rewards of the rows that it claims, beside the reward stage of the `flow` worker."""

    async def build(self) -> None:
        self.control(Reward(await self.open_rewards(), self.tokenizer, tuple(flow_of(self.recipe)["reward"].needs)))
