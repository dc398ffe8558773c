"""A run's promises, with real engines, real processes and real kills."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from benchmarks.runs.synchronous import synchronous_run
from orchestration.checkpoints import checkpoint
from orchestration.launch import launchers
from orchestration.processes.forkserver import ForkServer, Launch
from orchestration.processes.leftovers import sweep_leftovers
from orchestration.recipe.models import tokenizer_of
from orchestration.recipe.schema import Recipe
from orchestration.run.execution import Execution, RunResult
from orchestration.run.folder import RunFolder
from orchestration.state.lock import RunError
from orchestration.state.paths import WHERE
from orchestration.workers.engines import train_engine
from pipeline.data.arena import WarehouseUnreachable, shared_memory_directory
from pipeline.index.client import RunConfig
from pipeline.warehouse.dock import Dock
from stages.engines.mock.engines import MockRolloutEngine
from stages.engines.protocols import SwapTimes
from stages.rollout.weight_follower import ATTEMPTS
from stages.weights.published import Published, WeightsDamaged
from stages.weights.transport.store import WeightStore
from tests.orchestration.runs import MOCK, TINY, Watched, complete, executing, recipe
from tests.servers import self_signed
from tests.stages.rollout.test_weight_follower import Faulty

Weights = dict[str, torch.Tensor]


async def synchronous(of: Recipe) -> tuple[list[tuple[float, float]], Weights]:
    """Reward and loss of each step of the plain loop, and its weights at the end."""
    reported = []
    weights = {}
    async for step in synchronous_run(of):
        reported.append((step.reward_mean, step.metrics["loss"]))
        weights = {name: value.clone() for name, value in step.engine.weights()}
    return reported, weights


def trained(of: Recipe, result: RunResult) -> Weights:
    """The weights that the run's last checkpoint holds."""
    assert result.checkpoint is not None
    assert result.checkpoint.version == of.train.steps
    return weights_of(of, result.checkpoint)


def weights_of(of: Recipe, saved: checkpoint.Checkpoint) -> Weights:
    engine = train_engine(of)
    saved.load_into(engine)
    return {name: value.clone() for name, value in engine.weights()}


def assert_equal(a: Weights, b: Weights) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def assert_each_sample_once(of: Recipe, watched: Watched) -> None:
    steps = of.train.steps
    per_step = of.train.groups_per_step
    size = of.algorithm.group_size
    reported = watched.of("step")
    assert [step["step"] for step in reported] == list(range(1, steps + 1))
    groups = [group for step in reported for group in step["groups"]]
    assert sorted(groups) == list(range(steps * per_step)), "a group was trained twice, or never"
    for step in reported:
        assert step["rows"] == per_step * size
        assert step["staleness_max"] <= of.pipeline.staleness
    ledgers = watched.of("ledger")
    for ledger in ledgers:
        for unit in ("", "_tokens", "_turns"):
            parts = ("trained", "filtered", "in_flight")
            closed = sum(ledger.get(f"{part}{unit}", 0) for part in parts)
            assert ledger.get(f"generated{unit}", 0) == closed, ledger
    assert ledgers[-1]["trained"] == steps * per_step * size
    assert ledgers[-1]["in_flight"] == 0


def assert_nothing_left(run: Execution) -> None:
    assert not run.folder.shared.exists()
    assert not list(shared_memory_directory().glob(f"asyncdock-*{run.folder.run_id}*"))
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert run.folder.run_id.encode() not in process.read_bytes(), (
                f"process {process.parent.name} is left"
            )
        except (FileNotFoundError, ProcessLookupError):
            continue


@pytest.mark.parametrize("launcher", ["inline", "process"])
async def test_with_bound_zero_it_is_the_synchronous_run_bit_for_bit(
    launcher: str, tmp_path: Path
) -> None:
    settings: dict[str, Any] = (
        {"evaluate__every": 2, "evaluate__prompts": 4} if launcher == "process" else {}
    )
    of = recipe(TINY, pipeline__staleness=0, launch__launcher=launcher, **settings)
    expected, weights = await synchronous(of)
    watched, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert result.state == "finished", result.reason
    assert [(step["reward_mean"], step["loss"]) for step in watched.of("step")] == expected
    for step in watched.of("step"):  # two engines never round alike, and hardly differ
        assert 0 <= step["gap_mean"] <= step["gap_max"] < 1e-4
        assert 0 <= abs(step["gap_k3"]) < 1e-6
    assert max(step["gap_max"] for step in watched.of("step")) > 0
    assert_equal(trained(of, result), weights)
    assert_nothing_left(watched.run)


async def test_with_a_reference_too(tmp_path: Path) -> None:
    of = recipe(TINY, pipeline__staleness=0, algorithm__options={"kl_coef": 0.1})
    expected, weights = await synchronous(of)
    watched, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert result.state == "finished", result.reason
    assert [(step["reward_mean"], step["loss"]) for step in watched.of("step")] == expected
    assert watched.of("step")[-1]["kl_reference"] > 0
    assert_equal(trained(of, result), weights)


@pytest.mark.parametrize(("staleness", "window"), [(1, 1), (2, 1), (2, 3)])
async def test_the_bound_is_reached_and_never_passed(
    staleness: int, window: int, tmp_path: Path
) -> None:
    of = recipe(MOCK, pipeline__staleness=staleness, pipeline__window=window, train__steps=12)
    watched, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert result.state == "finished", result.reason
    assert_each_sample_once(of, watched)
    assert max(step["staleness_max"] for step in watched.of("step")) >= 1, "nothing ever overlapped"


async def test_a_sabotaged_gate_is_caught_where_samples_are_consumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = RunConfig.packed
    monkeypatch.setattr(RunConfig, "packed", lambda self: {**packed(self), "slack": 5})
    of = recipe(MOCK, pipeline__staleness=1, train__steps=12)
    watched, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert result.state == "failed"
    assert "BoundBroken" in result.reason
    assert all(step["staleness_max"] <= 1 for step in watched.of("step"))
    assert_nothing_left(watched.run)


async def test_any_worker_may_be_killed_and_each_sample_is_trained_once(tmp_path: Path) -> None:
    of = recipe(TINY, train__steps=14, checkpoint__every=5, launch__launcher="process")
    async with executing(Execution(RunFolder.create(of, tmp_path / "run"))) as (watched, work):
        for number, worker in enumerate(("update-0", "rollout-0", "flow-0")):
            await watched.until(lambda: len(watched.of("step")) >= 3 * number + 2)  # noqa: B023
            assert watched.run.supervisor is not None
            os.kill(watched.run.supervisor.pids()[worker], signal.SIGKILL)
            died = number + 1
            await watched.until(
                lambda: sum(w["change"] == "died" for w in watched.of("worker")) >= died  # noqa: B023
            )
        result = await work
    assert result.state == "finished", result.reason
    assert [w["worker"] for w in watched.of("worker") if w["change"] == "died"] == [
        "update-0",
        "rollout-0",
        "flow-0",
    ]
    assert "signal 9" in next(w["reason"] for w in watched.of("worker") if w["change"] == "died")
    assert_each_sample_once(of, watched)
    assert_nothing_left(watched.run)


STEERED = {"entropy_target": 1.5, "entropy_coef": 0.01, "high_entropy_share": 0.5}


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("grpo", {}),
        ("pf_ppo", {}),
        ("shuffle_r1", {"mini_batches": 2, **STEERED}),
        ("process_grpo", {"kl_coef": 0.01}),
    ],
)
async def test_a_killed_trainer_replays_to_the_very_weights_it_lost(
    tmp_path: Path, algorithm: str, options: dict[str, Any]
) -> None:
    """Also what an algorithm keeps from step to step, and what it draws."""
    changes: dict[str, Any] = {
        "train__steps": 8,
        "checkpoint__every": 3,
        "algorithm__name": algorithm,
        "algorithm__options": options,
    }
    if algorithm == "process_grpo":
        changes["reward__functions"] = [{"name": "tests.orchestration.scores:letter_by_letter"}]
    of = recipe(TINY, pipeline__staleness=0, launch__launcher="process", **changes)
    expected, weights = await synchronous(of)
    async with executing(Execution(RunFolder.create(of, tmp_path / "run"))) as (watched, work):
        # past a checkpoint, with two steps to replay
        await watched.until(lambda: len(watched.of("step")) >= 5)
        assert watched.run.supervisor is not None
        os.kill(watched.run.supervisor.pids()["update-0"], signal.SIGKILL)
        result = await work
    assert result.state == "finished", result.reason
    assert [(step["reward_mean"], step["loss"]) for step in watched.of("step")] == expected
    assert_equal(trained(of, result), weights)


SLOW_DISK = """
import os, re, time
from pathlib import Path

fsync, here, slow_ones = os.fsync, Path(__file__).parent, []

def slow(descriptor):
    found = re.search("step-0*([0-9]+).partial", os.readlink(f"/proc/self/fd/{descriptor}"))
    if found and int(found[1]) >= 4:
        if found[1] not in slow_ones:
            slow_ones.append(found[1])
        which = "first" if found[1] == slow_ones[0] else "second"
        (here / which).touch()
        while not (here / f"{which} released").exists():
            time.sleep(0.01)
    fsync(descriptor)

os.fsync = slow
"""


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


async def test_a_checkpoint_that_is_due_while_one_is_written_waits_and_training_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk takes for ever with a checkpoint: steps are made meanwhile, past those after which
    the next ones are due. In that state nothing is lost by a kill, either."""
    (tmp_path / "sitecustomize.py").write_text(SLOW_DISK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    changes = {"checkpoint__every": 2, "checkpoint__keep": 1, "launch__launcher": "process"}
    of = recipe(TINY, pipeline__staleness=0, train__steps=16, **changes)
    expected, weights = await synchronous(of)
    run = Execution(RunFolder.create(of, tmp_path / "run"))
    checkpoints = tmp_path / "run" / "checkpoints"

    def names() -> list[str]:
        return sorted(path.name for path in checkpoints.iterdir())

    run.forks = await asyncio.to_thread(ForkServer.start)
    try:
        async with executing(run) as (watched, work):
            await asyncio.to_thread(wait_for, tmp_path / "first")
            made = len(watched.of("step"))
            await watched.until(lambda: len(watched.of("step")) >= made + 5)
            before, _ = names()
            (tmp_path / "first released").touch()
            await asyncio.to_thread(wait_for, tmp_path / "second")
            await watched.until(lambda: len(watched.of("step")) == 16)
            partial, whole = names()
            assert f".{whole}.partial" == before
            assert watched.run.supervisor is not None
            os.kill(watched.run.supervisor.pids()["update-0"], signal.SIGKILL)
            (tmp_path / "second released").touch()
            result = await work
    finally:
        run.forks.close()
    assert result.state == "finished", result.reason
    assert [(step["reward_mean"], step["loss"]) for step in watched.of("step")] == expected
    assert_equal(trained(of, result), weights)
    written = [event["version"] for event in watched.of("checkpoint")]
    slow, next_one = (int(name[6:14]) for name in (before, partial))
    assert written[-2:] == [slow, 16]
    assert next_one >= slow + 4, (
        "of those that were due meanwhile, one was begun: of the newest version"
    )
    assert names() == ["step-00000016"]


async def test_training_waits_for_a_checkpoint_when_samples_may_fill_the_arena(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()
    finish = checkpoint.finish

    def slow(*given: Any) -> checkpoint.Checkpoint:
        released.wait(60)
        return finish(*given)

    monkeypatch.setattr(checkpoint, "finish", slow)
    sized = recipe(MOCK, checkpoint__every=1, train__steps=8)
    monkeypatch.setattr("orchestration.workers.update.share_of_trained", lambda of: 0.0)
    async with executing(Execution(RunFolder.create(sized, tmp_path / "run"))) as (watched, work):
        await watched.until(lambda: len(watched.of("step")) == 2)
        await asyncio.wait([work], timeout=0.5)
        assert len(watched.of("step")) == 2, "the second checkpoint waits for the first"
        released.set()
        result = await work
    assert result.state == "finished", result.reason
    assert [event["version"] for event in watched.of("checkpoint")] == list(range(1, 9))


async def test_a_killed_index_comes_back_with_all_that_was_acknowledged(tmp_path: Path) -> None:
    of = recipe(MOCK, train__steps=30)
    async with executing(Execution(RunFolder.create(of, tmp_path / "run"))) as (watched, work):
        await watched.until(lambda: len(watched.of("step")) >= 3)
        assert watched.run.supervisor is not None
        assert watched.run.index.server is not None
        assert watched.run.index.server.pid is not None
        os.kill(watched.run.index.server.pid, signal.SIGKILL)
        result = await work
    assert result.state == "finished", result.reason
    assert_each_sample_once(of, watched)


async def test_a_stopped_run_resumes_and_ends_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    of = recipe(TINY, pipeline__staleness=0, train__steps=8, checkpoint__every=3)
    _, weights = await synchronous(of)
    async with executing(Execution(RunFolder.create(of, tmp_path / "run"))) as (watched, work):
        await watched.until(lambda: len(watched.of("step")) >= 4)
        watched.stop.set()
        result = await work
    assert (result.state, result.reason) == ("stopped", "stopped by request")
    assert_nothing_left(watched.run)
    resumed = Execution(RunFolder.resume(tmp_path / "run"))
    assert resumed.folder.start is not None
    began = resumed.folder.start.version
    assert began == len(watched.of("step")), (
        "what was trained is in a checkpoint, although 3 and 6 are the regular ones"
    )
    watched, result = await complete(resumed)
    assert result.state == "finished", result.reason
    assert [step["step"] for step in watched.of("step")] == list(range(began + 1, 9))
    assert watched.of("ledger")[-1]["trained"] == 8 * 4 * 4
    assert_equal(trained(of, result), weights)
    with pytest.raises(RunError, match="nothing to resume"):
        Execution(RunFolder.resume(tmp_path / "run"))


async def test_a_resumed_run_makes_what_was_in_flight_again(tmp_path: Path) -> None:
    of = recipe(
        MOCK, pipeline__staleness=2, pipeline__window=3, train__steps=12, checkpoint__every=2
    )
    async with executing(Execution(RunFolder.create(of, tmp_path / "run"))) as (watched, work):
        await watched.until(lambda: len(watched.of("step")) >= 7)
        watched.stop.set()
        assert (await work).state == "stopped"
    resumed = Execution(RunFolder.resume(tmp_path / "run"))
    assert resumed.folder.start is not None
    assert resumed.folder.start.version == len(watched.of("step"))
    kept = [step for step in watched.of("step") if step["step"] <= resumed.folder.start.version]
    watched, result = await complete(resumed)
    assert result.state == "finished", result.reason
    groups = [group for step in [*kept, *watched.of("step")] for group in step["groups"]]
    assert sorted(groups) == list(range(12 * 4))


async def test_pause_holds_and_resume_goes_on(tmp_path: Path) -> None:
    of = recipe(MOCK, train__steps=12)
    async with executing(Execution(RunFolder.create(of, tmp_path / "run"))) as (watched, work):
        await watched.until(lambda: len(watched.of("step")) >= 2)
        await watched.move("running", "paused")
        paused_at = len(watched.of("step"))
        await asyncio.wait([work], timeout=0.7)
        assert not work.done()
        assert len(watched.of("step")) <= paused_at + 2, "what was in flight may end, no more"
        await watched.move("paused", "running")
        result = await work
    assert result.state == "finished", result.reason
    assert_each_sample_once(of, watched)


@pytest.mark.parametrize("version", [3, 6], ids=["between", "last"])
@pytest.mark.parametrize("times", [1, 99], ids=["once", "always"])
async def test_weights_corrupted_in_shared_memory_are_never_loaded_but_published_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int, version: int
) -> None:
    publish = WeightStore.publish
    damaged = list[int]()

    def corrupting(self: WeightStore, number: int, weights: Any, probe: Any = None) -> Published:
        published = publish(self, number, weights, probe)
        if number == version and len(damaged) < times:
            damaged.append(number)
            self._open(published.slot, published.nbytes)[100] ^= 1
        return published

    monkeypatch.setattr(WeightStore, "publish", corrupting)
    of = recipe(MOCK, train__steps=6, pipeline__staleness=0, launch__max_restarts=1)
    watched, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    changes = [
        (event.kind, event.data.get("change"), event.data.get("version"))
        for event in watched.events
    ]
    syncs = [event for event in changes if event[0] == "sync"]
    if times == 1:
        assert result.state == "finished", result.reason
        assert syncs[2 * version - 2 : 2 * version + 1] == [("sync", None, version)] * 3, (
            "published twice, taken once"
        )
        kept = changes.index(("worker", "kept its weights", None))
        assert (
            changes.index(("sync", None, version))
            < kept
            < max(at for at, event in enumerate(changes) if event == ("sync", None, version))
        )
        assert_each_sample_once(of, watched)
        return
    assert result.state == "failed"
    assert f"weights of version {version}: rollout-0 has found them damaged" in result.reason
    assert len(watched.of("step")) == version, "nothing was generated with them"
    assert [w["change"] for w in watched.of("worker")].count("kept its weights") >= 2
    assert_nothing_left(watched.run)


@pytest.mark.parametrize("fault", ["corrupts a byte", "drops a bucket", "stalls"])
async def test_a_torch_run_goes_on_after_a_failing_transport_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    released = threading.Event()

    def reader(of: Recipe, shared: Path, secret: bytes) -> WeightStore:
        return Faulty(shared, fault, 1, released, since=2)

    monkeypatch.setattr("orchestration.workers.rollout.weight_reader", reader)

    def publisher(of: Recipe, shared: Path, *_: object) -> WeightStore:
        return WeightStore(shared, bucket_bytes=4096)

    monkeypatch.setattr("orchestration.workers.update.weight_publisher", publisher)
    timeout = 3.0 if fault == "stalls" else 60.0
    of = recipe(
        TINY, train__steps=4, pipeline__staleness=0, launch__max_restarts=0, sync__timeout=timeout
    )
    expected, weights = await synchronous(of)
    async with executing(Execution(RunFolder.create(of, tmp_path / "run"))) as (watched, work):
        await watched.until(
            lambda: "kept its weights" in [w["change"] for w in watched.of("worker")]
        )
        released.set()
        result = await asyncio.wait_for(work, 120)
    assert result.state == "finished", result.reason
    (kept,) = [w for w in watched.of("worker") if w["change"] == "kept its weights"]
    assert "weights of version 2: " in kept["reason"]
    assert ("sync.timeout = 3 s" if fault == "stalls" else "does not match its checksum") in kept[
        "reason"
    ]
    assert [s["version"] for s in watched.of("sync") if s["worker"] == "rollout-0"] == [1, 2, 3, 4]
    assert [(step["reward_mean"], step["loss"]) for step in watched.of("step")] == expected
    assert_equal(trained(of, result), weights)
    assert_nothing_left(watched.run)


async def test_weights_damaged_on_their_way_into_an_engine_are_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = MockRolloutEngine.load_weights
    damaged = [3]

    async def fragile(
        self: MockRolloutEngine, version: int, weights: Any, **options: Any
    ) -> SwapTimes:
        if version in damaged:
            damaged.remove(version)
            raise WeightsDamaged("bucket 0 does not match its checksum")
        return await load(self, version, weights, **options)

    monkeypatch.setattr(MockRolloutEngine, "load_weights", fragile)
    of = recipe(MOCK, train__steps=6, pipeline__staleness=0, launch__max_restarts=0)
    watched, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert result.state == "finished", result.reason
    assert [w["change"] for w in watched.of("worker")].count("kept its weights") == 1
    assert_each_sample_once(of, watched)


STUCK = """
import threading
from pathlib import Path
from orchestration.workers.worker import main
from stages.weights.transport.store import WeightStore
first = Path({first!r})
if not first.exists():
    first.touch()
    WeightStore.read = lambda self, published: threading.Event().wait()
main({arguments!r})
"""


async def test_a_worker_whose_reading_never_returns_ends_and_its_successor_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that does not answer, in the first life of the rollout worker: its process must not
    wait for it."""

    def launch(
        entry: str, arguments: list[str], env: dict[str, str], *where: str, **options: Any
    ) -> Launch:
        if "rollout" not in arguments:
            return Launch(entry, arguments, env, *where, **options)
        return Launch(
            "builtins:exec",
            STUCK.format(first=str(tmp_path / "first"), arguments=arguments),
            env,
            *where,
        )

    monkeypatch.setattr(launchers, "Launch", launch)
    of = recipe(
        MOCK,
        launch__launcher="process",
        launch__max_restarts=1,
        sync__timeout=0.3,
        pipeline__staleness=0,
    )
    async with executing(Execution(RunFolder.create(of, tmp_path / "run"))) as (watched, work):
        result = await asyncio.wait_for(work, 120)
    assert result.state == "finished", result.reason
    reported = [w for w in watched.of("worker") if w["worker"] == "rollout-0"]
    assert [w["change"] for w in reported].count("died") == 1
    assert (
        sum("still reading" in w["reason"] for w in reported if w["change"] == "kept its weights")
        == ATTEMPTS - 1
    )
    assert_each_sample_once(of, watched)
    assert_nothing_left(watched.run)


async def test_leases_far_shorter_than_the_work_are_renewed_and_end_where_they_should(
    tmp_path: Path,
) -> None:
    of = recipe(MOCK, train__steps=20, pipeline__lease_seconds=0.15, checkpoint__every=1)
    async with executing(Execution(RunFolder.create(of, tmp_path / "run"))) as (watched, work):
        result = await asyncio.wait_for(work, 60)
    assert result.state == "finished", result.reason
    assert_each_sample_once(of, watched)


async def test_a_run_that_cannot_go_on_fails_with_its_reason(tmp_path: Path) -> None:
    of = recipe(MOCK, reward__functions=[{"name": "tests.orchestration.scores:boom"}])
    watched, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert result.state == "failed"
    assert "the reward's own mistake" in result.reason
    assert watched.of("state")[-1]["reason"] == result.reason
    assert_nothing_left(watched.run)


async def test_a_worker_that_dies_again_and_again_fails_the_run(tmp_path: Path) -> None:
    of = recipe(MOCK, train__steps=500, launch__max_restarts=1, launch__launcher="process")
    async with executing(Execution(RunFolder.create(of, tmp_path / "run"))) as (watched, work):
        for deaths in (1, 2):
            await watched.until(
                lambda deaths=deaths: (
                    sum(w["change"] == "ready" for w in watched.of("worker")) >= 2 + deaths
                )
            )
            assert watched.run.supervisor is not None
            os.kill(watched.run.supervisor.pids()["flow-0"], signal.SIGKILL)
        result = await work
    assert result.state == "failed"
    assert "flow-0 died and launch.max_restarts = 1 is used up: ended by signal 9" in result.reason
    assert_nothing_left(watched.run)


async def test_a_killed_fork_server_takes_all_workers_along_for_one_restart(tmp_path: Path) -> None:
    of = recipe(MOCK, train__steps=30, launch__max_restarts=1, launch__launcher="process")
    run = Execution(RunFolder.create(of, tmp_path / "run"))
    with contextlib.closing(ForkServer.start()) as run.forks:
        async with executing(run) as (watched, work):
            await watched.until(lambda: len(watched.of("step")) >= 2)
            os.kill(run.forks.pid, signal.SIGKILL)
            result = await work
    assert result.state == "finished", result.reason
    died = [w for w in watched.of("worker") if w["change"] == "died"]
    assert {w["worker"]: w["reason"] for w in died} == dict.fromkeys(
        ("flow-0", "rollout-0", "update-0"), "its fork server has ended"
    )
    assert_each_sample_once(of, watched)
    assert_nothing_left(run)


async def test_workers_may_start_from_nothing(tmp_path: Path) -> None:
    of = recipe(MOCK, train__steps=2, launch__launcher="process", launch__start_method="spawn")
    async with executing(Execution(RunFolder.create(of, tmp_path / "run"))) as (watched, work):
        await watched.until(lambda: any(w["change"] == "ready" for w in watched.of("worker")))
        assert watched.run.supervisor is not None
        pids = watched.run.supervisor.pids()
        assert {psutil.Process(pid).ppid() for pid in pids.values()} == {os.getpid()}
        result = await work
    assert result.state == "finished", result.reason
    assert_nothing_left(watched.run)


async def test_two_runs_at_once_do_not_meet(tmp_path: Path) -> None:
    of = recipe(MOCK)
    (first, a), (second, b) = await asyncio.gather(
        complete(Execution(RunFolder.create(of, tmp_path / "a"))),
        complete(Execution(RunFolder.create(of, tmp_path / "b"))),
    )
    assert a.state == b.state == "finished"
    for watched in (first, second):
        assert_each_sample_once(of, watched)


async def test_a_cancelled_run_leaves_nothing(tmp_path: Path) -> None:
    of = recipe(MOCK, train__steps=500, launch__launcher="process")
    run = Execution(RunFolder.create(of, tmp_path / "run"))
    async with executing(run) as (watched, work):
        await watched.until(lambda: len(watched.of("step")) >= 1)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        assert_nothing_left(run)


ORPHAN = """
import asyncio, sys
from pathlib import Path
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from tests.orchestration.runs import MOCK, executing, recipe
async def main():
    of = recipe(MOCK, train__steps=5000, launch__launcher="process")
    async with executing(Execution(RunFolder.create(of, Path(sys.argv[1])))) as (watched, work):
        await watched.until(lambda: len(watched.of("step")) >= 1)
        print(watched.run.folder.run_id, flush=True)
        await work
asyncio.run(main())
"""


@pytest.fixture
def temporary_home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for temporary files of this test alone: any run that another test starts sweeps the
    common one."""
    with tempfile.TemporaryDirectory(prefix="adk-") as home:
        monkeypatch.setenv("TMPDIR", home)
        monkeypatch.setattr(tempfile, "tempdir", home)
        yield Path(home)


def test_a_killed_supervisor_takes_its_workers_along(tmp_path: Path, temporary_home: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", ORPHAN, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    run_id = process.stdout.readline().strip()
    assert run_id
    workers = [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if run_id.encode() in path.read_bytes()
    ]
    assert len(workers) == 3
    process.kill()
    process.wait()
    for worker in workers:
        waited = subprocess.run(
            ["tail", f"--pid={worker}", "-f", "/dev/null"], timeout=20, check=False
        )
        assert waited.returncode == 0
    homes = [shared_memory_directory(), temporary_home]  # its arena, and its index's socket
    assert all(list(home.glob(f"asyncdock-{process.pid}-*")) for home in homes)
    sweep_leftovers()
    assert not any(list(home.glob(f"asyncdock-{process.pid}-*")) for home in homes)


def test_a_checkpoint_opens_with_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    of = recipe(TINY, train__steps=1)
    _, result = asyncio.run(complete(Execution(RunFolder.create(of, tmp_path / "run"))))
    assert result.checkpoint is not None
    model = AutoModelForCausalLM.from_pretrained(result.checkpoint.model)
    tokenizer = AutoTokenizer.from_pretrained(result.checkpoint.model)
    assert torch.equal(
        model.get_input_embeddings().weight, trained(of, result)["model.embed_tokens.weight"]
    )
    assert tokenizer("ab=").input_ids


def test_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    of = recipe(TINY, train__steps=1)
    writer = checkpoint.Writer(train_engine(of))
    for version in (1, 2, 3):
        writer.copy()
        writer.write(checkpoint.begin(tmp_path, version))
        flow = {"counters": {"trained": version}, "remake": [7]}
        checkpoint.finish(tmp_path, tokenizer_of(of), version, flow, keep=2)
    for left in (".step-00000009.partial", ".step-00000001.removed"):
        (tmp_path / left).mkdir()  # killed while it was written, or removed
        (tmp_path / left / "run.json").touch()
    newest = checkpoint.latest(tmp_path)
    assert newest is not None
    assert (newest.version, newest.counters, newest.remake) == (3, {"trained": 3}, [7])
    assert sorted(path.name for path in tmp_path.glob("step-*")) == [
        "step-00000002",
        "step-00000003",
    ]
    checkpoint.begin(tmp_path, 4)
    assert [path.name for path in tmp_path.glob(".*")] == [".step-00000004.partial"], (
        "their room is free again"
    )


def test_a_folder_with_something_in_it_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("keep")
    with pytest.raises(RunError, match="is not empty"):
        Execution(RunFolder.create(recipe(MOCK), tmp_path))
    with pytest.raises(RunError, match=r"holds no recipe\.json"):
        Execution(RunFolder.resume(tmp_path))


async def test_other_nodes_read_the_samples_of_a_run_that_serves_them(tmp_path: Path) -> None:
    """As its recipe sets it: on this address, inside TLS, to clients that know the run's secret."""
    files = self_signed(tmp_path)
    of = recipe(
        MOCK,
        train__steps=5000,
        launch__launcher="process",
        pipeline__serve="127.0.0.1",
        pipeline__tls_certificate=str(files / "cert.pem"),
        pipeline__tls_key=str(files / "key.pem"),
        pipeline__tls_authority=str(files / "cert.pem"),
    )
    async with executing(Execution(RunFolder.create(of, tmp_path / "run"))) as (watched, _):
        await watched.until(lambda: len(watched.of("step")) >= 1)
        where = json.loads((tmp_path / "run" / WHERE).read_text())
        await watched.move("running", "paused")
        near = await Dock.attach(where["index"], where["run"])
        far = await Dock.attach(
            where["index"], where["run"], node="another", tls=of.pipeline.tls_contexts()
        )
        bare = await Dock.attach(where["index"], where["run"], node="another", wire_timeout=1.0)
        try:
            group = (await near.index.stats())["trained"] * of.train.groups_per_step - 1
            rows = await near.inspect(group)
            assert len(rows) == of.algorithm.group_size
            assert [row["columns"]["response_ids"] for row in rows] == [
                row["columns"]["response_ids"] for row in await far.inspect(group)
            ]
            with pytest.raises(WarehouseUnreachable, match="is alive, but cannot be reached"):
                await bare.inspect(group)
        finally:
            for dock in (near, far, bare):
                await dock.close()
                await dock.index.close()
        await watched.move("paused", "running")
        watched.stop.set()
