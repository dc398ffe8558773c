"""The sample flow side by side with TransferQueue and Ray's object store, and with what memory
itself can do.

    pip install -e '.[bench]'
    python -m benchmarks.flow.samples [--peers ours,transferqueue,ray] [--cases a,a2,b,c,c2] [--repeats 3] [--json FILE]
    python -m benchmarks.flow.samples --quick --peers ours

Two processes for each arm, a producer and a consumer, in turns:

    producer   put ────────▶ visible to the other process's claim                                  put's time ends
    consumer                 claim + get ──▶ tensors to compute on, in the order asked             get's time ends
                                             ──▶ every byte read, compared with what was put       (not in the time)

Arms take turns within a round, so that other work on the machine slows all of them; ratios are
taken round by round, and medians of them reported. The first put of each arm and case goes into
untouched memory, and is reported apart. Peers run in two modes, every other round in each, and keep
whichever figure is better for them:

  TransferQueue   with ``polling_mode`` and one storage unit; and as it is by default (two units, no polling)
  Ray             ``ray.put`` and ``ray.get`` as they are by default; and with its zero-copy tensors switched on. Ray has
                  no claim: handing the reference over is left out of its time, which is in its favour

memcpy is numpy's copy of the same bytes, in one thread: into memory used before (warm), into newly
mapped pages (fresh), and into newly mapped pages of a shared file, as an arena is (shared).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib.util
import logging
import mmap
import multiprocessing
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import xxhash
from tensordict import TensorDict

from benchmarks import harness
from pipeline.data.arena import shared_memory_directory
from pipeline.data.columns import Column, Schema
from pipeline.index.client import StageSpec
from pipeline.index.embedded import EmbeddedIndex
from pipeline.warehouse.dock import Dock

DEADLINE = 300.0  # seconds that one order to a process may take
SWEPT_BYTES = 48 << 20  # copied to empty the caches: more than they hold
COLUMNS = (
    ("ids", torch.int64),
    ("labels", torch.int64),
    ("positions", torch.int64),
    ("logprobs", torch.float32),
    ("advantages", torch.float32),
)
TOKEN_BYTES = sum(dtype.itemsize for _, dtype in COLUMNS)
PEERS = ("transferqueue", "ray")
MODES = {
    "transferqueue": ("polling, 1 unit", "as by default"),
    "ray": ("as by default", "zero-copy tensors"),
}

# ── what is sent ──


@dataclass(frozen=True)
class Case:
    """``rows`` samples of ``shortest`` to ``longest`` tokens each, ragged when these differ; 32
    bytes a token."""

    name: str
    rows: int
    shortest: int
    longest: int

    @property
    def ragged(self) -> bool:
        return self.shortest != self.longest

    @property
    def lengths(self) -> torch.Tensor:
        """int64 [rows]: the same in every process."""
        generator = torch.Generator().manual_seed(self.rows)
        return torch.randint(self.shortest, self.longest + 1, (self.rows,), generator=generator)

    @property
    def nbytes(self) -> int:
        return int(self.lengths.sum()) * TOKEN_BYTES

    @property
    def label(self) -> str:
        tokens = (
            (f"U({self.shortest}..{self.longest}) ragged")
            if self.ragged
            else f"{self.longest} dense"
        )
        return f"{self.name}: {self.rows} x {tokens}"

    def make(self, seed: int = 0) -> TensorDict:
        """Random columns: dense [rows, tokens], or jagged nested tensors over packed values."""
        generator = torch.Generator().manual_seed(seed)
        lengths = self.lengths
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        rows = TensorDict({}, batch_size=[self.rows])
        for name, dtype in COLUMNS:
            values = torch.randint(0, 150_000, (int(offsets[-1]),), generator=generator).to(dtype)
            rows[name] = (
                torch.nested.nested_tensor_from_jagged(values, offsets)
                if self.ragged
                else values.view(self.rows, self.longest)
            )
        return rows


CASES = (
    Case("a", 64, 8192, 8192),
    Case("a2", 512, 8192, 8192),
    Case("b", 1024, 128, 128),
    Case("c", 64, 512, 8192),
    Case("c2", 1024, 16, 240),
)
# as many rows, 64 times the bytes
THIN = Case("thin", 512, 128, 128)
FAT = Case("fat", 512, 8192, 8192)
ONE = Case("one", 1, 8192, 8192)
SINGLE = Case("single", 1, 128, 128)
TINY = Case("tiny", 1, 1, 1)


def packed(column: Any) -> tuple[torch.Tensor, list[int]]:
    """Any batch of rows as flat values and the rows' lengths."""
    if isinstance(column, torch.Tensor) and not column.is_nested:
        return column.reshape(-1), [column[0].numel()] * len(column)
    if isinstance(column, torch.Tensor) and column.layout == torch.jagged:
        nested: Any = column
        if nested.lengths() is None and int(nested.offsets()[0]) == 0:
            return nested.values().reshape(-1), nested.offsets().diff().tolist()
    parts = column.tolist() if not isinstance(column, torch.Tensor) else list(column.unbind())
    return torch.cat([part.reshape(-1) for part in parts]), [part.numel() for part in parts]


def fingerprint(rows: Mapping[str, Any] | TensorDict) -> dict[str, str]:
    """A checksum of each column: its dtype, its rows' lengths, every byte in order."""
    sums = {}
    for name, _ in COLUMNS:
        values, lengths = packed(rows[name])
        digest = xxhash.xxh3_64(f"{values.dtype} {lengths}".encode())
        digest.update(values.contiguous().view(torch.uint8).numpy().data)
        sums[name] = digest.hexdigest()
    return sums


def unordered(rows: Mapping[str, Any] | TensorDict) -> int:
    """A checksum of whole rows, whatever their order."""
    columns = [packed(rows[name]) for name, _ in COLUMNS]
    digests = [xxhash.xxh3_64() for _ in columns[0][1]]
    for values, lengths in columns:
        for digest, row in zip(digests, values.split(lengths), strict=True):
            digest.update(row.contiguous().view(torch.uint8).numpy().data)
    return sum(digest.intdigest() for digest in digests)


def stamp(rows: TensorDict, turn: int) -> None:
    """Change the first token of every row, so that another turn's rows differ from this one's."""
    for name, dtype in COLUMNS:
        column: Any = rows[name]
        first = torch.arange(len(rows), dtype=torch.int64).add(1_000_000 * (turn + 1)).to(dtype)
        if column.is_nested:
            column.values()[column.offsets()[:-1]] = first
        else:
            column[:, 0] = first


# ── memory itself ──


class Memory:
    """What copying the case's bytes takes, in seconds."""

    def __init__(self, case: Case, directory: Path) -> None:
        self._parts = [
            packed(column)[0].view(torch.uint8).numpy() for column in case.make().values()
        ]
        self._directory = directory
        self._warm = np.zeros(case.nbytes, np.uint8)
        self._copy(self._warm)

    def _copy(self, target: np.ndarray) -> float:
        began = time.perf_counter()
        at = 0
        for part in self._parts:
            np.copyto(target[at : at + part.nbytes], part)
            at += part.nbytes
        return time.perf_counter() - began

    def measure(self) -> dict[str, float]:
        size = self._warm.nbytes
        warm = statistics.median(self._copy(self._warm) for _ in range(3))
        anonymous = mmap.mmap(-1, size)
        fresh = self._copy(np.frombuffer(anonymous, np.uint8))
        with tempfile.TemporaryFile(dir=self._directory) as file:
            file.truncate(size)
            file_map = mmap.mmap(file.fileno(), size)
            shared = self._copy(np.frombuffer(file_map, np.uint8))
        return {"warm": warm, "fresh": fresh, "shared": shared}


# ── arms: each used by two processes ──


class Arm(Protocol):
    """One way from the producer to the consumer. Times are in seconds."""

    ordered: bool  # whether rows are promised in the order in which they were put

    def open(self, case: Case, flow: str) -> None:
        """Begin with an empty flow of ``case``'s samples; both processes call it, the producer
        first."""

    def leave(self) -> None:
        """Both processes leave the flow, the consumer first; its samples are not needed any
        more."""

    def put(self, rows: TensorDict) -> tuple[float, Any]:
        """Returns what the consumer needs to get the rows, if anything."""

    def get(self, reference: Any, count: int) -> tuple[float, TensorDict]: ...

    def done(self, reference: Any) -> float:
        """The rows just got are not needed any more."""

    def single_puts(self, rows: Sequence[TensorDict]) -> dict[str, float]:
        """Put rows one by one, as fast as one client can: seconds of each way to do it; each way
        puts all rows."""


class Ours:
    """The dock. The only class here that knows its calls; both processes open the same run.

    Bytes lie in an arena of a few batches, so that after a few turns all of it was written before:
    it is *warm*.
    """

    ordered = True

    def __init__(self, url: str, directory: str, worker: str) -> None:
        self._url = url
        self._directory = Path(directory)
        self._worker = worker
        self._runner = asyncio.Runner()
        self._opened = contextlib.AsyncExitStack()
        self._home: Path | None = None

    def open(self, case: Case, flow: str) -> None:
        columns = [
            Column.ragged(name, dtype) if case.ragged else Column.fixed(name, dtype, [case.longest])
            for name, dtype in COLUMNS
        ]
        schema = Schema(columns)
        self._names = [column.name for column in columns]
        stage = StageSpec("consume", "rows", needs=schema.mask(self._names), makes=0, releases=True)
        # a recipe's default, or four batches
        self._open(flow, schema, [stage], max(4 * case.nbytes, 64 << 20))

    def _open(self, flow: str, schema: Schema, stages: list[StageSpec], arena: int) -> None:
        self._arena_bytes = arena
        self._home = self._directory / flow
        self._dock = self._runner.run(
            self._opened.enter_async_context(
                Dock.open(
                    self._url,
                    flow,
                    schema,
                    stages,
                    worker=self._worker,
                    directory=self._home,
                    arena=arena,
                )
            )
        )

    def put(self, rows: TensorDict) -> tuple[float, Any]:
        async def put() -> float:
            began = time.perf_counter()
            await self._dock.put(rows)
            return time.perf_counter() - began

        return self._runner.run(put()), None

    def get(self, reference: Any, count: int) -> tuple[float, TensorDict]:
        async def get() -> tuple[float, TensorDict]:
            began = time.perf_counter()
            claim = await self._dock.claim("consume", most=count, timeout=10)
            assert claim is not None, "what was put was not there to claim"
            self._claim = claim
            rows = await self._dock.fetch(self._claim, self._names)
            return time.perf_counter() - began, rows

        return self._runner.run(get())

    def done(self, reference: Any) -> float:
        async def commit() -> float:
            began = time.perf_counter()
            await self._dock.commit(self._claim, range(len(self._claim)), None)
            return time.perf_counter() - began

        return self._runner.run(commit())

    def single_puts(self, rows: Sequence[TensorDict]) -> dict[str, float]:
        async def together() -> float:
            began = time.perf_counter()
            await asyncio.gather(*(self._dock.put(row) for row in rows))
            return time.perf_counter() - began

        return {"all at once": self._runner.run(together())}

    # ── what the peers have nothing like ──

    def open_tiny(self, flow: str, stages: int, rows: int) -> None:
        """A flow of rows with one tiny column for each of ``stages`` stages, each made by the one
        before; the last releases the rows."""
        schema = Schema([Column.scalar(f"tiny{i}", torch.int64) for i in range(stages)])
        specs = [
            StageSpec(
                f"stage{i}",
                "rows",
                1 << i,
                1 << i + 1 if i < stages - 1 else 0,
                releases=i == stages - 1,
            )
            for i in range(stages)
        ]
        self._open(flow, schema, specs, (64 << 20) + 512 * rows)

    def stream(self, rows: int, batch: int, stages: int) -> tuple[float, float, int]:
        """Put ``rows`` rows and work all stages, each in a task of its own: when the first put
        began and the last commit ended, on the clock that all processes share, and how many rows
        the last stage committed here."""

        async def feed() -> float:
            began = time.perf_counter()
            for at in range(0, rows, batch):
                await self._dock.put({"tiny0": torch.arange(at, at + batch)})
            return began

        async def work(i: int, fed: asyncio.Task[float]) -> tuple[float, int]:
            last = 0.0
            count = 0
            made = f"tiny{i + 1}"
            while True:
                claim = await self._dock.claim(f"stage{i}", most=batch, timeout=1.0)
                if claim is None:
                    if fed.done():
                        return last, count
                    continue
                outputs = {made: torch.arange(len(claim))} if i < stages - 1 else None
                await self._dock.commit(claim, range(len(claim)), outputs)
                last = time.perf_counter()
                count = count + len(claim)

        async def run() -> tuple[float, float, int]:
            async with asyncio.TaskGroup() as tasks:
                fed = tasks.create_task(feed())
                workers = [tasks.create_task(work(i, fed)) for i in range(stages)]
            return fed.result(), *workers[-1].result()

        return self._runner.run(run())

    def fill(self, rows: int) -> None:
        async def fill() -> None:
            for at in range(0, rows, 10_000):
                await self._dock.put({"tiny0": torch.arange(at, min(rows, at + 10_000))})

        self._runner.run(fill())

    def turnover(self, batch: int, turns: int) -> list[tuple[float, float]]:
        """Claim and commit ``batch`` rows, as many put before each turn: the index stays as full as
        it is."""

        async def turn() -> tuple[float, float]:
            await self._dock.put({"tiny0": torch.arange(batch)})
            began = time.perf_counter()
            claim = await self._dock.claim("stage0", most=batch, timeout=10)
            claimed = time.perf_counter()
            assert claim is not None
            assert len(claim) == batch
            await self._dock.commit(claim, range(batch), None)
            return claimed - began, time.perf_counter() - claimed

        return [self._runner.run(turn()) for _ in range(turns)]

    def resident(self) -> tuple[int, int]:
        """Bytes that the arena's file holds in memory, and that it may hold."""
        assert self._home is not None
        blocks = sum(path.stat().st_blocks for path in self._home.iterdir() if path.is_file())
        return 512 * blocks, self._arena_bytes

    def leave(self) -> None:
        if self._home is not None:
            if self._worker == "producer":  # the last to leave
                self._runner.run(self._dock.writer.flush())
                self._runner.run(self._dock.index.erase())
                shutil.rmtree(self._home)
            self._runner.run(self._opened.aclose())
            self._home = None


class TransferQueue:
    """TransferQueue's own client, asynchronous, on one long-lived loop, as its documentation asks.

    A fetch hands rows out by their global index, and indexes of cleared rows are used again in the
    order of clearing, so rows come back in another order than they were put; its rows are compared
    as a set.
    """

    ordered = False

    def __init__(self) -> None:
        import transfer_queue

        transfer_queue.interface._maybe_create_tq_client()
        self._client = transfer_queue.get_client()
        self._tq = transfer_queue
        self._runner = asyncio.Runner()
        self._flow = ""
        self._fields = [name for name, _ in COLUMNS]

    def open(self, case: Case, flow: str) -> None:
        self._flow = flow

    def put(self, rows: TensorDict) -> tuple[float, Any]:
        async def put() -> float:
            began = time.perf_counter()
            await self._client.async_put(rows, partition_id=self._flow)
            return time.perf_counter() - began

        return self._runner.run(put()), None

    def get(self, reference: Any, count: int) -> tuple[float, TensorDict]:
        async def get() -> tuple[float, TensorDict]:
            began = time.perf_counter()
            self._meta = await self._client.async_get_meta(
                data_fields=self._fields,
                batch_size=count,
                partition_id=self._flow,
                mode="fetch",
                task_name="consume",
            )
            rows = await self._client.async_get_data(self._meta)
            return time.perf_counter() - began, rows

        return self._runner.run(get())

    def done(self, reference: Any) -> float:
        async def clear() -> float:
            began = time.perf_counter()
            await self._client.async_clear_samples(self._meta)
            return time.perf_counter() - began

        return self._runner.run(clear())

    def single_puts(self, rows: Sequence[TensorDict]) -> dict[str, float]:
        async def one_by_one() -> float:
            began = time.perf_counter()
            for i, row in enumerate(rows):
                await self._tq.async_kv_put(key=f"one-{i}", partition_id=self._flow, fields=row)
            return time.perf_counter() - began

        async def together() -> float:
            limit = asyncio.Semaphore(64)

            async def put(i: int, row: TensorDict) -> None:
                async with limit:
                    await self._tq.async_kv_put(
                        key=f"many-{i}", partition_id=self._flow, fields=row
                    )

            began = time.perf_counter()
            await asyncio.gather(*(put(i, row) for i, row in enumerate(rows)))
            return time.perf_counter() - began

        return {
            "one after another": self._runner.run(one_by_one()),
            "64 in flight": self._runner.run(together()),
        }

    def leave(self) -> None: ...


class RayStore:
    """``ray.put`` in one actor, ``ray.get`` in another."""

    ordered = True

    def __init__(self) -> None:
        import ray

        self._ray = ray

    def open(self, case: Case, flow: str) -> None: ...

    def put(self, rows: TensorDict) -> tuple[float, Any]:
        began = time.perf_counter()
        reference = self._ray.put(rows)
        return time.perf_counter() - began, reference

    def get(self, reference: Any, count: int) -> tuple[float, TensorDict]:
        began = time.perf_counter()
        rows = self._ray.get(reference)
        return time.perf_counter() - began, rows

    def done(self, reference: Any) -> float:
        return 0.0  # the store drops what has no reference left

    def single_puts(self, rows: Sequence[TensorDict]) -> dict[str, float]:
        began = time.perf_counter()
        references = [self._ray.put(row) for row in rows]
        taken = time.perf_counter() - began
        assert len(references) == len(rows)
        return {"one after another": taken}

    def leave(self) -> None: ...


# ── processes ──

# a fingerprint; and one without regard to order, for arms that keep none
Sums = tuple[dict[str, str], int | None]


class Side:
    """One of an arm's two processes: makes the rows it puts, and fingerprints the rows it gets."""

    def __init__(self, make: Callable[..., Arm], *arguments: Any) -> None:
        quietly()
        self._arm = make(*arguments)
        self._turn = 0
        self._swept = np.zeros((2, SWEPT_BYTES), np.uint8)

    def open(self, case: Case, flow: str, with_rows: bool = False) -> None:
        self._rows = case.make() if with_rows else None
        self._arm.open(case, flow)

    def put(self) -> tuple[float, list[Any], Sums]:
        assert self._rows is not None
        self._turn += 1
        stamp(self._rows, self._turn)
        seconds, reference = self._arm.put(self._rows)
        sums = fingerprint(self._rows), None if self._arm.ordered else unordered(self._rows)
        # in a list, Ray hands a reference on instead of its value
        return seconds, [reference], sums

    def get(
        self, reference: list[Any], count: int, emptied: bool = False
    ) -> tuple[float, float, float, Sums]:
        """Seconds of getting, of reading every byte once, and of being done; and the rows'
        checksums. ``emptied``: after other work of this process has pushed everything out of the
        processor's caches."""
        if emptied:
            np.copyto(self._swept[0], self._swept[1])
        seconds, rows = self._arm.get(reference[0], count)
        began = time.perf_counter()
        columns = fingerprint(rows)
        read = time.perf_counter() - began
        sums = columns, None if self._arm.ordered else unordered(rows)
        del rows
        return seconds, read, self._arm.done(reference[0]), sums

    def single_puts(self, count: int) -> dict[str, float]:
        rows = []
        for i in range(count):
            rows.append(SINGLE.make())
            rows[i]["ids"][:, 0] = i
        return self._arm.single_puts(rows)

    def single_ids(self, reference: list[Any], count: int) -> list[int]:
        """The numbers of ``count`` rows that were put one by one, sorted."""
        rows = self._arm.get(reference[0], count)[1]
        ids, lengths = packed(rows["ids"])
        assert set(lengths) == {SINGLE.longest}, f"rows of {set(lengths)} tokens came back"
        found = sorted(ids.view(count, -1)[:, 0].tolist())
        del rows, ids
        self._arm.done(reference[0])
        return found

    def special(self, name: str, *arguments: Any) -> Any:
        """What only one arm can do."""
        return getattr(self._arm, name)(*arguments)

    def leave(self) -> None:
        self._arm.leave()


def _serve(orders: Connection, arguments: tuple[Any, ...]) -> None:
    try:
        side = Side(*arguments)
        orders.send((True, None))
        while True:
            name, given = orders.recv()
            try:
                orders.send((True, getattr(side, name)(*given)))
            except Exception:
                orders.send((False, traceback.format_exc()))
    except EOFError:
        return
    except Exception:
        orders.send((False, traceback.format_exc()))


class Process:
    """A :class:`Side` in a process of its own; its first result says that it is up."""

    def __init__(self, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._orders, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, arguments), daemon=True)
        self._process.start()
        theirs.close()

    def start(self, name: str, *arguments: Any) -> None:
        self._orders.send((name, arguments))

    def result(self) -> Any:
        if not self._orders.poll(DEADLINE):
            raise TimeoutError(f"process {self._process.pid} did not answer for {DEADLINE:.0f} s")
        fine, value = self._orders.recv()
        if not fine:
            raise RuntimeError(f"in process {self._process.pid}:\n{value}")
        return value

    def call(self, name: str, *arguments: Any) -> Any:
        self.start(name, *arguments)
        return self.result()

    def close(self) -> None:
        self._orders.close()  # which ends it
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()


class Actor:
    """A :class:`Side` as a Ray actor."""

    def __init__(self, *arguments: Any) -> None:
        import ray

        self._ray = ray
        self._actor: Any = ray.remote(num_cpus=1)(Side).remote(*arguments)

    def call(self, name: str, *arguments: Any) -> Any:
        return self._ray.get(getattr(self._actor, name).remote(*arguments), timeout=DEADLINE)

    def close(self) -> None:
        self._ray.kill(self._actor)


@dataclass
class Pair:
    """An arm at work: its two processes."""

    name: str
    mode: str
    producer: Any
    consumer: Any
    flows: int = 0

    def open(self, case: Case) -> None:
        flow = self.next_flow(case.name)
        self.producer.call("open", case, flow, True)
        self.consumer.call("open", case, flow)

    def next_flow(self, name: str) -> str:
        """Leave the flow that is open; the name of the next one."""
        if self.flows:
            self.consumer.call("leave")
            self.producer.call("leave")
        self.flows += 1
        return f"{name}-{self.flows}"

    def turn(self, case: Case, emptied: bool = False) -> Turn:
        put, reference, sent = self.producer.call("put")
        get, read, done, came = self.consumer.call("get", reference, case.rows, emptied)
        wrong = [name for name in sent[0] if sent[0][name] != came[0][name]]
        if wrong and (sent[1] is None or sent[1] != came[1]):
            raise AssertionError(
                f"{self.name} ({self.mode}), case {case.label}: columns {wrong} came back changed"
            )
        return Turn(put, get, read, done, in_order=not wrong)

    def close(self) -> None:
        self.consumer.close()
        self.producer.close()


@dataclass(frozen=True)
class Turn:
    """Seconds of one batch's way; ``read`` is the first reading of all bytes that came, checksums
    with it."""

    put: float
    get: float
    read: float
    done: float
    in_order: bool


@contextlib.contextmanager
def peers_running(wanted: Sequence[str], mode: int) -> Iterator[list[Pair]]:
    """Ray, and the peers on it, in one of their two modes."""
    if not wanted:
        yield []
        return
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    # what it would take itself, without its warning
    os.environ["TQ_NUM_THREADS"] = str(min(8, os.cpu_count() or 8))
    os.environ["RAY_ENABLE_ZERO_COPY_TORCH_TENSORS"] = str(mode)
    import ray

    ray.init(
        address="local",
        num_cpus=16,  # places for actors; the processors are what they are
        object_store_memory=1 << 30,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    pairs: list[Pair] = []
    try:
        if "transferqueue" in wanted:
            import transfer_queue
            from omegaconf import OmegaConf

            polling = {
                "controller": {"polling_mode": True},
                "backend": {"SimpleStorage": {"num_data_storage_units": 1}},
            }
            transfer_queue.init(OmegaConf.create(polling if mode == 0 else {}))
            pairs.append(
                Pair(
                    "transferqueue",
                    MODES["transferqueue"][mode],
                    Actor(TransferQueue),
                    Actor(TransferQueue),
                )
            )
        if "ray" in wanted:
            pairs.append(Pair("ray", MODES["ray"][mode], Actor(RayStore), Actor(RayStore)))
        yield pairs
    finally:
        for pair in pairs:
            pair.close()
        if "transferqueue" in wanted:
            transfer_queue.close()
        ray.shutdown()


# ── measuring ──


@dataclass(frozen=True)
class Round:
    """One arm's turns with one case in one round. ``cold`` is the first, ``turns`` those after
    it."""

    number: int
    mode: str
    memory: dict[str, float]
    cold: Turn
    turns: tuple[Turn, ...]

    def seconds(self, what: str) -> float:
        return statistics.median(getattr(turn, what) for turn in self.turns)


@dataclass
class Measured:
    """All that was measured: rounds by case and arm; and of single samples by arm and mode."""

    cases: dict[str, dict[str, list[Round]]] = field(default_factory=dict)
    one: dict[str, dict[str, list[Turn]]] = field(default_factory=dict)
    emptied: dict[str, list[float]] = field(default_factory=dict)  # seconds of get, round by round
    singles: dict[str, dict[str, list[float]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    cases: tuple[Case, ...]
    peers: tuple[str, ...]
    ours: bool = True
    rounds: int = 6
    turns: int = 5
    one_turns: int = 500  # over all rounds
    single_puts: int = 2000  # each round; a tenth of it for peers
    streams: int = 3
    stream_rows: int = 51_200
    filled: tuple[int, int] = (1_000, 1_000_000)
    filled_turns: int = 100
    memory_turns: int = 100
    one: Case = ONE
    thin: Case = THIN  # as many rows as fat, with a part of its bytes
    fat: Case = FAT


def quick(plan: Plan) -> Plan:
    """The same, small: does it run, and are the rows right? Its figures say little."""
    small = tuple(
        replace(
            case,
            rows=max(2, case.rows // 16),
            shortest=max(2, case.shortest // 32),
            longest=case.longest // 8,
        )
        if case.ragged
        else replace(
            case,
            rows=max(2, case.rows // 16),
            shortest=case.longest // 16,
            longest=case.longest // 16,
        )
        for case in plan.cases
    )
    thin, fat = (
        replace(case, rows=32, shortest=n, longest=n)
        for case, n in ((plan.thin, 8), (plan.fat, 512))
    )
    return replace(
        plan,
        cases=small,
        rounds=2 if plan.peers else 1,
        turns=2,
        one_turns=20,
        single_puts=100,
        streams=1,
        stream_rows=2_048,
        filled=(1_000, 5_000),
        filled_turns=10,
        memory_turns=20,
        thin=thin,
        fat=fat,
    )


def measure(plan: Plan, home: Path, say: Callable[[str], None]) -> tuple[Measured, dict[str, Any]]:
    """Everything in ``plan``; ``home`` lies in shared memory.

    Returns what the arms did, and what only ours can do.
    """
    found = Measured()
    alone = {}
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(our_side(home)) if plan.ours else None
        for number in range(plan.rounds):
            with peers_running(plan.peers, number % 2) as pairs:
                arms = ([ours] if ours else []) + pairs
                # who goes first has the colder caches
                arms = arms[number % len(arms) :] + arms[: number % len(arms)]
                for case in plan.cases:
                    say(f"round {number + 1} of {plan.rounds}, {case.label}")
                    memory = Memory(case, home).measure()
                    for arm in arms:
                        _measure_case(found, arm, case, number, memory, plan.turns)
                if ours:
                    say(f"round {number + 1} of {plan.rounds}, single samples")
                    for case in (plan.thin, plan.fat):
                        ours.open(case)
                        turns = [ours.turn(case, emptied=True).get for _ in range(plan.turns + 1)][
                            1:
                        ]
                        found.emptied.setdefault(case.name, []).append(statistics.median(turns))
                    for arm in arms:
                        _measure_one(found, arm, plan.one, -(-plan.one_turns // plan.rounds))
                        _measure_singles(
                            found, arm, plan.single_puts if arm is ours else plan.single_puts // 10
                        )
                gc.collect()
        if ours:
            alone = our_own(ours, plan, say)
    return found, alone


def _measure_case(
    found: Measured, arm: Pair, case: Case, number: int, memory: dict[str, float], turns: int
) -> None:
    arm.open(case)
    cold = arm.turn(case)
    rounds = found.cases.setdefault(case.name, {}).setdefault(arm.name, [])
    rounds.append(
        Round(number, arm.mode, memory, cold, tuple(arm.turn(case) for _ in range(turns)))
    )


def _measure_one(found: Measured, arm: Pair, case: Case, turns: int) -> None:
    arm.open(case)
    for _ in range(3):
        arm.turn(case)
    found.one.setdefault(arm.name, {}).setdefault(arm.mode, []).extend(
        arm.turn(case) for _ in range(turns)
    )


def _measure_singles(found: Measured, arm: Pair, count: int) -> None:
    arm.open(SINGLE)
    ways = arm.producer.call("single_puts", count)
    for way, seconds in ways.items():
        found.singles.setdefault(arm.name, {}).setdefault(f"{arm.mode}, {way}", []).append(
            count / seconds
        )
    if arm.name != "ray":  # a reference for each row is all there is to claim
        came = arm.consumer.call("single_ids", [None], count * len(ways))
        if came != sorted(list(range(count)) * len(ways)):
            raise AssertionError(
                f"{arm.name}: {count * len(ways)} single puts, and other rows came back"
            )


@contextlib.contextmanager
def our_side(home: Path) -> Iterator[Pair]:
    """The dock in two processes, on an embedded index server."""
    with EmbeddedIndex(home / "index") as server:
        producer, consumer = (
            Process(Ours, server.url, str(home / "flows"), worker)
            for worker in ("producer", "consumer")
        )
        pair = Pair("ours", "", producer, consumer)
        try:
            producer.result()
            consumer.result()
            yield pair
        finally:
            pair.close()


def our_own(pair: Pair, plan: Plan, say: Callable[[str], None]) -> dict[str, Any]:
    """What the issue asks of the dock alone: the index's speed, its speed as it fills, and the
    arena's memory."""
    both = (pair.producer, pair.consumer)
    batch = 256
    stages = 3
    alone: dict[str, Any] = {}

    def open_tiny(name: str, count: int, rows: int) -> None:
        flow = pair.next_flow(name)
        for side in both:
            side.call("special", "open_tiny", flow, count, rows)

    for clients in (1, 2):
        say(f"index alone, {clients} client{'s' * (clients > 1)}")
        rates = []
        for _ in range(plan.streams):
            open_tiny("stream", stages, plan.stream_rows)
            for side in both[:clients]:
                side.start("special", "stream", plan.stream_rows // clients, batch, stages)
            results = [side.result() for side in both[:clients]]
            ended = sum(rows for *_, rows in results)
            if ended != plan.stream_rows:
                raise AssertionError(
                    f"{plan.stream_rows} rows went in, {ended} came through {stages} stages"
                )
            rates.append(
                ended / (max(last for _, last, _ in results) - min(first for first, *_ in results))
            )
        alone[f"stream_{clients}"] = rates

    for rows in plan.filled:
        say(f"index with {rows:,} rows")
        open_tiny("filled", 1, rows)
        pair.producer.call("special", "fill", rows)
        times = pair.producer.call("special", "turnover", batch, plan.filled_turns)
        alone[f"filled_{rows}"] = {
            "rows": rows,
            "claim": statistics.median(claim for claim, _ in times),
            "commit": statistics.median(commit for _, commit in times),
        }

    say(f"memory over {plan.memory_turns} turns")
    case = plan.cases[0]
    pair.open(case)
    resident = []
    # one batch waits while the next is written: two live ones at most
    ahead = pair.producer.call("put")
    for _ in range(plan.memory_turns):
        following = pair.producer.call("put")
        sums = pair.consumer.call("get", ahead[1], case.rows)[3]
        if sums != ahead[2]:
            raise AssertionError(f"ours, case {case.label}: the rows of another turn came back")
        ahead = following
        resident.append(pair.consumer.call("special", "resident"))
    alone["memory"] = {
        "live": 2 * case.nbytes,
        "configured": resident[0][1],
        "early": resident[len(resident) // 5][0],
        "late": resident[-1][0],
    }
    return alone


# ── telling ──


@dataclass(frozen=True)
class Row:
    """One line of the issue's table: what was measured, the goal, and whether it was met (None:
    nothing to compare)."""

    name: str
    measured: str
    goal: str
    met: bool | None
    figures: dict[str, Any]


def against(rounds: Sequence[Round], ours: Sequence[Round], what: str) -> dict[str, Any]:
    """A peer's better mode for ``what``: its seconds, and how many times ours they are (median over
    shared rounds)."""
    own = {r.number: r.seconds(what) for r in ours}
    best: dict[str, Any] = {}
    for mode in {r.mode for r in rounds}:
        chosen = [r for r in rounds if r.mode == mode]
        entry: dict[str, Any] = {
            "mode": mode,
            "seconds": statistics.median(r.seconds(what) for r in chosen),
        }
        ratios = [r.seconds(what) / own[r.number] for r in chosen if r.number in own]
        if ratios:
            entry["ratio"] = statistics.median(ratios)
        order = "ratio" if ratios else "seconds"
        if not best or entry[order] < best[order]:
            best = entry
    return best


def case_report(case: Case, arms: Mapping[str, Sequence[Round]]) -> dict[str, Any]:
    """One case: MB/s and us per sample of each arm, and ratios to ours."""
    first = next(iter(arms.values()))
    ours = arms.get("ours", ())
    memory = {kind: statistics.median(r.memory[kind] for r in first) for kind in first[0].memory}
    report: dict[str, Any] = {
        "case": case.name,
        "label": case.label,
        "rows": case.rows,
        "bytes": case.nbytes,
        "memcpy_mb_per_s": {kind: case.nbytes / seconds / 1e6 for kind, seconds in memory.items()},
        "arms": {},
    }
    for name, rounds in arms.items():
        arm: dict[str, Any] = {}
        for what in ("put", "get", "read"):
            entry = against(rounds, ours, what)
            arm[what] = {
                "mode": entry["mode"],
                "us": entry["seconds"] * 1e6,
                "us_per_sample": entry["seconds"] * 1e6 / case.rows,
                "mb_per_s": case.nbytes / entry["seconds"] / 1e6,
                "times_ours": entry.get("ratio"),
            }
        cold = statistics.median(r.cold.put for r in rounds)
        arm["cold_put"] = {"us": cold * 1e6, "mb_per_s": case.nbytes / cold / 1e6}
        arm["share_of_memcpy"] = {
            "warm": statistics.median(r.memory["warm"] / r.seconds("put") for r in rounds),
            **{
                kind: statistics.median(r.memory[kind] / r.cold.put for r in rounds)
                for kind in ("fresh", "shared")
            },
        }
        arm["turns_out_of_order"] = sum(
            not turn.in_order for r in rounds for turn in (r.cold, *r.turns)
        )
        arm["turns"] = sum(1 + len(r.turns) for r in rounds)
        report["arms"][name] = arm
    return report


def goals(
    plan: Plan, reports: Mapping[str, Any], found: Measured, alone: Mapping[str, Any]
) -> list[Row]:
    """The issue's table, with what was measured."""
    rows: list[Row] = []

    def row(name: str, measured: str, goal: str, met: bool | None, **figures: Any) -> None:
        rows.append(Row(name, measured, goal, met, figures))

    def times(case: str, what: str) -> float | None:
        peer = reports[case]["arms"].get("transferqueue")
        return peer[what]["times_ours"] if peer else None

    def compare(case: str, what: str, floor: float, most_us: float | None = None) -> None:
        ratio = times(case, what)
        us = reports[case]["arms"]["ours"][what]["us_per_sample"]
        goal = (f">= {floor:g} x TransferQueue") + (
            f", <= {most_us:g} us a sample" if most_us else ""
        )
        text = ("no TransferQueue" if ratio is None else f"{ratio:.1f} x TransferQueue") + (
            f", {us:.1f} us a sample"
        )
        fine = (ratio is None or ratio >= floor) and (most_us is None or us <= most_us)
        judged = ratio is not None or (most_us is not None and not fine)
        row(f"{what}, {case}", text, goal, fine if judged else None, ratio=ratio, us_per_sample=us)

    for case in ("a", "a2"):
        if case in reports:
            share = reports[case]["arms"]["ours"]["share_of_memcpy"]
            row(
                f"put, {case}",
                f"{share['warm']:.2f} x warm memcpy (warm arena), {share['fresh']:.2f} x fresh "
                f"memcpy (fresh arena; {share['shared']:.2f} x fresh shared pages)",
                ">= 0.8 x memcpy, warm or fresh",
                share["warm"] >= 0.8 or share["fresh"] >= 0.8,
                **share,
            )
            compare(case, "get", 20)
    fat = found.emptied[plan.fat.name]
    thin = found.emptied[plan.thin.name]
    ratio = statistics.median(a / b for a, b in zip(fat, thin, strict=True))
    by_bytes = plan.fat.nbytes / plan.thin.nbytes
    row(
        "get, same rows, other bytes, caches emptied before",
        f"{by_bytes:.0f} x the bytes take {ratio:.2f} x the time "
        f"({statistics.median(thin) * 1e6:.0f} us and {statistics.median(fat) * 1e6:.0f} us)",
        "independent of the bytes (<= 1.25 x)",
        ratio <= 1.25,
        ratio=ratio,
        bytes_ratio=by_bytes,
        thin_us=statistics.median(thin) * 1e6,
        fat_us=statistics.median(fat) * 1e6,
    )
    if "a" in reports and "a2" in reports:
        small, large = (reports[case]["arms"]["ours"]["get"] for case in ("a", "a2"))
        row(
            "get, a and a2",
            f"{small['us']:.0f} us and {large['us']:.0f} us; {small['us_per_sample']:.1f} and "
            f"{large['us_per_sample']:.1f} us a sample",
            "no more a sample when there are 8 x the bytes",
            large["us_per_sample"] <= small["us_per_sample"],
            a_us=small["us"],
            a2_us=large["us"],
        )
    if "b" in reports:
        compare("b", "put", 5, 10)
        compare("b", "get", 20, 10)
    if "c2" in reports:
        compare("c2", "put", 50, 15)
        compare("c2", "get", 20, 15)

    turns = [1e3 * (t.put + t.get + t.done) for t in found.one["ours"][""]]
    p50, p99 = np.percentile(turns, [50, 99])
    theirs = [
        np.percentile([1e3 * (t.put + t.get) for t in chosen], [50, 99])
        for chosen in found.one.get("transferqueue", {}).values()
    ]
    best = min(theirs, key=lambda pair: pair[0], default=None)
    row(
        f"one sample of {plan.one.longest} tokens",
        f"put + claim + get + commit: p50 {p50:.2f} ms, p99 {p99:.2f} ms"
        + ("" if best is None else f" (TransferQueue, put + get: {best[0]:.1f}, {best[1]:.1f})"),
        "p50 <= 1 ms, p99 <= 3 ms",
        bool(p50 <= 1 and p99 <= 3),
        p50_ms=float(p50),
        p99_ms=float(p99),
        turns=len(turns),
        transferqueue=None if best is None else [float(x) for x in best],
    )
    rates = {
        arm: max((statistics.median(values), way) for way, values in ways.items())
        for arm, ways in found.singles.items()
    }
    beside = ", ".join(
        f"{arm} {rate:.0f} ({way})" for arm, (rate, way) in rates.items() if arm != "ours"
    )
    row(
        "single puts from one client",
        f"{rates['ours'][0]:.0f} a second" + (f"; {beside}" if beside else ""),
        ">= 5000 a second",
        rates["ours"][0] >= 5000,
        **{arm: rate for arm, (rate, _) in rates.items()},
    )
    for clients in (1, 2):
        rate = statistics.median(alone[f"stream_{clients}"])
        row(
            f"index alone, three stages, {clients} client{'s' * (clients > 1)}",
            f"{rate:.0f} samples/s",
            ">= 40000 samples/s",
            rate >= 40_000,
            samples_per_s=rate,
        )
    few, many = (alone[f"filled_{rows}"] for rows in plan.filled)
    claim = many["claim"] / few["claim"]
    commit = many["commit"] / few["commit"]
    row(
        f"index with {plan.filled[1]:,} rows",
        f"claim {1e3 * many['claim']:.2f} ms, {claim:.2f} x that at {plan.filled[0]:,}; "
        f"commit {1e3 * many['commit']:.2f} ms, {commit:.2f} x",
        "within 1.5 x",
        max(claim, commit) <= 1.5,
        claim_ratio=claim,
        commit_ratio=commit,
        few=few,
        many=many,
    )
    memory = alone["memory"]
    row(
        f"memory after {plan.memory_turns} turns",
        f"{memory['late'] / 1e6:.1f} MB resident ({memory['early'] / 1e6:.1f} MB after a fifth of "
        f"them), at most {memory['live'] / 1e6:.1f} MB live, arena of "
        f"{memory['configured'] / 1e6:.1f} MB",
        "<= 1.1 x live + arena, and steady",
        memory["late"]
        <= min(memory["configured"] * 1.01, 1.1 * memory["live"] + memory["configured"])
        and memory["late"] <= 1.01 * memory["early"],
        **memory,
        resident_per_live=memory["late"] / memory["live"],
    )
    return rows


def show(reports: Sequence[Mapping[str, Any]], rows: Sequence[Row]) -> str:
    lines = []
    for report in reports:
        memory = ", ".join(f"{kind} {rate:.0f}" for kind, rate in report["memcpy_mb_per_s"].items())
        lines += ["", f"{report['label']}, {report['bytes'] / 1e6:.1f} MB; memcpy MB/s: {memory}"]
        lines.append(
            f"  {'':<15}{'put MB/s':>10}{'us/sample':>11}{'x ours':>8}{'get MB/s':>12}"
            f"{'us/sample':>11}{'x ours':>8}{'read MB/s':>12}{'cold put':>10}  better mode (put; "
            f"get)"
        )
        for name, arm in report["arms"].items():
            line = f"  {name:<15}"
            for what in ("put", "get"):
                ratio = arm[what]["times_ours"]
                line += (
                    f"{arm[what]['mb_per_s']:>{10 if what == 'put' else 12}.0f}"
                    f"{arm[what]['us_per_sample']:>11.2f}"
                )
                line += f"{'-' if ratio is None or name == 'ours' else f'{ratio:.1f}':>8}"
            line += f"{arm['read']['mb_per_s']:>12.0f}{arm['cold_put']['mb_per_s']:>10.0f}"
            line += f"  {arm['put']['mode']}; {arm['get']['mode']}" if name != "ours" else ""
            if arm["turns_out_of_order"]:
                line += (
                    f"; rows in another order in {arm['turns_out_of_order']} of "
                    f"{arm['turns']} "
                    f"turns"
                )
            lines.append(line)
    if rows:
        lines += ["", f"{'':<4}{'goal':<44}  measured"]
    for row in rows:
        mark = {True: "met", False: "NO", None: "-"}[row.met]
        lines.append(f"{mark:<4}{row.name + ': ' + row.goal}")
        lines.append(f"{'':<8}{row.measured}")
    return "\n".join(lines)


def available(wanted: Sequence[str]) -> tuple[str, ...]:
    """Those of the ``wanted`` peers that are installed; prints what is missing."""
    modules = {"transferqueue": ("ray", "transfer_queue"), "ray": ("ray",)}
    there = []
    for peer in wanted:
        missing = [module for module in modules[peer] if importlib.util.find_spec(module) is None]
        if missing:
            print(
                f"{peer}: left out, {' and '.join(missing)} not installed; pip install -e "
                f"'.[bench]'",
                file=sys.stderr,
            )
        else:
            there.append(peer)
    return tuple(there)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("torch", "tensordict", "numpy", "ray", "transferqueue"):
        with contextlib.suppress(ModuleNotFoundError):
            found[name] = version(name)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = harness.parser(__doc__)
    parser.add_argument(
        "--peers", default="ours,transferqueue,ray", help="arms, with commas between"
    )
    parser.add_argument(
        "--cases", default=",".join(case.name for case in CASES), help="of: %(default)s"
    )
    parser.add_argument(
        "--repeats", type=int, default=3, help="rounds in each of the peers' two modes"
    )
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, few turns: does it run at all?"
    )
    options = parser.parse_args(arguments)
    arms = options.peers.split(",")
    names = options.cases.split(",")
    if unknown := set(arms) - {"ours", *PEERS}:
        parser.error(f"--peers {sorted(unknown)}: there are ours, {', '.join(PEERS)}")
    if unknown := set(names) - {case.name for case in CASES}:
        parser.error(
            f"--cases {sorted(unknown)}: there are {', '.join(case.name for case in CASES)}"
        )
    peers = available([peer for peer in PEERS if peer in arms])
    if not peers and "ours" not in arms:
        parser.error(f"--peers {options.peers}: none of them can run here")
    plan = Plan(
        cases=tuple(case for case in CASES if case.name in names),
        peers=peers,
        ours="ours" in arms,
        rounds=options.repeats * (2 if peers else 1),
    )
    plan = quick(plan) if options.quick else plan

    quietly()
    loads = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory(prefix="flow-", dir=shared_memory_directory()) as home:
        found, alone = measure(
            plan, Path(home), lambda text: print(text, file=sys.stderr, flush=True)
        )
    loads.append(os.getloadavg()[0])
    reports = {case.name: case_report(case, found.cases[case.name]) for case in plan.cases}
    rows = goals(plan, reports, found, alone) if plan.ours else []
    versions = _versions()
    print(
        f"{os.cpu_count()} processors, "
        f"{platform.machine()}; " + ", ".join(f"{k} {v}" for k, v in versions.items())
    )
    print(
        f"load average {loads[0]:.1f} before, {loads[1]:.1f} after (this benchmark's own included)"
    )
    print(
        f"{plan.rounds} rounds, {plan.turns} turns in each after the first; medians; x ours: its "
        f"time over ours"
    )
    print(show(list(reports.values()), rows))
    if options.json:
        result = {
            "versions": versions,
            "processors": os.cpu_count(),
            "load_average": loads,
            "quick": options.quick,
            "rounds": plan.rounds,
            "turns": plan.turns,
            "cases": list(reports.values()),
            "rows": [asdict(row) for row in rows],
        }
        options.json.write(result)


def quietly() -> None:
    """Without the warnings that say nothing about a measurement."""
    warnings.filterwarnings("ignore", message=".*nested tensors.*")
    warnings.filterwarnings("ignore", message=".*not writable.*")
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)


if __name__ == "__main__":
    main()
