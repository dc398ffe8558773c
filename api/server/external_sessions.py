"""What the server keeps of runs that programs outside take part in: connections, and weights on their way to them.

It may be lost at any time: leases, prompts and versions are the index's.
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

IDLE_SECONDS = 600.0  # after which a run's connections are closed, to be opened again when it is asked for
VERSIONS = 2  # of weights, kept for further readers


class Weights:
    """One version's weights as a safetensors file, which goes with its last reader; ``digest`` is its sha256."""

    def __init__(self, version: int, file: BufferedReader) -> None:
        self.version, self.file = version, file
        self.digest = hashlib.file_digest(file, "sha256").hexdigest()
        self.nbytes = file.tell()


class ExternalSession:
    """A run's interface, and the newest versions that were asked for. An upload of weights holds ``publishing``: the disk
    holds one at a time."""

    def __init__(self, external: External, folder: Path) -> None:
        self.external, self.used = external, time.monotonic()
        self._folder = folder
        self._held: dict[int, Weights] = {}
        self._copying, self.publishing = asyncio.Lock(), asyncio.Lock()

    async def weights(self, version: int) -> Weights:
        """A verified copy of a published version. Raises WeightsGone."""
        async with self._copying:  # several readers share one copy
            if version not in self._held:
                tensors = await self.external.read_weights(version)
                self._held[version] = await asyncio.to_thread(self._copy, version, tensors)
                for old in sorted(self._held)[:-VERSIONS]:
                    del self._held[old]
            return self._held[version]

    def _copy(self, version: int, tensors: dict) -> Weights:  # type: ignore[type-arg]
        from safetensors.torch import save_file  # brings torch, which a server without such runs need not load

        with tempfile.TemporaryDirectory(dir=self._folder, prefix="weights-") as folder:
            path = Path(folder) / "model.safetensors"
            whole = {name: tensor.clone() for name, tensor in tensors.items()}  # those of one memory are refused
            save_file(whole, path, {"version": str(version)})
            return Weights(version, path.open("rb"))


def _interface() -> type[External]:
    """The interface to a run. It brings torch, which takes seconds and is needed by nobody else: the first who asks pays."""
    from orchestration.external.session import External

    return External


class ExternalSessions:
    """The runs that were asked for lately."""

    def __init__(self, data: Path, registry: Registry, in_use: Container[str] = ()) -> None:
        """``in_use``: the runs that requests are about at the moment; their connections stay open."""
        self._data, self._registry, self._in_use = data, registry, in_use
        self._runs: dict[str, ExternalSession] = {}

    async def run(self, run: str) -> ExternalSession:
        """Ask for it anew at each use. Raises UnknownRun."""
        record = await self._registry.get(run)
        await self._close_idle()
        if run not in self._runs:
            interface = await asyncio.to_thread(_interface)
            if run not in self._runs:  # another request may have been faster
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
        """The run is deleted."""
        if kept := self._runs.pop(run, None):
            await kept.external.close()

    async def close(self) -> None:
        for kept in self._runs.values():
            await kept.external.close()
        self._runs.clear()
