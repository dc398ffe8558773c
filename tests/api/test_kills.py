"""kill -9 of each process of a service, one after the other, in the middle of one run, driven and
watched over REST."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from api.client import Client
from orchestration.processes.handles import Process
from orchestration.recipe.loading.load import parse_recipe
from orchestration.service.index_server import FILE
from tests.api.cli.service.test_serve import serving
from tests.api.served import SECONDS, Served
from tests.orchestration.runs import MOCK
from tests.orchestration.service.test_agent import assert_whole

# steps that the run may make between two kills: it has prompts for no more, so it cannot end before
# all kills
PART = 8
STEPS = 5 * PART
GROUPS = MOCK["train"]["groups_per_step"]
RECIPE: dict[str, Any] = {
    **MOCK,
    "name": "killed",
    "prompts": {"source": "external", "max_prompt_tokens": 16},
    "train": {**MOCK["train"], "steps": STEPS, "mock": {"time_scale": 0.1}},
    "checkpoint": {"every": 4},
    "launch": {"launcher": "process", "max_restarts": 3, "stop_timeout": 20.0},
}
# What may follow on what, for a watcher that may be late. It ends well, so nothing else may ever be
# shown.
FOLLOWS = {
    "created": {"starting", "running"},
    "starting": {"running", "stopping", "finished"},
    "running": {"starting", "stopping", "finished"},
    "stopping": {"starting", "finished"},
}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path) as served:
        yield served


class Watcher:
    """Asks for the run again and again, as a page does.

    Refused connections and 503 are no statement about the run.
    """

    def __init__(self, server: Served, run: str) -> None:
        self.path = f"{server.url}/v1/runs/{run}"
        self.seen = list[dict[str, Any]]()
        self.unanswered = 0
        self.headers = server.headers
        self.parts = 0
        self.changed = asyncio.Condition()

    async def watch(self) -> None:
        async with aiohttp.ClientSession(headers=self.headers) as session:
            while not self.seen or self.seen[-1]["ended"] is None:
                try:
                    async with session.get(self.path) as response:
                        view = await response.json() if response.status == 200 else None
                        assert view or response.status == 503, await response.text()
                except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError):
                    view = None
                async with self.changed:
                    if view:
                        self.seen.append(view)
                    else:
                        self.unanswered += 1
                    self.changed.notify_all()
                await asyncio.sleep(0.02)

    async def give_prompts(self) -> None:
        """Put the prompts of PART further steps, each once, however often the request has to be
        repeated."""
        first = self.parts * PART * GROUPS
        body = {"prompts": [{"prompt": "ab=", "answer": "aaaa"}] * (PART * GROUPS), "first": first}
        self.parts += 1
        async with asyncio.timeout(SECONDS), aiohttp.ClientSession(headers=self.headers) as session:
            while True:
                with contextlib.suppress(aiohttp.ClientConnectionError, aiohttp.ClientPayloadError):
                    async with session.post(self.path + "/prompts", json=body) as response:
                        if response.status == 200:
                            return
                        assert response.status == 503, await response.text()
                await asyncio.sleep(0.1)

    async def until(self, true: Callable[[dict[str, Any]], bool]) -> None:
        async with asyncio.timeout(SECONDS), self.changed:
            await self.changed.wait_for(
                lambda: bool(self.seen) and (true(self.seen[-1]) or self.seen[-1]["ended"])
            )
        assert self.seen[-1]["ended"] is None, "all of it was to happen in the middle of the run"


async def test_after_any_kill_the_run_ends_well_and_the_api_stays_correct(server: Served) -> None:
    async with Client(server.url) as client, asyncio.TaskGroup() as tasks:
        run = (await client.submit(RECIPE)).id
        watcher = Watcher(server, run)
        tasks.create_task(watcher.watch())

        async def goes_on() -> None:
            """Two more steps than there were."""
            done = watcher.seen[-1]["steps_done"]
            await watcher.give_prompts()
            await watcher.until(
                lambda view: view["state"] == "running" and view["steps_done"] >= done + 2
            )

        await watcher.until(lambda view: view["state"] == "running")
        await goes_on()
        os.kill(titled(f"asyncdock worker rollout-0 of {run}"), signal.SIGKILL)
        await goes_on()
        os.kill(titled(f"asyncdock runner of {run}"), signal.SIGKILL)
        await watcher.until(lambda view: view["attempts"] == 2)
        await goes_on()
        index = Process.parse(json.loads((server.data / FILE).read_text())["process"])
        assert index is not None
        os.kill(index.pid, signal.SIGKILL)
        await goes_on()
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
        await watcher.give_prompts()

    views = watcher.seen
    for before, after in pairwise(views):
        assert after["state"] == before["state"] or after["state"] in FOLLOWS[before["state"]], (
            before,
            after,
        )
        assert after["steps_done"] >= before["steps_done"], (before, after)
        assert after["attempts"] in (before["attempts"], before["attempts"] + 1), (before, after)
    assert all((view["state"] == "finished") >= (view["ended"] is not None) for view in views)
    assert all(view["steps_done"] == STEPS for view in views if view["state"] == "finished")
    assert (views[-1]["state"], views[-1]["reason"], views[-1]["attempts"]) == ("finished", "", 2)
    assert watcher.unanswered, "neither server nor index was gone for as long as a request takes"
    async with Client(server.url) as client:
        events = [event async for event in client.events(run)]
    assert_whole(parse_recipe(RECIPE), events)


def titled(title: str) -> int:
    """The process of that title."""
    [pid] = [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if title in (process.info["cmdline"] or ())
    ]
    return pid
