"""Beside a run: its costs by the last steps, a forecast of the next ones, and the staleness bound
that both ask for.

    step, stage, sync events ──▶ costs ──▶ simulation ──┬▶ document "forecast" ──▶ step events: predicted beside measured
            (of the last steps)                         ├▶ `forecast` event, with the drift from the one before
                                                        └▶ pipeline.staleness_min: the smallest bound that holds the busiest
                                                           stage at HOLDS of its time ──▶ slack in the index

Importing this needs no torch: it runs in the supervisor. The simulation is imported when the first
steps have been measured: many runs end before.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

import structlog

from orchestration.recipe.schema import Recipe
from pipeline.data.events import Event, ForecastEvent
from pipeline.index.client import Index
from stages.weights.documents import FORECAST

if TYPE_CHECKING:
    from orchestration.simulation.bound import LiveForecast


log = structlog.get_logger()

# steps from which costs are measured, at least, and their time
WINDOW = 8
SECONDS = 10.0
SETTLING = 2  # steps after a change of the bound, whose samples were admitted under the one before
SHARE = 0.02  # of the time, that simulations may take
STAGE_EVENTS = 4000  # that are kept of a window


def is_forecast(recipe: Recipe) -> bool:
    """Return whether runs of ``recipe`` are forecast: no other program does a part of them, and
    something is generated for training."""
    runs_both = recipe.runs_stage("update") and recipe.runs_stage("rollout")
    return runs_both and not recipe.prompts.responses


class CostFollower:
    """Forecasts the run of ``index`` by its events, and decides its staleness bound where its
    recipe leaves that to the run."""

    def __init__(self, index: Index, recipe: Recipe, folder: Path, bound: int) -> None:
        self._index = index
        self._recipe = recipe
        self._folder = folder
        self._bound = bound
        self._live: LiveForecast | None = None  # once there is something to judge
        self._window = list[Event]()
        self._steps = 0  # in the window
        self._settling = 1  # steps that do not count: the first one waits for the start
        self._pause_until = 0.0
        self._last_failure = ""

    @classmethod
    async def begin(cls, index: Index, recipe: Recipe, folder: Path) -> Self:
        """Return one that goes on from the last forecast of the run in ``folder``."""
        known = await FORECAST.get(index)
        begin = recipe.pipeline.staleness_min or recipe.pipeline.staleness
        return cls(index, recipe, folder, known.bound if known else begin)

    async def take(self, event: Event) -> None:
        if event.kind not in ("step", "stage", "sync"):
            return
        if event.kind == "step" and self._settling:
            self._settling -= 1
            self._window = []
            return
        self._window.append(event)
        self._steps += event.kind == "step"
        if len(self._window) > STAGE_EVENTS:
            self._window = [
                each for at, each in enumerate(self._window) if each.kind == "step" or at % 2
            ]
        if (
            event.kind == "step"
            and self._steps >= WINDOW
            and event.time - self._window[0].time >= SECONDS
            and time.monotonic() >= self._pause_until
        ):
            events = self._window
            self._window = [event]
            self._steps = 0
            await self._judge(events)

    def _report(self, events: Sequence[Event]) -> ForecastEvent:
        from orchestration.simulation.bound import LiveForecast

        self._live = self._live or LiveForecast(self._recipe, self._folder, self._bound, WINDOW)
        return self._live.judge(events)

    async def _judge(self, events: Sequence[Event]) -> None:
        began = time.monotonic()
        try:
            report = await asyncio.to_thread(self._report, events)
        except Exception as failed:  # a run never ends for want of a forecast
            from orchestration.simulation.recorded import NotMeasured

            if str(failed) != self._last_failure:
                log.warning(
                    "no forecast of the next steps",
                    reason=str(failed),
                    exc_info=not isinstance(failed, NotMeasured),
                )
            self._last_failure = str(failed)
            return
        self._pause_until = time.monotonic() + (time.monotonic() - began) / SHARE
        if report.bound != report.before:
            plan = replace(self._recipe.staleness_plan, bound=report.bound)
            await self._index.set_slack(plan.slack)
            self._settling = SETTLING
        await FORECAST.put(self._index, report)
        await self._index.emit(report)
        if report.reason:
            log.info("forecast", reason=report.reason)
