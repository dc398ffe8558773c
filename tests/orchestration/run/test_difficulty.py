"""Runs that sample prompts by difficulty: equal to the plain loop, through a kill, a stop and a
resume."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from tests.orchestration.run.test_run import (
    assert_each_sample_once,
    assert_equal,
    synchronous,
    trained,
)
from tests.orchestration.runs import TINY, complete, executing, recipe

CHANGES: dict[str, Any] = {
    "prompts__sampling": "difficulty",
    "prompts__config": {"letters": "abcd"},  # 16 prompts, so that they come again
    "algorithm__options": {"drop_equal": True},
    "pipeline__staleness": 0,
    "train__steps": 8,
    "checkpoint__every": 3,
}


async def test_killed_stopped_and_resumed_it_is_the_plain_loop_bit_for_bit(tmp_path: Path) -> None:
    of = recipe(TINY, launch__launcher="process", **CHANGES)
    expected, weights = await synchronous(of)
    async with executing(Execution(RunFolder.create(of, tmp_path / "run"))) as (watched, work):
        for number, worker in enumerate(("flow-0", "update-0")):
            await watched.until(lambda: len(watched.of("step")) >= 2 * number + 1)  # noqa: B023
            assert watched.run.supervisor is not None
            os.kill(watched.run.supervisor.pids()[worker], signal.SIGKILL)
        await watched.until(lambda: len(watched.of("step")) >= 5)
        watched.stop.set()
        assert (await work).state == "stopped"
    resumed, result = await complete(Execution(RunFolder.resume(tmp_path / "run")))
    assert result.state == "finished", result.reason
    begun = resumed.run.folder.begins
    assert 5 <= begun < 8
    steps = [*watched.of("step")[:begun], *resumed.of("step")]
    assert [(step["reward_mean"], step["loss"]) for step in steps] == expected
    assert_equal(trained(of, result), weights)
    ledger = resumed.of("ledger")[-1]
    assert ledger["dropped"]["equal rewards"] > 0
    assert sum(ledger["dropped_tokens"].values()) == ledger["filtered_tokens"]


async def test_with_a_critic_and_several_sources_prompts_are_rated_too(tmp_path: Path) -> None:
    """PPO has no credit: the stage that measures the rewards of groups is there for the pass rates
    alone."""
    sources = [
        {"source": "builtin", "task": "repeat", "config": {"letters": letters}}
        for letters in ("ab", "cd")
    ]
    base = {
        **TINY,
        "prompts": {"sources": sources, "max_prompt_tokens": 16, "sampling": "difficulty"},
    }
    of = recipe(base, algorithm__name="ppo", train__steps=4, pipeline__staleness=1)
    watched, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert result.state == "finished", result.reason
    assert result.checkpoint is not None
    assert '"rates": [[' in result.checkpoint.rates
    assert_each_sample_once(of, watched)
