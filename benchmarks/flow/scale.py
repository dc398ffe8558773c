"""How the sample flow grows with the nodes: hosts with limited links, one to eight warehouses, work
in proportion.

    sudo python -m benchmarks.flow.scale [--nodes 1 2 4 8] [--mbit 20] [--poll 1.0]
                                         [--repeats 3] [--json FILE]
    sudo python -m benchmarks.flow.scale --ray --arms dock central
    sudo python -m benchmarks.flow.scale --quick

Each host is a network namespace with one link to a bridge, limited both ways by tc; the index
server is one more of them:

    host 0   generate ─▶ put …  infer: claim ─▶ fetch ─▶ compute ─▶ commit …  train: claim ─▶ fetch ─▶ compute ─▶ release
      │ limited link                    (one process a host, real docks, real sockets)
    bridge ─── host 1 ─── … ─── host 7 ─── index (Valkey over TCP)

Compute is a clock: one device a stage, the same seconds a batch on every host, and the next batch
is fetched while one is computed. So the machine's cores do the dispatch alone, and one host reaches
nearly what its devices allow. Every host makes the same number of samples: with n hosts there is n
times the work (weak scaling). A cell's rate is all samples over the time from the start to the last
release, pipeline filling and draining included, and

    linearity(n) = rate(n) / (n · rate(1))

With ``--apart`` every other host generates and its neighbour does the stages behind, so that all
samples cross the network in every arm; linearity is then against one such pair.

Three arms run the same code and differ in :class:`Arm` alone:

    dock      a warehouse on each host, blocking waits, a batch a message; near rows first
    central   the same with one warehouse, on host 0: the others write and read it over its link
    peers     the dock with a message for each row, and waiting by sleeping and asking again. TransferQueue 0.1.11 (the
              sample flow that VeRL took over) sleeps 1 s after an empty batch in its streaming data set, and 5 s in its
              controller; MindSpeed RL's published transfer dock sleeps 0.1 s

The central arm's figure depends on how much of a link a host's samples need: the output has it, and
it is what ``--mbit`` sets.

With ``--ray`` the hosts are actors on the raylets of a Ray cluster, one on each, which enter their
namespaces.

Bytes against Eq. 4 of MindSpeed RL (arXiv 2507.19017): what each of S warehouses moves in and out,

    G·N·B·(2·PL + 3n·SL + 8(C+1)·M) / S

Here n = 2 columns of length SL are put once and got twice, the prompt is put and got once: these
terms hold as they are. The last one is adapted: our controllers ask the index and get no copies of
the metadata (C = 0), and the two integers of a sample are moved 5 times in all. G·N are all samples
of the cell. Moved is what the warehouse's server counts as payload, and what workers on its own
host wrote into the mapped arena and read from it.

Needs root and iproute2 (``ip`` and ``tc``); ends with code 2 and the reason where that is not to be
had. The names of the namespaces carry this process's number; they are deleted however the run ends,
and those of a run that was killed are swept by the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import multiprocessing
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import redis
import torch

from benchmarks import harness
from benchmarks.runs.executed import raylets
from pipeline.data.arena import shared_memory_directory
from pipeline.data.blocks import PackedRows
from pipeline.data.columns import Column, Packed, Schema
from pipeline.index.client import Claim, Index, RunConfig, StageSpec
from pipeline.index.embedded import EmbeddedIndex, die_with_parent
from pipeline.index.warehouses import WarehouseRecord
from pipeline.warehouse.dock import Dock

MOST_HOSTS = 8
SUBNET = "10.77.0"
PORT = 6379
SECRET = b"of one benchmark run on one machine"
ELEMENT = 4
PREFIX = "adkbench"
ENDING = (signal.SIGINT, signal.SIGTERM)
QUEUE_MS = 30  # at a link's limit, that is the most that a full queue delays a call to the index
AHEAD = 2  # batches that a stage holds: one is computed, the next is fetched
GOAL = 0.95
WITHIN = 0.02
START_SECONDS = 60.0  # for an actor of a new raylet
PAPER = (
    "MindSpeed RL, Fig. 9, linearity at 24 nodes: 81.1 % transfer dock, 61.9 % central buffer, "
    "40.4 % VeRL"
)


class Infeasible(RuntimeError):
    """This machine does not let us make hosts; the message says what is missing."""


# ── the hosts ──


def run_ip(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Infeasible(
            f"`{' '.join(command)}` failed: {done.stderr.strip()}; network namespaces need root "
            f"and iproute2"
        )


class Network:
    """``hosts`` namespaces and one for the index, each with a link of ``mbit`` Mbit/s both ways to
    a bridge in one more. What leaves one takes ``delay_ms`` longer.

    Nothing is added outside these namespaces, so deleting them deletes everything.
    """

    def __init__(self, hosts: int, mbit: float, delay_ms: float = 0.0) -> None:
        if not 1 <= hosts <= MOST_HOSTS:
            raise ValueError(f"nodes: {hosts} hosts, must be 1 to {MOST_HOSTS}")
        self.hosts = hosts
        self._mbit = mbit
        self._delay_ms = delay_ms
        self._made: list[str] = []

    def name(self, what: str) -> str:
        return f"{PREFIX}-{os.getpid()}-{what}"

    def __enter__(self) -> Network:
        if os.geteuid():
            raise Infeasible("network namespaces need root; run this with sudo")
        for tool in ("ip", "tc"):
            if shutil.which(tool) is None:
                raise Infeasible(f"{tool} is not installed; install iproute2")
        self._sweep()
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _build(self) -> None:
        switch = self._namespace("switch")
        run_ip("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        run_ip("ip", "-n", switch, "link", "set", "bridge", "up")
        for number, what in enumerate(["index", *(f"host{i}" for i in range(self.hosts))]):
            host = self._namespace(what)
            port = f"port{number}"
            run_ip(
                "ip",
                "link",
                "add",
                "eth0",
                "netns",
                host,
                "type",
                "veth",
                "peer",
                "name",
                port,
                "netns",
                switch,
            )
            run_ip("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
            run_ip("ip", "-n", host, "addr", "add", f"{self.address(number - 1)}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                run_ip("ip", "-n", host, "link", "set", device, "up")
            for where, device in ((host, "eth0"), (switch, port)):  # out of the host, and into it
                limit = ("rate", f"{self._mbit}mbit", "burst", "64kb", "latency", f"{QUEUE_MS}ms")
                run_ip(
                    "tc",
                    "-n",
                    where,
                    "qdisc",
                    "add",
                    "dev",
                    device,
                    "root",
                    "handle",
                    "1:",
                    "tbf",
                    *limit,
                )
            if self._delay_ms:
                delay = ("netem", "delay", f"{self._delay_ms}ms", "limit", "100000")
                run_ip("tc", "-n", host, "qdisc", "add", "dev", "eth0", "parent", "1:1", *delay)

    def _namespace(self, what: str) -> str:
        name = self.name(what)
        run_ip("ip", "netns", "add", name)
        self._made.append(name)
        return name

    def address(self, host: int) -> str:
        """Of a host, or of the index: -1."""
        return f"{SUBNET}.{host + 2}"

    def __exit__(self, *_: object) -> None:
        for name in self._made:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        self._made.clear()

    def _sweep(self) -> None:
        """Delete the shared memory of runs that were killed: their process does not exist any
        more."""
        there = Path("/run/netns")
        for path in there.glob(f"{PREFIX}-*") if there.is_dir() else ():
            if not Path("/proc", path.name.split("-")[1]).exists():
                subprocess.run(["ip", "netns", "del", path.name], capture_output=True, check=False)


@contextlib.contextmanager
def inside(namespace: str) -> Iterator[None]:
    """This thread, and what it starts, in another network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)

    def enter(descriptor: int) -> None:
        if libc.setns(descriptor, 0x40000000):  # CLONE_NEWNET
            raise Infeasible(
                f"setns: {os.strerror(ctypes.get_errno())}; network namespaces need root"
            )

    own = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    other = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        enter(other)
        yield
    finally:
        enter(own)
        os.close(own)
        os.close(other)


@contextlib.contextmanager
def index_server(network: Network, home: Path) -> Iterator[EmbeddedIndex]:
    """The embedded index, on its Unix socket and over TCP on the index's own limited link."""
    server = EmbeddedIndex(home)
    try:
        start_index(server, network)
        yield server
    finally:
        server.stop()


def start_index(server: EmbeddedIndex, network: Network) -> None:
    """Start ``server``, or start it again on its data, on the index's own link."""
    with inside(network.name("index")):
        server.start()
    with redis.Redis.from_url(server.url) as client:
        client.config_set("protected-mode", "no")  # nothing but the hosts' links leads there
        client.config_set("bind", network.address(-1))
        client.config_set("port", PORT)


# ── the work ──


@dataclass(frozen=True)
class Arm:
    """One way to dispatch.

    ``message``: rows in one put, claim, fetch and commit; ``poll``: seconds of sleep when nothing
    was there, None to be woken by the index.
    """

    name: str
    central: bool = False
    message: int | None = None  # None: a whole batch
    poll: float | None = None


@dataclass(frozen=True)
class Work:
    """What each host does: ``batches`` batches of ``batch`` rows, ``seconds`` of each of its three
    devices for a batch;
    ``apart``: two hosts share that work, one generates and the other does the stages behind."""

    batches: int = 40
    batch: int = 8
    seconds: float = 0.25
    prompt: int = 256
    response: int = 1024
    mbit: float = 20.0
    poll: float = 1.0
    apart: bool = False
    headstart: float = RunConfig.headstart

    def generators(self, nodes: int) -> range:
        """The hosts that generate: all, or every other one; the others then run the other
        stages."""
        return range(0, nodes, 2 if self.apart else 1)

    @property
    def arms(self) -> tuple[Arm, ...]:
        return Arm("dock"), Arm("central", central=True), Arm("peers", message=1, poll=self.poll)

    @property
    def rows(self) -> int:
        return self.batches * self.batch

    @property
    def row_in(self) -> int:
        """Bytes that a row puts into its warehouse."""
        return ELEMENT * (self.prompt + 2 * self.response + 2)

    @property
    def row_out(self) -> int:
        return ELEMENT * (self.prompt + 4 * self.response + 3)

    @property
    def link_share(self) -> float:
        """Of its link, that one host's samples would fill in the busier direction if all moves went
        over it."""
        return self.batch / self.seconds * max(self.row_in, self.row_out) / (self.mbit * 1e6 / 8)

    @property
    def ideal(self) -> float:
        """Rows a second of one generating host by its devices alone: the last batch leaves the
        third device."""
        return self.rows / ((self.batches + 2) * self.seconds)


def warehouse_volume(
    rows: int,
    prompt: int,
    n: int,
    response: int,
    integer_moves: int,
    warehouses: int,
    element: int = ELEMENT,
) -> float:
    """Eq. 4 of MindSpeed RL (arXiv 2507.19017) in bytes, per warehouse, of ``rows`` = G·N samples;
    its last term, 8(C+1)·M, is given as what it counts: the moves of integers (C is 0 here, see the
    module).

    >>> warehouse_volume(8, prompt=10, n=1, response=100, integer_moves=0, warehouses=4)
    2560.0
    """
    return rows * element * (2 * prompt + 3 * n * response + integer_moves) / warehouses


def schema_of(work: Work) -> Schema:
    return Schema(
        [
            Column.fixed("prompt_ids", torch.int32, [work.prompt]),
            Column.fixed("response_ids", torch.int32, [work.response]),
            Column.fixed("rollout_logprobs", torch.float32, [work.response]),
            Column.scalar("response_length", torch.int32),
            Column.scalar("reward", torch.float32),
        ]
    )


INFER = ("prompt_ids", "response_ids", "rollout_logprobs", "response_length")
TRAIN = ("response_ids", "rollout_logprobs", "response_length", "reward")
INTEGER_MOVES = 5  # response_length: put, got twice; reward: put, got


class CountingDock(Dock):
    """Counts the payload that this host's own warehouse moves without its server: what is written
    into and read from the mapped arena. ``far`` are rows read from elsewhere."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.mapped = self.far = self.near = 0
        write = self.warehouses.write
        read = self.warehouses.read

        async def counted_write(
            record: WarehouseRecord, offset: int, block: int, packed: PackedRows
        ) -> None:
            await write(record, offset, block, packed)
            if self.warehouses.is_near(record):
                # without the block's header
                self.mapped += packed.nbytes - 32 - 32 * bin(packed.mask).count("1")

        async def counted_read(
            number: int, refs: np.ndarray, names: list[str]
        ) -> dict[str, Packed]:
            found = await read(number, refs, names)
            if self.warehouses.is_near(self.warehouses.records[number]):
                self.mapped += sum(packed.values.nbytes for packed in found.values())
                self.near += len(refs)
            else:
                self.far += len(refs)
            return found

        self.warehouses.write, self.warehouses.read = counted_write, counted_read  # type: ignore[method-assign]


@dataclass
class Device:
    """Takes its batches one after the other, each for its seconds."""

    free_at: float

    async def compute(self, seconds: float) -> None:
        self.free_at = max(time.monotonic(), self.free_at) + seconds
        await asyncio.sleep(self.free_at - time.monotonic())


@dataclass(frozen=True)
class Counts:
    """The counts that a host reports at the end."""

    mapped: int
    sent: int
    received: int
    near: int
    far: int
    cpu: float


class Host:
    """One host's producer and its two stages."""

    def __init__(
        self, work: Work, arm: Arm, number: int, dock: CountingDock, parent: Connection
    ) -> None:
        self._work = work
        self._arm = arm
        self._number = number
        self._dock = dock
        self._parent = parent
        self._message = arm.message or work.batch

    async def live(self, start: float) -> None:
        """Until it is cancelled."""
        await asyncio.sleep(start - time.monotonic())
        devices = {name: Device(start) for name in ("generate", "infer", "train")}
        generates = not self._work.apart or self._number % 2 == 0
        async with asyncio.TaskGroup() as tasks:
            if generates:
                tasks.create_task(self._produce(devices["generate"]))
            for stage in ("infer", "train") if not (generates and self._work.apart) else ():
                for _ in range(AHEAD):
                    tasks.create_task(self._stage(stage, devices[stage]))
            # its warehouse serves others while there are any
            tasks.create_task(asyncio.Event().wait())

    async def _produce(self, device: Device) -> None:
        under_way = asyncio.Semaphore(AHEAD)
        async with asyncio.TaskGroup() as puts:
            for batch in range(self._work.batches):
                await device.compute(self._work.seconds)
                await under_way.acquire()
                put = puts.create_task(self._put(batch))
                put.add_done_callback(lambda _: under_way.release())

    async def _put(self, batch: int) -> None:
        work = self._work
        size = self._work.batch
        numbers = (
            torch.arange(size, dtype=torch.int32) + (self._number * work.batches + batch) * size
        )
        rows = {
            "prompt_ids": numbers[:, None].expand(size, work.prompt).contiguous(),
            "response_ids": numbers[:, None].expand(size, work.response).contiguous(),
            "rollout_logprobs": numbers[:, None].expand(size, work.response).float(),
            "response_length": torch.full([size], work.response, dtype=torch.int32),
        }
        for at in range(0, size, self._message):
            part = {name: column[at : at + self._message] for name, column in rows.items()}
            await self._dock.put(part, samples=self._message)

    async def _take(self, stage: str) -> list[Claim]:
        """A batch of rows in as many messages as the arm needs; fewer when there are no more, none
        after a wait."""
        claims = list[Claim]()
        rows = 0
        while rows < self._work.batch:
            timeout = 5.0 if self._arm.poll is None and not claims else 0.0
            claim = await self._dock.claim(
                stage, min(self._message, self._work.batch - rows), timeout=timeout
            )
            if claim is None:
                break
            claims.append(claim)
            rows += len(claim)
        if not claims and self._arm.poll is not None:
            await asyncio.sleep(self._arm.poll)
        return claims

    async def _stage(self, stage: str, device: Device) -> None:
        while True:
            claims = await self._take(stage)
            found = [
                await self._dock.fetch_packed(c, INFER if stage == "infer" else TRAIN)
                for c in claims
            ]
            rows = sum(len(claim) for claim in claims)
            await device.compute(self._work.seconds * rows / self._work.batch)
            for claim, columns in zip(claims, found, strict=True):
                ids = columns["response_ids"].values.view(len(claim), -1)
                made = None
                if stage == "infer":
                    made = {"reward": ids[:, -1].float()}
                else:
                    logprobs = columns["rollout_logprobs"].values.view(len(claim), -1)
                    right = torch.equal(ids[:, 0].float(), columns["reward"].values)
                    right &= torch.equal(ids[:, -1].float(), logprobs[:, 0])
                    assert right, "columns of different samples were mixed up"
                numbers = ids[:, 0].tolist()
                await self._dock.commit(claim, range(len(claim)), made)
                if stage == "train":
                    self._parent.send(("released", time.monotonic(), numbers))


async def host_main(
    ends: Connection, work: Work, arm: Arm, number: int, hosts: int, url: str, run: str, home: Path
) -> None:
    """One host's process: join, report it, work from the given time on, and report its counts at
    the end."""
    schema = schema_of(work)
    own = not arm.central or number == 0
    index = Index(url, run)
    dock = CountingDock(
        index,
        schema,
        worker=f"host{number}",
        directory=home / f"host{number}",
        warehouse="central" if arm.central else f"host{number}",
        node=f"host{number}",
        secret=SECRET,
        wire_timeout=60.0,
    )
    loop = asyncio.get_running_loop()
    if number == 0:
        stages = (
            StageSpec("infer", "rows", schema.mask(INFER), schema.mask(["reward"])),
            StageSpec("train", "rows", schema.mask(TRAIN), 0, releases=True),
        )
        # the same in rows, whatever a group is
        reach = RunConfig.reach * work.batch // (arm.message or work.batch)
        await index.init(RunConfig(stages, reach=reach, headstart=work.headstart), {})
    if own:  # with room for all that is made, so that no arm waits for room
        rows = work.rows * (len(work.generators(hosts)) if arm.central else 1)
        await dock.join(2 * rows * work.row_in + (16 << 20))
        await dock.serve(f"{SUBNET}.{number + 2}")
    ends.send(("ready",))
    start = await loop.run_in_executor(None, ends.recv)
    began = dock.mapped
    used = time.process_time()
    living = asyncio.create_task(Host(work, arm, number, dock, ends).live(start))
    ended = loop.run_in_executor(None, ends.recv)
    await asyncio.wait([living, ended], return_when=asyncio.FIRST_COMPLETED)
    if living.done() and (error := living.exception()):
        # At its end the loop waits for the thread that listens, and that one for the other side.
        ends.send(("failed", "".join(traceback.format_exception(error))))
        raise error
    cpu = time.process_time() - used
    living.cancel()
    await asyncio.gather(living, return_exceptions=True)
    server = dock.warehouses.server
    sent, received = (server.payload_sent, server.payload_received) if server else (0, 0)
    ends.send(
        ("counts", astuple(Counts(dock.mapped - began, sent, received, dock.near, dock.far, cpu)))
    )
    await dock.close()
    await index.close()


def host_process(parent: int, namespace: str, ends: Connection, *arguments: Any) -> None:
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends us
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    try:
        with inside(namespace):
            asyncio.run(host_main(ends, *arguments))
    except BaseException:
        ends.send(("failed", traceback.format_exc()))


# ── one cell: an arm with so many hosts ──


@dataclass(frozen=True)
class Cell:
    """``rate`` in samples a second; ``moved`` bytes of each warehouse, ``wire`` those that went
    through its server; ``far`` the share of row reads that went to another host; ``cores`` the
    processor seconds a second of all hosts together."""

    arm: str
    nodes: int
    rate: float
    moved: list[int]
    wire: list[int]
    equation: float
    far: float
    cores: float

    @property
    def deviation(self) -> float:
        """Of the warehouse that is furthest from the equation."""
        return max((moved / self.equation - 1 for moved in self.moved), key=abs)


@dataclass
class Crew:
    """The processes of one cell; they are gone when it is left."""

    processes: list[Any] = field(default_factory=list)
    ends: list[Connection] = field(default_factory=list)

    def start(self, namespace: str, *arguments: Any) -> None:
        ours, theirs = multiprocessing.Pipe()
        # torch is there already, and costs no time again
        fork = multiprocessing.get_context("fork")
        process = fork.Process(
            target=host_process, args=(os.getpid(), namespace, theirs, *arguments), daemon=True
        )
        # Python drops what a signal's handler raises in the middle of a fork, and a process that is
        # not in the list would outlive the cell and make its folder again: a Ctrl-C waits until
        # both are over.
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        try:
            process.start()
            self.processes.append(process)
            self.ends.append(ours)
            theirs.close()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)

    def hear(self, deadline: float) -> Iterator[tuple[int, Any]]:
        """Yield the messages of the hosts until the deadline or until each has reported its
        counts."""
        speaking = dict(zip(self.ends, itertools.count()))
        while speaking:
            found = wait(list(speaking), timeout=max(0.0, deadline - time.monotonic()))
            if not found:
                raise TimeoutError(
                    "a cell took longer than it may; give it less work, or a wider link"
                )
            for end in found:
                assert isinstance(end, Connection)
                try:
                    message = end.recv()
                except EOFError:
                    raise RuntimeError("a host's process ended before its work did") from None
                if message[0] == "failed":
                    raise RuntimeError(f"a host failed:\n{message[1]}")
                host = speaking[end]
                if message[0] == "counts":
                    del speaking[end]
                yield host, message

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        for end in self.ends:
            end.close()


class RayHost:
    """The actor of a raylet: a host in each cell."""

    def run(self, line: str, namespace: str, *arguments: Any) -> None:
        torch.set_num_threads(1)
        with socket.socket(socket.AF_UNIX) as end:
            end.connect(line)
            ends = Connection(end.detach())
        try:
            with inside(namespace):
                asyncio.run(host_main(ends, *arguments))
        except BaseException:
            ends.send(("failed", traceback.format_exc()))


class RayCrew(Crew):
    """The hosts of one cell are ``actors``, which live on."""

    def __init__(self, actors: Sequence[Any]) -> None:
        super().__init__()
        self._actors = actors

    def start(self, namespace: str, *arguments: Any) -> None:
        with (
            tempfile.TemporaryDirectory(prefix="adk-") as folder,
            socket.socket(socket.AF_UNIX) as line,
        ):
            line.bind(f"{folder}/line")
            line.listen()
            line.settimeout(START_SECONDS)
            self._actors[len(self.ends)].run.remote(f"{folder}/line", namespace, *arguments)
            end, _ = line.accept()
            end.setblocking(True)
            self.ends.append(Connection(end.detach()))


@contextlib.contextmanager
def crews(on_ray: bool, hosts: int) -> Iterator[Callable[[], Crew]]:
    """Yield what makes the processes of a cell: of this machine, or on a Ray cluster of ``hosts``
    raylets."""
    if not on_ray:
        yield Crew
        return
    with harness.needs("bench"):
        import ray

    with raylets(hosts, cpus=1) as cluster:
        ray.init(cluster.address, log_to_driver=False)
        actor = ray.remote(RayHost)
        places = [node["NodeID"] for node in ray.nodes()]
        actors = [
            actor.options(label_selector={"ray.io/node-id": place}).remote() for place in places
        ]
        yield lambda: RayCrew(actors)
        ray.shutdown()


def measure(
    work: Work,
    arm: Arm,
    nodes: int,
    network: Network,
    index: EmbeddedIndex,
    run: str,
    crew_of: Callable[[], Crew] = Crew,
) -> Cell:
    url = f"redis://{network.address(-1)}:{PORT}"
    deadline = time.monotonic() + 60 + 12 * work.rows / work.ideal
    generators = work.generators(nodes)
    rows = len(generators) * work.rows
    with (
        tempfile.TemporaryDirectory(prefix="adk-scale-", dir=shared_memory_directory()) as home,
        crew_of() as crew,
    ):
        # one after the other: each finds the addresses of those before it
        for host in range(nodes):
            crew.start(network.name(f"host{host}"), work, arm, host, nodes, url, run, Path(home))
            next(crew.hear(deadline))
        start = time.monotonic() + 0.3
        for end in crew.ends:
            end.send(start)
        released = set[int]()
        last = start
        for _, (_, when, numbers) in crew.hear(deadline):
            assert released.isdisjoint(numbers), "a sample was delivered twice"
            released.update(numbers)
            last = max(last, when)
            if len(released) == rows:
                break
        for end in crew.ends:
            end.send(None)
        counts = {host: Counts(*message[1]) for host, message in crew.hear(deadline)}
    asyncio.run(erase(index.url, run))
    stores = (
        [0] if arm.central else list(generators)
    )  # where samples are placed; rewards, which others hold, are not counted
    wire = [counts[i].sent + counts[i].received for i in stores]
    reads = sum(t.near + t.far for t in counts.values())
    return Cell(
        arm.name,
        nodes,
        rows / (last - start),
        [counts[i].mapped + moved for i, moved in zip(stores, wire, strict=True)],
        wire,
        warehouse_volume(rows, work.prompt, 2, work.response, INTEGER_MOVES, len(stores)),
        sum(t.far for t in counts.values()) / reads,
        sum(t.cpu for t in counts.values()) / (last - start),
    )


async def erase(url: str, run: str) -> None:
    index = Index(url, run)
    await index.erase()
    await index.close()


# ── all cells, and what they say ──


def measure_all(
    work: Work,
    nodes: Sequence[int],
    repeats: int,
    names: Sequence[str],
    ended: threading.Event,
    on_ray: bool = False,
) -> list[list[Cell]]:
    """Repeats of all cells, until ``ended``.

    Arms take turns within a node count, so that other work on the machine slows all of them.
    """
    rounds = []
    arms = [arm for arm in work.arms if arm.name in names]
    with (
        Network(max(nodes), work.mbit) as network,
        tempfile.TemporaryDirectory(prefix="adk-") as home,
        index_server(network, Path(home)) as index,
        crews(on_ray, max(nodes)) as crew_of,
    ):
        numbers = itertools.count()
        for turn in range(repeats):
            cells = []
            for count in nodes:
                for arm in arms:
                    # Python drops an exception of a signal's handler that comes in a destructor
                    if ended.is_set():
                        raise KeyboardInterrupt
                    cell = measure(
                        work, arm, count, network, index, f"scale{next(numbers)}", crew_of
                    )
                    print(
                        f"round {turn + 1}: {arm.name}, {count} nodes: {cell.rate:.1f} samples/s",
                        file=sys.stderr,
                    )
                    cells.append(cell)
            rounds.append(cells)
    return rounds


def summary(work: Work, rounds: list[list[Cell]]) -> list[dict[str, Any]]:
    """One record for each arm and node count, medians over the rounds; linearity is taken round by
    round, against the fewest nodes. Bytes are those of the worst warehouse of any round."""
    out = []
    fewest = min(cell.nodes for cell in rounds[0])
    for cells in zip(*rounds, strict=True):
        first = cells[0]
        least = [
            next(c for c in found if c.arm == first.arm and c.nodes == fewest) for found in rounds
        ]
        ratios = [
            (c.rate / c.nodes) / (one.rate / one.nodes) for c, one in zip(cells, least, strict=True)
        ]
        worst = max(cells, key=lambda c: abs(c.deviation))
        out.append(
            {
                "arm": first.arm,
                "nodes": first.nodes,
                "samples_per_s": statistics.median(c.rate for c in cells),
                "linearity": statistics.median(ratios),
                "linearities": ratios,
                "of_devices": statistics.median(c.rate for c in cells)
                / (len(work.generators(first.nodes)) * work.ideal),
                "far": statistics.median(c.far for c in cells),
                "cores": statistics.median(c.cores for c in cells),
                "equation_bytes": first.equation,
                "moved_bytes": worst.moved,
                "wire_bytes": worst.wire,
                "deviation": worst.deviation,
                "within": abs(worst.deviation) <= WITHIN,
            }
        )
    return sorted(out, key=lambda row: [arm.name for arm in work.arms].index(row["arm"]))


def print_summary(work: Work, rows: list[dict[str, Any]], repeats: int) -> None:
    who = (
        ("Every other host generates, its neighbour infers and trains")
        if work.apart
        else "Each host does all stages"
    )
    print(
        f"{who}: {work.rows} samples of {work.prompt} + {work.response} tokens a generating "
        f"host,\nin batches of {work.batch}, {work.seconds:g} s a batch on a device. Links of "
        f"{work.mbit:g} Mbit/s: the samples of one generating host\nwould fill "
        f"{work.link_share:.0%} of a link, the busier way, if all moves went over it. Medians of "
        f"{repeats} rounds on\n{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the end; "
        f"peers sleep {work.poll:g} s.\n"
    )
    print(
        f"{'arm':<9}{'nodes':>5}{'samples/s':>11}{'linearity':>11}{'in rounds':>16}"
        f"{'of devices':>12}{'far reads':>11}{'cores':>7}{'MB moved a warehouse':>22}{'Eq. 4':>8}"
        f"{'worst':>9}{'MB on wire':>12}"
    )
    for row in rows:
        moved = [value / 1e6 for value in row["moved_bytes"]]
        span = f"{min(moved):.2f}" if len(moved) == 1 else f"{min(moved):.2f} to {max(moved):.2f}"
        linearity = f"{row['linearity']:.1%}"
        ratios = [100 * ratio for ratio in row["linearities"]]
        rounds = f"{min(ratios):.1f} to {max(ratios):.1f}"
        print(
            f"{row['arm']:<9}{row['nodes']:>5}{row['samples_per_s']:>11.1f}{linearity:>11}"
            f"{rounds:>16}{row['of_devices']:>12.1%}"
            f"{row['far']:>11.1%}{row['cores']:>7.2f}{span:>22}{row['equation_bytes'] / 1e6:>8.2f}"
            f"{row['deviation']:>+9.2%}{sum(row['wire_bytes']) / 1e6:>12.2f}"
            + ("" if row["within"] else f"  ! not within {WITHIN:.0%}")
        )
    print(f"\n{PAPER}")
    ours = [row for row in rows if row["arm"] == "dock"]
    if ours:
        last = ours[-1]
        met = "met" if last["linearity"] >= GOAL else "NOT met"
        print(
            f"Goal, dock at {last['nodes']} nodes: at least {GOAL:.0%}; {last['linearity']:.1%}, "
            f"{met}"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument(
        "--arms", nargs="+", choices=[arm.name for arm in Work().arms], default=None
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--ray", action="store_true", help="hosts are actors on the raylets of a Ray cluster"
    )
    parser.add_argument(
        "--apart", action="store_true", help="generation and the other stages on different hosts"
    )
    for name, kind in (
        ("batches", int),
        ("batch", int),
        ("seconds", float),
        ("prompt", int),
        ("response", int),
    ):
        parser.add_argument(f"--{name}", type=kind, default=getattr(Work, name))
    parser.add_argument(
        "--mbit", type=float, default=Work.mbit, help="of each host's link, each way"
    )
    parser.add_argument(
        "--poll",
        type=float,
        default=Work.poll,
        help="seconds that peers sleep when nothing is there",
    )
    parser.add_argument(
        "--headstart", type=float, default=Work.headstart, help="RunConfig.headstart, in seconds"
    )
    parser.add_argument(
        "--quick", action="store_true", help="two nodes, little work, once: that it runs"
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    work = Work(**{name: getattr(options, name) for name in asdict(Work())})
    nodes = sorted(set(options.nodes))
    repeats = options.repeats
    if options.quick:
        work = replace(work, batches=4, seconds=0.1, poll=min(work.poll, 0.1))
        nodes = [1, 2]
        repeats = 1
    if work.apart:
        nodes = [count for count in nodes if count % 2 == 0] or parser.error(
            "--apart: hosts go in pairs; give even --nodes"
        )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the hosts are taken down
    ended = threading.Event()

    def interrupt(*_: object) -> None:
        ended.set()
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        arms = options.arms or [arm.name for arm in work.arms]
        rounds = measure_all(work, nodes, repeats, arms, ended, options.ray)
    except Infeasible as missing:
        print(f"cannot run here: {missing}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the hosts are taken down", file=sys.stderr)
        return 130
    rows = summary(work, rounds)
    print_summary(work, rows, repeats)
    if options.json:
        record = {"work": asdict(work), "link_share": work.link_share, "summary": rows}
        options.json.write(record | {"rounds": [[asdict(c) for c in r] for r in rounds]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
