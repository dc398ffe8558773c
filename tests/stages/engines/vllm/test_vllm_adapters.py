"""Adapters in the real vLLM: a small model, its logprobs beside those of the merged model."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from pipeline.data.arena import shared_memory_directory
from stages.adapters.names import adapter_shapes, down_of, up_of
from stages.adapters.options import AdapterOptions
from stages.engines.protocols import GroupRequest, SamplingParams, WeightMismatch
from stages.engines.vllm.rollout import VllmRolloutEngine
from stages.model.load import load_config, tiny_tokenizer

pytestmark = pytest.mark.timeout(600)
LORA = AdapterOptions(4, 8.0)
IDS = (torch.arange(20) * 7 + 3) % 46


def model_of(adapters: dict[str, torch.Tensor] | None = None) -> LlamaForCausalLM:
    config = load_config("tiny")
    config.head_dim = 32  # of the least that vLLM has attention for on a CPU
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters() if adapters else ():
            layer = name.removesuffix(".weight")
            if adapters and down_of(layer) in adapters:
                weight += LORA.scale * adapters[up_of(layer)] @ adapters[down_of(layer)]
    return model


def adapters_of(seed: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    shapes = adapter_shapes(model_of(), LORA)
    return {
        name: torch.empty(shape).normal_(std=0.2, generator=random)
        for name, shape in shapes.items()
    }


def logprobs_of(model: LlamaForCausalLM) -> torch.Tensor:
    with torch.no_grad():
        logprobs = model(input_ids=IDS[None]).logits[0].log_softmax(-1)
    return logprobs[:-1].gather(1, IDS[1:, None])[3:, 0]


async def test_each_version_is_the_merged_model_for_requests_in_flight_too(tmp_path: Path) -> None:
    model_of().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    shared = shared_memory_directory() / f"asyncdock-test-{time.monotonic_ns()}"
    engine = await asyncio.to_thread(
        lambda: VllmRolloutEngine(
            tmp_path,
            shared=shared,
            dtype=torch.float32,
            max_rows=4,
            max_model_len=512,
            kv_cache_bytes=2**26,
            enforce_eager=True,
            threads=1,
            adapters=LORA,
            first=adapters_of(1),
            initial_version=7,
        )
    )
    try:
        assert engine.version == 7

        async def gap_to(adapters: dict[str, torch.Tensor] | None) -> float:
            found = await engine.score(IDS[:4], IDS[4:])
            assert found is not None
            return float((found - logprobs_of(model_of(adapters))).abs().max())

        assert await gap_to(adapters_of(1)) < 1e-4
        assert await gap_to(None) > 0.1
        request = GroupRequest(0, (0,), IDS, SamplingParams(max_tokens=400, temperature=1.0), 0)
        async with aclosing(engine.generate([request])) as made:  # type: ignore[type-var]
            swapping = asyncio.create_task(engine.load_weights(8, adapters_of(2)))
            completion = await anext(made)
            await swapping
        assert completion.versions[-1][0] == engine.version == 8, "in flight while it was swapped"
        assert await gap_to(adapters_of(2)) < 1e-4
        assert await gap_to(adapters_of(1)) > 0.1
        with pytest.raises(WeightMismatch, match=r"lora_A\.default\.weight: missing"):
            await engine.load_weights(9, dict(model_of().named_parameters()))
    finally:
        await engine.close()
    assert not shared.exists()
