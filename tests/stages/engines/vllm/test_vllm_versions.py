"""Each token has the version that made it, with every vLLM that the adapter serves."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from pipeline.data.arena import shared_memory_directory
from stages.engines.protocols import Completion, GroupRequest, SamplingParams, Token
from stages.engines.vllm.rollout import VllmRolloutEngine
from stages.model.load import load_config, tiny_tokenizer

pytestmark = pytest.mark.timeout(900)
IDS = (torch.arange(20) * 7 + 3) % 46
ROWS = 6
TOKENS = 300


def model_of(version: int) -> LlamaForCausalLM:
    """Weights that have nothing in common with those of another version."""
    config = load_config("tiny")
    config.head_dim = 32
    config.initializer_range = 0.3
    torch.manual_seed(version)
    return LlamaForCausalLM(config).eval()


def gaps(done: Completion, version: int) -> torch.Tensor:
    """How far each token's logprob is from that of a plain forward of ``version``."""
    with torch.no_grad():
        logits = model_of(version)(input_ids=torch.cat([IDS, done.token_ids])[None]).logits[0]
    expected = logits[len(IDS) - 1 : -1].log_softmax(-1).gather(1, done.token_ids[:, None])[:, 0]
    return (done.logprobs - expected).abs()


async def test_tokens_before_and_after_each_swap_are_those_of_their_version(
    tmp_path: Path,
) -> None:
    """Rows in flight are computed again at a swap: a token's logprob is that of a forward with the
    weights that made it."""
    model_of(0).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    shared = shared_memory_directory() / f"asyncdock-test-{time.monotonic_ns()}"
    engine = await asyncio.to_thread(
        lambda: VllmRolloutEngine(
            tmp_path,
            shared=shared,
            dtype=torch.float32,
            max_rows=ROWS,
            max_model_len=512,
            kv_cache_bytes=2**26,
            enforce_eager=True,
            threads=1,
            kv_cache="rebuild",
            arguments={"max_num_batched_tokens": 3072},
        )
    )
    streamed: dict[int, list[Any]] = {}
    finished: dict[int, Completion] = {}
    try:
        assert (
            engine._llm.vllm_config.scheduler_config.max_num_batched_tokens == 3072
        )  # no row is computed in pieces: vLLM on a CPU fails then
        request = GroupRequest(
            0, tuple(range(ROWS)), IDS, SamplingParams(max_tokens=TOKENS, temperature=1.0), 0
        )
        swaps = iter([1, 2, 3])
        async with aclosing(engine.stream([request])) as pieces:  # type: ignore[type-var]
            count = 0
            async for piece in pieces:
                if isinstance(piece, Completion):
                    finished[piece.place] = piece
                    continue
                streamed.setdefault(piece.place, []).append(piece)
                count += 1
                if count % 300 == 0 and (version := next(swaps, 0)):
                    await engine.load_weights(version, dict(model_of(version).named_parameters()))
    finally:
        await engine.close()
    assert len(finished) == ROWS
    versions = set()
    for place, done in finished.items():
        made_by = [version for version, many in done.versions for _ in range(many)]
        versions |= set(made_by)
        assert len(made_by) == len(done.token_ids) == TOKENS
        for version in set(made_by):
            own = torch.tensor([each == version for each in made_by])
            assert gaps(done, version)[own].max() < 2e-3, f"row {place}: {done.versions}"
            other = gaps(done, version + 10)[own]
            assert other.median() > 0.05, "other weights would be found"
        assert all(isinstance(piece, Token) for piece in streamed[place])
        assert [piece.version for piece in streamed[place]] == made_by
    # a swap after the last token changes nothing
    assert {0, 1} <= versions <= {0, 1, 2, 3}
