"""Models by name, of which only some can be sampled from at a time: those of rank 0 in engines of
their own, adapters in an engine that has room for some.

engine(name) ─▶ its engine, or: close the one that was used longest ago ─▶ factory ─▶ load the weights
                                └ all have requests: wait until one has none; later calls wait behind
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from stages.engines.protocols import EngineClosed


class Loads(Protocol):
    """What has the weights of one model while it is open."""

    async def load_weights(self, version: int, weights: Mapping[str, Any]) -> Any:
        """Use ``weights`` from the next token on. Raises WeightMismatch."""

    async def close(self) -> None:
        """Release them; its requests in flight fail. May be called again."""


Engine = TypeVar("Engine", bound=Loads)


@dataclass(eq=False)
class _Model(Generic[Engine]):
    weights: Mapping[str, Any]
    step: int
    engine: Engine | None = None
    requests: int = 0

    @property
    def is_idle(self) -> bool:
        return self.engine is not None and not self.requests


class OpenModels(Generic[Engine]):
    """Models by name, of which at most ``most`` have an engine at a time. ``factory`` makes one, in
    a thread. The weights of all stay in memory, for their next engine."""

    def __init__(self, factory: Callable[[], Engine], most: int) -> None:
        self._factory = factory
        self._most = most
        self._models: dict[str, _Model[Engine]] = {}  # the last used last
        self._opening = asyncio.Lock()
        self._freed = asyncio.Event()

    def __contains__(self, name: str) -> bool:
        return name in self._models

    def engines(self) -> list[Engine]:
        """Return those that are open."""
        return [each.engine for each in self._models.values() if each.engine is not None]

    async def put(self, name: str, weights: Mapping[str, Any], step: int) -> None:
        """Make ``weights`` those of ``name``. Raises WeightMismatch where its engine refuses
        them."""
        model = self._models.setdefault(name, _Model(weights, step))
        model.requests += 1
        try:
            if model.engine is not None:
                await model.engine.load_weights(step, weights)
            model.weights = weights
            model.step = step
        finally:
            self._free(model)

    async def remove(self, name: str) -> None:
        """Forget ``name``; its requests in flight raise EngineClosed."""
        await self._close(self._models.pop(name))

    @asynccontextmanager
    async def engine(self, name: str) -> AsyncIterator[Engine]:
        """Return the engine of ``name``, which stays open inside the context unless it is removed.
        Raises EngineClosed where it is removed before, and WeightMismatch."""
        async with self._opening:
            model = self._models.get(name)
            while model is not None and model.engine is None:
                await self._open(model)
                model = self._models.get(name)
            if model is None or model.engine is None:
                raise EngineClosed(f"the model {name!r} was removed")
            self._models[name] = self._models.pop(name)
            model.requests += 1
        try:
            yield model.engine
        finally:
            self._free(model)

    async def close(self) -> None:
        for name in list(self._models):
            await self.remove(name)

    def _free(self, model: _Model[Engine]) -> None:
        model.requests -= 1
        self._freed.set()

    async def _open(self, model: _Model[Engine]) -> None:
        """Give ``model`` an engine if there is room for one, or wait for what may make some."""
        if sum(each.engine is not None for each in self._models.values()) >= self._most:
            idle = [each for each in self._models.values() if each.is_idle]
            if not idle:
                self._freed.clear()
                await self._freed.wait()
                return
            await self._close(idle[0])
        engine = await asyncio.to_thread(self._factory)
        weights = None
        try:
            while weights is not model.weights:
                weights = model.weights
                await engine.load_weights(model.step, weights)
        except BaseException:
            await engine.close()
            raise
        if model in self._models.values():
            model.engine = engine
        else:
            await engine.close()

    async def _close(self, model: _Model[Engine]) -> None:
        engine = model.engine
        model.engine = None
        self._freed.set()
        if engine is not None:
            await engine.close()
