"""A service without its REST server, for tests: an index, agents as processes, and what became of
its runs."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from orchestration.event_feed import EventFeed
from orchestration.history.events_file import METRICS, read_metrics
from orchestration.processes.handles import Process
from orchestration.recipe.schema import Recipe
from orchestration.service.agent import Agent
from orchestration.service.index_server import ServiceIndex
from orchestration.state.paths import shared_prefix
from orchestration.state.registry import ActiveRun, Registry, RunRecord
from pipeline.data.arena import shared_memory_directory
from pipeline.data.events import ENDED, Event
from pipeline.index.client import INDEX_VARIABLE, Index
from tests.forked import ROOT, asyncdock
from tests.orchestration.runs import forks

SECONDS = 120.0


THINNED = ("sync", "ledger", "turn")  # kinds of which a run's file has fewer events than the index


class Service:
    """What runs in ``data``, by an index of its own there or at ``url``."""

    def __init__(self, data: Path, url: str = "") -> None:
        self.data = data
        self.url = url
        self.own = not url
        self.agents: list[subprocess.Popen[bytes]] = []
        self.registry: Registry

    def start_agent(
        self, runs: int = 1, data: Path | None = None, prefix: Sequence[str] = ()
    ) -> subprocess.Popen[bytes]:
        """``asyncdock agent``, as a person starts it, by the command ``prefix``: then with all of
        it in the namespaces that the prefix makes."""
        data = data or self.data
        data.mkdir(exist_ok=True)
        program = [sys.executable, "-P", "-m", "api.cli.main"] if prefix else asyncdock()
        command = [*prefix, *program, "agent", "--data", str(data), "--runs", str(runs)]
        env = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            **({} if self.own else {INDEX_VARIABLE: self.url}),
        }
        with (data / "agent.log").open("ab") as log:
            agent = subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True, env=env
            )
        self.agents.append(agent)
        return agent

    @asynccontextmanager
    async def working(self, runs: int = 1) -> AsyncGenerator[Agent, None]:
        """An agent in this process, which starts sooner."""
        agent = Agent(self.url, self.data, runs, forks=forks())
        stop = asyncio.Event()
        task = asyncio.create_task(agent.run(stop))
        try:
            yield agent
        finally:
            stop.set()
            await task

    async def agent_works(self) -> None:
        """Wait until all started agents have reported that they hold its folder.

        Trying its lock here could take it from one that is starting.
        """
        async with asyncio.timeout(SECONDS):
            while (self.data / "agent.log").read_bytes().count(b"agent works") < len(self.agents):
                await self.registry.wait("", 0.2)  # no event reports it

    def index_process(self) -> Process:
        """The service's own Valkey."""
        process = Process.parse(json.loads((self.data / "service.json").read_text())["process"])
        assert process is not None
        return process

    async def submit(self, recipe: Recipe) -> str:
        return (await self.registry.submit(recipe))[0].id

    async def until(
        self,
        run: str,
        condition: Callable[[RunRecord], bool],
        timeout: float = SECONDS,
        never: Collection[str] = (),
    ) -> RunRecord:
        """Wait until ``condition`` holds for the run.

        Its state must not be one of ``never`` meanwhile.
        """
        marker = ""
        async with asyncio.timeout(timeout):
            while not condition(record := await self.registry.get(run)):
                assert record.state not in never, record
                marker = await self.registry.wait(marker, 1.0)
        return record

    async def ended(self, run: str) -> RunRecord:
        return await self.until(
            run, lambda record: record.state in ENDED and record.ended is not None
        )

    async def steps(self, run: str, count: int) -> None:
        """Wait until so many steps of the run are reported."""
        await self.wait_for_event(run, "step", lambda data: data["step"] >= count)

    async def wait_for_event(
        self, run: str, kind: str, condition: Callable[[dict[str, Any]], bool]
    ) -> Event:
        index = Index(self.url, run)
        try:
            async with asyncio.timeout(SECONDS), EventFeed.reading(index) as feed:
                async for event in feed.follow():
                    if event.kind == kind and condition(event.data):
                        return event
        finally:
            await index.close()
        raise AssertionError("a stream of events does not end")

    async def held(self, run: str) -> tuple[ActiveRun, Process]:
        """The run's lease, and its runner once there is one."""
        marker = ""
        async with asyncio.timeout(SECONDS):
            while True:
                held = await self.registry.find_active(run)
                assert held is not None
                if process := Process.parse(held.process):
                    return held, process
                marker = await self.registry.wait(marker, 0.2)

    async def lapse(self, run: str) -> None:
        """End the lease of the run now, instead of waiting for the seconds that its runner had
        left."""
        held, _ = await self.held(run)
        assert await self.registry.renew(run, held.token, held.process, 0)

    async def events(self, run: str) -> list[Event]:
        index = Index(self.url, run)
        try:
            return await index.past_events(count=100_000)
        finally:
            await index.close()

    def metrics(self, record: RunRecord) -> list[Event]:
        """All that the run's files have, with the detail of the last minutes."""
        return list(read_metrics(Path(record.folder) / METRICS, detail=True))


def told_once(found: list[Event], events: list[Event]) -> None:
    """``found``, of a run's files, has each of its ``events`` once and in order; but of syncs,
    ledgers and turns, which are thinned, it has sums and the newest ones, some with ids of their
    own."""
    ids = {event.id for event in events}
    whole = [(event.id, event.kind) for event in events if event.kind not in THINNED]
    assert [
        (event.id, event.kind) for event in found if event.kind not in THINNED and event.id in ids
    ] == whole
    assert {event.kind for event in found if event.id not in ids} <= {*THINNED, "stage"}
    ledgers = [event.data for event in events if event.kind == "ledger"]
    assert [event.data for event in found if event.kind == "ledger"][-1:] == ledgers[-1:]
    loaded, kept = (
        sum(event.data["bytes"] for event in of if event.kind == "sync") for of in (events, found)
    )
    assert loaded == kept


@asynccontextmanager
async def serving(data: Path, url: str = "") -> AsyncGenerator[Service, None]:
    """A service; at the end all of its runs and processes are ended, and none may have been left by
    them."""
    own = None if url else ServiceIndex(data)
    service = Service(data, url)
    if own is not None:
        service.url = await asyncio.to_thread(own.start)
    service.registry = Registry(service.url)
    try:
        yield service
    finally:
        for agent in service.agents:
            if agent.poll() is None:
                agent.send_signal(signal.SIGTERM)
            await asyncio.to_thread(agent.wait, 30)
        if own is not None:
            await asyncio.to_thread(own.start)
        runs: Sequence[RunRecord] = (await service.registry.list(limit=1000))[0]
        for record in runs:
            held = await service.registry.find_active(record.id)
            if held is not None:
                if process := Process.parse(held.process):
                    process.end()
                    await process.wait()
                await service.registry.end(record.id, held.token, "stopped", "the test is over")
            elif record.state == "created":
                await service.registry.ask(record.id, "stop")
            await service.registry.delete(record.id)
            await service.registry.remove(record.id)
        await service.registry.close()
        if own is not None:
            await asyncio.to_thread(own.stop)
    async with asyncio.timeout(30):
        for record in runs:
            # a runner that has reported its end is about to exit
            for pid in processes_of(record.id):
                await Process.of(pid).wait()
    for left in shared_memory(data):  # of runs that this has ended itself
        shutil.rmtree(left)


def processes_of(run: str) -> list[int]:
    """Processes whose command line names the run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if run.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def shared_memory(data: Path) -> list[Path]:
    """What the runs below ``data`` have in shared memory."""
    if not (data / "runs").is_dir():
        return []
    return list(shared_memory_directory().glob(f"{shared_prefix(data.resolve() / 'runs')}*"))
