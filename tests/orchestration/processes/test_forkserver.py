"""Fork servers: what their children find, and who ends with whom."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from orchestration.processes import forkserver
from orchestration.processes.forkserver import (
    Child,
    Connection,
    ForkServer,
    ForkServerDied,
    Launch,
    StandingForkServer,
)
from orchestration.processes.handles import Process
from orchestration.processes.starter import Starter
from tests.orchestration.runs import forks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="fork servers need Linux")

REPORT = """
import gc, json, os, signal, sys, threading
json.dump({
    "cwd": os.getcwd(), "answer": os.environ.get("ANSWER"), "path": os.environ.get("PATH"), "pid": os.getpid(),
    "leads": os.getsid(0) == os.getpid(), "torch": "torch" in sys.modules, "threads": threading.active_count(),
    "collects": gc.isenabled(),
    "files": [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if int(name) > 2],
    "chld": signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL, "draw": float(__import__("numpy").random.rand()),
}, sys.stdout)
"""
SLEEP = "import time; print('up', flush=True); time.sleep(600)"


def does(code: str, folder: Path, name: str = "log", **more: Any) -> Launch:
    return Launch(
        "builtins:exec",
        code,
        {"ANSWER": "42"},
        str(folder),
        str(folder / name),
        "a child of the tests",
        **more,
    )


@pytest.fixture
async def connection() -> AsyncIterator[Connection]:
    server = forks()
    assert server is not None
    with contextlib.closing(server.connect()) as made:
        yield made


async def ended(process: Process | psutil.Process) -> None:
    async with asyncio.timeout(20):
        await Process.of(process.pid).wait()


async def up(*logs: Path) -> None:
    async with asyncio.timeout(60):
        while not all(log.is_file() and "up" in log.read_text() for log in logs):  # noqa: ASYNC110
            await asyncio.sleep(0.02)  # a file has nothing else to wait on


async def test_a_launch_names_modules_that_the_server_imports(
    connection: Connection, tmp_path: Path
) -> None:
    """For that process and later ones; where one cannot be imported, its process says so."""
    code = "import sys; print('tabnanny' in sys.modules, 'up')"
    launches = [("one", []), ("two", ["tabnanny", "there.is.none"]), ("three", [])]
    for name, imports in launches:
        child = await connection.launch(does(code, tmp_path, name, imports=imports))
        assert await child.wait() == 0
    assert [(tmp_path / name).read_text().split()[0] for name, _ in launches] == [
        "False",
        "True",
        "True",
    ]


async def test_a_child_finds_what_a_new_process_would(
    connection: Connection, tmp_path: Path
) -> None:
    found = []
    for name in ("first", "second"):
        (tmp_path / name).write_text("before:")
        child = await connection.launch(does(REPORT, tmp_path, name))
        assert await child.wait() == 0
        before, _, report = (tmp_path / name).read_text().partition(":")
        assert before == "before"
        found.append(json.loads(report) | {"launched": child.pid})
    for child in found:
        assert (child["cwd"], child["answer"], child["path"]) == (str(tmp_path), "42", None)
        assert child["pid"] == child["launched"] != os.getpid()
        assert child["leads"]
        assert child["torch"]
        assert child["chld"]
        assert child["collects"]
        assert child["threads"] == 1
        assert not [file for file in child["files"] if "socket" in file or "pidfd" in file]
    assert found[0]["draw"] != found[1]["draw"]


SIZES = """
import psutil, torch
x, weight, sizes = torch.zeros(1000, 64), torch.zeros(64, 64), []
for size in range(1, 640):
    torch.ops.mkldnn._linear_pointwise(x[:size], weight, None, "none", [], "")
    if size in (40, 639):
        sizes.append(psutil.Process().memory_info().rss // 2**20)
print("grown", sizes[1] - sizes[0])
"""


async def test_a_child_does_not_grow_by_each_size_of_matrix(
    connection: Connection, tmp_path: Path
) -> None:
    child = await connection.launch(does(SIZES, tmp_path))
    assert await child.wait() == 0
    _, _, grown = (tmp_path / "log").read_text().rpartition("grown ")
    assert int(grown) < 100  # MiB: 21 of 600 sizes, and 323 without a bound


async def test_a_child_shows_its_title(connection: Connection, tmp_path: Path) -> None:
    child = await connection.launch(does(SLEEP, tmp_path))
    await up(tmp_path / "log")
    assert psutil.Process(child.pid).cmdline()[0] == "a child of the tests"
    child.end()
    assert await child.wait() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("code", "status", "output"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("raise ValueError('of its own')", 1, "ValueError: of its own"),
        ("raise FileNotFoundError('of its own')", 1, "FileNotFoundError: of its own"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, ""),
        ("import sys; sys.exit('in words')", 1, "in words"),
        ("import atexit; atexit.register(print, 'at its end')", 0, "at its end"),
        ("import threading; threading.Timer(0.2, print, ['late']).start()", 0, "late"),
    ],
)
async def test_how_a_child_ended_is_told(
    code: str, status: int, output: str, connection: Connection, tmp_path: Path
) -> None:
    child = await connection.launch(does(code, tmp_path))
    assert await child.wait() == status
    assert output in (tmp_path / "log").read_text()
    assert not child.alive()
    child.end()  # harmless
    still = await connection.launch(does("pass", tmp_path))  # the server has taken no harm
    assert await still.wait() == 0


async def test_many_may_be_launched_at_once(connection: Connection, tmp_path: Path) -> None:
    codes = range(40)
    launches = (
        connection.launch(does(f"import sys; sys.exit({code})", tmp_path, str(code)))
        for code in codes
    )
    children = await asyncio.gather(*launches)
    assert await asyncio.gather(*(child.wait() for child in children)) == list(codes)


async def test_what_cannot_be_launched_is_an_error_of_the_system(
    connection: Connection, tmp_path: Path
) -> None:
    with pytest.raises(FileNotFoundError):
        await connection.launch(does("pass", tmp_path, "no/such/log"))
    assert await (await connection.launch(does("pass", tmp_path))).wait() == 0


async def test_children_end_with_their_connection_unless_they_outlive_it(tmp_path: Path) -> None:
    server = forks()
    assert server is not None
    with (
        contextlib.closing(server.connect()) as other,
        contextlib.closing(server.connect()) as closed,
    ):
        theirs = await other.launch(does(SLEEP, tmp_path, "theirs"))
        bound = await closed.launch(does(SLEEP, tmp_path, "bound"))
        outliving = await closed.launch(does(SLEEP, tmp_path, "outliving", outlives=True))
        await up(*(tmp_path / name for name in ("theirs", "bound", "outliving")))
        closed.close()
        async with asyncio.timeout(20):
            await bound.wait()
        assert bound.orphaned is closed
        assert theirs.alive()
        assert Process.of(outliving.pid).alive()
        os.kill(outliving.pid, signal.SIGKILL)
        async with asyncio.timeout(20):
            assert await outliving.wait() is None


async def test_a_cancelled_launch_leaves_no_child(connection: Connection, tmp_path: Path) -> None:
    server = forks()
    assert server is not None
    asked = asyncio.create_task(connection.launch(does(SLEEP, tmp_path)))
    await asyncio.sleep(0)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    assert await (await connection.launch(does("pass", tmp_path))).wait() == 0
    for left in psutil.Process(server.pid).children():
        await ended(left)


async def test_when_a_server_dies_the_next_start_makes_another(tmp_path: Path) -> None:
    with (
        contextlib.closing(ForkServer.start()) as given,
        contextlib.closing(Starter(server=given)) as starter,
    ):
        first = [await starter.start(does(SLEEP, tmp_path, name)) for name in ("a", "b")]
        os.kill(given.pid, signal.SIGKILL)
        async with asyncio.timeout(20):
            assert [await child.wait() for child in first] == [None, None]
        assert all(isinstance(child, Child) and child.orphaned for child in first)
        again = await asyncio.gather(*(starter.start(does("pass", tmp_path)) for _ in range(2)))
        assert [await child.wait() for child in again] == [0, 0]
        assert all(isinstance(child, Child) for child in again)


async def test_a_stopped_server_is_killed_when_it_owes_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forkserver, "STOPPED_SECONDS", 0.1)
    with contextlib.closing(Starter()) as starter:
        for owed in ("an exit code", "a child"):
            child = await starter.start(does(SLEEP, tmp_path, owed))
            await up(tmp_path / owed)
            server = psutil.Process(child.pid).parent()
            assert isinstance(child, Child)
            assert server is not None
            server.suspend()
            async with asyncio.timeout(30):
                if owed == "an exit code":
                    child.end()
                else:
                    again = await starter.start(does("pass", tmp_path))
                    assert await again.wait() == 0
                assert await child.wait() is None
            assert child.orphaned
        last = await starter.start(does(SLEEP, tmp_path, "last"))
        await up(tmp_path / "last")
        psutil.Process(last.pid).parent().suspend()  # type: ignore[union-attr]  # closing it must not wait for it


async def test_without_a_fork_server_processes_start_from_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "stages"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise ImportError('not for today')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with contextlib.closing(Starter()) as starter:
        launch = Launch(
            "this:ignored", [], dict(os.environ), str(tmp_path), str(tmp_path / "log"), ""
        )
        process = await starter.start(launch)
        assert isinstance(process, Process)
        assert await process.wait() == 0
    assert "The Zen of Python" in (tmp_path / "log").read_text()


OWNER = """
import asyncio, sys, os
from orchestration.processes.forkserver import ForkServer
from tests.orchestration.processes.test_forkserver import SLEEP, does, up
from pathlib import Path
async def main():
    server, folder = ForkServer.start(), Path(sys.argv[1])
    connection = server.connect()
    launches = [does(SLEEP, folder, "bound"), does(SLEEP, folder, "outliving", outlives=True)]
    children = [await connection.launch(launch) for launch in launches]
    await up(folder / "bound", folder / "outliving")
    print(server.pid, *(child.pid for child in children), flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


async def test_a_killed_owner_takes_the_server_and_its_children_along(tmp_path: Path) -> None:
    owner = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    server, bound, outliving = map(int, (await asyncio.to_thread(owner.stdout.readline)).split())
    owner.kill()
    owner.wait()
    for pid in (server, bound):
        await ended(Process.of(pid))
    assert Process.of(outliving).alive()
    os.kill(outliving, signal.SIGKILL)


async def test_a_standing_server_is_shared_and_ends_with_its_owner(tmp_path: Path) -> None:
    owner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "import time; time.sleep(600)"
    )
    try:
        first, second = (
            StandingForkServer(tmp_path / "server", owner.pid, ["json"]) for _ in range(2)
        )
        connections = [server.connect() for server in (first, second)]
        launched = [
            await connection.launch(does(SLEEP, tmp_path, name))
            for connection, name in zip(connections, "ab", strict=True)
        ]
        await up(tmp_path / "a", tmp_path / "b")
        servers = {psutil.Process(child.pid).ppid() for child in launched}
        assert len(servers) == 1, "one server for both"
        first.close()
        connections[0].close()
        assert await launched[0].wait() is None
        assert launched[1].alive(), "the other one's"
        owner.kill()
        await owner.wait()
        assert await launched[1].wait() is None
        await ended(Process.of(servers.pop()))
        with pytest.raises(ForkServerDied):
            second.connect()
    finally:
        with contextlib.suppress(ProcessLookupError):
            owner.kill()


def test_a_standing_server_is_not_started_in_a_folder_of_others(tmp_path: Path) -> None:
    (tmp_path / "server").mkdir()
    (tmp_path / "server").chmod(0o777)
    with pytest.raises(ForkServerDied, match="open to others"):
        StandingForkServer(tmp_path / "server", os.getpid(), ["json"])
