"""The server's connections to runs with external stages, and the files of weights that it sends to them.

All of it may be lost at any time: leases, prompts and versions are in the index.
"""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
import time
from collections.abc import Container
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING

from orchestration.recipe.schema import Recipe
from orchestration.service.registry import Registry
from pipeline.index.client import Index

if TYPE_CHECKING:
    from orchestration.external.session import External

IDLE_SECONDS = 600.0  # without a request, after which the connections of a run are closed
VERSIONS = 2  # of weights, with files that are kept for further readers


class Weights:
    """The weights of one version as a safetensors file, removed after its last reader; ``digest`` is its sha256."""

    def __init__(self, version: int, file: BufferedReader) -> None:
        self.version, self.file = version, file
        self.digest = hashlib.file_digest(file, "sha256").hexdigest()
        self.nbytes = file.tell()


class ExternalSession:
    """The interface of one run, and the files of the newest requested versions. An upload of weights holds the lock
    ``publishing``, so that the disk holds one upload of a run at a time."""

    def __init__(self, external: External, folder: Path) -> None:
        self.external, self.used = external, time.monotonic()
        self._folder = folder
        self._held: dict[int, Weights] = {}
        self._copying, self.publishing = asyncio.Lock(), asyncio.Lock()

    async def weights(self, version: int) -> Weights:
        """Returns a verified copy of a published version. Raises WeightsGone."""
        async with self._copying:  # several readers share one copy
            if version not in self._held:
                tensors = await self.external.read_weights(version)
                self._held[version] = await asyncio.to_thread(self._copy, version, tensors)
                for old in sorted(self._held)[:-VERSIONS]:
                    del self._held[old]
            return self._held[version]

    def _copy(self, version: int, tensors: dict) -> Weights:  # type: ignore[type-arg]
        from safetensors.torch import save_file  # imports torch, which a server without such runs does not load

        with tempfile.TemporaryDirectory(dir=self._folder, prefix="weights-") as folder:
            path = Path(folder) / "model.safetensors"
            whole = {
                name: tensor.clone() for name, tensor in tensors.items()
            }  # save_file refuses tensors that share memory
            save_file(whole, path, {"version": str(version)})
            return Weights(version, path.open("rb"))


def _interface() -> type[External]:
    """Imports the interface to a run, and with it torch, on the first request that needs it: this takes seconds."""
    from orchestration.external.session import External

    return External


class ExternalSessions:
    """The sessions of the runs that had a request lately."""

    def __init__(self, data: Path, registry: Registry, in_use: Container[str] = ()) -> None:
        """``in_use``: the runs with a request in progress; their connections stay open."""
        self._data, self._registry, self._in_use = data, registry, in_use
        self._runs: dict[str, ExternalSession] = {}

    async def run(self, run: str) -> ExternalSession:
        """Returns the session of ``run``; call this for each request. Raises UnknownRun."""
        record = await self._registry.get(run)
        await self._close_idle()
        if run not in self._runs:
            interface = await asyncio.to_thread(_interface)
            if run not in self._runs:  # another request may have opened it meanwhile
                index = Index(self._registry.link, run)
                recipe = Recipe.model_validate(record.recipe)
                self._runs[run] = ExternalSession(interface(index, recipe, worker="service"), self._data)
        self._runs[run].used = time.monotonic()
        return self._runs[run]

    async def _close_idle(self) -> None:
        for run, kept in list(self._runs.items()):
            idle = time.monotonic() - kept.used > IDLE_SECONDS and run not in self._in_use
            if idle and self._runs.get(run) is kept:  # another request may have closed it while this one waited
                del self._runs[run]
                await kept.external.close()

    async def forget(self, run: str) -> None:
        """Closes the connections of a deleted run."""
        if kept := self._runs.pop(run, None):
            await kept.external.close()

    async def close(self) -> None:
        for kept in self._runs.values():
            await kept.external.close()
        self._runs.clear()
