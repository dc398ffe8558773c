"""The swapper: loads published versions into a rollout engine, and verifies each one.

    read a verified copy (beside generation) ─▶ load ─▶ probe ─▶ the engine goes on with the version
      │ damaged, or too slow                      │ too slow, or logprobs are not the trainer's
      └─▶ refused                                 └─▶ the old weights come back; refused

The engine makes no token between the swap and the result of the probe, so none is made with wrong
weights (except by vLLM, see its adapter). When a version is loaded, and how often one that was
refused is tried again: stages/rollout/weight_follower.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from pipeline.index.client import Index
from stages.engines.protocols import ReceivingEngine, RolloutEngine, SwapTimes
from stages.threads import run_in_thread
from stages.weights.published import Probe, Published, WeightsDamaged, WeightsUnreachable
from stages.weights.transport.roles import Reader
from stages.weights.verification.probe import ProbeFailed, ProbeJudge, ProbeRule, scored

T = TypeVar("T")


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


class Swapper:
    """Brings ``engine``, which samples at ``temperature``, to published versions that ``reader``
    has. With ``cut`` responses in flight are cut at each swap. ``worker`` is named in the alarm of
    a refused probe, which goes to ``index``."""

    def __init__(
        self,
        index: Index,
        reader: Reader,
        engine: RolloutEngine,
        policy: SwapPolicy,
        *,
        worker: str,
        temperature: float,
        cut: bool = False,
    ) -> None:
        self.index = index
        self.reader = reader
        self.engine = engine
        self.policy = policy
        self.worker = worker
        self.temperature = temperature
        self.cut = cut
        # the version in the engine; None: the weights that it was built with
        self.held: Published | None = None
        self._judge = None if policy.probe is None else ProbeJudge(policy.probe)
        # the last reading, if it was given up
        self._reading: asyncio.Future[Mapping[str, torch.Tensor]] | None = None

    async def read(self, published: Published) -> Mapping[str, torch.Tensor]:
        """Read a copy, in a thread that does not keep the worker from ending. Raises SwapRefused
        where it takes too long, WeightsDamaged, WeightsUnreachable."""
        engine = self.engine
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

    async def swap(
        self, published: Published, weights: Mapping[str, torch.Tensor]
    ) -> tuple[SwapTimes, dict[str, Any]]:
        """Load the ``weights`` that :meth:`read` has returned, and probe them. Returns also the
        gap to the trainer's logprobs, as fields of the event. Raises SwapRefused and WeightMismatch
        with the old weights in place."""
        judge = self._judge
        probe = published.probe
        engine = self.engine
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
            gap: dict[str, Any] = {}
            if judge is not None and probe is not None:
                swapped = time.monotonic()
                gap = await self._probe(published, probe, judge)
                times = SwapTimes(times.exposed + time.monotonic() - swapped, times.hidden)
            self.held = published
            return times, gap
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
        engine = self.engine
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
        has_same_bytes = self.held is not None and self.held.buckets == published.buckets
        try:
            return (
                {}
                if logprobs is None
                else judge.judge(probe, logprobs, same_weights=has_same_bytes)
            )
        except ProbeFailed as failed:
            look = ""
            from stages.weights.verification.fault import find_fault

            finding = find_fault(self.engine, probe, failed, self.temperature)
            with contextlib.suppress(SwapRefused):  # it takes too long
                look = await self._in_time(finding, f"{about}: not probed")
            raise ProbeRefused(f"{about}: {failed}", failed, logprobs or (), look) from None

    async def _score(self, published: Published, probe: Probe) -> list[torch.Tensor] | None:
        scoring = scored(self.engine, probe, self.temperature)
        return await self._in_time(scoring, f"weights of version {published.version}: not probed")

    async def _go_on(self) -> None:
        """Let the engine make tokens again. Raises RuntimeError when it does not."""
        engine = self.engine
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
        if self.held is None:
            raise RuntimeError(
                f"{refused}, and what it had before was never published; the worker restarts"
            )
        try:
            await self._load(self.held.version, await self.read(self.held), hold)
        except (WeightsDamaged, WeightsUnreachable, SwapRefused) as gone:
            raise RuntimeError(
                f"{refused}, and what it had before is gone ({gone}); the worker restarts"
            ) from None
