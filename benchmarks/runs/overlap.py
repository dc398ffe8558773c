"""How near an asynchronous run comes to the speed of its busiest stage, and how far a synchronous
one stays behind.

    python -m benchmarks.runs.overlap [--step-seconds 3] [--balance 1] [--steps 24] [--bounds 0 1 2 4] [--json FILE]
    python -m benchmarks.runs.overlap --replicas 4 --swap-share 0.1 --bounds 2
    python -m benchmarks.runs.overlap --ray 1 2 4 8 [--bounds 2]
    python -m benchmarks.runs.overlap --engine torch --replicas 2 [--model tiny] [--repeats 3] [--steps 24]
    python -m benchmarks.runs.overlap --smoke [--engine torch]

Real runs: recipe, embedded index, worker processes, shared memory, leases, weight sync. Only the
engines are mock: they take the time of a model of latency (``stages/engines/mock/engines.py``),
response lengths are log-normal with a long tail, and a group has the same lengths in every arm. The
synchronous arm is ``benchmarks/runs/synchronous.py`` over the same engines: generate all, reward all,
advantage all, train, swap.

The bound
---------
Let steps a + 1 .. b be trained between the ends of steps a and b. Their responses have L tokens
(recorded in that very run), and each stage needs at least so long for them, whatever else it waits
for:

    generation   L / (saturation_rows · row_rate)                       every slot of the engine decodes all the time
    training     (b - a) · step_seconds + L · token_seconds + publishing, as measured

No order of work finishes these steps in less than the larger of the two, the busiest stage's. An
arm's share of the bound is that number divided by the time that really passed: the share of time in
which the busiest stage did useful work. Weight swaps, prompts, commits, claims and all waiting are
overhead and count against the arm. ``--balance`` is training time over generation time; at 1 both
stages have to work all the time, which is hardest: neither can make up for a delay of the other.
The first steps (the pipeline fills) and the last (it drains) are left out.

Several replicas
----------------
With ``--replicas`` the slots are shared among so many rollout workers, and each bound is run twice:
all replicas swap their weights as soon as they can (together), and one after the other (rolling). A
swap keeps a replica from decoding for ``--swap-share`` of a step; "all stop" is the share of time
in which no replica could decode at all.

With ``--ray`` there is one run for each number of hosts, on a Ray cluster of so many raylets on
this machine. Each host has a replica with all the slots, and the work grows with them, so that a
step keeps every stage as busy as on one host (also the trainer, which stands for one that grows
alike). linearity(n) = rate(n) / (n · rate(1)).

With ``--engine torch`` the replicas are real engines with a real model, and so is the trainer. The
most that such an engine could do is not known beforehand, so there is no bound and no synchronous
arm: the two manners of swapping run in turns, ``--repeats`` times each, medians are reported. A
replica stops for the last ``exposed_seconds`` of its swap (a span of its worker); it makes tokens
while it holds responses and is not stopped. "longest gap": the longest time in which none did,
stopped or because the gate was shut, as the trainer was behind.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import NormalDist, median
from typing import Any

from benchmarks import harness
from benchmarks.runs.executed import executed, on_ray, raylets
from benchmarks.runs.synchronous import synchronous_run
from orchestration.logs import configure
from orchestration.processes.forkserver import ForkServer
from orchestration.recipe.loading.load import parse_recipe
from orchestration.recipe.schema import Recipe
from pipeline.data.events import Event


@dataclass(frozen=True)
class Workload:
    """``step_seconds`` is what one stage needs for an average step at full load; the other needs
    ``balance`` times that or less. Lengths: log-normal, ``longest`` tokens at most."""

    step_seconds: float = 3.0
    balance: float = 1.0
    steps: int = 24
    margin: int = 5  # steps left out at either end
    groups: int = 32
    group_size: int = 8
    slots: int = 64
    median: float = 64.0
    sigma: float = 1.0
    longest: int = 384
    launcher: str = "process"
    replicas: int = 1
    swap_share: float = 0.005  # of a step, in which a replica swaps and does not decode
    address: str = ""  # of a Ray cluster that the run is on

    def on_hosts(self, hosts: int, address: str) -> Workload:
        """So many times the work, on as many hosts of the cluster at ``address``."""
        slots = self.slots * hosts
        groups = self.groups * hosts
        return replace(self, slots=slots, groups=groups, replicas=hosts, address=address)

    @property
    def mean_tokens(self) -> float:
        """Of a response: the mean of min(X, longest) for the log-normal X."""
        normal = NormalDist()
        cut = math.log(self.longest / self.median) / self.sigma
        inside = self.median * math.exp(self.sigma**2 / 2) * normal.cdf(cut - self.sigma)
        return inside + self.longest * (1 - normal.cdf(cut))

    @property
    def row_rate(self) -> float:
        """Tokens a second of one slot, such that all slots make a step in its share of
        ``step_seconds``."""
        seconds = self.step_seconds * min(1.0, 1 / self.balance)
        return self.groups * self.group_size * self.mean_tokens / self.slots / seconds

    @property
    def train_step_seconds(self) -> float:
        """The tenth of a training step that does not depend on its tokens."""
        return 0.1 * self.step_seconds * min(1.0, self.balance)

    @property
    def train_token_seconds(self) -> float:
        return 9 * self.train_step_seconds / (self.groups * self.group_size * self.mean_tokens)

    def recipe(self, bound: int, rolling: bool = True) -> Recipe:
        slots = self.slots // self.replicas
        decode = {
            "saturation_rows": slots,
            "row_rate": self.row_rate,
            "prefill_rate": 1e6,
            "median_tokens": self.median,
            "sigma": self.sigma,
            "swap_seconds": self.swap_share * self.step_seconds,
            "copy_seconds": 0.02 * self.step_seconds,
        }
        train = {"step_seconds": self.train_step_seconds, "token_seconds": self.train_token_seconds}
        return parse_recipe(
            {
                "name": f"overlap-{bound}",
                "model": {"source": "mock"},
                "prompts": {"source": "builtin", "task": "repeat", "max_prompt_tokens": 64},
                "rollout": {
                    "engine": "mock",
                    "workers": self.replicas,
                    "max_rows": slots,
                    "max_tokens": self.longest,
                    "mock": decode,
                },
                "sync": {"at_once": 0 if rolling else 1000},
                "reward": {"functions": [{"name": "spelling"}]},
                "algorithm": {"group_size": self.group_size},
                "train": {
                    "engine": "mock",
                    "steps": self.steps,
                    "groups_per_step": self.groups,
                    "mock": train,
                },
                "pipeline": {"staleness": bound, "arena": self.groups << 23},
                "launch": on_ray(self.address) if self.address else {"launcher": self.launcher},
            }
        )

    def generation_seconds(self, tokens: int) -> float:
        return tokens / (self.slots * self.row_rate)

    def training_seconds(self, steps: int, tokens: int) -> float:
        return steps * self.train_step_seconds + tokens * self.train_token_seconds


SMOKE = Workload(
    step_seconds=0.1, steps=6, margin=1, groups=4, group_size=4, slots=8, launcher="inline"
)


@dataclass(frozen=True)
class TorchWorkload:
    """Real engines on the model ``model``, a thread each.

    Nothing is learned (the learning rate is next to 0), so that the arms generate alike.
    """

    model: str = "tiny"
    replicas: int = 2
    steps: int = 24
    margin: int = 5  # steps left out at either end
    repeats: int = 3
    groups: int = 8
    group_size: int = 8
    rows: int = 32  # that one replica decodes at the same time
    longest: int = 48

    def recipe(self, bound: int, rolling: bool) -> Recipe:
        return parse_recipe(
            {
                "name": f"overlap-torch-{bound}",
                "model": {"source": self.model},
                "prompts": {"source": "builtin", "task": "repeat", "max_prompt_tokens": 64},
                "rollout": {
                    "workers": self.replicas,
                    "max_rows": self.rows,
                    "max_tokens": self.longest,
                    "threads": 1,
                },
                "sync": {"at_once": 0 if rolling else 1000},
                "reward": {"functions": [{"name": "spelling"}]},
                "algorithm": {"group_size": self.group_size},
                "train": {
                    "steps": self.steps,
                    "groups_per_step": self.groups,
                    "learning_rate": 1e-9,
                    "threads": 1,
                },
                "pipeline": {"staleness": bound, "arena": "256MiB"},
                "checkpoint": {"every": self.steps},
            }
        )


TORCH_SMOKE = TorchWorkload(
    steps=6, margin=1, repeats=1, groups=4, group_size=4, rows=8, longest=16
)


@dataclass(frozen=True)
class Trained:
    """One optimizer step of a run: response tokens, the moment it was done (seconds on any clock),
    and the largest staleness among its samples."""

    step: int
    tokens: int
    at: float
    staleness: int


@dataclass(frozen=True)
class Arm:
    """What one order of work reached between the ends of steps ``first`` and ``last``; shares are
    of the time passed."""

    name: str
    bound: int | None
    first: int
    last: int
    tokens: int
    seconds: float
    generation_share: float
    training_share: float
    staleness_max: int
    update_waits_share: float | None
    all_stop_share: float | None = None

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def of_bound(self) -> float:
        return max(self.generation_share, self.training_share)


def measured(
    workload: Workload,
    name: str,
    bound: int | None,
    steps: Sequence[Trained],
    publishing: float = 0.0,
    waits: float | None = None,
) -> Arm:
    first = steps[workload.margin - 1]
    last = steps[-workload.margin]
    between = steps[workload.margin : len(steps) - workload.margin + 1]
    tokens = sum(step.tokens for step in between)
    seconds = last.at - first.at
    return Arm(
        name,
        bound,
        first.step,
        last.step,
        tokens,
        seconds,
        workload.generation_seconds(tokens) / seconds,
        (workload.training_seconds(len(between), tokens) + publishing) / seconds,
        max(step.staleness for step in steps),
        waits,
    )


async def asynchronous(
    workload: Workload,
    bound: int,
    home: Path,
    rolling: bool = True,
    forks: ForkServer | None = None,
) -> Arm:
    """The real run with staleness bound ``bound``."""
    events = await executed(
        workload.recipe(bound, rolling), home / f"bound-{bound}{rolling}", forks=forks
    )
    steps = [event for event in events if event.kind == "step"]
    first = steps[workload.margin - 1]
    last = steps[-workload.margin]
    published = (e.data for e in events if e.kind == "sync" and e.data["worker"] == "update-0")
    publishing = sum(
        sync["publish_seconds"]
        for sync in published
        if first.data["version"] <= sync["version"] < last.data["version"]
    )
    waits = _update_waits(events, first.time, last.time)
    name = f"η = {bound}{'' if workload.replicas == 1 else _manner(rolling)}"
    arm = measured(workload, name, bound, _steps(steps), publishing, waits)
    stops = all_stops(
        workload.replicas, [swap.stopped for swap in swaps(events)], first.time, last.time
    )
    return replace(arm, all_stop_share=sum(stops) / (last.time - first.time))


def _manner(rolling: bool) -> str:
    return ", rolling" if rolling else ", together"


def _steps(events: Sequence[Event]) -> list[Trained]:
    return [
        Trained(
            event.data["step"],
            round(event.data["response_length_mean"] * event.data["rows"]),
            event.time,
            int(event.data["staleness_max"]),
        )
        for event in events
    ]


Interval = tuple[float, float]  # Unix seconds


@dataclass(frozen=True)
class Swap:
    """One replica's swap: its turn ``whole``, and the last part of it in which it could not
    decode."""

    worker: str
    version: int
    whole: Interval
    exposed: float

    @property
    def stopped(self) -> Interval:
        return self.whole[1] - self.exposed, self.whole[1]


def swaps(events: Sequence[Event]) -> list[Swap]:
    """All swaps, when they were by the workers' own clocks: a `sync` event follows a moment after
    its swap. Where the events lack the span of a swap, its `sync` event is used alone."""
    turns = {(worker, span["version"]): _interval(span) for worker, span in _spans(events, "swap")}
    found = []
    for event in events:
        if event.kind == "sync" and event.data["worker"].startswith("rollout-"):
            who = (event.data["worker"], event.data["version"])
            exposed = event.data["exposed_seconds"]
            found.append(Swap(*who, turns.get(who, (event.time - exposed, event.time)), exposed))
    return found


def _spans(events: Sequence[Event], name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Spans of the rollout workers with this name."""
    for event in events:
        if event.kind == "span" and event.data["stage"] == "rollout":
            yield from (
                (event.data["worker"], span) for span in event.data["spans"] if span["name"] == name
            )


def _interval(span: Mapping[str, Any]) -> Interval:
    return span["start"], span["start"] + span["seconds"]


def all_stops(replicas: int, stops: Sequence[Interval], begin: float, end: float) -> list[float]:
    """How many seconds each of the times took, between two moments, in which every replica was
    stopped by its swap."""
    within = [
        (max(since, begin), min(until, end))
        for since, until in stops
        if since < end and until > begin
    ]
    edges = sorted(edge for since, until in within for edge in ((since, 1), (until, -1)))
    stopped = 0
    since = begin
    found = list[float]()
    for at, change in edges:
        if stopped == replicas:
            found.append(at - since)
        stopped = stopped + change
        since = at
    return found


def longest_gap(made: Sequence[Interval], begin: float, end: float) -> float:
    """Seconds of the longest time between two moments that none of ``made`` covers."""
    gap = 0.0
    covered = begin
    for since, until in sorted(made):
        gap = max(gap, min(since, end) - covered)
        covered = min(max(covered, until), end)
    return max(gap, end - covered)


def without(made: Sequence[Interval], stops: Sequence[Interval]) -> Iterator[Interval]:
    """``made`` but for what lies in ``stops``, which are apart from each other and in order."""
    for since, until in made:
        for stop, go in stops:
            if stop < until and go > since:
                if since < stop:
                    yield since, stop
                since = go
        if since < until:
            yield since, until


@dataclass(frozen=True)
class TorchRun:
    """One run between the ends of two steps.

    ``exposed_seconds``: of the median swap; ``longest_stop``: seconds in which all replicas were
    stopped by a swap; ``longest_gap``: in which none made a token, for this or for want of work;
    ``at_once``: replicas that were in their swaps at the same moment, at most.
    """

    rolling: bool
    bound: int
    tokens_per_second: float
    all_stop_share: float
    longest_stop: float
    longest_gap: float
    exposed_seconds: float
    swaps: int
    at_once: int
    staleness_max: int


async def torch_run(
    workload: TorchWorkload, bound: int, home: Path, rolling: bool, forks: ForkServer | None
) -> TorchRun:
    events = await executed(workload.recipe(bound, rolling), home, forks)
    reports = (
        event.data for event in events if event.kind == "span" and event.data["stage"] == "rollout"
    )
    if hidden := sum(data["left_out"] for data in reports):
        raise RuntimeError(
            f"{hidden} spans were left out of the events, so it is unknown who was generating; use "
            f"fewer groups"
        )
    steps = _steps([event for event in events if event.kind == "step"])
    begin = steps[workload.margin - 1].at
    end = steps[-workload.margin].at
    tokens = sum(step.tokens for step in steps[workload.margin : len(steps) - workload.margin + 1])
    found = swaps(events)
    made = list[Interval]()
    for worker in sorted({swap.worker for swap in found}):
        held = [_interval(span) for who, span in _spans(events, "rollout") if who == worker]
        made += without(held, sorted(swap.stopped for swap in found if swap.worker == worker))
    stops = all_stops(workload.replicas, [swap.stopped for swap in found], begin, end)
    edges = sorted(edge for swap in found for edge in ((swap.whole[0], 1), (swap.whole[1], -1)))
    return TorchRun(
        rolling,
        bound,
        tokens / (end - begin),
        sum(stops) / (end - begin),
        max(stops, default=0.0),
        longest_gap(made, begin, end),
        median(swap.exposed for swap in found if begin < swap.whole[1] < end),
        len(found),
        max(itertools.accumulate(change for _, change in edges)),
        max(step.staleness for step in steps),
    )


async def measure_torch(workload: TorchWorkload, bounds: Sequence[int]) -> list[TorchRun]:
    """The two manners in turns; every other time the second goes first."""
    runs = []
    with ExitStack() as stack:
        home = stack.enter_context(tempfile.TemporaryDirectory(prefix="overlap-"))
        # One for all runs, so that libraries are imported once.
        forks = (
            stack.enter_context(closing(ForkServer.start())) if sys.platform == "linux" else None
        )
        for bound, repeat in itertools.product(bounds, range(workload.repeats)):
            for rolling in (False, True) if repeat % 2 == 0 else (True, False):
                out = Path(home) / f"bound-{bound}-{repeat}{_manner(rolling)[2:]}"
                runs.append(await torch_run(workload, bound, out, rolling, forks))
    return runs


def torch_table(runs: Sequence[TorchRun]) -> str:
    """Medians of each arm's runs."""
    lines = [
        "                      trained   all stop    longest all   longest gap     exposed   "
        "replicas swapping  staleness",
        "arm                   tokens/s    (share)   stop, seconds       seconds   ms a swap    at "
        "once, at most        max",
    ]
    for bound, rolling in sorted({(run.bound, run.rolling) for run in runs}):
        arm = [run for run in runs if (run.bound, run.rolling) == (bound, rolling)]
        lines.append(
            f"{f'η = {bound}{_manner(rolling)}':<18}"
            f"{median(run.tokens_per_second for run in arm):>12.0f}"
            f"{median(run.all_stop_share for run in arm):>11.5f}"
            f"{median(run.longest_stop for run in arm):>16.4f}"
            f"{median(run.longest_gap for run in arm):>14.3f}"
            f"{1e3 * median(run.exposed_seconds for run in arm):>12.1f}"
            f"{max(run.at_once for run in arm):>20}{max(run.staleness_max for run in arm):>11}"
        )
    return "\n".join(lines)


def _update_waits(events: Sequence[Event], begin: float, end: float) -> float | None:
    """The share of the time between two moments in which the update stage had nothing to claim."""
    reports = [
        event for event in events if event.kind == "stage" and event.data["stage"] == "update"
    ]
    within = [event.data for event in reports if begin <= event.time <= end]
    if len(within) < 2:
        return None
    return (within[-1]["waiting_input"] - within[0]["waiting_input"]) / (
        within[-1]["wall"] - within[0]["wall"]
    )


async def synchronous(workload: Workload) -> Arm:
    """Whole-batch barriers between all stages."""
    steps = []
    async for step in synchronous_run(workload.recipe(0)):
        tokens = len(step.batch["response_ids"].values())
        steps.append(Trained(step.step, tokens, time.monotonic(), 0))
    return measured(workload, "synchronous", None, steps)


def table(arms: Sequence[Arm]) -> str:
    """The arms as text; speed-up is against the first."""
    lines = [
        "                      trained   of the busiest    time in use by     update      all   "
        "staleness   speed-up over",
        "order                 tokens/s    stage's bound    gener.   train.    waits     stop      "
        "   max     synchronous",
    ]
    for arm in arms:
        waits = "-" if arm.update_waits_share is None else f"{arm.update_waits_share:.3f}"
        stop = "-" if arm.all_stop_share is None else f"{arm.all_stop_share:.3f}"
        lines.append(
            f"{arm.name:<18}{arm.tokens_per_second:>12.0f}{arm.of_bound:>17.3f}"
            f"{arm.generation_share:>10.3f}"
            f"{arm.training_share:>9.3f}{waits:>9}{stop:>9}{arm.staleness_max:>12}"
            f"{arm.tokens_per_second / arms[0].tokens_per_second:>16.2f}"
        )
    return "\n".join(lines)


async def measure(workload: Workload, bounds: Sequence[int]) -> list[Arm]:
    arms = [await synchronous(workload)]
    with tempfile.TemporaryDirectory(prefix="overlap-") as home:
        for bound in bounds:
            for rolling in (True,) if workload.replicas == 1 else (False, True):
                arms.append(await asynchronous(workload, bound, Path(home), rolling))
    return arms


async def measure_on_ray(workload: Workload, hosts: Sequence[int], bound: int) -> list[Arm]:
    """One run for each number of hosts."""
    arms = []
    with (
        tempfile.TemporaryDirectory(prefix="overlap-") as home,
        closing(ForkServer.start()) as forks,
    ):
        for number in hosts:
            with raylets(number, cpus=2) as cluster:
                of = workload.on_hosts(number, cluster.address)
                arm = await asynchronous(of, bound, Path(home) / f"{number}", forks=forks)
            arms.append(replace(arm, name=f"{number} hosts"))
    return arms


def ray_table(hosts: Sequence[int], arms: Sequence[Arm]) -> str:
    """The arms as text; linearity is against the first."""
    lines = [
        "            trained               of the busiest    time in use by     update    "
        "staleness",
        "hosts      tokens/s    linearity   stage's bound    gener.   train.     waits          "
        "max",
    ]
    for number, arm in zip(hosts, arms, strict=True):
        linearity = arm.tokens_per_second / number / (arms[0].tokens_per_second / hosts[0])
        lines.append(
            f"{number:>5}{arm.tokens_per_second:>14.0f}{linearity:>13.1%}{arm.of_bound:>16.3f}"
            f"{arm.generation_share:>10.3f}"
            f"{arm.training_share:>9.3f}{arm.update_waits_share or 0.0:>10.3f}"
            f"{arm.staleness_max:>13}"
        )
    return "\n".join(lines)


def report(workload: Workload, arms: Sequence[Arm]) -> dict[str, Any]:
    rows = [
        {**asdict(arm), "tokens_per_second": arm.tokens_per_second, "of_bound": arm.of_bound}
        for arm in arms
    ]
    return {"workload": asdict(workload), "arms": rows}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--engine", choices=["mock", "torch"], default="mock")
    parser.add_argument("--step-seconds", type=float, default=Workload.step_seconds, help="mock")
    parser.add_argument("--balance", type=float, default=Workload.balance, help="mock")
    parser.add_argument("--steps", type=int, default=Workload.steps)
    parser.add_argument("--bounds", type=int, nargs="*", help="default: 0 1 2 4; with torch 2")
    parser.add_argument(
        "--launcher", choices=["process", "inline"], default=Workload.launcher, help="mock"
    )
    parser.add_argument("--replicas", type=int, help="default: 1; with torch 2")
    parser.add_argument(
        "--ray", type=int, nargs="+", metavar="HOSTS", help="mock: on Ray clusters of so many hosts"
    )
    parser.add_argument("--swap-share", type=float, default=Workload.swap_share, help="mock")
    parser.add_argument(
        "--model", choices=["tiny", "smollm2"], default=TorchWorkload.model, help="torch"
    )
    parser.add_argument(
        "--repeats", type=int, default=TorchWorkload.repeats, help="torch: runs of each arm"
    )
    parser.add_argument(
        "--smoke", action="store_true", help="seconds instead of minutes: does it run at all?"
    )
    options = parser.parse_args(arguments)
    if not options.smoke and options.steps <= 2 * Workload.margin:
        parser.error(
            f"--steps {options.steps}: {Workload.margin} at either end are left out; use more"
        )
    result = (
        _main_torch(parser, options) if options.engine == "torch" else _main_mock(parser, options)
    )
    if options.json:
        options.json.write(result)


def _main_torch(parser: argparse.ArgumentParser, options: argparse.Namespace) -> dict[str, Any]:
    bounds = options.bounds or [2]
    replicas = options.replicas or TorchWorkload.replicas
    if replicas < 2:
        parser.error(
            f"--replicas {replicas}: with --engine torch two manners of swapping are "
            f"compared; use 2 or more"
        )
    if min(bounds) < 1:
        parser.error(
            f"--bounds {min(bounds)}: with η = 0 nothing is generated while replicas "
            f"swap; use 1 or more"
        )
    workload = TorchWorkload(options.model, replicas, options.steps, repeats=options.repeats)
    if options.smoke:
        workload = replace(TORCH_SMOKE, model=options.model, replicas=replicas)
    runs = asyncio.run(measure_torch(workload, bounds))
    print(
        f"{workload.model}, {workload.replicas} replicas of {workload.rows} rows; "
        f"{workload.groups} groups of {workload.group_size} a step, responses of "
        f"{workload.longest} tokens at most; steps {workload.margin + 1} to "
        f"{workload.steps - workload.margin + 1} of {workload.steps}; medians of "
        f"{workload.repeats} runs of each arm, "
        "in turns\n"
    )
    print(torch_table(runs))
    return {"workload": asdict(workload), "runs": [asdict(run) for run in runs]}


def _main_mock(parser: argparse.ArgumentParser, options: argparse.Namespace) -> dict[str, Any]:
    replicas = options.replicas or Workload.replicas
    shared = {"replicas": replicas, "swap_share": options.swap_share}
    if Workload.slots % replicas or Workload.slots // replicas < Workload.group_size:
        parser.error(
            f"--replicas {replicas}: {Workload.slots} slots cannot be shared among them in whole "
            f"groups of {Workload.group_size}; use 1, 2, 4 or 8"
        )
    workload = replace(SMOKE, **shared, slots=SMOKE.slots * replicas)
    bounds = options.bounds or [0, 2]
    if not options.smoke:
        bounds = [0, 1, 2, 4] if options.bounds is None else options.bounds
        workload = Workload(
            options.step_seconds,
            options.balance,
            options.steps,
            launcher=options.launcher,
            **shared,
        )
    if options.ray:
        arms = asyncio.run(measure_on_ray(workload, options.ray, (options.bounds or [2])[0]))
    else:
        arms = asyncio.run(measure(workload, bounds))
    print(
        f"{'Each host: ' if options.ray else ''}{workload.groups} groups of {workload.group_size} "
        f"a step, {workload.slots} slots, responses of {workload.mean_tokens:.0f} tokens on "
        f"average, {workload.longest} at most; an average step keeps generation busy for "
        f"{workload.step_seconds * min(1, 1 / workload.balance):.2f} s and training for "
        f"{workload.step_seconds * min(1, workload.balance):.2f} s; steps {arms[0].first + 1} to "
        f"{arms[0].last} of {workload.steps}\n"
    )
    print(ray_table(options.ray, arms) if options.ray else table(arms))
    return report(workload, arms)


if __name__ == "__main__":
    configure()
    main()
