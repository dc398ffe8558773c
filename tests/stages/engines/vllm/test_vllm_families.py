"""Models that vLLM has otherwise than the trainer: experts, which are one tensor in the trainer and
are loaded one by one, and longrope, whose long factors vLLM takes for rows of any length, by its
max_model_len."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.engines.families import CONTEXT, write
from benchmarks.engines.models import (
    Checkpoint,
    batch_of,
    generated,
    loaded,
    one_step,
    plain_rows,
    vocabulary_of,
)
from pipeline.data.arena import shared_memory_directory
from stages.engines.torch.train import TorchTrainEngine
from stages.engines.vllm.rollout import VllmReceivingEngine
from stages.weights.transport.network import Credentials, WeightSender
from stages.weights.transport.store import WeightStore

pytestmark = pytest.mark.timeout(600)
SECRET = b"a run's secret, for the tests"


@pytest.mark.asyncio
@pytest.mark.parametrize("family", ["Qwen3-MoE", "Phi-3 longrope"])
async def test_weights_of_each_step_reach_vllm_by_each_transport(
    family: str, tmp_path: Path
) -> None:
    """After each optimizer step the logprobs of what vLLM generates are the trainer's."""
    folder = write(family, tmp_path / "model", torch.float32)
    checkpoint = Checkpoint(folder, torch.float32, tmp_path)
    trainer = TorchTrainEngine(
        loaded(folder, torch.float32),
        learning_rate=1e-2,
        total_steps=9,
        device="cpu",
        context=CONTEXT,
    )
    shared = shared_memory_directory() / f"asyncdock-test-{tmp_path.parent.name}-{tmp_path.name}"
    shared.mkdir()
    Credentials(SECRET, shared).write(shared)
    sender = WeightSender(WeightStore(tmp_path / "sent"), host="127.0.0.1", secret=SECRET)
    options = {
        "max_rows": 8,
        "max_model_len": CONTEXT,
        "kv_cache_bytes": 2**26,
        "enforce_eager": True,
        "threads": 2,
    }
    engine = VllmReceivingEngine(checkpoint.folder, shared=shared, dtype=torch.float32, **options)
    try:
        for version in range(3):
            if version:
                one_step(trainer, checkpoint.batch)
            if version == 1:
                await engine.load_weights(version, dict(trainer.weights()))
            elif version == 2:
                await engine.load_weights(
                    version, await engine.receive(sender.publish(version, trainer.weights()))
                )
            rows, logprobs = await generated(engine, vocabulary_of(checkpoint.plain), seed=version)
            expected = torch.cat(list(trainer.logprobs(batch_of(rows, logprobs)).unbind()))
            assert float((logprobs - expected).abs().max()) < 1e-4
            first = plain_rows(checkpoint.plain, rows)
            assert (float((logprobs - first).abs().max()) > 0.1) == (version > 0), (
                "each step has changed the policy"
            )
    finally:
        await engine.close()
        sender.close()
