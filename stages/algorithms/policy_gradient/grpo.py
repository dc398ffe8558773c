"""Group Relative Policy Optimization (arXiv 2402.03300), and what differs from it by its baseline or its normaliser.

grpo        (r - mean) / std of the group; mean over the batch's tokens, as DAPO (arXiv 2503.14476, Eq. 8)
dr_grpo     r - mean; sum over tokens by a constant: no bias by length or by difficulty (2503.20783, section 3.2)
rloo        r - mean of the group's others (2402.14740, Eq. 8); one ratio for the whole response
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from stages.algorithms.interface import with_defaults
from stages.algorithms.policy_gradient.base import GroupCompared

if TYPE_CHECKING:
    import torch

ADVANTAGE_EPS = 1e-4  # TRL's; keeps a group of almost equal rewards from being blown up


@with_defaults(correction="auto")
class GRPO(GroupCompared):
    """Clipped policy gradient with group-normalised advantages, corrected for staleness."""

    name: ClassVar[str] = "grpo"

    scale_rewards: bool = Field(
        default=True,
        description="Divide advantages by the group's standard deviation. false: only subtract the mean (Dr. GRPO, arXiv "
        "2503.20783).",
    )

    def advantage(self, rewards: torch.Tensor) -> torch.Tensor:
        """``(r - mean) / (std + 1e-4)``, where std has N - 1 in its denominator as in TRL."""
        centred = rewards - rewards.mean()
        return centred / (rewards.std() + ADVANTAGE_EPS) if self.scale_rewards else centred


@with_defaults(scale_rewards=False, loss_normalization="constant")
class DrGRPO(GRPO):
    """GRPO without its two biases: no division by the group's deviation, nor by the length of responses."""

    name: ClassVar[str] = "dr_grpo"


@with_defaults(ratio_level="sequence", loss_normalization="sequence")
class RLOO(GroupCompared):
    """REINFORCE with the mean reward of the group's other responses as the baseline; the response is one action."""

    name: ClassVar[str] = "rloo"

    def advantage(self, rewards: torch.Tensor) -> torch.Tensor:
        """``r_i`` minus the mean of the others, which is ``N / (N - 1) · (r_i - mean)``."""
        return (rewards - rewards.mean()) * (len(rewards) / (len(rewards) - 1))
