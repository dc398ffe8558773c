"""Names of series for charts, and the seconds that one of their points covers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from api.schemas.events import numbers_of
from orchestration.history.lines import finite_numbers
from orchestration.history.reduction import KINDS, OF_WORKERS

POINTS = 1000  # of a series, about, when the request gives no `every`
WIDTHS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 43200, 86400)  # seconds
RAW_SECONDS = 300.0  # up to this range each event is a point: two a second for each worker

# Names that a request may give; the algorithm adds numbers of its own to a step, and reward
# functions have names of their own.
SERIES = re.compile(
    r"step(\.[A-Za-z0-9_]{1,60}|\.rewards/[\w.:/-]{1,200})?"
    + "".join(rf"|{kind}(\.({'|'.join(numbers_of(kind))}))?" for kind in KINDS if kind != "step")
    + rf"|({'|'.join(OF_WORKERS)})/[A-Za-z0-9_.-]{{1,150}}"
)


def width(seconds: float) -> float:
    """Return the seconds of each point in a range of ``seconds``; 0: each event is a point.

    >>> [width(seconds) for seconds in (60, 3_600, 86_400, 30 * 86_400)]
    [0.0, 5.0, 120.0, 3600.0]
    """
    if seconds <= RAW_SECONDS:
        return 0.0
    return float(next((step for step in WIDTHS if step * POINTS >= seconds), WIDTHS[-1]))


class Wanted:
    """A filter for series and their numbers: kinds, ``kind/worker``, ``kind.number``; without names
    it takes everything.

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
        matches = self.names & {kind, series, f"{kind}.{number}", f"{series}.{number}"}
        self._found |= matches
        return bool(matches)

    @property
    def missing(self) -> frozenset[str]:
        """Names that have matched nothing so far."""
        return self.names - self._found

    @property
    def kinds(self) -> frozenset[str]:
        """Kinds of events that some name matches."""
        return frozenset(
            name.partition(".")[0].partition("/")[0] for name in self.names
        ) or frozenset(KINDS)


def names_like(name: str, workers: Iterable[str], step: Mapping[str, object]) -> list[str]:
    """Return the names of the kind of ``name`` in a run with ``workers`` whose newest step is the
    event ``step``; empty when there are none yet, and any name may turn out to be one.

    >>> names_like("step.los", [], {"loss": 0.5, "groups": [1]})
    ['step', 'step.loss']
    """
    kind = name.partition(".")[0].partition("/")[0]
    numbers = list(finite_numbers(step)) if kind == "step" else []
    if kind == "step":
        return [kind, *(f"{kind}.{number}" for number in numbers)] if numbers else []
    by_worker = [f"{kind}/{worker}" for worker in sorted(workers)]
    over_workers = [kind, *(f"{kind}.{number}" for number in numbers_of(kind))]
    return (
        [
            *by_worker,
            *over_workers,
            *(f"{series}.{number}" for series in by_worker for number in numbers_of(kind)),
        ]
        if by_worker
        else []
    )
