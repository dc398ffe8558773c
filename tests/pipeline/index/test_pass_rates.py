"""Pass rates in the index: a group counts once, when it leaves the run, and a checkpoint keeps what
choices depend on."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
import torch

from pipeline.index.client import Index
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
    await index.init(config(), COUNTERS)
    dock = Dock(index, SCHEMA, worker="w", directory=tmp_path, slab=0)
    await dock.join(1 << 20)
    return dock


async def test_a_group_counts_when_it_leaves_trained_or_dropped(dock: Dock) -> None:
    index = dock.index
    assert await index.pass_rates([0, 1], 0) == (before := await index.pass_rates([0, 1], 0))
    assert (before.next, before.chosen, before.changes) == (None, {}, 0)
    await index.choose_prompts({0: (3, "a"), 1: (5, "b"), 2: (6, "a")}, 7)
    # a gate that was killed and asks again: the first choice stands
    await index.choose_prompts({0: (9, "c")}, 7)
    await admit(dock, range(3))
    rollout = await claim(dock, "rollout", version=0)
    await respond(dock, rollout, positions=[0, 1, 2, 3])
    await index.put_outcomes({0: (0.5, True), 1: (1.0, False)})
    # made again; and one that was never chosen
    await index.put_outcomes({0: (0.25, True), 77: (0.0, False)})
    chosen = await index.pass_rates([0, 1, 2, 3], 0)
    assert (chosen.next, chosen.chosen, list(chosen.rates)) == (7, {0: 3, 1: 5, 2: 6}, [])
    point = await index.resume_point()
    await dock.index.hand_back(rollout)

    await through_advantage(dock)
    await index.put_outcomes({2: (0.0, False)})
    await index.train(await claim(dock, "update"), 0)
    trained = await index.pass_rates([0, 1, 2], 0)
    assert trained.chosen == {2: 6}
    assert [(prompt, tuple(rate)) for prompt, rate in trained.rates] == [
        ("a", (0.25, 1, 0)),
        ("b", (1, 0, 1)),
    ]

    # a run that resumes from before: its groups count again, once
    other = Index(index.url, uuid.uuid4().hex[:8])
    await other.init(config(), point.counters, point.remake, point.rates)
    resumed = await other.pass_rates([0, 1, 2], 0)
    assert (resumed.next, resumed.chosen, list(resumed.rates)) == (7, {0: 3, 1: 5, 2: 6}, [])
    assert (await other.resume_point()).rates == point.rates
    await other.erase()
    await other.close()


async def test_a_streak_counts_groups_in_a_row_and_changes_come_in_their_order(dock: Dock) -> None:
    index = dock.index
    seen = 0
    for number, (reward, taught) in enumerate(
        [(0.0, False), (0.0, False), (0.5, True), (1.0, False)]
    ):
        await index.choose_prompts({number: (number, "a")}, number + 1)
        await admit(dock, range(number, number + 1))
        await respond(dock, await claim(dock, "rollout", version=0))
        rewards = await claim(dock, "reward")
        await dock.commit(rewards, range(2), {"reward": torch.zeros(2)})
        await index.put_outcomes({number: (reward, taught)})
        await index.drop_groups(await claim(dock, "advantage"), [number], "equal rewards")
        found = await index.pass_rates([], seen)
        assert [tuple(rate) for _, rate in found.rates] == [
            (reward, number >= 2, [1, 2, 0, 1][number])
        ]
        seen = found.changes
    point = await index.resume_point()
    other = Index(index.url, uuid.uuid4().hex[:8])
    await other.init(config(), point.counters, point.remake, point.rates)
    assert [tuple(rate) for _, rate in (await other.pass_rates([], 0)).rates] == [(1, 1, 1)]
    await other.erase()
    await other.close()
