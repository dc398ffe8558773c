"""GDPO (arXiv 2601.05242, Eq. 4 to 6): GRPO for several reward functions, each normalised by
itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from stages.algorithms.interface import FOLLOWS
from stages.algorithms.policy_gradient.grpo import ADVANTAGE_EPS, GRPO
from stages.flow.declarations import Columns, Drop

if TYPE_CHECKING:
    import torch

    from stages.algorithms.batch import TrainBatch


class GDPO(GRPO):
    """GRPO for several reward functions, whose scores are normalised before they are added: no
    function is drowned by one whose scores are larger, and groups that differ in one function stay
    apart from those that differ in all."""

    name: ClassVar[str] = "gdpo"
    use_for: ClassVar[str] = (
        "Several reward functions of different scales, each of which has to count."
    )
    citation: ClassVar[str] = """
    @misc{liu2026gdpo,
      title = {{GDPO}: Group reward-Decoupled Normalization Policy Optimization
        for Multi-reward {RL} Optimization},
      author = {Liu, Shih-Yang and Dong, Xin and others},
      year = {2026},
      eprint = {2601.05242},
      archivePrefix = {arXiv},
    }
    """

    reward_weights: tuple[float, ...] | None = Field(
        default=None,
        description="Of the reward functions, in their order. Default: those of "
        "`reward.functions`.",
        json_schema_extra={FOLLOWS: "reward.weights"},
    )

    @property
    def credit_reads(self) -> Columns:
        return {"scores": f"float32 [{len(self.reward_weights or (1.0,))}]", **self.reads_kl}

    def credit(self, group: Mapping[str, Any]) -> Mapping[str, Any] | Drop:
        """Return the sum over functions of weight × ``(s - mean) / (std + 1e-4)`` of the group's
        ``scores`` [N, K]. A function that does not apply to a response, or has failed on it, adds
        nothing there."""
        from stages.rewards.scores import has_failed  # with torch, which checks of recipes need not

        scores = group["scores"].float()
        counts = ~(scores.isnan() | has_failed(scores))
        total = scores.new_zeros(len(scores))
        differs = False
        for weight, column, counted in zip(
            self.reward_weights or (1.0,), scores.T, counts.T, strict=True
        ):
            compared = column[counted]
            if weight and len(compared) > 1 and bool((compared != compared[0]).any()):
                differs = True
                total[counted] += weight * self.advantage(compared)
        if self.drop_equal and not differs:
            return Drop("equal rewards", instead={"advantage": total})
        return {"advantage": total - self.penalties(group)}

    def prepare(self, batch: TrainBatch) -> Mapping[str, torch.Tensor]:
        """Normalise the sums over the train batch, whose scale would grow with the number of
        functions (Eq. 6)."""
        mean, deviation = batch.moments(batch["advantage"])
        advantage = (batch["advantage"] - mean) / (deviation + ADVANTAGE_EPS)
        return {**super().prepare(batch), "advantage": advantage}
