"""The divergence from the reference as a part of the reward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from stages.algorithms.interface import Algorithm
from stages.flow.catalogue import MASK, OPTIONAL
from stages.flow.declarations import Columns, RunsOn

if TYPE_CHECKING:
    import torch


class KLReward(Algorithm):
    """The options of an algorithm whose rewards are lowered by the divergence."""

    kl_reward: float = Field(
        default=0.0,
        ge=0,
        description="Each token's reward is lowered by this × the estimate of KL(policy || "
        "reference), by the logprobs of the policy that generated it; without a critic that of a "
        "response by the sum over its tokens. Above 0 the run has a reference stage. `kl_coef` "
        "adds a KL to the loss instead.",
    )
    kl_reward_estimator: Literal["k1", "k2", "k3"] = Field(
        default="k1",
        description="Of `kl_reward`, as `kl_estimator` of the loss; `k1` has no bias.",
    )

    @property
    def reads_kl(self) -> Columns:
        """The columns that the divergence is estimated from."""
        names = ("rollout_logprobs", "ref_logprobs") if self.kl_reward else ()
        return dict.fromkeys(names, "float32 ragged")

    @property
    def scores(self) -> Mapping[str, RunsOn]:
        reference: dict[str, RunsOn] = {"ref_logprobs": "frozen model"} if self.kl_reward else {}
        return {**super().scores, **reference}

    def token_penalties(
        self, rollout_logprobs: torch.Tensor, ref_logprobs: torch.Tensor
    ) -> torch.Tensor:
        """Return what is taken from the reward of each token [T]."""
        away = rollout_logprobs - ref_logprobs
        match self.kl_reward_estimator:
            case "k2":
                away = away.square() / 2
            case "k3":
                away = (-away).exp() - 1 + away
        return self.kl_reward * away

    def penalties(self, group: Mapping[str, Any]) -> torch.Tensor | float:
        """Return what is taken from the reward of each response [N] of a group: the sum over its
        tokens, without those that ``loss_mask`` leaves out."""
        import torch

        if not self.kl_reward:
            return 0.0
        columns = zip(group["rollout_logprobs"], group["ref_logprobs"], strict=True)
        of_tokens = [self.token_penalties(rollout, ref) for rollout, ref in columns]
        if MASK in group:
            masked = zip(of_tokens, group[MASK], strict=True)
            of_tokens = [row.masked_fill(~mask, 0) for row, mask in masked]
        return torch.stack([row.sum() for row in of_tokens])


class KLCredit(KLReward):
    """One whose credit takes the penalties of whole responses."""

    @property
    def credit_reads(self) -> Columns:
        return {**super().credit_reads, **self.reads_kl}

    @property
    def credit_optional(self) -> Columns:
        return {**super().credit_optional, **({MASK: OPTIONAL[MASK]} if self.kl_reward else {})}
