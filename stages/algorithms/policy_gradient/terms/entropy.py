"""The entropy of the policy in a loss: a bonus, and a policy gradient of uncertain tokens alone.

entropy_coef         the weight of the bonus: fixed, or steered to a target (Skywork-OR1, arXiv 2505.22312)
high_entropy_share   only the tokens of the batch with the highest entropies are learned from (2506.01939)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Self

import pydantic
from pydantic import Field

from stages.algorithms.interface import Algorithm
from stages.algorithms.token_batch import TokenBatch
from stages.flow.declarations import ENTROPY, Columns, RunsOn
from stages.json_schema import faults

if TYPE_CHECKING:
    import torch

    from stages.algorithms.batch import TrainBatch

COEF = "entropy_coef"  # the weight of the bonus, 0 where it is left out
LEVEL = "entropy_coef_level"  # what it is where it is not left out
BEFORE = "entropy_before"  # of each token, before the step
HIGH = "high_entropy"


class EntropyTerms(Algorithm):
    """The options of a loss with the policy's entropy."""

    entropy_coef: float = Field(
        default=0.0,
        ge=0,
        description="Weight of the policy's entropy (nats), whose mean over tokens is subtracted "
        "from the loss: above 0 the policy is held from becoming certain.",
    )
    entropy_target: float | None = Field(
        default=None,
        gt=0,
        description="Entropy (nats) that the policy is held at. The weight of the bonus begins "
        "with `entropy_coef`. After a train batch with a lower mean entropy it rises by "
        "`entropy_coef_step`; after one with a higher entropy it falls, and the next batch is "
        "trained without a bonus (Skywork-OR1, arXiv 2505.22312). Default: the weight is fixed.",
    )
    entropy_coef_step: float = Field(default=0.005, gt=0, description="See `entropy_target`.")
    entropy_coef_max: float = Field(
        default=1.0, gt=0, description="The weight rises no further. See `entropy_target`."
    )
    high_entropy_share: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Share of the train batch's tokens that the policy gradient is of: those where "
        "the policy's entropy before the step is highest (arXiv 2506.01939, whose share is 0.2). "
        "It costs a forward pass. Default: all tokens.",
    )

    @pydantic.model_validator(mode="after")
    def _begins_below_most(self) -> Self:
        if self.entropy_target is not None and self.entropy_coef > self.entropy_coef_max:
            problem = f"is above entropy_coef_max = {self.entropy_coef_max:g}"
            faults(self, [("entropy_coef", problem, "lower it, or raise entropy_coef_max")])
        return self

    @property
    def control_begins(self) -> Mapping[str, float]:
        if self.entropy_target is None:
            return super().control_begins
        return {**super().control_begins, COEF: self.entropy_coef, LEVEL: self.entropy_coef}

    def control(
        self, numbers: Mapping[str, float], metrics: Mapping[str, float]
    ) -> Mapping[str, float]:
        """Raise or lower the weight of the bonus by the ``entropy`` of the train batch."""
        numbers = super().control(numbers, metrics)
        if self.entropy_target is None:
            return numbers
        entropy = metrics["entropy"]
        level = numbers[LEVEL]
        if entropy < self.entropy_target:
            level = min(level + self.entropy_coef_step, self.entropy_coef_max)
        elif entropy > self.entropy_target:
            level = max(level - self.entropy_coef_step, 0.0)
        is_used = entropy <= self.entropy_target
        return {**numbers, COEF: level if is_used else 0.0, LEVEL: level}

    def bonus(self, tokens: TokenBatch) -> torch.Tensor | float:
        """Return the micro-batch's share of the weighted entropy."""
        weight = self.entropy_coef
        if self.entropy_target is not None:
            if COEF not in tokens.control:
                raise ValueError("entropy_target: this train engine keeps no numbers of control")
            weight = tokens.control[COEF]
        if not weight:
            return 0.0
        if tokens.entropy is None:
            raise ValueError("entropy_coef: this train engine computes no entropy")
        return weight * tokens.mean(tokens.entropy)

    @property
    def scores(self) -> Mapping[str, RunsOn]:
        before: dict[str, RunsOn] = {BEFORE: ENTROPY} if self.high_entropy_share else {}
        return {**super().scores, **before}

    @property
    def prepare_makes(self) -> Columns:
        high = {HIGH: "float32 ragged"} if self.high_entropy_share else {}
        return {**super().prepare_makes, **high}

    @property
    def loss_reads(self) -> Columns:
        return {**super().loss_reads, **self.prepare_makes}

    def prepare(self, batch: TrainBatch) -> Mapping[str, torch.Tensor]:
        if not self.high_entropy_share:
            return super().prepare(batch)
        from stages.algorithms.thresholds import in_top  # which other runs do not load

        before = batch[BEFORE]
        is_high = in_top(batch, before, self.high_entropy_share)
        return {**super().prepare(batch), HIGH: is_high.to(before.dtype)}
