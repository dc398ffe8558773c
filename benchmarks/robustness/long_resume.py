"""The first step after a resume of a run of many steps, beside the first step of a new run.

    new       asyncdock run, mock engines that do not sleep ─▶ step 1
    resumed   the same run, its file of events and its checkpoint those of ``--steps`` steps ─▶ asyncdock resume ─▶ next step

    python -m benchmarks.robustness.long_resume [--steps 1000000] [--times 5] [--json FILE]

Both commands are started in turn; seconds are from the start of the command to its line of the
first step, and the processor seconds are those of all processes of the run until then. After that
line the run is killed, so that the next resume goes on from the same checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks import harness
from benchmarks.robustness.endurance import BEGIN, METRICS, MetricsFile, sent
from benchmarks.robustness.kill_soak import MARK, RECIPE, Broken, marked, tail
from orchestration.checkpoints import checkpoint
from pipeline.data.arena import SHARED_VARIABLE, shared_memory_directory
from stages.model import manifest

COMMAND = (sys.executable, "-P", "-m", "api.cli.main")
FIRST_CHECKPOINT = 25
SETTINGS = (
    "rollout.mock.time_scale=1e-6",
    "train.mock.time_scale=1e-6",
    f"checkpoint.every={FIRST_CHECKPOINT}",
)
STEP_LINE = re.compile(rb"^step (\d+)/", re.MULTILINE)
DEADLINE_SECONDS = 600.0
LOOK_SECONDS = 0.005


@dataclass(frozen=True)
class FirstStep:
    """``seconds``: from the start of a command to its first step; ``processor_seconds``: of all its
    processes."""

    seconds: float
    processor_seconds: float


def until(arguments: Sequence[str], home: Path, reached: Callable[[bytes], bool]) -> FirstStep:
    """Execute an `asyncdock` command until ``reached(its output)``, then kill it. Raises Broken."""
    mark = uuid.uuid4().hex
    log = home / f"{mark}.log"
    memory = Path(tempfile.mkdtemp(prefix="asyncdock-resume-", dir=shared_memory_directory()))
    environment = {**os.environ, MARK: mark, SHARED_VARIABLE: str(memory), "OMP_NUM_THREADS": "1"}
    began = time.monotonic()
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*COMMAND, *arguments], env=environment, stdout=output, stderr=output, cwd=home
            )
        while not reached(log.read_bytes()):
            if process.poll() is not None:
                raise Broken(
                    f"`asyncdock {arguments[0]}` ended with {process.returncode}\n{tail(log)}"
                )
            if time.monotonic() - began > DEADLINE_SECONDS:
                raise Broken(
                    f"`asyncdock {arguments[0]}` has made no step in "
                    f"{DEADLINE_SECONDS:.0f} s\n{tail(log)}"
                )
            time.sleep(LOOK_SECONDS)
        return FirstStep(time.monotonic() - began, processor_seconds(marked(mark)))
    finally:
        while pids := marked(mark):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)
            with contextlib.suppress(ChildProcessError):
                process.wait()
        shutil.rmtree(memory, ignore_errors=True)


def processor_seconds(pids: Sequence[int]) -> float:
    seconds = 0.0
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            times = psutil.Process(pid).cpu_times()
            seconds += times.user + times.system
    return seconds


def steps_in(output: bytes) -> list[int]:
    return [int(number) for number in STEP_LINE.findall(output)]


def run_command(recipe: Path, out: Path, steps: int) -> list[str]:
    settings = [f"--set={setting}" for setting in (*SETTINGS, f"train.steps={steps}")]
    return ["run", str(recipe), "--plain", "--out", str(out), *settings]


def long_run(home: Path, recipe: Path, steps: int) -> Path:
    """A run that has made ``steps`` steps, as far as its folder says: the checkpoint of a real run
    of 25 steps, renumbered, and the events of a run of that many steps."""
    out = home / "long"
    first = out / "checkpoints" / checkpoint.name_of(FIRST_CHECKPOINT)
    until(run_command(recipe, out, steps + 1000), home, lambda _: first.is_dir())
    renumber(first, steps)
    shutil.rmtree(out / "index")
    for file in (out / METRICS, *(out / "metrics").glob("*"), *out.glob("detail*.jsonl")):
        file.unlink()
    options = argparse.Namespace(step_seconds=2.4, rollouts=4)
    draw = random.Random(1)
    with MetricsFile(out / METRICS) as metrics_file:
        for step in range(steps):
            for event in sent(step, BEGIN + (step + 1) * options.step_seconds, options, draw):
                metrics_file.event(event)
    return out


def renumber(folder: Path, version: int) -> None:
    """Make the checkpoint in ``folder`` one of policy ``version``, in what it says and in its
    name."""
    state = json.loads((folder / checkpoint.STATE).read_text())
    factor, rest = divmod(version, state["version"])
    if rest:
        raise ValueError(f"--steps is a multiple of {state['version']}, not {version}")
    state["version"] = version
    state["counters"] = {name: factor * count for name, count in state["counters"].items()}
    (folder / checkpoint.STATE).write_text(json.dumps(state, indent=1))
    manifest.write(folder)
    folder.rename(folder.with_name(checkpoint.name_of(version)))


def measure(home: Path, steps: int, times: int) -> dict[str, list[FirstStep]]:
    recipe = home / "run.toml"
    recipe.write_text(RECIPE)
    long = long_run(home, recipe, steps)
    figures: dict[str, list[FirstStep]] = {"new": [], "resumed": []}
    for number in range(times):
        new = home / f"new-{number}"
        figures["new"].append(
            until(run_command(recipe, new, steps), home, lambda output: bool(steps_in(output)))
        )
        resumed = until(
            ["resume", str(long), "--plain"], home, lambda output: steps + 1 in steps_in(output)
        )
        figures["resumed"].append(resumed)
    return figures


def main(arguments: Sequence[str] | None = None) -> None:
    parser = harness.parser(__doc__)
    parser.add_argument(
        "--steps", type=int, default=1_000_000, help=f"a multiple of {FIRST_CHECKPOINT}"
    )
    parser.add_argument("--times", type=int, default=5, help="each of the two commands is started")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="adk-") as home:
        figures = measure(Path(home), options.steps, options.times)
    print(table(figures, options.steps))
    if options.json:
        found = {name: [vars(first) for first in firsts] for name, firsts in figures.items()}
        options.json.write({"steps": options.steps, **found})


def table(figures: dict[str, list[FirstStep]], steps: int) -> str:
    """A Markdown table of medians, and below it the median of the differences of neighbouring
    starts."""
    lines = ["| until its first step | s | processor s |", "|---|---|---|"]
    names = {"new": "a new run", "resumed": f"a run resumed after {steps:,} steps"}
    for name, firsts in figures.items():
        seconds = statistics.median(first.seconds for first in firsts)
        processor = statistics.median(first.processor_seconds for first in firsts)
        lines.append(f"| {names[name]} | {seconds:.2f} | {processor:.2f} |")
    pairs = list(zip(figures["new"], figures["resumed"], strict=True))
    seconds = statistics.median(resumed.seconds - new.seconds for new, resumed in pairs)
    processor = statistics.median(
        resumed.processor_seconds - new.processor_seconds for new, resumed in pairs
    )
    lines.append(f"| difference | {seconds:+.2f} | {processor:+.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
