"""What the index keeps of trained rows for later steps, and what it refuses of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pipeline.data.arena import StaleHandle
from pipeline.data.events import StepEvent
from pipeline.index.client import BoundBroken, Claim, Index, IndexRefused
from pipeline.warehouse.dock import Dock
from tests.pipeline.index.test_training_calls import opened
from tests.pipeline.warehouse.test_dock import admit, claim, config, through_advantage

P = 2  # groups a step, each of two rows with three tokens


async def ready(index: Index, folder: Path, versions: int, steps: int) -> Dock:
    """A dock in which the groups of ``steps`` steps can be trained."""
    limits = config(groups_per_step=P, slack=steps, window=1, staleness=steps)
    dock = await opened(index, folder, replace(limits, replay_versions=versions))
    await admit(dock, range(P * steps))
    await through_advantage(dock)
    return dock


async def train(
    dock: Dock, version: int, replayed: tuple[int, ...] = (), skipped: str = ""
) -> Claim:
    update = await claim(dock, "update")
    event = StepEvent(
        step=version + 1,
        version=version + 1,
        rows=len(update),
        groups=[],
        reward_mean=None,
        tokens_generated=0,
        tokens_trained=0,
        tokens_filtered=0,
        skipped=skipped,
    )
    assert await dock.index.train(update, version, event, replayed=replayed) == version + 1
    await dock.index.publish_weights(version + 1, {})
    return update


def groups_of(rows: Claim) -> list[int]:
    return rows.group.tolist()[::2]


async def test_trained_rows_stay_for_so_many_versions_and_are_counted_apart(
    index: Index, tmp_path: Path
) -> None:
    dock = await ready(index, tmp_path, versions=1, steps=4)
    assert await index.replayable() == []
    await train(dock, 0)
    assert await index.replayable() == [0, 1]
    earlier = await index.trained_rows([1])
    fresh = await claim(dock, "update")
    joined = fresh.joined(earlier)
    assert groups_of(joined) == [2, 3, 1]
    responses = (await dock.fetch(joined, ["response_ids"]))["response_ids"].unbind()
    assert [row[1].item() for row in responses] == [2, 2, 3, 3, 1, 1]
    assert torch.equal(responses[-1], torch.tensor([3, 1, 1]))
    again = Claim("", "", joined.record())
    assert again.row.tolist() == joined.row.tolist()
    await index.hand_back(fresh)

    await train(dock, 1, replayed=(1,))
    assert await index.replayable() == [2, 3]
    assert groups_of(await index.replay(1)) == [2, 3, 1]
    ledger = await index.ledger()
    assert (ledger["trained"], ledger["replayed"], ledger["replayed_tokens"]) == (8, 2, 6)
    assert ledger["generated"] == ledger["trained"] + ledger["in_flight"]
    point = await index.resume_point()
    assert point.counters["replayed_rows"] == 2

    assert await index.release_steps(1) == 0, "the step at 1 may be made of these again"
    assert groups_of(await index.replay(1)) == [2, 3, 1]
    assert await index.release_steps(2) == P
    with pytest.raises(StaleHandle, match="group 0 of an earlier step"):
        await index.trained_rows([0, 1])
    assert await index.replayable() == [2, 3]
    await train(dock, 2)
    await train(dock, 3)
    assert await index.release_steps(4) == 2 * P
    assert await index.replayable() == [6, 7]
    assert (await index.stats())["rows"] == 2 * P


async def test_without_replay_nothing_is_kept(index: Index, tmp_path: Path) -> None:
    dock = await ready(index, tmp_path, versions=0, steps=1)
    await train(dock, 0)
    assert await index.replayable() == []
    assert await index.release_steps(1) == P
    assert (await index.stats())["rows"] == 0


async def test_what_was_not_trained_or_is_too_old_is_not_replayed(
    index: Index, tmp_path: Path
) -> None:
    limits = config(groups_per_step=1, slack=1, window=1, staleness=1)
    dock = await opened(index, tmp_path, replace(limits, replay_versions=1))
    for version in range(3):
        await admit(dock, range(version, version + 1))
        await through_advantage(dock, version)
        if version < 2:
            update = await claim(dock, "update")
            await index.train(update, version)
            await index.publish_weights(version + 1, {})
    await admit(dock, range(3, 4))
    update = await claim(dock, "update")
    with pytest.raises(IndexRefused, match="row 6 was not trained"):
        await index.train(update, 2, replayed=[3])
    assert await index.train(update, 2, replayed=[0, 1]) == 3
    await index.publish_weights(3, {})
    await through_advantage(dock, 3)
    update = await claim(dock, "update")
    with pytest.raises(BoundBroken, match="replayed row 0 of version 0 at version 3: the bound is"):
        await index.train(update, 3, replayed=[0, 1])


async def test_the_groups_of_a_skipped_step_are_not_trained_again(
    index: Index, tmp_path: Path
) -> None:
    dock = await ready(index, tmp_path, versions=2, steps=2)
    await train(dock, 0, skipped="the gradient norm is inf")
    await train(dock, 1)
    assert await index.replayable() == [2, 3]


async def test_a_step_cannot_be_made_again_when_rows_that_it_replayed_are_lost(
    index: Index, tmp_path: Path
) -> None:
    limits = config(groups_per_step=P, slack=2, window=1, staleness=2)
    dock = await opened(index, tmp_path, replace(limits, replay_versions=1))
    other = Dock(index, dock.schema, worker="o", directory=tmp_path, warehouse="other", slab=0)
    await other.join(1 << 20)
    for version, home in enumerate((dock, other)):
        await admit(home, range(P * version, P * version + P))
        await through_advantage(home)
    await train(dock, 0)
    await train(dock, 1, replayed=(0,))
    assert groups_of(await index.replay(1)) == [2, 3, 0]
    await index.lose_warehouse(dock.home)
    with pytest.raises(StaleHandle, match="group 0 of an earlier step"):
        await index.replay(1)
    assert await index.replayable() == [2, 3]
