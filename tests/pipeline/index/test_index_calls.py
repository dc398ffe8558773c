"""Calls of the index about the run as a whole: its figures, its gate, what is dropped, turns to
swap, what it waits for."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.data.arena import StaleHandle
from pipeline.data.events import StepEvent
from pipeline.documents.flow import ROOM, SWAP, VERSION
from pipeline.index.client import Claim, Index, IndexRefused, NeverFits
from pipeline.index.warehouses import Block, Full, Lost
from pipeline.warehouse.dock import Dock
from tests.pipeline.warehouse.test_dock import (
    COUNTERS,
    SCHEMA,
    admit,
    claim,
    config,
    respond,
    through_advantage,
)


@pytest.fixture
async def dock(index: Index, tmp_path: Path) -> Dock:
    """P = 2, S = 2: groups below (v + 3) * 2 may enter."""
    await index.init(config(slack=2, staleness=2), COUNTERS)
    dock = Dock(index, SCHEMA, worker="w", directory=tmp_path, slab=0)
    await dock.join(1 << 20)
    return dock


async def dropped(dock: Dock, groups: list[int], reason: str = "dropped") -> None:
    """Drop groups that nobody has begun."""
    held = await claim(dock, "rollout", 100, version=0)
    await dock.index.drop_groups(held, groups, reason)
    await dock.index.hand_back(held)


# ── where the run is ──


async def test_the_status_is_counted_as_the_run_goes_on(dock: Dock) -> None:
    await admit(dock, range(6))
    await dropped(dock, [1])
    await through_advantage(dock)
    await dock.index.train(await claim(dock, "update"), 0)
    status = await dock.index.status([0, 1])
    assert (status.admitted, status.filtered, status.published, status.trained) == (6, 1, 0, 1)
    assert status.gate == 6 + 1
    assert status.gates == {0: 7, 1: 9}
    assert status.planned == (1 + 2) * 2, "steps up to the newest that the bound allows"
    assert status.dropped_before == 1
    assert status.droppable(0) == 6
    assert status.droppable(3) == 6 + 1 + 3
    await dock.index.publish_weights(1, {"slot": 7})
    status = await dock.index.status()
    assert (status.gate, status.published) == (9, 1)


async def test_the_records_of_the_two_newest_versions_are_kept(dock: Dock) -> None:
    index = dock.index
    await admit(dock, range(6))
    await through_advantage(dock)
    for version in (1, 2, 3):
        await index.train(await claim(dock, "update"), version - 1)
        await index.publish_weights(version, {"slot": version})
    assert [await index.weights_record(version) for version in range(5)] == [
        None,
        None,
        {"slot": 2},
        {"slot": 3},
        None,
    ]
    newest = await index.published_weights()
    assert (newest.version, dict(newest.record)) == (3, {"slot": 3})
    for wrong in (2, 4):
        with pytest.raises(
            IndexRefused, match=f"version {wrong} cannot be published: the trainer is at version 3"
        ):
            await index.publish_weights(wrong, {})


async def test_admission_may_run_fewer_steps_ahead_than_the_bound_allows(dock: Dock) -> None:
    before = await dock.index.status()
    assert before.gate == 6
    await dock.index.set_slack(1)
    assert await dock.index.wait(VERSION, before.wait, 0.01), "the gate looks again"
    assert (await dock.index.status()).gate == 4
    for wrong in (0, 3):
        with pytest.raises(IndexRefused, match=f"slack {wrong} is not within 1 and 2"):
            await dock.index.set_slack(wrong)
    await dock.index.set_slack(2)
    assert (await dock.index.status()).gate == 6


async def test_figures_of_an_ended_run_stay(dock: Dock) -> None:
    await admit(dock, range(4))
    await respond(dock, await claim(dock, "rollout", 3, version=0))
    before = await dock.index.ledger()
    assert (before["in_flight"], before["in_flight_tokens"]) == (6, 18)
    for _ in range(2):
        await dock.index.retire()
        assert await dock.index.ledger() == before
    assert [await dock.index.queue_depth(stage) for stage in ("rollout", "reward")] == [0, 0]


async def test_a_step_of_more_groups_than_a_segment_has_entries_loses_none(
    index: Index, tmp_path: Path
) -> None:
    """5001 groups of 2 rows, of which one is dropped: both are kept in segments of 4096 entries."""
    groups = [group for group in range(5001) if group != 7]
    of_rows = [group for group in groups for _ in range(2)]
    rows = [row for group in groups for row in (2 * group, 2 * group + 1)]
    await index.init(config(groups_per_step=5000), COUNTERS)
    dock = Dock(index, SCHEMA, worker="w", directory=tmp_path, slab=0)
    await dock.join(1 << 22)
    prompt_ids = [torch.tensor([group]) for group in range(5001)]
    await dock.admit(
        [(group, 2) for group in range(5001)], {"prompt_ids": prompt_ids, "answer": [""] * 5001}
    )
    await dropped(dock, [7])

    claimed = await claim(dock, "rollout", 5000, version=0)
    assert (claimed.row.tolist(), claimed.group.tolist()) == (rows, of_rows)
    fetched = await dock.fetch(claimed, ["prompt_ids"])
    assert fetched["prompt_ids"].values().tolist() == of_rows
    responses = [torch.tensor([row]) for row in rows]
    await dock.commit(
        claimed, range(10000), {"response_ids": responses}, generated=[(0, 3)] * 10000
    )
    for stage, column in (("reward", "reward"), ("advantage", "advantage")):
        found = await claim(dock, stage, 10000)
        await dock.commit(found, range(10000), {column: torch.arange(10000, dtype=torch.float32)})

    await index.train(await claim(dock, "update"), 0)
    replayed = await index.replay(0)
    fetched = await dock.fetch(replayed, ["response_ids", "advantage"])
    assert fetched["response_ids"].values().tolist() == rows
    assert fetched["advantage"].tolist() == list(range(10000))
    ledger = await index.ledger()
    assert (ledger["trained"], ledger["trained_tokens"], ledger["in_flight"]) == (10000, 30000, 0)
    # segments that get no more entries
    whole = [index.prefix + name for name in ("s:0", "s:1", "f:1", "q:0")]
    assert await index._redis.exists(*whole) == 4
    assert await index.release_steps(1) == 5000
    assert await index._redis.exists(*whole) == 0
    stats = await index.stats()
    assert (stats["rows"], stats["blocks"], stats["warehouses"]["local"]["used"]) == (0, 0, 0)


async def test_a_claim_says_where_the_columns_of_earlier_stages_lie_and_of_no_others(
    dock: Dock,
) -> None:
    """The admission and three stages write columns; the rewards need what the rollout has made, and
    so on."""
    await admit(dock, range(2))
    writers = {}
    for stage, column in (("rollout", ""), ("reward", "reward"), ("advantage", "advantage")):
        found = await claim(dock, stage, version=0 if stage == "rollout" else None)
        writers[stage] = [len(refs) for refs in found.refs]
        if stage == "rollout":
            await respond(dock, found)
        else:
            await dock.commit(found, range(4), {column: torch.zeros(4)})
    writers["update"] = [len(refs) for refs in (await claim(dock, "update")).refs]
    assert writers == {
        "rollout": [4, 0, 0, 0],
        "reward": [4, 4, 0, 0],
        "advantage": [4, 4, 4, 0],
        "update": [4, 4, 4, 4],
    }


# ── what is dropped ──


async def test_groups_are_dropped_one_by_one_and_the_others_stay(dock: Dock) -> None:
    await admit(dock, range(6))
    await dropped(dock, [4, 0, 2])
    for group in range(6):
        assert (await dock.index.inspect(group) is None) == (group in (0, 2, 4))
    assert (await dock.index.resume_point()).remake == [1, 3, 5]
    assert (await claim(dock, "rollout", version=0)).group.tolist() == [1, 1, 3, 3, 5, 5]


async def test_reasons_for_which_groups_are_dropped_are_kept_within_bounds(
    index: Index, tmp_path: Path
) -> None:
    """32 of them; a resumed run goes on with those that it had."""
    await index.init(config(slack=40, staleness=40), COUNTERS)
    dock = Dock(index, SCHEMA, worker="w", directory=tmp_path, slab=0)
    await dock.join(1 << 20)
    await admit(dock, range(40))
    long = "x" + "é" * 100  # of two bytes each: a cut by bytes would leave half of one
    for group, reason in enumerate(
        [*(f"reason {number}" for number in range(31)), long, "one more", "reason 3", long]
    ):
        await dropped(dock, [group], reason)
    expected = {f"reason {number}": 1 + (number == 3) for number in range(31)} | {
        long[:80]: 2,
        "other": 1,
    }
    assert (await index.ledger_event()).dropped == expected
    state = await index.resume_point()
    await index.erase()
    await index.init(config(slack=40, staleness=40), state.counters, state.remake)
    event = await index.ledger_event()
    assert event.dropped == expected
    assert set(event.dropped_tokens.values()) == {0}, "none of them had a response"


async def test_groups_that_are_spared_are_counted_when_they_are_trained(dock: Dock) -> None:
    await admit(dock, range(4))
    await through_advantage(dock)
    for _ in range(2):
        await dock.index.spare_groups([1, 2])
    assert (await dock.index.ledger())["spared_groups"] == 0
    batch = await claim(dock, "update")
    assert batch.group.tolist() == [0, 0, 1, 1]
    tokens = {"tokens_generated": 24, "tokens_trained": 12, "tokens_filtered": 0}
    made = {"step": 0, "version": 1, "rows": 4, "groups": [0, 1], "reward_mean": 0.0, **tokens}
    step = StepEvent(**made, skipped="the loss is not finite")  # type: ignore[arg-type]
    await dock.index.train(batch, 0, step)
    figures = ("spared_groups", "skipped_steps")
    assert [(await dock.index.ledger())[name] for name in figures] == [1, 1]
    state = await dock.index.resume_point()
    await dock.index.erase()
    await dock.index.init(config(slack=2, staleness=2), state.counters, state.remake)
    assert [(await dock.index.ledger())[name] for name in figures] == [1, 1], (
        "a resumed run goes on with them"
    )


# ── what is lost ──


async def test_lost_groups_enter_again_under_their_numbers_and_once(
    dock: Dock, tmp_path: Path
) -> None:
    await admit(dock, range(4), samples=3)
    assert dock.home is not None
    assert isinstance(await dock.index.allocate(dock.home, "w", 64), Block), (
        "one that is being written"
    )
    assert await dock.index.lose_warehouse(dock.home) == Lost(groups=4, rows=12)
    assert (await dock.index.stats())["blocks"] == 0
    other = Dock(dock.index, SCHEMA, worker="other", directory=tmp_path / "other", slab=0)
    await other.join(1 << 20)
    assert sorted((await dock.index.status()).remake) == [0, 1, 2, 3]
    with pytest.raises(IndexRefused, match="group 5 is out of order: the next one is 4"):
        await admit(other, range(5, 6))
    await admit(other, range(4), samples=3)
    assert (await dock.index.status()).remake == ()
    with pytest.raises(IndexRefused, match="group 0 is out of order: the next one is 4"):
        await admit(other, range(1))
    assert (await claim(other, "rollout", version=0)).group.tolist() == [
        group for group in range(4) for _ in range(3)
    ]


async def test_a_released_row_is_named(dock: Dock) -> None:
    await admit(dock, range(3))
    held = await claim(dock, "rollout", version=0)
    await dock.index.drop_groups(held, [1])
    responses = {"response_ids": [torch.ones(3, dtype=torch.int64)] * 6}
    with pytest.raises(StaleHandle, match="row 2 was released; this handle is stale"):
        await dock.commit(held, range(6), responses, generated=[(0, 3)] * 6)
    await respond(dock, held, positions=[0, 1, 4, 5])


# ── workers ──


async def test_a_worker_that_is_forgotten_gives_no_sign_of_life_and_holds_no_turn(
    dock: Dock,
) -> None:
    index = dock.index
    await index.beat("a", ["rollout"], 3, ready=True)
    await index.beat("b", ["reward", "advantage"], None, ready=False)
    signs = await index.alive()
    assert {name: (sign.stages, sign.version, sign.ready) for name, sign in signs.items()} == {
        "a": (("rollout",), 3, True),
        "b": (("reward", "advantage"), None, False),
    }
    assert (await index.take_swap_turn("a", most=1, lease=60)).granted
    assert (await index.take_swap_turn("a", most=1, lease=60)).granted, "it keeps its turn"
    other = await index.take_swap_turn("b", most=1, lease=60)
    assert not other.granted
    assert 0 < other.due <= 60
    await index.forget_worker("a")
    assert await index.wait(SWAP, other.wait, 0.01), "the next one is woken"
    assert list(await index.alive()) == ["b"]
    assert (await index.take_swap_turn("b", most=1, lease=60)).granted
    third = await index.take_swap_turn("c", most=1, lease=60)
    await index.end_swap_turn("c")  # it has none
    assert not await index.wait(SWAP, third.wait, 0.01)
    await index.end_swap_turn("b")
    assert await index.wait(SWAP, third.wait, 0.01)
    assert (await index.take_swap_turn("c", most=1, lease=60)).granted
    assert (await index.take_swap_turn("d", most=2, lease=60)).granted


async def test_what_training_waits_for_is_the_oldest_group_and_who_holds_it(dock: Dock) -> None:
    index = dock.index
    found = await index.waiting()
    assert (found.trainer, found.group, found.stage, found.holders) == ("update", None, "", ())
    await admit(dock, range(3))
    found = await index.waiting()
    assert (found.group, found.stage, found.rows, found.holders, found.settled) == (
        0,
        "rollout",
        2,
        (),
        0,
    )
    first = await index.claim("rollout", "one", 1, 60.0, 0, dock.home or 0)
    second = await index.claim("rollout", "two", 2, 60.0, 0, dock.home or 0)
    assert isinstance(first, Claim)
    assert isinstance(second, Claim)
    await respond(dock, first, positions=[0])
    found = await index.waiting()
    assert (found.group, found.stage, found.rows, found.settled) == (0, "rollout", 1, 1)
    assert [worker for worker, _ in found.holders] == ["one"], "the other one holds later groups"
    assert 0 <= found.now - found.holders[0][1] < 600_000
    await respond(dock, first, positions=[1])
    found = await index.waiting()
    assert (found.group, found.stage, found.rows, found.holders) == (0, "reward", 2, ())
    one_each = [
        await index.claim("reward", worker, 1, 60.0, home=dock.home or 0)
        for worker in ("one", "two")
    ]
    await respond(dock, second)
    await through_advantage(dock)
    found = await index.waiting()
    assert (found.group, found.stage, found.rows) == (0, "reward", 2), (
        "the trainer could claim the later ones"
    )
    assert sorted(worker for worker, _ in found.holders) == ["one", "two"]
    for held in one_each:
        assert isinstance(held, Claim)
        await index.hand_back(held)
    await through_advantage(dock)
    found = await index.waiting()
    assert found.group is None, "the trainer could claim all"
    assert found.settled == 3 * 6, "six rows of three stages, committed together or one by one"


# ── room ──


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    sizes=st.lists(st.integers(1, 1500), min_size=1, max_size=25),
    rng=st.randoms(use_true_random=False),
)
async def test_room_is_given_once_and_comes_back_whole(
    index_url: str, tmp_path: Path, sizes: list[int], rng: random.Random
) -> None:
    """Blocks never overlap; when all are free, one of the whole warehouse fits."""
    capacity = 64 * 100
    async with Index(index_url, f"room-{rng.getrandbits(40)}") as index:
        try:
            await index.init(config(), COUNTERS)
            await index.join_warehouse("house", "node", tmp_path / "arena", capacity)
            (house,) = await index.warehouses()
            held: dict[int, tuple[int, int]] = {}
            for size in sizes:
                if held and rng.random() < 0.4:
                    number = rng.choice(list(held))
                    await index.close_blocks("w", [number])
                    del held[number]
                block = await index.allocate(house.number, "w", size)
                needed = -(-size // 64) * 64
                if isinstance(block, Full):
                    assert _largest_gap(held, capacity) < needed
                    continue
                assert 0 <= block.offset <= capacity - needed
                for offset, length in held.values():
                    assert block.offset + needed <= offset or offset + length <= block.offset
                held[block.number] = block.offset, needed
                used = (await index.stats())["warehouses"]["house"]["used"]
                assert used == sum(length for _, length in held.values())
            await index.close_blocks("w", list(held))
            whole = await index.allocate(house.number, "w", capacity)
            assert isinstance(whole, Block)
            assert whole.offset == 0
            with pytest.raises(NeverFits):
                await index.allocate(house.number, "w", capacity + 1)
        finally:
            await index.erase()


def _largest_gap(held: dict[int, tuple[int, int]], capacity: int) -> int:
    ends = [
        0,
        *(edge for offset, length in sorted(held.values()) for edge in (offset, offset + length)),
        capacity,
    ]
    return max(after - before for before, after in zip(ends[::2], ends[1::2], strict=True))


async def test_a_reserve_is_left_for_later_stages(dock: Dock) -> None:
    assert dock.home is not None
    first = await dock.index.allocate(dock.home, "w", 1 << 19)
    assert isinstance(first, Block)
    held = await dock.index.allocate(dock.home, "source", 1 << 18, reserve=1 << 18)
    assert isinstance(held, Block), "exactly as much is free beside the reserve"
    full = await dock.index.allocate(dock.home, "source", 64, reserve=1 << 18)
    assert isinstance(full, Full)
    waiting = asyncio.create_task(dock.index.wait(ROOM, full.wait, 60))
    with pytest.raises(NeverFits):
        await dock.index.allocate(dock.home, "source", (1 << 20) - 64, reserve=128)
    assert isinstance(await dock.index.allocate(dock.home, "later", 1 << 18), Block), (
        "the reserve is for others"
    )
    await dock.index.close_blocks("w", [first.number])
    assert await asyncio.wait_for(waiting, 60), "room is told"
