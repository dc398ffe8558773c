"""Proximal Policy Optimization (arXiv 1707.06347) with generalised advantage estimation (1506.02438).

reward, values ─▶ prepare: GAE over each response ─▶ advantage (whitened), returns ─▶ loss of policy and values, both clipped
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from stages.algorithms.interface import Algorithm, LossOutput, TokenBatch, with_defaults
from stages.algorithms.policy_gradient.base import PolicyGradient
from stages.algorithms.policy_gradient.critic import CriticTraining, ValueLearner
from stages.flow.declarations import Columns, RunsOn

if TYPE_CHECKING:
    import torch

    from stages.algorithms.batch import TrainBatch


@with_defaults(epochs=2)
class PPO(PolicyGradient, ValueLearner):
    """Clipped policy gradient with a learned critic. It needs no group (``algorithm.group_size = 1`` will do), and gives
    each token its own advantage."""

    name: ClassVar[str] = "ppo"

    critic: Literal["trunk", "own"] = Field(
        default="trunk",
        description="`trunk`: values are those of a linear layer on the policy's last hidden states, which is trained with "
        "it. `own`: of another model, with an engine and a worker of its own (the recipe's section `critic`).",
    )
    value_epochs: int | None = Field(
        default=None, ge=1, description="Epochs of a critic of its own on each train batch. Default: `epochs`."
    )
    value_coef: float = Field(
        default=0.5, ge=0, description="Weight of the value loss of a critic on the policy's trunk."
    )
    whiten: bool = Field(default=True, description="Advantages get mean 0 and variance 1 over the train batch.")

    @property
    def scores(self) -> Mapping[str, RunsOn]:
        reference: dict[str, RunsOn] = {"ref_logprobs": "frozen model"} if self.kl_reward else {}
        return {**super().scores, **reference, "values": "critic" if self.critic == "own" else "value head"}

    def critic_algorithm(self) -> Algorithm | None:
        if self.critic == "trunk":
            return None
        shared = self.model_dump(include=set(CriticTraining.model_fields))
        return CriticTraining(**shared | {"epochs": self.value_epochs or self.epochs})

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
        advantage, returns = self.gae(batch)
        return {"advantage": batch.whitened(advantage) if self.whiten else advantage, "returns": returns}

    def loss(self, tokens: TokenBatch) -> LossOutput:
        policy = super().loss(tokens)
        metrics = {**policy.metrics, **self.value_metrics(tokens)}
        if tokens.values is None:  # a critic of its own learns them
            return LossOutput(policy.loss, metrics)
        errors = self.value_errors(tokens.values, tokens)
        metrics["value_loss"] = errors.detach().sum() / tokens.total_tokens
        return LossOutput(policy.loss + self.value_coef * self._mean(errors, tokens), metrics)

    def finish(self, metrics: dict[str, float]) -> dict[str, float]:
        """Adds ``explained_variance`` of the returns by the values before the step: 1 is a perfect critic, 0 none."""
        return self.explained(super().finish(metrics))
