"""The result of one run, read from its folder.

recipe.json ─▶ dotted keys      metrics.jsonl, metrics/*.gz ─▶ columns of steps and evaluations
summary.json, labels.json ─▶ state, tags, notes
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic_core import from_json

from orchestration.checkpoints.recorded import SUMMARY
from orchestration.comparison.keys import HELD_OUT, flattened
from orchestration.history.columns import Points, concatenated
from orchestration.history.events_file import METRICS, newest_events
from orchestration.history.facts import KIND_OF_LINE
from orchestration.history.lines import finite_numbers
from orchestration.history.past import closed_past
from orchestration.history.segments import lines_of_open
from orchestration.recipe.loading.paths import name_of
from orchestration.state.labels import Labels, read_labels
from orchestration.state.live import live_index
from orchestration.state.paths import RECIPE
from pipeline.data.events import ENDED

Floats = NDArray[np.float64]
MOST_STEPS = 10_000_000
KINDS = ("step", "evaluation")
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
    columns = _columns(folder / METRICS, metrics)
    summary: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        summary = json.loads((folder / SUMMARY).read_bytes())
    return RunResult(
        id=name_of(folder.resolve().name),
        name=str(tables.get("name", folder.name)),
        state=_state(folder),
        folder=str(folder),
        recipe=flattened(tables),
        steps=columns["step"],
        evaluations=columns["evaluation"],
        summary=summary,
        labels=read_labels(folder),
    )


def _columns(path: Path, metrics: Collection[str] | None) -> dict[str, dict[str, Floats]]:
    """Return the columns of steps and of evaluations in ``path`` and its closed parts."""
    rows: dict[str, list[Mapping[str, Any]]] = {kind: [] for kind in KINDS}
    for line in lines_of_open(path):
        match = KIND_OF_LINE.search(line, 0, 120)
        kind = match[1].decode() if match else ""
        if kind in KINDS:
            with contextlib.suppress(ValueError, KeyError):  # torn
                rows[kind].append(from_json(line)["data"])
    chosen = {kind: _chosen(kind, metrics) for kind in KINDS}

    def wanted(kind: str, _: str, number: str) -> bool:
        return kind in KINDS and (metrics is None or number in chosen[kind])

    past = closed_past(path, wanted, MOST_STEPS)
    return {kind: _joined(past.get(kind, ()), rows[kind], chosen[kind]) for kind in KINDS}


def _chosen(kind: str, metrics: Collection[str] | None) -> list[str]:
    """Return the names of the numbers of ``kind`` among ``metrics``, with the axes; []: all."""
    if metrics is None:
        return []
    prefix = HELD_OUT if kind == "evaluation" else ""
    names = [name.removeprefix(prefix) for name in metrics if name.startswith(prefix)]
    return [*dict.fromkeys((*AXES, *names))]


def _joined(
    pieces: Sequence[Points], rows: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> dict[str, Floats]:
    """Return the columns of closed parts, then of the events ``rows``: ``names``, or all."""
    if not names or any("/" in name for name in names):  # of functions
        rows = [finite_numbers(row) for row in rows]
    present = names or dict.fromkeys(name for row in rows for name in row)
    columns = {name: np.array([_number(row.get(name)) for row in rows]) for name in present}
    if pieces:
        points = concatenated(pieces)
        before = {
            name: np.where(points.counts[name] > 0, values, np.nan)
            for name, values in points.values.items()
        }
        lacking = np.full(len(points), np.nan), np.full(len(rows), np.nan)
        columns = {
            name: np.concatenate([before.get(name, lacking[0]), columns.get(name, lacking[1])])
            for name in before.keys() | columns.keys()
        }
    known = {name: values for name, values in columns.items() if np.isfinite(values).any()}
    return in_order(known)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else np.nan


def in_order(columns: Mapping[str, Floats]) -> dict[str, Floats]:
    """Return ``columns`` in the order of their versions, each version once: its last row."""
    if "version" not in columns:
        return {}
    versions = columns["version"]
    _, from_the_end = np.unique(versions[::-1], return_index=True)
    rows = len(versions) - 1 - from_the_end
    return {name: values[rows] for name, values in columns.items()}


def _state(folder: Path) -> str:
    event = newest_events(folder / METRICS, {"state"}).get("state")
    state = str(event.data.get("state", "")) if event else ""
    if live_index(folder) is not None:
        return (
            "starting" if event is None and not (folder / METRICS).exists() else state or "running"
        )
    return state if state in ENDED else "failed"
