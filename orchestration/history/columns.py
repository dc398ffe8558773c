"""Columns of numbers of a run's events, and points that stand for some seconds of them.

    events ──Columns.add──▶ raw points ──reduced(5 s)──▶ ──reduced(60 s)──▶ … ──reduced(every)──▶ what a chart shows

A point has of each number a value and a count: of a mean the value is the sum, so that points are
reduced again exactly. numpy is imported with this module, which a run loads when it closes its
first part.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from orchestration.history.lines import finite_numbers
from orchestration.history.reduction import how, series_of
from pipeline.data.events import Event

LEVELS = (5, 60, 600, 7200)  # seconds of the points that are kept, beside the events themselves (0)
APART = 8  # points of a width that no level divides are made of ones that are so many times shorter
Floats = NDArray[np.float64]
Counts = NDArray[np.uint32]
Wanted = Callable[[str, str, str], bool]  # of a kind, a series, and the name of a number


@dataclass(frozen=True)
class Points:
    """Points of one series, in order of ``times`` (Unix seconds): ``values`` [points] and
    ``counts`` [points] by number."""

    times: Floats
    values: Mapping[str, Floats]
    counts: Mapping[str, Counts]

    def __len__(self) -> int:
        return len(self.times)

    def within(self, begin: float, end: float) -> Points:
        """Return the points from ``begin`` to ``end``."""
        return self.taken((self.times >= begin) & (self.times <= end))

    def present(self) -> Points:
        """Return the points that have any number."""
        if not self.counts:
            return self.taken(np.zeros(len(self), dtype=bool))
        return self.taken(np.logical_or.reduce([counted > 0 for counted in self.counts.values()]))

    def taken(self, chosen: NDArray[np.bool_]) -> Points:
        """Return the points that are ``chosen`` [points]."""
        if chosen.all():
            return self
        values = {name: column[chosen] for name, column in self.values.items()}
        return Points(
            self.times[chosen],
            values,
            {name: column[chosen] for name, column in self.counts.items()},
        )

    def reduced(self, kind: str, every: float) -> Points:
        """Return one point for each ``every`` seconds, from their beginning on; 0: as they are.

        A late one is of the newest.
        """
        if every == 0 or not len(self):
            return self
        buckets = np.maximum.accumulate(np.floor(self.times / every) * every)
        starts = np.flatnonzero(np.diff(buckets, prepend=-math.inf))
        values = dict[str, Floats]()
        counts = dict[str, Counts]()
        for name, column in self.values.items():
            counted = self.counts[name]
            counts[name] = np.add.reduceat(counted, starts, dtype=np.uint32)
            values[name] = _joined(how(kind, name), column, counted, starts)
        return Points(buckets[starts], values, counts)

    def numbers(self, kind: str) -> Iterator[tuple[str, list[float | None]]]:
        """Yield the columns as a chart has them; None where a point has no such number."""
        for name, column in self.values.items():
            counted = self.counts[name]
            shown = column / np.maximum(counted, 1) if how(kind, name) == "mean" else column
            if counted.any():
                pairs = zip(shown.tolist(), counted.tolist(), strict=True)
                yield name, [value if count else None for value, count in pairs]


def _joined(way: str, column: Floats, counted: Counts, starts: NDArray[np.intp]) -> Floats:
    if way == "max":
        return np.maximum.reduceat(np.where(counted > 0, column, -math.inf), starts)
    if way == "last":
        places = np.where(counted > 0, np.arange(len(column)), -1)
        return column[np.maximum.reduceat(places, starts)]  # where none has it, the count says so
    return np.add.reduceat(np.where(counted > 0, column, 0.0), starts)


def concatenated(pieces: Sequence[Points]) -> Points:
    """Return the points of ``pieces``, one after the other; numbers that a piece lacks are absent
    there."""
    if len(pieces) == 1:
        return pieces[0]
    names = dict.fromkeys(name for piece in pieces for name in piece.values)
    values = dict[str, Floats]()
    counts = dict[str, Counts]()
    for name in names:
        columns = [piece.values.get(name, np.zeros(len(piece))) for piece in pieces]
        counted = [piece.counts.get(name, np.zeros(len(piece), np.uint32)) for piece in pieces]
        values[name], counts[name] = np.concatenate(columns), np.concatenate(counted)
    return Points(np.concatenate([piece.times for piece in pieces]), values, counts)


@dataclass
class _Table:
    times: list[float] = field(default_factory=list)
    numbers: dict[str, list[float]] = field(default_factory=dict)


class Columns:
    """Collector of the numbers of events, by series; those that ``wanted`` says, by kind, series
    and name (None: all)."""

    def __init__(self, wanted: Wanted | None = None) -> None:
        self._wanted = wanted
        self._tables: dict[str, _Table] = {}
        self._answers: dict[str, dict[str, bool]] = {}  # of `wanted`, by series and number

    def add(self, event: Event) -> None:
        if not (name := series_of(event)):
            return
        numbers = finite_numbers(event.data)
        if self._wanted is not None:
            numbers = self._chosen(event.kind, name, numbers)
        if not numbers:
            return
        table = self._tables.setdefault(name, _Table())
        rows = len(table.times)
        table.times.append(event.time)
        for number, value in numbers.items():
            column = table.numbers.get(number)
            if column is None:
                column = table.numbers[number] = []
            if len(column) < rows:
                column.extend([math.nan] * (rows - len(column)))
            column.append(value)

    def _chosen(self, kind: str, series: str, numbers: Mapping[str, float]) -> dict[str, float]:
        """Return those of ``numbers`` that are wanted. Each name is asked about once."""
        assert self._wanted is not None
        answers = self._answers.setdefault(series, {})
        for number in numbers.keys() - answers.keys():
            answers[number] = self._wanted(kind, series, number)
        return {number: value for number, value in numbers.items() if answers[number]}

    def series(self) -> Iterator[tuple[str, Points]]:
        """Yield the events of each series as points."""
        for name, table in self._tables.items():
            rows = len(table.times)
            values = {
                number: np.array(column + [math.nan] * (rows - len(column)))
                for number, column in table.numbers.items()
            }
            counts = {
                number: (~np.isnan(column)).astype(np.uint32) for number, column in values.items()
            }
            yield name, Points(np.array(table.times), values, counts)


def levels_of(name: str, points: Points) -> Iterator[tuple[int, Points]]:
    """Yield ``points`` and those of each level, but of levels that have hardly fewer points than a
    finer one."""
    yield 0, points
    kind = name.partition("/")[0]
    least = len(points)
    for every in LEVELS:
        points = points.reduced(kind, every)
        if 2 * len(points) <= least:
            least = len(points)
            yield every, points


def levels_for(every: float) -> list[int]:
    """Return the levels of which points of ``every`` seconds are made, the best one first.

    >>> levels_for(120), levels_for(607), levels_for(2), levels_for(86400)
    ([60, 5, 0], [60, 5, 0], [0], [7200, 600, 60, 5, 0])
    """
    exact = [level for level in LEVELS if every >= level and every % level == 0]
    return [*reversed(exact or [level for level in LEVELS if every >= APART * level]), 0]


def packed(points: Points) -> Iterator[tuple[str, bytes]]:
    """Yield the columns of ``points`` as bytes; that of the times has the name ""."""
    yield "", zlib.compress(points.times.tobytes(), 1)
    for name, column in points.values.items():
        yield name, zlib.compress(column.tobytes() + points.counts[name].tobytes(), 1)


def unpacked(data: bytes, counted: bool = True) -> tuple[Floats, Counts]:
    """Return a column as :func:`packed` makes it, and its counts; ``counted``: it has counts."""
    content = zlib.decompress(data)
    size = len(content) // (12 if counted else 8)
    return np.frombuffer(content, np.float64, size), np.frombuffer(
        content, np.uint32, -1 if counted else 0, 8 * size
    )
