"""The part that the policy-gradient algorithms share: ratio, clip, corrections, KL to the
reference, and the mean over a batch.

reward ─▶ credit ─▶ advantage ─┐
rollout_logprobs, logprobs ────┴▶ surrogate(ratio, advantage) × weight (+ kl_coef × KL) ─▶ mean of tokens or of rows

Three policies have a part in a step on a token (AReaL, arXiv 2505.24298, Eq. 5):

    rollout    generated it: an older version, computed by another engine      rollout_logprobs
    proximal   the centre of the trust region: what the ratio is clipped around
    current    is trained: it leaves the proximal one within the step          tokens.logprobs

    current / proximal: the ratio, clipped          proximal / rollout: a weight, truncated or masked, without gradient
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import pydantic
from pydantic import Field

from stages.algorithms.interface import FOLLOWS, LossOutput
from stages.algorithms.policy_gradient.terms.entropy import HIGH, EntropyTerms
from stages.algorithms.policy_gradient.terms.kl_reward import KLCredit
from stages.algorithms.token_batch import MOST_LOG_RATIO, TokenBatch
from stages.flow.catalogue import TOKEN_STALENESS
from stages.flow.declarations import Columns, Drop, RunsOn
from stages.json_schema import faults

if TYPE_CHECKING:
    import torch

    from stages.algorithms.batch import TrainBatch

Level = Literal["token", "geometric", "sequence"]
PROXIMAL = "proximal_logprobs"
CORRECTED_FROM = 3  # staleness bound from which ``correction = "auto"`` corrects


class PolicyGradient(EntropyTerms):
    """The clipped surrogate of PPO (arXiv 1707.06347, Eq. 7) on the column ``advantage``, corrected
    for staleness.

    By default the ratio of each token is taken against the policy that generated it
    (``rollout_logprobs``), so samples of older versions carry their own importance weights, and no
    separate "old policy" pass is needed."""

    clip_low: float = Field(
        default=0.2,
        ge=0,
        lt=1,
        description="The ratio gains nothing below `1 - clip_low` (negative advantages).",
    )
    clip_high: float = Field(
        default=0.2,
        ge=0,
        description="The ratio gains nothing above `1 + clip_high` (positive advantages).",
    )
    max_ratio: float | None = Field(
        default=None,
        gt=1,
        description="Importance weights are truncated here, which also bounds the loss of negative "
        "advantages (dual clip, arXiv 1912.09729). Default: no truncation.",
    )
    ratio_level: Level = Field(
        default="token",
        description="Ratios of single tokens; or one for each response: the `geometric` mean of "
        "its tokens' (GSPO), or their product (`sequence`).",
    )
    proximal: Literal["rollout", "recomputed", "interpolated"] = Field(
        default="rollout",
        description="The policy that the ratio is clipped around. `rollout`: the one that "
        "generated the token. `recomputed`: the trained one before the step (decoupled "
        "PPO, arXiv 2505.24298); with one optimizer step a batch it costs nothing. "
        "`interpolated`: between the two by staleness (A-3PO, arXiv 2512.06547).",
    )
    correction: Literal["auto", "none", "truncate", "mask"] = Field(
        default="none",
        description="What becomes of the weight proximal / rollout, which corrects for staleness "
        "and for the engines' mismatch. `auto`: `none` up to `pipeline.staleness` = 2; "
        "above, `truncate` at the level of the ratio, with `proximal` = `interpolated` "
        "unless another is set (docs/measurements/staleness.md). `none`: it is left "
        "out. `truncate`: the loss is multiplied by it, cut at `weight_high`. `mask`: "
        "where it is outside `weight_low` to `weight_high` nothing is learned (IcePop, "
        "arXiv 2510.18855), elsewhere the loss is multiplied by it. With `proximal` = "
        "`rollout` the ratio has this weight already: only `mask` is possible, by "
        "current / rollout.",
    )
    correction_level: Level = Field(default="token", description="Of the weight: as `ratio_level`.")
    weight_low: float = Field(default=0.5, ge=0, lt=1, description="See `correction`.")
    weight_high: float = Field(default=2.0, gt=1, description="See `correction`.")
    kl_coef: float = Field(
        default=0.0,
        ge=0,
        description="Weight of the estimate of KL(policy || reference) added to each token's loss. "
        "Above 0 the run has a reference stage.",
    )
    kl_estimator: Literal["k1", "k2", "k3"] = Field(
        default="k3",
        description="With x = log(policy / reference) of the sampled token: `k1` is x, `k2` is "
        "x²/2, `k3` is exp(-x) - 1 + x. Without `kl_weighted` the gradient of `k2` is "
        "that of KL(policy || reference) on samples of the current policy, that of "
        "`k3` is the one of KL(reference || policy), and that of `k1` is zero on "
        "average.",
    )
    kl_weighted: bool = Field(
        default=False,
        description="Multiply the KL estimate by current / rollout, which makes its gradient that "
        "of KL(policy || reference) for stale samples too, whatever `proximal` and "
        "`correction` are. The weight is of single tokens, or with `ratio_level` = "
        "`sequence` of the response.",
    )
    off_policy_mask: float | None = Field(
        default=None,
        ge=0,
        description="Responses with a negative advantage are left out of the loss where the mean "
        "of log(rollout / current) over their tokens is above this (DeepSeek-V3.2, arXiv "
        "2512.02556, section 3.1): what the policy has moved away from teaches it nothing safe. "
        "Default: none.",
    )
    loss_normalization: Literal["token", "sequence", "constant"] = Field(
        default="token",
        description="`token`: every token of the batch weighs the same (DAPO). `sequence`: mean "
        "over rows of each row's mean. `constant`: sum over tokens / (rows × "
        "`response_tokens`) (Dr. GRPO).",
    )
    response_tokens: int | None = Field(
        default=None,
        ge=1,
        description='The constant of `loss_normalization = "constant"`. Default: '
        "`rollout.max_tokens`.",
        json_schema_extra={FOLLOWS: "rollout.max_tokens"},
    )

    @pydantic.model_validator(mode="after")
    def _weight_once(self) -> Self:
        if self.proximal == "rollout" and self.correction == "truncate":
            problem = 'has nothing to truncate with proximal = "rollout"'
            fix = 'set max_ratio, or proximal = "recomputed" or "interpolated"'
            faults(self, [("correction", problem, fix)])
        return self

    @pydantic.model_validator(mode="after")
    def _kl_teaches(self) -> Self:
        if self.kl_coef and self.kl_estimator == "k1" and not self.kl_weighted:
            problem = "has a gradient whose mean is zero without kl_weighted"
            fix = 'set kl_weighted = true, or kl_estimator = "k2" or "k3"'
            faults(self, [("kl_estimator", problem, fix)])
        return self

    def under(self, staleness: int) -> tuple[Self, str]:
        """Resolve ``correction = "auto"`` (docs/measurements/staleness.md)."""
        if self.correction != "auto":
            return self, ""
        if staleness < CORRECTED_FROM:
            reason = f"correction = none: at η = {staleness} a correction gains little"
            return self.model_copy(update={"correction": "none"}), reason
        picked = {
            "correction": "truncate",
            "proximal": "interpolated" if self.proximal == "rollout" else self.proximal,
            "correction_level": self.ratio_level,
        }
        named = ", ".join(f"{name} = {value}" for name, value in picked.items())
        reason = (
            f"η = {staleness}: clipped around the rollout policy, samples of old versions "
            f"teach less and less"
        )
        return self.model_copy(update=picked), f"{named}; with {reason}"

    def constants(self, staleness: int) -> Mapping[str, str]:
        """Return ``clip_fraction`` where the proximal policy is the current one in each optimizer
        step (arXiv 2610.02911)."""
        is_current = self.proximal == "recomputed" or (
            self.proximal == "interpolated" and not staleness
        )
        if not is_current or self.epochs * self.mini_batches > 1:
            return {}
        return {
            "clip_fraction": f'is 0 by construction: with proximal = "{self.proximal}" and one '
            f"optimizer step a batch the "
            "ratio is 1, so the clip never acts, and clip_low, clip_high and max_ratio have no "
            "effect"
        }

    @property
    def scores(self) -> Mapping[str, RunsOn]:
        several = self.proximal == "recomputed" and self.epochs * self.mini_batches > 1
        by_policy: dict[str, RunsOn] = {PROXIMAL: "policy"} if several else {}
        reference: dict[str, RunsOn] = {"ref_logprobs": "frozen model"} if self.kl_coef else {}
        return {**super().scores, **reference, **by_policy}

    @property
    def loss_reads(self) -> Columns:
        staleness = {TOKEN_STALENESS: "int64 ragged"} if self.proximal == "interpolated" else {}
        return {**super().loss_reads, **dict.fromkeys(self.scores, "float32 ragged"), **staleness}

    def surrogate(
        self, ratio: torch.Tensor, tokens: TokenBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gain of each token [T], and bool [T], where the clip has stopped it."""
        weight = ratio if self.max_ratio is None else ratio.clamp(max=self.max_ratio)
        unclipped = weight * tokens["advantage"]
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * tokens["advantage"]
        return unclipped.minimum(clipped), clipped < unclipped

    def loss(self, tokens: TokenBatch) -> LossOutput:
        """Return the micro-batch's share of the loss; metrics but ``max_ratio`` are means over the
        mini-batch's tokens."""
        rollout = tokens["rollout_logprobs"]
        proximal = rollout
        if self.proximal != "rollout":
            known = tokens.columns.get(PROXIMAL, tokens.logprobs.detach())
            proximal = known if self.proximal == "recomputed" else interpolated(tokens)
        log_ratio = at_level(tokens.logprobs - proximal, tokens, self.ratio_level)
        ratio = log_ratio.exp()
        gain, clipped = self.surrogate(ratio, tokens)
        per_token = -gain
        # Of current / rollout, whatever the ratio is clipped around.
        log_away = (
            log_ratio
            if proximal is rollout
            else at_level(tokens.logprobs - rollout, tokens, self.ratio_level)
        )
        away = log_away.exp()
        means = {
            "kl_behaviour": away - 1 - log_away,  # k3, sampled from the behaviour policy
            "clip_fraction": clipped.to(ratio.dtype),
            "ratio_mean": away,
            "ratio_square": away.square(),
        }
        if self.correction in ("truncate", "mask"):
            centre = tokens.logprobs if proximal is rollout else proximal
            bounds = self.correction, self.correction_level, self.weight_low, self.weight_high
            weight, mask = weights(centre - rollout, tokens, *bounds)
            means |= {"weight_mean": weight, "mask_fraction": (~mask).to(ratio.dtype)}
            per_token = per_token * (mask if proximal is rollout else weight * mask)
        if self.off_policy_mask is not None:
            per_token = per_token * (stays := near_policy(tokens, self.off_policy_mask))
            means["off_policy_fraction"] = (~stays).to(ratio.dtype)
        if self.high_entropy_share:
            per_token = per_token * tokens[HIGH]
            means["high_entropy_fraction"] = tokens[HIGH]
        if self.kl_coef:
            per_token = per_token + self.kl_coef * self._kl(tokens)
            means["kl_reference"] = k3(tokens)
        metrics = {
            name: value.detach().sum() / tokens.total_tokens for name, value in means.items()
        }
        metrics["max_ratio"] = away.detach().max()
        return LossOutput(self._mean(per_token, tokens) - self.bonus(tokens), metrics)

    def _kl(self, tokens: TokenBatch) -> torch.Tensor:
        """Return what is added to each token's loss [T], before ``kl_coef``."""
        away = (tokens.logprobs - tokens["ref_logprobs"]).clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)
        match self.kl_estimator:
            case "k1":
                estimate = away
            case "k2":
                estimate = away.square() / 2
            case "k3":
                estimate = k3(tokens)
        if not self.kl_weighted:
            return estimate
        level: Level = "sequence" if self.ratio_level == "sequence" else "token"
        weight = at_level(tokens.logprobs - tokens["rollout_logprobs"], tokens, level).exp()
        # The gradient of k2 is the whole gradient of the KL; of k1 and k3 the gradient of the
        # weight is a part of it.
        return estimate * (weight.detach() if self.kl_estimator == "k2" else weight)

    def _mean(self, per_token: torch.Tensor, tokens: TokenBatch) -> torch.Tensor:
        match self.loss_normalization:
            case "token":
                return tokens.mean(per_token)
            case "sequence":
                return tokens.mean_of_rows(per_token)
            case "constant":
                if self.response_tokens is None:
                    raise ValueError(
                        "response_tokens: is not set; give it, or use a recipe, of which it is "
                        "rollout.max_tokens"
                    )
                return tokens.mean(per_token) * (
                    tokens.total_tokens / (tokens.total_rows * self.response_tokens)
                )

    def finish(self, metrics: dict[str, float]) -> dict[str, float]:
        """Add ``ess``, the effective sample size of the importance weights as a share of the
        tokens, in (0, 1]: ``(sum w)^2 / (T sum w^2)``."""
        shown = {name: value for name, value in metrics.items() if name != "ratio_square"}
        return shown | {"ess": metrics["ratio_mean"] ** 2 / metrics["ratio_square"]}


class GroupCompared(PolicyGradient, KLCredit):
    """A policy gradient whose credit compares the responses to one prompt."""

    least_group_size: ClassVar[int] = 2  # one response alone has no one to be compared with

    drop_equal: bool = Field(
        default=False,
        description="Drop groups with equal rewards: their advantages are zero. Others are "
        "generated in their place.",
    )
    scale_learning_rate: bool = Field(
        default=True,
        description="Multiply the learning rate by the share of a batch's trained rows with a "
        "nonzero advantage. AdamW takes steps of one size however small the gradient "
        "is, so the rare mistakes of a solved task would undo it "
        "(docs/measurements/stability.md). With `kl_coef` every row counts.",
    )

    def credit(self, group: Mapping[str, Any]) -> Mapping[str, Any] | Drop:
        """Return :meth:`advantage` of the rewards. Equal rewards, and a group of one, give
        zeros."""
        rewards = group["reward"].float()
        return self.compared(rewards - self.penalties(group), dropped_by=rewards)

    def compared(
        self, rewards: torch.Tensor, *, dropped_by: torch.Tensor
    ) -> Mapping[str, Any] | Drop:
        """Return the credit of a group with ``rewards`` [N]; ``drop_equal`` drops it where all
        ``dropped_by`` [N] are equal."""
        zeros = {"advantage": rewards.new_zeros(rewards.shape)}
        if self.drop_equal and bool((dropped_by == dropped_by[0]).all()):
            return Drop("equal rewards", instead=zeros)
        # exact zeros, where rounding of the mean would leave noise
        if bool((rewards == rewards[0]).all()):
            return zeros
        return {"advantage": self.advantage(rewards)}

    @abstractmethod
    def advantage(self, rewards: torch.Tensor) -> torch.Tensor:
        """Return the advantages [N] of a group's ``rewards`` [N], which are not all equal."""

    def signal(self, batch: TrainBatch) -> float:
        if self.kl_coef or not self.scale_learning_rate:
            return 1.0
        advantage = batch["advantage"]
        if advantage.shape == batch.lengths.shape:
            advantage = advantage[batch.row]
        learned = batch.row[batch.is_trained & (advantage != 0)].unique()
        counts = advantage.new_tensor([len(learned), (batch.trained > 0).sum()])
        nonzero, rows = batch.total(counts).tolist()
        return float(nonzero / rows)


def at_level(log_ratio: torch.Tensor, tokens: TokenBatch, level: Level) -> torch.Tensor:
    """Return the log-ratios [T] clamped to ±``MOST_LOG_RATIO``: each token's own; or at each token
    its response's: their sum (``sequence``), or their mean (``geometric``, of the ratios)."""
    if level != "token":
        log_ratio = tokens.over_sequences(log_ratio, mean=level == "geometric")
    return log_ratio.clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)


def near_policy(tokens: TokenBatch, most: float) -> torch.Tensor:
    """Return bool [T]: the tokens with an advantage that is not negative, and those of responses of
    which the mean of log(rollout / current) is at most ``most``."""
    away = tokens.over_sequences(tokens["rollout_logprobs"] - tokens.logprobs.detach(), mean=True)
    return (tokens["advantage"] >= 0) | (away <= most)


def k3(tokens: TokenBatch) -> torch.Tensor:
    """Return the k3 estimate [T] of KL(policy || reference)
    (http://joschu.net/blog/kl-approx.html)."""
    to_reference = (tokens["ref_logprobs"] - tokens.logprobs).clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)
    return to_reference.exp() - 1 - to_reference


def interpolated(tokens: TokenBatch) -> torch.Tensor:
    """Return the logprobs [T] between those of the rollout and the current ones, in place of a pass
    through the model (A-3PO, arXiv 2512.06547): the share of the rollout is 1 / staleness of the
    token, and 0 of a token of the current version."""
    staleness = tokens[TOKEN_STALENESS].to(tokens.logprobs.dtype)
    share = staleness.clamp(min=1).reciprocal() * (staleness > 0)
    return share * tokens["rollout_logprobs"] + (1 - share) * tokens.logprobs.detach()


def weights(
    log_weight: torch.Tensor,
    tokens: TokenBatch,
    correction: Literal["truncate", "mask"],
    level: Level,
    low: float,
    high: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the importance weights [T] of ``log_weight`` (no gradient) and which tokens stay in
    the loss, bool [T]. ``truncate``: at most ``high``. ``mask``: tokens (responses, at the levels
    of a response) with a weight outside ``low`` to ``high`` are left out (IcePop, arXiv
    2510.18855)."""
    weight = at_level(log_weight.detach(), tokens, level).exp()
    if correction == "truncate":
        return weight.clamp(max=high), weight >= 0
    return weight, (weight >= low) & (weight <= high)
