"""How near runs of agents come to the speed of their busiest stage, and what a turn costs beside the
engine.

    python -m benchmarks.runs.agents [--tools 0 1 3] [--bounds 0 1 2] [--steps 16] [--json FILE]
    python -m benchmarks.runs.agents --sessions 1000
    python -m benchmarks.runs.agents --workers 2 --groups 32 --step-seconds 4
    python -m benchmarks.runs.agents --turn
    python -m benchmarks.runs.agents --smoke

Real runs: recipe, embedded index, worker processes, environments in processes of their own. The
engines are mock: they take the time of a model of latency (``stages/engines/mock/engines.py``). The
length of a turn is drawn from a log-normal distribution. So is the time of a tool: its mean is
``--tools`` times the mean time of a turn in the engine. A trajectory has 1 to 8 turns.

    share of the bound   the time that the busiest stage needs for the tokens of the steps between the first and the last
                         ones, over the time that passed (as in overlap.py); tools wait, and need no processor
    share that η lets    the same with the least time that any order of work has under the staleness bound: the
                         trajectories of step n begin when step n - 1 - η is trained at the earliest, and the longest
                         of them takes its tokens' time in an engine without others, and that of its tools
    η = 0                turns of a step in lockstep: the batch waits for its slowest turn, each time
    a turn               of a run with one group at a time, an engine and a tool that take no time: from an answer to the
                         next question, which is park, claim, generate, park, claim
    computed again       tokens of earlier turns that are computed twice. Their keys and values are dropped when new
                         weights come, and are not there on another worker. The recipe is `guess`, with real engines
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import NormalDist

from benchmarks import harness
from benchmarks.runs.executed import executed
from orchestration.history.totals import RunTotals
from orchestration.logs import configure
from orchestration.recipe.loading.load import load_recipe, parse_recipe
from orchestration.recipe.schema import Recipe
from pipeline.data.events import Event
from stages.samples.reading import groups
from stages.samples.sample_log import FOLDER
from stages.trajectories.trajectory import trajectory_seed

MOST_TURNS = 8
SIGMA = 0.8  # of the logarithms of lengths and times


class Tool:
    """An environment with one slow tool. The tool's time is log-normal with the mean ``seconds``; the
    seed decides after how many turns the trajectory ends. ``log``: a file for the seconds from each answer to the
    next question."""

    replayable = True
    gives_reward = True

    def __init__(self, seconds: float, log: str = "") -> None:
        self._seconds = seconds
        self._log = log
        self._gaps: list[float] = []
        self._answered = math.nan

    def reset(self, seed: int) -> str:
        self._waits = tool_times(self._seconds, seed)
        self._answered = time.perf_counter()
        return "?"

    async def step(self, text: str) -> tuple[str | None, float, bool]:
        self._gaps.append(time.perf_counter() - self._answered)
        if wait := self._waits.pop():
            await asyncio.sleep(wait)
        if not self._waits and self._log:
            await asyncio.to_thread(self._write)
        self._answered = time.perf_counter()
        return "+", float(len(text) % 2), not self._waits

    def _write(self) -> None:
        with Path(self._log).open("a") as file:
            file.write(json.dumps(self._gaps) + "\n")


def tool_times(seconds: float, seed: int) -> list[float]:
    """Return the seconds of each tool call of the trajectory with this ``seed``. ``seconds``: the
    mean of their distribution."""
    generator = random.Random(seed)
    turns = generator.randint(1, MOST_TURNS)
    if not seconds:
        return [0.0] * turns
    mean = math.log(seconds) - SIGMA**2 / 2
    return [generator.lognormvariate(mean, SIGMA) for _ in range(turns)]


@dataclass(frozen=True)
class Workload:
    """``tools``: seconds of a tool, as a multiple of a turn's in the engine. ``step_seconds``: what
    the engine needs for a step's average turns, and the trainer too, a tenth of it for the step and
    the rest by tokens. ``workers``: of rollout, each with its part of the slots."""

    tools: float = 1.0
    steps: int = 16
    margin: int = 4  # steps left out at either end
    groups: int = 16
    group_size: int = 8
    slots: int = 64
    workers: int = 1
    median: float = 16.0  # tokens of a turn
    longest: int = 96
    step_seconds: float = 2.0
    log: str = ""

    @property
    def turn_tokens(self) -> float:
        """The mean of min(X, longest) for the log-normal X."""
        normal = NormalDist()
        cut = math.log(self.longest / self.median) / SIGMA
        inside = self.median * math.exp(SIGMA**2 / 2) * normal.cdf(cut - SIGMA)
        return inside + self.longest * (1 - normal.cdf(cut))

    @property
    def step_tokens(self) -> float:
        """The mean of the tokens that are generated for a step."""
        turns = self.groups * self.group_size * (1 + MOST_TURNS) / 2
        return turns * self.turn_tokens

    @property
    def row_rate(self) -> float:
        """Tokens a second of one slot, such that all slots make a step in ``step_seconds``."""
        return self.step_tokens / self.slots / self.step_seconds

    @property
    def train_options(self) -> dict[str, float]:
        return {
            "step_seconds": 0.1 * self.step_seconds,
            "token_seconds": 0.9 * self.step_seconds / self.step_tokens,
        }

    @property
    def tool_seconds(self) -> float:
        return self.tools * self.turn_tokens / self.row_rate

    def recipe(self, bound: int) -> Recipe:
        decode = {
            "saturation_rows": self.slots // self.workers,
            "row_rate": self.row_rate,
            "prefill_rate": 1e7,
            "median_tokens": self.median,
            "sigma": SIGMA,
            "swap_seconds": 0.005 * self.step_seconds,
        }
        return parse_recipe(
            {
                "name": f"agents-{bound}",
                "model": {"source": "mock"},
                "prompts": {"source": "builtin", "task": "repeat", "max_prompt_tokens": 64},
                "environment": {
                    "use": "benchmarks.runs.agents:Tool",
                    "options": {"seconds": self.tool_seconds, "log": self.log},
                    "max_turns": MOST_TURNS,
                    "max_tokens": (MOST_TURNS + 1) * (self.longest + 2),
                    "concurrency": 4096,
                },
                "rollout": {
                    "engine": "mock",
                    "workers": self.workers,
                    "max_rows": self.slots // self.workers,
                    "max_tokens": self.longest + 1,
                    "mock": decode,
                },
                "reward": {"functions": [{"name": "environment"}]},
                "algorithm": {"group_size": self.group_size},
                "train": {
                    "engine": "mock",
                    "steps": self.steps,
                    "groups_per_step": self.groups,
                    "token_budget": 4096,
                    "mock": self.train_options,
                },
                "pipeline": {"staleness": bound, "arena": "1GiB"},
            }
        )


@dataclass(frozen=True)
class Arm:
    """What a run reached. ``share``: of the bound. ``share_permitted``: of the bound with η.
    ``open``: the most trajectories at a time."""

    tools: float
    bound: int
    tokens: int
    seconds: float
    share: float
    share_permitted: float
    open: int
    staleness: int


async def run_arm(workload: Workload, bound: int, home: Path) -> Arm:
    """Execute ``workload`` under the staleness ``bound``."""
    recipe = workload.recipe(bound)
    run = home / f"{workload.tools}-{bound}"
    events = await executed(recipe, run)
    steps = [event for event in events if event.kind == "step"]
    first, last = steps[workload.margin - 1], steps[-workload.margin]
    between = steps[workload.margin : len(steps) - workload.margin + 1]
    tokens = sum(round(step.data["response_length_mean"] * step.data["rows"]) for step in between)
    seconds = last.time - first.time
    generating = tokens / (workload.slots * workload.row_rate)
    loads = loads_of_steps(workload, recipe, run)
    training = sum(load.training for load in loads[workload.margin : 1 - workload.margin])
    times = [step.time - first.time for step in steps]
    permitted = least_seconds(workload, bound, loads, times)
    return Arm(
        workload.tools,
        bound,
        tokens,
        seconds,
        max(generating, training) / seconds,
        max(generating, permitted) / seconds,
        most_open(events),
        max(int(step.data["staleness_max"]) for step in steps),
    )


@dataclass
class Load:
    """Seconds of a step: of its longest trajectory, were it alone, and of its training."""

    longest: float
    training: float


def loads_of_steps(workload: Workload, recipe: Recipe, run: Path) -> list[Load]:
    """Return what each step of the finished ``run`` asks for."""
    options = workload.train_options
    loads = [Load(0.0, options["step_seconds"]) for _ in range(workload.steps)]
    for group in groups(run / FOLDER):
        fed = 0
        for sample in group:
            seed = trajectory_seed(recipe.seed, sample["group"], sample["place"])
            tools = sum(tool_times(workload.tool_seconds, seed))
            generated = sum(turn["tokens"] for turn in sample["segments"] if turn["generated"])
            fed += sum(turn["tokens"] for turn in sample["segments"])
            load = loads[sample["step"] - 1]
            load.longest = max(load.longest, generated / workload.row_rate + tools)
        loads[group[0]["step"] - 1].training += fed * options["token_seconds"]
    return loads


def least_seconds(
    workload: Workload, bound: int, loads: Sequence[Load], times: Sequence[float]
) -> float:
    """Return the least seconds from the first to the last compared step, when the steps until the
    first one have ended at ``times``."""
    first, last = workload.margin - 1, len(times) - workload.margin
    ends = [*times[: first + 1]]
    for step in range(first + 1, last + 1):
        admitted = ends[step - 1 - bound] if step > bound else -math.inf
        ready = admitted + loads[step].longest
        ends.append(max(ends[-1], ready) + loads[step].training)
    return ends[last] - times[first]


def most_open(events: Sequence[Event]) -> int:
    """Return the most trajectories that were open at a time, as their stage reported."""
    stages = (event.data for event in events if event.kind == "stage")
    of_environments = (data for data in stages if data["stage"] == "environment")
    return max((int(data["trajectories"]["open"]) for data in of_environments), default=0)


async def turn_times(home: Path, steps: int) -> list[float]:
    """Run a flow whose engine and tools take no time, and return the seconds of each turn."""
    log = home / "gaps.jsonl"
    workload = Workload(
        tools=0.0, steps=steps, groups=1, group_size=2, step_seconds=0.001, log=str(log)
    )
    recipe = workload.recipe(1)
    fast = {"row_rate": 1e7, "prefill_rate": 1e9, "swap_seconds": 0.0, "median_tokens": 8.0}
    rollout = recipe.rollout.model_copy(update={"mock": {**recipe.rollout.mock, **fast}})
    await executed(recipe.model_copy(update={"rollout": rollout}), home / "turns")
    return [gap for line in log.read_text().splitlines() for gap in json.loads(line)[1:]]


async def computed_again(home: Path, workers: int, steps: int) -> dict[str, float]:
    """Return the figures of the trajectories of the recipe `guess` with so many rollout workers."""
    changes = [f"rollout.workers={workers}", f"train.steps={steps}", "evaluate.every=0"]
    recipe = load_recipe("recipes/guess.toml", changes)
    totals = RunTotals()
    for event in await executed(recipe, home / f"guess-{workers}"):
        totals.apply(event)
    return totals.trajectories


def quantile(values: Sequence[float], share: float) -> float:
    return statistics.quantiles(values, n=100)[round(100 * share) - 1]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--tools", type=float, nargs="+", default=[0.0, 1.0, 3.0])
    parser.add_argument("--bounds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--groups", type=int, default=16, help="of a step, each of 8 trajectories")
    parser.add_argument("--step-seconds", type=float, default=2.0)
    parser.add_argument("--workers", type=int, default=1, help="rollout workers that share slots")
    parser.add_argument("--sessions", type=int, default=0, help="so many trajectories at a time")
    parser.add_argument("--turn", action="store_true", help="only what a turn costs")
    parser.add_argument("--smoke", action="store_true", help="a few seconds: whether it works")
    options = parser.parse_args(arguments)
    configure()
    workload = Workload(
        steps=options.steps,
        groups=options.groups,
        workers=options.workers,
        step_seconds=options.step_seconds,
    )
    if options.smoke:
        workload = Workload(steps=4, margin=1, groups=2, group_size=4, slots=8, step_seconds=0.1)
        options.tools, options.bounds = options.tools[-1:], options.bounds[-1:]
    if options.turn:
        options.tools = []
    if options.sessions:
        groups = -(-options.sessions // (2 * workload.group_size))
        workload = replace(workload, groups=groups, slots=8 * groups)
    arms = []
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        print(
            "| tools | η | share of the bound | share that η lets | tokens/s | open at a time "
            "| staleness |"
        )
        print("|---|---|---|---|---|---|---|")
        for tools in options.tools:
            for bound in options.bounds:
                arm = asyncio.run(run_arm(replace(workload, tools=tools), bound, home))
                arms.append(arm)
                print(
                    f"| {tools:g} × | {bound} | {arm.share:.3f} | {arm.share_permitted:.3f} "
                    f"| {arm.tokens / arm.seconds:,.0f} | {arm.open:,} | {arm.staleness} |",
                    flush=True,
                )
        gaps = asyncio.run(turn_times(home, 4 if options.smoke else 100))
        again = {
            workers: asyncio.run(computed_again(home, workers, 2 if options.smoke else 20))
            for workers in (() if options.turn else (1, 2))
        }
    turn = {"p50": quantile(gaps, 0.5), "p99": quantile(gaps, 0.99), "turns": len(gaps)}
    print(
        f"\na turn of the flow alone: {1e3 * turn['p50']:.1f} ms (p50), "
        f"{1e3 * turn['p99']:.1f} ms (p99), of {turn['turns']:,} turns"
    )
    for workers, counts in again.items():
        tokens = counts["generated_tokens"] + counts["observed_tokens"]
        print(
            f"{workers} rollout workers: {counts['computed_again_tokens']:,.0f} tokens computed "
            f"again, of {tokens:,.0f} tokens of {counts['turns']:,.0f} turns"
        )
    if options.json:
        measured = {"arms": [*map(asdict, arms)], "turn": turn, "computed_again": again}
        options.json.write(measured)
    return 0


if __name__ == "__main__":
    sys.exit(main())
