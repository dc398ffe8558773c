"""The command ``asyncdock agent`` where several agents share a folder, as replicas of a container
do."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient
from typer.testing import CliRunner

from api.cli.common.exit_codes import BAD_INPUT
from api.cli.main import app
from orchestration.service import agent as agents
from orchestration.state.registry import RunRecord
from pipeline.index.client import INDEX_VARIABLE
from pipeline.locks import Locked, locked
from tests.api.served import ROOT
from tests.api.serving import serving as answering
from tests.forked import asyncdock
from tests.orchestration.runs import MOCK, forks, recipe
from tests.orchestration.services import Service, serving, shared_memory


def agent(service: Service, data: Path) -> subprocess.Popen[bytes]:
    command = [*asyncdock(), "agent", "--data", str(data), "--runs", "1", "--shared"]
    with (data / "agents.log").open("ab") as log:
        env = {**os.environ, "PYTHONPATH": str(ROOT), INDEX_VARIABLE: service.url}
        started = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env=env)
    service.agents.append(started)
    return started


def place(record: RunRecord) -> str:
    """Which of the agents' folders the run is in."""
    return Path(record.folder).parents[1].name


def free(data: Path) -> list[str]:
    """The agents' folders that no living agent holds."""
    found = []
    for folder in sorted(data.glob("agent-*")):
        try:
            with locked(folder / "agent.lock"):
                found.append(folder.name)
        except Locked:
            continue
    return found


async def shown(client: TestClient, run: str) -> None:  # type: ignore[type-arg]
    """The server, which knows nothing of the agents' folders, reads what the run wrote there."""
    samples = await (await client.get(f"/v1/runs/{run}/samples")).json()
    assert samples["samples"]
    logs = await client.get(f"/v1/runs/{run}/logs", params={"worker": "runner"})
    assert logs.status == 200


async def test_agents_that_share_a_folder_have_a_part_each_and_another_one_finds_it_again(
    tmp_path: Path,
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    async with (
        serving(tmp_path) as service,
        answering(service.url, tmp_path / "server", runs=0) as client,
    ):
        first, _ = (agent(service, data) for _ in range(2))
        runs = [await service.submit(recipe(MOCK, train__steps=5000)) for _ in range(2)]
        for run in runs:
            await service.steps(run, 2)
            await shown(client, run)
        records = {
            place(record): record for record in [await service.registry.get(run) for run in runs]
        }
        assert set(records) == {"agent-1", "agent-2"}
        assert records["agent-1"].agent != records["agent-2"].agent
        assert free(data) == []

        # A container that ends takes all of its processes with it; the one that follows has the
        # same name and folder.
        first.kill()
        first.wait()
        [lost] = free(data)
        before = records[lost]
        (await service.held(before.id))[1].end()
        agent(service, data)
        after = await service.until(
            before.id, lambda record: (record.state, record.attempts) == ("running", 2)
        )
        assert (after.agent, after.folder) == (before.agent, before.folder)
        assert free(data) == []
        assert len(list(data.glob("agent-*"))) == 2
        await shown(client, before.id)
        for run in runs:
            await service.registry.ask(run, "stop")
            assert (await service.ended(run)).state == "stopped"
        assert [left for folder in data.glob("agent-*") for left in shared_memory(folder)] == []


async def test_the_runs_of_an_unclaimed_folder_are_taken_over_by_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with fewer containers than before: the run goes on where its folder is, by an agent that
    works in another one."""
    monkeypatch.setattr(agents, "ABANDONED_SECONDS", 0.0)
    data = tmp_path / "data"
    data.mkdir()
    async with serving(tmp_path) as service:
        gone = agent(service, data)
        run = await service.submit(recipe(MOCK, train__steps=5000))
        await service.steps(run, 2)
        before = await service.registry.get(run)
        gone.kill()
        gone.wait()
        (await service.held(run))[1].end()
        await service.lapse(run)
        other = agents.Agent(service.url, data / "agent-2", 1, forks=forks())
        stop = asyncio.Event()
        working = asyncio.create_task(other.run(stop))
        after = await service.until(
            run, lambda record: (record.state, record.attempts) == ("running", 2)
        )
        assert (after.agent, after.folder) == (other.name, before.folder)
        assert other.name != before.agent
        await service.registry.ask(run, "stop")
        assert (await service.ended(run)).state == "stopped"
        stop.set()
        await working


def test_agents_share_a_folder_only_with_an_index_that_they_share_too(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        app, ["agent", "--data", str(tmp_path), "--shared"], env={INDEX_VARIABLE: ""}
    )
    assert done.exit_code == BAD_INPUT
    assert "--index" in done.stderr
    assert list(tmp_path.iterdir()) == []
