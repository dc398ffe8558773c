"""The gate on a real index: which groups enter, when, with which prompts, and what it says of
them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.data.columns import Column, Schema
from pipeline.documents.flow import VERSION
from pipeline.index.client import Claim, Index, RunConfig, StageSpec
from pipeline.schedule.pacing import Pacer
from pipeline.schedule.staleness import StalenessPlan
from pipeline.warehouse.dock import Dock
from stages.prompts.external import ExternalPrompts
from stages.prompts.formatter import Prompt
from stages.prompts.gate import Gate
from stages.prompts.too_long import LongPrompts

SCHEMA = Schema(
    [
        Column.ragged("prompt_ids", torch.int64),
        Column.text("given"),
        Column.text("fields"),
        Column.ragged("response_ids", torch.int64),
    ]
)
STAGES = (
    StageSpec("rollout", "groups", SCHEMA.mask(["prompt_ids"]), SCHEMA.mask(["response_ids"])),
    StageSpec("update", "batch", SCHEMA.mask(["response_ids"]), 0),
)
PLAN = StalenessPlan(bound=1, groups_per_step=2)  # groups below (v + 2) * 2 may enter
STEPS = 3
SIZE = 2


class Numbered:
    """A source of prompts whose first token is their number; a pass over it has four."""

    def __init__(self) -> None:
        self.too_long = LongPrompts(None)
        self.asked: list[int] = []

    def prompt(self, seq: int) -> Prompt:
        self.asked.append(seq)
        if seq == 3:
            self.too_long.add("row 3", "9 tokens", "skipped")
        return Prompt(torch.tensor([seq, 7]), f"say {seq}", f"{seq}", {"answer": seq})

    def epochs(self, seq: int) -> dict[str, int]:
        return {"prompts": seq // 4 + 1}


@pytest.fixture
async def dock(index: Index, tmp_path: Path) -> Dock:
    await index.init(
        RunConfig(STAGES, PLAN.groups_per_step, PLAN.slack, PLAN.window, PLAN.bound),
        {"published": 0, "trained": 0, "admitted": 0},
    )
    dock = Dock(index, SCHEMA, worker="gate", directory=tmp_path, slab=0)
    await dock.join(1 << 20)
    return dock


def gate_of(dock: Dock, source: Any = None, **options: Any) -> Gate:
    return Gate(
        dock,
        source or Numbered(),
        **{"group_size": SIZE, "steps": STEPS, "groups_per_step": 2, **options},
    )


@asynccontextmanager
async def running(gate: Gate) -> AsyncGenerator[asyncio.Task[None], None]:
    """The gate at work; stopped at the end, unless all steps were trained."""
    task = asyncio.create_task(gate.run())
    try:
        yield task
        await gate.stop()
        await asyncio.wait_for(task, 60)
    finally:
        task.cancel()


async def until(condition: Callable[[int], bool], dock: Dock) -> None:
    """Wait until ``condition`` of the number of admitted groups."""
    async with asyncio.timeout(60):
        while True:
            status = await dock.index.status()
            if condition(status.admitted):
                return
            await asyncio.sleep(0.005)  # an admission wakes nobody who waits for it


async def generated(dock: Dock, version: int) -> Claim | None:
    """All groups that may be begun with ``version``, with their responses; None where all have
    theirs."""
    claim = await dock.claim("rollout", 100, version=version)
    if claim is None:
        return None
    responses = {"response_ids": [torch.tensor([1])] * len(claim)}
    await dock.commit(claim, range(len(claim)), responses, generated=[(version, 1)] * len(claim))
    return claim


async def trained(dock: Dock, version: int) -> None:
    """The next step, with its version published."""
    batch = await dock.claim("update", 1)
    assert batch is not None
    await dock.index.train(batch, version)
    await dock.index.publish_weights(version + 1, {})


async def test_groups_enter_as_far_as_the_bound_allows_until_all_steps_have_theirs(
    dock: Dock,
) -> None:
    source = Numbered()
    async with running(gate_of(dock, source)) as work:
        await until(lambda admitted: admitted == 4, dock)
        claim = await generated(dock, 0)
        assert claim is not None
        assert claim.group.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
        rows = await dock.fetch(claim, ["prompt_ids", "given", "fields"])
        assert [ids.tolist() for ids in rows["prompt_ids"].unbind()] == [
            [group, 7] for group in claim.group.tolist()
        ]
        assert [rows["fields"][at] for at in range(8)] == [
            f'{{"answer": {group}}}' for group in claim.group.tolist()
        ]
        await trained(dock, 0)
        await until(lambda admitted: admitted == 6, dock)
        await trained(dock, 1)
        await generated(dock, 2)
        assert not work.done(), "a step is still to be trained"
        await trained(dock, 2)
        await asyncio.wait_for(work, 60)
    assert (await dock.index.status()).admitted == STEPS * 2, "the bound would allow two more"
    assert source.asked == list(range(6)), "each prompt is made once"


async def test_a_dropped_group_is_replaced_by_one_more(dock: Dock) -> None:
    async with running(gate_of(dock)) as work:
        await until(lambda admitted: admitted == 4, dock)
        claim = await dock.claim("rollout", 1, version=0)
        assert claim is not None
        await dock.index.drop_groups(claim, [0], "equal rewards")
        for version, groups in enumerate((5, 7, 7)):
            await until(lambda admitted, groups=groups: admitted == groups, dock)  # type: ignore[misc]
            await generated(dock, version)
            await trained(dock, version)
        await asyncio.wait_for(work, 60)
    assert (await dock.index.status()).admitted == STEPS * 2 + 1


async def test_lost_groups_enter_again_with_the_same_prompts(dock: Dock, tmp_path: Path) -> None:
    async with running(gate_of(dock)):
        await until(lambda admitted: admitted == 4, dock)
    (home,) = await dock.index.warehouses()
    await dock.index.lose_warehouse(home.number)
    assert sorted((await dock.index.status()).remake) == [0, 1, 2, 3]
    other = Dock(dock.index, SCHEMA, worker="other", directory=tmp_path / "other", slab=0)
    await other.join(1 << 20)
    source = Numbered()
    async with running(gate_of(other, source)), asyncio.timeout(60):
        while (await dock.index.status()).remake:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    assert source.asked == [0, 1, 2, 3]
    claim = await generated(other, 0)
    assert claim is not None
    rows = await other.fetch(claim, ["prompt_ids"])
    assert [ids[0].item() for ids in rows["prompt_ids"].unbind()] == claim.group.tolist()
    assert sorted(set(claim.group.tolist())) == [0, 1, 2, 3]


async def test_prompts_from_outside_enter_as_they_come(dock: Dock, tmp_path: Path) -> None:
    class Outside(ExternalPrompts):
        count: int | None = 1
        available = property(lambda self: self.count)  # type: ignore[assignment]
        prompt = Numbered.prompt  # type: ignore[assignment]

    source = Outside(dock.index, tmp_path / "prompts.jsonl", None)  # type: ignore[arg-type]
    source.asked = []  # type: ignore[attr-defined]
    async with running(gate_of(dock, source, fed=source)):
        await until(lambda admitted: admitted == 1, dock)
        source.count = 3
        await dock.index.wake(VERSION)
        await until(lambda admitted: admitted == 3, dock)
        source.count = None  # the last one was put: from now on they are repeated
        await dock.index.wake(VERSION)
        await until(lambda admitted: admitted == 4, dock)
    assert source.asked == [0, 1, 2, 3]  # type: ignore[attr-defined]


async def test_a_paused_gate_admits_nothing_and_stops_at_once(dock: Dock) -> None:
    gate = gate_of(dock)
    gate.paused = True
    async with running(gate):
        await dock.index.wake(VERSION)
    assert (await dock.index.status()).admitted == 0


class Late(Pacer):
    """Lets in as many groups as the test says."""

    def __init__(self) -> None:
        super().__init__(PLAN)
        self.seen: list[tuple[int, int, int]] = []
        self.most = 1

    def see(self, now: float, version: int, admitted: int, done: int) -> None:
        self.seen.append((version, admitted, done))

    def limit(self, now: float) -> int:
        return self.most

    def look(self) -> float:
        return 0.01


async def test_groups_enter_no_earlier_than_the_pacer_says(dock: Dock) -> None:
    pacer = Late()
    async with running(gate_of(dock, pacer=pacer)):
        async with asyncio.timeout(60):
            while not pacer.seen or pacer.seen[-1] != (0, 1, 0):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert (await dock.index.status()).admitted == 1
        pacer.most = 3  # it looks again by itself: nothing else happens
        await until(lambda admitted: admitted == 3, dock)
        claim = await dock.claim("rollout", 1, version=0)
        assert claim is not None
        await dock.index.drop_groups(claim, [0])  # it counts groups without the dropped ones
        await until(lambda admitted: admitted == 4, dock)


async def test_passes_over_the_prompts_and_too_long_ones_are_told_once(dock: Dock) -> None:
    async with running(gate_of(dock, steps=4)) as work:
        for version, groups in enumerate((4, 6, 8, 8)):
            await until(lambda admitted, groups=groups: admitted == groups, dock)  # type: ignore[misc]
            await generated(dock, version)
            await trained(dock, version)
        await asyncio.wait_for(work, 60)
    events = [event.data for event in await dock.index.events() if event.kind == "prompt"]
    told = [(event["reason"], event["epochs"]) for event in events if event["change"] == "epoch"]
    assert told == [("epoch 1 of prompts", {"prompts": 1}), ("epoch 2 of prompts", {"prompts": 2})]
    (too_long,) = [event for event in events if event["change"] == "too long"]
    assert too_long["skipped"] == 1
    assert too_long["reason"] == "prompts that are too long: 1 skipped"
