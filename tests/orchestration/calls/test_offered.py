"""Checkpoints of runs, from which clients of a server go on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from orchestration.calls.interface import NotThere
from orchestration.checkpoints.offered import offer_checkpoint
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from stages.calls.interface import CallRefused, Datum
from stages.model.load import load_model
from tests.orchestration.calls.services import Client
from tests.orchestration.calls.test_torch import tiny_client, tiny_service
from tests.orchestration.runs import TINY, complete, recipe

STEPS: dict[str, Any] = {"train__steps": 2, "checkpoint__every": 2}
LORA: dict[str, Any] = {"model__lora": {"rank": 4, "alpha": 12.0}, "train__learning_rate": 1e-2}
ATTENTION = {
    "model__lora": {"rank": 4, "alpha": 12.0, "targets": ["q_proj", "k_proj", "v_proj", "o_proj"]}
}


async def run(folder: Path, **changes: Any) -> Path:
    """Return the newest checkpoint of a run of two steps in ``folder``."""
    of = recipe(TINY, **STEPS, **changes)
    _, result = await complete(Execution(RunFolder.create(of, folder)))
    assert result.state == "finished", result.reason
    assert result.checkpoint is not None
    return result.checkpoint.path


def logprobs(checkpoint: Path) -> list[float]:
    """Of tokens 2, 3, 4 after 1, by what a run has trained."""
    model, _ = load_model(str(checkpoint / "model"), dtype=torch.float32, seed=0)
    with torch.no_grad():
        scores = model(input_ids=torch.tensor([[1, 2, 3]])).logits[0].log_softmax(-1)
    return [float(scores[at, token]) for at, token in enumerate([2, 3, 4])]


@pytest.mark.parametrize(
    "changes", [LORA, LORA | ATTENTION, {}], ids=["lora", "attention", "whole"]
)
async def test_a_client_goes_on_from_a_run(changes: dict[str, Any], tmp_path: Path) -> None:
    """Also where the server was there before; another owner does not see it."""
    async with tiny_service(tmp_path / "calls") as service:
        client = await tiny_client(service, "ann")
        checkpoint = await run(tmp_path / "my run", **changes)
        path = await offer_checkpoint(tmp_path / "my run", tmp_path / "calls", "ann", "tiny")
        assert path == f"tinker://my-run/weights/{checkpoint.name}"
        with pytest.raises(NotThere):
            await service.checkpoint("bob", path)
        created = await service.create_model_from(
            "ann", client.session_id, 1, path, optimizer=False, metadata={}
        )
        model = Client(service, client.session_id, 1, "ann")
        await model.done(created)
        inputs = {"target_tokens": np.array([2, 3, 4]), "weights": np.ones(3, np.float32)}
        scored = Datum(np.array([1, 2, 3]), inputs)
        output = await model.done(await model.train(scored))
        assert np.allclose(output.logprobs[0], logprobs(checkpoint), atol=2e-5)
        sampler = await service.open_sampler("ann", client.session_id, 2, base=None, path=path)
        (sequence,) = (await client.sampled(sampler.sampler_id, 0, max_tokens=2)).sequences
        assert sequence.versions == ((2, len(sequence.tokens)),)


async def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        CallRefused, match=r'run = ".*": has no checkpoint; give the folder of a run'
    ):
        await offer_checkpoint(tmp_path, tmp_path / "calls", "ann", "tiny")


async def test_the_command_prints_the_path(tmp_path: Path) -> None:
    checkpoint = await run(tmp_path / "run")
    data = tmp_path / "data"

    def asyncdock(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "asyncdock_command", *words, "--data", str(data)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == code, done.stderr
        return done

    token = json.loads(asyncdock("token", "create", "ann", "--scope", "run", "--json").stdout)
    offered = ("checkpoint", "offer", str(checkpoint), "--base", "tiny", "--token")
    path = asyncdock(*offered, "ann").stdout.strip()
    assert path == f"tinker://run/weights/{checkpoint.name}"
    (document,) = (data / "calls" / "checkpoints").glob("run/weights/*/0/call.json")
    assert json.loads(document.read_text())["owner"] == token["id"]
    assert "--token: 'bob' has no token in" in asyncdock(*offered, "bob", code=2).stderr
