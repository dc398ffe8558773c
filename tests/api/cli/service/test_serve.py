"""The whole service as processes: started by its command, driven over REST, and killed where it
hurts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from typer.testing import CliRunner

from api.cli import main as cli
from api.client import SyncClient, Unreachable
from orchestration.service import index_server as service_index
from orchestration.service.index_server import FILE
from tests import forked
from tests.api.served import ROOT, SECONDS, Served, environment
from tests.orchestration.runs import MOCK

RECIPE = {
    **MOCK,
    "name": "served",
    "launch": {"launcher": "process", "max_restarts": 3, "stop_timeout": 20.0},
}
LONG = {"train.steps": 100_000}
# what waits for its turn needs no workers of its own
SHORT = {"train.steps": 2, "launch.launcher": "inline"}


def asyncdock(*arguments: str | Path) -> tuple[int, str, str]:
    """A command in this process: its exit code, and what it prints."""
    result = CliRunner().invoke(cli.app, list(map(str, arguments)))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


async def process(*arguments: str | Path) -> tuple[int, str, str]:
    """The same in a process of its own."""
    command = [*forked.asyncdock(), *map(str, arguments)]
    done = await asyncio.to_thread(
        subprocess.run,
        command,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=SECONDS,
        env=environment(),
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for all tests that leave it alone."""
    with serving(tmp_path_factory.mktemp("served")) as made:
        yield made


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[Served]:
    """A server of the test's own, to be killed."""
    with serving(tmp_path) as made:
        yield made


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Served]:
    made = Served(folder / "service")
    try:
        made.start()
        yield made
    finally:
        with contextlib.suppress(Unreachable):  # a test may have ended it; it may not have started
            stop_runs(made)
        made.end()
    assert stays_behind(made.data) == []


def stop_runs(server: Served) -> None:
    with SyncClient(server.url, patience=1.0) as client:
        for run in list(client.runs()):
            if run.ended is None:
                client.stop(run.id)
                client.wait_until_ended(run.id, SECONDS)


def processes_of(data: Path) -> dict[psutil.Process, str]:
    """Processes that have to do with the service in ``data``, and their command lines."""
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            line = " ".join(process.cmdline())
            if str(data) in line or str(data) in process.environ().get("ASYNCDOCK_INDEX", ""):
                found[process] = line
    return found


def left_behind(data: Path) -> list[str]:
    return list(processes_of(data).values())


def stays_behind(data: Path) -> list[str]:
    """Those that do not end by themselves: a run has ended before its process has."""
    psutil.wait_procs(list(processes_of(data)), SECONDS)
    return left_behind(data)


def names(folder: Path) -> set[str]:
    """What lies in ``folder``; nothing once it is gone."""
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


Call = Callable[..., Any]


@contextlib.asynccontextmanager
async def calling(server: Served) -> AsyncIterator[Call]:
    async with aiohttp.ClientSession(server.url, headers=server.headers) as session:

        async def call(method: str, path: str, status: int = 200, **more: Any) -> Any:
            async with session.request(method, path, **more) as response:
                assert response.status == status, await response.text()
                return (
                    await response.json()
                    if response.content_type == "application/json"
                    else await response.text()
                )

        yield call


async def until(call: Call, run: str, true: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """Look at the run until something is true of it."""
    deadline = time.monotonic() + SECONDS
    while True:
        view = await call("GET", f"/v1/runs/{run}")
        if true(view):
            return view
        assert time.monotonic() < deadline, view
        # the REST API of a single run has nothing to wait on but its stream
        await asyncio.sleep(0.1)


async def until_rollouts(call: Call, run: str, there: bool) -> None:
    """Look at the pipeline until rollout-1 works, or has left."""
    deadline = time.monotonic() + SECONDS
    while True:
        stage = next(
            s
            for s in (await call("GET", f"/v1/runs/{run}/stages"))["stages"]
            if s["name"] == "rollout"
        )
        state = {worker["worker"]: worker["state"] for worker in stage["workers"]}.get("rollout-1")
        if state == ("ready" if there else "left"):
            return
        assert time.monotonic() < deadline, stage
        await asyncio.sleep(0.1)


async def test_a_run_is_driven_from_its_submission_to_its_deletion(server: Served) -> None:
    async with calling(server) as call:
        run = (await call("POST", "/v1/runs", 201, json={"recipe": RECIPE, "overrides": LONG}))[
            "id"
        ]
        second = await call("POST", "/v1/runs", 201, json={"recipe": RECIPE, "overrides": SHORT})
        await until(call, run, lambda view: view["steps_done"] >= 2)
        queued = await call("GET", f"/v1/runs/{second['id']}")
        # one at a time; the other one says so
        assert (queued["state"], queued["position"]) == ("created", 1)

        deadline = time.monotonic() + SECONDS
        while not (stages := await call("GET", f"/v1/runs/{run}/stages"))["stages"][0]["workers"]:
            assert time.monotonic() < deadline  # a worker reports once a second
            await asyncio.sleep(0.1)
        assert [stage["name"] for stage in stages["stages"]] == [
            "rollout",
            "reward",
            "advantage",
            "update",
        ]
        rollout = stages["stages"][0]["workers"][0]
        assert (rollout["worker"], rollout["process"], rollout["state"]) == (
            "rollout-0",
            "rollout-0",
            "ready",
        )
        assert psutil.pid_exists(rollout["pid"])
        shares = sum(rollout[share] for share in ("busy", "waiting_input", "waiting_room", "other"))
        assert shares == pytest.approx(rollout["wall"], rel=0.02)
        ledger = stages["ledger"]
        settled = ledger["trained"] + ledger["filtered"] + ledger["remade"] + ledger["in_flight"]
        assert ledger["generated"] == settled

        assert (await call("POST", f"/v1/runs/{run}/pause", 202))["state"] == "paused"
        assert (await call("POST", f"/v1/runs/{run}/pause", 202))["state"] == "paused"
        paused = (await call("GET", f"/v1/runs/{run}/waiting"))["chain"]
        assert [(wait["who"], wait["on"]) for wait in paused] == [("the run", "`resume`")]
        assert (await call("POST", f"/v1/runs/{run}/resume", 202))["state"] == "running"
        before = {
            step["version"]
            for step in (await call("GET", f"/v1/runs/{run}/checkpoints"))["checkpoints"]
        }
        await call("POST", f"/v1/runs/{run}/checkpoint", 202)
        deadline = time.monotonic() + SECONDS
        while {
            s["version"] for s in (await call("GET", f"/v1/runs/{run}/checkpoints"))["checkpoints"]
        } <= before:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)
        assert '"ready"' in await call("GET", f"/v1/runs/{run}/logs?worker=rollout-0")

        for rollouts, there in ((2, True), (1, False)):
            await call("POST", f"/v1/runs/{run}/scale", 202, json={"rollout": rollouts})
            await until_rollouts(call, run, there)
        refused = json.loads(
            await call("POST", f"/v1/runs/{run}/scale", 422, json={"rollout": 5000})
        )
        assert (refused["field"], refused["value"]) == ("rollout.workers", 5000)

        assert (await call("POST", f"/v1/runs/{run}/stop", 202))["state"] in ("stopping", "stopped")
        assert (await until(call, run, lambda view: view["ended"]))["state"] == "stopped"
        finished = await until(call, second["id"], lambda view: view["ended"])
        assert (finished["state"], finished["steps_done"], finished["reason"]) == (
            "finished",
            2,
            "",
        )
        folder = Path(finished["folder"])
        assert names(folder) >= {"recipe.json", "metrics.jsonl", "checkpoints", "logs"}
        await call("DELETE", f"/v1/runs/{second['id']}", 204)
        await call("GET", f"/v1/runs/{second['id']}", 404)
        deadline = time.monotonic() + SECONDS
        while names(folder):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)


async def test_a_killed_server_changes_no_run_and_the_next_one_shows_it_all(mortal: Served) -> None:
    async with calling(mortal) as call:
        run = (await call("POST", "/v1/runs", 201, json={"recipe": RECIPE, "overrides": LONG}))[
            "id"
        ]
        waiting = (
            await call("POST", "/v1/runs", 201, json={"recipe": RECIPE, "overrides": SHORT})
        )["id"]
        before = await until(call, run, lambda view: view["steps_done"] >= 2)
    await asyncio.to_thread(mortal.kill)
    await asyncio.to_thread(mortal.start)
    async with calling(mortal) as call:
        after = await call("GET", f"/v1/runs/{run}")
        assert (after["state"], after["attempts"], after["reason"]) == (
            "running",
            before["attempts"],
            "",
        )
        assert after["steps_done"] >= before["steps_done"]
        assert {view["id"] for view in (await call("GET", "/v1/runs"))["runs"]} == {run, waiting}
        await until(call, run, lambda view: view["steps_done"] > after["steps_done"])  # it goes on
        await call("POST", f"/v1/runs/{run}/stop", 202)
        assert (await until(call, run, lambda view: view["ended"]))["state"] == "stopped"
        assert (await until(call, waiting, lambda view: view["ended"]))["state"] == "finished"


async def test_ctrl_c_closes_the_server_and_not_its_runs(mortal: Served) -> None:
    async with calling(mortal) as call:
        run = (await call("POST", "/v1/runs", 201, json={"recipe": RECIPE, "overrides": LONG}))[
            "id"
        ]
        before = await until(call, run, lambda view: view["steps_done"] >= 1)
        stream = asyncio.create_task(call("GET", f"/v1/runs/{run}/metrics/stream"))
        await until(call, run, lambda view: view["steps_done"] > before["steps_done"])
        assert not stream.done()
        assert await asyncio.to_thread(mortal.stop) == 0
        last_event = (await stream).rstrip().rpartition("\n\n")[2]
    assert "event: dropped" in last_event  # the last event of the stream, with the reason
    assert "the server goes down" in last_event
    assert left_behind(mortal.data)  # its runner, workers and index
    await asyncio.to_thread(mortal.start)
    async with calling(mortal) as call:
        after = await until(call, run, lambda view: view["steps_done"] > before["steps_done"])
        assert (after["state"], after["attempts"]) == ("running", 1)
        await call("POST", f"/v1/runs/{run}/stop", 202)
        await until(call, run, lambda view: view["ended"])
    assert await asyncio.to_thread(mortal.stop) == 0
    # with no run there is nothing to keep up
    assert await asyncio.to_thread(stays_behind, mortal.data) == []
    await asyncio.to_thread(mortal.start)
    async with calling(mortal) as call:
        assert (await call("GET", f"/v1/runs/{run}"))["state"] == "stopped"


def test_a_folder_others_could_read_and_a_lock_that_is_held_are_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is closed to others first; then the server says what it waits for, and for how
    long it has."""
    monkeypatch.setattr(service_index, "LOCK_SECONDS", 0.3)
    (tmp_path / "data").mkdir(mode=0o755)
    holding = ["flock", str(tmp_path / "data" / "service.lock"), "sh", "-c", "echo held; read line"]
    with subprocess.Popen(holding, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        code, out, err = asyncdock("serve", "--data", tmp_path / "data", "--listen", "127.0.0.1:0")
        assert other.stdin is not None
        other.stdin.close()
    assert (code, out) == (2, "")
    assert f"process {other.pid} (flock " in err
    assert "holds this lock and did not free it for 0.3 s" in err
    assert (tmp_path / "data").stat().st_mode & 0o777 == 0o700
    (tmp_path / "home" / "letters").mkdir(parents=True)
    (tmp_path / "home").chmod(0o755)
    code, out, err = asyncdock("serve", "--data", tmp_path / "home", "--listen", "127.0.0.1:0")
    assert (code, out) == (2, "")
    assert "has mode 755, so others can read it, and holds files that are not a service's" in err


async def test_two_servers_on_one_folder_and_a_port_that_is_taken_are_distinguished(
    server: Served, tmp_path: Path
) -> None:
    assert server.process is not None
    code, out, err = await process("serve", "--data", server.data, "--listen", "127.0.0.1:0")
    assert (code, out) == (2, "")
    assert f"is served by another server (process {server.process.pid})" in err
    assert "Traceback" not in err
    other = tmp_path / "other"
    code, out, err = await process(
        "serve", "--data", other, "--listen", f"127.0.0.1:{server.port}", "--runs", "0"
    )
    assert (code, out) == (2, "")
    assert f"127.0.0.1:{server.port} is taken" in err
    assert "Traceback" not in err
    assert left_behind(other) == []


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--listen", "127.0.0.1:http"], "http"),
        (["--listen", "127.0.0.1:99999"], "port"),
        (["--root", "/there/is/no/such/folder"], "--root"),
        (["--index", "redis://u:opensesame@127.0.0.1:9", "--listen", "127.0.0.1:0"], "index"),
        (["--max-arena", "much"], "size"),
        (["--data", "/proc/nothing"], "data: /proc/nothing cannot be used"),
    ],
)
def test_invalid_settings_are_reported(options: list[str], expected: str, tmp_path: Path) -> None:
    code, out, err = asyncdock("serve", "--data", tmp_path / "service", *options)
    assert (code, out) == (2, "")
    assert expected in err
    assert "opensesame" not in err
    assert "Traceback" not in err


async def test_tokens_are_made_listed_and_revoked_with_and_without_a_server(tmp_path: Path) -> None:
    data = tmp_path / "service"
    code, out, _ = await process(
        "token", "create", "ann", "--scope", "run", "--data", data, "--json"
    )
    ann = json.loads(out)
    assert (code, ann["name"], ann["scope"]) == (0, "ann", "run")
    assert left_behind(data) == []
    server = Served(data, "--runs", "0")
    await asyncio.to_thread(server.start)
    assert oct((data / FILE).stat().st_mode & 0o777) == "0o600"
    try:
        async with calling(server) as call:
            await call("GET", "/v1/runs", 401, headers={"Authorization": ""})
            await call("GET", "/v1/runs", headers={"Authorization": f"Bearer {ann['token']}"})
            _, listed, _ = await asyncio.to_thread(asyncdock, "token", "list", "--data", data)
            assert ann["id"] in listed
            assert ann["token"][-43:] not in listed
            assert (
                await asyncio.to_thread(asyncdock, "token", "revoke", ann["id"], "--data", data)
            )[0] == 0
            await call("GET", "/v1/runs", 401, headers={"Authorization": f"Bearer {ann['token']}"})
            code, _, err = await asyncio.to_thread(
                asyncdock, "token", "revoke", ann["id"], "--data", data
            )
            assert (code, ann["id"] in err) == (2, True)
    finally:
        assert await asyncio.to_thread(server.stop) == 0
    assert ann["token"] not in server.log.read_text()
    assert left_behind(data) == []


def test_a_token_command_without_an_index_says_so(tmp_path: Path) -> None:
    code, out, err = asyncdock("token", "list", "--index", f"unix://{tmp_path}/nowhere.sock")
    assert (code, out) == (3, "")
    assert "no answer" in err


@pytest.mark.parametrize(
    "arguments", [["create", "x", "--scope", "root"], ["create", "", "--scope", "run"], ["list"]]
)
def test_a_token_command_that_makes_no_sense_is_refused(
    arguments: list[str], tmp_path: Path
) -> None:
    where = [] if arguments == ["list"] else ["--data", str(tmp_path)]
    code, out, err = asyncdock("token", *arguments, *where)
    assert (code, out) == (2, "")
    assert "Traceback" not in err
    assert left_behind(tmp_path) == []
