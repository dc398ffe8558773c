"""What an allgather-swap costs: each phase against the copy floor of the same minute, and what of
it a step sees.

    python -m benchmarks.training.weight_sync [--model smollm2] [--train tp=2] [--rollout dp=2] [--bucket 4MiB] [--json FILE]
    python -m benchmarks.training.weight_sync --smoke

Real ranks, one process each, on the accelerator if there is one (nccl, hccl), else on the CPU
(gloo). The model is a shape with made-up weights: ``smollm2`` 135M, ``qwen2.5-1.5b``, or the path
of a checkpoint's folder, of which only the config is read. Trained are its weights, gradients, and
two float32 moments.

Phases
------
Bytes over seconds, and beside them a floor, which every rank measures at the same time as the
others and in turn with the phases:

    offload state, offload weights   one copy of a large block to host memory that was used before (pinned where that helps)
    bring back                       one copy of a large block the other way, into memory that was used before
    gather                           on a CPU the copies that a rank cannot do without, at the speed of "bring back"'s: what
                                     it has itself once, what it sends once into a bucket, what it receives once out of
                                     one. Elsewhere the bare all-to-alls
    gather: bare all-to-alls         the same rounds by the group's all-to-alls (on a CPU gloo's), two in flight, nothing
                                     packed, unpacked or checked, plus what a rank has itself at the speed of a copy
    gather: one copy                 all that arrives, copied once, as if every rank could read every other's tensors

The goal is 0.7 of the floor, for each phase; the two other floors of the gather are there to
compare, and show how far it is from what the group can do, and from a plain copy. How it was
exchanged stands above the table.

On a CPU the device is played by the ranks' heaps, and what is freed stays in them, as an
accelerator's allocator keeps it. With ``--malloc release`` it goes back to the kernel, and every
page that comes back has to be made again.

Arms
----
One cycle is: weights to the rollout, generate, inference stages, training state back. Generation
and inference are stood in for by a clock, or with ``--stand-in compute`` by matrix products.
*exposed* is what a cycle takes beyond them, *hidden* what prefetching takes off that.

    naive            gathers all tensors whole, slices the rollout's out of them, and keeps everything
    swap             the allgather-swap, training state brought back when the update wants it
    swap, prefetch   brought back beside the inference stages

Medians over repetitions, of the slowest rank; the first repetition is left out.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from math import prod
from multiprocessing.connection import Connection, wait
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import harness
from orchestration.units import format_size, parse_size
from stages import device as devices
from stages.parallel.layout import Layout, parse_layout
from stages.parallel.placement import ModelState, model_state, place
from stages.resharding.gather import Gather
from stages.resharding.plan import Phase, ReshardPlan, plan_reshard, redundant_if_naive
from stages.resharding.swap import Swap
from stages.resharding.tensors import live_bytes

GOAL = 0.7
# glibc: nothing goes back to the kernel
KEEPING = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)}
ARMS = ("naive", "swap", "swap, prefetch")
SHAPES: dict[str, tuple[str, dict[str, int]]] = {
    "smollm2": (
        "llama",
        dict(
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
        ),
    ),
    "qwen2.5-1.5b": (
        "qwen2",
        dict(
            vocab_size=151936,
            hidden_size=1536,
            intermediate_size=8960,
            num_hidden_layers=28,
            num_attention_heads=12,
            num_key_value_heads=2,
        ),
    ),
    "tiny": (
        "llama",
        dict(
            vocab_size=1024,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
        ),
    ),
}


def config(model: str) -> Any:
    """The transformers config of a shape, or of a checkpoint's folder."""
    from transformers import AutoConfig  # the ranks need none of it

    if model not in SHAPES:
        return AutoConfig.from_pretrained(model, local_files_only=True)
    kind, sizes = SHAPES[model]
    return AutoConfig.for_model(kind, **sizes, tie_word_embeddings=True)


@dataclass(frozen=True)
class Work:
    """The arguments of every rank."""

    state: ModelState
    train: Layout
    rollout: Layout
    bucket_bytes: int
    repetitions: int
    generate_seconds: float
    inference_seconds: float
    stand_in: str
    malloc: str
    block_bytes: int
    device: str

    @property
    def plan(self) -> ReshardPlan:
        target = place(self.state, self.rollout, names="vllm")
        return plan_reshard(place(self.state, self.train), target, bucket_bytes=self.bucket_bytes)


@dataclass(frozen=True)
class PhaseResult:
    """One phase of the slowest rank: medians of seconds, of bytes a second, and of its share of the
    floor."""

    phase: str
    nbytes: int
    seconds: float
    rate: float
    floor_rate: float
    ratio: float


@dataclass(frozen=True)
class ArmResult:
    """Seconds of a cycle that are not generation or inference, and bytes of the rank that has most.

    ``generating``: live while it generates; ``peak``: at any time; ``released``: of training, while
    it generates; ``temporary``: buckets.
    """

    arm: str
    exposed: float
    hidden: float
    generating: int
    peak: int
    released: int
    temporary: int


# --- one rank
# --------------------------------------------------------------------------------------------------


class Rank:
    """The tensors of a rank, and what it can be asked to do with them."""

    def __init__(self, rank: int, work: Work) -> None:
        self.rank = rank
        self.work = work
        self.device = devices.select(work.device)
        self.plan = work.plan
        local = self.plan.source.ranks[rank]
        self.weights = {t.name: self._filled(t.shape, t.dtype) for t in local}
        kinds = (("grad", None), ("exp_avg", torch.float32), ("exp_avg_sq", torch.float32))
        self.state = {
            f"{t.name}.{kind}": self._filled(t.shape, d or t.dtype)
            for t in local
            for kind, d in kinds
        }
        self.temporary = self.peak = 0
        self.swap = Swap(
            self.plan, rank, self.weights, self.state.values, device=self.device, watch=self._watch
        )
        self.host = devices.host_empty(work.block_bytes, self.device)
        self.host.fill_(1)
        self.busy = 0.0  # seconds of stand-ins in the present cycle

    def _filled(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.arange(prod(shape), device=self.device).remainder_(9973).to(dtype).view(shape)

    def _watch(self, phase: Phase) -> None:
        """Counts all storages at the ends of phases and when the buckets are new, not in every
        round: that takes long."""
        temporary = self.swap.temporary_bytes()
        if temporary > self.temporary or not temporary:
            self.temporary = max(self.temporary, temporary)
            self.peak = max(self.peak, self.live() + temporary)

    def live(self, *more: torch.Tensor) -> int:
        return live_bytes(
            [*self.weights.values(), *self.state.values(), *self.swap.rollout.values(), *more]
        )

    def training_bytes(self) -> int:
        return live_bytes([*self.weights.values(), *self.state.values()])

    def digest(self) -> int:
        return sum(
            int(t.view(torch.int32).sum(dtype=torch.int64))
            for t in (*self.weights.values(), *self.state.values())
        )

    def timed(self, call: Callable[[], Any]) -> float:
        """Seconds of ``call`` that all ranks begin together."""
        devices.synchronize(self.device)
        dist.barrier()
        started = time.perf_counter()
        call()
        devices.synchronize(self.device)
        return time.perf_counter() - started

    # floors

    def copy_rates(self) -> dict[str, float]:
        """Bytes a second of a block, to the host and back, copied as often as makes up the training
        state: a shorter copy would more rarely be interrupted by what else runs on the machine."""
        block = torch.ones(self.work.block_bytes, dtype=torch.uint8, device=self.device)
        times = -(-self.training // self.work.block_bytes)

        def copies(target: torch.Tensor, source: torch.Tensor) -> None:
            for _ in range(times):
                target.copy_(source)

        seconds = {
            "to host": self.timed(lambda: copies(self.host, block)),
            "back": self.timed(lambda: copies(block, self.host)),
        }
        return {name: times * self.work.block_bytes / one for name, one in seconds.items()}

    def raw_gather(self) -> float:
        """Seconds of the plan's all-to-alls alone."""
        splits = []
        for one in self.plan.rounds:
            out = [0] * self.plan.world
            into = [0] * self.plan.world
            for s in one:
                if s.sender == self.rank:
                    out[s.receiver] += s.nbytes
                if s.receiver == self.rank:
                    into[s.sender] += s.nbytes
            splits.append((out, into))
        size = max((max(sum(out), sum(into)) for out, into in splits), default=0)
        memory = [
            [torch.ones(size, dtype=torch.uint8, device=self.device) for _ in range(2)]
            for _ in range(2)
        ]

        def exchange() -> None:
            flying: list[Any] = []
            for number, (out, into) in enumerate(splits):
                if len(flying) == 2:
                    flying.pop(0).wait()
                sent, received = memory[number % 2]
                flying.append(
                    dist.all_to_all_single(
                        received[: sum(into)], sent[: sum(out)], into, out, async_op=True
                    )
                )
            for one in flying:
                one.wait()

        return self.timed(exchange)

    # arms

    def stand_in(self, seconds: float) -> None:
        """Generation or inference that takes ``seconds`` by itself."""
        if self.work.stand_in == "clock":
            threading.Event().wait(seconds)
            self.busy += seconds
            return
        for _ in range(round(seconds / self.product_seconds)):
            torch.mm(self.matrix, self.matrix, out=self.product)
            self.busy += self.product_seconds
        if self.device.type != "cpu":
            torch.accelerator.current_stream(self.device).synchronize()

    def calibrate(self) -> None:
        self.matrix = torch.ones(1024, 1024, device=self.device)
        self.product = torch.empty_like(self.matrix)

        def products() -> None:
            for _ in range(20):
                torch.mm(self.matrix, self.matrix, out=self.product)

        self.timed(products)
        self.product_seconds = self.timed(products) / 20

    def generate(self) -> None:
        self.stand_in(self.work.generate_seconds)

    def inference(self) -> None:
        self.stand_in(self.work.inference_seconds)

    def swapped(self, *, prefetch: bool) -> Callable[[], None]:
        def cycle() -> None:
            self.swap.to_rollout()
            self.generating, self.released = self.live(), self.training - self.training_bytes()
            self.generate()
            if prefetch:
                self.swap.prefetch()
            self.inference()
            self.swap.ready()

        return cycle

    def naive(self) -> Callable[[], None]:
        whole = place(self.work.state, Layout(dp_replicate=self.plan.world))
        everything = plan_reshard(self.plan.source, whole, bucket_bytes=2 * self.work.state.nbytes)
        gather = Gather(
            everything, self.rank, device=self.device, watch=lambda: self._naive_watch(gather)
        )
        slices = [
            s for s in plan_reshard(whole, self.plan.target).slices if s.receiver == self.rank
        ]

        def cycle() -> None:
            full = {
                t.name: torch.empty(t.shape, dtype=t.dtype, device=self.device)
                for t in whole.ranks[self.rank]
            }
            rollout = {
                t.name: torch.empty(t.shape, dtype=t.dtype, device=self.device)
                for t in self.plan.target.ranks[self.rank]
            }
            self.extra = [*full.values(), *rollout.values()]
            gather(self.weights, full)
            for s in slices:
                source = full[s.source][
                    tuple(slice(a, a + n) for a, n in zip(s.source_at, s.sizes, strict=True))
                ]
                rollout[s.target][
                    tuple(slice(a, a + n) for a, n in zip(s.target_at, s.sizes, strict=True))
                ] = source
            self.peak = max(self.peak, self.live(*self.extra))
            del full, source
            self.extra = [*rollout.values()]
            self.generating = self.live(*self.extra)
            self.released = 0
            self.generate()
            self.inference()
            self.extra = []

        return cycle

    def _naive_watch(self, gather: Gather) -> None:
        if (temporary := gather.temporary_bytes()) > self.temporary:
            self.temporary = temporary
            self.peak = max(self.peak, self.live(*self.extra) + temporary)

    # all of it

    def measure(self) -> dict[str, Any]:
        """For each repetition the floors, the phases and the arms' seconds; and each arm's
        bytes."""
        self.calibrate()
        self.training, before = self.training_bytes(), self.digest()
        cycles = dict(
            zip(
                ARMS,
                (self.naive(), self.swapped(prefetch=False), self.swapped(prefetch=True)),
                strict=True,
            )
        )
        rounds: list[dict[str, Any]] = []
        memory: dict[str, dict[str, int]] = {}
        for _ in range(self.work.repetitions + 1):
            found: dict[str, Any] = {
                "rates": self.copy_rates(),
                "raw gather": self.raw_gather(),
                "exposed": {},
            }
            for arm, cycle in cycles.items():
                self.temporary = self.peak = 0
                self.busy = 0.0
                found["exposed"][arm] = self.timed(cycle) - self.busy
                memory[arm] = {
                    "generating": self.generating,
                    "peak": max(self.peak, self.training),
                    "released": self.released,
                    "temporary": self.temporary,
                }
                if arm == "swap":
                    found["phases"] = {**self.swap.seconds, "bring back": self.swap.waited}
            rounds.append(found)
        if self.digest() != before:
            raise AssertionError(f"rank {self.rank}: the training state is not what it was")
        weights = live_bytes(self.weights.values())
        return {
            "rounds": rounds[1:],
            "memory": memory,
            "bytes": {
                Phase.OFFLOAD_STATE: self.training - weights,
                Phase.GATHER: self.plan.received[self.rank] + self.plan.kept[self.rank],
                Phase.OFFLOAD_WEIGHTS: weights,
                "bring back": self.training,
            },
            "kept": self.plan.kept[self.rank],
            "copied": sum(
                sizes[self.rank] for sizes in (self.plan.kept, self.plan.sent, self.plan.received)
            ),
            "exchange": self.swap.exchange,
        }


# --- all ranks
# --------------------------------------------------------------------------------------------------


def rank_main(rank: int, work: Work, store: str, parent: Connection) -> None:
    torch.set_num_threads(1)
    device = devices.select(work.device)
    if device.type != "cpu":
        torch.accelerator.set_device_index(rank)
    world = work.train.world
    dist.init_process_group(
        devices.backend(device),
        store=dist.FileStore(store, world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=300),
    )
    parent.send(Rank(rank, work).measure())
    dist.barrier()
    dist.destroy_process_group()


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """``values`` for the processes that are started meanwhile."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def run_ranks(work: Work, deadline: float) -> list[dict[str, Any]]:
    """What each rank measured. Raises when one ends without, or the deadline (seconds) passes."""
    spawn = multiprocessing.get_context("spawn")
    end = time.monotonic() + deadline
    with tempfile.TemporaryDirectory(prefix="weight-sync-") as home:
        pipes = [spawn.Pipe(duplex=False) for _ in range(work.train.world)]
        ranks = [
            spawn.Process(target=rank_main, args=(rank, work, f"{home}/store", there), daemon=True)
            for rank, (_, there) in enumerate(pipes)
        ]
        try:
            with environment(OMP_NUM_THREADS="1", **(KEEPING if work.malloc == "keep" else {})):
                for one in ranks:
                    one.start()
            for _, there in pipes:
                there.close()
            waiting = {here: rank for rank, (here, _) in enumerate(pipes)}
            results = {}
            while waiting:
                ready = wait(list(waiting), max(0.0, end - time.monotonic()))
                if not ready:
                    raise TimeoutError(
                        f"ranks {sorted(waiting.values())} have measured nothing "
                        f"within {deadline:g} s"
                    )
                for here in ready:
                    rank = waiting.pop(here)  # type: ignore[call-overload]
                    try:
                        results[rank] = here.recv()  # type: ignore[union-attr]
                    except EOFError:
                        raise RuntimeError(
                            f"rank {rank} has ended; its error stands above"
                        ) from None
            for one in ranks:
                one.join(max(0.0, end - time.monotonic()))
            return [results[rank] for rank in range(len(ranks))]
        finally:
            for one in ranks:
                if one.pid is not None:
                    one.kill()
                    one.join()


def least_seconds(
    result: dict[str, Any], one: dict[str, Any], device: str
) -> dict[str, tuple[str, float]]:
    """Of each row of the table the phase, and its floor in one repetition: seconds of a rank."""
    nbytes = result["bytes"]
    rates = one["rates"]
    copies = result["copied"] / rates["back"]
    bare = one["raw gather"] + result["kept"] / rates["back"]
    return {
        "offload state": (Phase.OFFLOAD_STATE, nbytes[Phase.OFFLOAD_STATE] / rates["to host"]),
        "gather": (Phase.GATHER, copies if device == "cpu" else bare),
        "gather: bare all-to-alls": (Phase.GATHER, bare),
        "gather: one copy": (Phase.GATHER, nbytes[Phase.GATHER] / rates["back"]),
        "offload weights": (
            Phase.OFFLOAD_WEIGHTS,
            nbytes[Phase.OFFLOAD_WEIGHTS] / rates["to host"],
        ),
        "bring back": ("bring back", nbytes["bring back"] / rates["back"]),
    }


def phases(results: Sequence[dict[str, Any]], device: str) -> list[PhaseResult]:
    found: dict[str, list[PhaseResult]] = {}
    for result in results:
        least = [least_seconds(result, one, device) for one in result["rounds"]]
        for row, (phase, _) in least[0].items():
            nbytes = result["bytes"][phase]
            floors = [one[row][1] for one in least]
            seconds = [one["phases"][phase] for one in result["rounds"]]
            ratio = median(floor / taken for floor, taken in zip(floors, seconds, strict=True))
            taken = median(seconds)
            one = PhaseResult(row, nbytes, taken, nbytes / taken, nbytes / median(floors), ratio)
            found.setdefault(row, []).append(one)
    return [min(of_ranks, key=lambda one: one.ratio) for of_ranks in found.values()]


def arms(results: Sequence[dict[str, Any]]) -> list[ArmResult]:
    exposed = {
        arm: median(
            max(result["rounds"][n]["exposed"][arm] for result in results)
            for n in range(len(results[0]["rounds"]))
        )
        for arm in ARMS
    }
    found = []
    for arm in ARMS:
        most = {
            key: max(result["memory"][arm][key] for result in results)
            for key in ("generating", "peak", "released", "temporary")
        }
        hidden = exposed["swap"] - exposed[arm] if arm == "swap, prefetch" else 0.0
        found.append(ArmResult(arm, exposed[arm], hidden, **most))
    return found


def table(
    work: Work,
    exchange: str,
    found: Sequence[PhaseResult],
    compared: Sequence[ArmResult],
    redundant: int,
) -> str:
    mib = 2**20
    lines = [
        f"{format_size(work.state.nbytes)} of weights from {work.train} to {work.rollout}, "
        f"{work.train.world} ranks on {work.device}, buckets of {format_size(work.bucket_bytes)}, "
        f"exchanged by {exchange}",
        "",
        f"{'phase':<24}{'MiB':>9}{'ms':>9}{'MiB/s':>9}{'floor':>9}{'of floor':>10}",
    ]
    lines += [
        f"{p.phase:<24}{p.nbytes / mib:>9.1f}{p.seconds * 1e3:>9.1f}{p.rate / mib:>9.0f}"
        f"{p.floor_rate / mib:>9.0f}{p.ratio:>10.2f}"
        for p in found
    ]
    lines += [
        "",
        f"generation {work.generate_seconds:g} s and inference {work.inference_seconds:g} s by "
        f"{work.stand_in}; MiB of the "
        "rank that has most",
        f"{'arm':<16}{'exposed s':>10}{'hidden s':>10}{'generating':>12}{'peak':>9}{'released':>10}"
        f"{'temporary':>11}",
    ]
    lines += [
        f"{a.arm:<16}{a.exposed:>10.3f}{a.hidden:>10.3f}{a.generating / mib:>12.1f}"
        f"{a.peak / mib:>9.1f}{a.released / mib:>10.1f}{a.temporary / mib:>11.1f}"
        for a in compared
    ]
    lines += [
        "",
        f"Weights that the naive way keeps beside the rollout's, counted from the plan: "
        f"{redundant / mib:.1f} MiB a rank",
    ]
    lines += [
        f"Goal, {name}: {'met' if met else 'missed'}"
        for name, met in goals(work, found, compared).items()
    ]
    return "\n".join(lines)


def goals(
    work: Work, found: Sequence[PhaseResult], compared: Sequence[ArmResult]
) -> dict[str, bool]:
    (gather,) = [p for p in found if p.phase == "gather"]
    copies = [p for p in found if not p.phase.startswith("gather")]
    return {
        f"copies at {GOAL} of their floor or more": all(p.ratio >= GOAL for p in copies),
        f"gather at {GOAL} of its floor or more": gather.ratio >= GOAL,
        "temporary of two buckets or less": all(
            a.temporary <= 2 * work.bucket_bytes for a in compared if a.arm != "naive"
        ),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = harness.parser(__doc__)
    parser.add_argument(
        "--model", default="smollm2", help=f"{', '.join(SHAPES)}, or a folder with a config.json"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument(
        "--train", metavar="LAYOUT", help="default: tp=N for N devices, on a CPU tp=2"
    )
    parser.add_argument("--rollout", metavar="LAYOUT", help="default: dp=N")
    parser.add_argument("--bucket", default="4MiB")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--generate-seconds", type=float, default=0.5)
    parser.add_argument("--inference-seconds", type=float, default=1.5)
    parser.add_argument("--stand-in", choices=["clock", "compute"], default="clock")
    parser.add_argument(
        "--malloc", choices=["keep", "release"], default="keep", help="of a CPU: what is freed"
    )
    parser.add_argument("--deadline", type=float, default=1200, help="seconds")
    parser.add_argument(
        "--smoke", action="store_true", help="a tiny model, few repetitions: does it run at all?"
    )
    options = parser.parse_args(arguments)
    if options.smoke:
        options.model = "tiny"
        options.repetitions = 2
        options.bucket = "64KiB"
        options.generate_seconds = 0.01
        options.inference_seconds = 0.1
    device = devices.select()
    count = 2 if device.type == "cpu" else torch.accelerator.device_count()
    work = Work(
        state=model_state(config(options.model), getattr(torch, options.dtype)),
        train=parse_layout(f"tp={count}" if options.train is None else options.train, "train"),
        rollout=parse_layout(
            f"dp={count}" if options.rollout is None else options.rollout, "rollout"
        ),
        bucket_bytes=int(parse_size(options.bucket)),  # type: ignore[call-overload]
        repetitions=options.repetitions,
        generate_seconds=options.generate_seconds,
        inference_seconds=options.inference_seconds,
        stand_in=options.stand_in,
        malloc=options.malloc,
        block_bytes=2**20 if options.smoke else 2**28,
        device=device.type,
    )
    results = run_ranks(work, options.deadline)
    found = phases(results, device.type)
    compared = arms(results)
    exchange = results[0]["exchange"]
    redundant = max(redundant_if_naive(work.plan))
    print(table(work, exchange, found, compared, redundant))
    if options.json:
        result = {
            "model": options.model,
            "bytes": work.state.nbytes,
            "train": str(work.train),
            "rollout": str(work.rollout),
            "device": device.type,
            "bucket_bytes": work.bucket_bytes,
            "exchange": exchange,
            "phases": [asdict(p) for p in found],
            "arms": [asdict(a) for a in compared],
            "redundant_if_naive": redundant,
            "goals": goals(work, found, compared),
        }
        options.json.write(result)


if __name__ == "__main__":
    main()
