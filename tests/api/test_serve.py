"""The whole service as processes: started by its command, driven over REST, and killed where it hurts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from orchestration.service_index import FILE, ServiceIndex
from tests.orchestration.runs import MOCK

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 120.0
RECIPE = {**MOCK, "name": "served", "launch": {"launcher": "process", "max_restarts": 3, "stop_timeout": 20.0}}
LONG = {"train.steps": 100_000}


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-P", "-m", "api.cli", *map(str, arguments)]


def asyncdock(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, cwd=ROOT, timeout=SECONDS, env=environment()
    )


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}


class Server:
    """``asyncdock serve`` on a free port, over the folder ``data``."""

    def __init__(self, data: Path, *options: str | Path) -> None:
        self.data, self.options = data, options
        self.process: asyncio.subprocess.Process | None = None
        self.url = ""

    async def start(self) -> None:
        arguments = command("serve", "--data", self.data, "--listen", "127.0.0.1:0", *self.options)
        log = (self.data.parent / "server.log").open("ab")
        self.process = await asyncio.create_subprocess_exec(
            *arguments, stdout=subprocess.PIPE, stderr=log, cwd=ROOT, env=environment()
        )
        assert self.process.stdout is not None
        async with asyncio.timeout(SECONDS):
            line = (await self.process.stdout.readline()).decode()
        assert line.startswith("AsyncDock serves http://127.0.0.1:"), (self.data.parent / "server.log").read_text()
        self.url = line.split()[2]

    async def end(self, number: int = signal.SIGINT) -> int:
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)
        async with asyncio.timeout(SECONDS):
            return await self.process.wait()


@pytest.fixture
async def server(tmp_path: Path) -> AsyncGenerator[Server, None]:
    made = Server(tmp_path / "service")
    try:
        await made.start()
        yield made
    finally:
        with contextlib.suppress(aiohttp.ClientError, ValueError):  # a test may have ended it; it may not have started
            await stop_runs(made)
        if made.process is not None and made.process.returncode is None:
            await made.end()
        if (made.data / FILE).exists():
            await asyncio.to_thread(ServiceIndex(made.data).stop)
    assert left_behind(made.data) == []


async def stop_runs(server: Server) -> None:
    async with calling(server) as call:
        for run in (await call("GET", "/v1/runs"))["runs"]:
            if run["ended"] is None:
                await call("POST", f"/v1/runs/{run['id']}/stop", 202)
                await until(call, run["id"], lambda run: run["ended"])


def left_behind(data: Path) -> list[str]:
    """Processes that have to do with the service in ``data``."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            line = " ".join(process.cmdline())
            if str(data) in line or str(data) in process.environ().get("ASYNCDOCK_INDEX", ""):
                found.append(line)
    return found


def names(folder: Path) -> set[str]:
    """What lies in ``folder``; nothing once it is gone."""
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


Call = Callable[..., Any]


@contextlib.asynccontextmanager
async def calling(server: Server) -> AsyncIterator[Call]:
    async with aiohttp.ClientSession(server.url) as session:

        async def call(method: str, path: str, status: int = 200, **more: Any) -> Any:
            async with session.request(method, path, **more) as response:
                assert response.status == status, await response.text()
                return await response.json() if response.content_type == "application/json" else await response.text()

        yield call


async def until(call: Call, run: str, true: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """Look at the run until something is true of it."""
    deadline = time.monotonic() + SECONDS
    while True:
        view = await call("GET", f"/v1/runs/{run}")
        if true(view):
            return view
        assert time.monotonic() < deadline, view
        await asyncio.sleep(0.1)  # the REST API of a single run has nothing to wait on but its stream


async def test_a_run_is_driven_from_its_submission_to_its_deletion(server: Server) -> None:
    async with calling(server) as call:
        run = (await call("POST", "/v1/runs", 201, json={"recipe": RECIPE, "overrides": LONG}))["id"]
        second = await call("POST", "/v1/runs", 201, json={"recipe": RECIPE, "overrides": {"train.steps": 2}})
        await until(call, run, lambda view: view["steps_done"] >= 2)
        queued = await call("GET", f"/v1/runs/{second['id']}")
        assert (queued["state"], queued["position"]) == ("created", 1)  # one at a time; the other one says so

        deadline = time.monotonic() + SECONDS
        while not (stages := await call("GET", f"/v1/runs/{run}/stages"))["stages"][0]["workers"]:
            assert time.monotonic() < deadline  # a worker tells of itself once a second
            await asyncio.sleep(0.1)
        assert [stage["name"] for stage in stages["stages"]] == ["rollout", "reward", "advantage", "update"]
        rollout = stages["stages"][0]["workers"][0]
        assert (rollout["worker"], rollout["process"], rollout["state"]) == ("rollout-0", "rollout-0", "ready")
        assert psutil.pid_exists(rollout["pid"])
        shares = sum(rollout[share] for share in ("busy", "waiting_input", "waiting_room", "other"))
        assert shares == pytest.approx(rollout["wall"], rel=0.02)
        ledger = stages["ledger"]
        settled = ledger["trained"] + ledger["filtered"] + ledger["remade"] + ledger["in_flight"]
        assert ledger["generated"] == settled

        assert (await call("POST", f"/v1/runs/{run}/pause", 202))["state"] == "paused"
        assert (await call("POST", f"/v1/runs/{run}/pause", 202))["state"] == "paused"
        assert (await call("POST", f"/v1/runs/{run}/resume", 202))["state"] == "running"
        before = {step["version"] for step in (await call("GET", f"/v1/runs/{run}/checkpoints"))["checkpoints"]}
        await call("POST", f"/v1/runs/{run}/checkpoint", 202)
        deadline = time.monotonic() + SECONDS
        while {s["version"] for s in (await call("GET", f"/v1/runs/{run}/checkpoints"))["checkpoints"]} <= before:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)
        assert '"ready"' in await call("GET", f"/v1/runs/{run}/logs?worker=rollout-0")

        assert (await call("POST", f"/v1/runs/{run}/stop", 202))["state"] in ("stopping", "stopped")
        assert (await until(call, run, lambda view: view["ended"]))["state"] == "stopped"
        finished = await until(call, second["id"], lambda view: view["ended"])
        assert (finished["state"], finished["steps_done"], finished["reason"]) == ("finished", 2, "")
        folder = Path(finished["folder"])
        assert names(folder) >= {"recipe.json", "metrics.jsonl", "checkpoints", "logs"}
        await call("DELETE", f"/v1/runs/{second['id']}", 204)
        await call("GET", f"/v1/runs/{second['id']}", 404)
        deadline = time.monotonic() + SECONDS
        while names(folder):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)


async def test_a_killed_server_changes_no_run_and_the_next_one_shows_it_all(server: Server) -> None:
    async with calling(server) as call:
        run = (await call("POST", "/v1/runs", 201, json={"recipe": RECIPE, "overrides": LONG}))["id"]
        waiting = (await call("POST", "/v1/runs", 201, json={"recipe": RECIPE, "overrides": {"train.steps": 2}}))["id"]
        before = await until(call, run, lambda view: view["steps_done"] >= 2)
    assert await server.end(signal.SIGKILL) == -signal.SIGKILL
    await server.start()
    async with calling(server) as call:
        after = await call("GET", f"/v1/runs/{run}")
        assert (after["state"], after["attempts"], after["reason"]) == ("running", before["attempts"], "")
        assert after["steps_done"] >= before["steps_done"]
        assert {view["id"] for view in (await call("GET", "/v1/runs"))["runs"]} == {run, waiting}
        await until(call, run, lambda view: view["steps_done"] > after["steps_done"])  # it goes on
        await call("POST", f"/v1/runs/{run}/stop", 202)
        assert (await until(call, run, lambda view: view["ended"]))["state"] == "stopped"
        assert (await until(call, waiting, lambda view: view["ended"]))["state"] == "finished"


async def test_ctrl_c_closes_the_server_and_not_its_runs(server: Server) -> None:
    async with calling(server) as call:
        run = (await call("POST", "/v1/runs", 201, json={"recipe": RECIPE, "overrides": LONG}))["id"]
        before = await until(call, run, lambda view: view["steps_done"] >= 1)
        stream = asyncio.create_task(call("GET", f"/v1/runs/{run}/metrics/stream"))
        await until(call, run, lambda view: view["steps_done"] > before["steps_done"])
        assert not stream.done()
        assert await server.end() == 0
        told = (await stream).rstrip().rpartition("\n\n")[2]
    assert "event: dropped" in told  # the stream's last word, with the reason
    assert "the server goes down" in told
    assert left_behind(server.data)  # its runner, workers and index
    await server.start()
    async with calling(server) as call:
        after = await until(call, run, lambda view: view["steps_done"] > before["steps_done"])
        assert (after["state"], after["attempts"]) == ("running", 1)
        await call("POST", f"/v1/runs/{run}/stop", 202)
        await until(call, run, lambda view: view["ended"])
    assert await server.end() == 0
    assert left_behind(server.data) == []  # with no run there is nothing to keep up
    await server.start()
    async with calling(server) as call:
        assert (await call("GET", f"/v1/runs/{run}"))["state"] == "stopped"


async def test_two_servers_on_one_folder_and_a_port_that_is_taken_are_told_apart(
    server: Server, tmp_path: Path
) -> None:
    second = await asyncio.to_thread(asyncdock, "serve", "--data", server.data, "--listen", "127.0.0.1:0")
    assert (second.returncode, second.stdout) == (2, "")
    assert f"is served by another server (process {server.process.pid if server.process else 0})" in second.stderr
    port = server.url.rpartition(":")[2]
    other = tmp_path / "other"
    taken = await asyncio.to_thread(asyncdock, "serve", "--data", other, "--listen", f"127.0.0.1:{port}", "--runs", "0")
    assert (taken.returncode, taken.stdout) == (2, "")
    assert f"127.0.0.1:{port} is taken" in taken.stderr
    assert "Traceback" not in second.stderr + taken.stderr
    assert left_behind(other) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--listen", "127.0.0.1:http"], "http"),
        (["--listen", "127.0.0.1:99999"], "port"),
        (["--root", "/there/is/no/such/folder"], "--root"),
        (["--index", "redis://u:opensesame@127.0.0.1:9", "--listen", "127.0.0.1:0"], "index"),
        (["--max-arena", "much"], "size"),
    ],
)
def test_what_cannot_be_served_is_said(options: list[str], said: str, tmp_path: Path) -> None:
    result = asyncdock("serve", "--data", tmp_path / "service", *options)
    assert (result.returncode, result.stdout) == (2, "")
    assert said in result.stderr
    assert "opensesame" not in result.stderr
    assert "Traceback" not in result.stderr


async def test_tokens_are_made_listed_and_revoked_with_and_without_a_server(tmp_path: Path) -> None:
    data = tmp_path / "service"
    made = await asyncio.to_thread(asyncdock, "token", "create", "ann", "--scope", "run", "--data", data, "--json")
    ann = json.loads(made.stdout)
    assert (made.returncode, ann["name"], ann["scope"]) == (0, "ann", "run")
    assert left_behind(data) == []
    server = Server(data, "--require-token", "--runs", "0")
    await server.start()
    assert oct((data / FILE).stat().st_mode & 0o777) == "0o600"
    try:
        async with calling(server) as call:
            await call("GET", "/v1/runs", 401)
            await call("GET", "/v1/runs", headers={"Authorization": f"Bearer {ann['token']}"})
            listed = await asyncio.to_thread(asyncdock, "token", "list", "--data", data)
            assert ann["id"] in listed.stdout
            assert ann["token"][-43:] not in listed.stdout
            revoked = await asyncio.to_thread(asyncdock, "token", "revoke", ann["id"], "--data", data)
            assert revoked.returncode == 0
            await call("GET", "/v1/runs", 401, headers={"Authorization": f"Bearer {ann['token']}"})
            again = await asyncio.to_thread(asyncdock, "token", "revoke", ann["id"], "--data", data)
            assert (again.returncode, ann["id"] in again.stderr) == (2, True)
    finally:
        assert await server.end() == 0
    assert ann["token"] not in (tmp_path / "server.log").read_text()
    assert left_behind(data) == []


def test_a_token_command_without_an_index_says_so(tmp_path: Path) -> None:
    result = asyncdock("token", "list", "--index", f"unix://{tmp_path}/nowhere.sock")
    assert (result.returncode, result.stdout) == (3, "")
    assert "no answer" in result.stderr


@pytest.mark.parametrize("arguments", [["create", "x", "--scope", "root"], ["create", "", "--scope", "run"], ["list"]])
def test_a_token_command_that_makes_no_sense_is_refused(arguments: list[str], tmp_path: Path) -> None:
    where = [] if arguments == ["list"] else ["--data", str(tmp_path)]
    result = asyncdock("token", *arguments, *where)
    assert (result.returncode, result.stdout) == (2, "")
    assert "Traceback" not in result.stderr
