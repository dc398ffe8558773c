"""The worker of a critic of its own: makes the column ``values``, and trains beside the policy (stages.training.critic)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from pathlib import Path

from orchestration.run import checkpoint
from orchestration.run.builders.job import Job, Work
from orchestration.run.engines import critic_engine
from stages.algorithms import NamedAlgorithm
from stages.inference.critic import Values
from stages.training.critic import CriticOrders, CriticWorker


class CriticJob(Job):
    """Gives values to groups, and learns from those that the policy is trained on. It begins with the newest checkpoint."""

    async def build(self) -> None:
        recipe, algorithm = self.recipe, self.algorithm()
        training = algorithm.critic_algorithm()
        assert training is not None, "such a worker is started for algorithms with a critic alone"
        engine = await asyncio.to_thread(critic_engine, recipe)
        self.resources.callback(engine.close)
        self._writer = checkpoint.Writer(engine)
        self.resources.push_async_callback(self._writer.close)
        found = await self.newest_checkpoint()
        if found is not None:
            await asyncio.to_thread(found.load_into, engine, checkpoint.CRITIC)
        self._worker = worker = CriticWorker(
            self.dock,
            engine,
            NamedAlgorithm(f"{algorithm.name}'s critic", training),
            CriticOrders(self.index, await self.index.get("ranks:update") or ""),  # put there by the supervisor
            version=found.version if found else 0,
            save=self._save,
            begin=self._begin,
            most_skipped=recipe.train.max_skipped_steps,
        )
        self.version = lambda: worker.trained
        self._stage = Values(worker)
        self._controller = self.control(self._stage)

    def until_done(self) -> Sequence[Work]:
        return (self._follow_orders(),)

    async def _follow_orders(self) -> None:
        await self._worker.run()
        self._controller.stop()

    def _begin(self) -> None:
        self._stage.may_begin = True
        self._controller.wake()

    async def _save(self, partial: Path) -> Awaitable[None]:
        """Copy the engine's state, and write it below the checkpoint ``partial``. Raises DiskRefused."""
        writing = await self._writer.begin(partial / checkpoint.CRITIC)

        async def written() -> None:
            try:
                await writing
            except asyncio.CancelledError:
                raise
            except BaseException as error:  # torch's CheckpointException is no Exception
                raise checkpoint.lasting_refusal(error, partial.parent, self._worker.trained) or error from error

        return written()
