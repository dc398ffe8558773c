"""What grows in a real run: memory, threads and descriptors of its processes, its index and its
files, by steps done.

    asyncdock run (mock engines that do not sleep) ──at some numbers of steps──▶ samples ──least squares──▶ slopes

Processes fill their heaps first: the slopes are those of the samples after the first third.
"""

from __future__ import annotations

import collections
import contextlib
import json
import math
import os
import re
import shutil
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import redis

from benchmarks.robustness.kill_soak import MARK, RECIPE, Broken, kind, marked, tail
from orchestration.state.paths import WHERE
from pipeline.data.arena import SHARED_VARIABLE, shared_memory_directory

SETTINGS = (
    "rollout.mock.time_scale=1e-6",
    "train.mock.time_scale=1e-6",
    "pipeline.keep_samples=4MiB",
    "checkpoint.every=25",
    "evaluate.every=25",
    "evaluate.prompts=8",
    "prompts.held_out=0.2",
    "launch.max_restarts=0",
)
COMMAND = (sys.executable, "-P", "-m", "api.cli.main")
SAMPLES = 30
SETTLED = 1 / 3  # of the samples come before the slopes begin
DEVIATIONS = 2  # of a slope's error: what is further from 0 grows
STEP_LINE = re.compile(rb"^step (\d+)/", re.MULTILINE)
# What grows by design, and where it ends.
BOUNDS = {
    "files: events": "none: the history of the run",
    "files: event detail": "two files of 4 MiB",
    "files: samples": "`pipeline.keep_samples`",
    "files: logs": "none: lines that workers write",
    "files: checkpoints": "`checkpoint.keep`",
    "files: index": "Valkey rewrites it when it has doubled, from 64 MiB on",
    "index: events": "100,000",
    "index: memory": "100,000 events",
    "memory: index": "100,000 events",
    "memory: all, shared pages "
    "once": "the lines of its processes, and pages that two of them share no more",
    "shared memory": "`pipeline.arena`: a page has memory from its first use on",
}
FILES = {
    "metrics": "events",
    "metrics.jsonl": "events",
    "detail.jsonl": "event detail",
    "detail.old.jsonl": "event detail",
}


@dataclass(frozen=True)
class Trend:
    """A line through samples. ``slope`` is for each step, ``error`` its standard error."""

    last: float
    slope: float
    error: float

    @classmethod
    def of(cls, steps: Sequence[float], values: Sequence[float]) -> Trend:
        """By least squares, of at least three samples.

        >>> Trend.of([0, 10, 20], [5.0, 6.0, 7.0])
        Trend(last=7.0, slope=0.1, error=0.0)
        """
        slope, intercept = statistics.linear_regression(steps, values)
        residuals = [
            value - intercept - slope * step for step, value in zip(steps, values, strict=True)
        ]
        mean = statistics.fmean(steps)
        spread = math.fsum((step - mean) ** 2 for step in steps)
        squares = math.fsum(residual**2 for residual in residuals)
        return cls(values[-1], slope, math.sqrt(squares / (len(steps) - 2) / spread))

    @property
    def grows(self) -> bool:
        return self.slope > DEVIATIONS * self.error


@dataclass
class Growth:
    """Samples of a run: ``values`` by name, each at so many ``steps`` and ``seconds`` after the
    first one."""

    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, steps: int, seconds: float, sizes: Mapping[str, float]) -> None:
        for name in sizes.keys() - self.values.keys():
            self.values[name] = [0.0] * len(self.steps)
        self.steps.append(steps)
        self.seconds.append(seconds)
        for name, values in self.values.items():
            values.append(sizes.get(name, 0.0))

    def trends(self) -> dict[str, Trend]:
        begin = int(SETTLED * len(self.steps))
        return {
            name: Trend.of(self.steps[begin:], values[begin:])
            for name, values in sorted(self.values.items())
        }

    @property
    def steps_per_second(self) -> float:
        return (self.steps[-1] - self.steps[0]) / (self.seconds[-1] - self.seconds[0])

    def to_json(self) -> dict[str, Any]:
        trends = {
            name: {**asdict(trend), "grows": trend.grows} for name, trend in self.trends().items()
        }
        return {**asdict(self), "trends": trends, "steps_per_second": self.steps_per_second}


def grown(
    home: Path, steps: int, samples: int = SAMPLES, command: Sequence[str] = COMMAND
) -> Growth:
    """Run ``steps`` steps in ``home``.

    Returns the samples, of an interrupted run those until then. Raises Broken where the run fails.
    """
    mark = uuid.uuid4().hex
    out = home / "run"
    recipe = home / "run.toml"
    log = home / "run.log"
    recipe.write_text(RECIPE)
    memory = Path(tempfile.mkdtemp(prefix="asyncdock-endurance-", dir=shared_memory_directory()))
    environment = {**os.environ, MARK: mark, SHARED_VARIABLE: str(memory), "OMP_NUM_THREADS": "1"}
    settings = [f"--set={setting}" for setting in (*SETTINGS, f"train.steps={steps}")]
    arguments = [*command, "run", str(recipe), "--plain", "--out", str(out), *settings]
    growth = Growth()
    every = steps / (samples + 1)
    try:
        with log.open("wb") as file:
            process = psutil.Popen(arguments, env=environment, stdout=file, stderr=file)
        while process.poll() is None:
            time.sleep(0.02)  # the log has no reader that could be woken
            done = steps_done(log)
            if done >= every * (len(growth.steps) + 1) and done < steps:
                growth.add(done, time.monotonic(), sizes(process, out, memory))
        if process.returncode:
            raise Broken(f"`asyncdock run` ended with {process.returncode}\n{tail(log)}")
    except KeyboardInterrupt:
        print(f"interrupted after {steps_done(log)} steps")
    finally:
        for pid in marked(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        shutil.rmtree(memory, ignore_errors=True)
    return growth


def steps_done(log: Path) -> int:
    """By the newest line of a step in the output of `asyncdock run --plain`."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
        lines = STEP_LINE.findall(file.read())
    return int(lines[-1]) if lines else 0


def sizes(command: psutil.Process, out: Path, memory: Path) -> dict[str, float]:
    """Bytes and counts now of the run in ``out``, which ``command`` executes with shared memory in
    ``memory``."""
    found = collections.Counter[str]()
    for process in [command, *command.children(recursive=True)]:
        with contextlib.suppress(psutil.Error, ProcessLookupError, FileNotFoundError):
            name = "the command" if process == command else kind(process)
            own, part = memory_of(process.pid)
            found[f"memory: {name}"] += own
            found["memory: all, shared pages once"] += part
            found[f"threads: {name}"] += process.num_threads()
            found[f"descriptors: {name}"] += process.num_fds()
    where = json.loads((out / WHERE).read_text())
    with redis.Redis.from_url(where["index"]) as index:
        found["index: keys"] = index.dbsize()
        found["index: memory"] = index.info("memory")["used_memory"]
        found["index: events"] = sum(
            index.xlen(key) for key in index.scan_iter("*events", _type="stream")
        )
    found["shared memory"] = sum(
        path.stat().st_blocks * 512 for path in memory.rglob("*") if path.is_file()
    )
    for folder, _, files in os.walk(out):  # passes over what is removed meanwhile
        for file in files:
            path = Path(folder) / file
            with contextlib.suppress(FileNotFoundError):
                top = path.relative_to(out).parts[0]
                found[f"files: {FILES.get(top, top)}"] += path.lstat().st_size
                found["files: their number"] += 1
    return dict(found)


def memory_of(pid: int) -> tuple[int, int]:
    """Bytes of memory without a file behind them, swapped out or not, that a process has: all of
    them, and its part of those that it shares. Not its resident set, which the kernel makes smaller
    and the process larger again when it reads its program, nor what it has for itself alone: that
    grows when a process that it was forked with writes to a page."""
    found = collections.Counter[str]()
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, size = line.split()[:2]
        found[name] += 1024 * int(size)
    swapped = found["Swap:"]
    part = found["SwapPss:"]
    return found["Anonymous:"] + swapped, found["Pss_Anon:"] + part


def growth_table(growth: Growth) -> str:
    """A Markdown table of all trends, and below it what grows without a bound of its own."""
    lines = [
        "| a run of mock engines | last | for each step | ± | grows | up to |",
        "|---|---|---|---|---|---|",
    ]
    trends = growth.trends()
    for name, trend in trends.items():
        is_size = (
            name.startswith(("memory", "files", "shared", "index: memory")) and "number" not in name
        )
        last = f"{trend.last / 2**20:,.2f} MiB" if is_size else f"{trend.last:,.0f}"
        slope, error = (
            f"{value:,.0f} B" if is_size else f"{value:.4f}" for value in (trend.slope, trend.error)
        )
        grows = "yes" if trend.grows else ""
        lines.append(f"| {name} | {last} | {slope} | {error} | {grows} | {BOUNDS.get(name, '')} |")
    without = [name for name, trend in trends.items() if trend.grows and name not in BOUNDS]
    lines.append("")
    lines.append(f"{growth.steps[-1]:,} steps, {growth.steps_per_second:.1f} a second")
    lines.append(
        f"grows beyond {DEVIATIONS} errors, with no bound named: {', '.join(without) or 'nothing'}"
    )
    return "\n".join(lines)
