"""`asyncdock deploy` on a Ray cluster of the test's own: the `openai` client, tokens, a swap, and a
pinned version."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import ray
from ray import serve
from ray.cluster_utils import Cluster

from api.server.access.tokens import Tokens
from orchestration.state.documents import RUN_PATHS, RUN_RECIPE
from orchestration.state.paths import RunPaths
from pipeline.index.client import Index, RunConfig
from pipeline.index.embedded import EmbeddedIndex
from tests.api.policy.test_openai import PROMPT, Trainer, at
from tests.api.served import ROOT
from tests.orchestration.runs import TINY, recipe
from tests.ports import free_port


@pytest.fixture
def cluster() -> Iterator[str]:
    """The address of a cluster of one node, which ends with the test."""
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
    yield made.address
    made.shutdown()


@pytest.mark.timeout(600)
async def test_a_run_is_deployed_on_ray_serve(cluster: str, tmp_path: Path) -> None:
    port = free_port()
    with EmbeddedIndex(tmp_path / "index") as server:
        index = Index(server.url, "deployed")
        paths = RunPaths(tmp_path, tmp_path / "shm", None)
        made = recipe(TINY)
        trainer = Trainer(index, paths, made)
        tokens = Tokens(server.url)
        await index.init(RunConfig(()), {})
        await RUN_RECIPE.put(index, made)
        await RUN_PATHS.put(index, paths)
        await index.transition(["", "created"], "running")
        texts = {scope: (await tokens.create(scope, scope))[1] for scope in ("read", "run")}
        await tokens.close()
        first = await trainer.publish()

        async def deploy(*options: str) -> str:
            return await asyncio.to_thread(
                asyncdock, "deploy", "deployed", "--address", cluster, *options
            )

        options = ["--index", server.url, "--listen", f"127.0.0.1:{port}"]
        options += ["--max", "2", "--target", "1", "--delay", "0.5", "--cpus", "0.5"]
        assert f"http://127.0.0.1:{port}/v1" in await deploy(*options)
        url = f"http://127.0.0.1:{port}/v1"
        async with openai.AsyncOpenAI(
            base_url=url, api_key=texts["run"], timeout=300, max_retries=0
        ) as client:
            await at(client, "deployed", first)
            assert [model.id async for model in client.models.list()] == ["deployed"]
            second = await trainer.publish()
            await at(client, "deployed", second)
            for version in (first, second):
                asked = {
                    "model": f"deployed@{version}",
                    "prompt": PROMPT,
                    "temperature": 0,
                    "max_tokens": 8,
                }
                (choice,) = (await client.completions.create(**asked)).choices  # type: ignore[call-overload]
                assert (choice.versions, choice.text) == (
                    [[version, 8]],
                    await trainer.expected(version, PROMPT, 8),
                )
                stream = await client.completions.create(**asked, stream=True)  # type: ignore[call-overload]
                pieces = [chunk.choices[0].text async for chunk in stream]
                assert ("".join(pieces), len(pieces) > 3) == (choice.text, True)
            with pytest.raises(openai.NotFoundError, match="is not served here"):
                await client.completions.create(model="other", prompt=PROMPT)
            with pytest.raises(openai.BadRequestError, match="max_tokens"):
                await client.completions.create(
                    model="deployed", prompt=PROMPT, max_tokens=600, stream=True
                )
            with pytest.raises(openai.PermissionDeniedError, match="scope run"):
                await client.with_options(api_key=texts["read"]).completions.create(
                    model="deployed", prompt=PROMPT
                )
            with pytest.raises(openai.AuthenticationError, match="A token is needed"):
                await client.with_options(api_key="none").completions.create(
                    model="deployed", prompt=PROMPT
                )
            await scaled_up_by_load(client, cluster)
        await deploy("--remove")
        await index.close()


async def scaled_up_by_load(client: openai.AsyncOpenAI, cluster: str) -> None:
    """More requests than ``--target`` are under way until Serve has a second replica; none of them
    fails."""
    ray.init(cluster, log_to_driver=False)

    def running() -> int:
        (deployment,) = serve.status().applications["deployed"].deployments.values()
        return deployment.replica_states.get("RUNNING", 0)

    async def ask() -> None:
        while not enough.is_set():
            await client.completions.create(
                model="deployed", prompt=PROMPT, max_tokens=400, temperature=1.5
            )
            if await asyncio.to_thread(running) > 1:
                enough.set()

    enough = asyncio.Event()
    try:
        assert await asyncio.to_thread(running) == 1
        async with asyncio.timeout(300), asyncio.TaskGroup() as tasks:
            for _ in range(6):
                tasks.create_task(ask())
    finally:
        ray.shutdown()


def asyncdock(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "api.cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=500,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, json.dumps([done.stdout, done.stderr[-4000:]])
    return done.stdout
