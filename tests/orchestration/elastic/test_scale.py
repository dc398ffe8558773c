"""Rollout workers that join and leave in the middle of a run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from orchestration.launch import hosts
from orchestration.launch.pulse import beat
from orchestration.recipe.flow import flow_of
from orchestration.recipe.problems import RecipeError
from orchestration.recipe.worker_kinds import remote_workers
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from orchestration.state.documents import (
    END,
    ENDING,
    HEAD,
    IS_LOST,
    LEAVE,
    ORDERS,
    RUN_PATHS,
    RUN_RECIPE,
    SCALE,
    Ending,
    EndKind,
    Order,
)
from orchestration.state.paths import RunPaths
from orchestration.state.registry import WrongState
from orchestration.supervise.scale import request_scale, scaled
from orchestration.workers.rollout import RolloutJob
from pipeline.documents.flow import SECRET, STATE, WAREHOUSES
from pipeline.index.client import Index, RunConfig
from pipeline.warehouse.dock import Dock
from stages.engines.mock.engines import MockRolloutEngine
from stages.weights.documents import ENGINES
from tests.orchestration.run.test_hosts import REMOTE
from tests.orchestration.run.test_partial_rollout import LONG_TAILED
from tests.orchestration.run.test_ranks import ScriptedLauncher, ScriptedLife, supervise
from tests.orchestration.run.test_run import assert_each_sample_once, assert_nothing_left
from tests.orchestration.runs import MOCK, TINY, Watched, executing, recipe

STEPS = 16


def changes(watched: Watched, worker: str) -> list[str]:
    return [event["change"] for event in watched.of("worker") if event["worker"] == worker]


def counted(watched: Watched, what: str) -> dict[str, int]:
    """What each rollout worker has reported in all of its lives; a life begins at 0."""
    total = dict[str, int]()
    last = dict[str, int]()
    for event in watched.of("stage"):
        if event["stage"] == "rollout":
            worker = event["worker"]
            now = event[what]
            total[worker] = (
                total.get(worker, 0)
                + now
                - (before if (before := last.get(worker, 0)) <= now else 0)
            )
            last[worker] = now
    return total


async def scale(watched: Watched, rollouts: int) -> None:
    assert watched.run.supervisor is not None
    await request_scale(watched.run.supervisor.index, rollouts)


async def test_rollouts_join_and_leave_and_no_token_is_made_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = dict[int, MockRolloutEngine]()
    generate = MockRolloutEngine.generate
    third = asyncio.Event()  # the engine of rollout-2 has begun

    def generating(engine: MockRolloutEngine, requests: Any) -> Any:
        engines[id(engine)] = engine
        if len(engines) == 3:
            third.set()
        return generate(engine, requests)

    monkeypatch.setattr(MockRolloutEngine, "generate", generating)
    steps = 2 * STEPS
    joining = ("rollout-1", "rollout-2")
    leaves = 0
    of = recipe(
        LONG_TAILED,
        train__steps=steps,
        checkpoint__every=STEPS,
        rollout__workers=1,
        pipeline__staleness=2,
    )
    async with executing(Execution(RunFolder.create(of, tmp_path / "run"))) as (watched, work):
        await watched.until(lambda: bool(watched.of("step")))
        # they had something in flight
        while not any(counted(watched, "parked").get(worker) for worker in joining):
            leaves += 1
            await scale(watched, 3)
            await asyncio.wait_for(third.wait(), 60)
            for worker in joining:
                await watched.until(lambda: changes(watched, worker).count("ready") == leaves)  # noqa: B023
            await scale(watched, 1)
            for worker in joining:
                await watched.until(lambda: changes(watched, worker).count("left") == leaves)  # noqa: B023
        await scale(watched, 2)
        await watched.until(lambda: changes(watched, "rollout-1").count("ready") == leaves + 1)
        result = await work
    assert result.state == "finished", result.reason
    for worker in joining:
        left = [
            event
            for event in watched.of("worker")
            if event["worker"] == worker and event["change"] == "left"
        ]
        assert [event.get("reason") for event in left] == [None] * leaves, "not ended for its time"
    assert not [event for event in watched.of("worker") if event["change"] in ("died", "restarted")]
    assert_each_sample_once(of, watched)
    made = counted(watched, "tokens")
    parked = counted(watched, "parked")
    assert parked["rollout-1"] + parked["rollout-2"] > 0, "what was in flight was parked"
    assert sum(made.values()) <= watched.of("ledger")[-1]["generated_tokens"], (
        "a token was made twice"
    )
    assert_nothing_left(watched.run)


async def test_a_rollout_that_does_not_leave_in_time_is_ended_and_its_rows_are_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stuck(self: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(RolloutJob, "leave", stuck)  # it goes on as if it had not been asked
    of = recipe(
        LONG_TAILED,
        train__steps=6,
        checkpoint__every=STEPS,
        launch__stop_timeout=0.3,
        pipeline__staleness=2,
    )
    async with executing(Execution(RunFolder.create(of, tmp_path / "run"))) as (watched, work):
        await watched.until(lambda: counted(watched, "tokens").get("rollout-1", 0) > 0)
        await scale(watched, 1)
        result = await work
    assert result.state == "finished", result.reason
    assert changes(watched, "rollout-1")[-2:] == ["leaves", "left"]
    assert_each_sample_once(of, watched)


async def test_the_number_of_a_run_that_is_taken_over_stays(index: Index) -> None:
    """The next supervisor of the index launches the workers that were asked for."""
    of = recipe(TINY)
    await index.init(
        flow_of(of).config(of.staleness_plan), {"published": 0, "trained": 0, "admitted": 0}
    )
    await RUN_RECIPE.put(index, of)
    await index.transition([""], "running")
    await request_scale(index, 2)
    launcher = ScriptedLauncher(index)
    supervisor, supervising = await supervise(index, launcher, of)
    work = asyncio.create_task(supervising)
    lives = await launcher.next(4)
    assert sorted(lives) == ["flow-0", "rollout-0", "rollout-1", "update-0"]
    assert await ENGINES.get(index) == ["rollout-0", "rollout-1"]
    for worker in ("rollout-0", "rollout-1", "update-0"):
        lives[worker].code.set_result(0)
    supervisor.launch = of.launch.model_copy(update={"stop_timeout": 0.2})
    assert (await asyncio.wait_for(work, 20)).state == "finished"


async def test_a_worker_whose_host_leaves_is_launched_again(index: Index) -> None:
    """It ends with 0 though the run goes on, and takes nothing from its restart budget."""
    of = recipe(TINY, launch__max_restarts=0)
    await index.init(
        flow_of(of).config(of.staleness_plan), {"published": 0, "trained": 0, "admitted": 0}
    )
    await index.transition([""], "created")
    launcher = ScriptedLauncher(index)
    _, supervising = await supervise(index, launcher, of)
    work = asyncio.create_task(supervising)
    life = (await launcher.next(3))["rollout-0"]
    await LEAVE.put(index, True, name=life.name)
    life.code.set_result(0)
    assert list(await launcher.next(1)) == ["rollout-0"]
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)


@pytest.mark.parametrize(
    ("base", "rollouts", "wrong"),
    [
        (MOCK, 0, r"rollout\.workers = 0"),
        (
            {**TINY, "launch": {**TINY["launch"], "placement": "colocated"}},
            2,
            "starts no rollout workers by themselves",
        ),
    ],
)
async def test_numbers_that_a_run_cannot_have_are_refused(
    index: Index, base: dict[str, Any], rollouts: int, wrong: str
) -> None:
    with pytest.raises(WrongState):
        await request_scale(index, 2)
    await RUN_RECIPE.put(index, recipe(base))
    await index.init(RunConfig(()), {})
    await index.transition([""], "running")
    with pytest.raises(RecipeError, match=wrong):
        await request_scale(index, rollouts)
    assert await SCALE.get(index) is None


def test_further_workers_of_a_run_with_hosts_are_left_to_them() -> None:
    of = recipe(MOCK, **REMOTE)
    for rollouts, remote in ((1, set()), (2, {1}), (4, {1, 2, 3})):
        assert remote_workers(scaled(of, rollouts)) == {("rollout", number) for number in remote}
    assert remote_workers(scaled(recipe(MOCK), 4)) == set()


class Lives:
    """In place of a host's launcher: lives that the test ends."""

    launched: asyncio.Queue[ScriptedLife]

    def __init__(self, *_: Any, **__: Any) -> None:
        """Has no options."""

    async def launch(self, run: str, url: str, kind: str, number: int, name: str) -> ScriptedLife:
        life = ScriptedLife(name)
        self.launched.put_nowait(life)
        return life

    def close(self) -> None:
        """Nothing of it is left."""


@asynccontextmanager
async def hosting(
    index: Index, tmp_path: Path, **changes: Any
) -> AsyncIterator[tuple[hosts.Host, asyncio.Event]]:
    """A host, and the event that stops it. The head of its run is alive and has a warehouse."""
    of = recipe(MOCK, **REMOTE, **changes)
    await index.init(
        flow_of(of).config(of.staleness_plan), {"published": 0, "trained": 0, "admitted": 0}
    )
    await RUN_RECIPE.put(index, of)
    await RUN_PATHS.put(index, RunPaths(tmp_path / "out", tmp_path / "shared", None))
    await SECRET.put(index, b"a secret of sixteen or more")
    await index.transition([""], "running")
    head = Dock(
        index, flow_of(of).schema, worker="head", directory=tmp_path / "shared", warehouse="head"
    )
    (tmp_path / "shared").mkdir()
    await head.join(1 << 20)
    beating = asyncio.create_task(beat(index, HEAD))
    host = hosts.Host(index.url, index.run, tmp_path / "data", serve="127.0.0.1")
    try:
        yield host, asyncio.Event()
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        await head.close()


async def ordered(index: Index, number: int) -> ScriptedLife:
    await ORDERS.append(index, number, Order("rollout", 1, f"rollout-1-{number}", ""))
    return await asyncio.wait_for(Lives.launched.get(), 20)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts start lives that the test ends."""
    monkeypatch.setattr(hosts, "ProcessLauncher", Lives)
    Lives.launched = asyncio.Queue()


@pytest.mark.usefixtures("scripted")
async def test_a_host_whose_workers_left_moves_its_samples_away_and_takes_further_orders(
    index: Index, tmp_path: Path
) -> None:
    async def warehouses(count: int) -> None:
        async with asyncio.timeout(20):
            while len(await index.warehouses()) != count:
                await index.wait(WAREHOUSES, "0", 0.05)  # an end of one wakes nothing

    async with hosting(index, tmp_path) as (host, stop):
        working = asyncio.create_task(host.run(stop))
        try:
            await warehouses(2)
            life = await ordered(index, 0)
            await LEAVE.put(index, True, name=life.name)
            life.code.set_result(0)
            await warehouses(1)
            assert not working.done(), "it takes further orders"
            life = await ordered(index, 1)
            await warehouses(2)
            stop.set()
            await LEAVE.wait(index, 20, name=life.name)
            assert not working.done(), "it waits for what its worker parks"
            life.code.set_result(0)
            await asyncio.wait_for(working, 20)
            assert await ENDING.get(index, name=life.name) == Ending(EndKind.DONE)
            await warehouses(1)
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize("why", ["the run took it for lost", "it was asked to stop"])
async def test_a_host_that_ends_frees_what_its_workers_took_while_they_were_ended(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """A worker of a machine that slept took the only turn to swap before it was killed, and no
    other worker of the run got new weights for as long as a turn may last, 18 minutes."""
    ended = asyncio.Event()
    monkeypatch.setattr(ScriptedLife, "end", lambda life: ended.set())
    async with hosting(index, tmp_path, launch__stop_timeout=0.2) as (host, stop):
        former = host.name
        working = asyncio.create_task(host.run(stop))
        try:
            life = await ordered(index, 0)
            await index.forget_worker(life.name, ended=False)  # by the head
            await END.put(index, True, name=life.name)
            await asyncio.wait_for(ended.wait(), 20)
            assert (await index.take_swap_turn(life.name, most=1, lease=600.0)).granted
            if why == "it was asked to stop":
                stop.set()
            else:
                await IS_LOST.put(index, True, host=former)
                await index.wake(STATE)
            await asyncio.sleep(0.6)  # it sees that, and ends all that it has here
            life.code.set_result(-9)
            async with asyncio.timeout(20):
                while host.name == former and not working.done():  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            assert (await index.take_swap_turn("other", most=1, lease=600.0)).granted
            assert await ENDING.get(index, name=life.name) == Ending(code=-9)
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
