"""Colocated runs: training and generation take turns on each rank's device.

Rank 0 decides for all ranks.

       ┌─────────────── no complete train batch, and something to generate ────────────────┐
       ▼                                                                                   │
    GENERATING ─ a batch is claimed, ──▶ RETURNING ─ a batch is claimed ─▶ TRAINING ───────┤
    claims, and    or nothing is left    training's bytes come back         one step,      │
    evaluation     to generate           beside reward, advantage, …        published      └▶ the next batch, if complete

    rank 0: Turn ── broadcasts "return", "train", "generate" ──▶ every rank: its SharedDevice

Responses in flight at the end of generation's turn are cut and parked, and any rank continues them.
Neither side can wait for the other for ever: a train batch is complete before training asks for the
device, and rows that must be generated first (lost ones, say) give the device back to generation
without a step. When a turn fails, the rank group starts again at its last checkpoint.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

from pipeline.documents.flow import VERSION
from pipeline.first_of import first_of
from pipeline.index.client import Index
from stages.engines.device_lease import DeviceLease
from stages.resharding.swap import State
from stages.rollout.evaluate import Evaluator, evaluate_once, newest_due, newest_evaluated
from stages.training.ranks import RankGroup
from stages.training.shared_device import SharedDevice

if TYPE_CHECKING:
    from stages.training.update import Update

# conditions are checked again this often, so that nothing depends on a single wake-up
WAIT_SECONDS = 10.0


class Turn(DeviceLease):
    """The lease of rank 0's device, and the decision of which engine computes on all ranks.

    ``groups``: how many the gate will admit in all, without those that replace filtered ones.
    ``ahead``: training comes back as soon as nothing is left to generate; else when a batch is
    claimed. ``every``: which versions are evaluated. ``overlap``: an evaluation shares the engine
    with training samples.
    """

    def __init__(
        self,
        device: SharedDevice,
        rank_group: RankGroup,
        index: Index,
        evaluator: Evaluator | None,
        *,
        steps: int,
        groups: int,
        every: int,
        ahead: bool,
        overlap: bool,
    ) -> None:
        self.device = device
        self.rank_group = rank_group
        self.index = index
        self.evaluator = evaluator
        self.steps = steps
        self.groups = groups
        self.every = every
        self.ahead = ahead
        self.overlap = overlap
        self._changed = asyncio.Event()
        self._no_batch = self._no_rows = False
        # a batch was claimed; set when training has the device
        self._requested: asyncio.Event | None = None
        self._over = asyncio.Event()

    # ── called by the controllers of rank 0 ──

    def no_batch(self) -> None:
        """Record that the update stage has found nothing to claim."""
        self._no_batch = True
        self._changed.set()

    def no_rows(self) -> None:
        """Record that the rollout stage has found nothing to claim."""
        self._no_rows = True
        self._changed.set()

    def over(self) -> None:
        """Record that the update stage has ended: all that it claimed is trained."""
        self._over.set()
        self._changed.set()

    # ── the lease ──

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """Give the device to training inside the context. To be asked for with a claimed batch."""
        self._requested = granted = asyncio.Event()
        self._no_batch = False
        self._changed.set()
        try:
            await granted.wait()
            yield
        finally:
            self._requested = None
            self._changed.set()

    async def give_to_training(self) -> None:
        """Give the device to training before this returns; the other ranks follow with the next
        call that they make together. For use after :meth:`run`."""
        if self.device.state is State.GENERATING:
            await self._leave()
        await self.device.ready()

    # ── the decision ──

    async def run(self, update: Update) -> None:
        """Give the device to training and to generation in turns, until ``update`` has ended: all
        steps are trained, and evaluated if they are to be; or the run stops, and what was being
        generated can be finished."""
        while not self._over.is_set():
            self._changed.clear()
            if self._requested is not None:
                await self._train(self._requested)
            elif self.device.state is State.GENERATING:
                await self._generating(update)
            elif not self._no_batch:
                await self._wait()
            else:
                has_work, position = await self._to_generate()
                await (self._generate(update) if has_work else self._wait(position))
        if update.trained < self.steps:  # stopped
            if (
                self.device.state is not State.GENERATING
                and (await self.index.queue("rollout")).leased
            ):
                await self._generate(update)
        elif await self._due(update.trained):
            if self.device.state is not State.GENERATING:
                await self._generate(update)
            await self._evaluate(update.trained)

    async def _generating(self, update: Update) -> None:
        """Handle one thing that happens in generation's turn."""
        if not self.device.may_generate or await self._due(update.trained):
            await self._evaluate(update.trained)
            self.device.open()
        elif self._no_rows and self.ahead:
            self._no_rows = False
            if not (await self._to_generate())[0]:
                await self._leave()
        elif not await self._wait():
            self._no_rows = True  # nothing has changed for long: check what is left to generate

    async def _train(self, request: asyncio.Event) -> None:
        if self.device.state is State.GENERATING:
            await self._leave()
        await self.device.ready()
        request.set()
        while self._requested is request:  # until the step has ended, or was given up
            await self._wait()
            self._changed.clear()

    async def _leave(self) -> None:
        await self.rank_group.broadcast("return", together=False)
        await self.device.leave()

    async def _generate(self, update: Update) -> None:
        probe = None if update.probe is None else asdict(update.probe)
        await self.rank_group.broadcast("generate", version=update.trained, probe=probe)
        alone = not self.overlap and await self._due(update.trained)
        await self.device.generate(update.trained, update.probe, claims=not alone)

    async def _wait(self, position: str | None = None) -> bool:
        """Wait until something has changed here, or on the gate's topic after ``position``; False
        after ``WAIT_SECONDS``."""
        gate = () if position is None else (self.index.wait(VERSION, position, WAIT_SECONDS),)
        return any(await first_of(self._changed.wait(), *gate, timeout=WAIT_SECONDS))

    async def _to_generate(self) -> tuple[bool, str]:
        """Return whether any rank has something to generate with the published version, admitted
        or to be admitted, and the position of the gate's topic."""
        status = await self.index.status()
        limit = min(status.gate, self.groups + status.filtered)
        if status.remake or status.admitted < limit:
            return True, status.wait
        queue = await self.index.queue("rollout")
        return bool(queue.ready or queue.leased or queue.parked), status.wait

    async def _due(self, version: int) -> bool:
        """Return whether a version up to ``version`` is to be evaluated, and none since has
        been."""
        if self.evaluator is None:
            return False
        return newest_due(version, self.every, self.steps) > await newest_evaluated(self.index)

    async def _evaluate(self, version: int) -> None:
        """Evaluate ``version``.

        Unless it is the last one, the evaluation is given up when the run stops.
        """
        assert self.evaluator is not None
        due = newest_due(version, self.every, self.steps)
        evaluation = evaluate_once(self.index, self.evaluator, version, due, self.every)
        with self.device.controller.spans.during("evaluation", version=version):
            await first_of(evaluation, *(() if version >= self.steps else (self._over.wait(),)))
