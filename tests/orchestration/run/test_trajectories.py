"""Runs in which an environment answers the policy: real processes, real kills."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from orchestration.processes.leftovers import sweep_leftovers
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from tests.orchestration.run.test_run import (
    assert_each_sample_once,
    assert_equal,
    assert_nothing_left,
    synchronous,
    trained,
)
from tests.orchestration.runs import TINY, Watched, complete, executing, recipe

GAMES = "tests.orchestration.run.games"
GUESS: dict[str, Any] = {
    **TINY,
    "name": "guess-test",
    "prompts": {"source": "builtin", "task": "guess", "max_prompt_tokens": 8},
    "environment": {"use": "guess", "max_turns": 3, "max_tokens": 16},
    "rollout": {"max_rows": 32, "max_tokens": 2, "stop": [*"1234567"], "threads": 1},
    "reward": {"functions": [{"name": "environment"}]},
    "pipeline": {"staleness": 1, "arena": "16MiB", "lease_seconds": 10.0},
    "launch": {"launcher": "process", "max_restarts": 20, "startup_timeout": 120.0},
}


def slow(game: str, seconds: float) -> dict[str, Any]:
    return {"environment__use": f"{GAMES}:{game}", "environment__options": {"seconds": seconds}}


def run_of(of: Any, folder: Path) -> Execution:
    return Execution(RunFolder.create(of, folder))


def environments_of(watched: Watched) -> dict[str, int]:
    """What the environment worker has told last of its trajectories."""
    told = [event for event in watched.of("stage") if event["stage"] == "environment"]
    return dict(told[-1]["trajectories"]) if told else {}


def kill(watched: Watched, worker: str) -> None:
    assert watched.run.supervisor is not None
    os.kill(watched.run.supervisor.pids()[worker], signal.SIGKILL)


def kill_environments(watched: Watched) -> None:
    """Kill the processes in which environments live."""
    assert watched.run.supervisor is not None
    worker = psutil.Process(watched.run.supervisor.pids()["environment-0"])
    for process in worker.children(recursive=True):
        if not process.children():
            process.kill()


@pytest.mark.parametrize("launcher", ["inline", "process"])
async def test_with_bound_zero_it_is_the_loop_turn_by_turn_bit_for_bit(
    launcher: str, tmp_path: Path
) -> None:
    of = recipe(GUESS, pipeline__staleness=0, launch__launcher=launcher)
    expected, weights = await synchronous(of)
    watched, result = await complete(run_of(of, tmp_path / "run"))
    assert result.state == "finished", result.reason
    assert [(step["reward_mean"], step["loss"]) for step in watched.of("step")] == expected
    assert_equal(trained(of, result), weights)
    assert_each_sample_once(of, watched)
    assert_nothing_left(watched.run)


@pytest.mark.parametrize("worker", ["rollout-0", "environment-0"])
async def test_with_bound_zero_a_killed_worker_changes_no_bit(worker: str, tmp_path: Path) -> None:
    of = recipe(GUESS, pipeline__staleness=0, **slow("Slow", 0.3))
    expected, weights = await synchronous(of)
    async with executing(run_of(of, tmp_path / "run")) as (watched, work):
        for steps in (1, 3):
            await watched.until(lambda steps=steps: len(watched.of("step")) >= steps)  # type: ignore[misc]
            kill(watched, worker)
        result = await work
    assert result.state == "finished", result.reason
    assert sum(event["change"] == "died" for event in watched.of("worker")) == 2
    assert [(step["reward_mean"], step["loss"]) for step in watched.of("step")] == expected
    assert_equal(trained(of, result), weights)
    assert_each_sample_once(of, watched)


@pytest.mark.parametrize("bound", [0, 1, 4])
async def test_trajectories_that_last_several_steps_are_no_older_than_the_bound(
    bound: int, tmp_path: Path
) -> None:
    window = 2 if bound > 1 else 1
    of = recipe(
        GUESS,
        pipeline__staleness=bound,
        pipeline__window=window,
        train__steps=8,
        train__groups_per_step=2,
        **slow("Slow", 0.6),
    )
    watched, result = await complete(run_of(of, tmp_path / "run"))
    assert result.state == "finished", result.reason
    assert_each_sample_once(of, watched)
    oldest = max(step["staleness_max"] for step in watched.of("step"))
    assert bool(oldest) == bool(bound)
    turns = environments_of(watched)
    ended = sum(count for name, count in turns.items() if name.startswith("ended_"))
    assert ended == 8 * 2 * of.algorithm.group_size
    assert turns["open"] == 0
    assert_nothing_left(watched.run)


@pytest.mark.parametrize(
    ("game", "victim"),
    [
        ("Slow", "rollout-0"),
        ("Slow", "environment-0"),
        ("Lost", "environment-0"),
        ("Slow", "environments"),
        ("Lost", "environments"),
    ],
)
async def test_each_trajectory_is_trained_once_whatever_is_killed(
    game: str, victim: str, tmp_path: Path
) -> None:
    # a kill costs whole steps their tokens where all of their trajectories were being answered
    allowed = {"train__max_skipped_steps": 10, "environment__on_error": "zero"}
    of = recipe(GUESS, train__steps=10, **allowed, **slow(game, 0.3))
    async with executing(run_of(of, tmp_path / "run")) as (watched, work):
        for steps in (1, 3, 5, 7):
            await watched.until(lambda steps=steps: len(watched.of("step")) >= steps)  # type: ignore[misc]
            if victim == "environments":
                kill_environments(watched)
            else:
                kill(watched, victim)
        result = await work
    assert result.state == "finished", result.reason
    assert_each_sample_once(of, watched)
    deaths = sum(event["change"] == "died" for event in watched.of("worker"))
    assert deaths == (0 if victim == "environments" else 4)
    assert_nothing_left(watched.run)


async def test_another_rollout_worker_goes_on_with_the_trajectories_of_a_killed_one(
    tmp_path: Path,
) -> None:
    of = recipe(GUESS, train__steps=6, rollout__workers=2, **slow("Slow", 0.3))
    async with executing(run_of(of, tmp_path / "run")) as (watched, work):
        for steps, victim in ((1, "rollout-0"), (3, "rollout-1")):
            await watched.until(lambda steps=steps: len(watched.of("step")) >= steps)  # type: ignore[misc]
            kill(watched, victim)
        result = await work
    assert result.state == "finished", result.reason
    assert_each_sample_once(of, watched)
    ledger = watched.of("ledger")[-1]
    assert ledger["trained"] < ledger["trained_turns"] <= 3 * ledger["trained"]
    rollouts = {e["worker"] for e in watched.of("stage") if e["stage"] == "rollout" and e["tokens"]}
    assert rollouts == {"rollout-0", "rollout-1"}
    assert_nothing_left(watched.run)


async def test_groups_whose_environments_were_killed_are_replaced(tmp_path: Path) -> None:
    of = recipe(GUESS, train__steps=8, reward__max_error_share=1.0, **slow("Slow", 0.3))
    async with executing(run_of(of, tmp_path / "run")) as (watched, work):
        for steps in (1, 3, 5):
            await watched.until(lambda steps=steps: len(watched.of("step")) >= steps)  # type: ignore[misc]
            kill_environments(watched)
        result = await work
    assert result.state == "finished", result.reason
    groups = [group for step in watched.of("step") for group in step["groups"]]
    assert len(groups) == len(set(groups)) == 8 * 4
    last = watched.of("ledger")[-1]
    for unit in ("", "_tokens", "_turns"):
        parts = (last.get(f"{part}{unit}", 0) for part in ("trained", "filtered", "in_flight"))
        assert last[f"generated{unit}"] == sum(parts)
    assert last["trained"] == 8 * 4 * 4


async def test_pause_holds_and_resume_goes_on(tmp_path: Path) -> None:
    of = recipe(GUESS, train__steps=8)
    async with executing(run_of(of, tmp_path / "run")) as (watched, work):
        await watched.until(lambda: len(watched.of("step")) >= 2)
        await watched.move("running", "paused")
        await watched.until(lambda: watched.of("state")[-1]["state"] == "paused")
        await watched.move("paused", "running")
        result = await work
    assert result.state == "finished", result.reason
    assert_each_sample_once(of, watched)


KILLED = """
import asyncio, sys
from pathlib import Path
from tests.orchestration.run.test_trajectories import GUESS, run_of
from tests.orchestration.runs import executing, recipe
async def main():
    of = recipe(GUESS, pipeline__staleness=0, checkpoint__every=2)
    async with executing(run_of(of, Path(sys.argv[1]))) as (watched, work):
        await watched.until(lambda: any(event["version"] == 2 for event in watched.of("checkpoint")))
        print("here", flush=True)
        await work
asyncio.run(main())
"""


async def test_a_run_that_was_killed_as_a_whole_is_resumed_to_the_same_weights(
    tmp_path: Path,
) -> None:
    of = recipe(GUESS, pipeline__staleness=0, checkpoint__every=2)
    expected, weights = await synchronous(of)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", KILLED, str(tmp_path / "run"), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"here\n"
    process.kill()
    await process.wait()
    sweep_leftovers()
    resumed = Execution(RunFolder.resume(tmp_path / "run"))
    assert resumed.folder.start is not None
    began = resumed.folder.start.version
    assert began >= 2
    watched, result = await complete(resumed)
    assert result.state == "finished", result.reason
    steps = watched.of("step")
    assert [step["step"] for step in steps] == list(range(began + 1, 7))
    assert [(step["reward_mean"], step["loss"]) for step in steps] == expected[began:]
    assert watched.of("ledger")[-1]["trained"] == 6 * 4 * 4
    assert_equal(trained(of, result), weights)


WITHOUT = """
import asyncio, sys
from pathlib import Path
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from tests.orchestration.runs import TINY, complete, recipe
of = recipe(TINY, train__steps=1, evaluate__every=1)
watched, result = asyncio.run(complete(Execution(RunFolder.create(of, Path(sys.argv[1])))))
print(result.state, *(name for name in sys.modules if "environments" in name or "trajector" in name))
"""


async def test_a_run_without_an_environment_loads_nothing_of_them(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", WITHOUT, str(tmp_path / "run")), stdout=asyncio.subprocess.PIPE
    )
    printed, _ = await process.communicate()
    assert printed.splitlines()[-1].split() == [b"finished"]
