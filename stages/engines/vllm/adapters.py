"""New adapters for a vLLM engine, by vLLM's own support of LoRA.

adapters ─▶ a folder in peft's format in shared memory (generation goes on) ─▶ vLLM is paused: add_lora loads it in place
            of the adapter that all requests name, those in flight too ─▶ the new version
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from pipeline.compat.extras import extra
from stages.adapters.export import save_adapter
from stages.adapters.names import adapter_shapes, peft_config
from stages.adapters.options import AdapterOptions
from stages.engines.checks import check_weights
from stages.engines.vllm.weights import HALF_LOADED
from stages.model.load import empty_model

# of the one adapter, in vLLM
NAME = "policy"
NUMBER = 1


@dataclass(frozen=True)
class WrittenAdapter:
    """The adapters of ``version`` as files in ``folder``."""

    version: int
    folder: Path


class VllmAdapters:
    """Brings adapters of ``options`` on ``model`` (a folder) in ``dtype`` to ``llm``, in the place
    of :class:`VllmWeights`. ``shared``: folder in shared memory of this engine alone. ``first``:
    the adapters that it begins with (None: none)."""

    def __init__(
        self,
        vllm: Any,
        model: Path,
        dtype: torch.dtype,
        shared: Path,
        options: AdapterOptions,
        first: Mapping[str, torch.Tensor] | None,
    ) -> None:
        kind = empty_model(str(model))
        self._layout = {
            name: (shape, dtype) for name, shape in adapter_shapes(kind, options).items()
        }
        self._config = {**peft_config(kind, options), "base_model_name_or_path": str(model)}
        if first is None:
            first = {
                name: torch.zeros(shape, dtype=dtype)
                for name, (shape, dtype) in self._layout.items()
            }
        self.check(first)
        self._vllm = vllm
        self._shared = shared
        self._first = first

    @staticmethod
    def arguments(options: AdapterOptions) -> dict[str, Any]:
        """Return the arguments that vLLM is started with: it has room for adapters of some ranks
        only."""
        with extra("vllm"):
            from vllm.config.lora import MaxLoRARanks

        rank = min(known for known in get_args(MaxLoRARanks) if known >= options.rank)
        return {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}

    @property
    def request(self) -> Any:
        """Return the object by which each request names its adapter."""
        return self._vllm.LoRARequest(NAME, NUMBER, str(self._shared))

    async def start(self, llm: Any, version: int) -> None:
        """Give vLLM the first adapters: a request without one would never have later ones."""
        self._llm = llm
        await self.load(await self.bring(version, self._first))
        self._first = {}

    def check(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Raise ``WeightMismatch`` unless ``weights`` are the adapters in name, shape and dtype."""
        check_weights(weights, self._layout)

    async def bring(self, version: int, weights: Mapping[str, torch.Tensor]) -> WrittenAdapter:
        """Write ``weights`` where vLLM's workers load them from."""
        written = WrittenAdapter(version, self._shared / f"adapter-{version}")
        await asyncio.to_thread(save_adapter, written.folder, self._config, weights)
        return written

    async def load(self, written: WrittenAdapter) -> str:
        """Have the workers load ``written``; vLLM is paused. Returns the version that vLLM
        reports."""
        request = self._vllm.LoRARequest(NAME, NUMBER, str(written.folder), load_inplace=True)
        try:
            if not await self._llm.add_lora(request):
                raise RuntimeError("vLLM has not loaded the adapters")
        except Exception as error:
            raise RuntimeError(f"{HALF_LOADED}: {error!r}") from error
        await self._llm.update_weight_version(str(written.version))
        shutil.rmtree(written.folder, ignore_errors=True)
        version: str = await self._llm.get_weight_version()
        return version

    def abandon(self) -> None:
        """Do nothing: the adapters that were loaded before are unchanged."""

    def close(self) -> None:
        shutil.rmtree(self._shared, ignore_errors=True)
