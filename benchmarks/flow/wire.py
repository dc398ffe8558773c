"""How near reads of another node's warehouse come to what a raw TCP socket moves on the same
loopback.

    python -m benchmarks.flow.wire [--repetitions 15] [--cases a a' c'] [--json FILE]
    python -m benchmarks.flow.wire --smoke

Two processes. One holds an arena with the rows and serves it twice: by ``WarehouseServer``, and by
a plain blocking socket that answers a number n with ``sendall`` of n bytes of one buffer. The other
reads: by ``RemoteWarehouse.read``, which ends with a tensor for each column, its offsets checked;
and by ``recv_into`` of the same number of bytes into one buffer that it keeps. Both ends of raw use
their buffer over and over, so raw never pays for memory. Repetitions alternate between the two,
medians are compared, the first of each is left out.

Columns as in the sample flow's benchmark: 3 int64 and 2 float32, 32 bytes a token.

    a    64 × 8192 dense, in order         a'   512 × 8192 dense, in order       a*    the rows of a, shuffled
    c'   1024 × U(16, 240) ragged, in order, of one block      c*    the same, shuffled, from 64 blocks

The second table is about connections: 16 callers at once, each reading 8 rows of c' again and
again, through 1, 2, 4 or 8 of them; alone, and while another caller reads a' all the time.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks import harness
from pipeline.data.arena import Arena, shared_memory_directory
from pipeline.data.blocks import PackedRows, pack
from pipeline.data.columns import Column, Packed, Schema
from pipeline.warehouse.client import RemoteWarehouse
from pipeline.warehouse.server import WarehouseServer

SECRET = b"the benchmark's own secret"
DTYPES = [torch.int64] * 3 + [torch.float32] * 2
LONG = 8192


@dataclass(frozen=True)
class Case:
    """``rows`` of ``blocks`` blocks; ``tokens`` in each row, or from U(16, 240) when it is 0."""

    name: str
    rows: int
    tokens: int
    blocks: int = 1
    shuffled: bool = False

    @property
    def columns(self) -> list[str]:
        kind = f"dense{self.tokens}" if self.tokens else "ragged"
        return [f"{kind}_{i}" for i in range(len(DTYPES))]


CASES = [
    Case("a", 64, LONG),
    Case("a'", 512, LONG),
    Case("a*", 64, LONG, shuffled=True),
    Case("c'", 1024, 0),
    Case("c*", 1024, 0, blocks=64, shuffled=True),
]
SMALL = Case("c'", 1024, 0)


def schema() -> Schema:
    dense = [Column.fixed(f"dense{LONG}_{i}", dtype, [LONG]) for i, dtype in enumerate(DTYPES)]
    return Schema(
        [*dense, *(Column.ragged(f"ragged_{i}", dtype) for i, dtype in enumerate(DTYPES))]
    )


def blocks_of(case: Case, seed: int = 0) -> Iterator[PackedRows]:
    rng = np.random.default_rng(seed)
    count = case.rows // case.blocks
    for _ in range(case.blocks):
        lengths = rng.integers(16, 241, count).tolist()
        rows: dict[str, Any] = {}
        for name, dtype in zip(case.columns, DTYPES, strict=True):
            values = torch.from_numpy(
                rng.integers(0, 1 << 30, count * case.tokens or sum(lengths))
            ).to(dtype)
            rows[name] = values.view(count, case.tokens) if case.tokens else values.split(lengths)
        yield pack(schema(), rows)


@dataclass(frozen=True)
class Placed:
    """Where a case's rows lie, in the order to ask for them: int64 [n] each."""

    case: Case
    blocks: np.ndarray
    offsets: np.ndarray
    slots: np.ndarray

    def first(self, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.blocks[:rows], self.offsets[:rows], self.slots[:rows]


def fill(path: Path, cases: Sequence[Case]) -> list[Placed]:
    """Make the arena at ``path`` and put the cases' rows into it."""
    made = [(case, list(blocks_of(case))) for case in cases]
    arena = Arena.create(path, sum(rows.nbytes for _, blocks in made for rows in blocks))
    at = 0
    number = 0
    placed = []
    for case, blocks in made:
        found = []
        for rows in blocks:
            number += 1
            rows.write_into(arena.slice(at, rows.nbytes), number)
            found += [(number, at, slot) for slot in range(rows.rows)]
            at += rows.nbytes
        order = (
            np.random.default_rng(1).permutation(case.rows)
            if case.shuffled
            else np.arange(case.rows)
        )
        blocks_, offsets, slots = np.array(found, np.int64)[order].T.copy()
        placed.append(Placed(case, blocks_, offsets, slots))
    return placed


def serve(path: Path, ports: Connection) -> None:
    """The other process: sends the ports of its warehouse and of its raw socket, and serves until
    it is killed."""
    torch.set_num_threads(1)

    def raw(listening: socket.socket) -> None:
        sock, _ = listening.accept()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        buffer = bytearray()
        while asked := sock.recv(8):
            nbytes = int.from_bytes(asked, "little")
            if len(buffer) != nbytes:
                buffer = bytearray(np.random.default_rng(2).bytes(nbytes))
            sock.sendall(buffer)

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            threading.Thread(target=raw, args=(listening,), daemon=True).start()
            async with WarehouseServer(Arena(path), schema(), secret=SECRET) as server:
                ports.send((server.address[1], listening.getsockname()[1]))
                await asyncio.Event().wait()

    asyncio.run(main())


@contextmanager
def served(path: Path) -> Iterator[tuple[int, int]]:
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=serve, args=(path, there), daemon=True)
    process.start()
    try:
        if not here.poll(60):
            raise TimeoutError("the serving process did not come up within 60 s")
        yield here.recv()
    finally:
        process.kill()
        process.join()


@dataclass(frozen=True)
class Result:
    """Medians of one case. ``nbytes`` are those of values and offsets, the same for both."""

    case: str
    rows: int
    nbytes: int
    raw_seconds: float
    read_seconds: float

    @property
    def ratio(self) -> float:
        return self.raw_seconds / self.read_seconds

    @property
    def raw_rate(self) -> float:
        return self.nbytes / self.raw_seconds / 1e6

    @property
    def read_rate(self) -> float:
        return self.nbytes / self.read_seconds / 1e6


@dataclass(frozen=True)
class Calls:
    """Small reads a second through ``connections``, alone and beside one caller that reads large
    batches."""

    connections: int
    alone: float
    beside_large: float


def nbytes_of(found: dict[str, Packed]) -> int:
    return sum(
        packed.values.nbytes + (packed.offsets.nbytes if packed.offsets is not None else 0)
        for packed in found.values()
    )


def raw_read(sock: socket.socket, memory: memoryview) -> float:
    started = time.perf_counter()
    sock.sendall(len(memory).to_bytes(8, "little"))
    at = 0
    while at < len(memory):
        at += sock.recv_into(memory[at:])
    return time.perf_counter() - started


async def compare(
    warehouse: RemoteWarehouse, raw: socket.socket, placed: Placed, repetitions: int
) -> Result:
    ask = (placed.blocks, placed.offsets, placed.slots, placed.case.columns)
    nbytes = nbytes_of(await warehouse.read(*ask))
    memory = memoryview(bytearray(nbytes))
    raws = []
    reads = []
    for _ in range(repetitions + 1):
        raws.append(raw_read(raw, memory))
        started = time.perf_counter()
        found = await warehouse.read(*ask)
        reads.append(time.perf_counter() - started)
        assert nbytes_of(found) == nbytes
        del found
    return Result(placed.case.name, placed.case.rows, nbytes, median(raws[1:]), median(reads[1:]))


async def calls(port: int, small: Placed, large: Placed, connections: int, seconds: float) -> Calls:
    warehouse = RemoteWarehouse(
        "127.0.0.1", port, schema(), secret=SECRET, timeout=60, connections=connections
    )

    async def rate(beside: bool) -> float:
        count = 0
        end = time.perf_counter() + seconds

        async def caller() -> None:
            nonlocal count
            while time.perf_counter() < end:
                await warehouse.read(*small.first(8), small.case.columns)
                count += 1

        async def large_caller() -> None:
            while time.perf_counter() < end:
                await warehouse.read(large.blocks, large.offsets, large.slots, large.case.columns)

        started = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            if beside:
                tasks.create_task(large_caller())
            for _ in range(16):
                tasks.create_task(caller())
        return count / (time.perf_counter() - started)

    try:
        return Calls(connections, await rate(False), await rate(True))
    finally:
        await warehouse.close()


async def measure(
    cases: Sequence[Case], repetitions: int, seconds: float, large: Case
) -> tuple[list[Result], list[Calls]]:
    with tempfile.TemporaryDirectory(prefix="wire-", dir=shared_memory_directory()) as home:
        placed = fill(Path(home) / "arena", [*cases, SMALL, large])
        with (
            served(Path(home) / "arena") as (port, raw_port),
            socket.create_connection(("127.0.0.1", raw_port)) as raw,
        ):
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            warehouse = RemoteWarehouse("127.0.0.1", port, schema(), secret=SECRET, timeout=60)
            results = [
                await compare(warehouse, raw, one, repetitions) for one in placed[: len(cases)]
            ]
            await warehouse.close()
            return results, [
                await calls(port, placed[-2], placed[-1], pool, seconds) for pool in (1, 2, 4, 8)
            ]


def table(results: Sequence[Result], counted: Sequence[Calls]) -> str:
    lines = ["case    rows       MB   raw MB/s  read MB/s   µs a row   of raw"]
    for r in results:
        lines.append(
            f"{r.case:<4}{r.rows:>8}{r.nbytes / 1e6:>9.2f}{r.raw_rate:>11.0f}{r.read_rate:>11.0f}"
            f"{1e6 * r.read_seconds / r.rows:>11.1f}{r.ratio:>9.2f}"
        )
    lines += ["", "connections   reads of 8 rows a second   beside a large one"]
    lines += [f"{c.connections:>11}{c.alone:>27.0f}{c.beside_large:>21.0f}" for c in counted]
    return "\n".join(lines)


def report(results: Sequence[Result], counted: Sequence[Calls]) -> dict[str, Any]:
    return {
        "cases": [{**asdict(r), "ratio": r.ratio} for r in results],
        "calls": [asdict(c) for c in counted],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--cases", nargs="*", choices=[case.name for case in CASES])
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement of calls")
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="few repetitions of the smaller cases: does it run at all?",
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    cases = [case for case in CASES if options.cases is None or case.name in options.cases]
    repetitions = options.repetitions
    seconds = options.seconds
    large = CASES[1]
    if options.smoke:
        cases = [case for case in CASES if case.name != "a'"]
        repetitions = 3
        seconds = 0.1
        large = CASES[0]
    results, counted = asyncio.run(measure(cases, repetitions, seconds, large))
    print(table(results, counted))
    if options.json:
        options.json.write(report(results, counted))


if __name__ == "__main__":
    main()
