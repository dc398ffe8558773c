"""Several sets of adapters in the real vLLM, and the sampler of training calls on it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.data.arena import shared_memory_directory
from stages.adapters.names import adapter_shapes, down_of, up_of
from stages.adapters.options import AdapterOptions
from stages.calls.interface import (
    ALPHA,
    CallRefused,
    ModelOptions,
    SampleOutput,
    SampleRequest,
    SamplingOptions,
)
from stages.calls.sampler import EngineSampler
from stages.engines.vllm.adapter_sets import AdapterRoom
from stages.engines.vllm.rollout import VllmMultiAdapterEngine
from stages.model.load import tiny_tokenizer
from tests.stages.engines.vllm.test_vllm_adapters import model_of

pytestmark = pytest.mark.timeout(600)
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")
PROMPT = (np.arange(20) * 7 + 3) % 46
Weights = dict[str, torch.Tensor]


def adapters_of(rank: int, seed: int) -> Weights:
    random = torch.Generator().manual_seed(seed)
    shapes = adapter_shapes(model_of(), AdapterOptions(rank, ALPHA, TARGETS))
    return {
        name: torch.empty(shape).normal_(std=0.1, generator=random)
        for name, shape in shapes.items()
    }


def expected(weights: Weights, rank: int, tokens: np.ndarray) -> np.ndarray:
    """Logprobs of the prompt after its first token, and of ``tokens``, of the merged model."""
    model = model_of()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())  # untied
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if (down := down_of(layer := name.removesuffix(".weight"))) in weights:
                weight.add_(weights[up_of(layer)] @ weights[down], alpha=ALPHA / rank)
        ids = torch.tensor([*PROMPT, *tokens])
        logprobs = model(input_ids=ids[None]).logits[0].log_softmax(-1)
    return logprobs[:-1].gather(1, ids[1:, None])[:, 0].numpy()


async def test_sets_of_different_ranks_sample_side_by_side(tmp_path: Path) -> None:
    model_of().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    shared = shared_memory_directory() / f"asyncdock-test-{time.monotonic_ns()}"
    engine = await asyncio.to_thread(
        lambda: VllmMultiAdapterEngine(
            tmp_path,
            shared=shared,
            dtype=torch.float32,
            max_rows=8,
            max_model_len=512,
            kv_cache_bytes=2**26,
            enforce_eager=True,
            threads=1,
            filters=True,
            room=AdapterRoom(most=2, rank=8),
        )
    )
    sampler = EngineSampler(engine, [])
    ranks = {"a": 2, "b": 8}
    weights = {name: adapters_of(rank, rank) for name, rank in ranks.items()}

    def assert_made_by(name: str, weights: Weights, rank: int, output: object) -> None:
        sequence = output.sequences[0]  # type: ignore[attr-defined]
        logprobs = np.concatenate([output.prompt_logprobs[1:], sequence.logprobs])  # type: ignore[attr-defined]
        wanted = expected(weights, rank, sequence.tokens)
        assert np.allclose(logprobs, wanted, atol=1e-3), (name, np.abs(logprobs - wanted).max())

    try:
        for name, rank in ranks.items():
            await sampler.put(name, ModelOptions(rank), weights[name], 3)
        options = SamplingOptions(max_tokens=12, temperature=0.5, stop=())
        request = SampleRequest(PROMPT, options, prompt_logprobs=True, top_k_sampled=2)
        names = ("", *ranks)
        outputs = await asyncio.gather(*(sampler.sample(n, request, 1) for n in names))
        for name, output in zip(names, outputs, strict=True):
            assert_made_by(name, weights.get(name, {}), ranks.get(name, 1), output)
            assert output.sequences[0].versions == ((3 if name else 0, 12),)
            assert [len(at) for at in output.sequences[0].top] == [2] * 12
        long = SampleRequest(PROMPT, SamplingOptions(max_tokens=400, stop=()))
        calls = [asyncio.create_task(sampler.sample(name, long, 1)) for name in names]
        await sampler.sample("a", request, 2)  # they have begun
        newer = adapters_of(2, 9)
        await sampler.put("a", ModelOptions(2), newer, 4)
        base, replaced, other = [(await call).sequences[0].versions for call in calls]
        assert [step for step, _ in replaced] == [3, 4]
        assert (base, other) == (((0, 400),), ((3, 400),))
        assert_made_by("a", newer, 2, await sampler.sample("a", request, 1))
        with pytest.raises(CallRefused, match="room for 2 sets of adapters"):
            await sampler.put("c", ModelOptions(2), weights["a"], 0)
        scored = SampleRequest(PROMPT, replace(options, max_tokens=1), prompt_logprobs=True)
        scorings = [asyncio.create_task(sampler.sample("a", scored, 1)) for _ in range(8)]
        await asyncio.sleep(0)
        await sampler.put("a", ModelOptions(2), weights["a"], 5)
        for scoring in scorings:  # by the one or the other, and not by both
            output = await scoring
            assert output.prompt_logprobs is not None
            logprobs = [expected(each, 2, np.array([], np.int64)) for each in (newer, weights["a"])]
            gaps = [np.abs(output.prompt_logprobs[1:] - each).max() for each in logprobs]
            assert min(gaps) < 1e-3 < max(gaps)
        removed = asyncio.create_task(sampler.sample("a", long, 1))
        never = [asyncio.create_task(sampler.sample("a", scored, 1)) for _ in range(4)]
        staying = asyncio.create_task(sampler.sample("b", request, 1))
        await sampler.sample("a", request, 3)
        await sampler.remove("a")
        with pytest.raises(CallRefused, match="was removed"):
            await removed
        for error in await asyncio.gather(*never, return_exceptions=True):
            assert isinstance(error, SampleOutput) or "was removed" in str(error)
        assert_made_by("b", weights["b"], 8, await staying)
        await sampler.put("c", ModelOptions(4), third := adapters_of(4, 5), 0)
        assert_made_by("c", third, 4, await sampler.sample("c", request, 1))
    finally:
        await sampler.close()
    assert not shared.exists()
