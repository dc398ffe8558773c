"""What the ranks of a train engine agree on, over a real index and a real warehouse, with engines
that only look."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from pipeline.index.client import Index, IndexRefused
from pipeline.warehouse.dock import Dock
from stages.algorithms.policy_gradient.grpo import GRPO
from stages.parallel.layout import ALONE, Layout
from stages.training.rank_worker import RankWorker
from stages.training.ranks import RankGroup
from stages.weights.documents import RANK_ORDERS
from stages.weights.transport.store import WeightStore
from stages.weights.verification.probe import probed
from tests.batches import unstack
from tests.stages.training.claims import GROUPS, filled


class Looking:
    """A train engine that keeps what it was given.

    Its calls end when all ranks have made them, as collective ones do.
    """

    def __init__(self, together: threading.Barrier) -> None:
        self.together = together
        self.saved: list[Path] = []
        self.batches: list[TensorDict] = []
        self.given: list[str] = []
        self.probes: list[list[int]] = []

    def train_batch(self, batch: TensorDict, algorithm: Any) -> dict[str, float]:
        self.batches.append(batch.clone())
        self.together.wait(20)
        return {}

    def weights(self) -> Any:
        for name in ("a", "b"):
            self.given.append(name)
            self.together.wait(20)
            yield name, torch.zeros(1)

    def logprobs(self, batch: TensorDict) -> torch.Tensor:
        self.probes.append(batch["response_ids"].values().tolist())
        self.together.wait(20)
        return torch.nested.nested_tensor([torch.zeros(1)], layout=torch.jagged)

    def save(self, folder: Path) -> None:
        self.saved.append(folder)
        self.together.wait(20)


@pytest.mark.parametrize(("dp", "tp"), [(1, 2), (2, 1), (2, 2), (4, 1)])
async def test_each_replica_fetches_its_own_rows_and_all_rows_are_fetched(
    dock: Dock, dp: int, tp: int, tmp_path: Path
) -> None:
    claim, rows = await filled(dock)
    algorithm = GRPO()
    rank_groups = [
        RankGroup(dock.index, Layout.for_training(dp=dp, tp=tp).coordinates(rank), "life")
        for rank in range(dp * tp)
    ]
    together = threading.Barrier(len(rank_groups))
    engines = [Looking(together) for _ in rank_groups]
    rank_workers = [
        RankWorker(
            dock,
            engine,  # type: ignore[arg-type]
            algorithm,
            rank_group,
            version=4,
            save=partial(asyncio.to_thread, engine.save),
            publisher=WeightStore(tmp_path, bucket_bytes=4),
        )
        for engine, rank_group in zip(engines[1:], rank_groups[1:], strict=True)
    ]
    working = [asyncio.create_task(rank_worker.run()) for rank_worker in rank_workers]
    shares = await rank_groups[0].deal(dock, claim, algorithm)
    assert await rank_groups[-1].deal(dock, claim, algorithm) == shares, "a replay's too"
    assert sorted(at for share in shares for at in share) == list(range(len(claim)))
    columns = ("prompt_ids", "response_ids", "rollout_logprobs", "advantage")
    await rank_groups[0].broadcast("train", claim=claim.record(), shares=shares)
    share = await rank_groups[0].fetch(dock, claim, shares, columns, 4)
    await asyncio.to_thread(engines[0].train_batch, share, algorithm)
    await rank_groups[0].broadcast("publish", probe=[[5, 6, 7]], version=5)
    await asyncio.to_thread(probed, engines[0], [[5, 6, 7]])
    store = WeightStore(tmp_path, bucket_bytes=4)
    part = (0, len(rank_groups))
    own = await asyncio.to_thread(store.publish, 5, engines[0].weights(), None, part)
    published = await rank_groups[0].join_parts(own)
    assert all(digest for _, _, digest in published.buckets)
    assert store.read(published).keys() == {"a", "b"}
    await rank_groups[0].broadcast("save", folder="/somewhere")
    await asyncio.to_thread(engines[0].save, Path("/somewhere"))
    await rank_groups[0].broadcast("end")
    async with asyncio.timeout(20):
        await asyncio.gather(*working)
    assert [rank_worker.trained for rank_worker in rank_workers] == [5] * len(rank_workers)
    assert all(engine.saved == [Path("/somewhere")] for engine in engines)
    assert all(engine.given == ["a", "b"] for engine in engines)
    assert all(engine.probes == [[6, 7]] for engine in engines), (
        "scoring is a call of all ranks too"
    )
    found: dict[tuple[int, int], int] = {}
    for rank, engine in enumerate(engines):
        [batch] = engine.batches
        for row in unstack(batch):
            group = int(row["group"])
            place = int(row["place"])
            for name in columns:
                assert torch.equal(row[name], rows[2 * group + place][name]), (name, group, place)
            found[group, place] = found.get((group, place), 0) + 1
        assert len(batch) == len(shares[rank // tp])
        assert sorted(batch["staleness"].tolist()) == sorted(
            (4 - claim.oldest_version[shares[rank // tp]]).tolist()
        )
    assert found == {(group, place): tp for group in range(len(GROUPS)) for place in range(2)}


async def test_what_all_have_heard_is_forgotten_and_another_life_hears_nothing_of_it(
    index: Index,
) -> None:
    first, other = (
        RankGroup(index, Layout.for_training(dp=2).coordinates(rank), "one") for rank in (0, 1)
    )
    for number in range(3):
        await first.broadcast("train", number=number)
        assert (await other.receive())["number"] == number
    with pytest.raises(IndexRefused, match="was removed"):
        await RankGroup(index, Layout.for_training(dp=2).coordinates(1), "one").receive()
    again = [
        RankGroup(index, Layout.for_training(dp=2).coordinates(rank), "two") for rank in (0, 1)
    ]
    await again[0].broadcast("end")
    assert await again[1].receive() == {"do": "end"}


async def test_what_they_do_not_do_together_is_kept_until_everybody_has_surely_heard_it(
    index: Index,
) -> None:
    first, other = (
        RankGroup(index, Layout.for_training(dp=2).coordinates(rank), "one") for rank in (0, 1)
    )
    await first.broadcast("generate")
    assert (await other.receive())["do"] == "generate"
    await first.broadcast("return", together=False)
    await first.broadcast("train")
    assert [(await other.receive())["do"] for _ in range(2)] == ["return", "train"]
    await first.broadcast("save")
    assert (await other.receive())["do"] == "save"
    for number in (1, 2):
        with pytest.raises(IndexRefused, match="was removed"):
            await RANK_ORDERS.at(life="one").read(index, number, 1.0)


async def test_one_rank_alone_sends_no_orders(index: Index) -> None:
    alone = RankGroup(index, ALONE)
    await alone.broadcast("train", claim={})
    assert await RANK_ORDERS.at(life="").read(index, 0, 0.05) is None
