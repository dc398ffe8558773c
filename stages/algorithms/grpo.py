"""Group Relative Policy Optimization (arXiv 2402.03300), by default normalised over tokens as in DAPO (2503.14476)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from stages.algorithms.interface import MOST_LOG_RATIO, Algorithm, LossOutput, TokenBatch
from stages.flow.declarations import Columns, Drop, RunsOn

if TYPE_CHECKING:
    from stages.algorithms.batch import TrainBatch

ADVANTAGE_EPS = 1e-4  # TRL's; keeps a group of almost equal rewards from being blown up


class GRPO(Algorithm):
    """Clipped policy gradient with group-normalised advantages, corrected for staleness.

    The ratio of each token is taken against the policy that really generated it (``rollout_logprobs``), so samples of
    older versions carry their own importance weights, and no separate "old policy" pass is needed.
    """

    least_group_size: ClassVar[int] = 2  # one response alone has no one to be compared with

    clip_low: float = Field(
        default=0.2, ge=0, lt=1, description="The ratio gains nothing below `1 - clip_low` (negative advantages)."
    )
    clip_high: float = Field(
        default=0.2, ge=0, description="The ratio gains nothing above `1 + clip_high` (positive advantages)."
    )
    max_ratio: float | None = Field(
        default=None,
        gt=1,
        description="Importance weights are truncated here, which also bounds the loss of negative advantages (dual clip, "
        "arXiv 1912.09729). Default: no truncation.",
    )
    kl_coef: float = Field(
        default=0.0,
        ge=0,
        description="Weight of the k3 estimate of KL(policy || reference) added to each token's loss. Above 0 the run has a "
        "reference stage.",
    )
    scale_rewards: bool = Field(
        default=True,
        description="Divide advantages by the group's standard deviation. false: only subtract the mean (Dr. GRPO, arXiv "
        "2503.20783).",
    )
    loss_normalization: Literal["token", "sequence"] = Field(
        default="token",
        description="`token`: every token of the batch weighs the same (DAPO). `sequence`: mean over rows of "
        "each row's mean.",
    )

    drop_equal: bool = Field(
        default=False,
        description="Drop groups with equal rewards: their advantages are zero. Others are generated in their place.",
    )

    scale_learning_rate: bool = Field(
        default=True,
        description="Multiply the learning rate by the share of a batch's trained rows with a nonzero advantage. "
        "AdamW takes steps of one size however small the gradient is, so the rare mistakes of a solved task would undo it "
        "(docs/measurements/stability.md). With `kl_coef` every row counts.",
    )

    @property
    def scores(self) -> Mapping[str, RunsOn]:
        return {"ref_logprobs": "frozen model"} if self.kl_coef else {}

    @property
    def loss_reads(self) -> Columns:
        return {**super().loss_reads, **dict.fromkeys(self.scores, "float32 ragged")}

    def credit(self, group: Mapping[str, Any]) -> Mapping[str, Any] | Drop:
        """``(r - mean) / (std + 1e-4)``, where std has N - 1 in its denominator as in TRL. Equal rewards, and a group of
        one, give zeros."""
        rewards = group["reward"].float()
        if bool((rewards == rewards[0]).all()):  # exact zeros, where rounding of the mean would leave noise
            return Drop("equal rewards") if self.drop_equal else {"advantage": rewards.new_zeros(rewards.shape)}
        centred = rewards - rewards.mean()
        return {"advantage": centred / (rewards.std() + ADVANTAGE_EPS) if self.scale_rewards else centred}

    def signal(self, batch: TrainBatch) -> float:
        if self.kl_coef or not self.scale_learning_rate:
            return 1.0
        advantage = batch["advantage"][batch.trained > 0]
        nonzero, rows = batch.total(batch["advantage"].new_tensor([advantage.count_nonzero(), len(advantage)])).tolist()
        return float(nonzero / rows)

    def loss(self, tokens: TokenBatch) -> LossOutput:
        """The micro-batch's share of the loss; metrics but ``max_ratio`` are means over the mini-batch's tokens."""
        log_ratio = (tokens.logprobs - tokens["rollout_logprobs"]).clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)
        ratio = log_ratio.exp()
        weight = ratio if self.max_ratio is None else ratio.clamp(max=self.max_ratio)
        unclipped = weight * tokens["advantage"]
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * tokens["advantage"]
        per_token = -unclipped.minimum(clipped)

        means = {
            "kl_behaviour": ratio - 1 - log_ratio,  # k3, sampled from the behaviour policy
            "clip_fraction": (clipped < unclipped).to(ratio.dtype),
            "ratio_mean": ratio,
            "ratio_square": ratio.square(),
        }
        if self.kl_coef:
            to_reference = (tokens["ref_logprobs"] - tokens.logprobs).clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)
            kl_reference = to_reference.exp() - 1 - to_reference
            per_token = per_token + self.kl_coef * kl_reference
            means["kl_reference"] = kl_reference

        loss = tokens.mean(per_token) if self.loss_normalization == "token" else tokens.mean_of_rows(per_token)
        metrics = {name: value.detach().sum() / tokens.total_tokens for name, value in means.items()}
        metrics["max_ratio"] = ratio.detach().max()
        return LossOutput(loss, metrics)

    def finish(self, metrics: dict[str, float]) -> dict[str, float]:
        """Adds ``ess``, the effective sample size of the importance weights as a share of the tokens, in (0, 1]:
        ``(sum w)^2 / (T sum w^2)``."""
        shown = {name: value for name, value in metrics.items() if name != "ratio_square"}
        return shown | {"ess": metrics["ratio_mean"] ** 2 / metrics["ratio_square"]}
