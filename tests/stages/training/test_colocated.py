"""Whose turn it is: decided for all ranks, with a real index and devices that only note what is
asked of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeline.data.events import EvaluationEvent
from pipeline.index.client import Claim, Index
from pipeline.schedule.staleness import StalenessPlan
from pipeline.warehouse.dock import Dock
from pipeline.worker.spans import Spans
from stages.algorithms.policy_gradient.grpo import GRPO
from stages.flow.catalogue import catalogue
from stages.flow.resolver import resolve
from stages.parallel.layout import ALONE, Layout
from stages.resharding.swap import State
from stages.training.colocated import Turn
from stages.training.rank_worker import RankWorker
from stages.training.ranks import RankGroup
from stages.training.shared_device import SharedDevice
from stages.weights.documents import EVALUATED
from stages.weights.published import Probe

P = 2
STEPS = 3


class Noted(SharedDevice):
    """A shared device whose changes take no time."""

    state = State.TRAINING  # type: ignore[assignment]

    def __init__(self) -> None:
        self.did = list[str]()
        self.probes = list[Probe | None]()
        self.may_generate = False
        self.controller = SimpleNamespace(spans=Spans())
        self.changed = asyncio.Condition()

    async def note(self, what: str, state: State) -> None:
        async with self.changed:
            self.did.append(what)
            self.state = state
            self.changed.notify_all()

    async def leave(self) -> None:
        assert self.state is State.GENERATING
        self.may_generate = False
        await self.note("leave", State.RETURNING)

    async def ready(self) -> None:
        assert self.state is not State.GENERATING
        if self.state is State.RETURNING:
            await self.note("ready", State.TRAINING)

    async def generate(self, version: int, probe: Probe | None, *, claims: bool = True) -> None:
        await self.ready()
        self.probes.append(probe)
        self.may_generate = claims
        await self.note(f"generate {version}", State.GENERATING)

    def open(self) -> None:
        self.may_generate = True

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20), self.changed:
            await self.changed.wait_for(condition)


class Told:
    """What a turn needs to know of the update stage."""

    trained = 0
    probe = None


class Answers:
    """An evaluator that answers when the test lets it."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.go = asyncio.Event()

    async def run(self, version: int) -> EvaluationEvent:
        self.asked.set()
        await self.go.wait()
        return EvaluationEvent(version=version, step=version, count=0, reward_mean=0.0, samples=())


@pytest.fixture
async def dock(index: Index, tmp_path: Path) -> AsyncIterator[Dock]:
    flow = resolve(GRPO(), catalogue())
    await index.init(
        flow.config(StalenessPlan(0, P, 1)), {"published": 0, "trained": 0, "admitted": 0}
    )
    dock = Dock(
        index, flow.schema, worker="test", directory=tmp_path, lease=30.0, slab=2**16, secret=b"x"
    )
    await dock.join(2**22)
    yield dock
    await dock.close()


async def admitted(dock: Dock, groups: list[int]) -> None:
    texts = [""] * len(groups)
    prompts = [torch.tensor([3, 4])] * len(groups)
    await dock.admit(
        [(group, 1) for group in groups], {"prompt_ids": prompts, "given": texts, "fields": texts}
    )


async def claimed(dock: Dock, stage: str = "rollout") -> Claim:
    claim = await dock.claim(stage, 9, version=0 if stage == "rollout" else None, timeout=5)
    assert claim is not None
    return claim


async def generated(dock: Dock, claim: Claim) -> None:
    count = range(len(claim))
    rows = {
        "response_ids": [torch.tensor([5]) for _ in count],
        "rollout_logprobs": [torch.tensor([-1.0]) for _ in count],
        "versions": [torch.tensor([0, 1]) for _ in count],
        "truncated": torch.zeros(len(claim), dtype=torch.bool),
    }
    await dock.commit(claim, count, rows, generated=[(0, 1) for _ in count])


class Table:
    """A turn that is being taken."""

    def __init__(self, dock: Dock, evaluator: Any = None, **options: Any) -> None:
        self.device = Noted()
        self.update = Told()
        settings = {
            "steps": STEPS,
            "groups": STEPS * P,
            "every": 1,
            "ahead": True,
            "overlap": True,
            **options,
        }
        rank_group = RankGroup(dock.index, ALONE)
        self.turn = Turn(self.device, rank_group, dock.index, evaluator, **settings)  # type: ignore[arg-type]
        self.run = asyncio.create_task(self.turn.run(self.update))  # type: ignore[arg-type]

    async def over(self) -> None:
        self.turn.over()
        async with asyncio.timeout(20):
            await self.run

    async def step(self) -> None:
        """The update stage has a batch, and trains it."""
        async with asyncio.timeout(20), self.turn.training():
            assert self.device.state is State.TRAINING
            self.update.trained += 1


async def test_turns_of_a_whole_step(dock: Dock) -> None:
    table = Table(dock)
    device = table.device
    turn = table.turn
    turn.no_batch()  # the gate may admit: there will be something to generate
    await device.until(lambda: device.did == ["generate 0"])
    await admitted(dock, [0, 1])
    claim = await claimed(dock)
    turn.no_rows()
    await asyncio.sleep(0.05)  # what is leased somewhere is being generated
    assert device.did == ["generate 0"]
    await generated(dock, claim)
    turn.no_rows()
    await device.until(lambda: device.did[1:] == ["leave"])
    await table.step()
    await table.step()  # the next batch was there already
    assert device.did == ["generate 0", "leave", "ready"]
    await table.over()
    assert device.did == ["generate 0", "leave", "ready"]


async def test_a_batch_ends_generations_turn_whatever_is_in_flight(dock: Dock) -> None:
    table = Table(dock, ahead=False)
    table.turn.no_batch()
    await table.device.until(lambda: table.device.did == ["generate 0"])
    await admitted(dock, [0, 1])
    await claimed(dock)
    await table.step()
    assert table.device.did == ["generate 0", "leave", "ready"]
    table.turn.no_batch()
    await table.device.until(lambda: table.device.did[3:] == ["generate 1"])
    await table.over()


async def test_without_looking_ahead_training_comes_back_only_for_a_batch(dock: Dock) -> None:
    table = Table(dock, ahead=False)
    table.turn.no_batch()
    await table.device.until(lambda: table.device.did == ["generate 0"])
    await admitted(dock, [0, 1])
    await generated(dock, await claimed(dock))
    table.turn.no_rows()
    await asyncio.sleep(0.05)
    assert table.device.did == ["generate 0"]
    await table.step()
    await table.over()


async def test_what_must_be_generated_after_all_takes_the_device_back_without_a_step(
    dock: Dock,
) -> None:
    """A group is filtered out while training comes back: another one is to be admitted in its
    place, or no step would ever have its groups."""
    table = Table(dock)
    table.turn.no_batch()
    await admitted(dock, [0, 1])
    await generated(dock, await claimed(dock))
    await table.device.until(lambda: table.device.did == ["generate 0"])
    table.turn.no_rows()
    await table.device.until(lambda: table.device.did[1:] == ["leave"])
    scored = await claimed(dock, "reward")
    values = torch.zeros(len(scored))
    await dock.commit(scored, range(len(scored)), {"reward": values, "scores": values[:, None]})
    judged = await claimed(dock, "advantage")
    await dock.index.drop_groups(judged, [1])
    await dock.commit(judged, [0], {"advantage": torch.ones(1)})
    await table.device.until(lambda: table.device.did[2:] == ["ready", "generate 0"])
    await table.over()


async def test_two_batches_that_follow_closely_are_both_trained(dock: Dock) -> None:
    """The second one asks before the first one's end has been noticed."""
    table = Table(dock)
    for _ in range(20):
        await table.step()
    await table.over()
    assert table.update.trained == 20


async def test_a_claim_that_is_given_up_while_it_waits_leaves_the_turn_sound(dock: Dock) -> None:
    table = Table(dock)
    waiting = asyncio.create_task(table.step())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await table.step()
    assert table.update.trained == 1
    await table.over()


async def test_an_evaluation_holds_the_turn_and_where_nothing_may_overlap_the_claims(
    dock: Dock,
) -> None:
    answers = Answers()
    table = Table(dock, answers, overlap=False)
    table.turn.no_batch()
    await answers.asked.wait()
    assert not table.device.may_generate
    stepping = asyncio.create_task(table.step())
    await asyncio.wait([stepping], timeout=0.1)
    assert not stepping.done()
    answers.go.set()
    await stepping
    assert table.device.did == ["generate 0", "leave", "ready"]
    assert await EVALUATED.get(dock.index) == 0
    await table.over()


@pytest.mark.parametrize("known", [False, True])
async def test_the_last_version_is_evaluated_once_before_the_end(known: bool, dock: Dock) -> None:
    answers = Answers()
    answers.go.set()
    table = Table(dock, answers)
    table.update.trained = STEPS
    if known:
        await EVALUATED.put(dock.index, STEPS)
    await table.over()
    assert table.device.did == ([] if known else [f"generate {STEPS}"])
    assert await EVALUATED.get(dock.index) == STEPS


async def test_a_run_that_stops_gives_up_its_evaluation_and_lets_what_is_held_end(
    dock: Dock,
) -> None:
    answers = Answers()
    table = Table(dock, answers)
    table.turn.no_batch()
    await answers.asked.wait()
    await table.over()
    await admitted(dock, [0, 1])
    await claimed(dock)  # by a rank whose engine sleeps: rows that had no token when its turn ended
    stopped = Table(dock)
    await stopped.over()
    assert stopped.device.did == ["generate 0"]


async def test_a_rank_worker_follows_the_orders_of_rank_0(index: Index) -> None:
    first, other = (
        RankGroup(index, Layout.for_training(dp=2).coordinates(rank), "one") for rank in (0, 1)
    )
    device = Noted()
    nothing = object()
    rank_worker = RankWorker(
        nothing, nothing, nothing, other, version=0, save=nothing, device=device
    )  # type: ignore[arg-type]
    listening = asyncio.create_task(rank_worker.run())
    probe = {"sequences": [[1, 2]], "logprobs": [[-0.5]]}
    await first.broadcast("generate", version=4, probe=probe)
    await device.until(lambda: device.did == ["generate 4"])
    await first.broadcast("return", together=False)
    await first.broadcast("generate", version=5, probe=None)
    await device.until(lambda: device.did[1:] == ["leave", "ready", "generate 5"])
    await first.broadcast("end")
    async with asyncio.timeout(20):
        await listening
    assert device.probes == [Probe(((1, 2),), ((-0.5,),)), None]
