"""Trace of a run for Perfetto (ui.perfetto.dev) and chrome://tracing, in Chrome's trace event
format (JSON).

    span   ──▶ X, a slice: one process for each worker, one track for each name of a span
    stage  ──▶ C, counters: queue depth and what is in flight          step ──▶ C: staleness, reward
    state, worker ──▶ i, instants                     process_name, thread_name and their order ──▶ M, when first seen

Slices of one track must be nested or disjoint (Perfetto hides others). A worker may hold several
claims at once, so each name of a span has as many tracks as it needs: a slice goes to the first
free one.
"""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

from pipeline.data.events import Event

# of processes, from the top
ORDER = ("run", "gate", "rollout", "reward", "reference", "critic", "advantage", "update")
RUN = "run"
SECOND = 1_000_000  # the format counts microseconds
# after the end of a trace, in which spans that began before it are still reported
REPORT_SECONDS = 5.0

Slice = dict[str, Any]


class Trace:
    """A converter of a run's events into trace events.

    Slices that overlap ``begin`` to ``end`` (Unix seconds) are kept.
    """

    def __init__(self, begin: float = 0.0, end: float = float("inf")) -> None:
        self.begin = begin
        self.end = end
        self._processes: dict[str, int] = {}
        self._tracks: dict[tuple[int, str, int], int] = {}
        # By the name of a span: the end of the last slice of each track, in µs.
        self._free: dict[tuple[int, str], list[int]] = {}

    def events(self, event: Event) -> Iterator[Slice]:
        """Yield trace events for ``event``, with the names of processes and tracks that it is the
        first to use."""
        data = event.data
        if event.kind == "span":
            for span in data["spans"]:
                if span["start"] + span["seconds"] >= self.begin and span["start"] <= self.end:
                    yield from self._slice(data["worker"], span)
        elif not self.begin <= event.time <= self.end:
            return
        elif event.kind == "stage":
            yield from self._counter(
                data["worker"], event.time, "queue depth", {"waiting": data["queue_depth"]}
            )
            yield from self._counter(
                data["worker"], event.time, "in flight", {"rows": data["in_flight"]}
            )
        elif event.kind == "step":
            staleness = {name: data[f"staleness_{name}"] for name in ("mean", "max")}
            yield from self._counter(RUN, event.time, "staleness", staleness)
            yield from self._counter(RUN, event.time, "reward", {"mean": data["reward_mean"]})
        elif event.kind == "state":
            yield from self._instant(RUN, event.time, data["state"], data)
        elif event.kind == "worker":
            yield from self._instant(data["worker"], event.time, data["change"], data)

    def _slice(self, worker: str, span: dict[str, Any]) -> Iterator[Slice]:
        pid = yield from self._process(worker)
        start = round(span["start"] * SECOND)
        duration = round(span["seconds"] * SECOND)
        lanes = self._free.setdefault((pid, span["name"]), [])
        lane = next((at for at, until in enumerate(lanes) if until <= start), len(lanes))
        lanes[lane : lane + 1] = [start + duration]
        tid = yield from self._track(pid, span["name"], lane)
        args = {name: value for name, value in span.items() if name in ("rows", "version")}
        times = {"ts": start, "dur": duration}
        yield {
            "ph": "X",
            "name": span["name"],
            "cat": "stage",
            "pid": pid,
            "tid": tid,
            **times,
            "args": args,
        }

    def _counter(
        self, worker: str, time: float, name: str, values: dict[str, Any]
    ) -> Iterator[Slice]:
        pid = yield from self._process(worker)
        finite = {
            key: value
            for key, value in values.items()
            if value is not None and math.isfinite(value)
        }
        if finite:
            yield {
                "ph": "C",
                "name": name,
                "pid": pid,
                "tid": 0,
                "ts": round(time * SECOND),
                "args": finite,
            }

    def _instant(
        self, worker: str, time: float, name: str, data: Mapping[str, Any]
    ) -> Iterator[Slice]:
        pid = yield from self._process(worker)
        args = {"reason": data["reason"]} if data.get("reason") else {}
        position = {"pid": pid, "tid": 0, "ts": round(time * SECOND)}
        yield {"ph": "i", "name": name, "cat": "run", **position, "s": "p", "args": args}

    def _process(self, worker: str) -> Any:
        """Return the number of a worker's process; yield its name the first time."""
        pid = self._processes.get(worker)
        if pid is None:
            pid = self._processes[worker] = len(self._processes) + 1
            yield _named("process_name", pid, 0, name=worker)
            kind = worker.rpartition("-")[0] or worker
            place = ORDER.index(kind) if kind in ORDER else len(ORDER)
            yield _named("process_sort_index", pid, 0, sort_index=place * 1000 + pid)
        return pid

    def _track(self, pid: int, name: str, lane: int) -> Any:
        tid = self._tracks.get((pid, name, lane))
        if tid is None:
            tid = self._tracks[pid, name, lane] = len(self._tracks) + 1
            yield _named(
                "thread_name", pid, tid, name=name if lane == 0 else f"{name} ({lane + 1})"
            )
            yield _named("thread_sort_index", pid, tid, sort_index=tid)
        return tid


def _named(what: str, pid: int, tid: int, **args: Any) -> Slice:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}


async def trace_json(pages: AsyncIterator[Sequence[Event]], trace: Trace) -> AsyncIterator[bytes]:
    """Yield the trace as pieces of one JSON document."""
    yield b'{"displayTimeUnit":"ms","traceEvents":['
    separator = b""
    async for page in pages:
        lines = [
            json.dumps(trace_event, separators=(",", ":"), allow_nan=False)
            for event in page
            for trace_event in trace.events(event)
        ]
        if lines:
            yield separator + ",\n".join(lines).encode()
            separator = b",\n"
    yield b"]}"
