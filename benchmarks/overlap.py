"""How near an asynchronous run comes to the speed of its busiest stage, and how far a synchronous one stays behind.

    python benchmarks/overlap.py [--step-seconds 3] [--balance 1] [--steps 24] [--bounds 0 1 2 4] [--json FILE]
    python benchmarks/overlap.py --replicas 4 --swap-share 0.1 --bounds 2
    python benchmarks/overlap.py --smoke

Real runs: recipe, embedded index, worker processes, shared memory, leases, weight sync. Only the engines are mock: they
take the time that a model of latency says (``stages/engines/mock.py``), response lengths are log-normal with a long tail,
and the same group has the same lengths in every arm. The synchronous arm is ``orchestration/synchronous.py`` over the same
engines: generate all, reward all, advantage all, train, swap.

The bound
---------
Let steps a + 1 .. b be trained between the ends of steps a and b. Their responses have L tokens (recorded in that very
run), and each stage needs at least so long for them, whatever else it waits for:

    generation   L / (saturation_rows · row_rate)                       every slot of the engine decodes all the time
    training     (b - a) · step_seconds + L · token_seconds + publishing, as measured

No order of work finishes these steps in less than the larger of the two, the busiest stage's. An arm's share of the
bound is that number divided by the time that really passed: the share of time in which the busiest stage did useful
work. Weight swaps, prompts, commits, claims and all waiting are overhead and count against the arm. ``--balance`` is
training time over generation time; at 1 both stages have to work all the time, which is hardest: neither can make up
for a delay of the other. The first steps (the pipeline fills) and the last (it drains) are left out.

Several replicas
----------------
With ``--replicas`` the slots are shared among so many rollout workers, and each bound is run twice: all replicas swap their
weights as soon as they can (together), and one after the other (rolling). A swap keeps a replica from decoding for
``--swap-share`` of a step; "all stop" is the share of time in which no replica could decode at all.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

from orchestration.logs import configure
from orchestration.recipe import Recipe, parse_recipe
from orchestration.run import Run
from orchestration.synchronous import synchronous_run
from pipeline.index import Event


@dataclass(frozen=True)
class Workload:
    """``step_seconds`` is what one stage needs for an average step at full load; the other needs ``balance`` times that or
    less. Lengths: log-normal, ``longest`` tokens at most."""

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

    @property
    def mean_tokens(self) -> float:
        """Of a response: the mean of min(X, longest) for the log-normal X."""
        normal, cut = NormalDist(), math.log(self.longest / self.median) / self.sigma
        inside = self.median * math.exp(self.sigma**2 / 2) * normal.cdf(cut - self.sigma)
        return inside + self.longest * (1 - normal.cdf(cut))

    @property
    def row_rate(self) -> float:
        """Tokens a second of one slot, such that all slots make a step in its share of ``step_seconds``."""
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
                "sync": {"rolling": rolling},
                "reward": {"functions": [{"name": "spelling"}]},
                "algorithm": {"group_size": self.group_size},
                "train": {"engine": "mock", "steps": self.steps, "groups_per_step": self.groups, "mock": train},
                "pipeline": {"staleness": bound, "arena": "256MiB"},
                "launch": {"launcher": self.launcher},
            }
        )

    def generation_seconds(self, tokens: int) -> float:
        return tokens / (self.slots * self.row_rate)

    def training_seconds(self, steps: int, tokens: int) -> float:
        return steps * self.train_step_seconds + tokens * self.train_token_seconds


SMOKE = Workload(step_seconds=0.1, steps=6, margin=1, groups=4, group_size=4, slots=8, launcher="inline")


@dataclass(frozen=True)
class Trained:
    """One optimizer step of a run: response tokens, the moment it was done (seconds on any clock), and the largest
    staleness among its samples."""

    step: int
    tokens: int
    at: float
    staleness: int


@dataclass(frozen=True)
class Arm:
    """What one order of work reached between the ends of steps ``first`` and ``last``; shares are of the time passed."""

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
    first, last = steps[workload.margin - 1], steps[-workload.margin]
    between = steps[workload.margin : len(steps) - workload.margin + 1]
    tokens, seconds = sum(step.tokens for step in between), last.at - first.at
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


async def asynchronous(workload: Workload, bound: int, home: Path, rolling: bool = True) -> Arm:
    """The real run with staleness bound ``bound``."""
    manner = "" if workload.replicas == 1 else ", rolling" if rolling else ", together"
    run, events = Run.create(workload.recipe(bound, rolling), home / f"bound-{bound}{rolling}"), list[Event]()

    async def follow() -> None:
        async for event in run.events():
            events.append(event)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(follow())
        result = await run.execute()
    if result.state != "finished":
        raise RuntimeError(f"the run with bound {bound} {result.state}: {result.reason}")
    told = [event for event in events if event.kind == "step"]
    steps = [
        Trained(
            event.data["step"],
            round(event.data["response_length_mean"] * event.data["rows"]),
            event.time,
            int(event.data["staleness_max"]),
        )
        for event in told
    ]
    first, last = told[workload.margin - 1], told[-workload.margin]
    published = (e.data for e in events if e.kind == "sync" and e.data["worker"] == "update-0")
    publishing = sum(
        sync["publish_seconds"] for sync in published if first.data["version"] <= sync["version"] < last.data["version"]
    )
    arm = measured(
        workload, f"η = {bound}{manner}", bound, steps, publishing, _update_waits(events, first.time, last.time)
    )
    return replace(arm, all_stop_share=_all_stop(workload.replicas, events, first.time, last.time))


def _all_stop(replicas: int, events: Sequence[Event], begin: float, end: float) -> float:
    """The share of the time between two moments in which every replica was swapping."""
    swaps = [e for e in events if e.kind == "sync" and e.data["exposed_seconds"]]
    edges = sorted(
        edge for e in swaps for edge in ((e.time - e.data["exposed_seconds"], 1), (e.time, -1)) if begin < edge[0] < end
    )
    stopped, since, total = 0, begin, 0.0
    for at, change in edges:
        total += at - since if stopped == replicas else 0.0
        stopped, since = stopped + change, at
    return total / (end - begin)


def _update_waits(events: Sequence[Event], begin: float, end: float) -> float | None:
    """The share of the time between two moments in which the update stage had nothing to claim."""
    told = [event for event in events if event.kind == "stage" and event.data["stage"] == "update"]
    within = [event.data for event in told if begin <= event.time <= end]
    if len(within) < 2:
        return None
    return (within[-1]["waiting_input"] - within[0]["waiting_input"]) / (within[-1]["wall"] - within[0]["wall"])


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
        "                      trained   of the busiest    time in use by     update      all   staleness   speed-up over",
        "order                 tokens/s    stage's bound    gener.   train.    waits     stop         max     synchronous",
    ]
    for arm in arms:
        waits = "-" if arm.update_waits_share is None else f"{arm.update_waits_share:.3f}"
        stop = "-" if arm.all_stop_share is None else f"{arm.all_stop_share:.3f}"
        lines.append(
            f"{arm.name:<18}{arm.tokens_per_second:>12.0f}{arm.of_bound:>17.3f}{arm.generation_share:>10.3f}"
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


def report(workload: Workload, arms: Sequence[Arm]) -> dict[str, Any]:
    told = [{**asdict(arm), "tokens_per_second": arm.tokens_per_second, "of_bound": arm.of_bound} for arm in arms]
    return {"workload": asdict(workload), "arms": told}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-seconds", type=float, default=Workload.step_seconds)
    parser.add_argument("--balance", type=float, default=Workload.balance)
    parser.add_argument("--steps", type=int, default=Workload.steps)
    parser.add_argument("--bounds", type=int, nargs="*", default=[0, 1, 2, 4])
    parser.add_argument("--launcher", choices=["process", "inline"], default=Workload.launcher)
    parser.add_argument("--replicas", type=int, default=Workload.replicas)
    parser.add_argument("--swap-share", type=float, default=Workload.swap_share)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true", help="seconds instead of minutes: does it run at all?")
    options = parser.parse_args(arguments)
    shared = {"replicas": options.replicas, "swap_share": options.swap_share}
    if Workload.slots % options.replicas or Workload.slots // options.replicas < Workload.group_size:
        parser.error(
            f"--replicas {options.replicas}: {Workload.slots} slots cannot be shared among them in whole groups of "
            f"{Workload.group_size}; use 1, 2, 4 or 8"
        )
    workload, bounds = replace(SMOKE, **shared, slots=SMOKE.slots * options.replicas), [0, 2]
    if not options.smoke:
        bounds = options.bounds
        workload = Workload(options.step_seconds, options.balance, options.steps, launcher=options.launcher, **shared)
        if options.steps <= 2 * workload.margin:
            parser.error(f"--steps {options.steps}: {workload.margin} at either end are left out; use more")
    arms = asyncio.run(measure(workload, bounds))
    print(
        f"{workload.groups} groups of {workload.group_size} a step, {workload.slots} slots, responses of "
        f"{workload.mean_tokens:.0f} tokens on average, {workload.longest} at most; an average step keeps generation "
        f"busy for {workload.step_seconds * min(1, 1 / workload.balance):.2f} s "
        f"and training for {workload.step_seconds * min(1, workload.balance):.2f} s; "
        f"steps {arms[0].first + 1} to {arms[0].last} of {workload.steps}\n"
    )
    print(table(arms))
    if options.json:
        options.json.write_text(json.dumps(report(workload, arms), indent=1))


if __name__ == "__main__":
    configure()
    main()
