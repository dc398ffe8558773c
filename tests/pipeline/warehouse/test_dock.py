"""What a run relies on from the sample flow, against a real server."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.data.arena import Arena, StaleHandle
from pipeline.data.columns import Column, ColumnError, Schema
from pipeline.documents.flow import VERSION
from pipeline.index.client import (
    BoundBroken,
    Claim,
    GateClosed,
    Index,
    IndexRefused,
    IndexUnreachable,
    LeaseLost,
    NeverFits,
    RunConfig,
    StageSpec,
)
from pipeline.index.link import PipelinedConnection
from pipeline.index.warehouses import Block
from pipeline.warehouse.dock import Dock, NoRoom

SCHEMA = Schema(
    [
        Column.ragged("prompt_ids", torch.int64),
        Column.text("answer"),
        Column.ragged("response_ids", torch.int64),
        Column.scalar("reward", torch.float32),
        Column.scalar("advantage", torch.float32),
    ]
)
STAGES = (
    StageSpec("rollout", "groups", SCHEMA.mask(["prompt_ids"]), SCHEMA.mask(["response_ids"])),
    StageSpec("reward", "rows", SCHEMA.mask(["response_ids", "answer"]), SCHEMA.mask(["reward"])),
    StageSpec("advantage", "groups", SCHEMA.mask(["reward"]), SCHEMA.mask(["advantage"])),
    StageSpec("update", "batch", SCHEMA.mask(["response_ids", "advantage"]), 0),
)
COUNTERS = {"published": 0, "trained": 0, "admitted": 0}


def config(
    *, groups_per_step: int = 2, slack: int = 1, window: int = 1, staleness: int = 1
) -> RunConfig:
    return RunConfig(STAGES, groups_per_step, slack, window, staleness)


@pytest.fixture
async def dock(index: Index, tmp_path: Path) -> Dock:
    await index.init(config(), COUNTERS)
    dock = Dock(index, SCHEMA, worker="w", directory=tmp_path, slab=0)
    await dock.join(1 << 20)
    return dock


def prompts(numbers: range) -> dict[str, object]:
    return {
        "prompt_ids": [torch.arange(3 + n, dtype=torch.int64) for n in numbers],
        "answer": [f"answer {n} é" for n in numbers],
    }


async def admit(dock: Dock, numbers: range, samples: int = 2) -> None:
    await dock.admit([(n, samples) for n in numbers], prompts(numbers))


async def claim(dock: Dock, stage: str, most: int = 100, version: int | None = None) -> Claim:
    found = await dock.claim(stage, most, version=version)
    assert found is not None, f"{stage} finds nothing"
    return found


async def respond(
    dock: Dock, claimed: Claim, positions: list[int] | None = None, version: int = 0
) -> None:
    for position in positions if positions is not None else range(len(claimed)):
        row = claimed.rows[position]
        response = torch.tensor([row.row, row.group, row.place])
        await dock.commit(
            claimed, [position], {"response_ids": [response]}, generated=[(version, 3)]
        )


async def through_advantage(dock: Dock, version: int = 0) -> None:
    """Everything that is ready goes as far as the update."""
    while (rollout := await dock.claim("rollout", 100, version=version)) is not None:
        await respond(dock, rollout, version=version)
    for stage, column in (("reward", "reward"), ("advantage", "advantage")):
        while (found := await dock.claim(stage, 100)) is not None:
            count = len(found)
            await dock.commit(
                found, range(count), {column: torch.arange(count, dtype=torch.float32)}
            )


async def test_a_sample_passes_every_stage_and_its_columns_come_back_in_the_order_asked(
    dock: Dock,
) -> None:
    await admit(dock, range(4))
    rollout = await claim(dock, "rollout", 4, version=0)
    assert [(row.group, row.place) for row in rollout.rows] == [
        (g, p) for g in range(4) for p in range(2)
    ]
    await respond(dock, rollout, positions=[7, 0, 3, 2, 1, 6, 5, 4])
    reward = await claim(dock, "reward")
    fetched = await dock.fetch(reward, ["response_ids", "answer", "prompt_ids"])
    for i, row in enumerate(reward.rows):
        assert fetched["response_ids"][i].tolist() == [row.row, row.group, row.place]
        assert fetched["answer"][i] == f"answer {row.group} é"
        assert fetched["prompt_ids"][i].tolist() == list(range(3 + row.group))


async def test_rows_that_lie_side_by_side_are_views_of_shared_memory(dock: Dock) -> None:
    await admit(dock, range(2), samples=1)
    rollout = await claim(dock, "rollout", version=0)
    await dock.commit(
        rollout,
        [0, 1],
        {"response_ids": [torch.tensor([1, 2]), torch.tensor([3])]},
        generated=[(0, 2), (0, 1)],
    )
    other = Dock(dock.index, SCHEMA, worker="other", directory=dock.folder, slab=0)
    reward = await claim(other, "reward")
    values = (await other.fetch(reward, ["response_ids"]))["response_ids"].values()
    arena = Arena(dock.folder / "arena-local")
    at = (
        int(values.data_ptr())
        - torch.frombuffer(
            other.warehouses.arena(other.warehouses.records[1]).slice(0, 1), dtype=torch.uint8
        ).data_ptr()
    )
    assert 0 <= at < arena.nbytes
    assert bytes(arena.slice(at, 24)) == torch.tensor([1, 2, 3]).numpy().tobytes()


async def test_groups_are_taken_whole_and_never_mixed(dock: Dock) -> None:
    await admit(dock, range(4), samples=3)
    rollout = await claim(dock, "rollout", version=0)
    await respond(dock, rollout, positions=[0, 1, 3, 4, 5])  # group 0 lacks one
    rewards = await claim(dock, "reward")
    await dock.commit(rewards, range(5), {"reward": torch.ones(5)})
    advantage = await claim(dock, "advantage")
    assert [row.group for row in advantage.rows] == [1, 1, 1]
    assert (
        len(
            {
                tuple(t.tolist())
                for t in (await dock.fetch(advantage, ["prompt_ids"]))["prompt_ids"].unbind()
            }
        )
        == 1
    )


async def test_the_gate_refuses_and_opens_with_the_published_version(dock: Dock) -> None:
    await admit(dock, range(4))
    with pytest.raises(GateClosed, match="group 4 is past the gate, which stands at 4"):
        await admit(dock, range(4, 5))
    await through_advantage(dock)
    await dock.index.train(await claim(dock, "update"), 0)
    await dock.index.publish_weights(1, {"slot": 0})
    await admit(dock, range(4, 6))
    with pytest.raises(IndexRefused, match="out of order"):
        await admit(dock, range(7, 8))


async def test_an_engine_with_old_weights_gets_no_group_that_it_would_make_too_old(
    dock: Dock,
) -> None:
    await admit(dock, range(4))
    await through_advantage(dock)
    await dock.index.train(await claim(dock, "update"), 0)
    await dock.index.publish_weights(1, {})
    await admit(dock, range(4, 6))
    assert await dock.claim("rollout", 10, version=0) is None
    assert {row.group for row in (await claim(dock, "rollout", 10, version=1)).rows} == {4, 5}


async def test_the_bound_is_checked_where_samples_are_consumed(
    index: Index, tmp_path: Path
) -> None:
    # a sabotaged gate: far more slack than the bound allows
    await index.init(config(slack=9, staleness=1), COUNTERS)
    dock = Dock(index, SCHEMA, worker="w", directory=tmp_path, slab=0)
    await dock.join(1 << 20)
    await admit(dock, range(6))
    await through_advantage(dock)  # all of them with version 0
    for step in (0, 1):
        await index.train(await claim(dock, "update"), step)
    with pytest.raises(BoundBroken, match="made by version 0 and would be trained at version 2"):
        await dock.claim("update", 1)


async def test_a_straggler_is_passed_only_inside_the_window(index: Index, tmp_path: Path) -> None:
    await index.init(config(window=3, slack=2, staleness=3), COUNTERS)
    dock = Dock(index, SCHEMA, worker="w", directory=tmp_path, slab=0)
    await dock.join(1 << 20)
    await admit(dock, range(6), samples=1)
    rollout = await claim(dock, "rollout", version=0)
    await respond(dock, rollout, positions=[1, 3, 4, 5])  # 0 and 2 are slow
    await through_advantage(dock)
    assert await dock.claim("update", 1) is None  # 0 is missing: 1 is inside its window, 3 is not
    await respond(dock, rollout, positions=[2])
    await through_advantage(dock)
    assert [row.group for row in (await claim(dock, "update")).rows] == [1, 2]


async def test_an_expired_lease_is_delivered_again_and_its_late_commit_refused(dock: Dock) -> None:
    await admit(dock, range(1))
    slow = Dock(dock.index, SCHEMA, worker="slow", directory=dock.folder, slab=0, lease=0.05)
    lost = await claim(slow, "rollout", version=0)
    again = await dock.claim("rollout", 1, version=0, timeout=5)
    assert again is not None
    assert [row.row for row in again.rows] == [row.row for row in lost.rows]
    with pytest.raises(LeaseLost, match="no longer held"):
        await respond(slow, lost)
    await respond(dock, again)
    assert (await dock.index.ledger())["generated"] == 2
    assert (await dock.index.ledger())["redelivered"] == 2


async def test_a_renewed_lease_holds(dock: Dock) -> None:
    await admit(dock, range(1))
    short = Dock(dock.index, SCHEMA, worker="short", directory=dock.folder, slab=0, lease=0.2)
    held = await claim(short, "rollout", version=0)
    assert await dock.index.renew("rollout", [held.token, "0" * 32], 60) == {held.token}
    assert await dock.claim("rollout", 1, version=0, timeout=0.3) is None
    await respond(short, held)


async def test_a_dead_workers_rows_and_bytes_come_back_at_once(dock: Dock) -> None:
    await admit(dock, range(2))
    before = (await dock.index.stats())["warehouses"]["local"]["used"]
    dead = Dock(dock.index, SCHEMA, worker="dead", directory=dock.folder, slab=0)
    lost = await claim(dead, "rollout", version=0)
    await respond(dead, lost, positions=[0])
    used = (await dock.index.stats())["warehouses"]["local"]["used"]
    await dock.index.allocate(1, "dead", 5000)  # killed inside a put
    await dock.index.forget_worker("dead")
    assert (await dock.index.stats())["warehouses"]["local"]["used"] == used > before
    again = await claim(dock, "rollout", version=0)
    assert len(again) == 3, "the committed row is not made twice"
    with pytest.raises(LeaseLost):
        await respond(dead, lost, positions=[1])


async def test_commits_are_refused_whole_and_change_nothing(dock: Dock) -> None:
    await admit(dock, range(1))
    rollout = await claim(dock, "rollout", version=0)
    await respond(dock, rollout, positions=[0])
    before = await dock.index.stats()
    with pytest.raises(LeaseLost):
        await dock.commit(
            rollout,
            [0, 1],
            {"response_ids": [torch.tensor([1]), torch.tensor([2])]},
            generated=[(0, 1), (0, 1)],
        )
    with pytest.raises(IndexRefused, match="does not declare"):
        await dock.commit(rollout, [1], {"reward": torch.ones(1)})
    with pytest.raises(ColumnError, match="takes int64 ragged, got a tensor of float32"):
        await dock.commit(rollout, [1], {"response_ids": [torch.ones(2)]}, generated=[(0, 2)])
    assert await dock.index.stats() == before
    await respond(dock, rollout, positions=[1])


async def test_no_sample_is_trained_twice_and_released_rows_are_gone(dock: Dock) -> None:
    await admit(dock, range(2))
    await through_advantage(dock)
    update = await claim(dock, "update")
    held = (await dock.fetch(update, ["advantage"]))["advantage"].clone()
    assert await dock.index.train(update, 0) == 1
    with pytest.raises(IndexRefused, match="step 1 is not next"):
        await dock.index.train(update, 0)
    with pytest.raises(LeaseLost):
        await dock.index.train(update, 1)
    replayed = await dock.index.replay(0)
    assert torch.equal((await dock.fetch(replayed, ["advantage"]))["advantage"], held)
    assert await dock.index.release_steps(1) == 2
    stats = await dock.index.stats()
    assert stats["warehouses"]["local"]["used"] == stats["rows"] == stats["blocks"] == 0
    with pytest.raises(StaleHandle):
        await dock.index.replay(0)
    await dock.index.publish_weights(1, {})
    await admit(dock, range(2, 4))  # overwrites the freed bytes
    with pytest.raises(StaleHandle):
        await dock.fetch(update, ["prompt_ids"])


async def test_the_ledger_closes_at_every_moment(dock: Dock) -> None:
    async def closes() -> dict[str, int]:
        ledger = await dock.index.ledger()
        for unit in ("", "_tokens"):
            assert ledger[f"generated{unit}"] == sum(
                ledger[f"{k}{unit}"] for k in ("trained", "filtered", "in_flight")
            )
        return ledger

    await admit(dock, range(4))
    rollout = await claim(dock, "rollout", version=0)
    await respond(dock, rollout, positions=[0, 1, 2, 3, 4, 5])
    assert (await closes())["in_flight_tokens"] == 18
    rewards = await claim(dock, "reward")
    await dock.commit(rewards, range(6), {"reward": torch.ones(6)})
    advantage = await claim(dock, "advantage", 1)
    await dock.index.drop_groups(advantage, [0])
    assert (await closes())["filtered"] == 2
    await admit(dock, range(4, 5))  # the filtered group made room for one more
    await through_advantage(dock)
    await dock.index.train(await claim(dock, "update"), 0)
    assert (await closes())["trained"] == 4


async def test_what_was_dropped_by_reason_adds_up_while_groups_are_dropped(
    dock: Dock, monkeypatch: pytest.MonkeyPatch
) -> None:
    await admit(dock, range(3))
    rollout = await claim(dock, "rollout", version=0)
    await respond(dock, rollout, positions=[0, 1, 2, 3])
    rewards = await claim(dock, "reward")
    await dock.commit(rewards, range(4), {"reward": torch.ones(4)})
    held = [await claim(dock, "advantage", 1) for _ in range(2)]
    call = dock.index.call
    waiting = list(enumerate(held))

    async def drop_after_each_call(name: str, **arguments: Any) -> Any:
        answer = await call(name, **arguments)
        if name != "drop_groups" and waiting:
            group, one = waiting.pop(0)
            await dock.index.drop_groups(one, [group], f"reason {group}")
        return answer

    monkeypatch.setattr(dock.index, "call", drop_after_each_call)
    events = [await dock.index.ledger_event() for _ in range(3)]
    assert [event.filtered for event in events] == [0, 2, 4]
    for event in events:
        assert sum(event.dropped.values()) * 2 == event.filtered
        assert sum(event.dropped_tokens.values()) == event.filtered_tokens


async def test_without_slack_replacements_are_admitted_together_when_the_other_groups_wait_for_training(
    index: Index, tmp_path: Path
) -> None:
    """Which groups are decided first does not change what is decoded together."""
    await index.init(config(groups_per_step=4, slack=0, staleness=0), COUNTERS)
    dock = Dock(index, SCHEMA, worker="w", directory=tmp_path, slab=0)
    await dock.join(1 << 20)
    await admit(dock, range(4))
    await respond(dock, await claim(dock, "rollout", version=0))
    rewards = await claim(dock, "reward")
    await dock.commit(rewards, range(len(rewards)), {"reward": torch.ones(len(rewards))})
    gates = []
    for group, dropped in ((0, False), (1, True), (2, True), (3, False)):
        held = await claim(dock, "advantage", 1)
        wait = (await dock.index.status()).wait
        if dropped:
            await dock.index.drop_groups(held, [group])
        else:
            await dock.commit(held, range(len(held)), {"advantage": torch.ones(len(held))})
        if group:
            assert await dock.index.wait(VERSION, wait, 5), "the gate is woken"
        gates.append((await dock.index.status()).gate)
    assert gates == [4, 4, 4, 6]


async def test_a_full_warehouse_makes_producers_wait_until_rows_are_released(
    index: Index, tmp_path: Path
) -> None:
    await index.init(config(slack=0, staleness=0), COUNTERS)
    dock = Dock(index, SCHEMA, worker="w", directory=tmp_path, slab=0, room_timeout=0.1)
    await dock.join(8192)
    await admit(dock, range(2))
    rollout = await claim(dock, "rollout", version=0)
    big = {"response_ids": [torch.zeros(700, dtype=torch.int64)]}
    await dock.commit(rollout, [0], big, generated=[(0, 700)])
    with pytest.raises(NoRoom, match="stayed full"):
        await dock.commit(rollout, [1], big, generated=[(0, 700)])
    with pytest.raises(NeverFits, match="can never fit"):
        await dock.commit(
            rollout,
            [1],
            {"response_ids": [torch.zeros(2000, dtype=torch.int64)]},
            generated=[(0, 1)],
        )
    dock.writer.room_timeout = 10
    await respond(dock, rollout, positions=[1, 2, 3])
    await through_advantage(dock)
    await index.train(await claim(dock, "update"), 0)
    await index.publish_weights(1, {})
    waiting = asyncio.create_task(dock.writer.write(big))
    assert not (await asyncio.wait([waiting], timeout=0.1))[0]
    await index.release_steps(1)
    assert (await asyncio.wait_for(waiting, 5)).mask == SCHEMA.mask(["response_ids"])


async def test_a_waiting_claim_wakes_as_soon_as_a_group_is_admitted(dock: Dock) -> None:
    waiting = asyncio.create_task(dock.claim("rollout", 10, version=0, timeout=30))
    await asyncio.sleep(0)
    await admit(dock, range(2))
    found = await asyncio.wait_for(waiting, 5)
    assert found is not None
    assert {row.group for row in found.rows} == {0, 1}, (
        "groups admitted together are claimed together"
    )


@pytest.fixture
def cut_once(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The connection is lost once, after the server has done what it was asked."""
    original = PipelinedConnection.send
    cuts = [0]

    def flaky(line: PipelinedConnection, command: tuple[Any, ...]) -> asyncio.Future[Any]:
        answer = original(line, command)
        if cuts[0] != 1:
            return answer
        cuts[0] += 1
        lost = asyncio.get_running_loop().create_future()
        answer.add_done_callback(
            lambda _: (line.close(), lost.set_exception(ConnectionError("the reply was lost")))
        )
        return lost

    monkeypatch.setattr(PipelinedConnection, "send", flaky)
    return cuts


async def test_a_repeated_call_after_a_lost_connection_is_answered_not_done_again(
    dock: Dock, cut_once: list[int]
) -> None:
    cut_once[0] = 1
    await admit(dock, range(2))
    assert cut_once == [2]
    assert (await dock.index.stats())["admitted"] == 2
    cut_once[0] = 1
    claimed = await claim(dock, "rollout", version=0)
    assert cut_once == [2]
    assert [(row.group, row.place) for row in claimed.rows] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    stats = (await dock.index.stats())["stages"]["rollout"]
    assert stats == {"ready": 0, "leased": 4, "takes": "groups", "begun": 0, "parked": 0}
    cut_once[0] = 1
    await respond(dock, claimed, positions=[0])
    assert cut_once == [2]
    assert (await dock.index.ledger())["generated"] == 1
    assert await dock.claim("rollout", 1, version=0) is None, (
        "a repeated empty answer is an answer too"
    )


async def test_a_cancelled_call_is_always_cancelled(dock: Dock) -> None:
    """redis-py may lose a cancellation that meets an arriving reply; a worker that is asked to end
    would hang."""
    for turns in range(200):
        call = asyncio.create_task(dock.index.stats())
        for _ in range(turns % 12):
            await asyncio.sleep(0)
        if call.done() or not call.cancel():
            continue
        with pytest.raises(asyncio.CancelledError):
            await call


async def test_an_unreachable_index_is_a_clear_error_within_the_deadline() -> None:
    index = Index("redis://:secret@127.0.0.1:1", "x", timeout=0.3)
    with pytest.raises(IndexUnreachable, match="no answer") as caught:
        await index.stats()
    assert "secret" not in str(caught.value)
    await index.close()


async def test_room_is_joined_again_whatever_the_order_of_release(dock: Dock) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        blocks = []
        for size in torch.randint(1, 5000, (60,), generator=generator).tolist():
            reply = await dock.index.allocate(1, "w", size)
            assert isinstance(reply, Block)
            blocks.append((reply.number, reply.offset, -(-size // 64) * 64))
        spans = sorted((offset, offset + size) for _, offset, size in blocks)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans)), "blocks overlap"
        for i in torch.randperm(60, generator=generator).tolist():
            await dock.index.close_blocks("w", [blocks[i][0]])
        whole = await dock.index.allocate(1, "w", 1 << 20)
        assert isinstance(whole, Block)
        assert whole.offset == 0, "all bytes are one free piece again"
        await dock.index.close_blocks("w", [whole.number])


async def test_transitions_follow_the_allowed_moves(index: Index) -> None:
    assert await index.transition([""], "created") == ("created", True)
    assert await index.transition(["running"], "paused") == ("created", False)
    assert (await index.state())[:2] == ("created", "")
    assert await index.transition(["created"], "stopping", "the user asked for it") == (
        "stopping",
        True,
    )
    assert (await index.state())[:2] == ("stopping", "the user asked for it")
    assert await index.states([index.run, "unknown"]) == [
        ("stopping", "the user asked for it"),
        ("", ""),
    ]


@pytest.mark.parametrize("slab", [0, 1 << 14])
async def test_cancelled_writes_leave_no_bytes_behind(
    index: Index, tmp_path: Path, slab: int
) -> None:
    """Whether the index had done a cancelled put or not: what is there is whole, and all bytes come
    back."""
    schema = Schema([Column.scalar("number", torch.int64)])
    stages = (StageSpec("last", "rows", 1, 0, releases=True),)
    await index.init(RunConfig(stages), {})
    dock = Dock(index, schema, worker="w", directory=tmp_path, slab=slab)
    await dock.join(1 << 19)
    for turns in range(60):
        puts = [asyncio.create_task(dock.put({"number": torch.tensor([turns])})) for _ in range(3)]
        for _ in range(turns):
            await asyncio.sleep(0)
        for put in puts:
            put.cancel()
        await asyncio.gather(*puts, return_exceptions=True)
    while (found := await dock.claim("last", 50)) is not None:
        rows = await dock.fetch(found, ["number"])
        assert rows["number"].min() >= 0
        await dock.commit(found, range(len(found)), None)
    await dock.close()
    stats = await index.stats()
    assert (stats["rows"], stats["blocks"], stats["warehouses"]["local"]["used"]) == (0, 0, 0)


def test_an_arena_of_another_size_is_refused(tmp_path: Path) -> None:
    Arena.create(tmp_path / "arena", 1 << 20)
    with pytest.raises(ValueError, match="is 1048576 bytes, not 2097152; a run's arena cannot"):
        Arena.create(tmp_path / "arena", 1 << 21)
