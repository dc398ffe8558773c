"""Series for charts, made from a run's past events: columns of numbers, with several events to a point.

    event ──▶ its series (`step`, `evaluation`, `ledger`, `stage/WORKER`, `sync/WORKER`) ──▶ its time's bucket ──▶ one point

A point reduces each number of its events: a growing count to the last one, amounts of single events to their sum, maxima to
the largest, everything else to the mean.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

from api.schemas.events import numbers_of
from orchestration.events_file import finite_numbers
from pipeline.events import Event

KINDS = ("step", "evaluation", "ledger", "stage", "sync")
OF_WORKERS = ("stage", "sync")  # one series for each worker
POINTS = 1000  # of a series, about, when the request gives no `every`
WIDTHS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 43200, 86400)  # seconds
RAW_SECONDS = 300.0  # up to this range each event is a point: two a second for each worker

# Numbers of which a point keeps the last one, by kind.
LAST: dict[str, frozenset[str] | None] = {
    "step": frozenset({"step", "version", "tokens_generated", "tokens_trained", "tokens_filtered"}),
    "evaluation": frozenset({"step", "version", "count", "failed", "absent"}),
    "ledger": None,  # all of it
    "stage": frozenset({"busy", "waiting_input", "waiting_room", "other", "wall", "rows", "tokens", "parked"}),
    "sync": frozenset({"version"}),
}
SUM = {
    "step": frozenset({"rows", "reward_failed", "reward_absent"}),
    "sync": frozenset({"bytes", "publish_seconds", "exposed_seconds", "hidden_seconds"}),
}

# Names that a request may give; the algorithm adds numbers of its own to a step.
SERIES = re.compile(
    r"step(\.[A-Za-z0-9_]{1,60})?"
    + "".join(rf"|{kind}(\.({'|'.join(numbers_of(kind))}))?" for kind in KINDS if kind != "step")
    + rf"|({'|'.join(OF_WORKERS)})/[A-Za-z0-9_.-]{{1,150}}"
)

Point = dict[str, float]


class TooMany(ValueError):
    """An answer would hold more points than allowed."""


def width(seconds: float) -> float:
    """Seconds for each point in a range of ``seconds``; 0: each event is a point.

    >>> [width(seconds) for seconds in (60, 3_600, 86_400, 30 * 86_400)]
    [0.0, 5.0, 120.0, 3600.0]
    """
    if seconds <= RAW_SECONDS:
        return 0.0
    return float(next((w for w in WIDTHS if w * POINTS >= seconds), WIDTHS[-1]))


def series_of(event: Event) -> str:
    """Name of the series that an event belongs to; "" for none."""
    if event.kind not in KINDS:
        return ""
    return f"{event.kind}/{event.data['worker']}" if event.kind in OF_WORKERS else event.kind


class Wanted:
    """A filter for series and their numbers: kinds, ``kind/worker``, ``kind.number``; without names it takes everything.

    >>> wanted = Wanted(["step.loss", "stage/reward-0"])
    >>> wanted("step", "step", "loss"), wanted("step", "step", "reward_mean"), wanted("stage", "stage/reward-0", "rows")
    (True, False, True)
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self.names = frozenset(names)
        self._found: set[str] = set()

    def __call__(self, kind: str, series: str, number: str) -> bool:
        if not self.names:
            return True
        found = self.names & {kind, series, f"{kind}.{number}", f"{series}.{number}"}
        self._found |= found
        return bool(found)

    @property
    def missing(self) -> frozenset[str]:
        """Names that have matched nothing so far."""
        return self.names - self._found

    @property
    def kinds(self) -> frozenset[str]:
        """Kinds of events that some name matches."""
        return frozenset(name.partition(".")[0].partition("/")[0] for name in self.names) or frozenset(KINDS)


def names_like(name: str, workers: Iterable[str], step: Mapping[str, object]) -> list[str]:
    """The names of the kind of ``name`` in a run with ``workers`` whose newest step is the event ``step``; empty when there
    are none yet, and any name may turn out to be one.

    >>> names_like("step.los", [], {"loss": 0.5, "groups": [1]})
    ['step', 'step.loss']
    """
    kind = name.partition(".")[0].partition("/")[0]
    numbers = [key for key, value in step.items() if isinstance(value, int | float)] if kind == "step" else []
    if kind == "step":
        return [kind, *(f"{kind}.{number}" for number in numbers)] if numbers else []
    named = [f"{kind}/{worker}" for worker in sorted(workers)]
    of_all = [kind, *(f"{kind}.{number}" for number in numbers_of(kind))]
    return [*named, *of_all, *(f"{one}.{number}" for one in named for number in numbers_of(kind))] if named else []


class Series:
    """Collects events, ``every`` seconds to a point (0: each its own). Raises TooMany past ``most`` points."""

    def __init__(self, every: float, wanted: Wanted | None = None, most: int = 50_000) -> None:
        self.every, self.wanted, self.most = every, wanted or Wanted(), most
        self._points: dict[str, list[_Point]] = {}
        self._count = 0

    def add(self, event: Event) -> None:
        name = series_of(event)
        numbers = {
            number: value
            for number, value in finite_numbers(event.data).items()
            if self.wanted(event.kind, name, number)
        }
        if not name or not numbers:
            return
        time = event.time if self.every == 0 else math.floor(event.time / self.every) * self.every
        points = self._points.setdefault(name, [])
        # The clocks of workers differ a little: a late event adds to the newest point.
        if not points or (time > points[-1].time if self.every else True):
            points.append(_Point(time, event.kind))
            self._count += 1
            if self._count > self.most:
                raise TooMany(
                    f"more than {self.most} points; ask for a shorter time, for some of the names, or with a larger every"
                )
        points[-1].add(numbers)

    def columns(self) -> dict[str, dict[str, list[float | None]]]:
        """Columns by series and number, as long as the series' ``time``; None where a point has no such number."""
        out: dict[str, dict[str, list[float | None]]] = {}
        for name, points in sorted(self._points.items()):
            rows = [point.numbers() for point in points]
            names = dict.fromkeys(number for numbers in rows for number in numbers)
            out[name] = {"time": [point.time for point in points]}
            out[name] |= {number: [numbers.get(number) for numbers in rows] for number in names}
        return out


class _Point:
    """The events of one bucket: of each number the last, the sum, the largest and the count."""

    def __init__(self, time: float, kind: str) -> None:
        self.time, self._kind = time, kind
        self._numbers: dict[str, tuple[float, float, float, int]] = {}

    def add(self, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            _, total, largest, count = self._numbers.get(name, (0.0, 0.0, value, 0))
            self._numbers[name] = value, total + value, max(value, largest), count + 1

    def numbers(self) -> Point:
        return {name: self._reduced(name) for name in self._numbers}

    def _reduced(self, name: str) -> float:
        last, total, largest, count = self._numbers[name]
        lasting = LAST[self._kind]
        if lasting is None or name in lasting:
            return last
        if name in SUM.get(self._kind, ()):
            return total
        if name.endswith("_max") or name.startswith("max_"):
            return largest
        return total / count
