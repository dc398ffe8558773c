"""Group Relative Policy Optimization (arXiv 2402.03300), and what differs from it by its baseline,
normaliser or ratio.

grpo        (r - mean) / std of the group; mean over the batch's tokens, as DAPO (arXiv 2503.14476, Eq. 8)
dr_grpo     r - mean; sum over tokens by a constant: no bias by length or by difficulty (2503.20783, section 3.2)
gspo        the ratio, and its clip, of whole responses (2507.18071)
cispo       clipped importance weights in place of a clipped objective (MiniMax-M1, 2506.13585)
dapo        a higher upper clip, dynamic sampling, and a penalty of overlong responses (2503.14476)
rloo        r - mean of the group's others (2402.14740, Eq. 8); one ratio for the whole response
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from stages.algorithms.interface import with_defaults
from stages.algorithms.policy_gradient.base import GroupCompared
from stages.algorithms.token_batch import TokenBatch
from stages.flow.catalogue import MASK, OPTIONAL
from stages.flow.declarations import Columns, Drop

if TYPE_CHECKING:
    import torch

    from stages.algorithms.batch import TrainBatch

ADVANTAGE_EPS = 1e-4  # TRL's; keeps a group of almost equal rewards from being blown up


@with_defaults(correction="auto")
class GRPO(GroupCompared):
    """Clipped policy gradient with group-normalised advantages, corrected for staleness."""

    name: ClassVar[str] = "grpo"
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

    scale_rewards: bool | Literal["batch"] = Field(
        default=True,
        description="Divide advantages by the group's standard deviation. false: only subtract the "
        "mean (Dr. GRPO, arXiv 2503.20783). `batch`: divide by the deviation of the rewards of the "
        "whole train batch, so that a group of nearly equal rewards is not blown up (Lite-PPO, "
        "arXiv 2508.08221, section 4.1).",
    )

    @property
    def loss_reads(self) -> Columns:
        reward = {"reward": "float32"} if self.scale_rewards == "batch" else {}
        return {**super().loss_reads, **reward}

    def advantage(self, rewards: torch.Tensor) -> torch.Tensor:
        """Return ``(r - mean) / (std + 1e-4)``, where std has N - 1 in its denominator as in
        TRL."""
        centred = rewards - rewards.mean()
        scaled = self.scale_rewards is True
        return centred / (rewards.std() + ADVANTAGE_EPS) if scaled else centred

    def prepare(self, batch: TrainBatch) -> Mapping[str, torch.Tensor]:
        if self.scale_rewards != "batch":
            return super().prepare(batch)
        deviation = batch.moments(batch["reward"])[1]
        return {"advantage": batch["advantage"] / (deviation + ADVANTAGE_EPS)}


@with_defaults(scale_rewards=False, loss_normalization="constant")
class DrGRPO(GRPO):
    """GRPO without its two biases: no division by the group's deviation, nor by the length of
    responses."""

    name: ClassVar[str] = "dr_grpo"
    citation: ClassVar[str] = """
    @misc{liu2025understanding,
      title = {Understanding {R1-Zero}-Like Training: A Critical Perspective},
      author = {Liu, Zichen and Chen, Changyu and Li, Wenjun and Qi, Penghui and others},
      year = {2025},
      eprint = {2503.20783},
      archivePrefix = {arXiv},
    }
    """


@with_defaults(
    correction="none",
    ratio_level="geometric",
    loss_normalization="sequence",
    clip_low=3e-4,
    clip_high=4e-4,
)
class GSPO(GRPO):
    """GRPO with one importance ratio for each response, the geometric mean of its tokens' (Eq. 7).

    It is less noisy for a mixture of experts, whose routing differs between engines. The clip range
    is the paper's, far smaller than for tokens.
    """

    name: ClassVar[str] = "gspo"
    citation: ClassVar[str] = """
    @misc{zheng2025group,
      title = {Group Sequence Policy Optimization},
      author = {Zheng, Chujie and Liu, Shixuan and Li, Mingze and Chen, Xiong-Hui and others},
      year = {2025},
      eprint = {2507.18071},
      archivePrefix = {arXiv},
    }
    """


@with_defaults(correction="none", clip_high=4.0)
class CISPO(GRPO):
    """REINFORCE with the ratio, cut at ``1 + clip_high`` and without a gradient, as its weight (Eq.
    4 and 5). PPO's clip takes rare tokens, on which a response often turns, out of the gradient;
    here each token stays in it. ``clip_low`` and ``max_ratio`` have no effect."""

    name: ClassVar[str] = "cispo"
    citation: ClassVar[str] = """
    @misc{minimax2025m1,
      title = {{MiniMax-M1}: Scaling Test-Time Compute Efficiently with Lightning Attention},
      author = {{MiniMax}},
      year = {2025},
      eprint = {2506.13585},
      archivePrefix = {arXiv},
    }
    """

    def surrogate(
        self, ratio: torch.Tensor, tokens: TokenBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        most = 1 + self.clip_high
        return ratio.clamp(max=most).detach() * tokens["advantage"] * tokens.logprobs, ratio > most


@with_defaults(clip_high=0.28, drop_equal=True)
class DAPO(GRPO):
    """GRPO for long reasoning.

    ``drop_equal`` is its dynamic sampling (Eq. 11): groups that teach nothing are dropped, and
    others generated in their place. Set ``rollout.truncated = "mask"`` for its overlong filtering.
    """

    name: ClassVar[str] = "dapo"
    citation: ClassVar[str] = """
    @misc{yu2025dapo,
      title = {{DAPO}: An Open-Source {LLM} Reinforcement Learning System at Scale},
      author = {Yu, Qiying and Zhang, Zheng and Zhu, Ruofei and Yuan, Yufeng and others},
      year = {2025},
      eprint = {2503.14476},
      archivePrefix = {arXiv},
    }
    """

    longest_response: int = Field(
        default=0,
        ge=0,
        description="Tokens from which a response gets the whole penalty of -1; usually "
        "`rollout.max_tokens`. 0: none.",
    )
    overlong_tokens: int = Field(
        default=0,
        ge=0,
        description="The penalty grows from 0 over this many tokens before `longest_response` (Eq. "
        "13).",
    )

    drop_by: Literal["correctness", "penalized"] = Field(
        default="correctness",
        description="The rewards that `drop_equal` compares: those before the length penalty (Eq. "
        "11 drops groups that are all correct or all wrong), or those after it.",
    )

    @property
    def credit_reads(self) -> Columns:
        lengths = {"response_ids": "int64 ragged"} if self.longest_response else {}
        return {**super().credit_reads, **lengths}

    @property
    def credit_optional(self) -> Columns:
        mask = {MASK: OPTIONAL[MASK]} if self.longest_response else {}
        return {**super().credit_optional, **mask}

    def credit(self, group: Mapping[str, Any]) -> Mapping[str, Any] | Drop:
        """Return GRPO's credit of the rewards with the penalty ``(longest - overlong - length) /
        overlong``, cut to [-1, 0]. Tokens that ``loss_mask`` leaves out do not count."""
        if not self.longest_response:
            return super().credit(group)
        rewards = group["reward"].float()
        lengths = (
            [int(row.sum()) for row in group[MASK]]
            if MASK in group
            else list(map(len, group["response_ids"]))
        )
        over = rewards.new_tensor(lengths) - self.longest_response
        penalty = (
            (over / self.overlong_tokens + 1).clamp(0, 1)
            if self.overlong_tokens
            else (over >= 0).float()
        )
        penalized = rewards - penalty - self.penalties(group)
        return self.compared(
            penalized, dropped_by=rewards if self.drop_by == "correctness" else penalized
        )


@with_defaults(ratio_level="sequence", loss_normalization="sequence")
class RLOO(GroupCompared):
    """REINFORCE with the mean reward of the group's other responses as the baseline; the response
    is one action."""

    name: ClassVar[str] = "rloo"
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
