"""The parts of an engine that trains with torch and samples with vLLM, which has its own copy of the
base's weights.

model ─▶ refused by name, where vLLM has no room for it ─▶ trained ─▶ its weights ─▶ vLLM, in a place of its room
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestration.calls.engines.parts import Parts
from orchestration.processes.leftovers import sweep_leftovers
from pipeline.data.arena import shared_memory_directory
from pipeline.node import owned_prefix
from stages.calls.base import TorchBase
from stages.calls.interface import CalledModel, CallRefused, ModelOptions
from stages.calls.prompt_scores import MOST_TOP
from stages.calls.sampler import EngineSampler
from stages.engines.vllm.adapter_sets import AdapterRoom
from stages.engines.vllm.rollout import VllmMultiAdapterEngine
from stages.model.load import MADE_FROM_SEED, model_folder


def vllm_parts(
    trained: TorchBase,
    source: str,
    new_model: Callable[[ModelOptions], CalledModel],
    ends: Sequence[int],
    *,
    max_loras: int,
    max_lora_rank: int,
    most_whole: int,
    arguments: Mapping[str, Any],
    **options: Any,
) -> Parts:
    """Return the parts of the base ``trained``, the model ``source``.

    ``max_loras``, of ranks up to ``max_lora_rank``: adapters that vLLM has at a time. ``arguments``
    and ``options``: those of :class:`~stages.engines.vllm.rollout.VllmRolloutEngine`. Models of
    rank 0 have engines of their own, at most ``most_whole`` at a time, where ``kv_cache_bytes``
    says what each takes. Raises EngineMissing, and what vLLM raises.
    """
    sweep_leftovers()

    def engine(room: AdapterRoom | None = None) -> VllmMultiAdapterEngine:
        prefix = owned_prefix(os.getpid())
        shared = Path(tempfile.mkdtemp(prefix=prefix, dir=shared_memory_directory()))
        try:
            return VllmMultiAdapterEngine(
                _folder(trained, source, shared),
                shared=shared,
                dtype=trained.dtype,
                filters=True,  # logprobs are those at temperature 1
                room=room,
                arguments={"max_logprobs": MOST_TOP, **arguments},
                **options,
            )
        except BaseException:  # once the engine exists, its close removes the folder
            shutil.rmtree(shared, ignore_errors=True)
            raise

    shared_engine = engine(AdapterRoom(max_loras, max_lora_rank))
    can_open_whole = options.get("kv_cache_bytes") is not None
    sampler = EngineSampler(
        shared_engine,
        ends,
        make_whole=engine if can_open_whole else None,
        most_whole=most_whole,
        room=max_loras,
    )

    def make(model: ModelOptions) -> CalledModel:
        """Make a model that vLLM has room for. Raises CallRefused."""
        if model.rank > max_lora_rank:
            wrong = f"is more than the {max_lora_rank} that this server samples with"
            raise CallRefused.of("rank", model.rank, wrong, "use a lower one, or ask for more")
        if model.head and model.rank and not shared_engine.adapts_heads:
            wrong = "is not available: vLLM has no adapters on the head of this model"
            raise CallRefused.of("train_unembed", True, wrong, "set it to false")
        if not model.rank and not can_open_whole:
            wrong = "trains all weights, for which this server has no sampler: its recipe has no "
            fix = "use an adapter: a rank of 1 or more"
            raise CallRefused.of("rank", 0, f"{wrong}rollout.vllm.kv_cache_bytes", fix)
        return new_model(model)

    return Parts(make, sampler)


def _folder(trained: TorchBase, source: str, shared: Path) -> Path:
    """Return the folder that vLLM reads the model from."""
    if source not in MADE_FROM_SEED:
        return model_folder(source)
    folder = shared / "model"
    trained.model.save_pretrained(folder)
    trained.tokenizer.save_pretrained(folder)
    return folder
