"""The embedded index at an address of its machine: with a password, and inside TLS."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis.asyncio as redis

from orchestration.recipe.problems import RecipeError
from orchestration.recipe.sections import PipelineSection
from pipeline.documents.flow import HEAD_ADDRESS, HeadAddress
from pipeline.first_of import cancel_all
from pipeline.index.address import Address, redacted, split_password, with_password
from pipeline.index.client import Index
from pipeline.index.embedded import MOST_UNKNOWN, EmbeddedIndex, end_unknown, served_by_tls
from tests.orchestration.runs import MOCK, recipe
from tests.servers import self_signed


@pytest.fixture(params=["plain", "tls"])
async def served(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[EmbeddedIndex]:
    folder = tmp_path / "index"
    if request.param == "plain":
        with EmbeddedIndex(folder, address=Address.parse("127.0.0.1")) as server:
            yield server
        return
    pem = self_signed(tmp_path)
    files = {
        "tls_certificate": pem / "cert.pem",
        "tls_key": pem / "key.pem",
        "tls_authority": pem / "cert.pem",
    }
    tls = PipelineSection(**{name: str(path) for name, path in files.items()}).tls_contexts()
    assert tls is not None
    with EmbeddedIndex(folder, address=Address.parse("127.0.0.1", str(pem / "cert.pem"))) as server:
        async with served_by_tls(server, tls[0]):
            yield server


async def ping(url: str) -> bool:
    client = redis.Redis.from_url(url, socket_timeout=5)
    try:
        return bool(await client.ping())
    finally:
        await client.aclose()


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode()


async def test_other_machines_need_the_password(served: EmbeddedIndex) -> None:
    assert served.address is not None
    url = served.address.url
    password = served.address.password
    assert await ping(url)
    with pytest.raises(redis.AuthenticationError):
        await ping(url.replace(password, "x"))
    with pytest.raises(redis.AuthenticationError):
        await ping(url.replace(f"run:{password}@", ""))
    if url.startswith("rediss"):
        with pytest.raises(redis.ConnectionError):  # bytes outside of TLS
            await ping(url.replace("rediss", "redis").partition("?")[0])
        with pytest.raises(redis.ConnectionError, match="certificate verify failed"):
            await ping(url.partition("?")[0])
    assert password not in repr(served.address)
    assert served.pid is not None
    assert password not in command_line(served.pid), "other users can read command lines"


@contextlib.contextmanager
def half_open(address: Address, count: int) -> Iterator[list[socket.socket]]:
    """``count`` connections of one host that never say a word."""
    opened: list[socket.socket] = []
    try:
        for _ in range(count):
            opened.append(socket.create_connection((address.host, address.port), timeout=20))
        yield opened
    finally:
        for each in opened:
            each.close()


def ended(connections: Sequence[socket.socket]) -> bool:
    """Whether the other side has closed all of ``connections``."""
    for each in connections:
        each.setblocking(False)
        try:
            if each.recv(1):
                return False
        except BlockingIOError:
            return False
        except ConnectionError:
            continue
    return True


async def test_connections_that_never_authenticate_end_while_clients_go_on(
    served: EmbeddedIndex,
) -> None:
    address = served.address
    assert address is not None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 8192)), hard))
    guard = asyncio.create_task(end_unknown(served))
    try:
        async with Index(address.url, "run") as before:
            await before.load()
            opening = half_open(address, 2000)
            opened = await asyncio.to_thread(opening.__enter__)
            try:
                began = time.monotonic()
                await before.write_document("a", "1")
                assert await ping(address.url), "a new client connects meanwhile"
                assert time.monotonic() - began < 5
                while not await asyncio.to_thread(ended, opened):
                    assert time.monotonic() - began < 30, "they are still connected"
                    await asyncio.sleep(0.2)
                assert await before.read_document("a") == "1"
            finally:
                opening.__exit__(None, None, None)
    finally:
        await cancel_all(guard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_inside_tls_few_connections_are_unknown_at_a_time(served: EmbeddedIndex) -> None:
    address = served.address
    assert address is not None
    if not address.authority:
        pytest.skip("the server itself counts connections outside of TLS")
    context = ssl.create_default_context(cafile=address.authority)
    context.check_hostname = False
    own = len(os.listdir("/proc/self/fd"))
    shaken = [
        await asyncio.open_connection(address.host, address.port, ssl=context)
        for _ in range(MOST_UNKNOWN + 50)
    ]
    assert len(os.listdir("/proc/self/fd")) - own < 3 * MOST_UNKNOWN + 150, (
        "of both sides, which are this process"
    )
    assert await ping(address.url)
    for _, writer in shaken:
        writer.transport.abort()


async def test_a_client_at_the_address_goes_on_when_the_index_was_killed(
    served: EmbeddedIndex,
) -> None:
    assert served.address is not None
    async with Index(served.address.url, "run") as there, Index(served.url, "run") as here:
        await here.load()
        await there.write_document("a", "1")
        assert await here.read_document("a") == "1"
        assert served.pid is not None
        waiting = asyncio.create_task(there.woken("topic", "", 30))
        os.kill(served.pid, signal.SIGKILL)
        assert served.process is not None
        await asyncio.to_thread(served.process.wait)
        await asyncio.to_thread(served.start)
        assert await there.read_document("a") == "1"
        await here.wake("topic")
        assert await waiting
        assert await there.own_address() == "127.0.0.1"
        assert await there.reach() == ("127.0.0.1", ""), (
            "nobody has said by which address others come"
        )
        await here.put_own_address("10.0.0.1")
        assert await here.reach() == ("", "10.0.0.1"), (
            "for what processes beside the index announce"
        )
        assert await there.reach() == ("127.0.0.1", "10.0.0.1"), "they reach the index by loopback"
        await HEAD_ADDRESS.put(here, HeadAddress("another-space", "10.0.0.1"))
        assert await there.reach() == ("127.0.0.1", ""), (
            "that of another machine, which has a tunnel"
        )


def test_addresses() -> None:
    assert Address("::1", 7, password="p").url == "redis://run:p@[::1]:7"
    assert Address("h", 7, "/ca.pem", "p").url == "rediss://run:p@h:7?ssl_ca_certs=/ca.pem"
    assert urlsplit(Address.parse("127.0.0.1").url).port
    assert Address.split("fd00::1") == Address.split("[fd00::1]") == ("fd00::1", 0)
    for wrong in ("", "127.0.0.1/b", "u@127.0.0.1", "127.0.0.1:x", "127.0.0.1:99999"):
        with pytest.raises(ValueError):
            Address.parse(wrong)


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        (
            {"pipeline__serve": "192.0.2.1"},
            r"cannot be listened on \(.*give a name or an address "
            r"of this machine",
        ),
        ({"pipeline__serve": "127.0.0.1:x"}, "cannot be listened on"),
    ],
)
def test_an_address_that_cannot_be_served_is_refused(changes: dict[str, str], wrong: str) -> None:
    with pytest.raises(RecipeError, match=rf"pipeline\.serve = .*{wrong}"):
        recipe(MOCK, **changes)


def test_a_command_of_another_user_does_not_see_the_socket(tmp_path: Path) -> None:
    with EmbeddedIndex(tmp_path / "index", address=Address.parse("127.0.0.1")) as server:
        mode = subprocess.run(
            ["stat", "-c", "%a", str(server.socket)], capture_output=True, text=True, check=True
        )
        assert mode.stdout.strip() == "700"


@pytest.mark.parametrize(
    "url", ["redis://:a%2Fb@10.0.0.1:6379", "rediss://user:a%2Fb@[::1]:1/0?ssl_ca_certs=/x.pem"]
)
def test_an_address_and_its_password_are_given_apart(url: str) -> None:
    address, password = split_password(url)
    assert password == "a/b"
    assert "a%2Fb" not in address
    assert with_password(address, password) == with_password(url, "") == url
    assert with_password("redis://10.0.0.1", "") == "redis://10.0.0.1"
    with pytest.raises(ValueError, match="leave out one of them"):
        with_password(url, password)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:secret@host:1/0", "redis://***@host:1/0"),
        ("rediss://me:secret@[::1]:1", "rediss://***@[::1]:1"),
        ("redis://:sec@ret@host:1/0", "redis://***@host:1/0"),
        ("redis://:@sec@ret@@host:1", "redis://***@host:1"),
        ("redis://host:1/0", "redis://host:1/0"),
        ("unix:///run/index.sock", "unix:///run/index.sock"),
        ("redis://host:1/0?db=2&password=secret", "redis://host:1/0?db=2&password=***"),
        (
            "unix:///run/index.sock?password=sec@ret&db=1",
            "unix:///run/index.sock?password=***&db=1",
        ),
    ],
)
def test_no_part_of_a_password_is_shown(url: str, shown: str) -> None:
    """Servers take a password with ``@`` in it as it is, and one in the query, too."""
    assert redacted(url) == shown
