"""The workers of a critic of its own, one for each rank: the first one makes the column ``values``,
and trains beside the policy (stages.training.critic)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from pathlib import Path

from orchestration.checkpoints import checkpoint
from orchestration.state.documents import RANKS
from orchestration.workers.engines import critic_engine
from orchestration.workers.job import Job, Work
from stages.algorithms import NamedAlgorithm
from stages.inference.scores import Values
from stages.parallel.options import critic_layout
from stages.training.critic import CriticOrders, CriticRank, CriticWorker
from stages.training.rank_worker import RankWorker
from stages.training.ranks import RankGroup


class CriticJob(Job):
    """The job that gives values to groups, and learns from those that the policy is trained on.

    It begins with the newest checkpoint.
    """

    rank_worker: RankWorker | None = None
    """Of ranks other than 0."""

    async def build(self) -> None:
        recipe = self.recipe
        algorithm = self.algorithm()
        training = algorithm.critic_algorithm()
        assert training is not None, "such a worker is started for algorithms with a critic alone"
        named = NamedAlgorithm(f"{algorithm.name}'s critic", training)
        coordinates = critic_layout(recipe.critic, recipe.train).coordinates(self.number)
        life = await RANKS.get(self.index, kind="update") or ""
        rank_group = RankGroup(self.index, coordinates, f"{life}:critic")
        meeting = await self.meet(rank_group) if coordinates.world > 1 else None
        engine = await asyncio.to_thread(critic_engine, recipe, coordinates, meeting)
        self.resources.callback(engine.close)
        self._writer = checkpoint.Writer(engine, self.number, self.paths.url)
        self.resources.push_async_callback(self._writer.close)
        newest_checkpoint = await self.newest_checkpoint(checkpoint.CRITIC)
        if newest_checkpoint is not None:
            await asyncio.to_thread(newest_checkpoint.load_into, engine, checkpoint.CRITIC)
        version = newest_checkpoint.version if newest_checkpoint else 0
        if coordinates.rank:
            self.rank_worker = rank = CriticRank(
                self.dock, engine, named, rank_group, version=version, save=self._begin_writing
            )
            self.version = lambda: rank.trained
            return
        self._worker = worker = CriticWorker(
            self.dock,
            engine,
            named,
            CriticOrders(self.index, life),
            version=version,
            save=self._save,
            begin=self._begin,
            rank_group=rank_group,
        )
        self.version = lambda: worker.trained
        self._stage = Values(worker)
        self._controller = self.control(self._stage)

    def until_done(self) -> Sequence[Work]:
        return (self._follow_orders() if self.rank_worker is None else self.rank_worker.run(),)

    async def _follow_orders(self) -> None:
        await self._worker.run()
        self._controller.stop()

    def _begin(self) -> None:
        self._stage.may_begin = True
        self._controller.wake()

    async def _begin_writing(self, partial: Path) -> Awaitable[None]:
        return await self._writer.begin(self.paths.checkpoints / partial, checkpoint.CRITIC)

    async def _save(self, partial: Path) -> Awaitable[None]:
        """Copy the engine's state, and write it below the checkpoint ``partial``.

        Raises DiskRefused.
        """
        writing = await self._begin_writing(partial)

        async def written() -> None:
            try:
                await writing
            except asyncio.CancelledError:
                raise
            except BaseException as error:  # torch's CheckpointException is no Exception
                refused = checkpoint.unusable_state(error) or checkpoint.lasting_refusal(
                    error, self.paths.checkpoints, self._worker.trained
                )
                raise (refused or error) from error

        return written()
