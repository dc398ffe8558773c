"""The result of one run, read from its folder.

recipe.json ─▶ dotted keys      metrics.jsonl, metrics/*.gz ─▶ columns of steps and evaluations
summary.json, labels.json ─▶ state, tags, notes
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestration.checkpoints.recorded import SUMMARY
from orchestration.history.columns import Points, concatenated
from orchestration.history.events_file import METRICS, newest_event
from orchestration.history.past import past_of
from orchestration.recipe.loading.paths import name_of
from orchestration.recipe.schema import Recipe
from orchestration.state.labels import Labels, read_labels
from orchestration.state.live import live_index
from orchestration.state.paths import RECIPE
from pipeline.data.events import ENDED

Floats = NDArray[np.float64]
HELD_OUT = "evaluation."  # before the name of a metric of evaluations
MOST_STEPS = 10_000_000
AXES = ("version", "tokens_trained", "seconds")  # what every curve needs


@dataclass(frozen=True)
class RunResult:
    """What a run was asked for, and what came of it.

    ``recipe``: values by dotted keys, with every default; a list of tables has its places as keys.
    ``steps`` and ``evaluations``: columns by the names of numbers, float64 [rows], NaN where a row
    lacks the number, in the order of their ``version``; step n made version n. ``summary``: as
    summary.json has it, {} before the run has ended.
    """

    id: str
    name: str
    state: str
    folder: str
    recipe: Mapping[str, Any]
    steps: Mapping[str, Floats]
    evaluations: Mapping[str, Floats]
    summary: Mapping[str, Any] = field(default_factory=dict)
    labels: Labels = field(default_factory=Labels)

    @property
    def versions(self) -> Floats:
        """Version that each step made [steps]."""
        return self.steps.get("version", np.zeros(0))

    @property
    def tokens(self) -> Floats:
        """Tokens trained since the run's beginning, at each step [steps]."""
        return self.steps.get("tokens_trained", np.full(len(self.versions), np.nan))

    @property
    def hours(self) -> Floats:
        """Hours of all steps so far, at each step [steps], without the time between a run's end and
        its continuation."""
        seconds = self.steps.get("seconds", np.full(len(self.versions), np.nan))
        return np.cumsum(np.nan_to_num(seconds)) / 3600

    def metric(self, name: str) -> tuple[Floats, Floats]:
        """Return the versions [points] and the values [points] of ``name``, a number of steps or,
        as `evaluation.reward_mean`, of evaluations; without those that are absent."""
        table = self.evaluations if name.startswith(HELD_OUT) else self.steps
        versions = table.get("version", np.zeros(0))
        values = table.get(name.removeprefix(HELD_OUT), np.full(len(versions), np.nan))
        present = np.isfinite(values)
        return versions[present], values[present]

    def metrics(self) -> list[str]:
        """Return the names of all metrics."""
        return [*self.steps, *(f"{HELD_OUT}{name}" for name in self.evaluations)]


def read_run(folder: Path, metrics: Collection[str] | None = None) -> RunResult:
    """Return the result of the run in ``folder``, a live or an ended one.

    ``metrics``: the only ones that are read, beside those of the axes; None: all. Raises OSError
    where there is no run's folder.
    """
    tables = json.loads((folder / RECIPE).read_bytes())
    path = folder / METRICS

    def wanted(kind: str, _: str, number: str) -> bool:
        if metrics is None or number in AXES:
            return True
        return (f"{HELD_OUT}{number}" if kind == "evaluation" else number) in metrics

    past = past_of(
        path, 0.0, float("inf"), 0.0, wanted, kinds=("step", "evaluation"), most=MOST_STEPS
    )
    summary: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        summary = json.loads((folder / SUMMARY).read_bytes())
    return RunResult(
        id=name_of(folder.resolve().name),
        name=str(tables.get("name", folder.name)),
        state=_state(folder),
        folder=str(folder),
        recipe=flattened(tables),
        steps=_columns(past.pieces.get("step", ())),
        evaluations=_columns(past.pieces.get("evaluation", ())),
        summary=summary,
        labels=read_labels(folder),
    )


def flattened(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recorded recipe by dotted keys, with the defaults that it lacks.

    >>> flattened({"unknown": {"a": 1, "b": [{"c": [2]}]}})
    {'unknown.a': 1, 'unknown.b.0.c': [2]}
    """
    with contextlib.suppress(ValueError):  # of a later version: as it was written
        tables = Recipe.recorded(tables).model_dump(mode="json")
    return dict(_leaves(tables, ""))


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    is_tables = isinstance(value, list) and bool(value) and isinstance(value[0], dict)
    if isinstance(value, dict) or is_tables:
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(item, f"{key}.{name}" if key else str(name))
    else:
        yield key, value


def _columns(pieces: Sequence[Points]) -> dict[str, Floats]:
    """Return the columns of ``pieces``, each version once: as it was made last."""
    if not pieces:
        return {}
    points = concatenated(pieces)
    columns = {
        name: np.where(points.counts[name] > 0, values, np.nan)
        for name, values in points.values.items()
    }
    return in_order(columns)


def in_order(columns: Mapping[str, Floats]) -> dict[str, Floats]:
    """Return ``columns`` in the order of their versions, each version once: its last row."""
    if "version" not in columns:
        return {}
    versions = columns["version"]
    _, from_the_end = np.unique(versions[::-1], return_index=True)
    rows = len(versions) - 1 - from_the_end
    return {name: values[rows] for name, values in columns.items()}


def _state(folder: Path) -> str:
    event = newest_event(folder / METRICS, "state")
    state = str(event.data.get("state", "")) if event else ""
    if live_index(folder) is not None:
        return (
            "starting" if event is None and not (folder / METRICS).exists() else state or "running"
        )
    return state if state in ENDED else "failed"
