"""A model in training, as an engine has it until its process ends."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

from orchestration.calls.engines.channel import Message
from orchestration.calls.engines.engine import EngineDied, EngineDown, EngineFailed
from orchestration.calls.engines.served import Served
from stages.calls.interface import ModelOptions


class LoadedModel:
    """The model ``model_id`` of ``owner`` on ``served``. Operations wait for a turn; they raise what
    :meth:`Engine.call` does."""

    def __init__(self, served: Served, owner: str, model_id: str) -> None:
        self.bytes = 0
        """That it takes in the engine, as far as that is known."""
        self._served = served
        self._owner = owner
        self._model_id = model_id
        self._generation = 0

    @property
    def present(self) -> bool:
        return 0 < self._generation == self._served.engine.generation

    def forget(self) -> None:
        """Take it for lost: it is to be opened again."""
        self._generation = 0

    async def open(self, options: ModelOptions, folder: Path | None) -> None:
        """Create it, or load it from the saved state in ``folder``."""
        self.forget()
        reply, _ = await self.call("open", options=asdict(options), folder=str(folder or ""))
        self._generation = self._served.engine.generation
        self.bytes = reply["bytes"]

    async def call(self, operation: str, blob: bytes = b"", **fields: Any) -> Message:
        try:
            async with self._served.turn(self._owner, self._model_id):
                return await self._served.engine.call(
                    operation, blob, model=self._model_id, **fields
                )
        except EngineDied:
            self.forget()
            raise

    async def save(self, folder: Path, *, optimizer: bool, merged: bool) -> None:
        await self.call("save", folder=str(folder), optimizer=optimizer, merged=merged)

    async def close(self) -> None:
        """Release it there. Raises nothing of the engine's."""
        if self.present:
            with contextlib.suppress(EngineDied, EngineDown, EngineFailed):
                await self.call("close")
        self.forget()
