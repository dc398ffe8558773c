"""The work of a worker, from its first object to its last: the base class of all kinds.

build ──▶ ready ──▶ work ──────────────────────▶ finish ──▶ close
  │                  │ set_paused, stop: as the run's state changes
  └ an error here: the worker never was ready
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from orchestration.checkpoints import checkpoint
from orchestration.checkpoints.checkpoint import Checkpoint
from orchestration.guard.rules import SCORES
from orchestration.recipe.flow import algorithm_of, flow_of
from orchestration.recipe.models import tokenizer_of
from orchestration.recipe.schema import Recipe
from orchestration.rewards.functions import reward_pool, reward_set
from orchestration.state.documents import CHECKPOINT_REPORTED
from orchestration.state.paths import RunPaths
from orchestration.workers.engines import sampling_of, sync_addresses
from pipeline.index.client import Index
from pipeline.node import LOOPBACK
from pipeline.warehouse.dock import Dock
from pipeline.worker.controller import Controller, Stage
from pipeline.worker.spans import Spans
from stages.algorithms import NamedAlgorithm
from stages.flow.catalogue import TOKEN_REWARDS
from stages.model.load import Tokenizer
from stages.rewards.stage import MisfitAlarm, Reward, RewardSet
from stages.training.ranks import RankGroup

if TYPE_CHECKING:
    from torch.distributed import Store

Work = Coroutine[Any, Any, None]


@dataclass(eq=False)
class Job:
    """The work of worker ``kind``-``number``, from the run's documents and the clients of this
    worker. A kind overrides :meth:`build`, and of the other phases those that it needs.

    ``secret`` proves to other nodes of the run that a process belongs to it. ``resources`` are
    closed by :meth:`close`, the last one first. ``version`` returns the policy version that this
    worker holds, for its log."""

    recipe: Recipe
    paths: RunPaths
    index: Index
    dock: Dock
    secret: bytes
    kind: str
    number: int
    controllers: list[Controller] = field(default_factory=list)
    resources: AsyncExitStack = field(default_factory=AsyncExitStack)
    version: Callable[[], int | None] = lambda: None
    _until_stop: list[asyncio.Task[None]] = field(default_factory=list)

    async def build(self) -> None:
        """Make engines, stages and controllers."""
        raise NotImplementedError

    async def work(self) -> None:
        """Run the controllers and what goes on beside them, until all of it has ended."""
        async with asyncio.TaskGroup() as tasks:
            for controller in self.controllers:
                tasks.create_task(controller.run())
            self._until_stop = [tasks.create_task(work) for work in self.until_stop()]
            for work in self.until_done():
                tasks.create_task(work)

    def until_stop(self) -> Sequence[Work]:
        """Return what goes on beside the controllers, and is cancelled when the run stops."""
        return ()

    def until_done(self) -> Sequence[Work]:
        """Return what goes on beside the controllers to its own end, also when the run stops."""
        return ()

    async def set_paused(self, is_paused: bool) -> None:
        """Note that the run was paused, or goes on."""
        for controller in self.controllers:
            controller.pause() if is_paused else controller.resume()

    async def stop(self) -> None:
        """Claim nothing more, and finish what is held: the run stops."""
        for controller in self.controllers:
            controller.stop()
        for task in self._until_stop:
            task.cancel()

    async def leave(self) -> None:
        """Leave the run, which goes on: stop, and give back what is held in as short a time as
        possible."""
        await self.stop()

    async def finish(self) -> None:
        """Do what remains once :meth:`work` has ended without an error."""

    async def close(self) -> None:
        """Release engines and files, whatever has happened before."""
        await self.resources.aclose()

    # ── for use by the kinds ──

    def control(self, stage: Stage, spans: Spans | None = None) -> Controller:
        """Add ``stage`` to this worker, with a controller of its own."""
        controller = Controller(self.dock, stage, number=self.number, spans=spans)
        self.controllers.append(controller)
        return controller

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return tokenizer_of(self.recipe)

    async def newest_checkpoint(self, *parts: str) -> Checkpoint | None:
        """Return the run's newest checkpoint, with ``parts`` on this node at least; None where the
        run has none. Raises CheckpointMissing where neither this node nor ``checkpoint.url`` has
        it."""
        reported = await CHECKPOINT_REPORTED.get(self.index) or 0
        paths = self.paths
        return await asyncio.to_thread(
            checkpoint.latest_of_run, paths.checkpoints, reported, paths.url, parts
        )

    async def meet(self, rank_group: RankGroup) -> Store:
        """Return the store in which the ranks of ``rank_group`` find each other: rank 0 serves it,
        and its first order says where. Raises OSError and ValueError for an address that does not
        serve."""
        from stages.training.rendezvous import Rendezvous, join_rendezvous

        recipe = self.recipe
        timeout = self.recipe.launch.collective_seconds
        tls = recipe.pipeline.tls_contexts()
        if rank_group.coordinates.rank:
            order = await rank_group.receive()
            address = (order["address"][0], order["address"][1])
            joining = functools.partial(
                join_rendezvous, address, self.secret, timeout=timeout, tls=tls and tls[1]
            )
            return await asyncio.to_thread(joining)
        # the ranks are on one node
        host = recipe.sync_address if recipe.weight_transport == "network" else LOOPBACK
        host, name = await asyncio.to_thread(sync_addresses, host, *await self.index.reach())
        met = Rendezvous(host, self.secret, advertise=name, timeout=timeout, tls=tls and tls[0])
        self.resources.callback(met.close)
        await rank_group.broadcast("meet", address=met.address)
        return met.store

    def algorithm(self) -> NamedAlgorithm:
        return algorithm_of(self.recipe)

    def rewards(self) -> RewardSet:
        """Return the recipe's reward functions. They are looked up when they are first called."""
        pool = reward_pool(
            self.recipe, self.paths.out / "logs" / f"{self.kind}-{self.number}.rewards.log"
        )
        rewards = reward_set(
            self.recipe, pool, sampling_of(self.recipe, self.tokenizer).stop_token_ids
        )
        self.resources.push_async_callback(rewards.close)
        return rewards

    async def reward_stage(self) -> Reward:
        """Return the reward stage, with the recipe's functions looked up. Raises RewardError."""
        rewards = self.rewards()
        await rewards.open()
        off = SCORES in self.recipe.guard.off
        alarm = None if off else MisfitAlarm(self.index, f"{self.kind}-{self.number}")
        declared = flow_of(self.recipe)["reward"]
        by_token = TOKEN_REWARDS in declared.makes
        return Reward(rewards, self.tokenizer, tuple(declared.needs), alarm, by_token=by_token)
