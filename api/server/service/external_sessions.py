"""The server's connections to runs with external stages.

All of it may be lost at any time: leases, prompts and versions are in the index.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

from orchestration.recipe.schema import Recipe
from orchestration.state.registry import Registry
from pipeline.index.client import Index

if TYPE_CHECKING:
    from api.external.session import ExternalSession

IDLE_SECONDS = 600.0  # without a request, after which the connections of a run are closed


def _open_session(index: Index, recipe: Recipe, data: Path) -> ExternalSession:
    """Open the session of a run. Imports torch, which takes seconds: a server without external
    stages does not load it."""
    from api.external.session import External, ExternalSession

    return ExternalSession(External(index, recipe, worker="service"), data)


class ExternalSessions:
    """The sessions of the runs that had a request lately."""

    def __init__(self, data: Path, registry: Registry) -> None:
        self._data = data
        self._registry = registry
        self._runs: dict[str, ExternalSession] = {}

    @contextlib.asynccontextmanager
    async def run(self, run: str) -> AsyncIterator[ExternalSession]:
        """Yield the session of ``run``, and turn its exceptions into problems. Raises
        UnknownRun."""
        record = await self._registry.get(run)
        await self._close_idle()
        if run not in self._runs:
            index = Index(self._registry.link, run)
            recipe = Recipe.recorded(record.recipe)
            opened = await asyncio.to_thread(_open_session, index, recipe, self._data)
            self._runs.setdefault(run, opened)  # another request may have opened one meanwhile
        session = self._runs[run]
        session.users += 1
        try:
            with session.refusals():
                yield session
        finally:
            session.users -= 1
            session.used = time.monotonic()

    async def _close_idle(self) -> None:
        since = time.monotonic() - IDLE_SECONDS
        idle = [
            run for run, session in self._runs.items() if not session.users and session.used < since
        ]
        for session in [self._runs.pop(run) for run in idle]:
            await session.external.close()

    async def forget(self, run: str) -> None:
        """Close the connections of a deleted run."""
        if session := self._runs.pop(run, None):
            await session.external.close()

    async def close(self) -> None:
        for run in list(self._runs):
            await self.forget(run)
