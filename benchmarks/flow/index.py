"""What an index costs at 10, 100 and 1,000 clients: calls, processor time, bytes and memory of a
real Valkey server.

    python -m benchmarks.flow.index [--clients 10 100 1000] [--seconds 20] [--rate 30] [--json FILE]

A flow of four stages without models, on the embedded index over TCP. Groups of 8 samples arrive at
a fixed rate, whatever the number of clients, so each client does less where there are more:

    admit ─▶ generate (80 of 100 clients): claim a group ─▶ commit each response when it ends ─▶ …
             score (16): claim ready rows ─▶ commit      credit (2): claim groups ─▶ commit      train (2): claim ─▶ release

A client is a worker's connection to the index. It makes the calls that a worker makes, sleeps where
a worker computes, and commits columns that are not read. Clients share a few processes. After the
flow, while all clients still wait: one wake-up of a topic on which all of them wait (what a
published version does), and the price of the calls that workers make by the clock.

The figures to use are those of the server: its processor seconds, its count of calls, its bytes.
Latency is of a machine on which clients and server share the cores. Every cell fails unless each
sample was released once.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import redis

from benchmarks import harness
from orchestration.state.documents import BEAT
from pipeline.data.events import WorkerEvent
from pipeline.documents.kinds import Topic
from pipeline.index.address import Address
from pipeline.index.claims import REF, Claim, Nothing, Stored, pack_made, ranges
from pipeline.index.client import Index, RunConfig, StageSpec
from pipeline.index.embedded import EmbeddedIndex

GROUP = 8
PROCESSES = 4
SLAB = 1 << 20
PROMPT = 1
RESPONSE = 2
SCORE = 4
CREDIT = 8
# stage: what it takes, needs, makes; its share of the clients; groups or rows of one claim
STAGES = {
    "generate": ("groups", PROMPT, RESPONSE, 0.8, 1),
    "score": ("rows", RESPONSE, SCORE, 0.16, 32),
    "credit": ("groups", SCORE, CREDIT, 0.02, 8),
    "train": ("groups", CREDIT, 0, 0.02, 8),
}
CONFIG = RunConfig(
    tuple(StageSpec(name, t, n, m, releases=not m) for name, (t, n, m, _, _) in STAGES.items())
)
ALL = Topic("all")  # wakes every client at once
UNITS = 1000  # calls of each kind in the last part


def counts(clients: int) -> dict[str, int]:
    """How many of ``clients`` run each stage."""
    found = {name: max(1, round(clients * share)) for name, (*_, share, _) in STAGES.items()}
    return {**found, "generate": max(1, clients - sum(found.values()) + found["generate"])}


class Client:
    """One worker of ``stage``, until it is cancelled. ``busy``: seconds that it takes for a
    group."""

    def __init__(self, url: str, stage: str, number: int, busy: float) -> None:
        self.index = Index(url, "scale")
        self.stage = stage
        self.busy = busy
        self.name = f"{stage}-{number}"
        self.slot = 0
        self.block = 0
        self.place = 0
        self.released = 0
        self.seconds = list[float]()
        self.found = 0
        self.empty = 0

    async def run(self) -> None:
        _, _, makes, _, most = STAGES[self.stage]
        block = await self.index.allocate(1, self.name, SLAB)
        assert not hasattr(block, "wait"), "the warehouse is full"
        self.block, self.place = block.number, (1 << 48) + block.offset  # type: ignore[union-attr]
        while True:
            began = time.perf_counter()
            claim = await self.index.claim(
                self.stage, self.name, most, 60.0, version=0, home=1, patient=True
            )
            self.seconds.append(time.perf_counter() - began)
            if isinstance(claim, Nothing):
                self.empty += 1
                await self.index.wait(claim.topic, claim.wait, min(claim.due or 10.0, 10.0))
                continue
            self.found += 1
            if self.stage == "generate":
                ends = [random.expovariate(1 / self.busy) for _ in range(len(claim))]
                scale = self.busy / max(ends)  # the slowest response is the group's
                async with asyncio.TaskGroup() as tasks:
                    for row, seconds in enumerate(ends):
                        tasks.create_task(self.later(claim, row, seconds * scale, makes))
            else:
                await self.commit(claim, list(range(len(claim))), makes)
                self.released += 0 if makes else len(claim)

    async def later(self, claim: Claim, row: int, seconds: float, makes: int) -> None:
        await asyncio.sleep(seconds)
        await self.commit(claim, [row], makes)

    async def commit(self, claim: Claim, positions: list[int], makes: int) -> None:
        part = claim.part(positions)
        edges, order = ranges(part.row)
        stored = (
            stored_in(self.name, self.block, self.place, self.slot, len(part), makes)
            if makes
            else Stored(self.name, 1)
        )
        self.slot += len(part)
        made = pack_made([(0, 100)] * len(part), order) if self.stage == "generate" else None
        began = time.perf_counter()
        await self.index.commit(stored, self.stage, claim.token, edges, made)
        self.seconds.append(time.perf_counter() - began)


def stored_in(name: str, block: int, place: int, slot: int, rows: int, makes: int) -> Stored:
    refs = np.zeros(rows, REF)
    refs["block"], refs["slot"], refs["place"] = block, np.arange(slot, slot + rows), place
    return Stored(name, 1, block, makes, refs=refs.tobytes())


def process(url: str, clients: list[tuple[str, int, float]], pipe: Connection) -> None:
    """Run clients until a message; then wait all on one topic, and report."""
    asyncio.run(_process(url, clients, pipe))


async def _process(url: str, wanted: list[tuple[str, int, float]], pipe: Connection) -> None:
    clients = [Client(url, *one) for one in wanted]
    tasks = [asyncio.create_task(client.run()) for client in clients]
    stopped = asyncio.create_task(asyncio.to_thread(pipe.recv))
    await asyncio.wait([*tasks, stopped], return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        if task.done():
            task.result()
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    seconds = [each for client in clients for each in client.seconds]
    totals = {
        name: sum(getattr(client, name) for client in clients)
        for name in ("released", "found", "empty")
    }
    pipe.send({**totals, "seconds": seconds})
    waits = [asyncio.create_task(client.index.woken(ALL, "", 60.0)) for client in clients]
    await asyncio.sleep(0)
    pipe.send("waiting")
    await asyncio.gather(*waits)
    pipe.send(time.time())
    await asyncio.to_thread(pipe.recv)
    for client in clients:
        await client.index.close()


def stats(server: redis.Redis) -> dict[str, float]:
    info: dict[str, Any] = server.info("all")
    calls = {
        key.removeprefix("cmdstat_"): value["calls"]
        for key, value in info.items()
        if key.startswith("cmdstat_")
    }
    return {
        "cpu": info["used_cpu_user_main_thread"] + info["used_cpu_sys_main_thread"],
        "fcall": calls.get("fcall", 0),
        "xread": calls.get("xread", 0),
        "in": info["total_net_input_bytes"],
        "out": info["total_net_output_bytes"],
        "memory": info["used_memory"],
        "connections": info["connected_clients"],
    }


async def feed(index: Index, rate: float, seconds: float) -> int:
    """Admit ``rate`` groups a second for ``seconds``. Returns how many."""
    block = await index.allocate(1, "feed", SLAB)
    began = time.perf_counter()
    groups = 0
    while (now := time.perf_counter() - began) < seconds:
        due = int(now * rate) + 1 - groups
        if due > 0:
            place = (1 << 48) + block.offset  # type: ignore[union-attr]
            stored = stored_in("feed", block.number, place, groups * GROUP, due * GROUP, PROMPT)  # type: ignore[union-attr]
            await index.admit(stored, [(None, due, GROUP)])
            groups += due
        await asyncio.sleep(1 / rate)
    return groups


async def unit_costs(index: Index, server: redis.Redis) -> dict[str, float]:
    """Processor microseconds of the server for calls that workers make by the clock or for each
    version."""
    event = WorkerEvent(stage="rollout", worker="rollout-0", name="x", change="ready")
    kinds: dict[str, Callable[[], Awaitable[Any]]] = {
        "warehouse heartbeat": lambda: index.announce_warehouse(1, "10.0.0.1", 1),
        "host heartbeat": lambda: BEAT.put(index, 1, host="a"),
        "event": lambda: index.emit(event),
        "status": index.status,
    }
    found = {}
    for name, call in kinds.items():
        before = stats(server)["cpu"]
        for _ in range(UNITS):
            await call()
        found[name] = (stats(server)["cpu"] - before) / UNITS * 1e6
    return found


async def cell(clients: int, rate: float, seconds: float, home: Path) -> dict[str, Any]:
    """Run the flow with so many clients on a server of its own."""
    address = Address.parse("127.0.0.1")
    with (
        EmbeddedIndex(home, address=address) as started,
        redis.Redis.from_url(started.url) as server,
    ):
        async with Index(address.url, "scale") as index:
            await index.init(CONFIG, {"published": 0, "trained": 0, "admitted": 0})
            await index.join_warehouse("w", "node", home, (clients + 8) * SLAB)
            number = counts(clients)
            busy = 0.8 * number["generate"] / rate
            jobs = [(stage, n, busy) for stage, count in number.items() for n in range(count)]
            empty = stats(server)["memory"]
            context = multiprocessing.get_context("spawn")
            pipes = list[Connection]()
            processes = []
            parts = min(PROCESSES, -(-clients // 50))
            for part in range(parts):
                own, other = context.Pipe()
                processes.append(
                    context.Process(
                        target=process, args=(address.url, jobs[part::parts], other), daemon=True
                    )
                )
                processes[-1].start()
                pipes.append(own)
            await until(
                lambda: stats(server)["connections"] >= 2 * clients + 2
            )  # of each: for calls, and one that waits
            idle = await idle_cost(server)
            before = stats(server)
            began = time.perf_counter()
            groups = await feed(index, rate, seconds)
            while (ledger := await index.ledger())["generated"] - ledger[
                "in_flight"
            ] < groups * GROUP:
                assert time.perf_counter() - began < 10 * seconds + 4 * busy, (
                    "the flow does not keep up"
                )
                await asyncio.sleep(0.2)
            after = stats(server)
            wall = time.perf_counter() - began
            for pipe in pipes:
                pipe.send("stop")
            reports = [await asyncio.to_thread(pipe.recv) for pipe in pipes]
            for pipe in pipes:
                await asyncio.to_thread(pipe.recv)
            await until(lambda: server.info("clients")["blocked_clients"] >= clients)
            woken = stats(server)["cpu"]
            woke = time.time()
            await index.wake(ALL)
            last = max([await asyncio.to_thread(pipe.recv) for pipe in pipes])
            wake = {"cpu_ms": (stats(server)["cpu"] - woken) * 1e3, "last_ms": (last - woke) * 1e3}
            units = await unit_costs(index, server)
            for pipe, each in zip(pipes, processes, strict=True):
                pipe.send("end")
                each.join()
    rows = groups * GROUP
    assert sum(report["released"] for report in reports) == rows, "each sample is released once"
    latency = [each for report in reports for each in report["seconds"]]
    used = {key: after[key] - before[key] for key in after}
    return {
        "clients": clients,
        "samples": rows,
        "samples_per_second": rows / wall,
        "cpu_us_per_sample": used["cpu"] / rows * 1e6,
        "calls_per_sample": used["fcall"] / rows,
        "waits_per_sample": used["xread"] / rows,
        "empty_claims_share": sum(r["empty"] for r in reports)
        / sum(r["empty"] + r["found"] for r in reports),
        "bytes_per_sample": (used["in"] + used["out"]) / rows,
        "samples_per_core_second": rows / used["cpu"],
        "memory_per_client": (before["memory"] - empty) / clients,
        "idle_cpu_share": idle,
        "wake_all": wake,
        "latency_ms": {
            "p50": statistics.median(latency) * 1e3,
            "p99": sorted(latency)[int(0.99 * len(latency))] * 1e3,
        },
        "unit_cpu_us": units,
    }


async def until(condition: Callable[[], bool]) -> None:
    """Poll ``condition`` until it holds: the server sends no event for it."""
    deadline = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < deadline, "the clients do not connect"
        await asyncio.sleep(0.05)


async def idle_cost(server: redis.Redis) -> float:
    """Share of one core that the server takes while all clients wait."""
    before = stats(server)["cpu"]
    began = time.perf_counter()
    await asyncio.sleep(3.0)
    return (stats(server)["cpu"] - before) / (time.perf_counter() - began)


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--seconds", type=float, default=20.0, help="for which groups arrive")
    parser.add_argument("--rate", type=float, default=30.0, help="groups a second")
    options = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # a client has two connections
    cells = []
    for clients in options.clients:
        with tempfile.TemporaryDirectory(prefix="adk-") as home:
            cells.append(asyncio.run(cell(clients, options.rate, options.seconds, Path(home))))
        print(json.dumps(cells[-1]), flush=True)
    if options.json:
        options.json.write({"cells": cells, "files_before": soft})


if __name__ == "__main__":
    main()
