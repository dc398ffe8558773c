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
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

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


async def follow_costs(index: Index, recipe: Recipe, folder: Path) -> None:
    """Forecast the run of ``index``, and decide its staleness bound where its recipe leaves that to
    the run, without end."""
    if (
        not recipe.runs_stage("update")
        or not recipe.runs_stage("rollout")
        or recipe.prompts.responses
    ):
        return  # another program does a part of it, or nothing is generated for training
    known = await FORECAST.get(index)
    begin = recipe.pipeline.staleness_min or recipe.pipeline.staleness
    live: LiveForecast | None = None

    def judge(events: list[Event]) -> ForecastEvent:
        nonlocal live
        from orchestration.simulation.bound import LiveForecast

        live = live or LiveForecast(recipe, folder, known.bound if known else begin, WINDOW)
        return live.judge(events)

    window = list[Event]()
    steps = 0
    left = 1
    rest = 0.0
    said = ""  # the first step waits for the start
    async for event in index.follow((await index.event_ends())[1]):
        if event.kind == "step" and left:
            left = left - 1
            window = []
        elif event.kind in ("step", "stage", "sync"):
            window.append(event)
            steps += event.kind == "step"
        if len(window) > STAGE_EVENTS:
            window = [one for at, one in enumerate(window) if one.kind == "step" or at % 2]
        if (
            event.kind != "step"
            or steps < WINDOW
            or event.time - window[0].time < SECONDS
            or time.monotonic() < rest
        ):
            continue
        events = window
        window = [event]
        steps = 0
        began = time.monotonic()
        try:
            found = await asyncio.to_thread(judge, events)
        except Exception as failed:  # a run never ends for want of a forecast
            from orchestration.simulation.recorded import NotMeasured

            if str(failed) != said:
                log.warning(
                    "no forecast of the next steps",
                    reason=str(failed),
                    exc_info=not isinstance(failed, NotMeasured),
                )
            said = str(failed)
            continue
        rest = time.monotonic() + (time.monotonic() - began) / SHARE
        if found.bound != found.before:
            await index.set_slack(replace(recipe.staleness_plan, bound=found.bound).slack)
            left = SETTLING
        await FORECAST.put(index, found)
        await index.emit(found)
        if found.reason:
            log.info("forecast", reason=found.reason)
