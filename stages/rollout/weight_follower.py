"""Weight sync, the rollout side: loads each published version into a rollout engine.

    v is published ─▶ read (beside generation) ─▶ its turn? ─▶ swap ─▶ `sync` event ─▶ claims go on
                        │ refused                              │ refused
                        └──────────────────────────────────────┴─▶ the old version stays, and an event says so; tried again
                            (damaged twice: reported to the trainer, which starts again and publishes it again)

With several replicas only some swap at a time, so that generation never stops as a whole. How one
version is read, loaded and verified: stages/rollout/swapper.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog

from pipeline.data.events import SyncEvent, WorkerEvent
from pipeline.documents.flow import SWAP, VERSION
from pipeline.first_of import cancel_all
from pipeline.index.client import Index
from pipeline.worker.controller import Controller
from stages.engines.protocols import WeightMismatch
from stages.rollout.evaluate import (
    Evaluation,
    Evaluator,
    evaluate_once,
    newest_due,
    newest_evaluated,
    record,
)
from stages.rollout.stage import Rollout
from stages.rollout.swapper import Swapper, SwapRefused
from stages.weights.documents import DAMAGED, LAST_TAKEN
from stages.weights.published import Published, WeightsDamaged, WeightsUnreachable
from stages.weights.records import WeightRecords

log = structlog.get_logger()

ATTEMPTS = 3  # to load one published version
AGAIN_SECONDS = 0.5  # until the next attempt
WAIT_SECONDS = 10.0


class WeightFollower:
    """Keeps a rollout engine at the published version, and evaluates the versions that are due.

    ``swapper`` loads them into the engine of ``stage``. With ``overlap`` an evaluation shares the
    engine with training samples; without (η = 0) claims wait for it, so that what is generated does
    not depend on evaluation.
    """

    def __init__(
        self,
        index: Index,
        swapper: Swapper,
        stage: Rollout,
        controller: Controller,
        evaluator: Evaluator | None,
        *,
        worker: str,
        every: int,
        steps: int,
        overlap: bool,
    ) -> None:
        self.index = index
        self.records = WeightRecords(index)
        self.swapper = swapper
        self.stage = stage
        self.controller = controller
        self.evaluator = evaluator
        self.worker = worker
        self.every = every
        self.steps = steps
        self.overlap = overlap
        self._evaluation: Evaluation | None = None  # that has given way to newer weights
        self._evaluated = -1  # the newest version that was
        self._failed: dict[int, int] = {}  # attempts to load the version that is published now
        self._reported = 0  # the version that was last reported as damaged
        self._till = 0.0  # it is not read again before (monotonic), unless it was published again
        self._is_over = False  # the last version was loaded, and evaluated, before a restart
        self._pause = WAIT_SECONDS  # until a take is tried again, if nothing is published meanwhile
        self._alone = 0.0  # since when the trainer cannot be reached (monotonic); 0: it can

    async def begin(self) -> None:
        """Load the version that is published already, if any: the worker may have been
        restarted."""
        self._evaluated = await newest_evaluated(self.index)
        self._is_over = await self._has_ended_before()
        if not self._is_over:
            await self._take()
        self.stage.held_back = self._due() and not self.overlap

    async def run(self) -> None:
        """Load versions as they are published. Returns when the last one is loaded and
        evaluated."""
        if self._is_over:
            self.controller.stop()
            return
        while True:
            while self.evaluator is not None and (self._evaluation is not None or self._due()):
                with self.controller.spans.during("evaluation", version=self.stage.engine.version):
                    if not await self._evaluate(self.evaluator):
                        break
            self.stage.held_back = False
            self.controller.wake()
            if self.stage.engine.version >= self.steps:
                await LAST_TAKEN.put(self.index, self.steps, worker=self.worker)
                self.controller.stop()
                return
            while not await self._take():
                await self.index.wait(VERSION, self._seen, self._pause)

    async def _evaluate(self, evaluator: Evaluator) -> bool:
        """Evaluate what is due, or go on with it.

        Returns whether another version may be due: that of the engine.
        """
        version = self.stage.engine.version
        if not self.overlap:
            await evaluate_once(
                self.index, evaluator, version, self._newest_due(version), self.every
            )
            self._evaluated = version
            return False
        self._evaluation = evaluation = self._evaluation or Evaluation(evaluator, version)
        changed = asyncio.Event()
        newer = asyncio.create_task(self._newer(version))
        newer.add_done_callback(lambda _: changed.set())
        self.controller.on_nothing = changed.set

        def room(in_flight: int) -> int:
            controller = self.controller
            is_late = version > evaluation.version or newer.done() or version >= self.steps
            idle = evaluator.rows - controller.held if controller.is_idle else 0
            return (
                max(idle, max(1, int(evaluator.share * evaluator.rows)) if is_late else 0)
                - in_flight
            )

        def gives_way() -> bool:
            return newer.done() and self._newest_due(newer.result()) <= evaluation.version

        try:
            complete = await evaluation.go_on(version, room, gives_way, changed)
        finally:
            await cancel_all(newer)
        if complete:
            self._evaluation = None
            self._evaluated = evaluation.version
            due = self._newest_due(evaluation.version)
            await record(self.index, await evaluation.event(), due, self.every)
        return complete and version > evaluation.version

    async def _newer(self, version: int) -> int:
        """Wait until a newer version than ``version`` is published, and return it."""
        while (published := await self.index.published_weights()).version <= version:
            await self.index.wait(VERSION, published.wait, WAIT_SECONDS)
        return published.version

    async def _has_ended_before(self) -> bool:
        """Return whether this worker had the last version before it was restarted: the trainer has
        waited for that, and may have ended since."""
        taken = await LAST_TAKEN.get(self.index, worker=self.worker)
        published = (await self.index.published_weights()).version
        return taken == self.steps and published >= self.steps

    async def _take(self) -> bool:
        """Load the published version when it is newer. Returns whether the engine has it now."""
        newest = await self.index.published_weights()
        self._seen = newest.wait
        self._pause = WAIT_SECONDS
        engine = self.stage.engine
        if newest.version <= engine.version or not newest.record:
            return False
        try:
            published = await self.records.read(newest.record)
        except WeightsDamaged:  # a newer one has come meanwhile
            return False
        began = time.monotonic()
        reported = published.version == self._reported and began < self._till
        if reported and await DAMAGED.get(self.index, version=published.version):
            self._pause = self._till - began
            return False
        try:
            weights = await self.swapper.read(published)
            reading = time.monotonic() - began
            self._alone = 0.0
            async with self._turn():
                self.stage.held_back = self._due(published.version) and not self.overlap
                if self.stage.held_back:
                    self.controller.wake()
                with self.controller.spans.during("swap", version=published.version):
                    times, gap = await self.swapper.swap(published, weights)
        except WeightsUnreachable as gone:  # until a restarted trainer publishes again
            self._pause = AGAIN_SECONDS
            if not self._alone:
                self._alone = time.monotonic()
                await self._report_kept(published, gone)
            elif time.monotonic() - self._alone > self.swapper.policy.timeout:
                raise
            return False
        except (WeightsDamaged, WeightMismatch, SwapRefused) as refused:
            await self._keep_old(published, refused)
            return False
        self._failed = {}
        await self.index.emit(
            SyncEvent(
                worker=self.worker,
                version=published.version,
                bytes=published.nbytes,
                exposed_seconds=times.exposed,
                hidden_seconds=times.hidden + reading,
                publish_seconds=0.0,
                **gap,
            )
        )
        return True

    async def _report_kept(self, published: Published, refused: Exception) -> None:
        """Log, and emit in an event, that the engine keeps its version."""
        log.warning(
            "weights not taken",
            offered=published.version,
            kept=self.stage.engine.version,
            reason=str(refused),
        )
        change = "kept its weights"
        await self.index.emit(
            WorkerEvent(stage="rollout", worker=self.worker, change=change, reason=str(refused))
        )

    async def _keep_old(self, published: Published, refused: Exception) -> None:
        """Keep the old version.

        Raises ``refused`` after the last attempt. Has the trainer publish a version again that was
        damaged twice: the first time, the damage may have happened on the way here.
        """
        self._pause = AGAIN_SECONDS
        version = published.version
        await self._report_kept(published, refused)
        self._failed = {version: self._failed.get(version, 0) + 1}
        if self._failed[version] >= ATTEMPTS:
            raise refused  # no newer version has replaced it meanwhile
        if isinstance(refused, WeightsDamaged) and self._failed[version] == 2:
            self._reported = version
            self._pause = self.swapper.policy.timeout
            self._till = time.monotonic() + self._pause
            await DAMAGED.put(self.index, self.worker, version=version)

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Wait until this engine may swap, and hold its turn inside the context."""
        if not self.swapper.policy.at_once:
            yield
            return
        process = self.controller.dock.worker  # whose turn ends with it
        # loading, probing, going back and going on, each with its undoing
        lease = 9 * self.swapper.policy.timeout
        while not (
            turn := await self.index.take_swap_turn(
                process, most=self.swapper.policy.at_once, lease=lease
            )
        ).granted:
            await self.index.wait(SWAP, turn.wait, turn.due)
        try:
            yield
        finally:
            await asyncio.shield(self.index.end_swap_turn(process))

    def _due(self, version: int | None = None) -> bool:
        version = self.stage.engine.version if version is None else version
        return self.evaluator is not None and self._newest_due(version) > self._evaluated

    def _newest_due(self, version: int) -> int:
        return newest_due(version, self.every, self.steps)
