"""Rollout engines that stall, for recipes: mock engines with one fault each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from stages.engines.mock.engines import MockRolloutEngine
from stages.engines.mock.options import MockRolloutOptions
from stages.engines.protocols import GroupRequest, SwapTimes

FAST = MockRolloutOptions(time_scale=0.02)


class PausedEngine(MockRolloutEngine):
    """Stays paused after it has loaded version 2, as long as the file ``once`` is not there."""

    once: Path

    async def load_weights(
        self, version: int, weights: Mapping[str, torch.Tensor], **how: Any
    ) -> SwapTimes:
        times = await super().load_weights(version, weights, **how)
        if version >= 2 and not self.once.exists():
            self.once.touch()
            await self.pause()
            self.resume = self.pause  # type: ignore[method-assign]
        return times


def paused(recipe: Any, *, version: int, weights: Path | None, once: str) -> PausedEngine:
    engine = PausedEngine(FAST, version=version)
    engine.once = Path(once)
    return engine


LONG_GROUP = 6
LONG_FACTOR = 100


@dataclass(frozen=True)
class Visit:
    """What a worker was asked for of a response: at most ``budget`` tokens (0: all of them) after
    the ``begun`` ones; and what it will make."""

    group: int
    place: int
    begun: int
    budget: int
    made: int
    is_cut: bool


class LongTailedEngine(MockRolloutEngine):
    """The first response of group LONG_GROUP has LONG_FACTOR times the median length.

    ``visits`` are those of all engines of this process.
    """

    visits: ClassVar[list[Visit]] = []

    def _row(self, request: GroupRequest, place: int, stream: Any) -> Any:
        row = self._long_tailed(request, place, stream)
        made = row.tokens - row.begun
        is_cut = row.finish_reason == "cut"
        self.visits.append(
            Visit(request.group, place, row.begun, request.params.budget, made, is_cut)
        )
        return row

    def _long_tailed(self, request: GroupRequest, place: int, stream: Any) -> Any:
        row = super()._row(request, place, stream)
        if (request.group, place) == (LONG_GROUP, 0):
            budget = request.params.budget
            row.length = row.tokens = LONG_FACTOR * int(self._options.median_tokens)
            row.finish_reason = "stop"
            if budget and row.begun + budget < row.length:
                row.tokens = row.begun + budget
                row.finish_reason = "cut"
        return row


def long_tailed(recipe: Any, *, version: int, weights: Path | None) -> LongTailedEngine:
    return LongTailedEngine(
        MockRolloutOptions(time_scale=0.01, median_tokens=20, row_rate=200), version=version
    )
