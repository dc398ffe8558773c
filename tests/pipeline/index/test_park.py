"""Parked rows: any worker of the stage continues them, from the last acknowledged progress."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.data.arena import StaleHandle
from pipeline.data.columns import Column, Schema
from pipeline.index.client import (
    Claim,
    Index,
    IndexRefused,
    LeaseLost,
    RunConfig,
    StageSpec,
    WrittenTwice,
)
from pipeline.warehouse import directory
from pipeline.warehouse.dock import Dock

SCHEMA = Schema(
    [
        Column.ragged("prompt", torch.int64),
        Column.ragged("response", torch.int64),
        Column.scalar("ended", torch.bool),
        Column.scalar("score", torch.float32),
    ]
)
STAGES = (
    StageSpec("rollout", "groups", SCHEMA.mask(["prompt"]), SCHEMA.mask(["response", "ended"])),
    StageSpec("score", "rows", SCHEMA.mask(["response"]), SCHEMA.mask(["score"])),
    StageSpec("update", "batch", SCHEMA.mask(["response", "score"]), 0),
)
ARENA = 1 << 20


@pytest.fixture
async def nodes(index: Index, tmp_path: Path) -> AsyncIterator[tuple[Dock, Dock]]:
    """Two nodes of one run, P = 1, S = 1."""
    await index.init(
        RunConfig(STAGES, 1, 1, 1, 1, headstart=0.0), {"published": 0, "trained": 0, "admitted": 0}
    )
    docks = []
    for name in ("a", "b"):
        where: dict[str, Any] = {
            "worker": name,
            "warehouse": name,
            "node": name,
            "secret": b"sixteen bytes or more",
        }
        docks.append(
            Dock(index, SCHEMA, directory=tmp_path / name, wire_timeout=3.0, slab=0, **where)
        )
        await docks[-1].join(ARENA)
        await docks[-1].serve("127.0.0.1")
    yield docks[0], docks[1]
    for dock in docks:
        await dock.close()


async def admit(dock: Dock, *groups: int, samples: int = 4) -> None:
    await dock.admit(
        [(g, samples) for g in groups], {"prompt": [torch.tensor([100 * g, g]) for g in groups]}
    )


async def claim(dock: Dock, most: float = 100, version: int = 0, timeout: float = 0.0) -> Claim:
    found = await dock.claim("rollout", most, version=version, timeout=timeout)
    assert found is not None
    return found


async def park(
    dock: Dock, claimed: Claim, positions: list[int], tokens: int, version: int = 0
) -> None:
    rows = {"response": [torch.arange(tokens) + claimed.rows[i].row for i in positions]}
    await dock.park(claimed, positions, rows, generated=[(version, tokens)] * len(positions))


async def commit(
    dock: Dock, claimed: Claim, positions: list[int], tokens: int, version: int = 0
) -> None:
    responses = [torch.arange(tokens) + claimed.rows[i].row for i in positions]
    rows = {"response": responses, "ended": torch.ones(len(positions), dtype=torch.bool)}
    await dock.commit(claimed, positions, rows, generated=[(version, tokens)] * len(positions))


async def test_a_parked_row_is_continued_by_any_free_worker(nodes: tuple[Dock, Dock]) -> None:
    a, b = nodes
    await admit(a, 0)
    first = await claim(a)
    await commit(a, first, [1], 3)
    await park(a, first, [2, 0], 5)
    with pytest.raises(LeaseLost):
        await commit(a, first, [2], 6)
    second = await claim(b)
    assert [(row.place, row.oldest_version, row.tokens) for row in second.rows] == [
        (0, 0, 5),
        (2, 0, 5),
    ]
    positions, begun = await b.begun(second, ["response"])
    assert positions == [0, 1]
    assert begun["response"].lists() == [[0, 1, 2, 3, 4], [2, 3, 4, 5, 6]]
    assert await b.claim("score", 10) is not None, "what has ended goes on"
    assert (await a.index.ledger())["generated"] == 1, (
        "a response that has not ended is not counted"
    )
    await park(b, second, [0, 1], 9)
    third = await claim(a)
    assert [row.tokens for row in third.rows] == [9, 9]
    await commit(a, third, [0, 1], 12)
    await commit(a, first, [3], 4)
    ledger = await a.index.ledger()
    assert (ledger["generated"], ledger["generated_tokens"], ledger["redelivered"]) == (
        4,
        3 + 12 + 12 + 4,
        0,
    )
    stats = await a.index.stats()
    assert stats["stages"]["rollout"] == {
        "takes": "groups",
        "ready": 0,
        "leased": 0,
        "begun": 0,
        "parked": 0,
    }
    assert stats["blocks"] == 4, "prompts, and three commits: no progress is left behind"


async def test_a_waiting_claim_wakes_when_a_row_is_parked(nodes: tuple[Dock, Dock]) -> None:
    a, b = nodes
    await admit(a, 0)
    first = await claim(a)
    waiting = asyncio.create_task(claim(b, timeout=20.0))
    await asyncio.sleep(0)
    await park(a, first, [3], 2)
    async with asyncio.timeout(10):
        assert [row.place for row in (await waiting).rows] == [3]


async def test_parked_rows_come_first_and_each_takes_its_share_of_a_group(
    nodes: tuple[Dock, Dock],
) -> None:
    a, b = nodes
    await admit(a, 0)
    first = await claim(a)
    await park(a, first, [0, 1, 2], 5)
    await admit(a, 1)
    assert [(row.group, row.place) for row in (await claim(b, 1)).rows] == [
        (0, 0),
        (0, 1),
        (0, 2),
    ], "no room for four more"
    await park(a, first, [3], 5)
    found = await claim(b, 2)
    assert [(row.group, row.place) for row in found.rows] == [
        (0, 3),
        (1, 0),
        (1, 1),
        (1, 2),
        (1, 3),
    ]
    assert (await b.begun(found, ["response"]))[0] == [0]


async def test_a_part_of_a_group_is_room_for_parked_rows_alone(nodes: tuple[Dock, Dock]) -> None:
    a, b = nodes
    await admit(a, 0)
    first = await claim(a)
    await admit(a, 1)
    assert await b.claim("rollout", 0.75, version=0) is None
    await park(a, first, [0, 1, 2], 5)
    assert [row.place for row in (await claim(b, 0.5)).rows] == [0, 1]
    assert [(row.group, row.place) for row in (await claim(b, 1.0)).rows] == [(0, 2)]
    assert [row.group for row in (await claim(b, 1.75)).rows] == [1] * 4


async def test_a_parked_row_goes_to_no_engine_that_may_not_touch_its_group(
    nodes: tuple[Dock, Dock],
) -> None:
    """P = 1, S = 1: group 2 enters with version 1, and an engine that still has version 0 leaves it
    alone."""
    a, b = nodes
    await admit(a, 0, 1, samples=1)
    found = await claim(a)
    await commit(a, found, [0, 1], 2)
    scored = await a.claim("score", 2)
    assert scored is not None
    await a.commit(scored, [0, 1], {"score": torch.zeros(2)})
    update = await a.claim("update", 1)
    assert update is not None
    await a.index.train(update, 0)
    await a.index.publish_weights(1, {})
    await admit(a, 2, samples=1)
    await park(a, await claim(a, version=1), [0], 5, version=1)
    assert await b.claim("rollout", 10, version=0) is None
    found = await claim(b, version=1)
    with pytest.raises(
        IndexRefused,
        match="was begun by version 1 with 5 tokens, and cannot be of version 2 with 7",
    ):
        await commit(b, found, [0], 7, version=2)
    await commit(b, found, [0], 7, version=1)


async def test_a_dead_workers_rows_come_back_with_what_was_parked_last(
    nodes: tuple[Dock, Dock],
) -> None:
    a, b = nodes
    await admit(a, 0, 1)
    first = await claim(a, 1)
    await commit(a, first, [0], 2)
    await park(a, first, [1], 3)
    again = await claim(a, 2)  # the parked row, and group 1
    assert [(row.group, row.place) for row in again.rows] == [
        (0, 1),
        (1, 0),
        (1, 1),
        (1, 2),
        (1, 3),
    ]
    await a.index.forget_worker("a")
    found = await claim(b)
    assert [(row.group, row.place, row.tokens) for row in found.rows] == [
        *[(0, 1, 3), (0, 2, 0), (0, 3, 0)],
        *((1, place, 0) for place in range(4)),
    ]
    assert (await b.begun(found, ["response"]))[0] == [0]
    assert (await b.index.ledger())["redelivered"] == 7
    with pytest.raises(LeaseLost):
        await park(a, again, [0], 9)


async def test_progress_moves_with_a_draining_warehouse_and_is_made_again_when_its_node_is_lost(
    nodes: tuple[Dock, Dock], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "SILENT_SECONDS", 0.0)
    a, b = nodes
    await admit(a, 0)
    await park(a, await claim(a), [0, 1, 2, 3], 5)
    await a.drain()
    found = await claim(b)
    positions, begun = await b.begun(found, ["response"])
    assert positions == [0, 1, 2, 3]
    assert begun["response"].lists()[3] == [3, 4, 5, 6, 7]
    await b.close()  # the node is gone, and with it all that the drain has moved there
    with pytest.raises(StaleHandle, match="made again"):
        await a.begun(found, ["response"])
    assert (await a.index.stats())["stages"]["rollout"]["begun"] == 0
    assert (await a.index.ledger())["remade"] == 0, "what has not ended was never counted"
    assert (await a.index.status()).remake == (0,)


async def test_only_what_can_be_continued_is_parked(nodes: tuple[Dock, Dock]) -> None:
    a, _ = nodes
    await admit(a, 0)
    first = await claim(a)
    await commit(a, first, [0], 2)
    with pytest.raises(IndexRefused, match="does not declare"):
        await a.park(first, [1], {"score": torch.zeros(1)}, generated=[(0, 1)])
    scored = await a.claim("score", 1)
    assert scored is not None
    with pytest.raises(IndexRefused, match="stage score takes rows; only one that takes groups"):
        await a.park(scored, [0], {"score": torch.zeros(1)}, generated=[(0, 1)])
    with pytest.raises(WrittenTwice, match="given twice"):
        await park(a, first, [1, 1], 2)
    await park(a, first, [1], 2)


TURNS = (
    StageSpec("environment", "groups", SCHEMA.mask(["prompt"]), SCHEMA.mask(["response", "ended"])),
    StageSpec("rollout", "groups", 0, 0, takes_turns_with="environment"),
    *STAGES[1:],
)


@pytest.fixture
async def turns(index: Index, tmp_path: Path) -> AsyncIterator[Dock]:
    """A run whose rows go between environment and rollout, P = 1, S = 1."""
    counters = {"published": 0, "trained": 0, "admitted": 0}
    await index.init(RunConfig(TURNS, 1, 1, 1, 1), counters)
    dock = Dock(index, SCHEMA, worker="a", directory=tmp_path, slab=0)
    await dock.join(ARENA)
    yield dock
    await dock.close()


def tokens(*rows: list[int]) -> dict[str, Any]:
    return {"response": [torch.tensor(row, dtype=torch.int64) for row in rows]}


async def claimed(dock: Dock, stage: str, most: int = 1) -> Claim:
    claim = await dock.claim(stage, most, version=0 if stage == "rollout" else None)
    assert claim is not None, f"{stage} finds nothing"
    return claim


async def progress(dock: Dock, claim: Claim) -> list[list[int]]:
    positions, rows = await dock.begun(claim, ["response"])
    return rows["response"].lists() if positions else []


async def test_two_stages_take_turns_with_a_row_until_one_commits_it(turns: Dock) -> None:
    await turns.admit([(0, 2)], {"prompt": [torch.tensor([1, 2])]})
    assert await turns.claim("rollout", 1, version=0) is None, "ready rows go to the first stage"
    claim = await claimed(turns, "environment")
    await turns.park(claim, [0, 1], tokens([7], [8]), generated=[(-1, 0)] * 2, to="rollout")
    assert await turns.claim("environment", 1) is None
    turn = await claimed(turns, "rollout")
    assert await progress(turns, turn) == [[7], [8]]
    await turns.park(turn, [1], tokens([8, 80]), generated=[(0, 1)], to="environment")
    answer = await claimed(turns, "environment")
    assert await progress(turns, answer) == [[8, 80]]
    assert answer.tokens.tolist() == [1]
    assert answer.oldest_version.tolist() == [0]
    last = {**tokens([8, 80]), "ended": torch.tensor([True])}
    await turns.commit(answer, [0], last, generated=[(0, 1)])
    await turns.park(turn, [0], tokens([7, 70]), generated=[(0, 1)])  # cut: its own stage goes on
    turn = await claimed(turns, "rollout")
    last = {**tokens([7, 70, 71]), "ended": torch.tensor([True])}
    await turns.commit(turn, [0], last, generated=[(0, 2)])
    scores = await claimed(turns, "score", 2)
    rows = await turns.fetch(scores, ["response"])
    assert sorted(row.tolist() for row in rows["response"].unbind()) == [[7, 70, 71], [8, 80]]
    ledger = await turns.index.ledger()
    assert (ledger["generated"], ledger["generated_tokens"]) == (2, 3)
    queues = (await turns.index.stats())["stages"]
    assert queues["environment"]["begun"] == 0, (
        "whichever of the two commits a row ends its progress"
    )


async def test_a_lost_turn_is_taken_again_by_its_own_stage(turns: Dock) -> None:
    await turns.admit([(0, 2)], {"prompt": [torch.tensor([1])]})
    claim = await claimed(turns, "environment")
    await turns.park(claim, [0], tokens([7]), generated=[(-1, 0)], to="rollout")
    turn = await claimed(turns, "rollout")
    await turns.index.hand_back(turn)
    await turns.index.hand_back(claim)  # of its rows, the one that was not handed on
    turn = await claimed(turns, "rollout")
    assert turn.place.tolist() == [0]
    assert await progress(turns, turn) == [[7]]
    again = await claimed(turns, "environment")
    assert again.place.tolist() == [1]
    assert await progress(turns, again) == []


async def test_training_waits_for_the_stage_whose_turn_it_is(turns: Dock) -> None:
    await turns.admit([(0, 1)], {"prompt": [torch.tensor([1])]})
    assert (await turns.index.waiting()).stage == "environment"
    claim = await claimed(turns, "environment")
    await turns.park(claim, [0], tokens([7]), generated=[(-1, 0)], to="rollout")
    missing = await turns.index.waiting()
    assert (missing.stage, missing.parked, missing.holders) == ("rollout", 1, ())
    await claimed(turns, "rollout")
    missing = await turns.index.waiting()
    assert (missing.stage, missing.parked, len(missing.holders)) == ("rollout", 0, 1)


async def test_a_row_may_begin_anew_and_only_the_first_stage_may_cut_tokens_off(
    turns: Dock,
) -> None:
    await turns.admit([(0, 1)], {"prompt": [torch.tensor([1])]})
    claim = await claimed(turns, "environment")
    await turns.park(claim, [0], tokens([7]), generated=[(-1, 0)], to="rollout")
    turn = await claimed(turns, "rollout")
    await turns.park(turn, [0], tokens([7, 8, 9]), generated=[(0, 2)], to="environment")
    claim = await claimed(turns, "environment")
    with pytest.raises(IndexRefused, match="cannot be of version 1 with 1;"):
        await turns.park(claim, [0], tokens([7, 8]), generated=[(1, 1)], to="rollout")
    await turns.park(claim, [0], tokens([7, 8]), generated=[(0, 1)], to="rollout")
    turn = await claimed(turns, "rollout")
    await turns.park(turn, [0], tokens([7, 8, 9, 9]), generated=[(0, 3)], to="rollout")
    turn = await claimed(turns, "rollout")
    with pytest.raises(IndexRefused, match="cannot be of version 0 with 2;"):
        await turns.park(turn, [0], tokens([7, 8, 9]), generated=[(0, 2)], to="environment")
    await turns.park(turn, [0], tokens([7, 8, 9, 9]), generated=[(0, 3)], to="environment")
    claim = await claimed(turns, "environment")
    await turns.park(claim, [0], tokens([7]), generated=[(-1, 0)], to="rollout")
    assert (await claimed(turns, "rollout")).tokens.tolist() == [0]


@pytest.mark.parametrize("headstart", [0.0, 0.05, 3600.0])
async def test_a_row_that_comes_back_is_left_to_the_worker_of_its_last_turn(
    headstart: float, index: Index, tmp_path: Path
) -> None:
    counters = {"published": 0, "trained": 0, "admitted": 0}
    await index.init(RunConfig(TURNS, 1, 1, 1, 1, headstart=headstart), counters)
    a, b = (Dock(index, SCHEMA, worker=name, directory=tmp_path, slab=0) for name in "ab")
    await a.join(ARENA)
    await b.join(ARENA)
    await a.admit([(0, 2)], {"prompt": [torch.tensor([1])]})
    claim = await claimed(a, "environment")
    await a.park(claim, [0, 1], tokens([7], [8]), generated=[(-1, 0)] * 2, to="rollout")
    turn = await claimed(a, "rollout")
    await a.park(turn, [0], tokens([7, 70]), generated=[(0, 1)], to="environment")
    answer = await claimed(a, "environment")
    await a.park(answer, [0], tokens([7, 70, 9]), generated=[(0, 1)], to="rollout")
    await a.park(turn, [1], tokens([8, 80]), generated=[(0, 1)])  # cut: anyone goes on
    others = await b.claim("rollout", 1, version=0)
    assert others is not None
    assert others.rows[-1].place == 1
    if headstart == 3600:
        assert await b.claim("rollout", 1, version=0, timeout=0.2) is None
        mine = await claimed(a, "rollout")
        assert mine.rows[0].place == 0
    elif len(others) == 1:  # it comes when the headstart ends, without a wake-up
        late = await b.claim("rollout", 1, version=0, timeout=60)
        assert late is not None
        assert late.rows[0].place == 0
    await b.close()
    await a.close()


async def test_rows_are_handed_to_the_partner_alone(turns: Dock) -> None:
    await turns.admit([(0, 1)], {"prompt": [torch.tensor([1])]})
    claim = await claimed(turns, "environment")
    with pytest.raises(IndexRefused, match="does not take turns with score"):
        await turns.park(claim, [0], tokens([7]), generated=[(-1, 0)], to="score")


def test_a_partner_is_an_earlier_stage_that_takes_groups() -> None:
    with pytest.raises(ValueError, match="'rollout' takes turns with 'update'"):
        RunConfig((StageSpec("rollout", "groups", 0, 0, takes_turns_with="update"), STAGES[2]))
