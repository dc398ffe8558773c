"""What a request changes in logits reaches vLLM: greedy tokens are those of transformers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pipeline.data.arena import shared_memory_directory
from stages.engines.protocols import GroupRequest, RequestRefused, SamplingParams, Token
from stages.engines.vllm.rollout import VllmRolloutEngine
from stages.engines.vllm.rows import check_request
from tests.stages.engines.contract_rollout import collect
from tests.stages.engines.torch.test_processors import expected

pytestmark = pytest.mark.timeout(900)
ASKED: list[dict[str, Any]] = [
    {"repetition_penalty": 1.7},
    {"presence_penalty": 1.9, "frequency_penalty": 0.7},
    {"logit_bias": ((3, 0.5), (20, 0.4))},
    {"allowed_token_ids": (2, 3, 4), "bad_words": ((2, 3), (3, 3, 2), (4, 4))},
    {"stop_token_ids": tuple(range(0, 40, 2)), "min_tokens": 9},
]


async def test_greedy_tokens_are_those_of_transformers(model: Path, tmp_path: Path) -> None:
    exact = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    engine = await asyncio.to_thread(
        lambda: VllmRolloutEngine(
            model,
            shared=shared_memory_directory() / f"asyncdock-{tmp_path.name}",
            dtype=torch.float32,
            max_rows=16,
            max_model_len=128,
            kv_cache_bytes=2**26,
            enforce_eager=True,
            threads=2,
            filters=True,
        )
    )
    prompt = torch.tensor([5, 9, 2, 30, 7])
    try:
        requests = [
            GroupRequest(number, (0,), prompt, SamplingParams(16, temperature=0.0, **params), 0)
            for number, params in enumerate(ASKED)
        ]
        completions = await collect(engine.generate(requests))
        for request in requests:
            tokens, logprobs = expected(exact, request, 0)
            completion = completions[request.group, 0]
            assert completion.token_ids.tolist() == tokens, request.params
            assert completion.logprobs.tolist() == pytest.approx(logprobs, abs=1e-3)
        scored = await engine.score_prompt(requests[0], alternatives=2)
        with torch.no_grad():
            right = exact(prompt[None]).logits[0].log_softmax(-1)
        for row, (token, rank) in zip(right, scored, strict=False):
            assert token.logprob == pytest.approx(float(row[token.token_id]), abs=1e-3)
            assert rank == int((row > row[token.token_id]).sum()) + 1
            assert len(token.alternatives) == 2
        params = SamplingParams(1, temperature=0.0, logprob_token_ids=(8, 9))
        named = GroupRequest(9, (0,), prompt, params, 0)
        (token, done) = [item async for item in engine.stream([named])]
        assert isinstance(token, Token)
        assert dict(token.alternatives) == pytest.approx(
            {number: float(right[-1, number]) for number in (8, 9)}, abs=1e-3
        )
        assert done.cached_tokens >= 0
    finally:
        await engine.close()


async def test_an_engine_without_filters_refuses_them(model: Path) -> None:

    request = GroupRequest(0, (0,), torch.tensor([1]), SamplingParams(4, min_p=0.1), 0)
    with pytest.raises(RequestRefused, match="filters=True"):
        check_request(request, vocabulary=48, context=64, filters=False)


def test_the_temperatures_of_drafted_tokens_are_not_set_on_a_cpu() -> None:
    """When this fails, vLLM has mended it: remove the check ``vllm_samples_drafts``."""
    from vllm.platforms import current_platform
    from vllm.utils.cpu_triton_utils import _expand_kernel_impl

    current_platform.import_kernels()
    temperatures = torch.full((3,), 7.0)
    _expand_kernel_impl(temperatures, torch.tensor([2.0]), torch.tensor([3]), 0, 1)
    assert temperatures.tolist() == [7.0] * 3
