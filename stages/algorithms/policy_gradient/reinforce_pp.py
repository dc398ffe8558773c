"""REINFORCE++ (arXiv 2501.03262): PPO's loss without a critic, advantages normalised over the whole
train batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from stages.algorithms.policy_gradient.base import PolicyGradient
from stages.algorithms.policy_gradient.terms.kl_reward import KLCredit

if TYPE_CHECKING:
    import torch

    from stages.algorithms.batch import TrainBatch


class ReinforcePlusPlus(PolicyGradient, KLCredit):
    """REINFORCE++: for prompts with one response (``algorithm.group_size = 1``) as for several.

    Rewards whose scale differs between prompts stay comparable, as they are divided by the
    deviation of the batch, not of the group.
    """

    name: ClassVar[str] = "reinforce_pp"
    use_for: ClassVar[str] = "Many prompts with one response each, in place of groups."
    citation: ClassVar[str] = """
    @misc{hu2025reinforce,
      title = {{REINFORCE++}: A Simple and Efficient Approach for Aligning Large Language Models},
      author = {Hu, Jian},
      year = {2025},
      eprint = {2501.03262},
      archivePrefix = {arXiv},
    }
    """

    baseline: Literal["none", "group"] = Field(
        default="none",
        description="`group`: subtract the mean reward of the group first (REINFORCE++-baseline). "
        "`none`: only the batch's.",
    )

    whiten_over: Literal["tokens", "rows"] = Field(
        default="tokens",
        description="Advantages get mean 0 and variance 1 over the trained tokens of the train "
        "batch, of which a long response has more (the paper's); or over its rows, "
        "each of which counts once.",
    )

    def credit(self, group: Mapping[str, Any]) -> Mapping[str, Any]:
        rewards = group["reward"].float() - self.penalties(group)
        return {"advantage": rewards - rewards.mean() if self.baseline == "group" else rewards}

    def prepare(self, batch: TrainBatch) -> Mapping[str, torch.Tensor]:
        """Whiten the advantage over the train batch: mean 0, variance 1 (Eq. 6), of all ranks."""
        advantage = batch.whitened(batch["advantage"], self.whiten_over)
        return {**super().prepare(batch), "advantage": advantage}
