"""A served base model: its engine, the turns and places at it, and what it samples with.

sample ─▶ does the engine have the weights? ─ no ─▶ put them there, from their folder ─▶ a slot ─▶ tokens
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from orchestration.calls.engines.channel import Message
from orchestration.calls.engines.engine import Engine
from orchestration.calls.engines.turns import Places, Turns
from stages.calls.interface import ModelOptions

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
    """``engine`` with turns of its training thread, ``slots`` for samples, ``places`` of models, and
    weights of at most ``adapters`` samplers."""

    def __init__(self, engine: Engine, places: Places, *, slots: int, adapters: int) -> None:
        self.engine = engine
        self.places = places
        self.training = Turns(1)
        self._sampling = Turns(slots)
        self._most = adapters
        # by name: the engine's process, and the step of the weights; the longest unused first
        self._held = OrderedDict[str, tuple[int, int]]()
        self._users = Counter[str]()
        self._putting = asyncio.Lock()

    async def put(self, weights: Weights, owner: str, *, live: bool) -> None:
        """Give the sampler the weights; ``live``: those that the model in training has now."""
        async with self._putting, self.training.turn(owner, weights.name):
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
        self, weights: Weights | None, owner: str, sampler_id: str, seed: int, request: bytes
    ) -> Message:
        """Return what the engine answers; ``weights`` None: the base model's. Raises what
        :meth:`Engine.call` does."""
        name = "" if weights is None else weights.name
        async with self._using(name):
            if weights is not None:
                await self._ensure(weights, owner)
            async with self._sampling.turn(owner, sampler_id):
                return await self.engine.call("sample", request, name=name, seed=seed)

    async def _ensure(self, weights: Weights, owner: str) -> None:
        if self._has(weights):
            self._held.move_to_end(weights.name)
            return
        async with self._putting:
            if not self._has(weights):
                async with self.training.turn(owner, weights.name):
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
