"""Attacks on the connections of `asyncdock serve`, in a process with few file descriptors: what
they cost others."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import resource
import ssl
import subprocess
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from api.server.access import connections
from api.server.access.connections import Connections, most_connections
from api.server.access.settings import Settings
from api.server.access.tokens import Tokens
from api.server.app import build_app, listen
from api.server.http.problems import MEDIA_TYPE
from api.server.service.service import SERVICE
from orchestration.logs import Repeats
from orchestration.service.index_server import FILE
from orchestration.state.registry import Registry
from tests.api.served import SECONDS, Served
from tests.api.serving import bearer
from tests.orchestration.runs import MOCK

# Seconds of any other request under an attack: 0.03 on a quiet machine. One that has to wait until
# half-open connections end by themselves, after `header_seconds` of 10 s, takes longer, however
# busy the machine is.
LATENCY = 8.0
HALF = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-Slow: "
RUN = {**MOCK, "name": "watched", "train": {**MOCK["train"], "steps": 100_000}}
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.contextmanager
def served(folder: Path, *options: str, descriptors: int) -> Iterator[Served]:
    made = Served(folder / "service", "--runs", "0", *options, descriptors=descriptors)
    try:
        made.start()
        yield made
    finally:
        made.end()


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that may open 256 files, and needs no token."""
    with served(tmp_path_factory.mktemp("few"), "--no-token", descriptors=256) as made:
        yield made


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that may open 1024 files, as is usual, and needs a token."""
    options = ("--rate", "5000")
    with served(tmp_path_factory.mktemp("usual"), *options, descriptors=1024) as made:
        yield made


@contextlib.asynccontextmanager
async def tokens_of(server: Served) -> AsyncGenerator[Tokens, None]:
    tokens = Tokens(json.loads((server.data / FILE).read_text())["index"])
    yield tokens
    await tokens.close()


@pytest.fixture
async def token(usual: Served) -> str:
    async with tokens_of(usual) as tokens:
        return (await tokens.create("ada", "run"))[1]


@contextlib.asynccontextmanager
async def attacking(server: Served) -> AsyncGenerator[Callable[[bytes], Awaitable[Stream]], None]:
    """Opens connections that send what they are given; closes all of them at the end."""
    writers = []

    async def attack(data: bytes) -> Stream:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writers.append(writer)
        writer.write(data)
        return reader, writer

    try:
        yield attack
    finally:
        for writer in writers:
            writer.transport.abort()


async def latencies(server: Served, count: int, **headers: str) -> list[float]:
    """How long requests take, half of them on connections of their own, in ascending order."""
    found = []
    async with aiohttp.ClientSession(server.url, headers=headers) as kept:
        for number in range(count):
            async with contextlib.AsyncExitStack() as stack:
                session = kept
                if number % 2:
                    session = await stack.enter_async_context(
                        aiohttp.ClientSession(server.url, headers=headers)
                    )
                began = time.perf_counter()
                async with session.get("/v1/runs") as response:
                    assert response.status == 200, await response.text()
                    await response.read()
                found.append(time.perf_counter() - began)
    return sorted(found)


def nine_in_ten(*found: list[float]) -> float:
    """What nine of ten requests stay below; the last one is at the mercy of whatever else the
    machine does."""
    ordered = sorted(itertools.chain(*found))
    return ordered[int(0.9 * (len(ordered) - 1))]


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """One answer: its status, headers and body."""
    async with asyncio.timeout(connections.WRITE_SECONDS / 2):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {
            name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:-2])
        }
        return (
            int(head[0].split()[1]),
            headers,
            await reader.readexactly(int(headers.get("content-length", 0))),
        )


# ── half-open ones ──


async def test_hundreds_of_half_open_requests_delay_nobody_and_fill_no_log(few: Served) -> None:
    before = few.log.stat().st_size
    async with attacking(few) as attack:
        half = asyncio.gather(*(attack(HALF) for _ in range(300)))
        first = await latencies(few, 20)  # while they come
        await half
        rest = await latencies(few, 180)
        assert few.process is not None
        assert len(os.listdir(f"/proc/{few.process.pid}/fd")) < 256 - 32
    assert nine_in_ten(first, rest) < LATENCY
    assert few.log.stat().st_size - before < 20_000
    assert "Traceback" not in few.log.read_text()


async def test_a_flood_of_connections_delays_nobody(few: Served) -> None:
    """They are opened as fast as they can be: none is kept for long enough to crowd out one that
    sends a request."""
    async with attacking(few) as attack:

        async def flood() -> None:
            while True:
                with contextlib.suppress(OSError):
                    await asyncio.gather(*(attack(HALF) for _ in range(10)))
                await asyncio.sleep(0.02)  # 500 a second, beside other tests on the machine

        flooding = asyncio.create_task(flood())
        found = await latencies(few, 150)
        assert not flooding.done()
        flooding.cancel()
        await asyncio.gather(flooding, return_exceptions=True)
    assert nine_in_ten(found) < LATENCY


async def test_bodies_that_do_not_come_delay_nobody(few: Served) -> None:
    """Each has passed the headers, and its handler waits; a byte now and then keeps it going."""
    head = b"POST /v1/recipes/check HTTP/1.1\r\nHost: localhost\r\n"
    head += b"Content-Type: application/json\r\nContent-Length: 999\r\n\r\n"
    async with attacking(few) as attack:
        slow = await asyncio.gather(*(attack(head) for _ in range(300)))

        async def trickle() -> None:
            while True:
                for _, writer in slow:
                    if not writer.transport.is_closing():
                        writer.write(b" ")
                await asyncio.sleep(0.2)

        trickling = asyncio.create_task(trickle())
        found = await latencies(few, 100)
        trickling.cancel()
        await asyncio.gather(trickling, return_exceptions=True)
    assert nine_in_ten(found) < LATENCY


# ── limits in one process ──


@contextlib.asynccontextmanager
async def listening(
    url: str, data: Path, **settings: Any
) -> AsyncGenerator[tuple[Connections, int], None]:
    made = Settings(data=data, port=0, no_token=True, **settings)
    registry = Registry(url)
    runner, where = await listen(build_app(made, registry), made)
    try:
        site = next(iter(runner.sites))
        assert isinstance(site, Connections)
        yield site, int(where.rpartition(":")[2])
    finally:
        await runner.cleanup()
        await registry.close()


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)  # the condition is of the server's tasks


async def test_headers_have_a_deadline_however_they_come(index_url: str, tmp_path: Path) -> None:
    async with listening(index_url, tmp_path, header_seconds=0.4) as (site, port):
        # a second request has one, too
        for first in (b"", b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            if first:
                writer.write(first)
                assert (await answer(reader))[0] == 200
            writer.write(b"GET /healthz HTTP/1.1\r\n")
            sending = asyncio.create_task(_trickle(writer))
            status, headers, body = await answer(reader)
            assert (status, json.loads(body)["type"]) == (408, "urn:asyncdock:slow-headers")
            assert "server" not in headers
            assert await reader.read() == b""
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            writer.close()
        silent, writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(10):
            await silent.read()  # a silent one is closed as well
        writer.close()
        await until(lambda: len(site) == 0)


async def _trickle(writer: asyncio.StreamWriter) -> None:
    while not writer.transport.is_closing():
        writer.write(b"X-A: b\r\n")
        await asyncio.sleep(0.05)


async def test_a_connection_at_work_is_not_closed_to_make_room(
    index_url: str, tmp_path: Path
) -> None:
    """Of four connections three follow a run.

    The fourth is left to those who come next, which are answered or refused.
    """
    registry = Registry(index_url)
    async with listening(index_url, tmp_path, max_connections=4, max_connections_per_address=4) as (
        site,
        port,
    ):
        app = site._runner.app
        app[SERVICE].most_held = 3
        record, _ = await registry.submit(_recipe())
        path = f"/v1/runs/{record.id}/metrics/stream"
        base = f"http://127.0.0.1:{port}"
        async with aiohttp.ClientSession(base, connector=aiohttp.TCPConnector(limit=0)) as session:
            readers = [await session.get(path) for _ in range(3)]
            for _ in range(5):  # idle connections give way to new ones
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert (await answer(reader))[0] == 200
            refused = await session.get(path)
            assert (refused.status, (await refused.json(content_type=None))["type"]) == (
                503,
                "urn:asyncdock:readers",
            )
            assert [reader.status for reader in readers] == [200] * 3
            app[SERVICE].most_held = 4
            await until(lambda: len(site) <= 4)
            readers.append(await session.get(path))
            beyond = await session.get("/healthz")
            found = await beyond.json(content_type=None)
            assert (beyond.status, beyond.headers["Retry-After"]) == (503, "1")
            assert (found["type"], beyond.headers["Connection"]) == (
                "urn:asyncdock:connections",
                "close",
            )
            assert not any(reader.content.at_eof() for reader in readers)
            for reader in readers:
                reader.close()
    await registry.delete((await registry.ask(record.id, "stop")).id)
    await registry.close()


def _recipe() -> Any:
    from orchestration.recipe.loading.load import parse_recipe

    return parse_recipe(RUN)


async def test_answers_that_are_not_read_hold_no_connection(
    index_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients that ask for much and read nothing give way to others, and have a deadline."""

    async def much(request: web.Request) -> web.StreamResponse:
        return web.Response(body=bytes(16 << 20))

    made = Settings(data=tmp_path, port=0, max_connections=4, max_connections_per_address=4)
    registry = Registry(index_url)
    app = build_app(made, registry)
    app.router.add_get("/much", much)
    runner, url = await listen(app, made)
    (site,) = runner.sites
    assert isinstance(site, Connections)
    stalled = [
        await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2])) for _ in range(4)
    ]
    for _, writer in stalled:
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(b"GET /much HTTP/1.1\r\nHost: localhost\r\n\r\n")
    await until(lambda: len(site._stalled) == 4)
    async with aiohttp.ClientSession(url) as session:
        assert (await session.get("/healthz")).status == 200
    assert len(site._stalled) == 3
    monkeypatch.setattr(connections, "WRITE_SECONDS", 0.2)
    again = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    again[1].transport.pause_reading()  # type: ignore[attr-defined]
    again[1].write(b"GET /much HTTP/1.1\r\nHost: localhost\r\n\r\n")
    await until(lambda: len(site._stalled) == 4)
    await until(lambda: len(site._stalled) == 3)  # the one whose deadline was so short
    for _, writer in (*stalled, again):
        writer.close()
    await runner.cleanup()
    await registry.close()


async def test_one_address_leaves_room_for_others(index_url: str, tmp_path: Path) -> None:
    async with listening(index_url, tmp_path, max_connections=8, max_connections_per_address=5) as (
        site,
        port,
    ):
        opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(12)]
        await until(lambda: sum(reader.at_eof() for reader, _ in opened) == 7)
        assert len(site) == 5
        assert not any(reader.at_eof() for reader, _ in opened[7:])  # the oldest were closed
        for _, writer in opened:
            writer.close()
        await until(lambda: len(site) == 0)


async def test_without_a_descriptor_the_server_goes_on_as_soon_as_there_is_one(
    index_url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async with (
        listening(index_url, tmp_path) as (_, port),
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session,
    ):
        assert (await session.get("/healthz")).status == 200
        # has a descriptor before there is none
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        open_now = max(map(int, os.listdir("/proc/self/fd")))
        taken = []
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_now + 40, hard))
        try:
            with contextlib.suppress(OSError):
                while True:
                    taken.append(os.dup(0))
            os.close(taken.pop())  # for the client's end; the server's finds none
            late = asyncio.create_task(asyncio.open_connection("127.0.0.1", port))
            later = await late
            later[1].write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            # the server meets the error several times
            await asyncio.sleep(3 * connections.PAUSE_SECONDS)
        finally:
            for descriptor in taken:
                os.close(descriptor)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert (await answer(later[0]))[0] == 200
        for stream in (writer, later[1]):
            stream.close()
    assert len(capfd.readouterr().err) < 20_000


@pytest.mark.parametrize(
    ("descriptors", "asked", "room"),
    [(256, 0, (192, 168)), (1024, 0, (768, 672)), (1024, 100, (100, 88))],
)
def test_limits_follow_from_the_descriptors(
    descriptors: int, asked: int, room: tuple[int, int]
) -> None:
    assert most_connections(Settings(data=Path(), max_connections=asked), descriptors) == room


def test_more_connections_than_descriptors_are_refused_with_the_number() -> None:
    with pytest.raises(
        ValueError,
        match=r"max_connections: 1000 need 1334 file "
        r"descriptors.*`ulimit -n 1334`.* 768",
    ):
        most_connections(Settings(data=Path(), max_connections=1000), 1024)
    with pytest.raises(ValueError, match="ulimit"):
        most_connections(Settings(data=Path()), 60)


def test_repeated_lines_are_written_only_so_often() -> None:
    now = [0.0]
    repeats = Repeats(burst=3, window=60, clock=lambda: now[0])
    written = [repeats.count("the same") for _ in range(1000)]
    assert written == [0, 0, 0, *[-1] * 997]
    assert repeats.count("another") == 0
    now[0] = 61.0
    assert repeats.count("the same") == 997  # so many were left out
    for kind in range(5000):
        repeats.count(kind)
    assert len(repeats._kinds) <= 1000


# ── many at once ──


async def test_hundreds_of_requests_at_once_are_all_answered(usual: Served, token: str) -> None:
    """Each has its token looked up in the index: they wait for each other, and none is refused."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        usual.url, headers=bearer(token), connector=connector
    ) as session:

        async def one() -> int:
            async with session.get("/v1/runs") as response:
                await response.read()
                return response.status

        for _ in range(3):
            assert await asyncio.gather(*(one() for _ in range(300))) == [200] * 300


async def test_five_hundred_readers_at_once_are_all_admitted(usual: Served, token: str) -> None:
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=SECONDS)
    headers = bearer(token)
    async with aiohttp.ClientSession(
        usual.url, headers=headers, connector=connector, timeout=timeout
    ) as session:
        async with session.post("/v1/runs", json={"recipe": RUN}) as response:
            run = (await response.json())["id"]
        readers = await asyncio.gather(
            *(session.get(f"/v1/runs/{run}/metrics/stream") for _ in range(500))
        )
        assert {reader.status for reader in readers} == {200}
        began = await asyncio.gather(*(reader.content.readuntil(b"\n\n") for reader in readers))
        assert set(began) == {b"retry: 2000\n\n"}
        # and there is room for others
        assert nine_in_ten(await latencies(usual, 60, **headers)) < LATENCY
        async with session.post(f"/v1/runs/{run}/stop") as response:
            assert response.status == 202
        ends = await asyncio.gather(*(reader.content.read() for reader in readers))
        assert all(b"event: end" in end for end in ends)


# ── what a revoked token has under way ──


async def test_a_revoked_tokens_stream_ends_within_a_second(usual: Served, token: str) -> None:
    async with tokens_of(usual) as tokens, aiohttp.ClientSession(usual.url) as session:
        known, presented = await tokens.create("bob", "read")
        async with session.post(
            "/v1/runs", json={"recipe": RUN}, headers=bearer(token)
        ) as response:
            run = (await response.json())["id"]
        path = f"/v1/runs/{run}/metrics/stream"
        revoked = await session.get(path, headers=bearer(presented))
        other = await session.get(path, headers=bearer(token))
        await revoked.content.readuntil(b"\n\n")
        done = asyncio.create_task(revoked.content.read())
        await tokens.revoke(known.id)
        async with asyncio.timeout(60):
            last = await done
        assert b"event: dropped" in last
        assert b"revoked" in last
        assert (await session.get(path, headers=bearer(presented))).status == 401
        assert not other.content.at_eof()
        async with session.post(f"/v1/runs/{run}/stop", headers=bearer(token)) as response:
            assert response.status == 202
        assert b"event: end" in await other.content.read()  # the streams of other tokens go on
    assert "Traceback" not in usual.log.read_text()


async def test_a_token_that_may_less_now_ends_what_needed_more(usual: Served) -> None:
    async with tokens_of(usual) as tokens, aiohttp.ClientSession(usual.url) as session:
        _, token = await tokens.create("bob", "run")
        async with session.post(
            "/v1/runs", json={"recipe": RUN}, headers=bearer(token)
        ) as response:
            run = (await response.json())["id"]
        stream = await session.get(f"/v1/runs/{run}/metrics/stream", headers=bearer(token))
        await stream.content.readuntil(b"\n\n")
        async with attacking(usual) as attack:  # an upload, which needs the scope `run` as well
            head = f"POST /v1/runs HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n"
            reader, _ = await attack(
                f"{head}Content-Type: application/json\r\nContent-Length: 99\r\n\r\n{{".encode()
            )
            await latencies(usual, 1, **bearer(token))
            await tokens.adopt(token, "bob", "read")
            assert (await answer(reader))[0] == 401
        assert not stream.content.at_eof()  # reading is allowed still
        await tokens.adopt(token, "bob", "run")
        async with session.post(f"/v1/runs/{run}/stop", headers=bearer(token)) as response:
            assert response.status == 202
        assert b"event: end" in await stream.content.read()


async def test_an_expired_tokens_stream_ends_at_that_time(usual: Served, token: str) -> None:
    async with tokens_of(usual) as tokens, aiohttp.ClientSession(usual.url) as session:
        record, made = await tokens.create("bob", "read", seconds=2.0)
        async with session.post(
            "/v1/runs", json={"recipe": RUN}, headers=bearer(token)
        ) as response:
            run = (await response.json())["id"]
        stream = await session.get(f"/v1/runs/{run}/metrics/stream", headers=bearer(made))
        assert stream.status == 200
        async with asyncio.timeout(60):  # nothing else ends it: the run goes on
            assert b"event: dropped" in await stream.content.read()
        assert record.expires is not None
        assert time.time() >= record.expires
        async with session.post(f"/v1/runs/{run}/stop", headers=bearer(token)) as response:
            assert response.status == 202


async def test_a_revoked_tokens_upload_ends_within_a_second(usual: Served) -> None:
    async with tokens_of(usual) as tokens, attacking(usual) as attack:
        known, token = await tokens.create("bob", "run")
        head = (
            f"POST /v1/recipes/check HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer "
            f"{token}\r\n"
            "Content-Type: application/json\r\nContent-Length: 100000\r\n\r\n"
        )
        reader, writer = await attack(head.encode() + b"{")

        async def send() -> None:
            while not writer.transport.is_closing():
                writer.write(b" ")
                await asyncio.sleep(0.02)

        sending = asyncio.create_task(send())
        await latencies(usual, 1, **bearer(token))  # it is under way by now
        await tokens.revoke(known.id)
        status, _, body = await answer(reader)
        assert (status, json.loads(body)["type"]) == (401, "urn:asyncdock:token")
        async with asyncio.timeout(connections.WRITE_SECONDS / 2):
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""  # and it is closed
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


# ── what is no HTTP ──

MALFORMED = {
    "no request": b"GARBAGE\r\n\r\n",
    "a version to come": b"GET /healthz HTTP/3.0\r\nHost: localhost\r\n\r\n",
    "a version of the past": b"GET /healthz\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/2 as a version": b"GET /healthz HTTP/2.0\r\nHost: localhost\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "a long header": b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: "
    + b"hunter2" * 20_000
    + b"\r\n\r\n",
    "a long path": b"GET /" + b"hunter2" * 5_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "many headers": b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n" + b"X: 1\r\n" * 500 + b"\r\n",
    "a header without a "
    "colon": b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nAuthorization hunter2\r\n\r\n",
    "a null byte": b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nAuthorization: hunter2\x00\r\n\r\n",
    "two hosts": b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n",
    "no host": b"GET /healthz HTTP/1.1\r\n\r\n",
    "a bad chunk": (
        b"POST /v1/runs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\nhunter2\r\n"
    ),
    "a bad chunk later": (
        b"POST /v1/runs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\nhunter2\r\n"
    ),
    "a bad chunk that is not "
    "read": b"GET /nothing HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n",
    "two lengths": b"POST /v1/runs HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n",
    "a negative length": b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: -4\r\n\r\n",
    "a huge length": b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999999999999\r\n\r\n",
    "an expectation": b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nExpect: tea\r\n\r\n",
    "an expectation of nothing": b"GET /nothing HTTP/1.1\r\nHost: localhost\r\nExpect: tea\r\n\r\n",
    "a tunnel": b"CONNECT evil.example:80 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "no path": b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "no URL": b"GET http://[ HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a method that is none": b"G\xc3\xa9T / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "lines that end early": b"GET /healthz HTTP/1.1\nHost: localhost\n\n",
    "something behind an upgrade": b"GET /nothing HTTP/1.1\r\nHost: localhost\r\n"
    b"Connection: upgrade\r\nUpgrade: x\r\n\r\nhunter2\r\n",
}


@pytest.mark.parametrize("what", MALFORMED)
async def test_what_is_no_http_is_answered_by_a_problem_that_names_no_library(
    few: Served, what: str
) -> None:
    before = few.log.stat().st_size
    async with attacking(few) as attack:
        reader, _ = await attack(MALFORMED[what])
        status, headers, body = await answer(reader)
        received = json.loads(body)
        assert headers["content-type"].partition(";")[0] == MEDIA_TYPE
        assert (received["status"], 400 <= status < 600) == (status, True)
        assert status != 500
        assert received["detail"]
        whole = f"{headers} {body!r}".lower()
        assert not [name for name in ("aiohttp", "python", "hunter2", "traceback") if name in whole]
        assert headers["x-content-type-options"] == "nosniff"
    # what a client gets wrong is not logged, as it could be without end
    assert few.log.stat().st_size == before


async def test_an_upgrade_is_left_and_the_request_answered(few: Served) -> None:
    async with attacking(few) as attack:
        for protocol in (b"websocket", b"h2c"):
            upgrade = (
                b"Host: localhost\r\nConnection: upgrade\r\nUpgrade: " + protocol + b"\r\n\r\n"
            )
            reader, _ = await attack(b"GET /healthz HTTP/1.1\r\n" + upgrade)
            assert (await answer(reader))[0] == 200


async def test_an_answer_that_breaks_off_closes_the_connection(
    index_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler that fails when the headers are out: there is no second answer in the first one's
    place."""

    async def broken(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        response.content_length = 1000
        await response.prepare(request)
        await response.write(b"begun")
        raise RuntimeError("it broke")

    made = Settings(data=tmp_path, port=0)
    registry = Registry(index_url)
    app = build_app(made, registry)
    app.router.add_get("/broken", broken)
    runner, url = await listen(app, made)
    async with aiohttp.ClientSession(url) as session, session.get("/broken") as response:
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()
    await runner.cleanup()
    await registry.close()


async def test_a_tls_handshake_that_never_ends_is_cut_off(index_url: str, tmp_path: Path) -> None:
    certificate = tmp_path / "cert.pem"
    key = tmp_path / "key.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-subj",
        "/CN=localhost",
        "-days",
        "1",
    ]
    await asyncio.to_thread(
        subprocess.run, [*command, "-keyout", key, "-out", certificate], check=True
    )
    tls = {"tls_certificate": certificate, "tls_key": key}
    async with listening(index_url, tmp_path, header_seconds=0.5, max_connections=8, **tls) as (
        site,
        port,
    ):
        opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
        async with asyncio.timeout(10):
            await asyncio.gather(*(reader.read() for reader, _ in opened))
        await until(lambda: len(site) == 0)
        context = ssl.create_default_context(cafile=str(certificate))
        async with aiohttp.ClientSession(f"https://localhost:{port}") as session:
            assert (await session.get("/healthz", ssl=context)).status == 200
        for _, writer in opened:
            writer.close()
