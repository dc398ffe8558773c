"""The table of a service's runs: settings, tags and the newest results of each.

Registry.everything ─▶ records ─┬─▶ rows, with the columns that are asked for
the end of metrics.jsonl ───────┘   └ read again while a run goes on
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestration.comparison.keys import HELD_OUT, differing
from orchestration.history.events_file import METRICS, newest_events
from orchestration.history.lines import finite_numbers
from orchestration.state.registry import MOST_RUNS, Registry, RunRecord

PLAIN = (
    *("id", "name", "state", "reason", "position", "owner"),
    *("created", "started", "ended", "former_seconds"),
)
Numbers = Mapping[str, float]


class RunTable:
    """The runs of ``registry``, whose files are in the ``folder_of`` each."""

    def __init__(self, registry: Registry, folder_of: Callable[[RunRecord], Path]) -> None:
        self._registry = registry
        self._folder_of = folder_of
        self._numbers = dict[str, tuple[float, Numbers]]()  # of ended runs, by when they ended
        self._keys: tuple[Sequence[object], list[str]] = ((), [])

    async def rows(self, columns: Sequence[str]) -> dict[str, Any]:
        """Return the ``rows`` of all runs, newest first, the ``keys`` by which their recipes differ,
        and the ``metrics`` that they have.

        ``columns``: keys of the recipe, numbers of the newest step, or as `evaluation.NAME` of the
        newest evaluation; null where a run has none.
        """
        records = (await self._registry.everything())[:MOST_RUNS]
        return await asyncio.to_thread(self._rows, records, columns)

    def metrics_of(self, records: Sequence[RunRecord]) -> list[str]:
        """Return the names of the numbers that the newest events of ``records`` have."""
        return sorted({name for record in records for name in self._numbers_of(record)})

    def _rows(self, records: Sequence[RunRecord], columns: Sequence[str]) -> dict[str, Any]:
        numbers = [self._numbers_of(record) for record in records]
        recipes = [record.recipe for record in records]
        if [*map(id, recipes)] != self._keys[0]:
            self._keys = [*map(id, recipes)], differing(recipes)
        present = {record.id for record in records}
        self._numbers = {run: known for run, known in self._numbers.items() if run in present}
        rows = [
            {name: getattr(record, name) for name in PLAIN}
            | {
                "steps": record.recipe["train"]["steps"],
                "steps_done": int(newest.get("version", 0)),
                "tags": record.labels.tags,
                "notes": record.labels.notes,
                "values": [_value(record, newest, column) for column in columns],
            }
            for record, newest in zip(records, numbers, strict=True)
        ]
        return {
            "rows": rows,
            "keys": self._keys[1],
            "metrics": sorted({name for newest in numbers for name in newest}),
        }

    def _numbers_of(self, record: RunRecord) -> Numbers:
        ended, newest = self._numbers.get(record.id, (None, {}))
        if record.ended is None or ended != record.ended:
            evaluates = bool(record.recipe["evaluate"]["every"])
            kinds = {"step", "evaluation"} if evaluates else {"step"}
            events = newest_events(self._folder_of(record) / METRICS, kinds)
            newest = {
                f"{HELD_OUT if kind == 'evaluation' else ''}{name}": number
                for kind, event in events.items()
                for name, number in finite_numbers(event.data).items()
            }
            if record.ended is not None:
                self._numbers[record.id] = record.ended, newest
        return newest


def _value(record: RunRecord, newest: Numbers, column: str) -> Any:
    if column in newest:
        return newest[column]
    value: Any = record.recipe
    for name in column.split("."):
        if isinstance(value, list) and name.isdigit() and int(name) < len(value):
            value = value[int(name)]
        else:
            value = value.get(name) if isinstance(value, dict) else None
    return None if isinstance(value, dict) else value
