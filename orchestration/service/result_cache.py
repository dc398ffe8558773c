"""Results of runs in memory, by the files that they were read from."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

from orchestration.comparison.keys import flattened
from orchestration.comparison.results import RunResult, read_run
from orchestration.history.events_file import METRICS
from orchestration.history.segments import folder_of
from orchestration.state.paths import RECIPE
from orchestration.state.registry import RunRecord

MOST_BYTES = 64 << 20
RECIPE_BYTES = 32 << 10  # of a flattened recipe, about

Stamp = tuple[tuple[int, int], ...]


class ResultCache:
    """Results of the runs that were read last, of one metric each, in ``most_bytes``."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0
        self._results: OrderedDict[tuple[Path, str], tuple[Stamp, int, RunResult]] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, record: RunRecord, folder: Path, metric: str) -> RunResult:
        """Return the result of the run ``record`` in ``folder``, with ``metric`` alone."""
        key = folder, metric
        stamp = _stamp(folder)
        with self._lock:
            known, _, result = self._results.get(key, ((), 0, None))
            if result is not None and known == stamp:
                self._results.move_to_end(key)
            else:
                result = _read(record, folder, metric)
                self._keep(key, stamp, result)
        return replace(result, id=record.id, state=record.state, labels=record.labels)

    def _keep(self, key: tuple[Path, str], stamp: Stamp, result: RunResult) -> None:
        columns = [*result.steps.values(), *result.evaluations.values()]
        size = RECIPE_BYTES + sum(column.nbytes for column in columns)
        _, former, _ = self._results.pop(key, ((), 0, None))
        self._results[key] = stamp, size, result
        self._bytes += size - former
        while self._bytes > self._most_bytes and len(self._results) > 1:
            _, (_, size, _) = self._results.popitem(last=False)
            self._bytes -= size


def _read(record: RunRecord, folder: Path, metric: str) -> RunResult:
    try:
        return replace(read_run(folder, (metric,)), summary={})
    except OSError:  # it waits, or its folder is elsewhere
        recipe = flattened(record.recipe)
        return RunResult(record.id, record.name, record.state, str(folder), recipe, {}, {})


def _stamp(folder: Path) -> Stamp:
    path = folder / METRICS
    stats = [each.stat() for each in (path, folder_of(path), folder / RECIPE) if each.exists()]
    return tuple((stat.st_mtime_ns, stat.st_size) for stat in stats)
