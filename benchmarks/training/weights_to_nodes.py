"""What a new version of the weights costs with many nodes and many replicas: bytes, seconds, and
the floor of both.

    sudo python -m benchmarks.training.weights_to_nodes [--nodes 1 2 4 8] [--engines 2] [--mbit 100]
                                                        [--size 32MiB] [--json FILE]
    python -m benchmarks.training.weights_to_nodes --only swaps
    python -m benchmarks.training.weights_to_nodes --only equal

**nodes**: the trainer and each node are network namespaces with one link of ``--mbit`` both ways
(``benchmarks.flow.scale.Network``). Each node has ``--engines`` engines. Timed is one published version,
from the call that offers it to the last engine that has verified it.

    chain    as the product: one copy a node, from the trainer to the first node, from each node to the next one
    direct   for comparison: each engine its own copy from the trainer, as the trainer answers a node that has failed twice
    killed   the chain; the process of its first node is killed when half of the floor's time is over
    changes  the chain; all nodes have the version before, of which the new one changes ``--changed`` of the numbers

Floor: no node can have S bytes before S / bandwidth, and each receives them once. The chain's own
bound adds one piece a node: (S + (N - 1) · piece) / bandwidth. Both are for whole versions.
``sent`` is what left the trainer's link, in copies of S, headers of TCP included.

**swaps**: ``--replicas`` followers with mock engines take one version through the index, each with
a swap of ``--swap`` seconds. One at a time is ``at_once = 1``; the default is a quarter of them.
The floor is ceil(replicas / at_once) · swap.

**equal**: the share of a bfloat16 model's numbers whose two bytes are the same after a step, by
learning rate, and what the changes take as they are sent. The weights are those of a layer of
SmolLM2, master weights are float32, and the optimizer is the trainer's (AdamW), after ten steps of
the same rate; gradients are drawn. AdamW's step does not depend on their scale.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from benchmarks import harness
from benchmarks.flow.scale import Infeasible, Network, inside
from orchestration.units import format_size, parse_size
from pipeline.data.arena import shared_memory_directory
from pipeline.index.client import Index, RunConfig
from pipeline.index.embedded import EmbeddedIndex, die_with_parent
from pipeline.wire.blocking import connect
from pipeline.worker.spans import Spans
from stages.engines.mock.engines import MockRolloutEngine, MockTrainEngine
from stages.engines.mock.options import MockRolloutOptions, MockTrainOptions
from stages.engines.protocols import SamplingParams
from stages.model.load import model_folder
from stages.rollout.stage import Rollout
from stages.rollout.swapper import Swapper, SwapPolicy
from stages.rollout.weight_follower import WeightFollower
from stages.weights.published import Published
from stages.weights.records import WeightRecords
from stages.weights.transport.chain import PIECE_BYTES, SERVICE, receive_pieces
from stages.weights.transport.changes import changes
from stages.weights.transport.depot import Arriving, Depot
from stages.weights.transport.network import WeightSender
from stages.weights.transport.store import WeightStore

SECRET = b"of one benchmark run on one machine"
DEADLINE = 300.0
# of a version: a node that lost its sender goes on at the first one that it has not verified
BUCKETS = 16
ARMS = ("direct", "chain", "killed", "changes")
FORK = multiprocessing.get_context("fork")


# ── nodes with limited links ──


@dataclass(frozen=True)
class Cell:
    """One version, ``nodes`` nodes: ``seconds`` to the last engine that lives; ``sent`` by the
    trainer and ``held`` on the fullest node, in copies of the weights."""

    arm: str
    nodes: int
    engines: int
    seconds: float
    floor: float
    bound: float
    sent: float
    held: float


def trainer_process(
    parent: int,
    namespace: str,
    address: str,
    home: Path,
    nbytes: int,
    changed: float,
    pipe: Connection,
) -> None:
    """Publish a version of ``nbytes`` random bytes for each number that comes, with ``changed`` of
    the two-byte numbers of the one before others."""
    die_with_parent(parent)
    random = np.random.default_rng(0)
    numbers = random.integers(0, 2**16, nbytes // 2, np.uint16)
    with inside(namespace):
        sender = WeightSender(
            WeightStore(home, bucket_bytes=nbytes // BUCKETS), host=address, secret=SECRET
        )
        while (version := pipe.recv()) is not None:
            numbers += (random.random(len(numbers)) < changed).astype(np.uint16)
            pipe.send(sender.publish(version, [("weights", torch.from_numpy(numbers))]).record())


def node_process(parent: int, namespace: str, shared: Path, engines: int, pipe: Connection) -> None:
    """Read each published version with all engines, and report when the last one has it."""
    die_with_parent(parent)
    with inside(namespace):
        depots = [Depot(shared / str(number), secret=SECRET) for number in range(engines)]
        for one in depots[1:]:
            one._folder = depots[0]._folder
        while (order := pipe.recv()) is not None:
            arm = order[0]
            published = Published.from_record(order[1])
            work = direct if arm == "direct" else Depot.read
            threads = [threading.Thread(target=work, args=(depot, published)) for depot in depots]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            pipe.send(time.monotonic())


def direct(depot: Depot, published: Published) -> None:
    """A copy of this engine's own from the trainer."""
    memory = np.empty(published.nbytes, np.uint8)
    arriving = Arriving(published, memory)
    with closing(
        connect(arriving.sources[0], SECRET, SERVICE, connecting=5.0, timeout=60.0)
    ) as trainer:
        trainer.send_message(arriving.request(0, 0, 1, serves=None, failed=[("0.0.0.0", 1)] * 2))
        assert trainer.receive_message() == {"have": True, "from": None}
        for _ in receive_pieces(trainer, memory, arriving.pieces[0], 0, 60.0):
            pass
    arriving.keep_verified()
    assert arriving.there == [len(arriving.pieces[0])]


def sent_bytes(namespace: str) -> int:
    """What has left the link of a namespace."""
    command = ["ip", "-n", namespace, "-s", "-j", "link", "show", "eth0"]
    (link,) = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return int(link["stats64"]["tx"]["bytes"])


@contextmanager
def process(target: Any, *arguments: Any) -> Iterator[tuple[Any, Connection]]:
    own, other = FORK.Pipe()
    started = FORK.Process(target=target, args=(os.getpid(), *arguments, other), daemon=True)
    started.start()
    other.close()
    try:
        yield started, own
    finally:
        started.kill()
        started.join()
        own.close()


def received(pipe: Connection) -> Any:
    if not pipe.poll(DEADLINE):
        raise TimeoutError(f"no answer within {DEADLINE:g} s")
    return pipe.recv()


def measure_nodes(options: argparse.Namespace, most: int) -> list[Cell]:
    home = Path(tempfile.mkdtemp(prefix="asyncdock-benchmark-", dir=shared_memory_directory()))
    cells = []
    try:
        with Network(most, options.mbit) as network:
            for nodes in options.nodes:
                for arm in ARMS:
                    if arm != "killed" or nodes > 1:
                        cells.append(
                            measure_cell(options, network, home / f"{nodes}-{arm}", arm, nodes)
                        )
                        print(row(cells[-1]), flush=True)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    return cells


def measure_cell(
    options: argparse.Namespace, network: Network, home: Path, arm: str, nodes: int
) -> Cell:
    floor = options.size / (options.mbit * 1e6 / 8)
    with ExitStack() as stack:
        own = (
            network.name("index"),
            network.address(-1),
            home / "trainer",
            options.size,
            options.changed,
        )
        _, trainer = stack.enter_context(process(trainer_process, *own))
        members = [
            stack.enter_context(
                process(
                    node_process,
                    network.name(f"host{number}"),
                    home / f"node-{number}",
                    options.engines,
                )
            )
            for number in range(nodes)
        ]
        trainer.send(1)
        record = received(trainer)
        if arm == "changes":
            for _, pipe in members:
                pipe.send((arm, record))
            for _, pipe in members:
                received(pipe)
            trainer.send(2)
            record = received(trainer)
        before = sent_bytes(own[0])
        began = time.monotonic()
        for _, pipe in members:
            pipe.send((arm, record))
            time.sleep(0.02)  # so that the first one is the first of the chain
        if arm == "killed":
            time.sleep(max(0.0, floor / 2 - (time.monotonic() - began)))
            members[0][0].kill()
        ends = [received(pipe) for _, pipe in members[arm == "killed" :]]
        sent = (sent_bytes(own[0]) - before) / options.size
        held = max(size_of(home / f"node-{number}") for number in range(nodes)) / options.size
    shutil.rmtree(home)
    bound = floor * (1 + (nodes - 1) * PIECE_BYTES / options.size)
    copies = float(options.engines) if arm == "direct" else held
    return Cell(arm, nodes, options.engines, max(ends) - began, floor, bound, sent, copies)


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


HEAD = (
    f"{'arm':<8}{'nodes':>6}{'engines':>9}{'seconds':>9}{'floor':>8}{'bound':>8}"
    f"{'of bound':>10}"
    f"{'sent':>7}{'a node':>8}"
)


def row(cell: Cell) -> str:
    return (
        f"{cell.arm:<8}{cell.nodes:>6}{cell.nodes * cell.engines:>9}{cell.seconds:>9.2f}"
        f"{cell.floor:>8.2f}{cell.bound:>8.2f}{cell.seconds / cell.bound:>10.2f}"
        f"{cell.sent:>7.2f}{cell.held:>8.2f}"
    )


# ── swaps that take turns ──


async def measure_swaps(replicas: int, at_once: int, seconds: float, home: Path) -> float:
    """Seconds from a version's publication until all replicas have it."""

    class Controls:
        spans = Spans()

    server = EmbeddedIndex(home)
    server.start()
    train = MockTrainEngine(MockTrainOptions(step_seconds=0))
    store = WeightStore(home / "shared")
    try:
        async with Index(server.url, "swaps") as index:
            await index.init(RunConfig(()), {})
            engines = [
                MockRolloutEngine(MockRolloutOptions(swap_seconds=seconds)) for _ in range(replicas)
            ]
            none: Any = None
            controls: Any = Controls()
            policy = SwapPolicy(at_once=at_once)
            following = [
                WeightFollower(
                    index,
                    Swapper(
                        index,
                        WeightStore(home / "shared"),
                        engine,
                        policy,
                        worker=f"rollout-{number}",
                        temperature=1.0,
                    ),
                    Rollout(
                        none,
                        engine,
                        SamplingParams(max_tokens=8),
                        seed=0,
                        group_size=1,
                        most_rows=4,
                    ),
                    controls,
                    None,
                    worker=f"rollout-{number}",
                    every=0,
                    steps=2,
                    overlap=True,
                )
                for number, engine in enumerate(engines)
            ]
            published = store.publish(1, train.weights())
            await index._redis.hset(f"{index.prefix}n", "trained", 1)
            await WeightRecords(index).publish(published)
            began = time.monotonic()
            if not all(await asyncio.gather(*(one._take() for one in following))):
                raise RuntimeError("a replica has not taken the version")
            taken = time.monotonic() - began
            for engine in engines:
                await engine.close()
            return taken
    finally:
        server.stop()


def swaps(options: argparse.Namespace) -> list[dict[str, float]]:
    found = []
    print(f"{'replicas':>8}{'at once':>9}{'seconds':>9}{'floor':>8}")
    for at_once in (1, max(1, options.replicas // 4)):
        home = Path(tempfile.mkdtemp(prefix="weights-to-nodes-"))
        try:
            taken = asyncio.run(measure_swaps(options.replicas, at_once, options.swap, home))
        finally:
            shutil.rmtree(home, ignore_errors=True)
        floor = -(-options.replicas // at_once) * options.swap
        print(f"{options.replicas:>8}{at_once:>9}{taken:>9.2f}{floor:>8.2f}", flush=True)
        found.append(
            {"replicas": options.replicas, "at_once": at_once, "seconds": taken, "floor": floor}
        )
    return found


# ── numbers that a step leaves as they are ──


def layer_weights(layer: str = "model.layers.15.") -> torch.Tensor:
    """All numbers of one layer of SmolLM2, float32."""
    folder = model_folder("smollm2")
    with safe_open(next(iter(folder.glob("*.safetensors"))), "pt") as file:
        names = [name for name in file.keys() if layer in name]  # noqa: SIM118
        return torch.cat([file.get_tensor(name).float().flatten() for name in names])


def after_step(
    weights: torch.Tensor, rate: float, steps: int = 10
) -> tuple[np.ndarray, np.ndarray]:
    """The bfloat16 numbers before and after step ``steps`` + 1 of AdamW at ``rate``, as bytes."""
    random = torch.Generator().manual_seed(0)
    master = torch.nn.Parameter(weights.clone())
    optimizer = torch.optim.AdamW([master], lr=rate, weight_decay=0.0)
    drift = 0.3 * torch.randn(len(weights), generator=random)
    for _ in range(steps + 1):
        before = master.detach().bfloat16()
        # what batches agree on, and noise
        master.grad = drift + torch.randn(len(weights), generator=random)
        optimizer.step()
    return before.view(torch.uint8).numpy(), master.detach().bfloat16().view(torch.uint8).numpy()


def equal() -> list[dict[str, float]]:
    print(f"{'rate':>8}{'equal':>9}{'sent, of all bytes':>20}")
    found = []
    weights = layer_weights()
    for rate in (1e-7, 1e-6, 3e-6, 1e-5, 3e-5, 1e-4):
        old, new = after_step(weights, rate)
        share = float((old.view(np.uint16) == new.view(np.uint16)).mean())
        starts = range(0, len(new), PIECE_BYTES)
        pieces = [changes(new[at : at + PIECE_BYTES], old[at : at + PIECE_BYTES]) for at in starts]
        whole = [len(new[at : at + PIECE_BYTES]) for at in starts]
        sent = sum(
            all_of if packed is None else len(packed)
            for packed, all_of in zip(pieces, whole, strict=True)
        )
        print(f"{rate:>8.0e}{share:>9.4f}{sent / len(new):>20.3f}")
        found.append({"rate": rate, "equal": share, "sent": sent / len(new)})
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--only", choices=["nodes", "swaps", "equal"])
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--engines", type=int, default=2, help="of each node")
    parser.add_argument("--mbit", type=float, default=100.0, help="of each node's link, each way")
    parser.add_argument(
        "--size", type=lambda text: int(parse_size(text)), default=32 * 2**20, help="of the weights"
    )  # type: ignore[call-overload]
    parser.add_argument(
        "--changed", type=float, default=0.02, help="share of the numbers in the arm changes"
    )
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--swap", type=float, default=0.8, help="seconds of one swap")
    options = parser.parse_args(arguments)
    result: dict[str, Any] = {}
    if options.only in (None, "nodes"):
        print(
            f"{format_size(options.size)} of weights, links of {options.mbit:g} Mbit/s, "
            f"{options.engines} engines a node"
        )
        print(HEAD)
        try:
            result["nodes"] = [asdict(cell) for cell in measure_nodes(options, max(options.nodes))]
        except Infeasible as missing:
            print(f"cannot run here: {missing}", file=sys.stderr)
            return 2
    if options.only in (None, "swaps"):
        result["swaps"] = swaps(options)
    if options.only in (None, "equal"):
        result["equal"] = equal()
    if options.json:
        size = {"size": options.size, "mbit": options.mbit}
        options.json.write(size | result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
