"""What a called model has learned is what its sampler samples with."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from stages.calls.interface import AdamOptions, Datum, ModelOptions, SampleRequest, SamplingOptions
from stages.calls.model import TorchCalledModel
from stages.calls.sampler import EngineSampler
from stages.engines.torch.decoding.llama_forward import can_pack_in
from stages.engines.torch.rollout import TorchRolloutEngine
from stages.model.load import load_model
from tests.stages.calls.data import sampled, tiny_base

PROMPT = np.array([5, 9, 14])
SECONDS = 60.0


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 0.05)], ids=str
)
async def test_a_sampler_with_the_head_s_adapter_is_the_model_merged(
    dtype: torch.dtype, tolerance: float, tied: bool, packed: bool, tmp_path: Path
) -> None:
    """And the model in training, beside another client's without one."""
    if packed and not can_pack_in(dtype):
        pytest.skip(f"this CPU does not pack weights of {dtype}")
    base = tiny_base(tied=tied, dtype=dtype)
    options = [ModelOptions(rank=4, seed=number, head=number == 0) for number in range(2)]
    models = [TorchCalledModel(base, each) for each in options]
    for model in models:
        for seed in range(3):
            model.forward_backward(sampled(seed=seed), "ppo", {})
            model.optimizer_step(AdamOptions(learning_rate=1e-2))
    engine = TorchRolloutEngine(
        tiny_base(tied=tied, dtype=dtype).model,
        base.tokenizer,
        max_rows=8,
        threads=1,
        device="cpu",
        packed=packed,
    )
    sampler = EngineSampler(engine, [])
    request = SampleRequest(PROMPT, SamplingOptions(max_tokens=9), 2, prompt_logprobs=True)
    try:
        async with asyncio.timeout(SECONDS):
            for name, each, model in zip("ab", options, models, strict=True):
                await sampler.put(name, each, model.adapter(), model.step)
            outputs = await asyncio.gather(*(sampler.sample(name, request, 1) for name in "ab"))
    finally:
        await sampler.close()
    for number, (model, output) in enumerate(zip(models, outputs, strict=True)):
        model.save(tmp_path / str(number), optimizer=False)
        source = str(tmp_path / str(number) / "model")
        merged = load_model(source, dtype=dtype, seed=0)[0].float()
        for sequence in output.sequences:
            ids = np.concatenate([PROMPT, sequence.tokens])
            assert output.prompt_logprobs is not None
            logprobs = np.concatenate([output.prompt_logprobs[1:], sequence.logprobs])
            weights = np.ones(len(ids) - 1, np.float32)
            datum = Datum(ids[:-1], {"target_tokens": ids[1:], "weights": weights})
            (in_training,) = model.forward([datum], "cross_entropy", {}).logprobs
            assert np.abs(logprobs - in_training).max() < tolerance
            with torch.no_grad():
                logits = merged(input_ids=torch.from_numpy(ids[:-1])[None]).logits[0]
            expected = logits.log_softmax(-1).gather(1, torch.from_numpy(ids[1:, None]))[:, 0]
            assert np.abs(logprobs - expected.numpy()).max() < tolerance
