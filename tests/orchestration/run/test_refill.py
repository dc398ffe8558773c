"""Runs in which hardly any group teaches: each step drops a bounded number of groups, and the run
ends."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from tests.orchestration.run.test_run import assert_equal, synchronous, trained
from tests.orchestration.runs import TINY, complete, executing, recipe

P = 4
STEPS = 6
DROPS: dict[str, Any] = {"algorithm__options": {"drop_equal": True}, "algorithm__max_refill": 2}


def same(completions: list[Any], **columns: Any) -> list[float]:
    return [0.5] * len(completions)


def sometimes(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """No response to a prompt whose answer has a letter above c is better than another."""
    return [
        float(wanted <= "c") * len(set(text))
        for text, wanted in zip(completions, answer, strict=True)
    ]


@pytest.mark.parametrize("staleness", [0, 2])
async def test_a_run_whose_prompts_teach_nothing_ends(tmp_path: Path, staleness: int) -> None:
    functions = [{"name": f"{__name__}:same"}]
    of = recipe(TINY, reward__functions=functions, pipeline__staleness=staleness, **DROPS)
    watched, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert result.state == "finished", result.reason
    ledger = watched.of("ledger")[-1]
    assert ledger["spared_groups"] == P * STEPS
    assert ledger["trained"] == 4 * P * STEPS
    dropped = ledger["dropped"]["equal rewards"]
    if staleness == 0:
        assert dropped == 2 * P * STEPS
    else:  # a step may also drop groups of the steps after it
        assert 2 * P * (STEPS - staleness) <= dropped <= (2 * STEPS + staleness) * P


async def test_killed_and_resumed_it_spares_the_groups_of_the_plain_loop(tmp_path: Path) -> None:
    functions = [{"name": f"{__name__}:sometimes"}]
    of = recipe(
        TINY,
        launch__launcher="process",
        reward__functions=functions,
        pipeline__staleness=0,
        **{**DROPS, "algorithm__max_refill": 1},
    )
    expected, weights = await synchronous(of)
    async with executing(Execution(RunFolder.create(of, tmp_path / "run"))) as (watched, work):
        await watched.until(lambda: bool(watched.of("step")))
        assert watched.run.supervisor is not None
        os.kill(watched.run.supervisor.pids()["flow-0"], signal.SIGKILL)
        await watched.until(lambda: len(watched.of("step")) >= 4)
        watched.stop.set()
        assert (await work).state == "stopped"
    resumed, result = await complete(Execution(RunFolder.resume(tmp_path / "run")))
    assert result.state == "finished", result.reason
    steps = [*watched.of("step")[: resumed.run.folder.begins], *resumed.of("step")]
    assert [(step["reward_mean"], step["loss"]) for step in steps] == expected
    assert_equal(trained(of, result), weights)
    ledger = resumed.of("ledger")[-1]
    assert ledger["spared_groups"] > 0
    assert ledger["dropped"]["equal rewards"] > 0
