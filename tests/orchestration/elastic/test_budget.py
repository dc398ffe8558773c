"""Restart budgets, and what the supervisor does with a rollout worker that has used up its own;
workers are scripted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestration.recipe.flow import flow_of
from orchestration.recipe.sections import LaunchSection
from orchestration.state.documents import EndKind
from orchestration.supervise.budget import RestartBudget
from orchestration.supervise.supervisor import Supervisor
from pipeline.documents.flow import STATE
from pipeline.index.client import Index
from stages.weights.documents import ENGINES
from tests.orchestration.run.test_ranks import ScriptedLauncher, supervise
from tests.orchestration.runs import TINY, recipe


@given(most=st.integers(0, 4), gaps=st.lists(st.floats(0, 30), max_size=40))
def test_no_window_has_more_restarts_than_the_budget_and_each_one_returns_after_a_window(
    most: int, gaps: list[float]
) -> None:
    budget = RestartBudget(most, window=20.0)
    now = 0.0
    taken = list[float]()
    for gap in gaps:
        now += gap
        counted = [at for at in taken if now - at < 20.0]
        wait = budget.take(now)
        assert (wait == 0.0) == (len(counted) < most)
        if wait == 0.0:
            taken.append(now)
        elif most:
            assert wait == counted[0] + 20.0 - now


WINDOW = 0.4


@pytest.fixture
async def supervised(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Supervisor, ScriptedLauncher, asyncio.Task[Any]]]:
    limits = {
        "launch__max_restarts": 1,
        "launch__startup_timeout": 20.0,
        "launch__stop_timeout": 0.2,
    }
    of = recipe(TINY, rollout__workers=2, **limits)
    monkeypatch.setattr(LaunchSection, "restart_window", WINDOW)
    await index.init(
        flow_of(of).config(of.staleness_plan), {"published": 0, "trained": 0, "admitted": 0}
    )
    await index.transition([""], "created")
    launcher = ScriptedLauncher(index)
    supervisor, supervising = await supervise(index, launcher, of)
    work = asyncio.create_task(supervising)
    yield supervisor, launcher, work
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)


async def absent(index: Index, count: int = 1) -> None:
    """Wait until ``count`` workers were reported as absent."""
    after = "0"
    async with asyncio.timeout(20):
        while count:
            for event in await index.events(after):
                after = event.id
                count = count - (event.kind == "worker" and event.data["change"] == "absent")


async def test_each_worker_has_a_budget_of_its_own(supervised: Any) -> None:
    supervisor, launcher, work = supervised
    lives = await launcher.next(4)
    for worker in ("flow-0", "update-0", "rollout-0", "rollout-1"):
        lives[worker].code.set_result(1)
        lives |= await launcher.next(1)
    assert supervisor.restarts == 4
    for worker in ("update-0", "rollout-0", "rollout-1"):
        lives[worker].code.set_result(0)
    assert (await work).state == "finished"


async def test_a_rollout_without_restarts_left_waits_for_one_while_another_works(
    supervised: Any, index: Index
) -> None:
    _, launcher, work = supervised
    lives = await launcher.next(4)
    assert await ENGINES.get(index) == ["rollout-0", "rollout-1"]
    lives["rollout-1"].code.set_result(1)
    (await launcher.next(1))["rollout-1"].code.set_result(EndKind.NOT_STARTED)
    await absent(index)
    assert await ENGINES.get(index) == ["rollout-0"], "the trainer does not wait for it"
    assert not work.done()
    again = await launcher.next(1)
    assert list(again) == ["rollout-1"], "restarted when the window had passed"
    assert await ENGINES.get(index) == ["rollout-0", "rollout-1"]


@pytest.mark.parametrize("is_last", [False, True])
async def test_the_run_ends_without_the_rollouts_that_are_absent(
    supervised: Any, index: Index, is_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``is_last``: all others are done when it dies."""
    supervisor, launcher, work = supervised
    monkeypatch.setattr(LaunchSection, "restart_window", 600.0)
    lives = await launcher.next(4)
    lives["rollout-0"].code.set_result(1)
    again = await launcher.next(1)
    for worker in (
        ("update-0", "rollout-1", "rollout-0")
        if is_last
        else ("rollout-0", "update-0", "rollout-1")
    ):
        if worker == "rollout-0":
            again[worker].code.set_result(1)
            await absent(index)
        else:
            lives[worker].code.set_result(0)
            await asyncio.wait([supervisor._keepers[worker.rpartition("-")[0], int(worker[-1])]])
    assert (await asyncio.wait_for(work, 20)).state == "finished"


async def test_the_last_rollout_without_restarts_left_fails_the_run(
    supervised: Any, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, launcher, work = supervised
    monkeypatch.setattr(LaunchSection, "restart_window", 600.0)
    lives = await launcher.next(4)
    for worker in ("rollout-0", "rollout-1"):
        lives[worker].code.set_result(1)
        (await launcher.next(1))[worker].code.set_result(1)
        if worker == "rollout-0":
            await absent(index)
    outcome = await asyncio.wait_for(work, 20)
    assert outcome.state == "failed"
    assert outcome.reason == (
        "rollout-1 died and launch.max_restarts = 1 is used up: ended with exit code 1"
    )


@pytest.mark.parametrize(
    ("late", "state"),
    [
        (["rollout-1"], "running"),
        (["rollout-0", "rollout-1"], "failed"),
        (["update-0"], "failed"),
    ],
)
async def test_a_run_begins_without_a_late_rollout_where_another_is_ready(
    late: list[str], state: str, index: Index
) -> None:
    of = recipe(TINY, rollout__workers=2, launch__startup_timeout=0.2, launch__stop_timeout=0.2)
    await index.init(
        flow_of(of).config(of.staleness_plan), {"published": 0, "trained": 0, "admitted": 0}
    )
    await index.transition([""], "created")
    _, supervising = await supervise(index, ScriptedLauncher(index, late), of)
    work = asyncio.create_task(supervising)
    async with asyncio.timeout(20):
        while (found := await index.state())[0] in ("created", "starting"):
            await index.wait(STATE, found[2], 1.0)
    assert found[0] == state
    if state == "failed":
        assert (await work).reason == (
            f"{late} not ready within launch.startup_timeout = 0 s; see the logs"
        )
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
