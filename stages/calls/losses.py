"""The losses of training calls: each is one class, and no other code knows its name.

    data ─▶ checks.py: the columns that the loss reads, at each target token ─▶ LossTokens
         ─▶ Loss.per_token ─▶ added up over tokens and data, never averaged ─▶ backward

p is the model's probability of a target token, q the sampler's, A its advantage, r = p / q. Formulas
are those of Tinker's documentation, at temperature 1. A token with advantage 0 has no part in a loss
with ratios: prompts are filled up with zeros, and 0 · inf would be no number.

Importing this needs no torch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from stages.calls.interface import CallRefused, LossOptions

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class DatumColumns:
    """A checked datum: ``tokens`` int64 [N]; ``targets`` int64 [N] or [N, K]; the loss's ``inputs``,
    float32 of that shape, or as its ``ranks`` say."""

    tokens: np.ndarray
    targets: np.ndarray
    inputs: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class LossTokens:
    """T target tokens of whole data."""

    logprobs: torch.Tensor
    """Float [T], with gradient."""

    inputs: Mapping[str, torch.Tensor]
    """Float [T] each: the loss's inputs."""

    datum: torch.Tensor
    """Int64 [T], which datum a token is of, counted from 0."""

    options: Mapping[str, float]

    data: Sequence[DatumColumns] = ()
    """The data that the tokens are of, in this order."""

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.inputs[name]

    def log_ratio(self, is_read: torch.Tensor) -> torch.Tensor:
        """Return log r [T], 0 where not ``is_read``, so that no gradient is inf there."""
        return (self.logprobs - self["logprobs"]).where(is_read, 0.0)

    def mean_of_data(self, per_token: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Return at each token the mean of ``per_token`` over the tokens of its datum that
        ``counts`` (bool [T]) has; 0 where it has none."""
        size = int(self.datum.max()) + 1
        weight = counts.to(per_token.dtype)
        sums, totals = (
            values.new_zeros(size).index_add(0, self.datum, values)
            for values in (per_token * weight, weight)
        )
        return (sums / totals.clamp(min=1))[self.datum]


class Loss(ABC):
    """A loss over target tokens. All ``options`` are numbers of at least 0."""

    name: ClassVar[str]

    inputs: tuple[str, ...]
    """What each datum must have beside ``target_tokens``."""

    optional: ClassVar[tuple[str, ...]] = ()
    """Inputs that are the option of the same name, or 1, at all tokens of a datum without them."""

    options: ClassVar[Mapping[str, float]] = {}
    """Their defaults."""

    several_targets: bool = False
    """Whether ``target_tokens``, and all inputs with them, may be [N, K]."""

    ranks: Mapping[str, int] = MappingProxyType({})
    """Of inputs that are of any shape of this rank, float32 or int64."""

    def configured(self, options: LossOptions) -> tuple[Loss, dict[str, float]]:
        """Return the loss with these options, and the values of all. Raises CallRefused."""
        values = dict(self.options)
        for option, value in options.items():
            field = f"loss_fn_config.{option}"
            if option not in values:
                known = f"it has {[*values]}" if values else "it has none"
                raise CallRefused.of(field, value, f"is no option of {self.name}", known)
            if isinstance(value, str | bool) or not 0 <= value < math.inf:
                raise CallRefused.of(field, value, "is no number of at least 0", "give one")
            values[option] = float(value)
        low, high = values.get("clip_low_threshold", 0), values.get("clip_high_threshold", math.inf)
        if low > high:
            field = "loss_fn_config.clip_low_threshold"
            raise CallRefused.of(
                field, low, f"is above clip_high_threshold, {high}", "exchange them"
            )
        return self, values

    def check(self, data: Sequence[DatumColumns]) -> None:  # noqa: B027
        """Raise CallRefused for data that it cannot be computed of."""

    @abstractmethod
    def per_token(self, tokens: LossTokens) -> torch.Tensor:
        """Return the loss [T], with gradient."""

    @abstractmethod
    def metrics(self, tokens: LossTokens) -> dict[str, torch.Tensor]:
        """Return numbers by name; what follows the colon says how those of several micro-batches
        are combined: ``sum``, ``min``, ``max``, or ``mean`` of what are sums over data here."""


class CrossEntropy(Loss):
    """−Σ w · log p, with weights of any sign."""

    name = "cross_entropy"
    inputs = ()
    optional = ("weights",)
    several_targets = True

    def per_token(self, tokens: LossTokens) -> torch.Tensor:
        return -tokens["weights"] * tokens.logprobs

    def metrics(self, tokens: LossTokens) -> dict[str, torch.Tensor]:
        return {"tokens:sum": (tokens["weights"] != 0).sum()}


class PolicyLoss(Loss):
    """A loss over sampled tokens."""

    inputs: tuple[str, ...] = ("logprobs", "advantages")

    def metrics(self, tokens: LossTokens) -> dict[str, torch.Tensor]:
        is_trained = tokens["advantages"] != 0
        log_ratio = tokens.log_ratio(is_trained).detach()
        return {
            "tokens:sum": is_trained.sum(),
            "kl_sampler:sum": -log_ratio.sum(),
            "log_ratio:min": log_ratio.min(),
            "log_ratio:max": log_ratio.max(),
        }


class ImportanceSampling(PolicyLoss):
    """−Σ r · A."""

    name = "importance_sampling"

    def per_token(self, tokens: LossTokens) -> torch.Tensor:
        advantages = tokens["advantages"]
        return -tokens.log_ratio(advantages != 0).exp() * advantages


class ClippedLoss(PolicyLoss):
    """A loss with bounds of the ratio, absolute ones, of all tokens or of each."""

    optional = ("clip_low_threshold", "clip_high_threshold")
    options: ClassVar[Mapping[str, float]] = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}

    def clipped(self, tokens: LossTokens, ratio: torch.Tensor) -> torch.Tensor:
        """Return ``ratio`` within the bounds, without a gradient."""
        low, high = (tokens[name] for name in self.optional)
        return ratio.detach().clamp(low, high)

    def lesser(self, tokens: LossTokens, log_ratio: torch.Tensor) -> torch.Tensor:
        """Return −min(r · A, clip(r) · A) [T]. The ratio is computed again where the gradient goes
        through it: a gradient of 0 through one that has overflowed would be no number."""
        advantages = tokens["advantages"]
        ratio = log_ratio.detach().exp()
        bound = self.clipped(tokens, ratio)
        is_bound = bound * advantages < ratio * advantages
        through = log_ratio.where(~is_bound, 0.0).exp()
        return -bound.where(is_bound, through) * advantages

    def metrics(self, tokens: LossTokens) -> dict[str, torch.Tensor]:
        ratio = tokens.log_ratio(tokens["advantages"] != 0).detach().exp()
        is_clipped = (self.clipped(tokens, ratio) != ratio) & (tokens["advantages"] != 0)
        return {**super().metrics(tokens), "clipped:sum": is_clipped.sum()}


class PPO(ClippedLoss):
    """−Σ min(r · A, clip(r) · A)."""

    name = "ppo"

    def per_token(self, tokens: LossTokens) -> torch.Tensor:
        return self.lesser(tokens, tokens.log_ratio(tokens["advantages"] != 0))


class CISPO(ClippedLoss):
    """−Σ sg(clip(r)) · A · log p: each token keeps a gradient (https://arxiv.org/abs/2506.13585)."""

    name = "cispo"
    options: ClassVar[Mapping[str, float]] = {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}

    def per_token(self, tokens: LossTokens) -> torch.Tensor:
        advantages = tokens["advantages"]
        ratio = tokens.log_ratio(advantages != 0).exp()
        return -self.clipped(tokens, ratio) * advantages * tokens.logprobs


class GSPO(ClippedLoss):
    """−Σ min(s · A, clip(s) · A), where s has the value of the geometric mean of r over the tokens
    of ``sequence_ratio_mask`` of the datum, and the gradient of the token's own r: the token-level
    variant of https://arxiv.org/abs/2507.18071. Tinker documents no default of the bounds; ours are
    PPO's."""

    name = "gspo"
    inputs = (*PolicyLoss.inputs, "sequence_ratio_mask")

    def per_token(self, tokens: LossTokens) -> torch.Tensor:
        is_read = tokens["sequence_ratio_mask"] != 0
        mean = tokens.mean_of_data(tokens.log_ratio(is_read).detach(), is_read)
        own = tokens.logprobs - tokens.logprobs.detach()
        return self.lesser(tokens, (mean + own).where(tokens["advantages"] != 0, 0.0))


class DRO(PolicyLoss):
    """−Σ (A · log p − β / 2 · (log r)²), over all tokens: those of prompts too, as Tinker's is
    documented, so give them the model's own logprobs (https://arxiv.org/abs/2405.19107). Tinker
    documents no default of ``beta``; ours is 0.05, that of its example."""

    name = "dro"
    options: ClassVar[Mapping[str, float]] = {"beta": 0.05}

    def per_token(self, tokens: LossTokens) -> torch.Tensor:
        penalty = (tokens.logprobs - tokens["logprobs"]).square()
        return 0.5 * tokens.options["beta"] * penalty - tokens["advantages"] * tokens.logprobs


class StableReinforce(PolicyLoss):
    """−Σ sg(min(r, 1)) · A · log p + ``kl_coeff`` / 2 · Σ (log r)².

    This is our reading, not Tinker's formula, which is not published: they call it "a REINFORCE
    variant that stays stable even when the sampling policy differs from the policy being trained",
    by little that is recorded at sampling time. Here that is the logprob of each token, by which it
    is weighted as V-trace does (https://arxiv.org/abs/1802.01561): on the policy's own samples it
    is REINFORCE; a token that the policy has since turned from loses its weight, and none has more
    than 1. The second sum leaves out tokens with advantage and logprob 0, the prompts'."""

    name = "stable_reinforce"
    options: ClassVar[Mapping[str, float]] = {"kl_coeff": 0.0}

    def per_token(self, tokens: LossTokens) -> torch.Tensor:
        advantages = tokens["advantages"]
        log_ratio = tokens.log_ratio((advantages != 0) | (tokens["logprobs"] != 0))
        weight = log_ratio.detach().clamp(max=0).exp()
        penalty = 0.5 * tokens.options["kl_coeff"] * log_ratio.square()
        return penalty - weight * advantages * tokens.logprobs


BUILT_IN: Sequence[Loss] = (
    CrossEntropy(),
    ImportanceSampling(),
    PPO(),
    CISPO(),
    DRO(),
    GSPO(),
    StableReinforce(),
)
