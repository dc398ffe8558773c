"""The worker of one rank of the train engine. Rank 0 has the update stage, and writes checkpoints.

build:   engine ─▶ newest checkpoint ─▶ rank 0: the update stage, which replays the recorded steps since ─▶ ready
step:    train ─▶ publish ─▶ every k steps, or on request: copy the state ─▶ the next step
                             (later, while one is written)  └─▶ beside it: checkpoint ─▶ rows before it are released
finish:  the run was stopped ─▶ checkpoint of the last step ─▶ the other ranks end
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from orchestration.checkpoints import checkpoint
from orchestration.checkpoints.checkpoint import Checkpoint
from orchestration.recipe.sizes.planner import share_of_trained
from orchestration.rewards.functions import scored_by
from orchestration.state.documents import (
    CHECKPOINT_ASKED,
    CHECKPOINT_REPORTED,
    CHECKPOINT_WRITTEN,
    RANKS,
)
from orchestration.workers.engines import probe_tokens, train_engine, weight_publisher
from orchestration.workers.job import Job, Work
from pipeline.data.events import CheckpointEvent
from pipeline.worker.controller import Controller
from pipeline.worker.spans import Spans
from stages.algorithms.batch import trained_columns
from stages.engines.device_lease import DeviceLease
from stages.samples.sample_log import FOLDER, Recorder, SampleLog
from stages.training.ranks import RankGroup
from stages.training.update import Update
from stages.weights.transport.roles import Publisher

if TYPE_CHECKING:
    from stages.training.critic import CriticOrders
    from stages.training.rank_worker import RankWorker
    from stages.training.replay import Replay
    from stages.training.skipped import SkippedSteps

# checkpoints that are kept while batches are skipped: the weights of the newest may be at fault
ALL = sys.maxsize


class UpdateJob(Job):
    """Trains: one rank of the train engine."""

    rank_worker: RankWorker | None = None
    """Of ranks other than 0."""
    stage: Update
    """Of rank 0, as the controller."""
    controller: Controller
    critic: CriticOrders | None = None
    """Of rank 0, where a critic has a worker of its own."""

    async def build(self) -> None:
        await self.make_engine()
        publisher = weight_publisher(
            self.recipe, self.paths.shared, self.secret, *await self.index.reach()
        )
        self.resources.callback(publisher.close)
        if self.coordinates.rank:
            self.make_rank_worker(DeviceLease(), publisher)
            return
        await self.make_stage(publisher, DeviceLease())

    def until_stop(self) -> Sequence[Work]:
        if self.rank_worker is not None:
            return ()
        replicas = self.recipe.replicas if self.recipe.runs_stage("rollout") else 0
        return (self.stage.until_taken([f"rollout-{number}" for number in range(replicas)]),)

    def until_done(self) -> Sequence[Work]:
        return () if self.rank_worker is None else (self.rank_worker.run(),)

    async def finish(self) -> None:
        """Write a checkpoint when the run was stopped, so that no step is lost; then end the other
        ranks."""
        if self.rank_worker is not None:
            return
        if self.stage.trained > self._saved and (await self.index.state())[0] == "stopping":
            await self.stage.device.give_to_training()
            await self._save(self.stage.trained)
        await self._saving
        await self.rank_group.broadcast("end")
        if self.critic is not None:
            await self.critic.send("end")

    async def make_engine(self) -> None:
        """Make this rank's engine, with the newest checkpoint in it."""
        recipe = self.recipe
        self.coordinates = recipe.train.layout.coordinates(self.number)
        life = await RANKS.get(self.index, kind=self.kind) or ""  # of a group of several
        if recipe.trains_critic and not self.coordinates.rank:
            from stages.training.critic import CriticOrders

            self.critic = CriticOrders(self.index, life)
        self.rank_group = RankGroup(self.index, self.coordinates, life)
        meeting = await self.meet(self.rank_group) if self.coordinates.world > 1 else None
        self.engine = await asyncio.to_thread(train_engine, recipe, self.coordinates, meeting)
        self.resources.callback(self.engine.close)
        self._saving: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._saving.set_result(None)
        self._writer = checkpoint.Writer(self.engine, self.number, self.paths.url)
        self.resources.push_async_callback(self._end_writing)
        self.checkpoint = await self.newest_checkpoint(checkpoint.TRAIN)
        self._saved = 0  # version of the newest checkpoint, which may not be whole yet
        self._answered = ""  # the last request that a checkpoint was begun for
        if self.checkpoint is not None:
            await asyncio.to_thread(self.checkpoint.load_into, self.engine)
            self._saved = self.checkpoint.version

    def make_rank_worker(self, device: DeviceLease, publisher: Publisher | None = None) -> None:
        """Make what a rank other than 0 does."""
        from stages.training.rank_worker import RankWorker

        self.rank_worker = worker = RankWorker(
            self.dock,
            self.engine,
            self.algorithm(),
            self.rank_group,
            version=self._saved,
            save=lambda name: self._writer.begin(self.paths.checkpoints / name),
            device=device,
            publisher=publisher,
        )
        self.version = lambda: worker.trained

    async def make_stage(self, publisher: Publisher | None, device: DeviceLease) -> None:
        """Make the update stage, and replay the steps that were recorded since the newest
        checkpoint."""
        recipe = self.recipe
        newest = self.checkpoint
        self._spans = Spans()
        if newest is not None and newest.path != self.paths.start:
            if newest.version > (await CHECKPOINT_REPORTED.get(self.index) or 0):
                await self._push(newest)
                await self._report(newest)  # its writer was killed before it could emit the event
            await self.index.release_steps(newest.version)
        self.stage = Update(
            self.dock,
            self.engine,
            self.algorithm(),
            publisher,
            steps=recipe.train.steps,
            staleness=recipe.pipeline.staleness,
            version=self._saved,
            after_step=self._after_step,
            after_last=lambda: self.controller.stop(),
            before_publish=await self._references(),
            rank_group=self.rank_group,
            probe_tokens=probe_tokens(recipe),
            spans=self._spans,
            recorder=await self._recorder(),
            publish_first=not recipe.runs_stage("rollout"),
            device=device,
            skipped=self._skipped,
            critic=self.critic,
            functions=scored_by(recipe),
            replay=self._replay(),
        )
        self.version = lambda: self.stage.trained
        self.controller = self.control(self.stage, self._spans)
        self.controller.on_end = self.stage.over
        await self.stage.catch_up()
        if self.critic is not None:
            await self.critic.send("begin")

    async def _references(self) -> Callable[[int, bool], Awaitable[None]] | None:
        """Return what writes references; None where the reference stays."""
        model = self.recipe.model
        if not model.reference_every:
            return None
        from orchestration.checkpoints.references import References

        references = References(self.paths.out, model.reference_every, model.reference_mix)
        await asyncio.to_thread(references.rewind, (await self.index.status()).trained)

        async def write(version: int, again: bool) -> None:
            if not references.is_due(version, again=again):
                return
            with self._spans.during("reference", version=version), self._refusals(version):
                folder = await asyncio.to_thread(references.begin, version)
                await self.rank_group.broadcast("export", folder=str(folder))
                await asyncio.to_thread(self.engine.save_pretrained, folder)
                await asyncio.to_thread(self.tokenizer.save_pretrained, folder)
                oldest = max(0, version - self.recipe.pipeline.staleness)
                await asyncio.to_thread(references.finish, version, oldest)

        return write

    async def _recorder(self) -> Recorder | None:
        if not (most := self.recipe.pipeline.keep_samples):
            return None
        samples = SampleLog(self.paths.out / FOLDER, most)
        await asyncio.to_thread(samples.rewind, (await self.index.status()).trained)
        return self._reading(samples)

    def _reading(self, samples: SampleLog) -> Recorder:
        names = [function.name for function in self.recipe.reward.functions]
        return Recorder(self.dock, self.tokenizer, names, samples)

    def _replay(self) -> Replay | None:
        if not (most := self.recipe.train.replay_groups):
            return None
        from stages.training.replay import Replay

        return Replay(self.index, most, self.recipe.seed)

    def _skipped(self) -> SkippedSteps:
        from stages.training import skipped

        folder = self.paths.out / skipped.FOLDER
        columns = trained_columns(self.algorithm(), self.dock.schema)
        return skipped.SkippedSteps(
            self._reading(SampleLog(folder, 0)),
            folder,
            columns,
            self.recipe.train.max_skipped_steps,
        )

    async def _after_step(self, version: int) -> None:
        """Begin to write a checkpoint when one is due or requested.

        While the one before is still being written, steps are made as long as the arena has room
        for their samples; then the checkpoint of the newest version follows. After the last step,
        wait for it.
        """
        if self._saving.done():
            self._saving.result()  # raises why the last one was not written
        request = await CHECKPOINT_ASKED.get(self.index) or ""
        if request in (self._answered, await CHECKPOINT_WRITTEN.get(self.index)):
            request = ""
        last = version >= self.recipe.train.steps
        every = self.recipe.checkpoint.every
        due = bool(request) or version // every > self._saved // every
        if last or (due and (self._saving.done() or not await self._has_room())):
            await self._save(version, request)
        if last:
            await self._saving

    async def _has_room(self) -> bool:
        """Return whether what is in flight surely fits beside the samples that no checkpoint covers
        yet."""
        warehouses = (await self.index.stats())["warehouses"].values()
        share = share_of_trained(self.recipe)
        return all(warehouse["used"] <= share * warehouse["capacity"] for warehouse in warehouses)

    async def _save(self, version: int, request: str = "") -> None:
        """Copy the state of ``version``, and write it beside the next steps; ``request``: for which
        one."""
        began = time.monotonic()
        folder = self.paths.checkpoints
        await self._saving
        point = asdict(await self.index.resume_point())
        with self._spans.during("checkpoint copy", version=version):
            with self._refusals(version):
                partial = await asyncio.to_thread(checkpoint.begin, folder, version)
            # each copies its own state
            await self.rank_group.broadcast("save", together=False, folder=partial.name)
            if self.critic is not None:
                await self.critic.send("save", folder=partial.name)
            writing = await self._writer.begin(partial)
        self._saved = version
        self._answered = request or self._answered
        exposed = time.monotonic() - began
        keep = (
            ALL
            if self.stage.skipped is not None and self.stage.skipped.in_a_row
            else self.recipe.checkpoint.keep
        )

        async def complete() -> None:
            with self._spans.during("checkpoint", version=version), self._refusals(version):
                await writing
                if self.critic is not None:
                    await self.critic.until_saved()
                    if self.paths.url:  # it may be on another node
                        from orchestration.checkpoints.store import CheckpointStore

                        await asyncio.to_thread(
                            CheckpointStore(self.paths.url).fetch_staged, partial
                        )
                written = await asyncio.to_thread(
                    checkpoint.finish, folder, self.tokenizer, version, point, keep
                )
                await self._push(written, keep)
            await self._report(written, request, exposed, time.monotonic() - began)
            await self.index.release_steps(version)

        self._saving = asyncio.ensure_future(complete())

    @contextlib.contextmanager
    def _refusals(self, version: int) -> Iterator[None]:
        """Raise DiskRefused or CheckpointUnusable for an error that a restart does not mend.

        What was written of the checkpoint is removed.
        """
        try:
            yield
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # torch's CheckpointException is no Exception
            refused = checkpoint.unusable_state(error) or checkpoint.lasting_refusal(
                error, self.paths.checkpoints, version
            )
            checkpoint.clean(self.paths.checkpoints)
            if refused is not None:
                raise refused from error
            raise

    async def _push(self, written: Checkpoint, keep: int = ALL) -> None:
        """Copy a checkpoint to ``checkpoint.url``, if there is one, where the newest ``keep`` stay.

        Raises DiskRefused.
        """
        if self.paths.url:
            from orchestration.checkpoints.store import CheckpointStore, StoreRefused

            try:
                store = await asyncio.to_thread(CheckpointStore, self.paths.url)
                await asyncio.to_thread(store.push, written.path, keep)
            except StoreRefused as refused:
                raise checkpoint.DiskRefused(str(refused)) from refused

    async def _end_writing(self) -> None:
        """End what was begun, so that nothing writes beside a next process of this worker."""
        await asyncio.gather(self._saving, self._writer.close(), return_exceptions=True)

    async def _report(
        self, written: Checkpoint, request: str = "", exposed: float = 0.0, seconds: float = 0.0
    ) -> None:
        event = CheckpointEvent(
            version=written.version,
            path=str(written.path),
            requested=bool(request),
            exposed_seconds=exposed,
            seconds=seconds,
        )
        documents = [CHECKPOINT_REPORTED.entry(written.version)]
        if request:
            documents.append(CHECKPOINT_WRITTEN.entry(request))
        await self.index.emit(event, *documents)
