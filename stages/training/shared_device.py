"""The device of one rank of a colocated run, and the changes between its train engine and its
rollout engine.

TRAINING ── generate: weights go to the rollout engine, training's bytes to host memory ──▶ GENERATING
   ▲                                                                                         │ leave
   └───────────── ready: wait for the rest of them ◀── RETURNING: they come back ◀───────────┘
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from pipeline.data.events import SyncEvent, TurnEvent
from pipeline.index.client import Index
from pipeline.worker.controller import Controller
from stages import device as devices
from stages.engines.device_lease import DeviceLease
from stages.engines.protocols import ColocatedEngine
from stages.resharding.plan import Phase, ReshardPlan
from stages.resharding.swap import State, Swap, SwapError
from stages.training.adapter_turns import AdapterSwap
from stages.weights.published import Probe
from stages.weights.verification.fault import OTHER, raise_alarm
from stages.weights.verification.probe import ProbeFailed, ProbeJudge, ProbeRule, scored

if TYPE_CHECKING:
    from stages.engines.torch.train import TorchTrainEngine


class SharedDevice(DeviceLease):
    """One rank's device and its two engines.

    The train engine has it at first, and ``rollout`` sleeps.

    ``plan`` is of the weights that are exchanged; None: they are adapters. ``controller`` runs this
    rank's rollout stage, which samples at ``temperature``. ``probe``: how far logprobs may lie from
    the trainer's (None: they are not compared). ``deadline``: seconds that a change may wait for
    another rank or for the engine. Raises what :class:`Swap` raises.
    """

    may_generate = False

    def __init__(
        self,
        plan: ReshardPlan | None,
        rank: int,
        trainer: TorchTrainEngine,
        rollout: ColocatedEngine,
        controller: Controller,
        index: Index,
        *,
        temperature: float,
        probe: ProbeRule | None,
        deadline: float,
    ) -> None:
        self.rollout = rollout
        self.controller = controller
        self.index = index
        self.worker = f"rollout-{rank}"
        self.deadline = deadline
        self._temperature = temperature
        self._judge = None if probe is None else ProbeJudge(probe)
        self.swap: Swap | AdapterSwap = (
            AdapterSwap(trainer, rollout)
            if plan is None
            else Swap(
                plan,
                rank,
                trainer.shards(),
                trainer.held,
                device=trainer.device,
                rollout=rollout.tensors,
                deadline=deadline,
                watch=self._count,
            )
        )
        self._most: dict[Phase, int] = {}  # bytes on the device, in each phase of the last swap
        self._left = 0.0  # when generation left (monotonic)

    @property
    def state(self) -> State:
        return self.swap.state

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """Give the device to the train engine on a rank other than 0, whose rank 0 has ordered
        "return"."""
        await self.ready()
        yield

    async def follow(self, order: Mapping[str, Any]) -> None:
        match order["do"]:
            case "return":
                await self.leave()
            case "generate":
                probe = Probe.from_record(order["probe"]) if order["probe"] else None
                await self.generate(order["version"], probe)
            case _:
                await super().follow(order)

    def device_bytes(self) -> int:
        """Return the bytes on the device: its own count, or on the CPU the storages of weights,
        gradients, optimizer state, keys and values, and buckets."""
        counted = devices.allocated(self.swap.device)
        return self.swap.device_bytes() + self.rollout.cache_bytes() if counted is None else counted

    async def leave(self) -> None:
        """End generation, and begin to bring training's bytes back."""
        self.may_generate = False
        self.controller.wake()
        counted = {
            "generating_bytes": self.device_bytes(),
            "cache_bytes": self.rollout.cache_bytes(),
        }
        async with asyncio.timeout(self.deadline):
            await self.rollout.sleep()
        self._left = time.monotonic()
        await asyncio.to_thread(self.swap.prefetch)
        await self._emit_turn(**counted)

    async def ready(self) -> None:
        """Wait until all of training's bytes are back.

        Returns at once when the train engine has the device.
        """
        if self.state is State.TRAINING:
            return
        beside = time.monotonic() - self._left
        with self.controller.spans.during("training comes back", version=self.rollout.version):
            await asyncio.to_thread(self.swap.ready)
        await self._emit_sync(
            "training",
            nbytes=self.swap.training_bytes(),
            exposed=self.swap.waited,
            hidden=min(beside, max(0.0, self.swap.seconds[Phase.PREFETCH] - self.swap.waited)),
        )
        await self._emit_turn()

    async def generate(self, version: int, probe: Probe | None, *, claims: bool = True) -> None:
        """Give the device to the rollout engine, with the weights of ``version``; all ranks call
        this together. Without ``claims``, rollout work is claimed only after :meth:`open`. Raises
        SwapError when the engine's logprobs are not those of ``probe``."""
        await self.ready()
        began = time.monotonic()
        self._most = {}
        with self.controller.spans.during("swap", version=version):
            await asyncio.to_thread(self.swap.to_rollout)
            gap = await self._wake(version, probe)
        await self._emit_sync(
            "generation",
            nbytes=self.swap.moved,
            exposed=time.monotonic() - began,
            released_bytes=self.swap.released,
            device_bytes={phase.value: most for phase, most in self._most.items()},
            **gap,
        )
        await self._emit_turn()
        if claims:
            self.open()

    def open(self) -> None:
        """Let the rollout stage claim rows."""
        self.may_generate = True
        self.controller.wake()

    async def _wake(self, version: int, probe: Probe | None) -> dict[str, Any]:
        """Wake the engine, and compare its logprobs with the trainer's before it makes a token."""
        async with asyncio.timeout(self.deadline):
            judge = self._judge
            await self.rollout.wake(version, hold=judge is not None and probe is not None)
            if judge is None or probe is None:
                return {}
            logprobs = await scored(self.rollout, probe, self._temperature)
            try:
                gap = {} if logprobs is None else judge.judge(probe, logprobs)
            except ProbeFailed as failed:
                if failed.alarm:
                    await raise_alarm(self.index, self.worker, version, failed, OTHER)
                about = f"{self.worker}: with the weights of version {version}"
                raise SwapError(
                    f"{about} {failed}; the ranks start again at the last checkpoint"
                ) from None
            await self.rollout.resume()
            return gap

    def _count(self, phase: Phase) -> None:
        # the buckets of a gather exist from its first round to its last
        if phase not in self._most:
            self._most[phase] = self.device_bytes()

    async def _emit_turn(self, **counted: int) -> None:
        await self.index.emit(
            TurnEvent(
                worker=self.worker,
                phase=self.state.value,
                version=self.rollout.version,
                device_bytes=self.device_bytes(),
                **counted,
            )
        )

    async def _emit_sync(
        self, to: str, *, nbytes: int, exposed: float, hidden: float = 0.0, **more: Any
    ) -> None:
        await self.index.emit(
            SyncEvent(
                worker=self.worker,
                to=to,
                version=self.rollout.version,
                bytes=nbytes,
                exposed_seconds=exposed,
                hidden_seconds=hidden,
                publish_seconds=0.0,
                **more,
            )
        )
