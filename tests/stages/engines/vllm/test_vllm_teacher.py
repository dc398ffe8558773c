"""A teacher behind vLLM's own OpenAI-compatible server: its logprobs of given responses, and its
tokenizer."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from pipeline.index.embedded import die_with_parent
from stages.engines.torch.train import TorchTrainEngine
from stages.inference.teacher import TeacherOptions, TeacherRefused, TeacherServer
from stages.model.load import tiny_tokenizer
from tests.batches import tiny_rows
from tests.ports import free_port

pytestmark = pytest.mark.timeout(600)
START_SECONDS = 300.0


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(model),
        "--port",
        str(port),
    ]
    command += [
        "--host",
        "127.0.0.1",
        "--dtype",
        "float32",
        "--max-model-len",
        "64",
        "--block-size",
        "32",
    ]
    command += [
        "--enforce-eager",
        "--api-key",
        "secret-1234",
        "--kv-cache-memory-bytes",
        str(64 << 20),
    ]
    parent = os.getpid()
    server = subprocess.Popen(command, preexec_fn=lambda: die_with_parent(parent))
    deadline = time.monotonic() + START_SECONDS
    try:
        while True:
            assert server.poll() is None, "vLLM's server has ended"
            assert time.monotonic() < deadline, (
                f"vLLM's server has not started within {START_SECONDS:.0f} s"
            )
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(1.0)  # a starting server has nothing yet to wait on
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        server.wait(60)


async def test_its_logprobs_are_those_of_the_reference_stage(url: str, model: Path) -> None:
    batch, rows = tiny_rows()
    server = TeacherServer(TeacherOptions(url, key="secret-1234"), tiny_tokenizer())
    try:
        await server.open()
        found = await server.logprobs(rows)
    finally:
        await server.close()
    plain = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    engine = TorchTrainEngine(plain, learning_rate=1e-3, total_steps=1, device="cpu", threads=1)
    for got, expected in zip(found, engine.logprobs(batch).unbind(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


async def test_a_wrong_key_is_refused_without_being_shown(url: str) -> None:
    server = TeacherServer(TeacherOptions(url, key="wrong-key-9", retries=0), tiny_tokenizer())
    try:
        with pytest.raises(
            TeacherRefused,
            match=r"wants another key; "
            r"teacher\.api_key_variable",
        ) as refused:
            await server.open()
        assert "wrong-key-9" not in str(refused.value)
    finally:
        await server.close()
