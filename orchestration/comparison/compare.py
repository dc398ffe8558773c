"""The comparison of runs: which keys differ, what came of each setting.

RunResult, … ──compare──▶ keys that differ ──▶ settings: runs that differ by their seed alone ──▶ mean ± interval
                                                              └──▶ Comparison.curves: one for each setting, or each run
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from orchestration.comparison.curves import By, Curve, Estimate, band, curve, estimate
from orchestration.comparison.keys import ABSENT, HELD_OUT, beside
from orchestration.comparison.results import RunResult
from orchestration.recipe.problems import suggest

REWARD = "reward_mean"
HELD_OUT_REWARD = f"{HELD_OUT}reward_mean"
SEED = "seed"
# Keys that say nothing of what is learned: names, where a run is, and the variables that its
# functions see there (a service lets them see none by default).
APART = re.compile(
    r"name|description|checkpoint\.url|launch\.(address|readers)|reward\.environment"
    r"|pipeline\.(index|serve|tls_\w+)"
)
# Metrics of which the lowest value is the best.
LOWEST = re.compile(r"loss|seconds|staleness|failed|absent|truncated|(^|_)(kl|gap|clip)")
LAST_SHARE = 0.1  # of the steps, of which the end value is the mean
POINTS = 200  # of a curve


@dataclass(frozen=True)
class Outcome:
    """What came of a metric in one run; None where it has no value."""

    end: float | None
    best: float | None


@dataclass(frozen=True)
class Setting:
    """Runs that differ by their seed alone.

    ``keys``: their values of the keys that differ. ``runs``: places among the runs that are
    compared. ``end`` and ``best``: by metric, over these runs; None without any value.
    """

    keys: Mapping[str, Any]
    runs: tuple[int, ...]
    end: Mapping[str, Estimate | None]
    best: Mapping[str, Estimate | None]
    steps: Estimate | None
    tokens: Estimate | None
    hours: Estimate | None


@dataclass(frozen=True)
class Comparison:
    """``runs`` beside each other. ``metrics``: those that are compared."""

    runs: Sequence[RunResult]
    metrics: Sequence[str]

    @cached_property
    def keys(self) -> list[str]:
        """The dotted keys of the recipe by which the settings differ."""
        return [key for key in self._beside[1] if key != SEED and not APART.fullmatch(key)]

    @cached_property
    def _beside(self) -> tuple[list[dict[str, Any]], list[str]]:
        return beside([run.recipe for run in self.runs])

    @cached_property
    def outcomes(self) -> list[dict[str, Outcome]]:
        """What came of each run, by metric."""
        return [{metric: outcome(run, metric) for metric in self.metrics} for run in self.runs]

    @cached_property
    def settings(self) -> list[Setting]:
        """The settings, in the order of their first runs."""
        places = dict[tuple[str, ...], list[int]]()
        for at, recipe in enumerate(self._beside[0]):
            values = tuple(_value(recipe.get(key, ABSENT)) for key in self.keys)
            places.setdefault(values, []).append(at)
        return [self._setting(runs) for runs in places.values()]

    @cached_property
    def places(self) -> list[int]:
        """The setting of each run, as its place among the settings."""
        by_run = {at: place for place, each in enumerate(self.settings) for at in each.runs}
        return [by_run[at] for at in range(len(self.runs))]

    def _setting(self, places: Sequence[int]) -> Setting:
        runs = [self.runs[at] for at in places]
        ends = {
            metric: estimate([self.outcomes[at][metric].end for at in places])
            for metric in self.metrics
        }
        bests = {
            metric: estimate([self.outcomes[at][metric].best for at in places])
            for metric in self.metrics
        }
        return Setting(
            keys={key: self._beside[0][places[0]].get(key, ABSENT) for key in self.keys},
            runs=tuple(places),
            end=ends,
            best=bests,
            steps=estimate([float(len(run.versions)) for run in runs]),
            tokens=estimate([_last(run.tokens) for run in runs]),
            hours=estimate([_last(run.hours) for run in runs]),
        )

    def curves(self, metric: str, by: By = "step", points: int = POINTS) -> Iterator[Curve]:
        """Yield the curve of each run, of at most ``points`` points."""
        for run in self.runs:
            yield curve(run, metric, by).reduced(points)

    def bands(self, metric: str, by: By = "step", points: int = POINTS) -> Iterator[Curve]:
        """Yield the curve of each setting: the mean of its runs, with its interval."""
        for setting in self.settings:
            yield band([curve(self.runs[at], metric, by) for at in setting.runs], by, points)


def compare(runs: Sequence[RunResult], metrics: Sequence[str] = ()) -> Comparison:
    """Return the comparison of ``runs`` by ``metrics``: numbers of steps, or of evaluations as
    `evaluation.NAME`. Default: the reward, and the held-out one where a run has it.

    Raises ValueError for a metric that no run has.
    """
    known = dict.fromkeys(name for run in runs for name in run.metrics())
    if not metrics:
        metrics = [REWARD, *([HELD_OUT_REWARD] if HELD_OUT_REWARD in known else [])]
    for metric in metrics:
        if metric not in known and metric != REWARD:
            raise ValueError(f"metric = {metric!r}: no run has it; {suggest(metric, known)}")
    return Comparison(runs, metrics)


def outcome(run: RunResult, metric: str) -> Outcome:
    """Return what came of ``metric``: at the end the mean of the last tenth of the steps, or the
    newest evaluation; and the best value."""
    versions, values = run.metric(metric)
    if not len(values):
        return Outcome(None, None)
    last = 1 if metric.startswith(HELD_OUT) else max(1, round(LAST_SHARE * len(run.versions)))
    newest = values[versions > run.versions[-1] - last] if last > 1 else values[-1:]
    best = values.min() if LOWEST.search(metric) else values.max()
    return Outcome(float(newest.mean()) if len(newest) else None, float(best))


def _last(values: Any) -> float | None:
    return float(values[-1]) if len(values) else None


def _value(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
