"""Our own code beside the library that could do the same, where the library was measured and not
taken.

    python -m benchmarks.flow.libraries [--smoke] [--json FILE]

`pipeline.index.link`: redis-py's client, stamina. `pipeline.compat.loop_thread`: anyio's portal.
`api.client.transport`: httpx, on loopback. `orchestration.processes.forkserver`: multiprocessing's.
Medians of rounds in which the two take turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio.from_thread
import httpx
import redis.asyncio
import stamina
from aiohttp import web

from api.client.transport import Transport
from benchmarks import harness
from orchestration.processes.forkserver import PRELOAD, ForkServer, Launch
from pipeline.compat.loop_thread import LoopThread
from pipeline.index.embedded import EmbeddedIndex
from pipeline.index.link import Link

ROOT = Path(__file__).resolve().parents[2]
ROUNDS = 3
TOGETHER = 64

Call = Callable[[], Awaitable[Any]]


@dataclass(frozen=True)
class Row:
    """Seconds of one call, by our code and by ``library``."""

    what: str
    library: str
    ours: float
    theirs: float


async def compare(what: str, library: str, count: int, ours: Call, theirs: Call) -> Row:
    """Time ``count`` calls, one after the other."""
    seconds: dict[Call, list[float]] = {ours: [], theirs: []}
    for _ in range(ROUNDS):
        for call, measured in seconds.items():
            await call()
            began = time.perf_counter()
            for _ in range(count):
                await call()
            measured.append((time.perf_counter() - began) / count)
    return Row(what, library, statistics.median(seconds[ours]), statistics.median(seconds[theirs]))


async def nothing(*_: object) -> None:
    return None


async def together(call: Call) -> None:
    await asyncio.gather(*(call() for _ in range(TOGETHER)))


async def by_stamina() -> None:
    async for attempt in stamina.retry_context(on=OSError):
        with attempt:
            await nothing()


async def index_calls(count: int) -> AsyncIterator[Row]:
    with tempfile.TemporaryDirectory() as folder, EmbeddedIndex(Path(folder)) as server:
        link = Link(server.url)
        client = redis.asyncio.Redis.from_url(server.url)
        ours = partial(link.send, ("GET", "key"))
        theirs = partial(client.get, "key")
        yield await compare("a call to the index", "redis-py", count, ours, theirs)
        many = f"{TOGETHER} calls to the index at once"
        most = 1 + count // TOGETHER
        yield await compare(
            many, "redis-py", most, partial(together, ours), partial(together, theirs)
        )
        yield await compare(
            "a retry that is not needed", "stamina", count, partial(link.retry, nothing), by_stamina
        )
        await client.aclose()
        await link.close()


async def thread_calls(count: int) -> AsyncIterator[Row]:
    loop = LoopThread("ours")
    with anyio.from_thread.start_blocking_portal() as portal:

        async def ours() -> None:
            loop.call(nothing())

        async def theirs() -> None:
            portal.call(nothing)

        yield await compare("a call into another thread's loop", "anyio", count, ours, theirs)
    loop.stop()


def serve(listening: socket.socket, nbytes: int) -> None:
    """An HTTP server, in a process of its own."""
    app = web.Application()
    body = bytes(nbytes)

    async def answer(request: web.Request) -> web.Response:
        return web.json_response({}) if request.path == "/small" else web.Response(body=body)

    app.router.add_get("/{name}", answer)
    web.run_app(app, sock=listening, print=None)


async def downloads(count: int, nbytes: int) -> AsyncIterator[Row]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        server = multiprocessing.get_context("spawn").Process(
            target=serve, args=(listening, nbytes), daemon=True
        )
        server.start()
    try:
        async with Transport(url) as ours, httpx.AsyncClient(base_url=url, timeout=60) as theirs:
            for what, path, times in (
                ("a small request", "small", count),
                (f"{nbytes >> 20} MiB", "large", 5),
            ):
                get = partial(ours.send, "GET", f"/{path}"), partial(theirs.get, f"/{path}")
                yield await compare(what, "httpx", times, *get)
    finally:
        server.kill()
        server.join()


def first_child(arguments: Sequence[str]) -> None:
    """In a child: start a child, and write the seconds into a file."""
    began = time.perf_counter()
    asyncio.run(forked(ForkServer.within()) if arguments[0] == "ours" else multiprocessed())
    Path(arguments[1]).write_text(str(time.perf_counter() - began))


async def forked(forks: ForkServer, entry: str = "builtins:len", *arguments: str) -> None:
    with contextlib.closing(forks.connect()) as connection:
        launch = Launch(entry, arguments, dict(os.environ), str(ROOT), os.devnull, "child")
        if code := await (await connection.launch(launch)).wait():
            raise RuntimeError(f"a child ended with exit code {code}")


async def multiprocessed(entry: Callable[[Sequence[str]], object] = len, *arguments: str) -> None:
    process = multiprocessing.get_context("forkserver").Process(target=entry, args=(arguments,))
    process.start()
    await asyncio.to_thread(process.join)


async def processes(count: int, forks: ForkServer, preload: Sequence[str]) -> AsyncIterator[Row]:
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        [*preload, "benchmarks.flow.libraries"]
    )
    yield await compare("a child", "multiprocessing", count, partial(forked, forks), multiprocessed)
    with tempfile.NamedTemporaryFile("r") as ours, tempfile.NamedTemporaryFile("r") as theirs:
        await forked(forks, "benchmarks.flow.libraries:first_child", "ours", ours.name)
        await multiprocessed(first_child, "theirs", theirs.name)
        yield Row(
            "a child's first child", "multiprocessing", float(ours.read()), float(theirs.read())
        )


async def measure(smoke: bool, forks: ForkServer) -> list[Row]:
    count, nbytes, preload = (20, 1 << 20, ()) if smoke else (3000, 64 << 20, PRELOAD)
    parts = (
        index_calls(count),
        thread_calls(count),
        downloads(count, nbytes),
        processes(count // 20, forks, preload),
    )
    return [row for part in parts async for row in part]


def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--smoke", action="store_true", help="few calls, to see that it works")
    options = parser.parse_args(argv)
    os.environ["PYTHONPATH"] = str(ROOT)  # of the children
    with contextlib.closing(ForkServer.start()) as forks:
        rows = asyncio.run(measure(options.smoke, forks))
    print("| what | ours, ms | library, ms | library |\n|---|---|---|---|")
    for row in rows:
        print(f"| {row.what} | {row.ours * 1e3:.3f} | {row.theirs * 1e3:.3f} | {row.library} |")
    if options.json:
        options.json.write([asdict(row) for row in rows])


if __name__ == "__main__":
    main()
