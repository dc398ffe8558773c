"""New weights for a vLLM engine, from tensors to vLLM's workers.

    a version is published ─▶ the first worker has the node's depot hold it, verified   (generation goes on)
      ─▶ vLLM is paused: workers map the depot's memory and load it ─▶ the new version

Weights that come as tensors, as for a served policy, are first written to shared memory.

A worker reports in a file store that the bytes of a version have landed: a file that only its owner
can open, not a port.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import FileStore

from stages.engines.checks import check_weights
from stages.model.load import weight_shapes
from stages.weights.published import Published, WeightsDamaged, WeightsUnreachable
from stages.weights.transport.store import WeightStore

TRANSPORT = "asyncdock"  # the name that stages/engines/vllm/worker.py registers
RECEIVED = "received-"  # begins the names of the depot's versions in an engine's folder
HALF_LOADED = "the model is left half loaded"


def received_file(folder: Path, published: Published) -> Path:
    """Returns the name of a version of the depot in the engine's ``folder``."""
    return folder / f"{RECEIVED}{published.key()}"


class Landed(dict[str, torch.Tensor]):
    """A version that vLLM's workers have received, or that the engine has ``written`` for them:
    tensors on the device ``meta``, by parameter name."""

    def __init__(self, published: Published, *, written: bool = False) -> None:
        self.published = published
        self.written = written
        super().__init__(
            {
                t.name: torch.empty(t.shape, dtype=getattr(torch, t.dtype), device="meta")
                for t in published.tensors
            }
        )


class VllmWeights:
    """Brings weights of ``model`` (a folder) in ``dtype`` to the workers of ``llm``.

    ``shared``: folder in shared memory of this engine alone. ``timeout``: seconds for a version to
    land.
    """

    def __init__(
        self, vllm: Any, model: Path, dtype: torch.dtype, shared: Path, timeout: float
    ) -> None:
        self._vllm = vllm
        self._layout = {name: (shape, dtype) for name, shape in weight_shapes(str(model)).items()}
        self.store = WeightStore(shared, slots=1)
        self._file = shared / "landed"
        shared.mkdir(parents=True, exist_ok=True)
        os.close(os.open(self._file, os.O_CREAT | os.O_WRONLY, 0o600))
        self._landed = FileStore(str(self._file), -1)
        self._landed.set_timeout(timedelta(seconds=timeout))
        self._keys = itertools.count()
        self._updating = False  # vLLM is in a weight update

    request: Any = None  # what a request names its adapter by: none

    async def start(self, llm: Any, version: int) -> None:
        """Give the workers the places of the store and of the file, and vLLM the version of its
        first weights."""
        self._llm = llm
        places = {"directory": str(self.store.directory), "landed": str(self._file)}
        await llm.init_weight_transfer_engine(self._vllm.WeightTransferInitRequest(places))
        await llm.update_weight_version(str(version))

    def check(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Raise ``WeightMismatch`` unless ``weights`` are the model's parameters in name, shape and
        dtype."""
        check_weights(weights, self._layout)

    async def bring(self, version: int, weights: Mapping[str, torch.Tensor]) -> Landed:
        """Write ``weights`` where the workers load them from, and have them verified.

        Raises ``WeightsDamaged``.
        """
        published = await asyncio.to_thread(self.store.publish, version, weights.items())
        landed = Landed(published, written=True)
        await self.land(landed)
        return landed

    async def land(self, landed: Landed) -> None:
        """Have the workers verify or receive a version while generation goes on.

        Raises ``WeightsDamaged`` and ``WeightsUnreachable``; vLLM then keeps its weights.
        """
        key = f"landed-{next(self._keys)}"
        try:
            if not self._updating:
                await self._llm.start_weight_update()
                self._updating = True
            await self._send(landed, key)
            answer = await asyncio.to_thread(self._landed.get, key)
        except Exception as error:
            raise WeightsDamaged(str(error)) from error
        self._landed.delete_key(key)
        if report := json.loads(answer):
            raise (WeightsUnreachable if report["gone"] else WeightsDamaged)(report["reason"])

    async def load(self, landed: Landed) -> str:
        """Have the workers load the version that has landed; vLLM is paused.

        Returns the version that vLLM reports.
        """
        await self._send(landed)
        await self._llm.finish_weight_update(str(landed.published.version))
        self._updating = False
        received_file(self.store.directory, landed.published).unlink(missing_ok=True)
        version: str = await self._llm.get_weight_version()
        return version

    def abandon(self) -> None:
        """Record that vLLM has ended an update that failed."""
        self._updating = False

    def close(self) -> None:
        self.store.close()
        shutil.rmtree(self.store.directory, ignore_errors=True)

    async def _send(self, landed: Landed, key: str = "") -> None:
        update = {
            "published": landed.published.record(),
            "written": landed.written,
            "report_key": key,
        }
        await self._llm.update_weights(self._vllm.WeightTransferUpdateRequest(update))
