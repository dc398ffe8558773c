"""A policy and a critic of its own, over a real index and a real warehouse, with engines that only
count: a batch that one of them skips the other one undoes."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.data.columns import Packed
from pipeline.warehouse.dock import Dock
from stages.algorithms.policy_gradient.grpo import GRPO
from stages.flow.catalogue import MASK
from stages.parallel.layout import Layout
from stages.training.critic import CriticOrders, CriticRank, CriticWorker
from stages.training.rank_worker import RankWorker
from stages.training.ranks import RankGroup
from stages.training.update import Update
from tests.stages.training.claims import GROUPS, filled


class Counting:
    """Learns by counting; skips a batch when told to."""

    def __init__(self, skips: bool) -> None:
        self.skips = skips
        self.learned = 0
        self.undone = 0

    def train_batch(self, batch: Any, algorithm: Any) -> dict[str, float]:
        if self.skips:
            raise FloatingPointError("gradient norm is inf")
        self.learned += 1
        return {"loss": 0.5, "value_loss": 0.25}

    def undo(self) -> None:
        self.learned -= 1
        self.undone += 1


@asynccontextmanager
async def pair(dock: Dock, policy_skips: bool, critic_skips: bool) -> Any:
    """The update stage, and the engines of two ranks of the policy and two of the critic."""
    policies, critics = (
        [Counting(skips) for _ in range(2)] for skips in (policy_skips, critic_skips)
    )
    of_policy, of_critic = (
        [
            RankGroup(dock.index, Layout.for_training(dp=2).coordinates(rank), name)
            for rank in range(2)
        ]
        for name in ("policy", "critic")
    )

    async def save(folder: Path) -> Any:
        raise AssertionError(f"nothing is saved to {folder}")

    update = Update(
        dock,
        policies[0],  # type: ignore[arg-type]
        GRPO(),
        None,
        steps=1,
        staleness=0,
        version=0,
        after_step=save,  # type: ignore[arg-type]
        after_last=lambda: None,
        rank_group=of_policy[0],
        critic=CriticOrders(dock.index, "life"),
    )
    worker = CriticWorker(
        dock,
        critics[0],  # type: ignore[arg-type]
        GRPO(),
        CriticOrders(dock.index, "life"),
        version=0,
        save=save,
        begin=lambda: None,
        rank_group=of_critic[0],
    )
    others = [
        RankWorker(dock, policies[1], GRPO(), of_policy[1], version=0, save=save),  # type: ignore[arg-type]
        CriticRank(dock, critics[1], GRPO(), of_critic[1], version=0, save=save),  # type: ignore[arg-type]
    ]
    tasks = [asyncio.create_task(each.run()) for each in (worker, *others)]
    yield update, policies, critics
    assert update.critic is not None
    await update.critic.send("end")
    await of_policy[0].broadcast("end")
    async with asyncio.timeout(20):
        await asyncio.gather(*tasks)
    assert [each.trained for each in (worker, *others)] == [1, 1, 1], "a skipped batch counts"


@pytest.mark.parametrize(
    ("policy_skips", "critic_skips", "message"),
    [
        (True, False, "^gradient norm"),
        (False, True, "^critic: gradient norm"),
        (True, True, "^gradient norm"),
    ],
)
async def test_what_one_skips_both_ranks_of_the_other_undo(
    dock: Dock,
    policy_skips: bool,
    critic_skips: bool,
    message: str,
) -> None:
    claim, _ = await filled(dock)
    async with pair(dock, policy_skips, critic_skips) as (update, policies, critics):
        with pytest.raises(FloatingPointError, match=message):
            await update._train(claim)
    assert [engine.learned for engine in (*policies, *critics)] == [0] * 4
    assert [engine.undone for engine in policies] == [0 if policy_skips else 1] * 2
    assert [engine.undone for engine in critics] == [0 if critic_skips else 1] * 2


async def test_what_both_train_on_stays(dock: Dock) -> None:
    claim, _ = await filled(dock)
    async with pair(dock, False, False) as (update, policies, critics):
        metrics = await update._train(claim)
    assert (metrics["loss"], metrics["critic_loss"]) == (0.5, 0.5)
    assert [engine.learned for engine in (*policies, *critics)] == [1] * 4


async def test_rows_are_dealt_by_what_each_mini_batch_trains_of_them(
    dock: Dock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second group has the longest rows, and is masked: it is in no mini-batch, so the ranks
    share the three others."""
    claim, _ = await filled(dock)
    rank_group = RankGroup(dock.index, Layout.for_training(dp=2).coordinates(0))
    plain = await rank_group.deal(dock, claim, GRPO(mini_batches=2))
    for step in ({0, 1}, {2, 3}):
        assert all({int(claim.group[at]) for at in share} & step for share in plain)
    fetch = dock.fetch_packed

    async def fetch_mask(part: Any, columns: Any) -> Any:
        if list(columns) != [MASK]:
            return await fetch(part, columns)
        rows = zip(part.group.tolist(), part.tokens.tolist(), strict=True)
        masks = [torch.full((tokens,), group != 1) for group, tokens in rows]
        return {MASK: Packed.of(torch.nested.nested_tensor(masks, layout=torch.jagged))}

    monkeypatch.setattr(dock, "fetch_packed", fetch_mask)
    monkeypatch.setattr(type(dock.schema), "__contains__", lambda schema, name: name == MASK)
    shares = await rank_group.deal(dock, claim, GRPO(mini_batches=3))
    assert sorted(at for share in shares for at in share) == list(range(len(claim)))
    for group in (0, 2, 3):
        owners = [share for share in shares if any(int(claim.group[at]) == group for at in share)]
        assert len(owners) == 2, (
            f"group {group} of {GROUPS} is a mini-batch of its own, of which each rank has a row"
        )
