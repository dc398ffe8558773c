"""Programs outside of a run that take part in it over HTTP, and know nothing else of it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestration.recipe import Recipe
from orchestration.registry import Registry
from orchestration.run import Run
from tests.api.serving import Client, serving
from tests.orchestration.runs import TINY, Watched, executing, recipe
from tests.orchestration.test_run import assert_each_sample_once

OUTSIDE = Path(__file__).parents[1] / "outside"
BINARY = "application/octet-stream"


@dataclass
class Going:
    """A run in a service's index while it goes on, and a client of a server that knows it."""

    client: Client
    watched: Watched
    work: Any
    at: str  # its path

    async def post(self, path: str, body: Any, **options: Any) -> Any:
        response = await self.client.post(f"{self.at}/{path}", json=body, **options)
        assert response.status in (200, 204), await response.text()
        return await response.json() if response.status == 200 else None


@asynccontextmanager
async def going(url: str, tmp_path: Path, of: Recipe) -> AsyncGenerator[Going, None]:
    registry = Registry(url)
    record, _ = await registry.submit(of)
    await registry.close()
    hosted = of.model_copy(update={"pipeline": of.pipeline.model_copy(update={"index": url})})
    run = Run.create(hosted, tmp_path / "run")
    run.id = record.id
    async with serving(url, tmp_path) as client, executing(run) as (watched, work):
        await watched.until(lambda: any(state["state"] == "running" for state in watched.of("state")))
        yield Going(client, watched, work, f"/v1/runs/{record.id}")


@asynccontextmanager
async def program(run: Going, name: str, worker: str) -> AsyncGenerator[asyncio.subprocess.Process, None]:
    """A program of tests/outside in a process of its own that could not import anything of ours."""
    server = str(run.client.make_url("")).rstrip("/")
    environment = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", str(OUTSIDE / name), server, run.at.rpartition("/")[2], worker),
        env=environment,
        cwd=OUTSIDE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def ended(process: asyncio.subprocess.Process) -> None:
    """It has ended by itself, and well."""
    async with asyncio.timeout(60):
        _, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()


async def test_a_whole_grpo_run_whose_rollout_is_another_program(index_url: str, tmp_path: Path) -> None:
    """The program computes the tiny model by itself: that its logprobs are the trainer's shows that weights, tokens and
    versions arrive as they are. It is killed in the middle, and another goes on."""
    base = {**TINY, "external": {"stages": ["rollout"]}}
    of = recipe(base, train__steps=6, pipeline__staleness=0, pipeline__lease_seconds=1.0)
    async with going(index_url, tmp_path, of) as run:
        async with program(run, "llama.py", "first") as first:
            await run.watched.until(lambda: len(run.watched.of("step")) >= 2)
            first.send_signal(signal.SIGKILL)
            await first.wait()
        async with program(run, "llama.py", "second") as second:
            result = await run.work
            await ended(second)
    assert result.state == "finished", result.reason
    assert_each_sample_once(of, run.watched)
    assert max(step["gap_max"] for step in run.watched.of("step")) < 1e-4
    swaps = [sync["version"] for sync in run.watched.of("sync") if sync["worker"] == "external-second"]
    assert swaps, "nobody was told of the versions that it loaded"
