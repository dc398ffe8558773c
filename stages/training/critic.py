"""A critic with an engine and a worker of its own, which learns beside the policy.

    rank 0 of the train engine                    the critic's worker
      replay, then ─▶ order "begin" ────────────▶ values: a stage of the flow, for groups that training will take
      claim a step ─▶ order "train" ─┬──────────▶ the same rows ─▶ engine.train_batch ─▶ answer: metrics, or skipped
                      train beside it┘                                                     │
      one has skipped it: the other undoes it ◀────────────────────────────────────────────┤
      commit the step, once both have trained ◀────────────────────────────────────────────┘
      every k steps ─▶ order "save" ────────────▶ copy the state ─▶ answer; the written files are reported apart

The index records a step, and the gate opens for the next one, when policy and critic have both
trained: one commit is both. A batch of which one of the two has a loss or gradient that is not
finite is skipped by both. The two workers live and die as one; those that are started next load one
checkpoint and replay the recorded steps, of which the values are still in the warehouse. Orders and
answers are numbered entries of two logs in the index. A critic on several ranks is a rank group as
the policy's trainer is (stages.training.ranks): its rank 0 is "the critic's worker" above.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from tensordict import TensorDictBase

from pipeline.index.client import Claim, Index
from pipeline.warehouse.dock import Dock
from stages.algorithms.batch import trained_columns
from stages.algorithms.named import AlgorithmLike
from stages.engines.protocols import UndoableEngine
from stages.flow.catalogue import TOKEN_STALENESS, scored_columns
from stages.training.rank_worker import RankWorker
from stages.training.ranks import RankGroup, train_batch
from stages.weights.documents import CRITIC_ANSWERS, CRITIC_ORDERS, CRITIC_SAVED


class CriticEngine(UndoableEngine, Protocol):
    """A train engine whose model gives values."""

    def values(self, batch: TensorDictBase) -> torch.Tensor:
        """Return the values of the states before the response tokens: float32 jagged [B, T_i], no
        gradient.

        Groups are computed one by one, so the result of a row does not depend on the other groups.
        On several ranks each is given the whole batch.
        """


class CriticOrders:
    """The logs of orders and answers. ``life`` names them; it is another one after each restart."""

    def __init__(self, index: Index, life: str) -> None:
        self.index = index
        self._number = 0
        self._saves = 0
        self._orders = CRITIC_ORDERS.at(life=life)
        self._answers = CRITIC_ANSWERS.at(life=life)
        self._saved = CRITIC_SAVED.at(life=life)

    async def send(self, do: str, **what: Any) -> dict[str, Any]:
        """Order ``do``, and return the critic's answer."""
        number = self._number
        self._number = self._number + 1
        await self._orders.append(self.index, number, {"do": do, **what})
        answer = await self._answers.next(self.index, number)
        for log in (self._orders, self._answers):
            await log.trim(self.index, number)
        return answer

    async def until_saved(self) -> None:
        """Return when the checkpoint that was ordered next is written."""
        number = self._saves
        self._saves = self._saves + 1
        await self._saved.next(self.index, number)

    # ── of the critic ──

    async def receive(self) -> dict[str, Any]:
        """Wait for the next order, and return it."""
        return await self._orders.next(self.index, self._number)

    async def answer(self, **what: Any) -> None:
        """Answer the order that was received last."""
        await self._answers.append(self.index, self._number, what)
        self._number += 1

    async def report_saved(self) -> None:
        await self._saved.append(self.index, self._saves, None)
        self._saves += 1


class CriticWorker:
    """Carries out rank 0's orders, until the order to end.

    ``trained`` counts the steps in the engine's weights; ``save`` begins to write the engine's
    state below a folder, and returns what to await until it is written; ``begin`` is called once
    recorded steps are replayed. ``rank_group``: this worker is rank 0 of it, and passes the work on
    to the others.
    """

    def __init__(
        self,
        dock: Dock,
        engine: CriticEngine,
        algorithm: AlgorithmLike,
        orders: CriticOrders,
        *,
        version: int,
        save: Callable[[Path], Awaitable[Awaitable[None]]],
        begin: Callable[[], None],
        rank_group: RankGroup | None = None,
    ) -> None:
        self.rank_group = rank_group or RankGroup(dock.index)
        self.dock = dock
        self.engine = engine
        self.algorithm = algorithm
        self.orders = orders
        self.trained = version
        self._save = save
        self._begin = begin
        self.computing = asyncio.Lock()  # the engine takes one call at a time

    async def run(self) -> None:
        async with asyncio.TaskGroup() as writing:
            while (order := await self.orders.receive())["do"] != "end":
                answer = await self._do(order, writing)
                await self.orders.answer(**answer)
        async with self.computing:
            await self.rank_group.broadcast("end")
        await self.orders.answer()

    async def values(self, claim: Claim, rows: TensorDictBase) -> torch.Tensor:
        """Return the values of the claim's rows, between two steps; see
        :meth:`CriticEngine.values`."""
        async with self.computing:
            await self.rank_group.broadcast("values", claim=claim.record())
            return await asyncio.to_thread(self.engine.values, train_batch(claim, rows))

    async def _do(self, order: Mapping[str, Any], writing: asyncio.TaskGroup) -> Mapping[str, Any]:
        match order["do"]:
            case "begin":
                self._begin()
            case "train":
                if order["trained"] != self.trained:
                    raise RuntimeError(
                        f"critic: is at version {self.trained}, the policy at {order['trained']}"
                    )
                return await self._train(Claim("", order["claim"]["token"], order["claim"]))
            case "undo":  # the policy has skipped the batch
                async with self.computing:
                    await self.rank_group.broadcast("undo")
                    await asyncio.to_thread(self.engine.undo)
            case "save":
                async with self.computing:
                    await self.rank_group.broadcast("save", together=False, folder=order["folder"])
                    written = await self._save(Path(order["folder"]))
                writing.create_task(self._report(written))
        return {}

    async def _train(self, claim: Claim) -> Mapping[str, Any]:
        """Train on the claim's rows.

        Returns the ``metrics``, and why the batch was ``skipped``, or "".
        """
        shares = await self.rank_group.deal(self.dock, claim, self.algorithm)
        columns = trained_columns(self.algorithm, self.dock.schema)
        by_token = TOKEN_STALENESS in self.algorithm.loss_reads
        batch = await self.rank_group.fetch(
            self.dock, claim, shares, columns, self.trained, by_token=by_token
        )
        try:
            async with self.computing:
                await self.rank_group.broadcast("train", claim=claim.record(), shares=shares)
                metrics = await asyncio.to_thread(self.engine.train_batch, batch, self.algorithm)
        except FloatingPointError as refused:
            answer: Mapping[str, Any] = {"metrics": {}, "skipped": str(refused)}
        else:
            named = {
                name if "value" in name else f"critic_{name}": float(value)
                for name, value in metrics.items()
            }
            answer = {"metrics": named, "skipped": ""}
        self.trained += 1
        return answer

    async def _report(self, written: Awaitable[None]) -> None:
        await written
        await self.orders.report_saved()


class CriticRank(RankWorker):
    """Carries out the orders of a critic's rank 0 on another rank."""

    engine: CriticEngine

    async def do(self, order: Mapping[str, Any]) -> None:
        if order["do"] != "values":
            return await super().do(order)
        claim = Claim("", order["claim"]["token"], order["claim"])
        rows = await self.dock.fetch(claim, scored_columns(self.dock.schema))
        await asyncio.to_thread(self.engine.values, train_batch(claim, rows))
