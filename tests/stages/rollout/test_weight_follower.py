"""Taking new weights: exactly what was published, one replica after the other; else the old ones,
and a word about it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeline.documents.flow import SWAP, VERSION
from pipeline.index.client import Index, RunConfig
from pipeline.worker.spans import Spans
from stages.algorithms.policy_gradient.grpo import GRPO
from stages.engines.mock.engines import MockRolloutEngine, MockTrainEngine
from stages.engines.mock.options import MockRolloutOptions, MockTrainOptions
from stages.engines.protocols import (
    Completion,
    GroupRequest,
    RolloutEngine,
    SamplingParams,
    SwapTimes,
    WeightMismatch,
)
from stages.engines.torch.rollout import TorchRolloutEngine
from stages.engines.torch.train import TorchTrainEngine
from stages.model.load import tiny_model, tiny_tokenizer
from stages.parallel.layout import Layout
from stages.rollout.stage import Rollout
from stages.rollout.swapper import Swapper, SwapPolicy, SwapRefused
from stages.rollout.weight_follower import ATTEMPTS, WeightFollower
from stages.training.rank_worker import RankWorker
from stages.training.ranks import RankGroup
from stages.training.update import Update
from stages.weights.documents import DAMAGED
from stages.weights.published import Probe, Published, WeightsDamaged, WeightsUnreachable
from stages.weights.records import WeightRecords
from stages.weights.transport.store import WeightStore
from stages.weights.verification.probe import ProbeRule, gap, probed
from tests.stages.engines.torch.test_rollout import DEADLINE, Brake
from tests.stages.rollout.test_evaluate import evaluator

PARAMS = SamplingParams(max_tokens=8)
PROBED = [[*range(3, 9), *range(4, 20)]]
EXACT = ProbeRule(torch.float32)


@dataclass
class Trainer:
    """Publishes version after version, as an update stage does."""

    index: Index
    store: WeightStore
    version: int = 0
    engine: MockTrainEngine | TorchTrainEngine = field(
        default_factory=lambda: MockTrainEngine(MockTrainOptions(step_seconds=0))
    )

    async def publish(
        self, change: Callable[[Published], Published] = lambda p: p, probe: bool = True
    ) -> None:
        self.version += 1
        random = torch.Generator().manual_seed(self.version)
        for _, tensor in self.engine.weights():
            tensor += 0.05 * torch.randn(tensor.shape, generator=random)
        published = self.store.publish(
            self.version, self.engine.weights(), probed(self.engine, PROBED) if probe else None
        )
        await self.index.wake(VERSION)
        # steps are not the matter here
        await self.index._redis.hset(f"{self.index.prefix}n", "trained", self.version)
        await WeightRecords(self.index).publish(change(published))


class Controls:
    def __init__(self, process: str = "process") -> None:
        self.spans = Spans()
        self.dock = SimpleNamespace(worker=process)

    def wake(self) -> None: ...

    def stop(self) -> None: ...


def follower(
    index: Index,
    store: WeightStore,
    engine: Any,
    policy: SwapPolicy,
    *,
    worker: str = "rollout-0",
    steps: int = 99,
) -> WeightFollower:
    nothing_claimed: Any = None  # a dock: what the follower does needs none
    stage = Rollout(nothing_claimed, engine, PARAMS, seed=0, group_size=1, most_rows=4)
    controls: Any = Controls(f"{worker}-process")
    options: dict[str, Any] = {
        "worker": worker,
        "every": 0,
        "steps": steps,
        "overlap": True,
    }
    swapper = Swapper(index, store, engine, policy, worker=worker, temperature=PARAMS.temperature)
    return WeightFollower(index, swapper, stage, controls, None, **options)


class Unreachable(WeightStore):
    """Of a trainer that has ended."""

    def read(self, published: Published) -> dict[str, torch.Tensor]:
        raise WeightsUnreachable("connection refused")


@pytest.fixture
async def trainer(index: Index, tmp_path: Path) -> Trainer:
    await index.init(RunConfig(()), {})
    return Trainer(index, WeightStore(tmp_path))


@pytest.fixture
async def engine() -> AsyncIterator[MockRolloutEngine]:
    engine = MockRolloutEngine(MockRolloutOptions(swap_seconds=0))
    yield engine
    await engine.close()


async def events(index: Index, kind: str) -> list[dict[str, Any]]:
    return [event.data for event in await index.events(timeout=0.05) if event.kind == kind]


async def test_a_probed_swap_reports_the_gap(
    trainer: Trainer, engine: MockRolloutEngine, tmp_path: Path
) -> None:
    await trainer.publish()
    assert await follower(
        trainer.index, WeightStore(tmp_path), engine, SwapPolicy(probe=EXACT)
    )._take()
    assert engine.version == 1
    assert not engine._paused, "it goes on after the probe"
    (sync,) = await events(trainer.index, "sync")
    assert sync["gap_max"] == sync["gap_mean"] == sync["gap_k3"] == 0.0


async def test_the_real_engines_agree_on_a_probe(index: Index, tmp_path: Path) -> None:
    await index.init(RunConfig(()), {})
    train = TorchTrainEngine(tiny_model(1), learning_rate=1e-4, total_steps=1, threads=1)
    rollout = TorchRolloutEngine(tiny_model(0), max_rows=2, threads=1)
    store: Any = WeightStore(tmp_path)
    try:
        await index._redis.hset(f"{index.prefix}n", "trained", 1)
        published = store.publish(1, train.weights(), probed(train, PROBED))
        await WeightRecords(index).publish(published)
        assert await follower(
            index, WeightStore(tmp_path), rollout, SwapPolicy(probe=EXACT)
        )._take()
        (sync,) = await events(index, "sync")
        assert 0 < sync["gap_max"] < 1e-4, "two engines never round alike, and hardly differ"
        assert 0 < sync["gap_mean"] <= sync["gap_max"]
    finally:
        await rollout.close()
        train.close()


@pytest.mark.parametrize("restarted", [False, True])
async def test_an_engine_that_goes_past_due_versions_is_evaluated_at_the_one_that_it_has(
    restarted: bool, trainer: Trainer, tmp_path: Path
) -> None:
    """Each five versions are due. The engine gets 0, 7, 16 and 18."""
    engine = MockRolloutEngine(
        MockRolloutOptions(vocabulary=len(tiny_tokenizer()), time_scale=0.001, swap_seconds=0)
    )
    following = begun(trainer.index, WeightStore(tmp_path), engine)
    try:
        for number, version in enumerate([0, 7, 16, 18]):
            trainer.version = version
            if version:
                trainer.version -= 1
                await trainer.publish()
            if restarted:  # the worker was killed when it had an answer or two
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
                following = begun(trainer.index, WeightStore(tmp_path), engine)
            async with asyncio.timeout(20):
                while (
                    len(found := await events(trainer.index, "evaluation")) < min(number + 1, 3)
                    or engine.version != version
                ):
                    assert not following.done(), await following
        assert [one["version"] for one in found] == [0, 7, 16]
        assert [(one.get("due"), one.get("missed", 0)) for one in found] == [
            (None, 0),
            (5, 0),
            (15, 1),
        ]
        assert all(one["tokens"] and one["seconds"] and one["count"] for one in found)
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await engine.close()


def begun(index: Index, store: WeightStore, engine: MockRolloutEngine) -> asyncio.Task[None]:
    made = follower(index, store, engine, SwapPolicy())
    made.evaluator = replace(evaluator(engine), rows=4)
    made.every = 5
    idle: Any = made.controller
    idle.is_idle = True
    idle.held = 0

    async def work() -> None:
        await made.begin()
        await made.run()

    return asyncio.create_task(work())


# ── a transport that fails ──


class Faulty(WeightStore):
    """Reads with the ``fault`` while there are ``times`` left, from version ``since`` on."""

    def __init__(
        self, directory: Path, fault: str, times: int, released: threading.Event, *, since: int = 0
    ) -> None:
        super().__init__(directory, bucket_bytes=4096)
        self._fault = fault
        self.times = times
        self._released = released
        self._since = since

    def read(self, published: Published) -> dict[str, torch.Tensor]:
        if self.times and published.version >= self._since:
            self.times -= 1
            if self._fault == "stalls":
                self._released.wait(30)
            else:
                memory = self._open(published.slot, published.nbytes)
                at, size = (
                    (100, 1) if self._fault == ("corrupts a byte") else published.buckets[1][:2]
                )
                was = memory[at : at + size].copy()
                memory[at : at + size] = 255 - was if size == 1 else 0
                try:
                    return super().read(published)
                finally:
                    memory[at : at + size] = was
        return super().read(published)


@pytest.fixture
def released() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture(params=["mock", "torch"])
async def pair(
    request: pytest.FixtureRequest, trainer: Trainer
) -> AsyncIterator[tuple[Trainer, RolloutEngine]]:
    """A trainer and a rollout engine that has its model."""
    engine: RolloutEngine = MockRolloutEngine(MockRolloutOptions(swap_seconds=0))
    if request.param == "torch":
        trainer.engine = TorchTrainEngine(
            tiny_model(0), learning_rate=1e-4, total_steps=1, threads=1
        )
        engine = TorchRolloutEngine(tiny_model(0), max_rows=2, threads=1)
    yield trainer, engine
    await engine.close()
    trainer.engine.close()


async def response(engine: RolloutEngine) -> Completion:
    """The same one from the same weights, to the bit."""
    request = GroupRequest(0, (0,), torch.arange(3, 9), SamplingParams(max_tokens=5), seed=0)
    (completion,) = [completion async for completion in engine.generate([request])]
    return completion


@pytest.mark.parametrize("fault", ["corrupts a byte", "drops a bucket", "stalls"])
async def test_a_failing_transport_leaves_the_old_version_and_is_tried_again(
    pair: tuple[Trainer, RolloutEngine], tmp_path: Path, fault: str, released: threading.Event
) -> None:
    trainer, engine = pair
    trainer.store.bucket_bytes = 4096
    store = Faulty(tmp_path, fault, 0, released)
    following = follower(trainer.index, store, engine, SwapPolicy(probe=EXACT, timeout=20))
    swapper = following.swapper
    await trainer.publish()
    assert await following._take()
    before = await response(engine)
    assert {version for version, _ in before.versions} == {1}
    store.times = 1
    await trainer.publish()
    if fault == "stalls":
        swapper.policy = replace(swapper.policy, timeout=0.5)
    assert not await following._take()
    assert engine.version == 1
    after = await response(engine)
    assert after.versions == before.versions
    assert torch.equal(after.token_ids, before.token_ids)
    assert torch.equal(after.logprobs, before.logprobs), (
        "nothing of it was loaded: these are the old weights' tokens"
    )
    (kept,) = await events(trainer.index, "worker")
    assert kept["change"] == "kept its weights"
    assert "version 2" in kept["reason"]
    assert ("bucket" if fault != "stalls" else "sync.timeout = 0.5 s") in kept["reason"]
    released.set()
    swapper.policy = replace(swapper.policy, timeout=20)
    assert await following._take(), "the next attempt finds it whole"
    assert engine.version == 2
    new = await response(engine)
    assert {version for version, _ in new.versions} == {2}
    assert not torch.equal(new.logprobs, before.logprobs)
    taken = [event["version"] for event in await events(trainer.index, "sync")]
    assert taken == [1, 2]


async def test_a_stuck_reading_is_the_only_one(
    trainer: Trainer, engine: MockRolloutEngine, tmp_path: Path, released: threading.Event
) -> None:
    """Each would have a copy of all weights. One that ends makes room for the next."""
    store = Faulty(tmp_path, "stalls", 1, released)
    following = follower(trainer.index, store, engine, SwapPolicy(timeout=0.2))
    await trainer.publish()
    for _ in range(ATTEMPTS - 1):
        assert not await following._take()
    reading = [thread for thread in threading.enumerate() if thread.name == "weights-read"]
    assert len(reading) == 1
    assert reading[0].daemon, "the worker's end does not wait for it"
    first, second = [kept["reason"] for kept in await events(trainer.index, "worker")]
    assert "version 1: not read within sync.timeout = 0.2 s" in first
    assert "version 1: the attempt before is still reading after sync.timeout = 0.2 s" in second
    released.set()
    assert await following._take()
    assert following.swapper._reading is None


async def test_what_stays_damaged_is_given_up_loudly(
    trainer: Trainer, engine: MockRolloutEngine, tmp_path: Path, released: threading.Event
) -> None:
    store = Faulty(tmp_path, "corrupts a byte", 99, released)
    following = follower(trainer.index, store, engine, SwapPolicy(timeout=0.3))
    await trainer.publish()
    with pytest.raises(WeightsDamaged, match="version 1: bucket 0"):
        await asyncio.wait_for(following.run(), 20)
    assert engine.version == 0
    assert len(await events(trainer.index, "worker")) == ATTEMPTS


# ── damaged where it lies ──


class Damaging(WeightStore):
    """Damages what it publishes while there are ``times`` left."""

    def __init__(self, directory: Path, times: int) -> None:
        super().__init__(directory)
        self.times = times
        self.published = 0

    def publish(
        self,
        version: int,
        weights: Iterable[tuple[str, torch.Tensor]],
        probe: Probe | None = None,
        part: tuple[int, int] = (0, 1),
    ) -> Published:
        self.published += 1
        published = super().publish(version, weights, probe, part)
        if self.times:
            self.times -= 1
            self._open(published.slot, published.nbytes)[100] ^= 1
        return published


def update(
    index: Index, store: WeightStore, engine: Any, steps: int, rank_group: RankGroup | None = None
) -> Update:
    """An update stage that has made its first step."""

    async def nothing(step: int) -> None: ...

    dock: Any = SimpleNamespace(index=index, schema=())
    options: dict[str, Any] = {
        "after_step": nothing,
        "after_last": lambda: None,
        "rank_group": rank_group,
    }
    return Update(dock, engine, GRPO(), store, steps=steps, staleness=0, version=1, **options)


async def training(stage: Update, engines: list[str]) -> None:
    """The update stage's worker, and its successors."""
    while True:
        try:
            return await stage.until_taken(engines)
        except WeightsDamaged:
            await stage.catch_up()


@pytest.fixture
async def trained(index: Index) -> Index:
    """A run whose trainer is at version 1."""
    await index.init(RunConfig(()), {})
    await index._redis.hset(f"{index.prefix}n", "trained", 1)
    return index


@pytest.mark.parametrize("replicas", [1, 3])
async def test_damaged_weights_are_published_again_by_the_restarted_trainer(
    trained: Index, tmp_path: Path, replicas: int
) -> None:
    store = Damaging(tmp_path, 1)
    stage = update(trained, store, MockTrainEngine(MockTrainOptions(step_seconds=0)), steps=1)
    await stage.publish()
    engines = [MockRolloutEngine(MockRolloutOptions(swap_seconds=0)) for _ in range(replicas)]
    followers = [
        follower(
            trained, WeightStore(tmp_path), engine, SwapPolicy(), worker=f"rollout-{i}", steps=1
        )
        for i, engine in enumerate(engines)
    ]
    stage.over()  # the last step is done: it stays until its version has been taken
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        tasks.create_task(training(stage, [f"rollout-{i}" for i in range(replicas)]))
        for one in followers:
            tasks.create_task(one.run())
    assert [engine.version for engine in engines] == [1] * replicas
    assert store.published == 2, "once for all of them"
    kept = await events(trained, "worker")
    assert {event["change"] for event in kept} == {"kept its weights"}
    published, again, *taken = [event["worker"] for event in await events(trained, "sync")]
    assert (published, again) == ("update-0", "update-0")
    assert sorted(taken) == [f"rollout-{i}" for i in range(replicas)]
    for engine in engines:
        await engine.close()


async def test_a_worker_that_had_the_last_version_ends_when_it_is_restarted(
    trainer: Trainer, index: Index, tmp_path: Path
) -> None:
    """The trainer ends when all have the last version, and its weights with it."""

    async def work(store: WeightStore, steps: int) -> int:
        engine = MockRolloutEngine(MockRolloutOptions(swap_seconds=0))
        one = follower(index, store, engine, SwapPolicy(), steps=steps)
        async with asyncio.timeout(20):
            await one.begin()
            await one.run()
        await engine.close()
        return engine.version

    await trainer.publish()
    assert await work(WeightStore(tmp_path), steps=1) == 1
    assert await work(Unreachable(tmp_path), steps=1) == 0, "it has nothing to do any more"


async def test_the_trainer_restarts_for_damaged_weights_between_two_steps_and_only_for_the_newest(
    trained: Index, tmp_path: Path, engine: MockRolloutEngine
) -> None:
    store = Damaging(tmp_path, 1)
    stage = update(trained, store, MockTrainEngine(MockTrainOptions(step_seconds=0)), steps=9)
    await stage.publish()
    following = follower(trained, WeightStore(tmp_path), engine, SwapPolicy())
    waiting = asyncio.create_task(stage.until_taken(["rollout-0"]))
    try:
        async with stage._stepping:
            for reported in (False, True):
                assert not await following._take()
                assert bool(await DAMAGED.get(trained, version=1)) == reported, (
                    "the damage may have happened on the way"
                )
            await asyncio.wait([waiting], timeout=0.1)
            await trained._redis.hset(f"{trained.prefix}n", "trained", 2)
            stage.trained = 2
            await stage.publish()
        assert await following._take()
        assert engine.version == 2
        await asyncio.wait([waiting], timeout=0.1)
        await DAMAGED.put(trained, "rollout-0", version=2)
        with pytest.raises(WeightsDamaged, match="version 2: rollout-0 has found them damaged"):
            await asyncio.wait_for(waiting, 20)
        await stage.catch_up()
        assert store.published == 3
        assert not await DAMAGED.get(trained, version=2)
    finally:
        waiting.cancel()


async def test_all_ranks_give_their_weights_again(trained: Index, tmp_path: Path) -> None:
    together = threading.Barrier(2)

    class Half(MockTrainEngine):
        """Gives its weights when the other rank does."""

        def weights(self) -> Iterator[tuple[str, torch.Tensor]]:  # type: ignore[override]
            for name, tensor in super().weights():
                together.wait(20)
                yield name, tensor

    rank_groups = [
        RankGroup(trained, Layout.for_training(tp=2).coordinates(rank), "life") for rank in range(2)
    ]
    halves = [Half(MockTrainOptions(step_seconds=0)) for _ in rank_groups]
    dock: Any = SimpleNamespace(index=trained, schema=())
    rank_worker = RankWorker(
        dock,
        halves[1],
        GRPO(),
        rank_groups[1],
        version=1,
        save=lambda folder: asyncio.sleep(0),
        publisher=WeightStore(tmp_path),
    )
    store = Damaging(tmp_path, 1)
    stage = update(trained, store, halves[0], 1, rank_groups[0])
    engine = MockRolloutEngine(MockRolloutOptions(swap_seconds=0))
    following = follower(trained, WeightStore(tmp_path), engine, SwapPolicy(), steps=1)
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        tasks.create_task(rank_worker.run())
        await stage.publish()
        stage.over()
        tasks.create_task(following.run())
        await training(stage, ["rollout-0"])
        await rank_groups[0].broadcast("end")
    assert engine.version == 1
    assert store.published == 2
    await engine.close()


async def test_buckets_that_leave_bytes_out_are_refused(
    trainer: Trainer, engine: MockRolloutEngine, tmp_path: Path
) -> None:
    trainer.store.bucket_bytes = 4096
    following = follower(trainer.index, WeightStore(tmp_path), engine, SwapPolicy())
    for gone, wrong in (
        (
            1,
            r"bytes 4096\.\.8192 are in no "
            r"bucket",
        ),
        (-1, r"bytes \d+\.\.\d+ are in no bucket"),
    ):

        def without(p: Published, gone: int = gone) -> Published:
            kept = tuple(bucket for bucket in p.buckets if bucket is not p.buckets[gone])
            return Published(p.version, p.slot, p.nbytes, p.tensors, kept, p.probe)

        await trainer.publish(without)
        assert not await following._take()
        assert pytest.approx(engine.version) == 0
        reason = (await events(trainer.index, "worker"))[-1]["reason"]
        with pytest.raises(WeightsDamaged, match=wrong):
            raise WeightsDamaged(reason)


# ── an engine that fails ──


class Failing(MockRolloutEngine):
    """Loads, probes and goes on, with the ``fault`` once."""

    fault = ""

    async def score(self, *arguments: Any, **options: Any) -> torch.Tensor:
        if self.fault == "is not probed":
            self.fault = ""
            await asyncio.Event().wait()
        return await super().score(*arguments, **options)

    async def resume(self) -> None:
        if self.fault == "does not go on":
            await asyncio.Event().wait()
        await super().resume()

    async def load_weights(
        self,
        version: int,
        weights: Mapping[str, torch.Tensor],
        *,
        hold: bool = False,
        cut: bool = False,
    ) -> SwapTimes:
        if self.fault in ("is not probed", "does not go on"):  # that comes later
            return await super().load_weights(version, weights, hold=hold, cut=cut)
        fault = self.fault
        self.fault = ""
        if fault == "says another version":
            return SwapTimes(0.0, 0.0)
        if fault == "cannot be stopped":
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            await asyncio.Event().wait()
        if fault == "comes too late":
            try:
                await asyncio.Event().wait()
            finally:
                await super().load_weights(version, weights, hold=hold, cut=cut)
        if fault == "stalls":
            await asyncio.Event().wait()
        if fault == "refuses":
            raise WeightMismatch("head.weight: offered [1], the engine has [2]")
        if fault == "loads something else":
            weights = {name: tensor * 1.01 for name, tensor in weights.items()}
        return await super().load_weights(version, weights, hold=hold, cut=cut)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("says another version", "the engine reports version 1 after loading"),
        ("stalls", "not loaded within sync.timeout = 0.5 s"),
        ("refuses", "head.weight: offered"),
        ("comes too late", "not loaded within sync.timeout = 0.5 s"),
        ("is not probed", "not probed within sync.timeout = 0.5 s"),
        (
            "loads something else",
            r"logprobs differ from the trainer's by [\d.]+ \(the largest of 21 tokens; "
            r"sync.probe_tol",
        ),
    ],
)
async def test_an_engine_that_fails_to_load_keeps_its_old_weights(
    trainer: Trainer, tmp_path: Path, fault: str, reason: str
) -> None:
    engine = Failing(MockRolloutOptions(swap_seconds=0))
    try:
        following = follower(
            trainer.index, WeightStore(tmp_path), engine, SwapPolicy(probe=EXACT, timeout=0.5)
        )
        await trainer.publish()
        assert await following._take()
        before = await engine.score(torch.arange(3), torch.arange(9))
        await trainer.publish()
        engine.fault = fault
        assert not await following._take()
        assert engine.version == 1
        assert torch.equal(await engine.score(torch.arange(3), torch.arange(9)), before), (
            "the old weights answer"
        )
        assert not engine._paused
        with pytest.raises(SwapRefused, match=reason):
            raise SwapRefused((await events(trainer.index, "worker"))[-1]["reason"])
        assert await following._take()
        assert engine.version == 2
    finally:
        await engine.close()


async def test_wrong_weights_with_nothing_to_go_back_to_end_the_worker(
    trainer: Trainer, tmp_path: Path
) -> None:
    engine = Failing(MockRolloutOptions(swap_seconds=0))
    engine.fault = "loads something else"
    await trainer.publish()
    with pytest.raises(RuntimeError, match=r"version 1: .* never published; the worker restarts"):
        await follower(
            trainer.index, WeightStore(tmp_path), engine, SwapPolicy(probe=EXACT)
        )._take()
    await engine.close()


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (
            "cannot be stopped",
            r"version 1: not loaded within sync.timeout = 0.1 s, nor given up in as long "
            r"again",
        ),
        (
            "does not go on",
            r"held at version 1, does not go on within sync.timeout = 0.1 s; the worker "
            r"restarts",
        ),
    ],
)
async def test_an_engine_in_an_unknown_state_ends_the_worker(
    trainer: Trainer, tmp_path: Path, fault: str, reason: str
) -> None:
    engine = Failing(MockRolloutOptions(swap_seconds=0))
    engine.fault = fault
    await trainer.publish()
    policy = SwapPolicy(probe=EXACT, timeout=0.1)
    with pytest.raises(RuntimeError, match=reason):
        await asyncio.wait_for(
            follower(trainer.index, WeightStore(tmp_path), engine, policy)._take(), 20
        )
    await engine.close()


@pytest.mark.parametrize("probe", [None, EXACT], ids=["not probed", "probed"])
async def test_weights_that_a_held_up_decode_keeps_out_are_not_taken_later_unsaid(
    index: Index, tmp_path: Path, probe: ProbeRule | None
) -> None:
    """A load that was given up does not happen at the next token either: it would be neither probed
    nor reported."""
    await index.init(RunConfig(()), {})
    train = TorchTrainEngine(tiny_model(1), learning_rate=1e-4, total_steps=1, threads=1)
    engine = TorchRolloutEngine(tiny_model(0), max_rows=2, threads=1)
    following = follower(index, WeightStore(tmp_path), engine, SwapPolicy(probe=probe, timeout=0.3))
    try:
        await index._redis.hset(f"{index.prefix}n", "trained", 1)
        published = WeightStore(tmp_path).publish(1, train.weights(), probed(train, PROBED))
        await WeightRecords(index).publish(published)
        brake = Brake(engine, 2)
        stream = engine.generate(
            [GroupRequest(0, (0,), torch.arange(3, 9), SamplingParams(max_tokens=50), seed=0)]
        )
        await brake.reached()
        assert not await following._take()
        brake.let_go()
        (whole,) = [completion async for completion in stream]
        assert whole.versions == ((0, 50),), "the old weights made all of it"
        assert engine.version == 0
        (kept,) = await events(index, "worker")
        assert "version 1: not loaded within sync.timeout = 0.3 s" in kept["reason"]
        assert not await events(index, "sync")
        following.swapper.policy = SwapPolicy(probe=probe, timeout=DEADLINE)
        assert await following._take()
        assert engine.version == 1
        assert following.swapper.held == published
        assert len(await events(index, "sync")) == 1
        assert not engine._paused
    finally:
        await engine.close()
        train.close()


async def test_a_mock_swap_that_takes_too_long_is_not_taken_later_either(
    trainer: Trainer, tmp_path: Path
) -> None:
    engine = MockRolloutEngine(MockRolloutOptions(swap_seconds=60, median_tokens=8, sigma=0))
    following = follower(
        trainer.index, WeightStore(tmp_path), engine, SwapPolicy(probe=EXACT, timeout=0.2)
    )
    try:
        stream = engine.generate(
            [GroupRequest(0, (0,), torch.arange(3), SamplingParams(max_tokens=8), seed=0)]
        )
        await trainer.publish()
        assert not await following._take()
        (whole,) = [completion async for completion in stream]
        assert whole.versions == ((0, 8),)
        assert engine.version == 0
        assert not engine._paused
    finally:
        await engine.close()


# ── one after the other ──


@asynccontextmanager
async def replicas(
    trainer: Trainer, directory: Path, count: int, policy: SwapPolicy
) -> AsyncIterator[tuple[list[WeightFollower], list[int]]]:
    """Followers with engines that are at their swap for as long as the others need to come to
    theirs; and how many were at it at each entry."""
    at_it: list[int] = []
    inside = 0

    class Watched(MockRolloutEngine):
        async def load_weights(
            self,
            version: int,
            weights: Mapping[str, torch.Tensor],
            *,
            hold: bool = False,
            cut: bool = False,
        ) -> SwapTimes:
            nonlocal inside
            inside += 1
            at_it.append(inside)
            try:
                return await super().load_weights(version, weights, hold=hold, cut=cut)
            finally:
                inside -= 1

    engines = [Watched(MockRolloutOptions(swap_seconds=0.1)) for _ in range(count)]
    yield (
        [
            follower(trainer.index, WeightStore(directory), engine, policy, worker=f"rollout-{i}")
            for i, engine in enumerate(engines)
        ],
        at_it,
    )
    for engine in engines:
        await engine.close()


@pytest.mark.parametrize("at_once", [1, 2, 0])
async def test_no_more_replicas_swap_at_the_same_time_than_may(
    trainer: Trainer, tmp_path: Path, at_once: int
) -> None:
    async with replicas(trainer, tmp_path, 3, SwapPolicy(at_once=at_once)) as (following, at_it):
        await trainer.publish()
        async with asyncio.timeout(20):
            assert all(await asyncio.gather(*(one._take() for one in following)))
        assert [one.stage.engine.version for one in following] == [1, 1, 1]
        assert max(at_it) <= (at_once or 3)
        assert (max(at_it) == 1) == (at_once == 1)


async def test_a_dead_replica_does_not_keep_the_turn(trainer: Trainer, tmp_path: Path) -> None:
    async def swapped() -> None:
        async with replicas(trainer, tmp_path, 1, SwapPolicy(at_once=1)) as ((one,), _):
            assert await one._take()

    await trainer.publish()
    assert (await trainer.index.take_swap_turn("dead", most=1, lease=60)).granted
    task = asyncio.create_task(swapped())
    await trainer.index.wait(SWAP, "0-0", 0.2)
    assert not task.done()
    await trainer.index.forget_worker("dead")
    await asyncio.wait_for(task, 20)


async def test_a_turn_ends_with_its_lease(trainer: Trainer) -> None:
    index: Any = trainer.index
    assert (await index.take_swap_turn("a", most=1, lease=1.5)).granted
    refused = await index.take_swap_turn("b", most=1, lease=1.5)
    assert not refused.granted
    assert 0 < refused.due <= 1.5
    assert (await index.take_swap_turn("b", most=2, lease=1.5)).granted, "there is room for two"

    async def until(again: Callable[[], Awaitable[Any]]) -> None:
        while not (turn := await again()).granted:
            await index.wait(SWAP, turn.wait, turn.due)

    await asyncio.wait_for(until(lambda: index.take_swap_turn("c", most=1, lease=1.5)), 10)


def test_the_gap_of_two_engines() -> None:
    found = gap(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -2.0]))
    assert found.max == 0.5
    assert found.mean == 0.25
    assert found.k3 == pytest.approx((torch.tensor(0.5).exp().item() - 1.5) / 2)
    assert gap(torch.tensor([float("nan")]), torch.tensor([0.0])).max == float("inf")


async def test_one_torch_replica_generates_while_the_other_is_at_its_swap(
    index: Index, tmp_path: Path
) -> None:
    await index.init(RunConfig(()), {})
    train = TorchTrainEngine(tiny_model(1), learning_rate=1e-4, total_steps=1, threads=1)
    await index._redis.hset(f"{index.prefix}n", "trained", 1)
    published = WeightStore(tmp_path).publish(1, train.weights(), probed(train, PROBED))
    await WeightRecords(index).publish(published)
    reached = asyncio.Queue[int]()
    go_on = asyncio.Event()

    class Held(TorchRolloutEngine):
        async def score(self, *arguments: Any, **options: Any) -> torch.Tensor:
            if self.version:  # the weights before score the probe, too
                reached.put_nowait(engines.index(self))
                await go_on.wait()
            return await super().score(*arguments, **options)

    engines = [Held(tiny_model(0), max_rows=2, threads=1) for _ in range(2)]
    policy = SwapPolicy(probe=EXACT, at_once=1)
    following = [
        follower(index, WeightStore(tmp_path), e, policy, worker=f"rollout-{i}")
        for i, e in enumerate(engines)
    ]

    try:
        async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
            for one in following:
                tasks.create_task(one._take())
            first = await reached.get()
            held = engines[first]
            other = engines[1 - first]
            waiting = tasks.create_task(response(held))
            assert (await response(other)).versions == ((0, 5),), (
                "with the weights that it still has"
            )
            assert not waiting.done(), "no token is made by weights that were not probed"
            assert reached.empty()
            go_on.set()
            assert (await waiting).versions == ((1, 5),)
        assert [engine.version for engine in engines] == [1, 1]
    finally:
        for engine in engines:
            await engine.close()
        train.close()
