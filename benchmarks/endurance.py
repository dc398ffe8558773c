"""What a run of weeks leaves in its files, and what it takes to go on from them and to ask them, by steps done.

    python -m benchmarks.endurance [--steps 1000000] [--step-seconds 2.4] [--rollouts 4] [--out FOLDER] [--json FILE]

Events of a run as a recipe with four rollout workers sends them (each step with 30 numbers and its swaps, the ledger, an
evaluation each 100 steps, a checkpoint each 50) go through the file that `asyncdock run` and a service write. Nothing is
generated or trained. At 1 %, 10 % and all of the steps:

    bytes     on the disk, for each step; and of lines, before they are compressed
    resume    seconds until a file is open, rewound to the last checkpoint, and the newest checkpoint is known
    history   seconds and memory of one question in a process of its own: all of a number's past; all numbers of a day
    track     seconds to read 10,000 events from the beginning, and as many from the end

By the clock: an hour of six workers that report each half second, and make no step.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from api.telemetry.series import Wanted, width
from orchestration.events_file import METRICS, MetricsFile, newest_checkpoint
from orchestration.history.detail import files_of
from orchestration.history.segments import EventLog, closed
from pipeline.events import Event

BEGIN = 1_700_000_000.0
CHECKPOINT, EVALUATION = 50, 100  # steps between two
HALF = 0.5  # seconds between two reports of a worker
READ = 10_000  # events, at each end


def event(time: float, kind: str, data: dict[str, Any]) -> Event:
    return Event(f"{int(1000 * time)}-0", time, kind, data)


def step_events(step: int, at: float, rollouts: int, draw: random.Random) -> Iterator[Event]:
    """The events of step ``step``, which ends at the Unix time ``at``."""
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
        at, "step", numbers | {"step": step, "version": step + 1, "rows": 64, "groups": groups} | counts | means | stale
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
    rows = {"generated": 64 * step, "trained": 64 * step, "filtered": 0, "remade": 0, "in_flight": 0}
    yield event(at + 0.1, "ledger", rows | {"redelivered": 0, **{f"{name}_tokens": 1 for name in rows}})
    if step % EVALUATION == 0:
        samples = [{"prompt": "What is 2 + 3?", "response": "5", "reward": 1.0}] * 4
        score = {"reward_mean": draw.random(), "count": 64, "samples": samples}
        yield event(at + 0.2, "evaluation", {"version": step + 1, "step": step + 1, **score})
    if (step + 1) % CHECKPOINT == 0:
        yield event(at + 0.3, "checkpoint", {"version": step + 1, "path": "/runs/long", "requested": False})


def reports(at: float, workers: int) -> Iterator[Event]:
    """What each worker reports of its time."""
    for number in range(workers):
        worker, wall = {"stage": "rollout", "worker": f"rollout-{number}"}, at - BEGIN
        spent = {name: wall * part for name, part in (("busy", 0.7), ("waiting_input", 0.1), ("waiting_room", 0.2))}
        counts = {"rows": int(wall), "tokens": int(100 * wall), "parked": 0, "queue_depth": 3, "in_flight": 12}
        yield event(at + number / 1000, "stage", {**worker, **spent, "other": 0.0, "wall": wall, **counts})
        spans = [{"name": "claim", "start": at, "seconds": 0.25, "rows": 8}] * 3
        yield event(at + number / 1000, "span", {**worker, "spans": spans, "left_out": 0})


def bytes_of(path: Path) -> int:
    """On the disk: of the open part, the closed ones and their catalog."""
    return path.stat().st_size + sum(file.stat().st_size for file in path.with_name("metrics").glob("*"))


def timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def apart(work: Callable[[], Any]) -> tuple[float, float]:
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


def questions(path: Path, end: float) -> dict[str, tuple[float, float]]:
    from orchestration.history.past import past_of

    def ask(names: list[str], begin: float) -> None:
        dict(past_of(path, begin, math.inf, width(end - begin), Wanted(names)).columns())

    ask(["step.loss"], BEGIN)  # libraries are loaded
    return {
        "all of step.loss": apart(lambda: ask(["step.loss"], BEGIN)),
        "all of step": apart(lambda: ask(["step"], BEGIN)),
        "all of everything": apart(lambda: ask([], BEGIN)),
        "a day of step": apart(lambda: ask(["step"], max(BEGIN, end - 86_400))),
    }


def measure(path: Path, steps: int, end: float, lines: int) -> dict[str, Any]:
    """Figures of the run in ``path``, which nobody writes now."""
    disk = bytes_of(path)

    def resume() -> None:
        newest = newest_checkpoint(path)
        with MetricsFile(path) as file:
            file.rewind(newest)

    def read(after: str) -> None:
        log, count = EventLog(path), 0
        while count < READ and (page := log.after(after, 500)):
            after, count = page[-1].id, count + len(page)

    return {
        "steps": steps,
        "parts": len(closed(path)),
        "disk_bytes_per_step": disk / steps,
        "line_bytes_per_step": lines / steps,
        "read_first_seconds": timed(lambda: read("0")),
        "read_last_seconds": timed(lambda: read(f"{int(1000 * (end - 4_000))}-0")),
        "questions": {name: {"seconds": s, "MiB": m} for name, (s, m) in questions(path, end).items()},
        "resume_seconds": timed(resume),
    }


def by_clock(folder: Path) -> dict[str, float]:
    """Bytes of an hour in which six workers report and no step is made."""
    path = folder / METRICS
    with MetricsFile(path) as file:
        for tick in range(int(3600 / HALF)):
            for one in reports(BEGIN + tick * HALF, 6):
                file.event(one)
    return {"bytes_per_hour": bytes_of(path), "detail_bytes": sum(one.stat().st_size for one in files_of(path))}


def long_run(path: Path, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Write the steps; yields the figures at each mark."""
    draw, marks = random.Random(1), {options.steps // 100, options.steps // 10, options.steps} - {0}
    file, lines, began, end = MetricsFile(path), 0, time.perf_counter(), BEGIN
    for step in range(options.steps):
        end = BEGIN + (step + 1) * options.step_seconds
        if int(end) // 60 != int(end - options.step_seconds) // 60:
            for one in reports(end - options.step_seconds / 2, options.rollouts + 2):
                file.event(one)
        for one in step_events(step, end, options.rollouts, draw):
            file.event(one)
        if step + 1 in marks:
            file.close()
            seconds = time.perf_counter() - began
            lines = sum(part.size for part in closed(path)) + path.stat().st_size
            yield {"write_seconds_per_step": seconds / (step + 1), **measure(path, step + 1, end, lines)}
            file, began = MetricsFile(path), time.perf_counter() - seconds
    file.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--step-seconds", type=float, default=2.4, help="of a step, by the events' clock")
    parser.add_argument("--rollouts", type=int, default=4, help="rollout workers")
    parser.add_argument("--out", type=Path, help="an empty folder in which the files stay")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="endurance-") as home:
        folder = options.out or Path(home) / "run"
        for each in (folder, Path(home) / "clock"):
            each.mkdir(parents=True, exist_ok=True)
        figures: dict[str, Any] = {"by_clock": by_clock(Path(home) / "clock"), "marks": []}
        print(f"by the clock: {figures['by_clock']['bytes_per_hour'] / 1e6:.2f} MB an hour", flush=True)
        for mark in long_run(folder / METRICS, options):
            figures["marks"].append(mark)
            print(table(mark), flush=True)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


def table(mark: dict[str, Any]) -> str:
    asked = [f"  {name}: {one['seconds']:.3f} s, {one['MiB']:.0f} MiB" for name, one in mark["questions"].items()]
    return "\n".join(
        [
            f"{mark['steps']:,} steps, {mark['parts']} closed parts, {1e6 * mark['write_seconds_per_step']:.0f} µs a step",
            f"  {mark['disk_bytes_per_step']:.0f} B a step on the disk, {mark['line_bytes_per_step']:.0f} B of lines",
            f"  resume: {mark['resume_seconds']:.3f} s",
            f"  {READ} events: {mark['read_first_seconds']:.2f} s from the beginning, "
            f"{mark['read_last_seconds']:.2f} s from the end",
            *asked,
        ]
    )


if __name__ == "__main__":
    main()
