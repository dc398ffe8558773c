"""A sweep whose processes are killed at any moment goes on by the same command, and each of its runs
is made once."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline.index.embedded import die_with_parent

ROOT = Path(__file__).resolve().parents[4]
STEPS = 12
KILLS = 5
SECONDS = 600.0  # for which nothing may happen
SETS = (f"train.steps={STEPS}", "checkpoint.every=4", "evaluate.every=8", "prompts.held_out=0.1")
OVER = ("train.learning_rate=1e-3,3e-3", "seed=0..2")


def start(out: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start ``asyncdock sweep`` in a session of its own."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "asyncdock_command", "sweep", *arguments],
        cwd=out.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=partial(die_with_parent, os.getpid()),
    )


def until(condition: Callable[[], Any], sweep: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + SECONDS
    while sweep.poll() is None and not condition():
        assert time.monotonic() < deadline, "nothing has happened"
        time.sleep(0.02)


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    whole = [json.loads(line) for line in lines if line.endswith(b"\n")]
    return [event["data"] for event in whole if event["kind"] == kind]


def folders(out: Path) -> list[Path]:
    return sorted(path.parent for path in out.glob("*/recipe.json"))


def steps_made(out: Path) -> int:
    return sum(len(events(run, "step")) for run in folders(out))


def finished(out: Path) -> dict[str, bytes]:
    """The events of the runs that have finished, by the run's name."""
    return {
        run.name: (run / "metrics.jsonl").read_bytes()
        for run in folders(out)
        if (run / "summary.json").exists()
        and json.loads((run / "summary.json").read_bytes())["state"] == "finished"
    }


def kill_one(sweep: subprocess.Popen[str], chance: random.Random) -> str:
    """Kill the sweep's process, or the one of a run; return which."""
    runs = [
        child for child in psutil.Process(sweep.pid).children() if "run" in str(child.cmdline())
    ]
    if runs and chance.random() < 0.5:
        victim = chance.choice(runs)
        victim.kill()
        return f"run {victim.pid}"
    sweep.kill()
    sweep.wait()
    return "sweep"


@pytest.mark.timeout(1200)
def test_a_sweep_that_is_killed_five_times_ends_complete_with_each_run_once(
    tmp_path: Path,
) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    chance = random.Random(seed)
    out = tmp_path / "sweep"
    asked = [part for text in OVER for part in ("--over", text)]
    asked += [part for text in SETS for part in ("--set", text)]
    arguments = ["tiny", *asked, "--out", str(out), "--at-once", "2"]
    kills: list[str] = []
    before: dict[str, bytes] = {}
    sweep = start(out, *arguments)
    while len(kills) < KILLS:
        target = steps_made(out) + chance.randrange(STEPS)
        until(lambda target=target: steps_made(out) > target, sweep)  # type: ignore[misc]
        time.sleep(chance.random())  # so that it is any moment, also of a start
        before = finished(out)
        if sweep.poll() is None:
            kills.append(kill_one(sweep, chance))
        if sweep.poll() is not None:
            again = [str(out)] if chance.random() < 0.5 else arguments
            sweep = start(out, *again)
    output, _ = sweep.communicate(timeout=SECONDS)
    shown = f"seed {seed}, killed: {kills}\n{output}"
    print(shown)
    assert sweep.returncode == 0, shown

    document = json.loads((out / "sweep.json").read_bytes())
    assert [run["state"] for run in document["runs"]] == ["finished"] * 6, shown
    assert sorted(run["name"] for run in document["runs"]) == [run.name for run in folders(out)]
    for name, content in before.items():
        assert (out / name / "metrics.jsonl").read_bytes() == content, f"{name} was run again"
    for run in document["runs"]:
        steps = events(out / run["name"], "step")
        assert [step["version"] for step in steps] == [*range(1, STEPS + 1)], f"{run} {shown}"
        recipe = json.loads((out / run["name"] / "recipe.json").read_bytes())
        assert recipe["seed"] == run["settings"]["seed"]
        assert recipe["train"]["learning_rate"] == run["settings"]["train.learning_rate"]
        last = [step["reward_mean"] for step in steps][-round(STEPS / 10) :]
        assert run["value"] == pytest.approx(statistics.fmean(last))
    for rate in (1e-3, 3e-3):
        values = [
            run["value"]
            for run in document["runs"]
            if run["settings"]["train.learning_rate"] == rate
        ]
        half = 4.302653 * statistics.stdev(values) / 3**0.5  # Student's t with 2 degrees
        assert f"{statistics.fmean(values):.4g} ± {half:.2g}" in output, shown
