"""What a group of workers may become, and two things that happen to it at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestration.event_feed import EventFeed
from orchestration.recipe.flow import flow_of
from orchestration.state.documents import ENDING, PROCESS, RUN_RECIPE, Ending, EndKind
from orchestration.supervise.budget import RestartBudget
from orchestration.supervise.group import (
    MOVES,
    State,
    WorkerGroup,
    engines_of,
    missing,
    others_work,
    work_is_done,
)
from orchestration.supervise.scale import request_scale
from orchestration.supervise.supervisor import Supervisor
from pipeline.documents.flow import STATE
from pipeline.index.client import Index
from stages.weights.documents import ENGINES
from tests.orchestration.run import test_ranks as ranks
from tests.orchestration.run.test_ranks import ScriptedLauncher
from tests.orchestration.runs import TINY, recipe


def group(*workers: tuple[str, int]) -> WorkerGroup:
    return WorkerGroup(list(workers), RestartBudget(1, window=60.0))


@given(st.lists(st.sampled_from([*State, "ready", "go on"]), max_size=12))
def test_a_group_makes_the_moves_of_the_table_and_no_others(asked: list[State | str]) -> None:
    of = group(("rollout", 0))
    for move in asked:
        before = of.state
        try:
            if move == "ready":
                of.ready("rollout-0")
            elif move == "go on":
                of.go_on()
            else:
                of.move(State(move))
        except ValueError:
            assert of.state is before
            assert move == "go on" or move not in MOVES[before]
        assert of.state is before or of.state in MOVES[before]
        if before is State.DONE:
            assert of.state is State.DONE


@given(st.lists(st.sampled_from(list(State)), min_size=1, max_size=4))
def test_what_a_run_can_do_without_some_of_its_rollouts(states: list[State]) -> None:
    rollouts = [group(("rollout", number)) for number in range(len(states))]
    for of, state in zip(rollouts, states, strict=True):
        of.state = state
    ended = all(state in (State.DONE, State.ABSENT) for state in states)
    assert work_is_done(rollouts) == ended
    assert others_work(rollouts[0], rollouts) == any(
        each is not State.ABSENT for each in states[1:]
    )
    with_version = (State.STARTING, State.WORKING, State.DONE)
    engines = [f"rollout-{number}" for number, state in enumerate(states) if state in with_version]
    assert engines_of(rollouts) == engines
    trainer = group(("update", 0), ("update", 1))
    assert not others_work(trainer, [trainer, *rollouts]), "no run trains without its trainer"


def test_of_a_kind_that_is_elastic_one_ready_worker_is_enough() -> None:
    trainer = group(("update", 0), ("update", 1))
    rollouts = [group(("rollout", n)) for n in (0, 1)]
    groups = [trainer, *rollouts]
    trainer.ready("update-1")
    rollouts[1].ready("rollout-1")
    assert missing(groups) == ["update-0"]
    trainer.ready("update-0")
    assert missing(groups) == []


# --- the supervisor, with scripted workers ---

Supervise = Callable[..., Awaitable[tuple[Supervisor, ScriptedLauncher]]]
LONG = {"launch__stop_timeout": 0.2, "launch__max_restarts": 1}


@pytest.fixture
async def supervise(index: Index) -> AsyncIterator[Supervise]:
    works = []

    async def begin(
        late: tuple[str, ...] = (), **options: Any
    ) -> tuple[Supervisor, ScriptedLauncher]:
        of = recipe(TINY, rollout__workers=2, **LONG | options)
        await index.init(
            flow_of(of).config(of.staleness_plan), {"published": 0, "trained": 0, "admitted": 0}
        )
        await RUN_RECIPE.put(index, of)
        await index.transition([""], "created")
        launcher = ScriptedLauncher(index, late)
        supervisor, supervising = await ranks.supervise(index, launcher, of)
        works.append(asyncio.create_task(supervising))
        return supervisor, launcher

    yield begin
    for work in works:
        work.cancel()
    await asyncio.gather(*works, return_exceptions=True)


async def event(index: Index, worker: str, change: str) -> dict[str, Any]:
    """Wait for a `worker` event, and return it."""
    async with asyncio.timeout(20):
        async with EventFeed.reading(index) as feed:
            async for each in feed.follow():
                if each.kind == "worker" and (each.data["worker"], each.data["change"]) == (
                    worker,
                    change,
                ):
                    return dict(each.data)
    raise AssertionError


async def state(index: Index, *states: str) -> str:
    async with asyncio.timeout(20):
        while (current := await index.state())[0] not in states:
            await index.wait(STATE, current[2], 1.0)
    return current[0]


async def test_an_absent_worker_that_is_to_leave_is_gone_at_once_and_comes_back_when_it_is_wanted(
    supervise: Supervise, index: Index
) -> None:
    """Between both requests it must not be left in the run without anybody who launches it."""
    supervisor, launcher = await supervise()
    lives = await launcher.next(4)
    await state(index, "running")
    lives["rollout-1"].code.set_result(1)
    (await launcher.next(1))["rollout-1"].code.set_result(1)
    await event(index, "rollout-1", "absent")
    emit = index.emit

    async def wanted_again(data: Any) -> None:
        await emit(data)
        if getattr(data, "change", "") == "left":
            supervisor.workers.append(("rollout", 1))  # what another request does at this moment

    supervisor.index.emit = wanted_again  # type: ignore[method-assign]
    await request_scale(index, 1)
    await event(index, "rollout-1", "left")
    assert list(await launcher.next(1)) == ["rollout-1"]
    assert await ENGINES.get(index) == ["rollout-0", "rollout-1"]


async def test_a_worker_that_dies_while_it_is_asked_to_leave_is_not_launched_again(
    supervise: Supervise, index: Index
) -> None:
    supervisor, launcher = await supervise()
    lives = await launcher.next(4)
    await state(index, "running")
    leave = supervisor._leave

    async def dies(*of: Any) -> None:
        lives["rollout-1"].code.set_result(-9)
        await event(index, "rollout-1", "left")  # before anybody has asked its process
        await leave(*of)

    supervisor._leave = dies  # type: ignore[method-assign]
    await request_scale(index, 1)
    assert (await event(index, "rollout-1", "left"))["reason"] == "ended by signal 9"
    if keeper := supervisor._keepers.get(("rollout", 1)):
        await asyncio.wait_for(keeper, 20)
    assert ("rollout", 1) not in supervisor._groups
    assert launcher.lives.empty()
    assert await ENGINES.get(index) == ["rollout-0"]


async def test_a_worker_that_was_added_is_not_taken_for_ready(
    supervise: Supervise,
    index: Index,
) -> None:
    """No rollout is ready, so the run does not begin, though another one was launched."""
    late = ("rollout-0", "rollout-1", "rollout-2")
    _, launcher = await supervise(late, launch__startup_timeout=1.0)
    await launcher.next(4)
    await request_scale(index, 3)
    await launcher.next(1)
    assert await state(index, "running", "failed") == "failed"
    assert (await index.state())[1].startswith("['rollout-0', 'rollout-1', 'rollout-2'] not ready")


@pytest.mark.parametrize(
    ("fault", "state_after"),
    [(("RuntimeError", "a.py:3"), "failed"), (("RuntimeError", "b.py:9"), "running")],
)
async def test_two_failures_before_the_first_work_are_the_same_by_what_failed_not_by_their_words(
    fault: tuple[str, ...], state_after: str, supervise: Supervise, index: Index
) -> None:
    _, launcher = await supervise(("update-0",), launch__max_restarts=2)
    life = (await launcher.next(4))["update-0"]
    for attempt, failed in enumerate([("RuntimeError", "a.py:3"), fault]):
        failure = Ending(reason=f"RuntimeError: attempt {attempt}", fault=failed)
        await ENDING.put_once(index, failure, name=life.name)
        launcher.late = ["update-0"] if attempt == 0 else []
        life.code.set_result(EndKind.NOT_STARTED)
        if attempt and state_after == "failed":
            break
        life = (await launcher.next(1))["update-0"]
    assert await state(index, "failed", "running") == state_after
    if state_after == "failed":
        words = "update-0 failed twice before its first work, for the same reason: "
        assert (await index.state())[1] == words + "RuntimeError: attempt 1"
    assert await PROCESS.get(index, worker="update-0") == life.name
