"""GRPO on selected tokens: which tokens of the whole train batch are learned from, or penalised, by
what is known of them before the step.

m2po        the mean of log(current / rollout)² is held below a bound (2510.01161, Eq. 9 and 10)
clip_cov    no gradient for some of the tokens whose logprob and advantage go together most (2505.22617, Eq. 15)
kl_cov      a KL penalty on those tokens (2505.22617, Eq. 16)

logprobs before the step, rollout_logprobs, advantage ─▶ prepare: selected [T] of all ranks ─▶ loss
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from stages.algorithms.interface import with_defaults
from stages.algorithms.policy_gradient.base import PROXIMAL
from stages.algorithms.policy_gradient.grpo import GRPO
from stages.algorithms.thresholds import cut_above, cut_below
from stages.algorithms.token_batch import TokenBatch
from stages.flow.declarations import Columns, RunsOn

if TYPE_CHECKING:
    import torch

    from stages.algorithms.batch import TrainBatch

SELECTED = "selected"


class Selecting(GRPO):
    """GRPO whose loss treats the tokens :data:`SELECTED` in a way of its own."""

    @property
    def scores(self) -> Mapping[str, RunsOn]:
        return {**super().scores, PROXIMAL: "policy"}

    @property
    def prepare_makes(self) -> Columns:
        return {**super().prepare_makes, SELECTED: "float32 ragged"}

    @property
    def loss_reads(self) -> Columns:
        return {**super().loss_reads, **self.prepare_makes}

    def prepare(self, batch: TrainBatch) -> Mapping[str, torch.Tensor]:
        selected = self.selected(batch) & batch.is_trained
        return {**super().prepare(batch), SELECTED: selected.to(batch[PROXIMAL].dtype)}

    @abstractmethod
    def selected(self, batch: TrainBatch) -> torch.Tensor:
        """Return bool [T], the selected tokens."""

    def covariance(self, batch: TrainBatch) -> torch.Tensor:
        """Return float [T]: how far logprob and advantage of a token are above their means over the
        train batch, multiplied."""
        advantage = batch["advantage"][batch.row]
        return centred(batch, batch[PROXIMAL]) * centred(batch, advantage)


@with_defaults(correction="none")
class M2PO(Selecting):
    """GRPO for very old samples, with one constraint on the whole batch in place of a clip of each
    token.

    Where the second moment of the log-ratios is above ``second_moment``, tokens with the largest
    ones are left out until it is not. Rare tokens stay in, which a clip would stop first.
    """

    name: ClassVar[str] = "m2po"
    use_for: ClassVar[str] = "Samples that are very many versions old."
    citation: ClassVar[str] = """
    @misc{zheng2025prosperity,
      title = {Prosperity before Collapse: How Far Can Off-Policy {RL} Reach with Stale Data
        on {LLMs}?},
      author = {Zheng, Haizhong and Zhao, Jiawei and Chen, Beidi},
      year = {2025},
      eprint = {2510.01161},
      archivePrefix = {arXiv},
    }
    """

    second_moment: float = Field(default=0.04, gt=0, description="The bound.")

    def selected(self, batch: TrainBatch) -> torch.Tensor:
        """Return the tokens that stay."""
        moment = (batch[PROXIMAL] - batch["rollout_logprobs"]).square()
        return moment <= cut_below(batch, moment, self.second_moment)

    def surrogate(
        self, ratio: torch.Tensor, tokens: TokenBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        stays = tokens[SELECTED]
        return stays * ratio * tokens["advantage"], stays == 0


@with_defaults(correction="none")
class ClipCov(Selecting):
    """GRPO that keeps its entropy: tokens that are likely and praised, or unlikely and blamed, make
    it fall, and a few of them are not learned from."""

    name: ClassVar[str] = "clip_cov"
    use_for: ClassVar[str] = "Entropy falls soon, and exploration ends."
    citation: ClassVar[str] = """
    @misc{cui2025entropy,
      title = {The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models},
      author = {Cui, Ganqu and Zhang, Yuchen and Chen, Jiacheng and others},
      year = {2025},
      eprint = {2505.22617},
      archivePrefix = {arXiv},
    }
    """

    cov_share: float = Field(
        default=2e-4, gt=0, lt=1, description="Share of all tokens that are not learned from."
    )
    cov_low: float = Field(default=1.0, description="They are drawn where the covariance is above.")
    cov_high: float = Field(default=5.0, description="And below.")

    def selected(self, batch: TrainBatch) -> torch.Tensor:
        """Return the tokens that are not learned from. They are drawn by the bits of their
        logprobs, so that a step that is repeated draws the same ones."""
        import torch

        covariance = self.covariance(batch)
        is_candidate = batch.is_trained & (covariance > self.cov_low) & (covariance < self.cov_high)
        counts = torch.stack([is_candidate.sum(), batch.is_trained.sum()]).double()
        candidates, tokens = batch.total(counts).tolist()
        share = self.cov_share * tokens / max(1.0, candidates)
        bits = batch["rollout_logprobs"].float().view(torch.int32).long()
        drawn = (bits * 2654435761 % 2**32) / 2**32  # multiplicative hashing (Knuth)
        return is_candidate & (drawn < share)

    def surrogate(
        self, ratio: torch.Tensor, tokens: TokenBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        gain, clipped = super().surrogate(ratio, tokens)
        is_out = tokens[SELECTED] > 0
        return gain * ~is_out, clipped | is_out


@with_defaults(correction="none")
class KLCov(Selecting):
    """As :class:`ClipCov`, with a penalty in place of no gradient; nothing is clipped."""

    name: ClassVar[str] = "kl_cov"
    use_for: ClassVar[str] = "As `clip_cov`, with a penalty in place of leaving those tokens out."
    citation: ClassVar[str] = ClipCov.citation

    cov_share: float = Field(
        default=2e-4,
        gt=0,
        lt=1,
        description="Share of all tokens that are penalised: those of the highest covariance.",
    )
    cov_penalty: float = Field(
        default=1.0, ge=0, description="Weight of |log(current / proximal)| of such a token."
    )

    def selected(self, batch: TrainBatch) -> torch.Tensor:
        covariance = self.covariance(batch)
        return covariance >= cut_above(batch, covariance, self.cov_share)

    def surrogate(
        self, ratio: torch.Tensor, tokens: TokenBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        penalty = self.cov_penalty * tokens[SELECTED] * ratio.log().abs()
        return ratio * tokens["advantage"] - penalty, tokens[SELECTED] > 0


def centred(batch: TrainBatch, values: torch.Tensor) -> torch.Tensor:
    """Return ``values`` [T] minus their mean over the trained tokens of the whole train batch."""
    sums = values.new_zeros(2, dtype=values.double().dtype)
    sums[0], sums[1] = batch.is_trained.sum(), values[batch.is_trained].double().sum()
    count, total = batch.total(sums).tolist()
    return values - total / max(1, count)
