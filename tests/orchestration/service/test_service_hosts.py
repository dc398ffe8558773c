"""A run of a service with a rollout worker on a host, and its takeover by another runner."""

from __future__ import annotations

import asyncio
from pathlib import Path

from orchestration.run.hosts import Host
from pipeline.index.client import Index
from pipeline.index.embedded import Address, EmbeddedIndex
from tests.orchestration.runs import MOCK, recipe
from tests.orchestration.services import serving


async def ready(url: str, run: str, worker: str, times: int) -> None:
    """Wait until ``worker`` was ready so many times."""
    found = 0
    async with asyncio.timeout(120), Index(url, run) as index:
        async for event in index.follow():
            found += event.kind == "worker" and event.data["change"] == "ready" and event.data["worker"] == worker
            if found == times:
                return


async def test_hosts_serve_a_run_of_a_service_and_the_runner_that_takes_it_over(tmp_path: Path) -> None:
    keys = {"rollout__workers": 2, "launch__remote_rollouts": 1, "launch__launcher": "process"}
    keys |= {"pipeline__serve": "127.0.0.1", "sync__transport": "collective", "sync__serve": "127.0.0.2"}
    of = recipe(MOCK, **keys, pipeline__index="redis://the.service", train__steps=400)
    with EmbeddedIndex(tmp_path / "index", address=Address.parse("127.0.0.1")) as server:
        assert server.address is not None
        async with serving(tmp_path / "service", server.address.url) as service, service.working():
            run = await service.submit(of)
            held, runner = await service.held(run)
            host = Host(service.url, run, tmp_path / "host", serve="127.0.0.1")
            async with Index(service.url, run) as index:
                async for event in index.follow():
                    if event.kind == "state" and event.data["state"] == "starting":
                        break
            work = asyncio.create_task(host.run(asyncio.Event()))
            await ready(service.url, run, "rollout-1", 1)
            await service.steps(run, 3)
            runner.end()
            await runner.wait()
            await ready(service.url, run, "rollout-1", 2)
            made = [event for event in await service.events(run) if event.kind == "step"]
            await service.steps(run, len(made) + 3)
            await service.registry.ask(run, "stop")
            record = await service.ended(run)
            await asyncio.wait_for(work, 60)
            steps = [event.data for event in await service.events(run) if event.kind == "step"]
    assert record.state == "stopped", record.reason
    assert record.attempts == 2
    assert [step["step"] for step in steps] == list(range(len(steps)))
    groups = sorted(group for step in steps for group in step["groups"])
    assert groups == list(range(len(groups))), "each group was trained once"
    assert held.record.id == run
