"""The worker of one rank of a colocated run: a rollout engine and a rank of the train engine, in
turns on one device."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from orchestration.recipe.sizes.planner import reshard_plan
from orchestration.workers.engines import colocated_engine, probe_rule
from orchestration.workers.job import Work
from orchestration.workers.rollout import held_out_prompts, make_rollout
from orchestration.workers.update import UpdateJob
from stages.resharding.tensors import empty
from stages.training.colocated import Turn
from stages.training.shared_device import SharedDevice

if TYPE_CHECKING:
    from stages.engines.torch.train import TorchTrainEngine


class ColocatedJob(UpdateJob):
    """The job of a rank that trains and generates in turns. Rank 0 decides which of the two
    runs."""

    async def build(self) -> None:
        recipe = self.recipe
        rollout = await asyncio.to_thread(colocated_engine, recipe, self.number)
        self.resources.push_async_callback(rollout.close)
        await rollout.sleep()
        plan = None
        if recipe.adapters is None:
            # the train engine is built in the memory that this frees
            empty(rollout.tensors.values())
            plan = await asyncio.to_thread(reshard_plan, recipe, "vllm" if rollout.fused else "hf")
        await self.make_engine()
        stage, evaluator = make_rollout(self, rollout, held_out_prompts(self))
        self._rollout = self.control(stage)
        stage.device = device = SharedDevice(
            plan,
            self.number,
            cast("TorchTrainEngine", self.engine),
            rollout,
            self._rollout,
            self.index,
            temperature=recipe.rollout.temperature,
            probe=probe_rule(recipe),
            deadline=recipe.launch.collective_seconds,
        )
        if self.coordinates.rank:
            self.make_rank_worker(device)
            return
        self._turn = Turn(
            device,
            self.rank_group,
            self.index,
            evaluator,
            steps=recipe.train.steps,
            groups=recipe.train.steps * recipe.train.groups_per_step,
            every=recipe.evaluate.every,
            ahead=recipe.sync.prefetch,
            overlap=recipe.staleness_plan.slack > 0,
        )
        await self.make_stage(None, self._turn)
        self._rollout.on_nothing = self._turn.no_rows
        self.controller.on_nothing = self._turn.no_batch
        self.controller.on_end = self._turn.over

    def until_stop(self) -> Sequence[Work]:
        return ()

    def until_done(self) -> Sequence[Work]:
        return (self._take_turns(),)

    async def _take_turns(self) -> None:
        """Generate until training has ended."""
        await (self._turn.run(self.stage) if self.rank_worker is None else self.rank_worker.run())
        self._rollout.stop()
