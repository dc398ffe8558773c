"""What a run of weeks takes: of memory, of files, to go on from them, to ask them and to watch it,
by steps done.

    python -m benchmarks.robustness.endurance [--steps 1000000] [--run-steps 3000] [--out FOLDER] [--json FILE]

First a real run of mock engines that do not sleep, of ``--run-steps`` steps (0: none): what grows
in it (`benchmarks/robustness/growth.py`). Then events of ``--steps`` steps, as a recipe with four rollout
workers sends them (each step with 30 numbers and its swaps, the ledger, an evaluation each 100
steps, a checkpoint each 50), go through the file that `asyncdock run` and a service write, and into
the view of a terminal. At 1 %, 10 % and all of these steps:

    bytes     on the disk, for each step; and of lines, before they are compressed
    resume    seconds until a file is open, rewound to the last checkpoint, and the newest checkpoint is known
    history   seconds and memory of one question in a process of its own: all of a number's past; all numbers of a day
    view      bytes that its state holds, and seconds of a redraw
    memory    of the process that writes the file and has the view, before it answers the questions of this mark
    report    seconds to make it from the files when the run ends
    track     seconds a step of `asyncdock track` into TensorBoard's files, from the beginning and at the end, and into none

Seconds are of the processor: other work on the machine hardly counts. By the clock: an hour of six
workers that report each half second, and make no step.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import io
import itertools
import json
import math
import os
import random
import resource
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from rich.console import Console

from api.telemetry.progress import Progress
from api.telemetry.series import Wanted, width
from api.telemetry.trackers import (
    Make,
    Point,
    TensorBoard,
    Tracker,
    TrackError,
    events_of_folder,
    track,
)
from api.terminal.live import LiveView
from api.terminal.report import write_report
from benchmarks import harness
from benchmarks.robustness.growth import grown, growth_table, memory_of
from orchestration.history.detail import files_of
from orchestration.history.events_file import METRICS, MetricsFile, newest_checkpoint
from orchestration.history.segments import closed
from orchestration.recipe.loading.load import load_recipe
from pipeline.data.events import Event

BEGIN = 1_700_000_000.0
# steps between two
CHECKPOINT = 50
EVALUATION = 100
HALF = 0.5  # seconds between two reports of a worker
# that a report is made with
RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "mock.toml"
READ = 5_000  # events that are tracked, at each end
REDRAWS = 20
CODE = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)  # no part of a state


def event(time: float, kind: str, data: dict[str, Any]) -> Event:
    return Event(f"{int(1000 * time)}-0", time, kind, data)


def step_events(step: int, at: float, rollouts: int, draw: random.Random) -> Iterator[Event]:
    """The events of the step after ``step`` others, which ends at the Unix time ``at``."""
    numbers = {f"metric_{number}": draw.random() for number in range(18)}
    counts = {f"tokens_{name}": 20_000 * step for name in ("generated", "trained", "filtered")}
    means = {
        "loss": draw.gauss(0, 1),
        "reward_mean": draw.random(),
        "reward_std": draw.random(),
        "seconds": draw.random(),
    }
    stale = {
        "staleness_mean": draw.random(),
        "staleness_p95": 1.0,
        "staleness_max": 1.0,
        "train_seconds": draw.random(),
    }
    groups = list(range(8 * step, 8 * step + 8))
    yield event(
        at,
        "step",
        numbers
        | {"step": step + 1, "version": step + 1, "rows": 64, "groups": groups}
        | counts
        | means
        | stale,
    )
    swap = {
        "bytes": 1 << 28,
        "exposed_seconds": draw.random(),
        "hidden_seconds": draw.random(),
        "gap_max": draw.random(),
    }
    for number in range(rollouts):
        at_worker = at + (number + 1) / 1000
        yield event(at_worker, "sync", {"worker": f"rollout-{number}", "version": step + 1, **swap})
    rows = {
        "generated": 64 * step,
        "trained": 64 * step,
        "filtered": 0,
        "remade": 0,
        "in_flight": 0,
    }
    yield event(
        at + 0.1, "ledger", rows | {"redelivered": 0, **{f"{name}_tokens": 1 for name in rows}}
    )
    if step % EVALUATION == 0:
        samples = [{"prompt": "What is 2 + 3?", "response": "5", "reward": 1.0}] * 4
        score = {"reward_mean": draw.random(), "count": 64, "samples": samples}
        yield event(at + 0.2, "evaluation", {"version": step + 1, "step": step + 1, **score})
    if (step + 1) % CHECKPOINT == 0:
        yield event(
            at + 0.3, "checkpoint", {"version": step + 1, "path": "/runs/long", "requested": False}
        )


def reports(at: float, workers: int) -> Iterator[Event]:
    """What each worker reports of its time."""
    for number in range(workers):
        worker = {"stage": "rollout", "worker": f"rollout-{number}"}
        wall = at - BEGIN
        spent = {
            name: wall * part
            for name, part in (("busy", 0.7), ("waiting_input", 0.1), ("waiting_room", 0.2))
        }
        counts = {
            "rows": int(wall),
            "tokens": int(100 * wall),
            "parked": 0,
            "queue_depth": 3,
            "in_flight": 12,
        }
        yield event(
            at + number / 1000, "stage", {**worker, **spent, "other": 0.0, "wall": wall, **counts}
        )
        spans = [{"name": "claim", "start": at, "seconds": 0.25, "rows": 8}] * 3
        yield event(at + number / 1000, "span", {**worker, "spans": spans, "left_out": 0})


def bytes_of(path: Path) -> int:
    """On the disk: of the open part, the closed ones and their catalog."""
    return path.stat().st_size + sum(
        file.stat().st_size for file in path.with_name("metrics").glob("*")
    )


def timed(work: Callable[[], object]) -> float:
    """Seconds of the processor that ``work`` takes."""
    began = time.process_time()
    work()
    return time.process_time() - began


def apart(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds and MiB that ``work`` takes in a process of its own, which has its libraries."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        seconds = timed(work)
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        os.write(write, json.dumps([seconds, (most - before) / 1024]).encode())
        os._exit(0)
    os.waitpid(child, 0)
    seconds, most = json.loads(os.read(read, 100))
    os.close(read)
    os.close(write)
    return seconds, most


def size_of(state: object) -> int:
    """Bytes of ``state`` and of all that it refers to, without code."""
    seen = set[int]()
    waiting = [state]
    size = 0
    while waiting:
        one = waiting.pop()
        if id(one) not in seen and not isinstance(one, CODE):
            seen.add(id(one))
            size += sys.getsizeof(one)
            waiting += gc.get_referents(one)
    return size


def redraw_seconds(progress: Progress) -> float:
    """Of one redraw of the picture in a terminal."""
    console = Console(file=io.StringIO(), force_terminal=True, width=120, height=40)
    view = LiveView(progress, console)
    return statistics.median(timed(lambda: console.print(view.render())) for _ in range(REDRAWS))


class Discarding(Tracker):
    """Takes points and stores none."""

    key = ""

    def __init__(self, folder: Path, name: str, recipe: Mapping[str, Any], key: str) -> None:
        pass

    def show(self, point: Point) -> None:
        pass

    def flush(self) -> None:
        pass

    def close(self, state: str) -> None:
        pass


def track_seconds(path: Path, after: str, tracker: Make = TensorBoard) -> float | None:
    """Of a step, into TensorBoard's files; None where TensorBoard is not installed."""
    steps = 0

    async def some(first: str) -> AsyncIterator[Event]:
        nonlocal steps
        count = itertools.count()
        async for event in events_of_folder(path.parent, first if first != "0" else after):
            steps += event.kind == "step"
            yield event
            if next(count) == READ:
                return

    def follow() -> None:
        with tempfile.TemporaryDirectory(prefix="endurance-") as into:
            asyncio.run(track(some, "long", Path(into), tracker, {}))

    try:
        seconds = timed(follow)
    except TrackError:
        return None
    return seconds / max(1, steps)


def questions(path: Path, end: float) -> dict[str, tuple[float, float]]:
    from orchestration.history.past import past_of

    def ask(names: list[str], begin: float) -> None:
        dict(past_of(path, begin, math.inf, width(end - begin), Wanted(names)).columns())

    return {
        "all of step.loss": apart(lambda: ask(["step.loss"], BEGIN)),
        "all of step": apart(lambda: ask(["step"], BEGIN)),
        "all of everything": apart(lambda: ask([], BEGIN)),
        "a day of step": apart(lambda: ask(["step"], max(BEGIN, end - 86_400))),
    }


def measure(path: Path, steps: int, end: float, step_seconds: float) -> dict[str, Any]:
    """Figures of the run in ``path``, which nobody writes now."""
    recipe = load_recipe(RECIPE)

    def resume() -> None:
        newest = newest_checkpoint(path)
        with MetricsFile(path) as file:
            file.rewind(newest)

    def report() -> None:
        write_report(path.parent, recipe, checkpoint=None)

    lines = sum(part.size for part in closed(path)) + path.stat().st_size
    last = max(BEGIN, end - READ * step_seconds)
    reporting = timed(report)
    return {
        "steps": steps,
        "parts": len(closed(path)),
        "disk_bytes_per_step": bytes_of(path) / steps,
        "line_bytes_per_step": lines / steps,
        "report_seconds": reporting,
        "report_seconds_per_step": reporting / steps,
        "track_first_seconds": track_seconds(path, "0"),
        "track_last_seconds": track_seconds(path, f"{int(1000 * last)}-0"),
        "track_own_seconds": track_seconds(path, "0", Discarding),
        "questions": {
            name: {"seconds": s, "MiB": m} for name, (s, m) in questions(path, end).items()
        },
        "resume_seconds": timed(resume),
    }


def by_clock(folder: Path, seconds: int = 3600) -> dict[str, float]:
    """Bytes of an hour in which six workers report and no step is made, from what ``seconds`` of it
    leave."""
    path = folder / METRICS
    with MetricsFile(path) as file:
        for tick in range(int(seconds / HALF)):
            for one in reports(BEGIN + tick * HALF, 6):
                file.event(one)
    detail = sum(one.stat().st_size for one in files_of(path))
    return {"bytes_per_hour": bytes_of(path) * 3600 / seconds, "detail_bytes": detail}


def sent(
    step: int, end: float, options: argparse.Namespace, draw: random.Random
) -> Iterator[Event]:
    """All events of step ``step``, which ends at the Unix time ``end``, and of the minute that it
    begins."""
    begin = end - options.step_seconds
    if int(end) // 60 != int(begin) // 60:
        yield from reports(end - options.step_seconds / 2, options.rollouts + 2)
    yield from step_events(step, end, options.rollouts, draw)


def long_run(path: Path, steps: int, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Write the steps, and show them; yields the figures at each mark."""
    marks = {steps // 100, steps // 10, steps} - {0}
    draw = random.Random(1)
    file = MetricsFile(path)
    progress = Progress("long", steps, bound=1)
    written = shown = 0.0
    for step in range(steps):
        end = BEGIN + (step + 1) * options.step_seconds
        events = list(sent(step, end, options, draw))
        began = time.thread_time()  # parts are compressed in another thread
        for one in events:
            file.event(one)
        between = time.thread_time()
        for one in events:
            progress.apply(one)
        written = written + between - began
        shown = shown + time.thread_time() - between
        if step + 1 in marks:
            file.close()
            yield {
                "memory_bytes": memory_of(os.getpid())[0],
                "write_seconds_per_step": written / (step + 1),
                "view_seconds_per_step": shown / (step + 1),
                "view_bytes": size_of(progress),
                "redraw_seconds": redraw_seconds(progress),
                **measure(path, step + 1, end, options.step_seconds),
            }
            file = MetricsFile(path)
    file.close()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument(
        "--run-steps", type=int, default=3000, help="of the real run of mock engines; 0: none"
    )
    parser.add_argument(
        "--step-seconds", type=float, default=2.4, help="of a step, by the events' clock"
    )
    parser.add_argument("--rollouts", type=int, default=4, help="rollout workers")
    parser.add_argument("--out", type=Path, help="an empty folder in which the files stay")
    options = parser.parse_args(arguments)
    figures: dict[str, Any] = {"marks": []}
    if options.run_steps:
        # the processes of the run are ended too
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with tempfile.TemporaryDirectory(prefix="adk-") as home:
            growth = grown(Path(home), options.run_steps)
        figures["run"] = growth.to_json()
        print(growth_table(growth), flush=True)
    with tempfile.TemporaryDirectory(prefix="endurance-") as home:
        folder = options.out or Path(home) / "run"
        for each in (folder, Path(home) / "clock", Path(home) / "libraries"):
            each.mkdir(parents=True, exist_ok=True)
        figures["by_clock"] = by_clock(Path(home) / "clock")
        # they are loaded, and no figure has that
        list(long_run(Path(home) / "libraries" / METRICS, 10, options))
        for mark in long_run(folder / METRICS, options.steps, options):
            figures["marks"].append(mark)
            print(f"{mark['steps']:,} steps are measured", flush=True)
    print(table(figures), flush=True)
    if options.json:
        options.json.write(figures)


def table(figures: dict[str, Any]) -> str:
    """A Markdown table with a column for each mark."""
    marks = figures["marks"]

    def row(name: str, show: Callable[[dict[str, Any]], str]) -> str:
        return f"| {name} | " + " | ".join(show(mark) for mark in marks) + " |"

    def seconds(name: str, key: str, digits: int = 3) -> str:
        return row(f"{name}, s", lambda mark: f"{mark[key]:.{digits}f}")

    def micros(name: str, key: str) -> str:
        return row(
            f"{name}, µs a step", lambda mark: "" if mark[key] is None else f"{1e6 * mark[key]:.0f}"
        )

    def question(name: str) -> str:
        asked = [mark["questions"][name] for mark in marks]
        return (
            f"| {name} | "
            + " | ".join(f"{one['seconds']:.3f} s, {one['MiB']:.0f} MiB" for one in asked)
            + " |"
        )

    return "\n".join(
        [
            row("events of so many steps", lambda mark: f"{mark['steps']:,}"),
            "|---" * (1 + len(marks)) + "|",
            row("closed parts", lambda mark: f"{mark['parts']}"),
            row("on the disk, B a step", lambda mark: f"{mark['disk_bytes_per_step']:.0f}"),
            row(
                "of it lines before they are compressed",
                lambda mark: f"{mark['line_bytes_per_step']:.0f}",
            ),
            micros("write", "write_seconds_per_step"),
            micros("track from the beginning", "track_first_seconds"),
            micros("track at the end", "track_last_seconds"),
            micros("of track, without TensorBoard", "track_own_seconds"),
            seconds("resume", "resume_seconds"),
            *(question(name) for name in marks[-1]["questions"]),
            micros("view", "view_seconds_per_step"),
            row("state of the view, kB", lambda mark: f"{mark['view_bytes'] / 1000:.0f}"),
            row("memory, MiB", lambda mark: f"{mark['memory_bytes'] / 2**20:.1f}"),
            row("redraw, ms", lambda mark: f"{1000 * mark['redraw_seconds']:.1f}"),
            seconds("report", "report_seconds", 1),
            micros("report", "report_seconds_per_step"),
            "",
            f"by the clock, an hour without a step: "
            f"{figures['by_clock']['bytes_per_hour'] / 1e6:.2f} MB kept",
        ]
    )


if __name__ == "__main__":
    main()
