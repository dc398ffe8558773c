"""Beside a run: its costs by the last steps, a forecast of the next ones, and the staleness bound
that both ask for.

    step, stage, sync events ──▶ costs ──▶ simulation ──┬▶ document "forecast" ──▶ step events: predicted beside measured
            (of the last steps)                         ├▶ `forecast` event, with the drift from the one before
                                                        └▶ pipeline.staleness_min: the smallest bound that holds the busiest
                                                           stage at HOLDS of its time ──▶ slack in the index

Importing this needs no torch: it runs in the supervisor.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean

import structlog

from orchestration.recipe.schema import Recipe
from orchestration.simulation.costs import Costs
from orchestration.simulation.forecast import Forecast, forecast, setup_of
from orchestration.simulation.recorded import NotMeasured, measured_costs
from pipeline.data.events import Event, ForecastEvent
from pipeline.index.client import Index
from stages.weights.documents import FORECAST

log = structlog.get_logger()

# steps from which costs are measured, at least, and their time
WINDOW = 8
SECONDS = 10.0
SETTLING = 2  # steps after a change of the bound, whose samples were admitted under the one before
HOLDS = 0.95  # share of time that the busiest stage is kept busy
DRIFT = 0.25  # of the seconds of a step, from which on it is said
PATIENCE = 2  # windows in a row that ask for a smaller bound, before it is taken
SHARE = 0.02  # of the time, that simulations may take
SAMPLES = 100_000  # that are simulated for one bound, at most
STAGE_EVENTS = 4000  # that are kept of a window


def with_bound(recipe: Recipe, bound: int) -> Recipe:
    """``recipe`` with a fixed staleness bound."""
    pipeline = recipe.pipeline.model_copy(update={"staleness": bound, "staleness_min": 0})
    return recipe.model_copy(update={"pipeline": pipeline})


def choose_bound(forecasts: Sequence[tuple[int, Forecast]]) -> int:
    """The smallest of the bounds whose forecast holds the busiest stage, or is as fast as the
    fastest."""
    fastest = max(found.tokens_per_second for _, found in forecasts)
    for bound, found in forecasts:
        if (
            max(found.generation, found.training) >= HOLDS
            or found.tokens_per_second >= 0.99 * fastest
        ):
            return bound
    raise AssertionError("the fastest is one of them")


@dataclass
class LiveForecast:
    """The costs and the bound of a run of ``recipe`` in ``folder``."""

    recipe: Recipe
    folder: Path
    bound: int
    last: Forecast | None = None
    costs: Costs | None = None
    _smaller: int = 0  # windows in a row that asked for a smaller bound

    def judge(self, events: Sequence[Event]) -> ForecastEvent:
        """What the events of some steps in a row say. Raises NotMeasured."""
        steps = [event for event in events if event.kind == "step"]
        costs, lengths = measured_costs(events, self.folder, with_bound(self.recipe, self.bound))
        rows = self.recipe.train.groups_per_step * self.recipe.algorithm.group_size
        length = max(WINDOW, min(3 * WINDOW, SAMPLES // rows))
        pipeline = self.recipe.pipeline
        bounds = range(pipeline.staleness_min or pipeline.staleness, pipeline.staleness + 1)
        forecasts = []
        for bound in bounds:
            setup = setup_of(with_bound(self.recipe, bound), steps=length)
            forecasts.append((bound, forecast(setup, costs, lengths)))
        before = self.bound
        reasons = []
        drift = None
        if self.last is not None and self.costs is not None:
            drift = fmean(step.data["seconds"] for step in steps[1:]) / self.last.step_seconds - 1
            if abs(math.log1p(drift)) > math.log1p(DRIFT):
                reasons.append(
                    f"steps took {1 + drift:.2f} times the forecast: {_moved(self.costs, costs)}"
                )
        wanted = choose_bound(forecasts)
        self._smaller = self._smaller + 1 if wanted < before else 0
        if wanted > before or self._smaller >= PATIENCE:
            self.bound = wanted
            self._smaller = 0
            reasons.append(
                f"the smallest staleness bound that keeps the busiest stage busy is {wanted}, "
                f"before {before}"
            )
        self.last = dict(forecasts)[self.bound]
        self.costs = costs
        return ForecastEvent(
            step=steps[-1].data["step"] + 1,
            step_seconds=self.last.step_seconds,
            tokens_per_second=self.last.tokens_per_second,
            generation=self.last.generation,
            training=self.last.training,
            staleness_mean=self.last.staleness_mean,
            bound=self.bound,
            before=before,
            drift=drift,
            reason="; ".join(reasons),
        )


def _moved(before: Costs, now: Costs) -> str:
    """The cost that has changed by the largest factor."""
    old = asdict(before)
    new = asdict(now)
    names = [
        name
        for name, value in new.items()
        if isinstance(value, float) and value > 0 and old[name] > 0
    ]
    finite = [name for name in names if math.isfinite(new[name])]
    most = max(finite, key=lambda name: abs(math.log(new[name] / old[name])))
    return f"{most} has changed most, from {old[most]:.3g} to {new[most]:.3g}"


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
    live = LiveForecast(recipe, folder, known.bound if known else begin)
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
            found = await asyncio.to_thread(live.judge, events)
        except Exception as failed:  # a run never ends for want of a forecast
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
