"""The staleness bound of a run that goes on: a forecast of its next steps with each bound.

Imported when the first steps of a run have been measured (orchestration.simulation.live).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from orchestration.recipe.schema import Recipe
from orchestration.simulation.costs import Costs
from orchestration.simulation.forecast import Forecast, forecast, setup_of
from orchestration.simulation.recorded import measured_costs
from orchestration.words import words
from pipeline.data.events import Event, ForecastEvent

HOLDS = 0.95  # share of time that the busiest stage is kept busy
DRIFT = 0.25  # of the seconds of a step, from which on it is said
PATIENCE = 2  # windows in a row that ask for a smaller bound, before it is taken
SAMPLES = 100_000  # that are simulated for one bound, at most


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
    """The costs and the bound of a run of ``recipe`` in ``folder``. ``window``: steps from which
    costs are measured, at least."""

    recipe: Recipe
    folder: Path
    bound: int
    window: int
    last: Forecast | None = None
    costs: Costs | None = None
    _smaller: int = 0  # windows in a row that asked for a smaller bound

    def judge(self, events: Sequence[Event]) -> ForecastEvent:
        """What the events of some steps in a row say. Raises NotMeasured."""
        steps = [event for event in events if event.kind == "step"]
        costs, lengths = measured_costs(events, self.folder, with_bound(self.recipe, self.bound))
        length = max(self.window, min(3 * self.window, SAMPLES // self.recipe.rows_per_step))
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
            version=steps[-1].data["version"],
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
    return f"what changed most: {words(most)}, from {old[most]:.3g} to {new[most]:.3g}"
