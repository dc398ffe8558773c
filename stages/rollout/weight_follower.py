"""Weight sync, the rollout side: loads each published version into a rollout engine.

    v is published ─▶ read a verified copy (beside generation) ─▶ its turn? ─▶ load ─▶ probe ─▶ `sync` event ─▶ claims go on
                        │ damaged, or too slow                                   │ logprobs are not the trainer's
                        └─▶ the old version stays, and an event says so; tried   └─▶ the old weights come back; as left
                            again (damaged twice: reported to the trainer, which starts again and publishes it again)

With several replicas only some swap at a time, so that generation never stops as a whole. The
engine makes no token between the swap and the result of the probe, so none is made with wrong
weights (except by vLLM, see its adapter).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog
import torch

from pipeline.data.events import SyncEvent, WorkerEvent
from pipeline.documents.flow import SWAP, VERSION
from pipeline.first_of import cancel_all
from pipeline.index.client import Index
from pipeline.worker.controller import Controller
from stages.engines.protocols import ReceivingEngine, SwapTimes, WeightMismatch
from stages.rollout.evaluate import (
    Evaluation,
    Evaluator,
    evaluate_once,
    newest_due,
    newest_evaluated,
    record,
)
from stages.rollout.stage import Rollout
from stages.threads import run_in_thread
from stages.weights.documents import DAMAGED, LAST_TAKEN
from stages.weights.published import Probe, Published, WeightsDamaged, WeightsUnreachable
from stages.weights.records import WeightRecords
from stages.weights.transport.roles import Reader
from stages.weights.verification.probe import ProbeFailed, ProbeJudge, ProbeRule, scored

log = structlog.get_logger()

T = TypeVar("T")
ATTEMPTS = 3  # to load one published version
AGAIN_SECONDS = 0.5  # until the next attempt
WAIT_SECONDS = 10.0


class SwapRefused(RuntimeError):
    """A version was not loaded, and the engine has its old one. The message says why."""


class ProbeRefused(SwapRefused):
    """By the probe: ``failed`` says by how much, ``found`` are the engine's logprobs, ``look`` is
    what to look at, "" where that is to be found out with the weights before."""

    def __init__(
        self, message: str, failed: ProbeFailed, found: Sequence[torch.Tensor], look: str
    ) -> None:
        super().__init__(message)
        self.failed = failed
        self.found = found
        self.look = look

    async def raise_alarm(
        self, index: Index, worker: str, version: int, before: Sequence[torch.Tensor] | None
    ) -> None:
        """Raise an alarm where the rule asks for it.

        ``before``: what the engine finds with the weights before; None: it is not known.
        """
        if not self.failed.alarm:
            return
        from stages.weights.verification.fault import OTHER, UNDELIVERED, raise_alarm, same_logprobs

        look = self.look or (UNDELIVERED if same_logprobs(self.found, before) else OTHER)
        await raise_alarm(index, worker, version, self.failed, look)


@dataclass(frozen=True)
class SwapPolicy:
    """The policy by which weights are swapped. ``probe``: how far probed logprobs may lie from the
    trainer's (None: nothing is probed). ``timeout``: seconds for each of reading, loading, probing
    and resuming, and again for undoing one of them. ``at_once``: replicas that may swap at the same
    time (0: all)."""

    probe: ProbeRule | None = None
    timeout: float = 120.0
    at_once: int = 0


class WeightFollower:
    """Keeps a rollout engine at the published version, and evaluates the versions that are due.

    With ``overlap`` an evaluation shares the engine with training samples; without (η = 0) claims
    wait for it, so that what is generated does not depend on evaluation. With ``cut`` responses in
    flight are cut at each swap.
    """

    def __init__(
        self,
        index: Index,
        reader: Reader,
        stage: Rollout,
        controller: Controller,
        evaluator: Evaluator | None,
        *,
        worker: str,
        every: int,
        steps: int,
        overlap: bool,
        policy: SwapPolicy,
        cut: bool = False,
    ) -> None:
        self.index = index
        self.records = WeightRecords(index)
        self.reader = reader
        self.stage = stage
        self.controller = controller
        self.evaluator = evaluator
        self.worker = worker
        self.every = every
        self.steps = steps
        self.overlap = overlap
        self.policy = policy
        self.cut = cut
        self._judge = None if policy.probe is None else ProbeJudge(policy.probe)
        self._evaluation: Evaluation | None = None  # that has given way to newer weights
        self._evaluated = -1  # the newest version that was
        # the version in the engine; None: the weights that it was built with
        self._held: Published | None = None
        self._failed: dict[int, int] = {}  # attempts to load the version that is published now
        self._reported = 0  # the version that was last reported as damaged
        self._till = 0.0  # it is not read again before (monotonic), unless it was published again
        self._pause = WAIT_SECONDS  # until a take is tried again, if nothing is published meanwhile
        # the last reading, if it was given up
        self._reading: asyncio.Future[Mapping[str, torch.Tensor]] | None = None
        self._alone = 0.0  # since when the trainer cannot be reached (monotonic); 0: it can

    async def begin(self) -> None:
        """Load the version that is published already, if any: the worker may have been
        restarted."""
        self._evaluated = await newest_evaluated(self.index)
        await self._take()
        self.stage.held_back = self._due() and not self.overlap

    async def run(self) -> None:
        """Load versions as they are published. Returns when the last one is loaded and
        evaluated."""
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
            weights = await self._read(published)
            reading = time.monotonic() - began
            self._alone = 0.0
            async with self._turn():
                self.stage.held_back = self._due(published.version) and not self.overlap
                with self.controller.spans.during("swap", version=published.version):
                    times, gap = await self._swap(published, weights)
        except WeightsUnreachable as gone:  # until a restarted trainer publishes again
            self._pause = AGAIN_SECONDS
            if not self._alone:
                self._alone = time.monotonic()
                await self._report_kept(published, gone)
            elif time.monotonic() - self._alone > self.policy.timeout:
                raise
            return False
        except (WeightsDamaged, WeightMismatch, SwapRefused) as refused:
            await self._keep_old(published, refused)
            return False
        self._held = published
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
            self._pause = self.policy.timeout
            self._till = time.monotonic() + self._pause
            await DAMAGED.put(self.index, self.worker, version=version)

    async def _read(self, published: Published) -> Mapping[str, torch.Tensor]:
        """Read a copy, in a thread that does not keep the worker from ending."""
        engine = self.stage.engine
        stuck = self._reading is not None and not self._reading.done()
        try:
            async with asyncio.timeout(self.policy.timeout):
                if isinstance(engine, ReceivingEngine):
                    return await engine.receive(published)
                # wait for a stuck one instead of beginning another one beside it
                if self._reading is not None:
                    await asyncio.wait([self._reading])
                self._reading = run_in_thread(lambda: self.reader.read(published), "weights-read")
                weights = await asyncio.shield(self._reading)
                self._reading = None
                return weights
        except TimeoutError:
            what = "the attempt before is still reading after" if stuck else "not read within"
            raise SwapRefused(
                f"weights of version {published.version}: {what} sync.timeout = "
                f"{self.policy.timeout:g} s; is the memory "
                "that they lie in reachable?"
            ) from None

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Wait until this engine may swap, and hold its turn inside the context."""
        if not self.policy.at_once:
            yield
            return
        process = self.controller.dock.worker  # whose turn ends with it
        # loading, probing, going back and going on, each with its undoing
        lease = 9 * self.policy.timeout
        while not (
            turn := await self.index.take_swap_turn(process, most=self.policy.at_once, lease=lease)
        ).granted:
            await self.index.wait(SWAP, turn.wait, turn.due)
        try:
            yield
        finally:
            await asyncio.shield(self.index.end_swap_turn(process))

    async def _swap(
        self, published: Published, weights: Mapping[str, torch.Tensor]
    ) -> tuple[SwapTimes, dict[str, Any]]:
        """Load and probe. Raises SwapRefused with the old weights back in place."""
        judge = self._judge
        probe = published.probe
        engine = self.stage.engine
        hold = judge is not None and probe is not None
        was = engine.version
        changed = False
        before = None
        if judge is not None and probe is not None and not judge.compares(probe):
            with contextlib.suppress(SwapRefused):
                before = await self._score(published, probe)
        try:
            try:
                times = await self._load(published.version, weights, hold)
            finally:
                # also by a load that has failed, or was given up too late
                changed = engine.version != was
            if judge is None or probe is None:
                return times, {}
            swapped = time.monotonic()
            gap = await self._probe(published, probe, judge)
            return SwapTimes(times.exposed + time.monotonic() - swapped, times.hidden), gap
        except SwapRefused as refused:
            try:
                if changed:
                    await self._go_back(refused, hold)
            finally:
                if isinstance(refused, ProbeRefused):
                    await refused.raise_alarm(self.index, self.worker, published.version, before)
            raise
        finally:
            if changed and hold:
                await self._go_on()

    async def _load(
        self, version: int, weights: Mapping[str, torch.Tensor], hold: bool
    ) -> SwapTimes:
        engine = self.stage.engine
        times = await self._in_time(
            engine.load_weights(version, weights, hold=hold, cut=self.cut),
            f"weights of version {version}: not loaded",
        )
        if engine.version != version:
            raise SwapRefused(
                f"weights of version {version}: the engine reports version {engine.version} after "
                f"loading"
            )
        return times

    async def _probe(
        self, published: Published, probe: Probe, judge: ProbeJudge
    ) -> dict[str, float]:
        """Return the gap to the trainer's logprobs, as fields of the event.

        Raises SwapRefused when it is too large.
        """
        about = f"weights of version {published.version}"
        logprobs = await self._score(published, probe)
        same = self._held is not None and self._held.buckets == published.buckets
        try:
            return {} if logprobs is None else judge.judge(probe, logprobs, same_weights=same)
        except ProbeFailed as failed:
            from stages.weights.verification.fault import find_fault

            look = ""
            finding = find_fault(self.stage.engine, probe, failed, self.stage.params.temperature)
            with contextlib.suppress(SwapRefused):  # it takes too long
                look = await self._in_time(finding, f"{about}: not probed")
            raise ProbeRefused(f"{about}: {failed}", failed, logprobs or (), look) from None

    async def _score(self, published: Published, probe: Probe) -> list[torch.Tensor] | None:
        scoring = scored(self.stage.engine, probe, self.stage.params.temperature)
        return await self._in_time(scoring, f"weights of version {published.version}: not probed")

    async def _go_on(self) -> None:
        """Let the engine make tokens again. Raises RuntimeError when it does not."""
        engine = self.stage.engine
        try:
            await self._in_time(
                engine.resume(), f"the engine, held at version {engine.version}, does not go on"
            )
        except SwapRefused as late:
            raise RuntimeError(f"{late}; the worker restarts") from None

    async def _in_time(self, call: Coroutine[Any, Any, T], late: str) -> T:
        """Return the result of the engine's ``call``.

        Raises SwapRefused when it took too long and was undone, and RuntimeError when it was not
        undone in time either: the state of the engine is unknown then.
        """
        calling = asyncio.create_task(call)
        timeout = self.policy.timeout
        try:
            if not (await asyncio.wait([calling], timeout=timeout))[0]:
                calling.cancel()
                if not (await asyncio.wait([calling], timeout=timeout))[0]:
                    raise RuntimeError(
                        f"{late} within sync.timeout = {timeout:g} s, nor given up in as long "
                        f"again; the worker restarts"
                    )
        except asyncio.CancelledError:
            calling.cancel()
            await asyncio.wait([calling], timeout=timeout)
            raise
        if calling.cancelled():
            raise SwapRefused(f"{late} within sync.timeout = {timeout:g} s")
        return calling.result()

    async def _go_back(self, refused: SwapRefused, hold: bool) -> None:
        """Load the old weights again.

        Raises RuntimeError when they are gone (overwritten, or never published).
        """
        if self._held is None:
            raise RuntimeError(
                f"{refused}, and what it had before was never published; the worker restarts"
            )
        try:
            await self._load(self._held.version, await self._read(self._held), hold)
        except (WeightsDamaged, WeightsUnreachable, SwapRefused) as gone:
            raise RuntimeError(
                f"{refused}, and what it had before is gone ({gone}); the worker restarts"
            ) from None

    def _due(self, version: int | None = None) -> bool:
        version = self.stage.engine.version if version is None else version
        return self.evaluator is not None and self._newest_due(version) > self._evaluated

    def _newest_due(self, version: int) -> int:
        return newest_due(version, self.every, self.steps)
