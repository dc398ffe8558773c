"""Group Relative Policy Optimization (arXiv 2402.03300), and what differs from it by its baseline
or normaliser.

grpo        (r - mean) / std of the group; mean over the batch's tokens, as DAPO (arXiv 2503.14476, Eq. 8)
dr_grpo     r - mean; sum over tokens by a constant: no bias by length or by difficulty (2503.20783, section 3.2)
rloo        r - mean of the group's others (2402.14740, Eq. 8); one ratio for the whole response
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from stages.algorithms.interface import with_defaults
from stages.algorithms.policy_gradient.base import GroupCompared
from stages.flow.declarations import Columns

if TYPE_CHECKING:
    import torch

    from stages.algorithms.batch import TrainBatch

ADVANTAGE_EPS = 1e-4  # TRL's; keeps a group of almost equal rewards from being blown up


@with_defaults(correction="auto")
class GRPO(GroupCompared):
    """Clipped policy gradient with group-normalised advantages, corrected for staleness."""

    name: ClassVar[str] = "grpo"
    use_for: ClassVar[str] = (
        "The first choice: rewards can be computed, and eight or more responses to a prompt "
        "can be paid for."
    )
    citation: ClassVar[str] = """
    @misc{shao2024deepseekmath,
      title = {{DeepSeekMath}: Pushing the Limits of Mathematical Reasoning
        in Open Language Models},
      author = {Shao, Zhihong and Wang, Peiyi and Zhu, Qihao and Xu, Runxin and others},
      year = {2024},
      eprint = {2402.03300},
      archivePrefix = {arXiv},
    }
    """

    scale_rewards: bool = Field(
        default=True,
        description="Divide advantages by a standard deviation of rewards. false: only subtract "
        "the mean (Dr. GRPO, arXiv 2503.20783).",
    )
    deviation_of: Literal["group", "batch"] = Field(
        default="group",
        description="The rewards of that deviation: of the `group`, or of the whole train `batch`, "
        "so that a group of nearly equal rewards is not blown up (Lite-PPO, arXiv 2508.08221, "
        "section 4.1).",
    )

    @property
    def _by_batch(self) -> bool:
        return self.scale_rewards and self.deviation_of == "batch"

    @property
    def loss_reads(self) -> Columns:
        reward = {"reward": "float32"} if self._by_batch else {}
        return {**super().loss_reads, **reward}

    def advantage(self, rewards: torch.Tensor) -> torch.Tensor:
        """Return ``(r - mean) / (std + 1e-4)``, where std has N - 1 in its denominator as in
        TRL."""
        centred = rewards - rewards.mean()
        by_group = self.scale_rewards and not self._by_batch
        return centred / (rewards.std() + ADVANTAGE_EPS) if by_group else centred

    def prepare(self, batch: TrainBatch) -> Mapping[str, torch.Tensor]:
        if not self._by_batch:
            return super().prepare(batch)
        deviation = batch.moments(batch["reward"])[1]
        advantage = batch["advantage"] / (deviation + ADVANTAGE_EPS)
        return {**super().prepare(batch), "advantage": advantage}


@with_defaults(scale_rewards=False, loss_normalization="constant")
class DrGRPO(GRPO):
    """GRPO without its two biases: no division by the group's deviation, nor by the length of
    responses."""

    name: ClassVar[str] = "dr_grpo"
    use_for: ClassVar[str] = (
        "As `grpo`, where wrong responses grow longer, or prompts that are nearly solved "
        "count too much."
    )
    citation: ClassVar[str] = """
    @misc{liu2025understanding,
      title = {Understanding {R1-Zero}-Like Training: A Critical Perspective},
      author = {Liu, Zichen and Chen, Changyu and Li, Wenjun and Qi, Penghui and others},
      year = {2025},
      eprint = {2503.20783},
      archivePrefix = {arXiv},
    }
    """


@with_defaults(ratio_level="sequence", loss_normalization="sequence")
class RLOO(GroupCompared):
    """REINFORCE with the mean reward of the group's other responses as the baseline; the response
    is one action."""

    name: ClassVar[str] = "rloo"
    use_for: ClassVar[str] = (
        "Short responses and little staleness: a response is one action, without a scale by "
        "the deviation."
    )
    citation: ClassVar[str] = """
    @misc{ahmadian2024back,
      title = {Back to Basics: Revisiting {REINFORCE} Style Optimization
        for Learning from Human Feedback in {LLMs}},
      author = {Ahmadian, Arash and Cremer, Chris and Gallé, Matthias and others},
      year = {2024},
      eprint = {2402.14740},
      archivePrefix = {arXiv},
    }
    """

    def advantage(self, rewards: torch.Tensor) -> torch.Tensor:
        """Return ``r_i`` minus the mean of the others, which is ``N / (N - 1) · (r_i - mean)``."""
        return (rewards - rewards.mean()) * (len(rewards) / (len(rewards) - 1))
