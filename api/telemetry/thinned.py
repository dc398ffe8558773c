"""Points of a curve of any length in bounded memory: old ones are merged with their neighbours.

    add ──▶ first ones │ p  p  p  p  p  p … │ last ones
                        └──┬──┘               more than MOST points: neighbours are merged
            first ones │   P     P     P  … │ last ones

Every merged point covers ``width`` keys, and ``width`` doubles when there are too many of them.
The first and the last points stay single. A curve of up to MOST points is kept as it is.
"""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_left
from collections.abc import Iterable
from typing import Generic, Protocol, Self, TypeVar

MOST = 1024  # points of a curve
# points at its ends that stay single
FIRST = 8
LAST = 128
# A hundred points can be added until they are thinned again.
MOST_MERGED = (MOST - FIRST - LAST) * 7 // 8


class Point(Protocol):
    """The summary of the keys from ``first`` to ``last``."""

    @property
    def first(self) -> int: ...

    @property
    def last(self) -> int: ...

    def plus(self, later: Self) -> Self:
        """Return this point and the ``later`` one as one."""

    def before(self, key: int) -> Self:
        """Return what stays when ``key``, past ``first``, and all keys after it are removed."""


P = TypeVar("P", bound=Point)


class Thinned(Generic[P]):
    """The points of a curve in the order of their keys. ``width``: keys that a merged point
    covers."""

    def __init__(self) -> None:
        self.points: list[P] = []
        self.width = 1

    def add(self, point: P) -> None:
        """Add a point of one key. It replaces the one that has this key; a key that a merged point
        covers is counted there already."""
        at = bisect_left(self.points, point.first, key=lambda other: other.last)
        if at == len(self.points) or point.first < self.points[at].first:
            self.points.insert(at, point)
        elif self.points[at].first == self.points[at].last:
            self.points[at] = point
        if len(self.points) > MOST:
            self._thin()

    def remove_from(self, key: int) -> None:
        """Remove ``key`` and all keys after it. Of a merged point that covers it, a part stays."""
        while self.points and self.points[-1].first >= key:
            self.points.pop()
        if self.points and self.points[-1].last >= key:
            self.points[-1] = self.points[-1].before(key)

    def even(self) -> list[P]:
        """Return the points, each but the last of ``width`` keys."""
        return self.points if self.width == 1 else _merged(self.points, self.width)

    def _thin(self) -> None:
        single = self.points[:FIRST]
        middle = self.points[FIRST:-LAST]
        last = self.points[-LAST:]
        merged = _merged(middle, self.width)
        while len(merged) > MOST_MERGED:
            self.width *= 2
            merged = _merged(merged, self.width)
        self.points = [*single, *merged, *last]


def _merged(points: Iterable[P], width: int) -> list[P]:
    groups = itertools.groupby(points, key=lambda point: point.first // width)
    return [
        functools.reduce(lambda earlier, later: earlier.plus(later), group) for _, group in groups
    ]
