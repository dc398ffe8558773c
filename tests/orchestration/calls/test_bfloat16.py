"""A base in bfloat16: what is trained of it is float32, and samples follow it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from orchestration.calls.interface import CallOptions
from orchestration.calls.service import open_service
from stages.calls.interface import Datum, SampleRequest, SamplingOptions, ServedBase
from tests.orchestration.calls.services import Client

TOKENS = np.array([5, 9, 14, 7, 21, 30, 12])
STEPS = 40
DATUM = Datum(
    TOKENS[:-1], {"target_tokens": TOKENS[1:], "weights": np.ones(len(TOKENS) - 1, np.float32)}
)


async def test_a_base_in_bfloat16_learns_and_is_sampled(tmp_path: Path) -> None:
    """An adapter, with one on the head, and a whole model: greedy samples repeat what they learn."""
    base = ServedBase("tiny", "tiny", 256, "x")
    engine_options = {"dtype": "bfloat16", "device": "cpu", "threads": 1, "max_rows": 4}
    async with open_service(
        tmp_path, [base], CallOptions(), engine_options=engine_options
    ) as service:
        session_id = await service.open_session("ann", tags=[], metadata={})
        for number, rank in enumerate((8, 0)):
            client = await Client.create(
                service, session_id=session_id, number=number, base="tiny", rank=rank, head=True
            )
            losses = []
            for _ in range(STEPS):
                passed = await client.train(DATUM)
                stepped = await client.step(learning_rate=1e-2)
                losses.append((await client.done(passed)).metrics["loss:sum"])
                assert (await client.done(stepped))["metrics"]["grad_norm"] > 0
            assert losses[-1] < 0.1 * losses[0]
            await client.done(await client.snapshot(number))
            sampler_id = f"{session_id}:sample:{number}"
            options = SamplingOptions(max_tokens=5, temperature=0.0, stop=())
            asked = await service.sample("ann", sampler_id, 0, SampleRequest(TOKENS[:2], options))
            output = await client.done(asked)
            assert output.sequences[0].tokens.tolist() == TOKENS[2:].tolist()
            assert output.sequences[0].versions == ((STEPS, 5),)
            await client.done(await client.save("last"))
    saved = [each for each in files(tmp_path) if each.parent.name == "train"]
    assert len(saved) >= 4
    for path in saved:
        assert {value.dtype for value in load_file(path).values()} == {torch.float32}


def files(folder: Path) -> list[Path]:
    return [*folder.rglob("*.safetensors")]
