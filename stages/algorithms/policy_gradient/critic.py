"""What a critic learns: generalised advantage estimation (arXiv 1506.02438) and PPO's clipped value loss.

reward, values ─▶ gae: advantage, returns ─▶ value_errors: of the values now, clipped around those before ─▶ explained
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pydantic import Field

from stages.algorithms.interface import Algorithm, LossOutput, TokenBatch
from stages.flow.declarations import Columns

if TYPE_CHECKING:
    import torch

    from stages.algorithms.batch import TrainBatch


class ValueLearner(Algorithm):
    """The options and formulas that a policy with a critic and a critic of its own share."""

    gamma: float = Field(default=1.0, gt=0, le=1, description="Discount of later rewards, for each token.")
    gae_lambda: float = Field(
        default=0.95, ge=0, le=1, description="λ of GAE (Eq. 16): 0 trusts the critic, 1 the rewards alone."
    )
    value_clip: float = Field(
        default=0.2, gt=0, description="A value gains nothing farther than this from the one before the step."
    )
    kl_reward: float = Field(
        default=0.0,
        ge=0,
        description="Each token's reward is lowered by this × (rollout logprob - reference logprob). Above 0 the run has a "
        "reference stage. `kl_coef` adds a KL to the loss instead.",
    )

    def gae(self, batch: TrainBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Advantages and returns [T] of each response: the reward comes with its last token, and nothing follows it."""
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
        return advantage, advantage + values

    def value_errors(self, now: torch.Tensor, tokens: TokenBatch) -> torch.Tensor:
        """Half the squared errors [T] of the values ``now``: the larger of the plain and the clipped one."""
        returns, before = tokens["returns"], tokens["values"]
        near = before + (now - before).clamp(-self.value_clip, self.value_clip)
        return (now - returns).square().maximum((near - returns).square()) / 2

    def value_metrics(self, tokens: TokenBatch) -> dict[str, torch.Tensor]:
        """Sums from which :meth:`explained` computes, as means over the mini-batch's tokens."""
        returns, errors = tokens["returns"], tokens["values"] - tokens["returns"]
        means = {"value_error": errors.square(), "value_bias": errors}
        means |= {"return_square": returns.square(), "return_mean": returns}
        return {name: value.detach().sum() / tokens.total_tokens for name, value in means.items()}

    def explained(self, metrics: dict[str, float]) -> dict[str, float]:
        """``metrics`` with ``explained_variance`` of the returns by the values before the step: 1 is a perfect critic."""
        shown = dict(metrics)
        error = shown.pop("value_error") - shown.pop("value_bias") ** 2
        variance = shown.pop("return_square") - shown["return_mean"] ** 2
        return shown | {"explained_variance": 1 - error / variance if variance > 0 else 0.0}


class CriticTraining(ValueLearner):
    """What a critic with an engine of its own is trained with: the value loss, on the column ``values`` that it has made."""

    @property
    def credit_makes(self) -> Columns:
        return {}

    @property
    def prepare_makes(self) -> Columns:
        return {"returns": "float32 ragged"}

    @property
    def loss_reads(self) -> Columns:
        kl = ("rollout_logprobs", "ref_logprobs") if self.kl_reward else ()
        return {**dict.fromkeys((*kl, "values"), "float32 ragged"), "reward": "float32", **self.prepare_makes}

    def prepare(self, batch: TrainBatch) -> Mapping[str, torch.Tensor]:
        return {"returns": self.gae(batch)[1]}

    def loss(self, tokens: TokenBatch) -> LossOutput:
        assert tokens.values is not None
        errors = self.value_errors(tokens.values, tokens)
        return LossOutput(tokens.mean(errors), {"value_loss": errors.detach().sum() / tokens.total_tokens})
