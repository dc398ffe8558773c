"""Training on several ranks: real processes that live and die as one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.runs.synchronous import synchronous_run
from orchestration.event_feed import EventFeed
from orchestration.recipe.flow import flow_of
from orchestration.recipe.problems import RecipeError
from orchestration.recipe.schema import Recipe
from orchestration.recipe.worker_kinds import workers_of
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from orchestration.state.documents import ENDING, RANKS, Ending, EndKind
from orchestration.state.lock import RunError
from orchestration.supervise.supervisor import Outcome, Supervisor
from pipeline.data.events import WorkerEvent
from pipeline.index.client import Index
from tests.orchestration.run.test_run import (
    Weights,
    assert_each_sample_once,
    assert_equal,
    assert_nothing_left,
    synchronous,
    trained,
)
from tests.orchestration.runs import TINY, complete, executing, recipe

NOTICED = 2.0  # seconds, from a kill to the event that reports it: far less than any timeout

Told = tuple[list[tuple[float, float]], Weights]
GANG: dict[str, Any] = {
    "pipeline__staleness": 0,
    "train__dp": 2,
    "train__steps": 6,
    "reward__functions": [{"name": "tests.orchestration.scores:early_letters"}],
    "checkpoint__every": 3,
    "launch__launcher": "process",
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """A run on two ranks: reward and gradient norm of each step, and the weights at the end."""

    async def run() -> Told:
        of = recipe(TINY, **GANG)
        watched, result = await complete(
            Execution(RunFolder.create(of, tmp_path_factory.mktemp("rank_group") / "run"))
        )
        assert result.state == "finished", result.reason
        assert_each_sample_once(of, watched)
        assert_nothing_left(watched.run)
        return [(step["reward_mean"], step["grad_norm"]) for step in watched.of("step")], trained(
            of, result
        )

    return asyncio.run(run())


async def test_with_bound_zero_two_ranks_are_the_synchronous_run_but_for_the_order_of_sums(
    undisturbed: Told,
) -> None:
    """A step's gradient is equal within 1e-5 (relative, float32); AdamW lets that grow a little
    from step to step."""
    reported, weights = undisturbed
    expected = [step async for step in synchronous_run(recipe(TINY, **GANG))]
    assert [reward for reward, _ in reported] == [step.reward_mean for step in expected], (
        "the same samples"
    )
    norms = [step.metrics["grad_norm"] for step in expected]
    assert min(norms) > 0.01
    assert [norm for _, norm in reported] == pytest.approx(norms, rel=1e-4)
    for name, weight in expected[-1].engine.weights():
        assert (weights[name] - weight).norm() < 1e-4 * weight.norm(), name


async def test_any_rank_may_be_killed_and_the_weights_are_those_of_an_undisturbed_run(
    undisturbed: Told, tmp_path: Path
) -> None:
    """Rank 1 between two checkpoints, then rank 0 after the next one: bit for bit, since each rank
    adds up in one order."""
    of = recipe(TINY, **GANG)
    killed = list[float]()
    async with executing(Execution(RunFolder.create(of, tmp_path / "run"))) as (watched, work):
        for steps, worker in ((2, "update-1"), (4, "update-0")):
            await watched.until(lambda: len(watched.of("step")) >= steps)  # noqa: B023
            assert watched.run.supervisor is not None
            os.kill(watched.run.supervisor.pids()[worker], signal.SIGKILL)
            killed.append(time.time())
            await watched.until(
                lambda worker=worker: (
                    [w["worker"] for w in watched.of("worker") if w["change"] == "died"][-1:]
                    == [worker]
                )
            )
        result = await work
        assert watched.run.supervisor.restarts == 2, "one for each rank_group, not for each rank"
    assert result.state == "finished", result.reason
    told_of = [
        event
        for event in watched.events
        if event.kind == "worker" and event.data["change"] == "died"
    ]
    for at, event in zip(killed, told_of, strict=True):
        assert event.time - at < NOTICED, (
            f"{event.data['worker']} was dead for {event.time - at:.1f} s before anybody knew"
        )
    deaths = [(event.data["worker"], event.data["reason"]) for event in told_of]
    assert deaths == [(worker, "ended by signal 9") for worker in ("update-1", "update-0")]
    assert_each_sample_once(of, watched)
    assert_nothing_left(watched.run)
    reported, weights = undisturbed
    assert [(step["reward_mean"], step["grad_norm"]) for step in watched.of("step")] == reported
    assert_equal(trained(of, result), weights)


async def test_ranks_that_divide_tokens_train_a_run_and_die_together(tmp_path: Path) -> None:
    """By the recipe's keys; the samples and, but for the order of sums, the gradients are those of
    one process."""
    of = recipe(TINY, **{**GANG, "train__dp": 1, "train__cp": 2, "train__context_parallel": "ring"})
    async with executing(Execution(RunFolder.create(of, tmp_path / "run"))) as (watched, work):
        await watched.until(lambda: len(watched.of("step")) >= 2)
        assert watched.run.supervisor is not None
        os.kill(watched.run.supervisor.pids()["update-1"], signal.SIGKILL)
        result = await work
        assert watched.run.supervisor.restarts == 1
    assert result.state == "finished", result.reason
    assert_each_sample_once(of, watched)
    assert_nothing_left(watched.run)
    expected = [step async for step in synchronous_run(recipe(TINY, **{**GANG, "train__dp": 1}))]
    found = [(step["reward_mean"], step["grad_norm"]) for step in watched.of("step")]
    for got, wanted in zip(found, expected, strict=True):
        assert got == pytest.approx((wanted.reward_mean, wanted.metrics["grad_norm"]), rel=1e-4)


async def test_a_run_of_one_process_is_resumed_on_two_ranks(tmp_path: Path) -> None:
    """Cut otherwise, this time by tensor parallelism; what it computes may not change."""
    of = recipe(TINY, **{**GANG, "train__dp": 1, "launch__launcher": "inline"})
    expected = [step async for step in synchronous_run(of)]
    async with executing(Execution(RunFolder.create(of, tmp_path / "run"))) as (watched, work):
        await watched.until(lambda: len(watched.of("step")) >= 4)
        watched.stop.set()
        assert (await work).state == "stopped"
    before = {step["step"]: step["grad_norm"] for step in watched.of("step")}
    with pytest.raises(
        RecipeError,
        match=r"train.groups_per_step = 2: cannot change in a resumed "
        r"run: the gate",
    ):
        Execution(RunFolder.resume(tmp_path / "run", ["train.groups_per_step=2"]))
    with pytest.raises(
        RecipeError,
        match=r"launch.launcher = \"inline\": keeps all workers in one "
        r"process",
    ):
        Execution(RunFolder.resume(tmp_path / "run", ["train.tp=2"]))
    resumed = Execution(
        RunFolder.resume(tmp_path / "run", ["train.tp=2", "launch.launcher=process"])
    )
    assert resumed.folder.start is not None
    assert resumed.folder.start.version == len(before)
    watched, result = await complete(resumed)
    assert result.state == "finished", result.reason
    reported = before | {step["step"]: step["grad_norm"] for step in watched.of("step")}
    assert [reported[step] for step in range(1, 7)] == pytest.approx(
        [s.metrics["grad_norm"] for s in expected], rel=1e-4
    )
    assert min(reported.values()) > 0.01
    weights = trained(resumed.recipe, result)
    for name, weight in expected[-1].engine.weights():
        assert (weights[name] - weight).norm() < 1e-4 * weight.norm(), name
    with pytest.raises(RunError, match="nothing to resume"):
        Execution(RunFolder.resume(tmp_path / "run", ["train.tp=1"]))


async def test_a_run_of_two_ranks_is_resumed_in_one_process(
    undisturbed: Told, tmp_path: Path
) -> None:
    """The other way round: shards of two ranks become one process's whole tensors."""
    of = recipe(TINY, **GANG)
    async with executing(Execution(RunFolder.create(of, tmp_path / "run"))) as (watched, work):
        await watched.until(lambda: len(watched.of("step")) >= 4)
        watched.stop.set()
        assert (await work).state == "stopped"
    before = {step["step"]: step["grad_norm"] for step in watched.of("step")}
    resumed = Execution(
        RunFolder.resume(tmp_path / "run", ["train.dp=1", "launch.launcher=inline"])
    )
    assert resumed.folder.start is not None
    first = resumed.folder.start.version
    watched, result = await complete(resumed)
    assert result.state == "finished", result.reason
    after = {step["step"]: step["grad_norm"] for step in watched.of("step")}
    assert sorted(after) == list(range(first + 1, 7))
    assert first == len(before), "both ranks have written their shards when it was stopped"
    reported, weights = undisturbed
    assert [(before | after)[step] for step in range(1, 7)] == pytest.approx(
        [norm for _, norm in reported], rel=1e-4
    )
    for name, weight in trained(resumed.recipe, result).items():
        assert (weights[name] - weight).norm() < 1e-4 * weights[name].norm(), name


async def test_mixed_precision_on_one_rank_is_the_synchronous_run_bit_for_bit(
    tmp_path: Path,
) -> None:
    settings = {"pipeline__staleness": 0, "model__dtype": "bfloat16", "train__precision": "mixed"}
    of = recipe(TINY, **settings, reward__functions=GANG["reward__functions"])
    expected, weights = await synchronous(of)
    watched, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert result.state == "finished", result.reason
    assert [(step["reward_mean"], step["loss"]) for step in watched.of("step")] == expected
    assert min(step["grad_norm"] for step in watched.of("step")) > 0.01
    assert result.checkpoint is not None
    saved = load_file(result.checkpoint.model / "model.safetensors")
    assert {value.dtype for value in saved.values()} == {torch.bfloat16}
    assert_equal(saved, weights)


@pytest.mark.parametrize("section", ["train", "rollout"])
async def test_a_device_that_is_not_here_fails_the_run_at_once(
    section: str, tmp_path: Path
) -> None:
    # a check finds this out before; an agent on another machine than the check's does not
    of = recipe(TINY)
    of = of.model_copy(update={section: getattr(of, section).model_copy(update={"device": "hpu"})})
    watched, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert result.state == "failed"
    assert "DeviceMissing: device 'hpu'" in result.reason
    assert not [w for w in watched.of("worker") if w["change"] == "restarted"]


def test_each_rank_is_a_worker() -> None:
    of = recipe(TINY, train__dp=2, launch__launcher="process")
    assert [worker for worker in workers_of(of) if worker[0] == "update"] == [
        ("update", 0),
        ("update", 1),
    ]


# --- the supervisor's part, with scripted workers
# --------------------------------------------------------------------


class ScriptedLife:
    orphaned: object = None

    def __init__(self, name: str) -> None:
        self.name = name
        self.pid = 0
        self.killed = False
        self.code: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def wait(self) -> int:
        return await asyncio.shield(self.code)

    def end(self) -> None:
        if not self.code.done():
            self.killed = True
            self.code.set_result(-9)


class ScriptedLauncher:
    """Launches lives that end when the test sets their exit code; the launched ones come out of
    ``lives`` in order. Those named in ``late`` are never ready."""

    def __init__(self, index: Index, late: Sequence[str] = ()) -> None:
        self.index = index
        self.late = late
        self.lives = asyncio.Queue[tuple[str, int, ScriptedLife]]()

    async def launch(self, run: str, url: str, kind: str, number: int, name: str) -> ScriptedLife:
        life = ScriptedLife(name)
        if f"{kind}-{number}" not in self.late:
            await self.index.emit(
                WorkerEvent(stage=kind, worker=f"{kind}-{number}", change="ready")
            )
        self.lives.put_nowait((kind, number, life))
        return life

    def rescale(self, recipe: Recipe) -> None:
        """It launches any worker."""

    def close(self) -> None:
        """Nothing of it is left."""

    async def next(self, count: int) -> dict[str, ScriptedLife]:
        async with asyncio.timeout(20):
            found = [await self.lives.get() for _ in range(count)]
        return {f"{kind}-{number}": life for kind, number, life in found}


async def supervise(index: Index, launcher: Any, of: Recipe) -> tuple[Supervisor, Any]:
    """A supervisor of a new run of ``of``, and its work, to be awaited."""
    feeds = contextlib.AsyncExitStack()
    feed = await feeds.enter_async_context(EventFeed.reading(index))
    supervisor = Supervisor(index, launcher, of, feed, begins=0)

    async def work() -> Outcome:
        async with feeds:
            return await supervisor.run(asyncio.Event())

    return supervisor, work()


@pytest.fixture
async def supervised(
    index: Index,
) -> AsyncIterator[tuple[Supervisor, ScriptedLauncher, asyncio.Task[Outcome]]]:
    limits = {
        "launch__max_restarts": 2,
        "launch__startup_timeout": 20.0,
        "launch__stop_timeout": 0.2,
    }
    of = recipe(TINY, external__stages=["rollout"], **limits)
    # Unchecked, as a small machine has fewer cores.
    of = of.model_copy(update={"train": of.train.model_copy(update={"dp": 3})})
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


async def test_a_rank_that_dies_takes_the_others_along_for_one_restart(
    supervised: Any, index: Index
) -> None:
    supervisor, launcher, work = supervised
    lives = await launcher.next(4)
    name = await RANKS.get(index, kind="update")
    assert name == lives["update-0"].name
    lives["update-2"].code.set_result(1)
    again = await launcher.next(3)
    assert sorted(again) == ["update-0", "update-1", "update-2"]
    assert [life.killed for life in lives.values()] == [False, True, True, False], "flow-0 goes on"
    assert supervisor.restarts == 1
    assert await RANKS.get(index, kind="update") == again["update-0"].name != name
    for life in again.values():
        life.code.set_result(0)
    assert (await work).state == "finished"


async def test_ranks_may_end_one_after_the_other(supervised: Any) -> None:
    supervisor, launcher, work = supervised
    lives = await launcher.next(4)
    lives["update-1"].code.set_result(0)
    lives["update-0"].code.set_result(0)
    assert not (await asyncio.wait([work], timeout=0.3))[0]
    lives["update-2"].code.set_result(0)
    assert (await work).state == "finished"
    assert supervisor.restarts == 0


async def test_a_fault_of_any_rank_that_no_restart_mends_fails_the_run(
    supervised: Any, index: Index
) -> None:
    supervisor, launcher, work = supervised
    lives = await launcher.next(4)
    refused = Ending(reason="ColumnError: a wrong column")
    await ENDING.put(index, refused, name=lives["update-1"].name)
    orphaned = Ending(reason="RuntimeError: connection closed by peer")
    await ENDING.put(index, orphaned, name=lives["update-0"].name)
    lives["update-0"].code.set_result(1)
    lives["update-1"].code.set_result(EndKind.FATAL)
    outcome = await work
    assert outcome == Outcome("failed", "update-1: ColumnError: a wrong column")
    assert supervisor.restarts == 0


async def test_a_gang_that_dies_too_often_fails_with_the_reason_of_the_first_to_die(
    supervised: Any,
) -> None:
    _, launcher, work = supervised
    lives = await launcher.next(4)
    for _ in range(2):
        lives["update-1"].code.set_result(-11)
        lives = await launcher.next(3)
    lives["update-1"].code.set_result(-11)
    assert (await work).reason == (
        "update-1 died and launch.max_restarts = 2 is used up: ended by signal 11"
    )
    assert all(life.code.done() for life in lives.values())
