"""A service whose engine trains on several ranks: processes under it, which end with it."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestration.calls.interface import CallOptions, Failed
from orchestration.calls.service import TORCH_ENTRY, Service, open_service
from orchestration.processes.handles import Process
from stages.calls.interface import ServedBase
from stages.model.load import tiny_model, tiny_tokenizer
from tests.orchestration.calls.services import SECONDS, Client, prompt
from tests.orchestration.calls.test_deaths import all_ended, killed, started_by, undisturbed
from tests.orchestration.calls.test_torch import tiny_client, train

OPTIONS = {"threads": 1, "device": "cpu", "max_rows": 4}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("base") / "tiny"
    tiny_model(0, torch.float32).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


@asynccontextmanager
async def service_of(folder: Path, source: str, **options: Any) -> AsyncIterator[Service]:
    base = ServedBase("tiny", source, 256, source)
    engine_options = {**OPTIONS, **options}
    async with open_service(
        folder, [base], CallOptions(), engine_options=engine_options
    ) as service:
        yield service


async def fail_to_save(client: Client, engine: Process) -> None:
    """The first rank finds no room for files, and that is all."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    limits = resource.prlimit(engine.pid, resource.RLIMIT_FSIZE, (10_000, hard))
    assert "File too large" in await client.failure(await client.save("a"))
    resource.prlimit(engine.pid, resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_rank_that_ends_or_hangs_is_replaced_and_changes_no_bit(
    source: str, tmp_path: Path, number: signal.Signals
) -> None:
    """Nor does another client's model on the same ranks."""
    options = {"tensor_parallel": 2, "collective_seconds": 5}
    before = {process.pid for process in started_by(os.getpid())}
    results = []
    for disturbed in (False, True):
        folder = tmp_path / str(disturbed)
        async with service_of(folder, source, **options) as service:
            ann = await tiny_client(service, "ann")
            digests = await train(ann, 0)
            processes = [p for p in started_by(os.getpid()) if p.pid not in before]
            assert len(processes) == 2
            if disturbed:
                bob = await tiny_client(service, "bob", rank=8)
                await train(bob, 7)
                await fail_to_save(bob, processes[0])
                assert all(process.alive() for process in processes)
                processes[-1].end(number)
            digests += await train(ann, 4)
            results.append(digests)
            if disturbed:
                await all_ended(processes)
                processes = [p for p in started_by(os.getpid()) if p.pid not in before]
                assert len(processes) == 2
        await all_ended(processes)
    assert results[0] == results[1]


async def test_servers_engines_and_ranks_that_are_killed_change_no_bit_and_leave_none_behind(
    tmp_path: Path,
) -> None:
    settings: dict[str, Any] = {
        "entry": TORCH_ENTRY,
        "base": "tiny",
        "engine_options": {**OPTIONS, "data_parallel": 2},
        "calls": 30,
    }
    expected = await undisturbed(tmp_path / "undisturbed", **settings)
    assert await killed(tmp_path / "killed", 3, kills=4, **settings) == expected


async def test_a_number_of_ranks_that_cannot_share_the_model_is_said(
    source: str, tmp_path: Path
) -> None:
    base = ServedBase("tiny", source, 256, source)
    engine_options = {**OPTIONS, "tensor_parallel": 3}
    async with open_service(
        tmp_path, [base], CallOptions(restarts=0), engine_options=engine_options
    ) as service:
        session = await service.open_session("ann", tags=[], metadata={})
        sampler = await service.open_sampler("ann", session, 0, base="tiny", path=None)
        asked = await service.sample("ann", sampler.sampler_id, 0, prompt())
        assert isinstance(await service.result("ann", asked.request_id, SECONDS), Failed)
    assert "= 4, which 3 ranks cannot share evenly" in (tmp_path / "engine-0.log").read_text()
