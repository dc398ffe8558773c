"""What a stage relies on from its controller, on a real index: every row once and in order, time
that adds up, failures that are heard at once, and nothing left running."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from pipeline.data.columns import Column, Schema
from pipeline.index.client import Claim, Index, RunConfig, StageSpec
from pipeline.index.warehouses import Block
from pipeline.warehouse.dock import Dock
from pipeline.worker.clock import Clock
from pipeline.worker.controller import Controller
from pipeline.worker.outputs import Output, Trained, Written
from pipeline.worker.spans import Spans
from tests.any_event import AnyEvent

SCHEMA = Schema([Column.scalar("number", torch.int64), Column.scalar("doubled", torch.int64)])
STAGES = (
    StageSpec("double", "rows", SCHEMA.mask(["number"]), SCHEMA.mask(["doubled"])),
    StageSpec("check", "rows", SCHEMA.mask(["doubled"]), 0),
    StageSpec("update", "batch", SCHEMA.mask(["doubled"]), 0),
)


class Double:
    """Doubles numbers. ``work`` runs before each row is committed."""

    name = "double"
    fetches: tuple[str, ...] = ("number",)

    def __init__(self, most: int = 3) -> None:
        self.most = most
        self.claimed: list[list[int]] = []
        self.done: list[int] = []
        self.closed = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.fail: Callable[[int], None] = lambda number: None

    def room(self, held: int) -> float:
        return self.most - held

    def version(self) -> int | None:
        return None

    def figures(self) -> dict[str, Any]:
        return {}

    async def process(self, claim: Claim, rows: TensorDict) -> AsyncGenerator[Output, None]:
        numbers = rows["number"].tolist()
        self.claimed.append(numbers)
        try:
            for position, number in enumerate(numbers):
                await self.gate.wait()
                self.fail(number)
                yield Written(
                    [position], rows={"doubled": torch.tensor([2 * number])}, tokens=number
                )
                self.done.append(number)
        finally:
            self.closed += 1


@pytest.fixture
async def dock(index: Index, tmp_path: Path) -> Dock:
    await index.init(RunConfig(STAGES, 100, 0, 1, 0), {"published": 0, "trained": 0, "admitted": 0})
    dock = Dock(index, SCHEMA, worker="w", directory=tmp_path, lease=30)
    await dock.join(1 << 20)
    return dock


async def admit(dock: Dock, numbers: range) -> None:
    await dock.admit([(number, 1) for number in numbers], {"number": torch.tensor(list(numbers))})


async def until(condition: Callable[[], bool], what: str) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)  # the condition is of another task, or of the server
    assert condition(), what


async def finish(controller: Controller, running: asyncio.Task[None]) -> None:
    controller.stop()
    await asyncio.wait_for(running, 10)


async def test_rows_are_processed_in_order_and_each_once(dock: Dock) -> None:
    stage = Double()
    controller = Controller(dock, stage)
    running = asyncio.create_task(controller.run())
    await admit(dock, range(5))
    await until(lambda: len(stage.done) == 5, "rows that were there")
    await admit(dock, range(5, 12))
    await until(lambda: len(stage.done) == 12, "rows that came while it waited")
    await finish(controller, running)
    assert [number for numbers in stage.claimed for number in numbers] == list(range(12))
    assert sorted(stage.done) == list(range(12))
    assert all(len(numbers) <= 3 for numbers in stage.claimed), (
        "more was claimed than there is room for"
    )
    assert (controller.rows, controller.tokens) == (12, sum(range(12)))
    result = await dock.claim("check", 100)
    assert result is not None
    made = await dock.fetch(result, ["number", "doubled"])
    assert made["doubled"].tolist() == (2 * made["number"]).tolist() == list(range(0, 24, 2))


async def test_a_controller_reports_its_work(dock: Dock) -> None:
    await admit(dock, range(2))
    # its room is taken by the first claim: nothing moves while the report is made
    stage = Double(most=2)
    stage.gate.clear()
    controller = Controller(dock, stage, number=7)
    running = asyncio.create_task(controller.run())
    await until(lambda: bool(stage.claimed), "a claim")
    await admit(dock, range(2, 9))
    await controller.report()
    held = [event.data for event in await dock.index.events() if event.kind == "stage"][-1]
    stage.gate.set()
    await until(lambda: len(stage.done) == 9, "all rows")
    await finish(controller, running)
    reports = [event.data for event in await dock.index.events() if event.kind == "stage"]
    assert (held["worker"], held["stage"]) == ("double-7", "double")
    assert (held["in_flight"], held["queue_depth"]) == (2, 7)
    assert reports[-1]["rows"] == 9
    assert reports[-1]["queue_depth"] == reports[-1]["in_flight"] == 0
    for data in reports:
        parts = data["busy"] + data["waiting_input"] + data["waiting_room"] + data["other"]
        assert parts == pytest.approx(data["wall"])
    assert reports[-1]["busy"] > 0


async def test_a_controller_reports_its_spans(dock: Dock) -> None:
    """Each claim is a span; when more were made than fit a report, it has the longest and the
    number left out."""
    most = 5
    controller = Controller(dock, Double(most=1), spans=Spans(most))
    began = time.time()
    running = asyncio.create_task(controller.run())
    await admit(dock, range(9))
    await until(lambda: controller.rows == 9, "all rows")
    await finish(controller, running)
    reports = [event.data for event in await dock.index.events() if event.kind == "span"]
    spans = [span for data in reports for span in data["spans"]]
    assert all((data["stage"], data["worker"]) == ("double", "double-0") for data in reports)
    assert all(len(data["spans"]) <= most for data in reports)
    assert len(spans) + sum(data["left_out"] for data in reports) == 9
    for span in spans:
        assert (span["name"], span["rows"]) == ("double", 1)
        assert began <= span["start"] <= span["start"] + span["seconds"] <= time.time() + 0.001
    assert controller.spans.take() == ([], 0), "reported spans are reported again"


async def test_a_stage_that_raises_is_heard_at_once_and_its_rows_go_to_another(dock: Dock) -> None:
    await admit(dock, range(6))
    stage = Double(most=6)

    def fail(number: int) -> None:
        if number == 2:
            raise ZeroDivisionError("row 2")

    stage.fail = fail
    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(Controller(dock, stage).run(), 5)
    assert caught.group_contains(ZeroDivisionError, match="row 2", depth=2)
    assert stage.closed == 1
    await dock.index.forget_worker("w")  # as the supervisor does
    other = Double(most=6)
    controller = Controller(Dock(dock.index, SCHEMA, worker="w2", directory=dock.folder), other)
    running = asyncio.create_task(controller.run())
    await until(lambda: len(other.done) == 4, "the rows that were not committed")
    await finish(controller, running)
    assert other.done == [2, 3, 4, 5]
    assert (await dock.index.ledger())["redelivered"] == 4


async def test_a_lost_lease_drops_its_rows_and_the_controller_goes_on(dock: Dock) -> None:
    await admit(dock, range(2))
    stage = Double(most=2)
    stage.gate.clear()
    controller = Controller(dock, stage)
    running = asyncio.create_task(controller.run())
    await until(lambda: bool(stage.claimed), "a claim")
    await dock.index.forget_worker("w", ended=False)  # declared dead, and it is not
    thief = Dock(dock.index, SCHEMA, worker="thief", directory=dock.folder)
    stolen = await thief.claim("double", 10)
    assert stolen is not None
    await thief.commit(stolen, [0, 1], {"doubled": torch.tensor([0, 2])})
    stage.gate.set()
    await until(lambda: stage.closed == 1, "the first claim is dropped")
    await admit(dock, range(2, 4))
    await until(lambda: stage.done == [2, 3], "it goes on")
    await finish(controller, running)
    assert controller.rows == 2


async def test_leases_are_renewed_while_a_stage_takes_its_time(dock: Dock) -> None:
    await admit(dock, range(1))
    stage = Double()
    stage.gate.clear()
    brief = Dock(dock.index, SCHEMA, worker="brief", directory=dock.folder, lease=0.3)
    controller = Controller(brief, stage)
    running = asyncio.create_task(controller.run())
    await until(lambda: bool(stage.claimed), "a claim")
    assert await dock.claim("double", 1, timeout=1.0) is None, "three leases long, it stays his"
    stage.gate.set()
    await until(lambda: stage.done == [0], "the commit is taken")
    await finish(controller, running)


async def test_a_lease_that_is_gone_ends_the_work_on_it(dock: Dock) -> None:
    """The work would be refused in the end: it is cancelled when the renewal fails, not after hours
    of generation."""
    await admit(dock, range(1))
    stage = Double()
    stage.gate.clear()
    brief = Dock(dock.index, SCHEMA, worker="brief", directory=dock.folder, lease=0.3)
    controller = Controller(brief, stage)
    running = asyncio.create_task(controller.run())
    await until(lambda: bool(stage.claimed), "a claim")
    controller.pause()
    await dock.index.forget_worker("brief")
    await until(lambda: stage.closed == 1, "the stage is cancelled")
    assert not stage.done
    await finish(controller, running)


class Train:
    """Makes a step, and publishes until ``published``."""

    name = "update"
    fetches: tuple[str, ...] = ("doubled",)

    def __init__(self) -> None:
        self.steps = 0
        self.ended = 0
        self.published = asyncio.Event()

    def room(self, held: int) -> int:
        return 0 if held else 1

    def figures(self) -> dict[str, Any]:
        return {}

    def version(self) -> int | None:
        return None

    async def process(self, claim: Claim, rows: TensorDict) -> AsyncGenerator[Output, None]:
        yield Trained(
            range(len(claim)),
            version=self.steps,
            event=AnyEvent(kind="step", data={"step": self.steps + 1}),
            tokens=len(claim.rows),
        )
        self.steps += 1
        await self.published.wait()
        self.ended += 1


async def test_what_follows_a_step_may_outlast_its_lease(index: Index, tmp_path: Path) -> None:
    """The step's rows are consumed when it is recorded: publishing and saving need no lease, and
    must not be cut short."""
    await index.init(RunConfig(STAGES, 2, 1, 1, 1), {"published": 0, "trained": 0, "admitted": 0})
    dock = Dock(index, SCHEMA, worker="w", directory=tmp_path, lease=0.15)
    await dock.join(1 << 20)
    await admit(dock, range(4))
    rows = await dock.claim("double", 4)
    assert rows is not None
    await dock.commit(rows, range(4), {"doubled": torch.arange(4)}, generated=[(0, 1)] * 4)
    stage = Train()
    controller = Controller(dock, stage)
    running = asyncio.create_task(controller.run())
    await until(lambda: stage.steps == 1, "the step")
    assert await dock.claim("double", 1, timeout=0.6) is None, "four leases long"
    assert (stage.steps, stage.ended) == (1, 0), "one step at a time, and it goes on"
    stage.published.set()
    await until(lambda: stage.ended == 2, "the next step follows")
    await finish(controller, running)
    reports = [event.data["step"] for event in await index.events() if event.kind == "step"]
    assert reports == [1, 2]
    assert controller.rows == 4


class InGroups(Double):
    """Has room for so many rows of groups of two."""

    def room(self, held: int) -> float:
        return super().room(held) / 2


async def test_a_part_of_a_group_is_room_for_a_row_that_was_parked(
    index: Index, tmp_path: Path
) -> None:
    double = StageSpec("double", "groups", SCHEMA.mask(["number"]), SCHEMA.mask(["doubled"]))
    counters = {"published": 0, "trained": 0, "admitted": 0}
    await index.init(RunConfig((double, *STAGES[1:]), 100, 0, 1, 0), counters)
    dock = Dock(index, SCHEMA, worker="w", directory=tmp_path, lease=30)
    await dock.join(1 << 20)

    async def admit_group(group: int) -> None:
        await dock.admit([(group, 2)], {"number": torch.tensor([group])})

    await admit_group(0)
    other = await dock.claim("double", 1)
    assert other is not None
    stage = InGroups(most=3)
    stage.gate.clear()
    controller = Controller(dock, stage)
    running = asyncio.create_task(controller.run())
    await admit_group(1)
    await until(lambda: stage.claimed == [[1, 1]], "a group has room")
    await admit_group(2)
    progress = {"doubled": torch.tensor([1])}
    await dock.park(other, [1], progress, generated=[(0, 1)])
    await until(lambda: stage.claimed == [[1, 1], [0]], "so has a row")
    assert not controller.is_idle
    stage.gate.set()
    await until(lambda: sorted(stage.done) == [0, 1, 1, 2, 2], "the group that waited for room")
    await until(lambda: controller.is_idle, "nothing is left")
    await finish(controller, running)


async def test_pause_claims_nothing_and_resume_goes_on(dock: Dock) -> None:
    stage = Double()
    controller = Controller(dock, stage)
    controller.pause()
    running = asyncio.create_task(controller.run())
    await admit(dock, range(4))
    # several round trips later, all rows but this one are still there
    other = await dock.claim("double", 1)
    assert (await dock.index.stats())["stages"]["double"]["ready"] == 3
    assert other is not None
    assert not stage.claimed
    controller.resume()
    await until(lambda: stage.done == [1, 2, 3], "all the others")
    await finish(controller, running)


async def test_pause_leaves_what_is_held_to_be_finished(dock: Dock) -> None:
    await admit(dock, range(6))
    stage = Double(most=3)
    stage.gate.clear()
    controller = Controller(dock, stage)
    running = asyncio.create_task(controller.run())
    await until(lambda: bool(stage.claimed), "a claim")
    controller.pause()
    stage.gate.set()
    await until(lambda: controller.rows >= 3, "what it held")
    await until(lambda: not controller._held, "nothing held")
    held = sum(map(len, stage.claimed))
    assert held <= 4, "at most the claim that was on its way"
    await finish(controller, running)
    assert await dock.index.queue_depth("double") == 6 - held, (
        "stopped while paused: nothing more is claimed"
    )


async def test_stop_finishes_what_is_held_and_claims_no_more(dock: Dock) -> None:
    await admit(dock, range(6))
    stage = Double(most=2)
    stage.gate.clear()
    controller = Controller(dock, stage)
    running = asyncio.create_task(controller.run())
    await until(lambda: bool(stage.claimed), "a claim")
    controller.stop()
    stage.gate.set()
    await asyncio.wait_for(running, 10)
    assert stage.done == [0, 1]
    assert (await dock.index.stats())["stages"]["double"] == {
        "ready": 4,
        "leased": 0,
        "takes": "rows",
    }


async def test_what_a_stopped_worker_has_not_begun_goes_to_another_at_once(dock: Dock) -> None:
    """A stage that is closed returns without the rows that it has not begun; nobody waits for the
    end of their lease."""

    class Leaving(Double):
        leaving = False

        async def process(self, claim: Claim, rows: TensorDict) -> AsyncGenerator[Output, None]:
            async for output in super().process(claim, rows):
                yield output
                if self.leaving:
                    return

    await admit(dock, range(3))
    stage = Leaving()
    stage.gate.clear()
    controller = Controller(dock, stage)
    running = asyncio.create_task(controller.run())
    await until(lambda: bool(stage.claimed), "a claim")
    assert stage.claimed == [[0, 1, 2]]
    stage.leaving = True
    controller.stop()
    stage.gate.set()
    await asyncio.wait_for(running, 10)
    assert (await dock.index.stats())["stages"]["double"] == {
        "ready": 2,
        "leased": 0,
        "takes": "rows",
    }
    again = await dock.claim("double", 10)
    assert again is not None
    assert again.group.tolist() == [1, 2]


async def test_a_wake_up_makes_it_look_again(dock: Dock) -> None:
    """The index cannot know that an engine got room, or loaded a version."""
    await admit(dock, range(2))
    stage = Double(most=0)
    controller = Controller(dock, stage)
    running = asyncio.create_task(controller.run())
    assert (await dock.index.stats())["stages"]["double"]["ready"] == 2
    stage.most = 5
    controller.wake()
    await until(lambda: stage.done == [0, 1], "both")
    await finish(controller, running)


@pytest.mark.parametrize("moment", ["waiting for rows", "working", "paused", "no room"])
async def test_cancelling_ends_everything_at_once(dock: Dock, moment: str) -> None:
    stage = Double(most=0 if moment == "no room" else 3)
    stage.gate.clear()
    controller = Controller(dock, stage)
    before = asyncio.all_tasks()
    if moment == "paused":
        controller.pause()
    if moment != "waiting for rows":
        await admit(dock, range(3))
    running = asyncio.create_task(controller.run())
    if moment == "working":
        await until(lambda: bool(stage.claimed), "a claim")
    if moment == "waiting for rows":
        await until(lambda: controller.clock.waiting, "the wait")
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(running, 5)
    assert asyncio.all_tasks() == before, "no task is left"
    assert stage.closed == len(stage.claimed)
    assert await dock.index.queue_depth("double") == (
        0 if moment in ("working", "waiting for rows") else 3
    )


async def test_waiting_for_room_is_not_counted_as_work(index: Index, tmp_path: Path) -> None:
    await index.init(RunConfig(STAGES, 100, 0, 1, 0), {"published": 0, "trained": 0, "admitted": 0})
    dock = Dock(index, SCHEMA, worker="w", directory=tmp_path, slab=0)
    await dock.join(8192)
    await admit(dock, range(1))
    left = 8192 - (await index.stats())["warehouses"]["local"]["used"]
    full = await index.allocate(1, "hog", left)
    assert isinstance(full, Block)
    stage = Double()
    controller = Controller(dock, stage)
    running = asyncio.create_task(controller.run())
    await until(lambda: controller.clock.state() == "waiting_room", "the arena is full")
    await index.close_blocks("hog", [full.number])
    await until(lambda: stage.done == [0], "room came")
    await finish(controller, running)
    assert controller.clock.read()["waiting_room"] > 0


def test_every_instant_is_one_of_four_and_they_add_up_to_wall_time() -> None:
    now = 100.0
    clock = Clock(now=lambda: now)

    def passes(seconds: float) -> dict[str, float]:
        nonlocal now
        now += seconds
        read = clock.read()
        assert (
            sum(read[kind] for kind in ("busy", "waiting_input", "waiting_room", "other"))
            == read["wall"]
        )
        return read

    assert passes(1)["other"] == 1
    with clock.during("waiting"):
        assert passes(2)["waiting_input"] == 2
        with clock.during("working"):
            assert passes(4)["busy"] == 4, "waiting for more beside work is work"
            with clock.during("working"):
                with clock.during("blocked"):
                    assert passes(8)["busy"] == 12, "one of two is blocked: work is done"
                    with clock.during("blocked"):
                        assert passes(16)["waiting_room"] == 16
                passes(32)
        assert passes(64)["waiting_input"] == 66
    assert passes(128) == {
        "busy": 44,
        "waiting_input": 66,
        "waiting_room": 16,
        "other": 129,
        "wall": 255,
    }


async def test_rows_that_come_when_a_waiting_stage_has_no_room_stay_for_others(dock: Dock) -> None:
    """An engine may have left its device, or a run be paused, since the wait began."""
    stage = Double(most=3)
    controller = Controller(dock, stage)
    running = asyncio.create_task(controller.run())
    await until(lambda: bool(controller.clock.waiting), "the wait")
    stage.most = 0
    await admit(dock, range(2))
    await ready(dock, 2)
    assert stage.claimed == []
    stage.most = 3
    controller.wake()
    await until(lambda: stage.done == [0, 1], "both")
    await until(lambda: bool(controller.clock.waiting), "the next wait")
    controller.pause()
    await admit(dock, range(2, 4))
    await ready(dock, 2)
    assert stage.done == [0, 1]
    controller.resume()
    await until(lambda: stage.done == [0, 1, 2, 3], "all")
    await finish(controller, running)


async def ready(dock: Dock, count: int) -> None:
    """Wait until so many rows can be claimed, and none is held."""
    async with asyncio.timeout(10):
        while True:
            queue = await dock.index.queue("double")
            if (queue.ready, queue.leased) == (count, 0):
                return
            await asyncio.sleep(0.002)
