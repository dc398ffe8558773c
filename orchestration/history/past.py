"""Points of any series of a run over any time, from its files: work by the points that are asked
for, and one part.

|begin                                                                                  end|
··part··|────part────|────part────|────part────|────part────|──── metrics.jsonl ────|········▶ the index has the rest
  events   points of the coarsest level that serves           events
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from orchestration.history.catalog import Catalog, Part
from orchestration.history.columns import (
    Columns,
    Points,
    Wanted,
    concatenated,
    levels_for,
    unpacked,
)
from orchestration.history.detail import detail_of
from orchestration.history.facts import KIND_OF_LINE
from orchestration.history.lines import event_of, id_of
from orchestration.history.reduction import KINDS, MOST_POINTS, refuse_many, series_of
from orchestration.history.segments import closed, lines_of_open
from pipeline.data.events import Event, order

FINE_SECONDS = 60.0  # shorter points of stages need the events as they were sent
SAME_SECONDS = 1e-3  # events have their times in milliseconds
_DATA = """
SELECT number, part, data FROM points
WHERE series = ? AND name = ? AND every = ? AND number BETWEEN ? AND ?
"""


class Series:
    """Collector of points and events in order, ``every`` seconds to a point (0: each its own), of
    the numbers that are ``wanted``. ``last``: the greatest id of the events in them; ``newest``:
    that of a series, where it is known."""

    def __init__(self, every: float, wanted: Wanted | None = None, most: int = MOST_POINTS) -> None:
        self.every = every
        self.wanted = wanted
        self.most = most
        self.last = "0"
        self.newest: dict[str, str] = {}
        self.pieces: dict[str, list[Points]] = {}
        self._events = Columns(wanted)

    def add(self, event: Event) -> None:
        self._events.add(event)

    def extend(self, name: str, points: Points) -> None:
        if len(points):
            self.pieces.setdefault(name, []).append(points)

    def lacks(self, event: Event) -> bool:
        """Return whether an event of the index is in no point yet: some wait a minute for the
        file."""
        waits = event.kind in ("stage", "sync", "ledger")
        known = self.newest.get(series_of(event), self.last) if waits else self.last
        return order(event.id) > order(known)

    def settle(self) -> None:
        """Make points of the events."""
        for name, points in self._events.series():
            self.extend(name, points)
        self._events = Columns(self.wanted)

    def columns(self) -> Iterator[tuple[str, dict[str, list[float | None]]]]:
        """Yield the columns by series and number, as long as the series' ``time``; None where a
        point has no such number. Raises TooMany past ``most`` points."""
        self.settle()
        reduced = {
            name: concatenated(pieces).reduced(name.partition("/")[0], self.every).present()
            for name, pieces in sorted(self.pieces.items())
        }
        refuse_many(sum(map(len, reduced.values())), self.most)
        for name, points in reduced.items():
            if not len(points):
                continue
            yield (
                name,
                {"time": points.times.tolist(), **dict(points.numbers(name.partition("/")[0]))},
            )


def closed_past(path: Path, wanted: Wanted, most: int) -> Mapping[str, Sequence[Points]]:
    """Return the numbers that are ``wanted`` of all events in the closed parts of ``path``, by
    series. Raises TooMany past ``most`` points."""
    past = Series(0.0, wanted, most)
    if closed(path):
        with Catalog(path) as catalog:
            _of_parts(catalog, past, -math.inf, math.inf)
    return past.pieces


def past_of(path: Path, begin: float, end: float, every: float, wanted: Wanted) -> Series:
    """Return the numbers that are ``wanted`` of the events from ``begin`` to ``end`` in ``path``, a
    ``metrics.jsonl``, and its closed parts. Raises TooMany."""
    past = Series(every, wanted)
    if closed(path):
        with Catalog(path) as catalog:
            _of_parts(catalog, past, begin, end)
    for event in _open_events(path, past):
        if begin <= event.time <= end:
            past.add(event)
    past.settle()
    if every < FINE_SECONDS and any(name.startswith("stage/") for name in past.pieces):
        _refine(path, past, begin, end)
    return past


def _open_events(path: Path, past: Series) -> Iterator[Event]:
    """Yield the events of the open part that belong to series."""
    for line in lines_of_open(path):
        kind = KIND_OF_LINE.search(line, 0, 120)
        if kind is None or kind[1].decode() not in KINDS:
            past.last = max(past.last, id_of(line), key=order)
        elif (event := event_of(line)) is not None:
            past.last = max(past.last, event.id, key=order)
            past.newest[series_of(event)] = event.id
            yield event


def _refine(path: Path, past: Series, begin: float, end: float) -> None:
    """Put the stage events of the last minutes, as they were sent, in place of those that were
    kept."""
    columns = Columns(past.wanted)
    for event in detail_of(path):
        if event.kind == "stage" and begin <= event.time <= end:
            columns.add(event)
            past.newest[series_of(event)] = event.id
    for name, points in columns.series():
        before = past.pieces.pop(name, [])
        for piece in before:
            past.extend(name, piece.within(begin, float(points.times[0]) - SAME_SECONDS))
        past.extend(name, points)


def _of_parts(catalog: Catalog, past: Series, begin: float, end: float) -> None:
    facts = catalog.update()
    every = past.every
    past.last = max(
        (known.last_id for known in facts.values() if known.last_id), key=order, default="0"
    )
    parts = {
        part: known for part, known in facts.items() if known.ends >= begin and known.begins <= end
    }
    inside = {part for part, known in parts.items() if begin <= known.begins and known.ends <= end}
    rows = catalog.database.execute("SELECT number, part, lengths FROM parts")
    lengths = {
        (number, part): json.loads(text) for number, part, text in rows if (number, part) in parts
    }
    names = _names(catalog, past.wanted)
    if every == 0:  # what would be refused is not read
        refuse_many(
            sum(lengths[part].get(series, {}).get("0", 0) for series in names for part in inside),
            past.most,
        )
    for series, numbers in names.items():
        kind = series.partition("/")[0]
        plan = _plan(series, lengths, inside, every)
        for part, points in _pieces(catalog, series, numbers, plan):
            chosen = points if part in inside else points.within(begin, end)
            past.extend(series, chosen.reduced(kind, every) if plan[part] == 0 else chosen)


def _names(catalog: Catalog, wanted: Wanted | None) -> dict[str, list[str]]:
    """Return the numbers that are wanted, by series."""
    names = dict[str, list[str]]()
    for series, name in catalog.database.execute("SELECT series, name FROM names"):
        if wanted is None or wanted(series.partition("/")[0], series, name):
            names.setdefault(series, []).append(name)
    return names


def _plan(
    series: str,
    lengths: Mapping[Part, Mapping[str, Mapping[str, int]]],
    inside: Collection[Part],
    every: float,
) -> dict[Part, int]:
    """Return the level that is read of each part that has the series: at an end of the time its
    events themselves."""
    serving = levels_for(every)
    plan = dict[Part, int]()
    for part, of_part in lengths.items():
        if known := of_part.get(series):
            levels = serving if part in inside else [0]
            plan[part] = next(level for level in levels if str(level) in known)
    return plan


def _pieces(
    catalog: Catalog, series: str, names: list[str], plan: Mapping[Part, int]
) -> Iterator[tuple[Part, Points]]:
    """Yield the points of each part of ``plan``, in order."""
    blobs = dict[Part, dict[str, bytes]]()
    for level in sorted(set(plan.values())):
        numbers = [number for (number, _), part_level in plan.items() if part_level == level]
        for name in ["", *names]:
            rows = catalog.database.execute(
                _DATA, (series, name, level, min(numbers), max(numbers))
            )
            for number, part, data in rows:
                if plan.get((number, part)) == level:
                    blobs.setdefault((number, part), {})[name] = data
    for part in sorted(blobs):
        columns = blobs[part]
        times, _ = unpacked(columns.pop(""), counted=False)
        both = {name: unpacked(data) for name, data in columns.items()}
        values = {name: column for name, (column, _) in both.items()}
        yield part, Points(times, values, {name: counts for name, (_, counts) in both.items()})
