"""Spans: named intervals of a worker's time, from which a timeline of the run is drawn.

work ──▶ add (name, start, seconds) ──▶ the longest since the last report ──twice a second──▶ a `span` event
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.data.events import Span

# spans of one report: a stage that works row by row makes thousands in half a second, too small to
# see
MOST = 32


class Spans:
    """The spans of one worker since the last report: the ``most`` longest of them, and how many
    were left out."""

    def __init__(self, most: int = MOST) -> None:
        self.most = most
        self.left_out = 0
        self._number = itertools.count()  # breaks ties between equal lengths
        # a heap, the shortest first
        self._longest: list[tuple[float, int, str, float, int, int | None]] = []

    def add(
        self, name: str, start: float, seconds: float, *, rows: int = 0, version: int | None = None
    ) -> None:
        """Add a span that began at ``start`` (Unix seconds), with its number of rows and policy
        version."""
        span = (seconds, next(self._number), name, start, rows, version)
        if len(self._longest) < self.most:
            heapq.heappush(self._longest, span)
        else:
            heapq.heappushpop(self._longest, span)
            self.left_out += 1

    @contextmanager
    def during(self, name: str, *, rows: int = 0, version: int | None = None) -> Iterator[None]:
        """Add a span for the code inside, also when it raises."""
        start = time.time()
        began = time.monotonic()
        try:
            yield
        finally:
            self.add(name, start, time.monotonic() - began, rows=rows, version=version)

    def take(self) -> tuple[list[Span], int]:
        """Remove and return the spans, ordered by start, and how many were left out."""
        spans = sorted(self._longest, key=lambda span: span[3])
        left_out = self.left_out
        self._longest = []
        self.left_out = 0
        return [
            Span(
                name=name,
                start=round(start, 6),
                seconds=round(seconds, 6),
                rows=rows,
                version=version,
            )
            for seconds, _, name, start, rows, version in spans
        ], left_out
