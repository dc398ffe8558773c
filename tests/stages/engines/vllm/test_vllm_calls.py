"""Training calls of clients with vLLM as their sampler: what was trained is what samples."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestration.calls.bases import describe_bases
from orchestration.calls.interface import CallOptions, Done, Failed
from orchestration.calls.service import Service, open_service
from pipeline.data.arena import shared_memory_directory
from stages.calls.interface import (
    Datum,
    ModelOptions,
    SampleOutput,
    SampleRequest,
    SamplingOptions,
)
from tests.orchestration.calls.driver import data
from tests.orchestration.calls.services import Client

pytest.importorskip("peft", reason="adapters are trained with it")
pytestmark = pytest.mark.timeout(900)
STARTING = 300.0  # seconds in which vLLM has started
PROMPT = (np.arange(20) * 7 + 3) % 46
RECIPE = """
name = "small"
[model]
source = "{model}"
dtype = "{dtype}"
[train]
threads = 1
[rollout]
engine = "vllm"
threads = 1
max_rows = 8
[rollout.vllm]
max_model_len = 512
{kv_cache}
enforce_eager = true
max_loras = {room}
max_lora_rank = 8
"""


@asynccontextmanager
async def serving(folder: Path, model: Path, **keys: Any) -> AsyncIterator[Service]:
    keys = {"dtype": "float32", "room": 2, "kv_cache": 'kv_cache_bytes = "64MiB"', **keys}
    recipe = folder / "small.toml"
    recipe.write_text(RECIPE.format(model=model, **keys))
    bases = await asyncio.to_thread(describe_bases, [str(recipe)], folder, {"device": "cpu"})
    async with open_service(folder / "calls", bases, CallOptions()) as service:
        yield service
    assert not [*shared_memory_directory().glob(f"asyncdock-{os.getpid()}-*")]


async def outcome(service: Service, request_id: str) -> Done | Failed:
    result = await service.result("ann", request_id, STARTING)
    assert result is not None
    return result


async def create(service: Service, number: int, **options: Any) -> Client:
    session = await service.open_session("ann", tags=[], metadata={})
    created = await service.create_model(
        "ann", session, number, "small", ModelOptions(**options), {}
    )
    result = await outcome(service, created.request_id)
    assert isinstance(result, Done), result
    return Client(service, session, number, "ann")


async def train(client: Client, steps: int) -> None:
    for step in range(steps):
        await client.train(*data(step))
        await client.done(await client.step(learning_rate=3e-3))


async def sampled(
    client: Client, sampler: str, seq: int, options: SamplingOptions, **fields: Any
) -> SampleOutput:
    asked = await client.service.sample(
        "ann", sampler, seq, SampleRequest(PROMPT, options, **fields)
    )
    result = await outcome(client.service, asked.request_id)
    assert isinstance(result, Done), result
    assert isinstance(result.value, SampleOutput)
    return result.value


async def assert_is_the_trained(client: Client, output: SampleOutput, step: int) -> None:
    """The logprobs of prompt and responses are those that a pass of the model in training has."""
    assert output.prompt_logprobs is not None
    for sequence in output.sequences:
        assert sequence.versions == ((step, len(sequence.tokens)),)
        tokens = np.concatenate([PROMPT, sequence.tokens]).astype(np.int64)
        ones = np.ones(len(tokens) - 1, np.float32)
        datum = Datum(tokens[:-1], {"target_tokens": tokens[1:], "weights": ones})
        passed = await client.service.train(
            "ann", client.model_id, client._next(None), [datum], "cross_entropy", {}, backward=False
        )
        logprobs = (await client.done(passed)).logprobs[0]
        made = np.concatenate([output.prompt_logprobs[1:], sequence.logprobs])
        assert np.abs(made - logprobs).max() < 2e-3


async def test_what_clients_have_trained_is_what_samples(model: Path, tmp_path: Path) -> None:
    """Adapters of three ranks and places, one more than vLLM has room for; and a vLLM that dies."""
    shapes = ({"rank": 4, "head": True}, {"rank": 8}, {"rank": 2, "mlp": False, "head": True})
    options = SamplingOptions(max_tokens=12, temperature=0.7, stop=())
    async with serving(tmp_path, model) as service:
        clients = [await create(service, number, **shape) for number, shape in enumerate(shapes)]
        samplers = []
        for number, client in enumerate(clients):
            await train(client, number + 3)
            snapshot = await client.done(await client.snapshot(0))
            samplers.append(snapshot["sampling_session_id"])
        asked = {"count": 2, "prompt_logprobs": True, "top_k_prompt": 100, "top_k_sampled": 3}
        for round_number in range(2):
            outputs = await asyncio.gather(
                *(
                    sampled(client, sampler, round_number, options, **asked)
                    for client, sampler in zip(clients, samplers, strict=True)
                )
            )
            for number, (client, output) in enumerate(zip(clients, outputs, strict=True)):
                await assert_is_the_trained(client, output, number + 3)
                assert [len(top) for top in output.sequences[0].top] == [3] * 12
                assert output.prompt_top[0] == ()
                assert sum(np.exp([value for _, value in output.prompt_top[1]])) > 0.999
            os.kill(vllm_core(service), signal.SIGKILL)

        refused = await service.create_model(
            "ann", clients[0].session_id, 9, "small", ModelOptions(16), {}
        )
        result = await outcome(service, refused.request_id)
        assert isinstance(result, Failed)
        assert "rank = 16: is more than the 8 that this server samples with" in result.message


def vllm_core(service: Service) -> int:
    """Return the process of vLLM's engine core below the engine of the service."""
    process = service._served["small"].engine.process
    assert process is not None
    tasks = Path(f"/proc/{process.pid}/task").glob("*/children")
    children = [int(child) for task in tasks for child in task.read_text().split()]
    (core,) = [
        child for child in children if "EngineCore" in Path(f"/proc/{child}/cmdline").read_text()
    ]
    return core


async def test_samples_follow_later_weights_and_stops(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB: the recipe says nothing of it
    async with serving(tmp_path, model, room=1, dtype="bfloat16", kv_cache="") as service:
        client = await create(service, 0, rank=4, head=True)
        options = ModelOptions(0)
        whole = await service.create_model("ann", client.session_id, 9, "small", options, {})
        result = await outcome(service, whole.request_id)
        assert isinstance(result, Failed)
        assert "rank = 0: trains all weights" in result.message
        assert "its recipe has no rollout.vllm.kv_cache_bytes" in result.message
        sampler = (await client.done(await client.snapshot(0, inflight=True)))[
            "sampling_session_id"
        ]
        long = asyncio.create_task(
            sampled(client, sampler, 0, SamplingOptions(max_tokens=450, stop=()))
        )
        for number in range(1, 4):
            await train(client, 1)
            await client.done(await client.snapshot(number, inflight=True))
        (sequence,) = (await long).sequences
        steps = [step for step, _ in sequence.versions]
        assert steps == sorted(steps)
        assert len(steps) > 1
        assert sum(tokens for _, tokens in sequence.versions) == len(sequence.tokens) == 450
        same = [
            await sampled(client, sampler, seq, SamplingOptions(max_tokens=20, seed=5, stop=()))
            for seq in (1, 2)
        ]
        tokens = [each.sequences[0].tokens.tolist() for each in same]
        assert tokens[0] == tokens[1]
        stop = (int(tokens[0][7]),)
        cut = await sampled(client, sampler, 3, SamplingOptions(max_tokens=20, seed=5, stop=stop))
        assert cut.sequences[0].stopped
        assert cut.sequences[0].tokens.tolist() == tokens[0][: tokens[0].index(stop[0]) + 1]


async def test_whole_models_are_sampled_where_memory_is_set_aside(
    model: Path, tmp_path: Path
) -> None:
    async with serving(tmp_path, model, room=1) as service:
        client = await create(service, 0, rank=0)
        await train(client, 2)
        sampler = (await client.done(await client.snapshot(0)))["sampling_session_id"]
        options = SamplingOptions(max_tokens=12, stop=())
        output = await sampled(client, sampler, 0, options, prompt_logprobs=True)
        await assert_is_the_trained(client, output, 2)
