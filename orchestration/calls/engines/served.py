"""A served base model: its engine, the turns and places at it, and what it samples with.

sample ─▶ does the engine have the weights? ─ no ─▶ put them there, from their folder ─▶ slots ─▶ tokens
EngineTime ─▶ has sampling to stop? ─▶ pause or resume ─▶ the engine's sampler
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import structlog

from orchestration.calls.engines.channel import Message
from orchestration.calls.engines.engine import Engine, EngineDied, EngineDown, EngineFailed
from orchestration.calls.engines.turns import REVIEW_SECONDS, EngineTime, Places
from stages.calls.interface import ModelOptions

log = structlog.get_logger()

NOWHERE = (-1, 0)  # process and step of weights that no engine has


@dataclass(frozen=True)
class Weights:
    """What a sampler samples with: ``folder`` has the weights of ``step`` of ``model_id``, under
    ``name`` at the engine."""

    name: str
    model_id: str
    options: ModelOptions
    step: int
    folder: Path


class Served:
    """``engine`` with turns of its training thread, ``rows`` for samples, ``places`` of models, and
    weights of at most ``adapters`` samplers."""

    def __init__(self, engine: Engine, places: Places, *, rows: int, adapters: int) -> None:
        self.engine = engine
        self.places = places
        self._time = EngineTime(rows)
        self._most = adapters
        # by name: the engine's process, and the step of the weights; the longest unused first
        self._held = OrderedDict[str, tuple[int, int]]()
        self._users = Counter[str]()
        self._steering = asyncio.create_task(self._steer())

    @asynccontextmanager
    async def turn(self, owner: str, model: str) -> AsyncIterator[None]:
        """Hold a turn of the training thread. Nobody holds one while a process starts, for which an
        owner would be charged. Raises EngineDown."""
        await self.engine.started()
        async with self._time.training.turn(owner, model):
            yield

    async def put(self, weights: Weights, owner: str, *, live: bool) -> None:
        """Give the sampler the weights; ``live``: those that the model in training has now."""
        async with self.turn(owner, weights.name):
            await self._put(weights, live=live)

    async def _put(self, weights: Weights, *, live: bool) -> None:
        await self.engine.call(
            "put",
            name=weights.name,
            model=weights.model_id,
            folder="" if live else str(weights.folder),
            options=asdict(weights.options),
            step=weights.step,
        )
        self._held[weights.name] = (self.engine.generation, weights.step)
        for name in list(self._held):
            if len(self._held) > self._most:
                await self.remove(name)

    async def sample(
        self,
        weights: Weights | None,
        owner: str,
        sampler_id: str,
        seed: int,
        request: bytes,
        rows: int,
    ) -> Message:
        """Return what the engine answers; ``weights`` None: the base model's, ``rows``: sequences of
        the request. Raises what :meth:`Engine.call` does."""
        name = "" if weights is None else weights.name
        async with self._using(name):
            if weights is not None:
                await self._ensure(weights, owner)
            await self.engine.started()
            async with self._time.sampling.turn(owner, sampler_id, rows):
                return await self.engine.call("sample", request, name=name, seed=seed)

    async def _ensure(self, weights: Weights, owner: str) -> None:
        if self._has(weights):
            self._held.move_to_end(weights.name)
            return
        async with self.turn(owner, weights.name):
            if not self._has(weights):
                await self._put(weights, live=False)

    def _has(self, weights: Weights) -> bool:
        generation, step = self._held.get(weights.name, NOWHERE)
        return generation == self.engine.generation and step >= weights.step

    @asynccontextmanager
    async def _using(self, name: str) -> AsyncIterator[None]:
        self._users[name] += 1
        try:
            yield
        finally:
            self._users[name] -= 1
            if not self._users[name]:
                del self._users[name]

    async def remove(self, name: str) -> None:
        """Forget weights, if the engine has them and no request needs them."""
        if not self._users[name] and self._held.pop(name, NOWHERE)[0] == self.engine.generation:
            await self.engine.call("remove", name=name)

    async def _steer(self) -> None:
        """Have the engine's sampler stop and go on, as owners use their time."""
        paused_process = NOWHERE[0]
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._time.seconds_to_review):
                    await self._time.changed.wait()
            self._time.review()
            self._time.changed.clear()
            is_paused = paused_process == self.engine.generation
            if is_paused == self._time.sampling.is_stopped:
                continue
            try:
                await self.engine.call("resume" if is_paused else "pause")
            except (EngineDied, EngineDown, EngineFailed) as error:
                log.error("a sampler could not be paused or resumed", reason=str(error))
                await asyncio.sleep(REVIEW_SECONDS)
                if is_paused:
                    continue  # a part of it may be
            paused_process = NOWHERE[0] if is_paused else self.engine.generation

    async def close(self) -> None:
        self._steering.cancel()
        await asyncio.wait([self._steering])
