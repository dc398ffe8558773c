"""What watching costs: a run with hundreds of readers of its events, and without, in turns within
the same run.

    python -m benchmarks.service.api [--readers 500] [--seconds 20] [--turns 6] [--rate 200] [--minutes 10] [--json FILE]
    python -m benchmarks.service.api --quick

    index (embedded) ◀── agent ── runner and workers of one mock run, whose engines wait and compute nothing
         ▲
         └── the REST server, its own process ◀── readers: one process, `--readers` connections, each parses what it gets
                                              ◀── asker: one process, `--rate` GETs a second of a run, the list, stages

Turns without and with readers follow each other; the first seconds of each are left out. Throughput
is that of tokens generated, from the run's own `stage` events. An event's delay is from its
emission (the event's `time`) to when a reader has it, over all events of all readers. Then all
readers stay for ``--minutes``, and the server's memory is read once a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from benchmarks import harness
from orchestration.recipe.loading.load import parse_recipe
from orchestration.state.registry import Registry
from pipeline.index.client import Index
from pipeline.index.embedded import EmbeddedIndex

ANSWER_SECONDS = 240.0  # a busy machine takes its time to start a process
CONNECTS = 5  # attempts of one reader
SETTLE_SECONDS = 3.0  # of each turn, left out
# a share, and seconds at the 99th percentile
MOST_LOSS = 0.03
MOST_DELAY = 0.25
MOST_REST = 0.05
FLAT = 0.05  # by how much memory may grow from the first minute's median to the last one's
_TIME = re.compile(rb'data: \{"time":([0-9.]+)')
RECIPE: dict[str, Any] = {
    "name": "watched",
    "model": {"source": "mock"},
    "prompts": {"source": "builtin", "task": "repeat", "max_prompt_tokens": 64},
    "rollout": {"engine": "mock", "max_rows": 32, "max_tokens": 64, "mock": {"time_scale": 0.25}},
    "reward": {"functions": [{"name": "spelling"}]},
    "algorithm": {"group_size": 8},
    "train": {
        "engine": "mock",
        "steps": 1_000_000,
        "groups_per_step": 4,
        "mock": {"time_scale": 0.25},
    },
    "pipeline": {"staleness": 1},
    "checkpoint": {"every": 20},
}


@dataclass
class Measured:
    """``tokens_per_s``: of turns without and with readers. Delays and REST times in seconds; memory
    in MiB."""

    readers: int
    without: list[float]
    with_readers: list[float]
    losses: list[float]
    delay_p50: float
    delay_p99: float
    delay_max: float
    events: int
    rest_rate: float
    rest_p50: float
    rest_p99: float
    rest_failed: int
    minutes: float
    memory_first: float
    memory_last: float
    dropped: int
    server_cores: float
    load: tuple[float, float, float]


# ── the processes ──


def serve(url: str, data: str, parent: Connection) -> None:
    """The REST server, until it is ended."""

    async def run() -> None:
        from api.server.access.settings import Settings
        from api.server.app import build_app, listen, reduce_collections

        settings = Settings(data=Path(data), port=0, runs=0, rate=1e6, burst=10**6, no_token=True)
        registry = Registry(url)
        _, where = await listen(build_app(settings, registry), settings)
        reduce_collections()
        parent.send(where)
        await asyncio.Event().wait()

    asyncio.run(run())


class Reader(asyncio.Protocol):
    """One connection. Every event's time is compared with the clock when it is here."""

    def __init__(self, host: str, path: str, delays: list[float]) -> None:
        self.host = host
        self.path = path
        self.delays = delays
        self.alive = False
        self._rest = b""
        self.answered = asyncio.Event()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.alive = True
        transport.write(
            f"GET {self.path} HTTP/1.1\r\nHost: {self.host}\r\nAccept: "
            f"text/event-stream\r\n\r\n".encode()
        )

    def data_received(self, data: bytes) -> None:
        now = time.time()
        self.answered.set()
        whole, separator, rest = (self._rest + data).rpartition(b"\n")
        self._rest = rest
        self.delays += [now - float(at) for at in _TIME.findall(whole + separator)]

    def connection_lost(self, error: Exception | None) -> None:
        self.alive = False
        self.answered.set()


def read(host: str, port: int, path: str, orders: Connection) -> None:
    """Obeys `open COUNT`, `close` and `delays` (answered with those since the last time, and how
    many are connected)."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        readers = list[Reader]()
        delays: list[float] = []

        async def connected() -> Reader:
            for _ in range(CONNECTS):
                # more came at once than the server's queue holds
                with contextlib.suppress(OSError):
                    made = await loop.create_connection(
                        lambda: Reader(f"{host}:{port}", path, delays), host, port
                    )
                    return made[1]
            raise RuntimeError(f"the server took no connection in {CONNECTS} attempts")

        while True:
            what, count = await asyncio.to_thread(orders.recv)
            if what == "open":
                for _ in range(count):
                    readers.append(await connected())
                for reader in readers:
                    await reader.answered.wait()
            elif what == "close":
                for reader in readers:
                    reader.transport.abort()
                readers.clear()
            kept, delays[:] = list(delays), []
            orders.send((kept, sum(reader.alive for reader in readers)))

    asyncio.run(run())


def ask(base: str, run: str, rate: float, orders: Connection) -> None:
    """``rate`` GETs a second, evenly, however long each takes; asked, it answers with the times
    since the last time."""

    async def run_() -> None:
        import aiohttp

        paths = (
            f"/v1/runs/{run}",
            "/v1/runs?limit=20",
            f"/v1/runs/{run}/stages",
            f"/v1/runs/{run}",
        )
        times: list[float] = []
        failed = 0
        under_way: set[asyncio.Task[None]] = set()

        async def one(session: aiohttp.ClientSession, path: str) -> None:
            nonlocal failed
            began = time.perf_counter()
            async with session.get(base + path) as response:
                await response.read()
                failed += response.status != 200
            times.append(time.perf_counter() - began)

        async def paced() -> None:
            connector = aiohttp.TCPConnector(limit=64)
            async with aiohttp.ClientSession(connector=connector) as session:
                began = time.perf_counter()
                number = 0
                while True:
                    await asyncio.sleep(max(0.0, began + number / rate - time.perf_counter()))
                    task = asyncio.create_task(one(session, paths[number % len(paths)]))
                    under_way.add(task)
                    task.add_done_callback(under_way.discard)
                    number += 1

        pacing = asyncio.create_task(paced())
        while await asyncio.to_thread(orders.recv):
            kept, times[:] = list(times), []
            orders.send((kept, failed))
            assert not pacing.done()

    asyncio.run(run_())


@contextlib.contextmanager
def process(target: Any, *arguments: Any) -> Iterator[tuple[multiprocessing.Process, Connection]]:
    """``target`` in a process of its own, with the other end of a pipe as its last argument."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    made = context.Process(target=target, args=(*arguments, there), daemon=True)
    made.start()
    try:
        yield made, here  # type: ignore[misc]
    finally:
        made.kill()
        made.join()


@contextlib.contextmanager
def agent(url: str, data: Path) -> Iterator[None]:
    """`asyncdock agent`; what it has started is asked to stop by the run's own state before this
    ends."""
    command = [sys.executable, "-P", "-m", "api.cli.main", "agent", "--data", str(data)]
    environment = {**os.environ, "ASYNCDOCK_INDEX": url}
    with (data / "agent.log").open("wb") as log:
        made = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        yield
    finally:
        made.send_signal(signal.SIGTERM)
        made.wait(30)


# ── the measurement ──


class Run:
    """The run that is watched."""

    def __init__(self, registry: Registry, run: str) -> None:
        self.registry = registry
        self.run = run
        self.index = Index(registry.url, run)

    async def until_running(self) -> None:
        async with asyncio.timeout(ANSWER_SECONDS):
            after = "0"
            while True:
                for event in await self.index.events(after, 2.0):
                    after = event.id
                    if event.kind == "step" and event.data["step"] > 3:
                        return
                    if event.kind == "state" and event.data["state"] == "failed":
                        raise RuntimeError(f"the run failed: {event.data['reason']}")

    async def tokens_per_s(self, seconds: float) -> float:
        """Generated tokens a second, over ``seconds`` from now."""
        _, after = await self.index.event_ends()
        end = time.monotonic() + seconds
        counted = list[tuple[float, int]]()
        while time.monotonic() < end:
            for event in await self.index.events(after, 1.0):
                after = event.id
                if event.kind == "stage" and event.data["stage"] == "rollout":
                    counted.append((event.time, event.data["tokens"]))
        (began, first), (ended, last) = counted[0], counted[-1]
        return (last - first) / (ended - began)

    async def stop(self) -> None:
        await self.registry.ask(self.run, "stop")
        async with asyncio.timeout(90):
            marker = ""
            while (await self.registry.get(self.run)).state not in (
                "stopped",
                "failed",
                "finished",
            ):
                marker = await self.registry.wait(marker, 5.0)
        await self.index.close()


async def measure(
    readers: int, seconds: float, turns: int, rate: float, minutes: float
) -> Measured:
    with contextlib.ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="asyncdock-api-")))
        server_of_index = stack.enter_context(EmbeddedIndex(home / "index"))
        url = server_of_index.url
        registry = Registry(url)
        record, _ = await registry.submit(parse_recipe(RECIPE))
        stack.enter_context(agent(url, home))
        run = Run(registry, record.id)
        try:
            server, connection = stack.enter_context(process(serve, url, str(home)))
            base = await _answer(connection)
            host, port = base.removeprefix("http://").split(":")
            path = f"/v1/runs/{record.id}/metrics/stream?last_event_id=%24"  # $: from now on
            _, many = stack.enter_context(process(read, host, int(port), path))
            _, asker = stack.enter_context(process(ask, base, record.id, rate))
            await run.until_running()
            return await _measure(
                run, psutil.Process(server.pid), many, asker, readers, seconds, turns, rate, minutes
            )
        finally:
            await run.stop()
            await registry.close()


async def _order(to: Connection, order: Any) -> Any:
    to.send(order)
    return await _answer(to)


async def _answer(connection: Connection) -> Any:
    if not await asyncio.to_thread(connection.poll, ANSWER_SECONDS):
        raise TimeoutError(
            f"a process of the measurement did not answer for {ANSWER_SECONDS:.0f} s"
        )
    return connection.recv()


async def _measure(
    run: Run,
    server: psutil.Process,
    many: Connection,
    asker: Connection,
    readers: int,
    seconds: float,
    turns: int,
    rate: float,
    minutes: float,
) -> Measured:
    without = []
    watched = []
    delays = list[float]()
    rest = list[float]()
    cores = list[float]()
    failed = dropped = 0
    for _ in range(turns):
        await asyncio.sleep(SETTLE_SECONDS)
        without.append(await run.tokens_per_s(seconds))
        await _order(many, ("open", readers))
        await asyncio.sleep(SETTLE_SECONDS)
        await _order(many, ("delays", 0))
        await _order(asker, True)
        spent = sum(server.cpu_times()[:2])
        watched.append(await run.tokens_per_s(seconds))
        cores.append((sum(server.cpu_times()[:2]) - spent) / seconds)
        late, alive = await _order(many, ("delays", 0))
        times, failed = await _order(asker, True)
        delays = delays + late
        rest = rest + times
        dropped = dropped + readers - alive
        await _order(many, ("close", 0))
    memory: list[float] = []
    if minutes:
        await _order(many, ("open", readers))
        end = time.monotonic() + 60 * minutes
        while time.monotonic() < end:
            memory.append(server.memory_info().rss / 2**20)
            await asyncio.sleep(1.0)
            if len(memory) % 15 == 0:
                await _order(many, ("delays", 0))
                await _order(asker, True)
        _, alive = await _order(many, ("delays", 0))
        dropped += readers - alive
    delays.sort()
    rest.sort()
    minute = max(1, min(60, len(memory) // 2))
    return Measured(
        readers,
        without,
        watched,
        [1 - b / a for a, b in zip(without, watched, strict=True)],
        _share(delays, 0.5),
        _share(delays, 0.99),
        delays[-1] if delays else 0.0,
        len(delays),
        rate,
        _share(rest, 0.5),
        _share(rest, 0.99),
        failed,
        minutes,
        statistics.median(memory[:minute]) if memory else 0.0,
        statistics.median(memory[-minute:]) if memory else 0.0,
        dropped,
        statistics.median(cores),
        os.getloadavg(),
    )


def _share(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def table(found: Measured) -> str:
    """What is printed: each figure beside what it must be."""
    loss = statistics.median(found.losses)
    rows = [
        (
            f"tokens/s without and with {found.readers} readers",
            f"{statistics.median(found.without):.0f}, {statistics.median(found.with_readers):.0f}",
            "",
        ),
        (
            "throughput lost, median of the turns",
            f"{loss:+.1%}",
            _met(loss < MOST_LOSS, f"< {MOST_LOSS:.0%}"),
        ),
        ("  each turn", ", ".join(f"{one:+.1%}" for one in found.losses), ""),
        (
            f"event delay p50, p99, max ({found.events} events)",
            f"{1e3 * found.delay_p50:.0f}, {1e3 * found.delay_p99:.0f}, "
            f"{1e3 * found.delay_max:.0f} ms",
            _met(found.delay_p99 <= MOST_DELAY, f"p99 <= {1e3 * MOST_DELAY:.0f} ms"),
        ),
        (
            f"REST p50, p99 at {found.rest_rate:.0f}/s ({found.rest_failed} failed)",
            f"{1e3 * found.rest_p50:.1f}, {1e3 * found.rest_p99:.1f} ms",
            _met(found.rest_p99 <= MOST_REST, f"p99 <= {1e3 * MOST_REST:.0f} ms"),
        ),
        ("cores of the server with readers", f"{found.server_cores:.2f}", ""),
        ("readers dropped", str(found.dropped), _met(found.dropped == 0, "0")),
    ]
    if found.minutes:
        growth = found.memory_last / found.memory_first - 1
        rows.append(
            (
                f"server's memory, first and last minute of {found.minutes:g}",
                f"{found.memory_first:.0f}, {found.memory_last:.0f} MiB ({growth:+.1%})",
                _met(growth <= FLAT, f"<= {FLAT:+.0%}"),
            )
        )
    wide = max(len(row[0]) for row in rows), max(len(row[1]) for row in rows)
    lines = [
        f"{what:<{wide[0]}}  {value:<{wide[1]}}  {goal}".rstrip() for what, value, goal in rows
    ]
    return "\n".join(
        [*lines, f"load of the machine: {', '.join(f'{load:.1f}' for load in found.load)}"]
    )


def _met(met: bool, goal: str) -> str:
    return f"{'met' if met else 'NOT met'}: {goal}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--readers", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=20.0, help="of one turn")
    parser.add_argument("--turns", type=int, default=6, help="each without, then with readers")
    parser.add_argument(
        "--rate", type=float, default=200.0, help="REST requests a second, in all turns"
    )
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="that memory is watched for; 0: it is not"
    )
    parser.add_argument(
        "--quick", action="store_true", help="few readers, for seconds: that it runs"
    )
    options = parser.parse_args(arguments)
    if options.quick:
        options.readers = 20
        options.seconds = 4.0
        options.turns = 1
        options.minutes = 0.0
    asked = (options.readers, options.seconds, options.turns, options.rate, options.minutes)
    found = asyncio.run(measure(*asked))
    print(table(found))
    if options.json:
        options.json.write(asdict(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
