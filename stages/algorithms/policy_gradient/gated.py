"""What differs from GRPO by its gate of the ratio, or by how several rewards become one.

aipo        the same with a lower cut and no other correction (LlamaRL, 2505.24034, Eq. 4)
sapo        a smooth gate of the ratio in place of the clip (2511.20347, Eq. 5)
gdpo        each reward function's scores normalised before they are added (2601.05242, Eq. 4 to 6)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from stages.algorithms.interface import FOLLOWS, with_defaults
from stages.algorithms.policy_gradient.grpo import ADVANTAGE_EPS, CISPO, GRPO
from stages.algorithms.token_batch import TokenBatch
from stages.flow.declarations import Columns, Drop
from stages.rewards.scores import has_failed

if TYPE_CHECKING:
    import torch

    from stages.algorithms.batch import TrainBatch


@with_defaults(clip_high=1.0)
class AIPO(CISPO):
    """Asynchronous importance-weighted policy optimization: the ratio to the policy that generated
    the token, cut at ``1 + clip_high`` (the paper's ρ, 2 to 10), is the one correction for
    staleness."""

    name: ClassVar[str] = "aipo"


@with_defaults(correction="none", loss_normalization="sequence")
class SAPO(GRPO):
    """GRPO with a gate that closes smoothly around a ratio of 1, where a clip stops at once.

    A token's gain is ``4 / τ · sigmoid(τ (ratio - 1)) · advantage``. ``clip_low``, ``clip_high`` and
    ``max_ratio`` have no effect.
    """

    name: ClassVar[str] = "sapo"

    gate_positive: float = Field(
        default=1.0, gt=0, description="τ of tokens with a positive advantage."
    )
    gate_negative: float = Field(
        default=1.05,
        gt=0,
        description="τ of the others, higher: they raise tokens that were not sampled, so their "
        "gate closes sooner.",
    )

    def surrogate(
        self, ratio: torch.Tensor, tokens: TokenBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        advantage = tokens["advantage"]
        is_positive = advantage > 0
        steepness = ratio.new_full(ratio.shape, self.gate_negative)
        steepness[is_positive] = self.gate_positive
        gate = (steepness * (ratio - 1)).sigmoid() * 4 / steepness
        return gate * advantage, advantage != advantage


class GDPO(GRPO):
    """GRPO for several reward functions, whose scores are normalised before they are added: no
    function is drowned by one whose scores are larger, and groups that differ in one function stay
    apart from those that differ in all."""

    name: ClassVar[str] = "gdpo"

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
        return {"advantage": (batch["advantage"] - mean) / (deviation + ADVANTAGE_EPS)}
