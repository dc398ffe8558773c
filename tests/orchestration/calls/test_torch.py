"""The service with models of torch: clients side by side, samplers, checkpoints."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np

from orchestration.calls.interface import CallOptions
from orchestration.calls.service import Service, open_service
from stages.calls.interface import Datum, SampleOutput, ServedBase
from tests.orchestration.calls.driver import data, digest
from tests.orchestration.calls.services import SECONDS, Client, prompt

TINY = ServedBase("tiny", "tiny", 256, "tiny")


@asynccontextmanager
async def tiny_service(folder: Path, *, loaded_models: int = 16) -> AsyncIterator[Service]:
    engine_options = {"threads": 1, "device": "cpu", "max_rows": 4}
    options = CallOptions(loaded_models=loaded_models)
    async with open_service(folder, [TINY], options, engine_options=engine_options) as service:
        yield service


async def tiny_client(service: Service, owner: str, *, rank: int = 4, seed: int = 0) -> Client:
    return await Client.create(service, owner=owner, base="tiny", rank=rank, seed=seed)


async def train(client: Client, first: int) -> list[str]:
    """Return what says whether two trainings are the same."""
    digests = list[str]()
    for number in range(first, first + 4):
        output = await client.done(await client.train(*data(number)))
        metrics = await client.done(await client.step(learning_rate=1e-2))
        digests += [digest(output), digest(metrics)]
    return digests


async def test_clients_side_by_side_get_the_bits_that_each_gets_alone(tmp_path: Path) -> None:
    """Also where one of them trains all weights, and only one fits at a time."""
    ranks = {"ann": 4, "bob": 8, "cid": 0}
    alone = []
    async with tiny_service(tmp_path / "alone") as service:
        for owner, rank in ranks.items():
            alone.append(await train(await tiny_client(service, owner, rank=rank), rank))
    async with tiny_service(tmp_path / "together", loaded_models=2) as service:
        clients = [await tiny_client(service, owner, rank=rank) for owner, rank in ranks.items()]
        together = await asyncio.gather(*map(train, clients, ranks.values()))
    assert together == alone


async def test_samples_say_which_steps_made_their_tokens_and_training_how_old_they_are(
    tmp_path: Path,
) -> None:
    async with tiny_service(tmp_path) as service:
        client = await tiny_client(service, "ann")
        sampler = (await client.done(await client.snapshot(0, inflight=True)))[
            "sampling_session_id"
        ]
        long = await service.sample("ann", sampler, 0, prompt(max_tokens=200, stop=()))
        for step in range(3):
            await client.train(*data(step))
            await client.step(learning_rate=1e-3)
            await client.done(await client.snapshot(step + 1, inflight=True))
        output = await client.done(long)
        assert isinstance(output, SampleOutput)
        (sequence,) = output.sequences
        assert sum(tokens for _, tokens in sequence.versions) == len(sequence.tokens) == 200
        versions = [version for version, _ in sequence.versions]
        assert versions == sorted(versions)
        tokens = np.concatenate([[0, 1], sequence.tokens]).astype(np.int64)
        span = (long.sequence_ids[0], 0, 200)
        inputs: dict[str, np.ndarray] = {
            "target_tokens": tokens[1:],
            "weights": np.ones(201, np.float32),
        }
        datum = Datum(tokens[:-1], inputs, (span,))
        passed = await client.done(await client.train(datum))
        assert passed.metrics["staleness:max"] == 3 - versions[0]
        newest = await client.sampled(sampler, 1, max_tokens=4)
        assert newest.sequences[0].versions == ((3, len(newest.sequences[0].tokens)),)


async def test_a_checkpoint_goes_on_to_the_same_bits_and_is_sampled_with(tmp_path: Path) -> None:
    async with tiny_service(tmp_path) as service:
        client = await tiny_client(service, "ann")
        await train(client, 0)
        path = (await client.done(await client.save("a")))["path"]
        created = await service.create_model_from(
            "ann", client.session_id, 1, path, optimizer=True, metadata={}
        )
        twin = Client(service, client.session_id, 1, "ann")
        await twin.done(created)
        assert await train(client, 10) == await train(twin, 10)
        samplers = [
            (await service.open_sampler("ann", client.session_id, 7, base=None, path=path)),
            (await service.open_sampler("ann", client.session_id, 8, base="tiny", path=None)),
        ]
        outputs = [
            await client.sampled(sampler.sampler_id, 0, max_tokens=8, temperature=0.0)
            for sampler in samplers
        ]
        versions = [output.sequences[0].versions[0][0] for output in outputs]
        assert versions == [4, 0]
        async with asyncio.timeout(SECONDS):
            await service.unload_model("ann", client.model_id)
        again = await client.sampled(samplers[0].sampler_id, 1, max_tokens=8, temperature=0.0)
        assert digest(again.sequences[0].tokens) == digest(outputs[0].sequences[0].tokens)
