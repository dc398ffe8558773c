"""Nothing stalls in silence: each stall is injected into a real run, which goes on, or fails within
the bound that it names. ``docs/runs.md`` lists all of them with their tests."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import redis.asyncio

from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from orchestration.state.lifecycle import ask_in_folder
from orchestration.supervise.waiting import SILENT_BEATS, Wait, waiting_chain
from pipeline.index.client import Index
from tests.orchestration.run.test_run import assert_each_sample_once, assert_nothing_left
from tests.orchestration.runs import MOCK, TINY, Watched, complete, executing, recipe
from tests.pipeline.index.test_leases import with_a_clock_that_can_be_set

HANG = 1.5  # s
TESTS = Path(__file__).parents[2]


def test_every_test_that_the_page_names_is_there() -> None:
    page = (TESTS.parent / "docs" / "runs.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", page)
    assert len(named) > 8
    for file, test in named:
        assert f"def {test}(" in (TESTS / file).read_text(), f"{file}::{test}"


def pid_of(watched: Watched, worker: str) -> int:
    assert watched.run.supervisor is not None
    return watched.run.supervisor.pids()[worker]


async def chain_when(watched: Watched, last: str) -> list[Wait]:
    """The chain of waiting once it ends with ``last``."""
    assert watched.run.supervisor is not None
    async with asyncio.timeout(20):
        while True:
            chain = await waiting_chain(watched.run.supervisor.index)
            if chain and last in chain[-1].text:
                return chain
            # what is asked for has nothing to wait on: that is what it is about
            await asyncio.sleep(0.05)


def reasons(watched: Watched, change: str = "died") -> dict[str, str]:
    return {
        event["worker"]: event["reason"]
        for event in watched.of("worker")
        if event["change"] == change
    }


async def test_a_rollout_process_that_hangs_is_named_ended_and_its_samples_are_made_again(
    tmp_path: Path,
) -> None:
    hang = 3 * HANG  # it is asked about between the half of that and its end
    of = recipe(MOCK, train__steps=10, launch__launcher="process", launch__hang_timeout=hang)
    async with executing(Execution(RunFolder.create(of, tmp_path / "run"))) as (watched, work):
        await watched.until(lambda: len(watched.of("step")) >= 3)
        began = time.monotonic()
        os.kill(pid_of(watched, "rollout-0"), signal.SIGSTOP)
        chain = await chain_when(watched, "launch.hang_timeout")
        stopped = time.monotonic() - began
        asked = await ask_in_folder(tmp_path / "run", waiting_chain)
        result = await work
    assert result.state == "finished", result.reason
    assert [wait.who.split()[0] for wait in chain] == ["step", "stage", "rollout-0"]
    group = int(chain[0].on.split()[1])  # groups are trained in order
    assert chain[0].who == f"step {group // of.train.groups_per_step + 1}"
    assert chain[-1].seconds is not None
    beats = SILENT_BEATS * of.launch.beat_seconds
    assert beats < chain[-1].seconds < stopped + hang, (
        "since its last sign of life, which came before it was stopped"
    )
    assert asked[1][-1].text.startswith("rollout-0 waits for"), asked
    assert "gave no sign of life for launch.hang_timeout = 4.5 s" in reasons(watched)["rollout-0"]
    assert_each_sample_once(of, watched)
    assert_nothing_left(watched.run)


async def test_a_run_whose_worker_hangs_again_and_again_fails_and_says_who(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "launch__max_restarts": 0,
        "launch__launcher": "process",
        "launch__hang_timeout": HANG,
    }
    async with executing(
        Execution(RunFolder.create(recipe(MOCK, train__steps=500, **changes), tmp_path / "run"))
    ) as (watched, work):
        await watched.until(lambda: len(watched.of("step")) >= 2)
        await watched.move("running", "paused")
        command = [sys.executable, "-m", "api.cli.main", "why", str(tmp_path / "run")]
        asked = await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, cwd=TESTS.parent
        )
        await watched.move("paused", "running")
        os.kill(pid_of(watched, "flow-0"), signal.SIGSTOP)
        result = await asyncio.wait_for(work, 60)
    assert re.fullmatch(r"the run waits for \d+\.\d s for `resume`\n", asked.stdout), asked
    assert result.state == "failed"
    assert (
        "flow-0 died and launch.max_restarts = 0 is used up: it gave no sign of life"
        in result.reason
    )
    assert_nothing_left(watched.run)


async def test_a_rollout_that_dies_at_its_swap_and_stays_away_holds_up_no_other_swap(
    tmp_path: Path,
) -> None:
    """Only one may swap at a time: the other one's turn comes when the supervisor has seen the
    death."""
    changes: dict[str, Any] = {
        "launch__launcher": "process",
        "launch__max_restarts": 0,
    }
    of = recipe(MOCK, train__steps=10, rollout__workers=2, sync__at_once=1, **changes)
    of = of.model_copy(
        update={
            "rollout": of.rollout.model_copy(
                update={"mock": {"time_scale": 0.02, "swap_seconds": 10.0}}
            )
        }
    )
    async with executing(Execution(RunFolder.create(of, tmp_path / "run"))) as (watched, work):
        await watched.until(lambda: len(watched.of("step")) >= 2)
        assert watched.run.supervisor is not None
        index = watched.run.supervisor.index
        async with redis.asyncio.Redis.from_url(index.url) as server:
            while True:
                if at_it := await server.zrange(f"{index.prefix}swapping", 0, -1):
                    break
                await asyncio.sleep(0.002)  # a turn wakes nobody when it begins
        worker = "-".join(at_it[0].decode().split("-")[:2])  # its process has more parts
        os.kill(pid_of(watched, worker), signal.SIGKILL)
        result = await asyncio.wait_for(work, 60)
    assert result.state == "finished", result.reason
    assert [event["worker"] for event in watched.of("worker") if event["change"] == "absent"] == [
        worker
    ]
    assert_each_sample_once(of, watched)


async def test_a_rank_that_hangs_in_a_collective_is_ended_with_its_group_for_one_restart(
    tmp_path: Path,
) -> None:
    changes: dict[str, Any] = {
        "train__dp": 2,
        "launch__launcher": "process",
        "launch__max_restarts": 1,
    }
    of = recipe(TINY, train__steps=8, launch__hang_timeout=HANG, **changes)
    async with executing(Execution(RunFolder.create(of, tmp_path / "run"))) as (watched, work):
        await watched.until(lambda: len(watched.of("step")) >= 2)
        os.kill(pid_of(watched, "update-1"), signal.SIGSTOP)
        result = await work
    assert result.state == "finished", result.reason
    assert "launch.hang_timeout" in reasons(watched)["update-1"]
    assert_each_sample_once(of, watched)


async def test_an_engine_that_stays_paused_after_an_update_is_named_with_the_chain_and_restarted(
    tmp_path: Path,
) -> None:
    """Its process is alive, and renews its leases."""
    options = {"once": str(tmp_path / "once")}
    changes: dict[str, Any] = {
        "launch__launcher": "process",
        "launch__hang_timeout": 10.0,
        "launch__stall_timeout": 2.0,
    }
    engine = {
        "rollout__engine": "tests.orchestration.stalling:paused",
        "rollout__options": options,
        "rollout__mock": {},
    }
    of = recipe(MOCK, train__steps=8, **changes, **engine)
    async with executing(Execution(RunFolder.create(of, tmp_path / "run"))) as (watched, work):
        result = await asyncio.wait_for(work, 90)
    assert result.state == "finished", result.reason
    reason = reasons(watched)["rollout-0"]
    assert "no progress of the run for launch.stall_timeout = 2 s: step " in reason
    assert re.search(
        r"stage rollout waits for \d\.\d s for rollout-0, which holds them ← rollout-0 waits for "
        r"its own work",
        reason,
    )
    assert_each_sample_once(of, watched)


async def test_an_index_that_is_paused_and_a_clock_that_is_set_back_make_nobody_silent(
    tmp_path: Path,
) -> None:
    """The pause is longer than a lease, and longer than a worker may be silent."""
    of = recipe(
        MOCK,
        train__steps=24,
        launch__launcher="process",
        launch__hang_timeout=HANG,
        pipeline__lease_seconds=1.0,
    )
    async with executing(Execution(RunFolder.create(of, tmp_path / "run"))) as (watched, work):
        await watched.until(lambda: len(watched.of("step")) >= 2)
        assert watched.run.supervisor is not None
        index = watched.run.supervisor.index
        async with redis.asyncio.Redis.from_url(index.url) as server:
            await server.set("shift", 0)
            await index.load(with_a_clock_that_can_be_set())
            await watched.until(lambda: len(watched.of("step")) >= 6)
            await server.set("shift", -3600)
            await watched.until(lambda: len(watched.of("step")) >= 10)
            await server.client_pause(int(2000 * HANG))
        result = await asyncio.wait_for(work, 90)
    assert result.state == "finished", result.reason
    assert reasons(watched) == {}, "no worker died"
    assert_each_sample_once(of, watched)
    assert Index(index.url, "any").timeout > 30, "calls wait longer than a pause of 30 s"


async def test_a_run_goes_over_the_ends_of_epochs_and_ends_with_one(tmp_path: Path) -> None:
    rows = tmp_path / "prompts.jsonl"
    rows.write_text(
        "".join(json.dumps({"prompt": f"repeat {n}", "answer": "aa"}) + "\n" for n in range(8))
    )
    prompts = {"source": "jsonl", "path": str(rows), "max_prompt_tokens": 16, "held_out": 0.0}
    of = recipe(
        {**MOCK, "prompts": prompts},
        train__steps=6,
        train__groups_per_step=4,
        pipeline__staleness=2,
    )
    watched, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert result.state == "finished", result.reason
    ended = [event["epochs"] for event in watched.of("prompt") if event["change"] == "epoch"]
    assert list(ended[-1].values()) == [3], "24 groups are three epochs of 8 prompts"
    assert_each_sample_once(of, watched)
