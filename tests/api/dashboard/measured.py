"""The small engine with the measures of ours: tokens of a loss, and the learning rate of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from orchestration.calls.engines.parts import Parts
from stages.calls.interface import AdamOptions, Datum, LossOptions, PassOutput, ServedBase
from tests.orchestration.calls.small_engine import SmallModel, SmallSampler


class Measured(SmallModel):
    def forward(self, data: Sequence[Datum], loss: str, options: LossOptions) -> PassOutput:
        output = super().forward(data, loss, options)
        tokens = float(sum(datum.tokens.size for datum in data))
        return PassOutput(output.logprobs, {**output.metrics, "tokens:sum": tokens})

    def optimizer_step(self, options: AdamOptions) -> dict[str, float]:
        return {**super().optimizer_step(options), "learning_rate": options.learning_rate}


async def open_parts(base: ServedBase, options: Mapping[str, Any]) -> Parts:
    return Parts(Measured, SmallSampler())
