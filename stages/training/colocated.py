"""Colocated runs: training and generation take turns on each rank's device.

       ┌────────────────── no batch is there, and something to generate ───────────────────┐
       ▼                                                                                   │
    GENERATING ─ a batch is claimed, ──▶ RETURNING ─ a batch is claimed ─▶ TRAINING ───────┤
    claims, and    or nothing is left    training's bytes come back         one step,      │
    evaluation     to generate           beside reward, advantage, …        published      └▶ the next batch, if it is there

    rank 0: Turn decides, and tells the rank group "return", "train", "generate" ──▶ every rank: its SharedDevice does so

What is in flight when a turn ends is cut and parked, and any rank goes on with it. Neither can wait for the other for ever:
a train batch is complete before training asks for the device, and what must be generated first (a lost sample, say) takes it
back without a step. A turn that fails ends the rank group, which begins again at its last checkpoint.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tensordict import TensorDict

from pipeline.controller import Controller, Output
from pipeline.index.client import Claim, Index
from stages import device as devices
from stages.engines.protocols import ColocatedEngine
from stages.resharding.plan import Phase, ReshardPlan
from stages.resharding.swap import State, Swap, SwapError, local_weights
from stages.rollout.evaluate import Evaluator, evaluate_once
from stages.rollout.stage import Rollout
from stages.training.ranks import RankGroup, RankWorker
from stages.training.update import Update
from stages.weights.store import Probe, ProbeFailed, ProbeJudge, ProbeRule, probed, scored

if TYPE_CHECKING:
    from stages.engines.torch.train import TorchTrainEngine

WAIT_SECONDS = 10.0  # what is waited for is looked at again this often, so that nothing depends on a single wake-up


class SharedDevice:
    """One rank's device, its two engines, and whose turn it is. Training has it at first; ``rollout`` sleeps.

    ``claims`` is this rank's rollout stage, run by ``controller``: it claims nothing while it is not the engine's turn.
    ``probe``: how probed logprobs are held to the trainer's (None: nothing is probed). ``deadline``: seconds
    that a change may wait for another rank, or for the engine. Raises what :class:`Swap` raises.
    """

    def __init__(
        self,
        plan: ReshardPlan,
        rank: int,
        trainer: TorchTrainEngine,
        rollout: ColocatedEngine,
        claims: Rollout,
        controller: Controller,
        index: Index,
        *,
        probe: ProbeRule | None,
        deadline: float,
    ) -> None:
        self.rollout, self.claims, self.controller, self.index = rollout, claims, controller, index
        self.worker, self.deadline = f"rollout-{rank}", deadline
        self._judge = None if probe is None else ProbeJudge(probe)
        self.swap = Swap(
            plan,
            rank,
            local_weights(trainer.model),
            trainer.held,
            device=trainer.device,
            rollout=rollout.tensors,
            deadline=deadline,
            watch=self._count,
        )
        self._moved = plan.received[rank] + plan.kept[rank]
        self._most: dict[Phase, int] = {}  # bytes on the device, in each phase of the last swap
        self._left = 0.0  # when generation left
        claims.held_back = True

    @property
    def state(self) -> State:
        return self.swap.state

    def device_bytes(self) -> int:
        """Bytes on the device: as it counts them, and on the CPU the storages of weights, gradients, optimizer state, keys
        and values, and buckets."""
        counted = devices.allocated(self.swap.device)
        if counted is not None:
            return counted
        rollout = sum(tensor.untyped_storage().nbytes() for tensor in self.swap.rollout.values())
        return self.swap.training_bytes() + rollout + self.rollout.cache_bytes() + self.swap.temporary_bytes()

    async def leave(self) -> None:
        """Generation ends, and what trains begins to come back."""
        self.claims.held_back = True
        counted = {"generating_bytes": self.device_bytes(), "cache_bytes": self.rollout.cache_bytes()}
        async with asyncio.timeout(self.deadline):
            await self.rollout.sleep()
        self._left = time.monotonic()
        await asyncio.to_thread(self.swap.prefetch)
        await self._tell_turn(**counted)

    async def ready(self) -> None:
        """Training has the device: wait for what is left of its way back. Nothing happens when it has it."""
        if self.state is State.TRAINING:
            return
        beside = time.monotonic() - self._left
        with self.controller.spans.during("training comes back", version=self.rollout.version):
            await asyncio.to_thread(self.swap.ready)
        await self._tell_sync(
            "training",
            nbytes=self.swap.training_bytes(),
            exposed=self.swap.waited,
            hidden=min(beside, max(0.0, self.swap.seconds[Phase.PREFETCH] - self.swap.waited)),
        )
        await self._tell_turn()

    async def generate(self, version: int, probe: Probe | None, *, claims: bool = True) -> None:
        """Generation has the device, with the weights of ``version``; all ranks call this. Work is claimed at once, or after
        :meth:`open`. Raises SwapError when the engine does not find the logprobs of ``probe``."""
        await self.ready()
        began = time.monotonic()
        self._most = {}
        with self.controller.spans.during("swap", version=version):
            await asyncio.to_thread(self.swap.to_rollout)
            gap = await self._wake(version, probe)
        await self._tell_sync(
            "generation",
            nbytes=self._moved,
            exposed=time.monotonic() - began,
            released_bytes=self.swap.arena.used,
            device_bytes={phase.value: most for phase, most in self._most.items()},
            **gap,
        )
        await self._tell_turn()
        if claims:
            self.open()

    def open(self) -> None:
        """Claim rollout work."""
        self.claims.held_back = False
        self.controller.nudge()

    async def _wake(self, version: int, probe: Probe | None) -> dict[str, float]:
        """Wake the engine; before it makes a token it must find what the trainer has found."""
        async with asyncio.timeout(self.deadline):
            judge = self._judge
            await self.rollout.wake(version, hold=judge is not None and probe is not None)
            if judge is None or probe is None:
                return {}
            found = await scored(self.rollout, probe, self.claims.params.temperature)
            try:
                gap = {} if found is None else judge.judge(probe, found)
            except ProbeFailed as failed:
                about = f"{self.worker}: with the weights of version {version}"
                raise SwapError(f"{about} {failed}; the ranks begin again at the last checkpoint") from None
            await self.rollout.resume()
            return gap

    def _count(self, phase: Phase) -> None:
        if phase not in self._most:  # the buckets of a gather are there from its first round to its last
            self._most[phase] = self.device_bytes()

    async def _tell_turn(self, **counted: int) -> None:
        told = {"worker": self.worker, "phase": self.state.value, "version": self.rollout.version}
        await self.index.emit("turn", {**told, "device_bytes": self.device_bytes(), **counted})

    async def _tell_sync(self, to: str, *, nbytes: int, exposed: float, hidden: float = 0.0, **more: Any) -> None:
        told = {"worker": self.worker, "to": to, "version": self.rollout.version, "bytes": nbytes}
        seconds = {"exposed_seconds": exposed, "hidden_seconds": hidden, "publish_seconds": 0.0}
        await self.index.emit("sync", {**told, **seconds, **more})


class Turn:
    """Whose turn it is, decided on rank 0 for all ranks.

    ``groups`` are all that will ever be admitted, but for those that replace filtered ones. ``ahead``: training comes back
    as soon as nothing is left to generate; else when a batch is claimed. ``every``: evaluated versions. ``overlap``: an
    evaluation shares the engine with training samples.
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
        self.device, self.rank_group, self.index, self.evaluator = device, rank_group, index, evaluator
        self.steps, self.groups, self.every, self.ahead, self.overlap = steps, groups, every, ahead, overlap
        self._changed = asyncio.Event()
        self._no_batch = self._no_rows = False
        self._asked: asyncio.Event | None = None  # a batch was claimed; set when training has the device
        self._over = asyncio.Event()

    # What the controllers of rank 0 say.

    def no_batch(self) -> None:
        """The update stage has found nothing to claim."""
        self._no_batch = True
        self._changed.set()

    def no_rows(self) -> None:
        """The rollout stage has found nothing to claim."""
        self._no_rows = True
        self._changed.set()

    def over(self) -> None:
        """The update stage claims nothing any more, and has trained what it held."""
        self._over.set()
        self._changed.set()

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """While it lasts, training has the device; a batch has been claimed."""
        self._asked = granted = asyncio.Event()
        self._no_batch = False
        self._changed.set()
        try:
            await granted.wait()
            yield
        finally:
            self._asked = None
            self._changed.set()

    # What is decided.

    async def run(self, update: ColocatedUpdate) -> None:
        """Until ``update`` is over: all steps are done, and evaluated if they are to be; or the run stops, and what was
        being generated can go on to its end."""
        while not self._over.is_set():
            self._changed.clear()
            if self._asked is not None:
                await self._train(self._asked)
            elif self.device.state is State.GENERATING:
                await self._generating(update)
            elif not self._no_batch:
                await self._wait()
            else:
                left, seen = await self._to_generate()
                await (self._generate(update) if left else self._wait(seen))
        if update.trained < self.steps:  # stopped
            if self.device.state is not State.GENERATING and (await self.index.queue("rollout")).leased:
                await self._generate(update)
        elif await self._due(update.trained):
            if self.device.state is not State.GENERATING:
                await self._generate(update)
            await self._evaluate(update.trained)

    async def give_to_training(self) -> None:
        """Training has the device when this returns; the other ranks follow with the next call that they make together. For
        use after :meth:`run`."""
        if self.device.state is State.GENERATING:
            await self._leave()
        await self.device.ready()

    async def _generating(self, update: ColocatedUpdate) -> None:
        """One thing that happens in generation's turn."""
        if self.device.claims.held_back or await self._due(update.trained):
            await self._evaluate(update.trained)
            self.device.open()
        elif self._no_rows and self.ahead:
            self._no_rows = False
            if not (await self._to_generate())[0]:
                await self._leave()
        elif not await self._wait():
            self._no_rows = True  # after so long a wait it is looked at again

    async def _train(self, asked: asyncio.Event) -> None:
        if self.device.state is State.GENERATING:
            await self._leave()
        await self.device.ready()
        asked.set()
        while self._asked is asked:  # not given up meanwhile, and not done
            await self._wait()
            self._changed.clear()

    async def _leave(self) -> None:
        await self.rank_group.broadcast("return", together=False)
        await self.device.leave()

    async def _generate(self, update: ColocatedUpdate) -> None:
        probe = None if update.probe is None else asdict(update.probe)
        await self.rank_group.broadcast("generate", version=update.trained, probe=probe)
        alone = not self.overlap and await self._due(update.trained)
        await self.device.generate(update.trained, update.probe, claims=not alone)

    async def _wait(self, seen: str | None = None) -> bool:
        """Wait until something has changed here, or at the gate since ``seen``; False after ``WAIT_SECONDS``."""
        waiting: set[asyncio.Task[bool]] = {asyncio.create_task(_came(self._changed))}
        if seen is not None:
            waiting.add(asyncio.create_task(self.index.wait("version", seen, WAIT_SECONDS)))
        try:
            done, _ = await asyncio.wait(waiting, timeout=WAIT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            return any([task.result() for task in done])
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def _to_generate(self) -> tuple[bool, str]:
        """Whether anything is to be generated by the published version, on any rank: admitted or to be admitted. And the
        position of the gate's topic."""
        status = await self.index.status()
        limit = min(status.gate, self.groups + status.filtered)
        if status.remake or status.admitted < limit:
            return True, status.wait
        queue = await self.index.queue("rollout")
        return bool(queue.ready or queue.leased or queue.parked), status.wait

    async def _due(self, version: int) -> bool:
        """Whether ``version`` is to be evaluated, and has not been."""
        if self.evaluator is None or (version % self.every and version < self.steps):
            return False
        return await self.index.get(f"evaluated:{version}") is None

    async def _evaluate(self, version: int) -> None:
        """Evaluate ``version``; it is given up when the run stops."""
        assert self.evaluator is not None
        with self.device.controller.spans.during("evaluation", version=version):
            await self._unless_stopped(evaluate_once(self.index, self.evaluator, version), last=version >= self.steps)

    async def _unless_stopped(self, work: Coroutine[Any, Any, None], last: bool) -> None:
        evaluating = asyncio.create_task(work)
        over = asyncio.create_task(self._over.wait())
        try:
            waiting = {evaluating} if last else {evaluating, over}
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if evaluating in done:
                evaluating.result()
        finally:
            for task in (evaluating, over):
                task.cancel()
            await asyncio.gather(evaluating, over, return_exceptions=True)


async def _came(event: asyncio.Event) -> bool:
    return await event.wait()


class ColocatedUpdate(Update):
    """:class:`Update` that takes its turn on the device, and whose weights go from rank to rank: none lie in host memory."""

    def __init__(self, turn: Turn, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.turn = turn
        self.probe: Probe | None = None  # of the published version

    async def process(self, claim: Claim, rows: TensorDict) -> AsyncGenerator[Output, None]:
        async with self.turn.training(), aclosing(super().process(claim, rows)) as outputs:
            async for output in outputs:
                yield output

    async def publish(self) -> None:
        """Tell the index that the version is there: it opens the gate."""
        if self._probe:
            await self.rank_group.broadcast("probe", probe=self._probe)
            self.probe = await asyncio.to_thread(probed, self.engine, self._probe)
        await self.dock.index.publish_weights(self.trained, {})


class ColocatedRankWorker(RankWorker):
    """A rank other than 0: it takes turns when it is told to."""

    def __init__(self, device: SharedDevice, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.device = device

    async def do(self, said: Mapping[str, Any]) -> None:
        match said["do"]:
            case "return":
                await self.device.leave()
            case "generate":
                probe = Probe.from_record(said["probe"]) if said["probe"] else None
                await self.device.generate(said["version"], probe)
            case "probe":
                await asyncio.to_thread(probed, self.engine, said["probe"])
            case "train" | "save":
                await self.device.ready()
                await super().do(said)
            case _:
                await super().do(said)
