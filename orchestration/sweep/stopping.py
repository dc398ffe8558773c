"""``--stop-below VALUE@STEP``: runs that are worse than VALUE at STEP are stopped."""

from __future__ import annotations

import re
from dataclasses import dataclass

from orchestration.comparison.compare import LOWEST
from orchestration.recipe.problems import RecipeError
from orchestration.sweep.record import Request, SweepRun
from pipeline.problems import Problem


@dataclass(frozen=True)
class StopBelow:
    """A bound of ``metric`` at ``step``; of a metric whose lowest value is the best, an upper one."""

    metric: str
    value: float
    step: int

    def judge(self, run: SweepRun, previous: int, step: int, value: float) -> str:
        """Return why a run is stopped that has ``value`` at ``step``, and had its value before that
        at the step ``previous``; "": it goes on. The first value at or after :attr:`step` counts."""
        if not previous < self.step <= step:
            return ""
        sign = -1 if is_lowest_best(self.metric) else 1
        if sign * value >= sign * self.value:
            return ""
        word = "above" if sign < 0 else "below"
        return f"{self.metric} {value:.4g} is {word} {self.value:g} at step {step}"


def is_lowest_best(metric: str) -> bool:
    return LOWEST.search(metric) is not None


def parse_stops(request: Request) -> list[StopBelow]:
    """Return the bounds of ``request``. Raises RecipeError with all that is
    wrong."""
    stops, problems = [], []
    for text in request.stop_below:
        match = re.fullmatch(r"([+-]?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)@(\d{1,9})", text)
        if match is None or int(match[2]) == 0:
            fix = "write for example --stop-below 0.2@50"
            problems.append(Problem("--stop-below", text, "is not VALUE@STEP", fix))
        else:
            stops.append(StopBelow(request.metric, float(match[1]), int(match[2])))
    if problems:
        raise RecipeError("sweep", problems)
    return stops
