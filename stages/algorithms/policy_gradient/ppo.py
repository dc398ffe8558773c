"""Proximal Policy Optimization (arXiv 1707.06347) with generalised advantage estimation (1506.02438).

reward, values ─▶ prepare: GAE over each response ─▶ advantage (whitened), returns ─▶ loss of policy and values, both clipped
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from stages.algorithms.interface import LossOutput, TokenBatch, with_defaults
from stages.algorithms.policy_gradient.base import PolicyGradient
from stages.flow.declarations import Columns, RunsOn

if TYPE_CHECKING:
    import torch

    from stages.algorithms.batch import TrainBatch


@with_defaults(epochs=2)
class PPO(PolicyGradient):
    """Clipped policy gradient with a learned critic: a linear value head on the policy's last hidden states, trained with
    it. It needs no group (``algorithm.group_size = 1`` will do), and gives each token its own advantage."""

    name: ClassVar[str] = "ppo"

    gamma: float = Field(default=1.0, gt=0, le=1, description="Discount of later rewards, for each token.")
    gae_lambda: float = Field(
        default=0.95, ge=0, le=1, description="λ of GAE (Eq. 16): 0 trusts the critic, 1 the rewards alone."
    )
    value_coef: float = Field(default=0.5, ge=0, description="Weight of the value loss.")
    value_clip: float = Field(
        default=0.2, gt=0, description="A value gains nothing farther than this from the one before the step."
    )
    whiten: bool = Field(default=True, description="Advantages get mean 0 and variance 1 over the train batch.")
    kl_reward: float = Field(
        default=0.0,
        ge=0,
        description="Each token's reward is lowered by this × (rollout logprob - reference logprob). Above 0 the run has a "
        "reference stage. `kl_coef` adds a KL to the loss instead.",
    )

    @property
    def scores(self) -> Mapping[str, RunsOn]:
        reference: dict[str, RunsOn] = {"ref_logprobs": "frozen model"} if self.kl_reward else {}
        return {**super().scores, **reference, "values": "value head"}

    @property
    def credit_makes(self) -> Columns:
        return {}

    @property
    def prepare_makes(self) -> Columns:
        return {"advantage": "float32 ragged", "returns": "float32 ragged"}

    @property
    def loss_reads(self) -> Columns:
        return {**super().loss_reads, "reward": "float32", **self.prepare_makes}

    def prepare(self, batch: TrainBatch) -> Mapping[str, torch.Tensor]:
        """GAE of each response: the reward comes with its last token, and nothing follows it."""
        values, last = batch["values"], batch.lengths.cumsum(0) - 1
        rewards = values.new_zeros(len(values))
        if self.kl_reward:
            rewards -= self.kl_reward * (batch["rollout_logprobs"] - batch["ref_logprobs"])
        rewards[last] += batch["reward"].to(rewards.dtype)
        following = values.roll(-1)
        following[last] = 0
        errors = rewards + self.gamma * following - values
        advantage = errors.clone()
        longest = int(batch.lengths.max())
        for place in range(longest - 2, -1, -1):  # backwards, all responses at once
            at = (last - batch.lengths + 1 + place)[batch.lengths > place + 1]
            advantage[at] += self.gamma * self.gae_lambda * advantage[at + 1]
        returns = advantage + values
        return {"advantage": batch.whitened(advantage) if self.whiten else advantage, "returns": returns}

    def loss(self, tokens: TokenBatch) -> LossOutput:
        policy = super().loss(tokens)
        assert tokens.values is not None
        returns, before = tokens["returns"], tokens["values"]
        near = before + (tokens.values - before).clamp(-self.value_clip, self.value_clip)
        errors = (tokens.values - returns).square().maximum((near - returns).square())
        means = {
            "value_error": (before - returns).square(),
            "value_bias": before - returns,
            "return_square": returns.square(),
            "return_mean": returns,
            "value_loss": errors / 2,
        }
        metrics = {name: value.detach().sum() / tokens.total_tokens for name, value in means.items()}
        value_loss = self._mean(errors / 2, tokens)
        return LossOutput(policy.loss + self.value_coef * value_loss, {**policy.metrics, **metrics})

    def finish(self, metrics: dict[str, float]) -> dict[str, float]:
        """Adds ``explained_variance`` of the returns by the values before the step: 1 is a perfect critic, 0 none."""
        shown = super().finish(metrics)
        error = shown.pop("value_error") - shown.pop("value_bias") ** 2
        variance = shown.pop("return_square") - shown["return_mean"] ** 2
        return shown | {"explained_variance": 1 - error / variance if variance > 0 else 0.0}
