"""How well the planner predicts: throughput and staleness of real runs beside what `asyncdock plan
run` simulates.

    python -m benchmarks.planning.planner [--step-seconds 2] [--steps 16] [--beside 2] [--match TEXT] [--json FILE]
    python -m benchmarks.planning.planner --nodes [--match TEXT]
    python -m benchmarks.planning.planner --splits 6
    python -m benchmarks.planning.planner --real tiny [--steps 150] [--json FILE]
    python -m benchmarks.planning.planner --speed

Mock grid: runs over the staleness bound, balance, spread of lengths, replicas, share of swaps and
window, with mock engines and everything else real (as in ``benchmarks/runs/overlap.py``). The simulation
has the recipe alone, and one constant measured in one run: the seconds between two steps: claim,
commit, publish, and what an engine does beside its model of time. With ``--nodes`` the runs are on
two nodes of a Ray cluster on this machine, a replica on each.

Splits: so many devices are split between rollout replicas and a trainer, each way there is. The
mock trainer stands for one on several devices: a token takes it the part of the time that one of so
many ranks needs for its share. The split with the most predicted tokens/s is the planner's choice;
its measured tokens/s over those of the split measured best is its share.

Real grid: a model with torch engines; costs are measured in one run, in one with half as many
groups in a step, and with its rollout engine alone (as `asyncdock plan profile` does), and the
other recipes are predicted from them.

Error: predicted over measured throughput, less 1; steps at either end of a run are left out, of
both alike.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import harness
from benchmarks.planning.assumed import LognormalLengths
from benchmarks.runs.executed import executed, raylets
from benchmarks.runs.overlap import TorchWorkload, Workload
from orchestration.logs import configure
from orchestration.processes.forkserver import ForkServer
from orchestration.recipe.loading.load import compare_recipe
from orchestration.recipe.schema import Recipe
from orchestration.simulation.costs import Costs
from orchestration.simulation.engine_profile import profile_engine
from orchestration.simulation.forecast import Forecast, forecast, margin_of, setup_of
from orchestration.simulation.mock_costs import mock_costs, mock_lengths
from orchestration.simulation.recorded import SMALLER, measured_costs, with_smaller_steps
from orchestration.simulation.simulator import Setup
from pipeline.data.events import Event
from pipeline.schedule.staleness import StalenessPlan

MEASURED = "measured"
REAL = {
    "tiny": TorchWorkload(replicas=1),
    "smollm2": TorchWorkload(
        model="smollm2", replicas=1, groups=4, group_size=4, rows=16, longest=24
    ),
}
REFERENCE = "eta 2, balance 1.5, sigma 0.3"  # training is the busiest stage, beside generation


@dataclass(frozen=True)
class Case:
    """A run: its name and its recipe."""

    name: str
    recipe: Recipe


@dataclass(frozen=True)
class Row:
    """What was predicted and what was measured; tokens/s, and the largest staleness."""

    name: str
    predicted: float
    measured: float
    staleness_predicted: int
    staleness_measured: int

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def mock_grid(step_seconds: float, steps: int) -> Iterator[Case]:
    """70 runs: bounds 0 to 4; balance; spread; replicas that swap quickly or slowly; windows;
    budgets; groups that enter late."""
    plain = Workload(step_seconds=step_seconds, steps=steps)

    def case(
        name: str,
        work: Workload,
        bound: int,
        *changes: str,
        rolling: bool = True,
        admission: str = "eager",
    ) -> Case:
        return Case(
            name, _with(work.recipe(bound, rolling), f"pipeline.admission={admission}", *changes)
        )

    for bound, balance, sigma in itertools.product((0, 1, 2, 4), (0.5, 0.8, 1.0, 1.5), (0.3, 1.0)):
        work = replace(plain, balance=balance, sigma=sigma)
        yield case(f"eta {bound}, balance {balance}, sigma {sigma}", work, bound)
    for bound, replicas, share, rolling in itertools.product(
        (1, 2), (2, 4), (0.02, 0.1), (True, False)
    ):
        work = replace(plain, replicas=replicas, swap_share=share)
        manner = "rolling" if rolling else "together"
        yield case(
            f"eta {bound}, {replicas} replicas, swaps {share}, {manner}",
            work,
            bound,
            rolling=rolling,
        )
    for bound, window, balance in itertools.product((2, 3), (8, 32), (0.8, 1.0)):
        work = replace(plain, balance=balance)
        yield case(
            f"eta {bound}, window {window}, balance {balance}",
            work,
            bound,
            f"pipeline.window={window}",
        )
    for bound, budget in itertools.product((1, 2, 3, 4), (32, 96)):
        yield case(f"eta {bound}, budget {budget}", plain, bound, f"rollout.budget={budget}")
    for bound, balance in itertools.product((2, 4), (0.8, 1.5, 2.5)):
        work = replace(plain, balance=balance, sigma=0.3)
        yield case(f"eta {bound}, balance {balance}, paced", work, bound, admission="paced")


def node_grid(step_seconds: float, steps: int, address: str) -> Iterator[Case]:
    """8 runs on two nodes of the Ray cluster at ``address``, a replica on each."""
    yield Case(
        REFERENCE,
        replace(_training_bound(step_seconds, steps), replicas=2, address=address).recipe(2),
    )
    for bound, balance, share in itertools.product((1, 2), (0.8, 1.0), (0.02, 0.1)):
        work = Workload(step_seconds, balance, steps, replicas=2, swap_share=share, address=address)
        yield Case(f"2 nodes, eta {bound}, balance {balance}, swaps {share}", work.recipe(bound))


def split_grid(step_seconds: float, steps: int, devices: int) -> Iterator[Case]:
    """Each way to split ``devices`` between replicas and the trainer, at two bounds.

    One replica decodes a step's responses in as many times ``step_seconds`` as half of the devices
    are, and one device trains them in so long.
    """
    yield Case(REFERENCE, _training_bound(step_seconds, steps).recipe(2))
    of_one = replace(Workload(), step_seconds=step_seconds * devices / 2, steps=steps, sigma=0.6)
    for bound, replicas in itertools.product((1, 2), range(1, devices)):
        trainers = devices - replicas
        recipe = replace(of_one, slots=of_one.slots * replicas, replicas=replicas).recipe(bound)
        rates = (
            f"rollout.mock.row_rate={of_one.row_rate}",
            f"train.mock.token_seconds={of_one.train_token_seconds / trainers}",
        )
        yield Case(f"eta {bound}, {replicas} + {trainers} devices", _with(recipe, *rates))


def _training_bound(step_seconds: float, steps: int) -> Workload:
    return Workload(step_seconds, balance=1.5, steps=steps, sigma=0.3)


def share_of_best(rows: Sequence[Row]) -> str:
    """How much of the throughput of the row that is measured best the row has that is predicted
    best."""
    chosen = max(rows, key=lambda row: row.predicted)
    best = max(rows, key=lambda row: row.measured)
    share = chosen.measured / best.measured
    return f"chosen: {chosen.name}; measured best: {best.name}; share of the best: {share:.3f}"


def real_grid(model: str, steps: int) -> Iterator[Case]:
    """The run that is measured, and 13 others: bounds and groups a step; another worker; a token
    budget; smaller groups; another thread."""
    plain = replace(REAL[model], steps=steps)
    first = plain.recipe(1, rolling=True)
    yield Case(MEASURED, first)
    for bound, groups in itertools.product(
        (0, 1, 2), (plain.groups // 2, plain.groups, 2 * plain.groups)
    ):
        keys = (f"pipeline.staleness={bound}", f"train.groups_per_step={groups}")
        yield Case(f"eta {bound}, {groups} groups a step", _with(first, *keys))
    yield Case("eta 1, 2 workers", _with(first, "rollout.workers=2"))
    yield Case("eta 1, budget", _with(first, f"rollout.budget={plain.longest // 2}"))
    smaller = (
        f"algorithm.group_size={plain.group_size // 2}",
        f"train.groups_per_step={2 * plain.groups}",
    )
    yield Case(f"eta 1, groups of {plain.group_size // 2} responses", _with(first, *smaller))
    yield Case("eta 1, 2 threads", _with(first, "rollout.threads=2"))


def _with(recipe: Recipe, *changes: str) -> Recipe:
    return compare_recipe(recipe, changes)


def throughput(events: list[Event]) -> tuple[float, int]:
    """Tokens/s between the same steps that a forecast looks at, and the largest staleness."""
    steps = [event for event in events if event.kind == "step"]
    margin = margin_of(len(steps))
    between = steps[margin : len(steps) - margin + 1]
    tokens = sum(event.data["response_length_mean"] * event.data["rows"] for event in between)
    stale = max(int(event.data.get("staleness_max", 0)) for event in steps)
    return tokens / (between[-1].time - steps[margin - 1].time), stale


def compared(case: Case, events: list[Event], found: Forecast) -> Row:
    measured, stale = throughput(events)
    return Row(case.name, found.tokens_per_second, measured, found.staleness_max, stale)


def between_steps(case: Case, events: list[Event]) -> float:
    """Seconds from one step's end to the next one's, less those that the mock engine's model says
    for its tokens."""
    costs = mock_costs(case.recipe)
    steps = [event for event in events if event.kind == "step"]
    groups = case.recipe.train.groups_per_step

    def modelled(step: Event) -> float:
        tokens = (
            step.data["response_length_mean"] * step.data["rows"] + costs.prompt_tokens * groups
        )
        return float(costs.step_seconds + costs.token_seconds * tokens)

    return median(
        step.time - before.time - modelled(step) for before, step in itertools.pairwise(steps)
    )


async def mock_rows(cases: list[Case], home: Path, beside: int, forks: ForkServer) -> list[Row]:
    """``beside`` runs at a time: their engines sleep most of the time."""
    limit = asyncio.Semaphore(beside)
    first = next((case for case in cases if case.name == REFERENCE), cases[0])
    events = await executed(first.recipe, home / "first", forks=forks)
    between = between_steps(first, events)

    async def one(number: int, case: Case) -> Row:
        async with limit:
            events = await executed(case.recipe, home / str(number), forks=forks)
        found = forecast(
            setup_of(case.recipe), mock_costs(case.recipe, between), mock_lengths(case.recipe)
        )
        return shown(compared(case, events, found))

    print(f"between two steps: {between:.3f} s, measured in {first.name}")
    return list(await asyncio.gather(*(one(number, case) for number, case in enumerate(cases))))


async def real_rows(cases: list[Case], home: Path, forks: ForkServer) -> list[Row]:
    """One run at a time; the costs of the first one, of one with smaller steps, and of its engine
    alone count for all."""
    rows = list[Row]()
    folder = home / "first"
    for number, case in enumerate(cases):
        events = await executed(case.recipe, home / str(number) if number else folder, forks=forks)
        if not number:
            (await asyncio.to_thread(profile_engine, case.recipe)).write(folder)
            if smaller := with_smaller_steps(case.recipe):
                await executed(smaller, folder / SMALLER, forks=forks)
            costs, lengths = measured_costs(events, folder)
        of_case = lengths.of_groups(case.recipe.algorithm.group_size)
        rows.append(shown(compared(case, events, forecast(setup_of(case.recipe), costs, of_case))))
    return rows


def shown(row: Row) -> Row:
    print(f"{row.name:48} {row.error:+7.1%}", flush=True)
    return row


def speed() -> list[dict[str, float]]:
    """Samples a second that are simulated, at 1, 8 and 64 replicas, and at the sizes of 384, 1,000
    and 10,000 devices."""
    rows = []
    for replicas in (1, 8, 64, 256, 768, 7680):
        plan = StalenessPlan(2, 64 * min(replicas, 64), 1)
        setup = Setup(
            plan,
            8,
            12,
            replicas=replicas,
            max_rows=256,
            most_rows=256,
            first_groups=64,
            at_once=max(1, replicas // 4),
        )
        costs = Costs(
            row_rate=30.0,
            step_seconds=0.1,
            token_seconds=1e-4 / replicas,
            saturation_rows=256,
            swap_seconds=0.1,
            between_steps=0.05,
        )
        began = time.perf_counter()
        forecast(setup, costs, LognormalLengths(8, 2048, median=200, sigma=0.8))
        seconds = time.perf_counter() - began
        rows.append(
            {
                "replicas": replicas,
                "samples_per_second": setup.steps * plan.groups_per_step * 8 / seconds,
            }
        )
    return rows


def table(rows: list[Row]) -> str:
    lines = [f"{'run':48} {'predicted':>10} {'measured':>10} {'error':>7}  staleness max"]
    for row in rows:
        stale = f"{row.staleness_predicted} {row.staleness_measured}"
        lines.append(
            f"{row.name:48} {row.predicted:10.0f} {row.measured:10.0f} {row.error:+7.1%}  {stale}"
        )
    errors = sorted(abs(row.error) for row in rows)
    equal = sum(row.staleness_predicted == row.staleness_measured for row in rows)
    within = sum(error <= 0.05 for error in errors)
    lines.append(
        f"{len(rows)} runs: error {median(errors):.1%} in the median, {errors[-1]:.1%} at most, "
        f"within 5 % in {within}; largest staleness equal in {equal}"
    )
    return "\n".join(lines)


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--step-seconds", type=float, default=2.0)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--beside", type=int, default=2, help="runs at a time")
    parser.add_argument(
        "--match", default="", metavar="TEXT", help="only runs with TEXT in their names"
    )
    parser.add_argument("--nodes", action="store_true", help="on two nodes of a Ray cluster")
    parser.add_argument(
        "--splits", type=int, default=0, metavar="DEVICES", help="every split of so many devices"
    )
    parser.add_argument("--real", choices=sorted(REAL), help="real engines with this model")
    parser.add_argument("--speed", action="store_true")
    options = parser.parse_args()
    document: Any
    if options.speed:
        document = speed()
        for line in document:
            print(f"{line['replicas']:6.0f} replicas {line['samples_per_second']:12,.0f} samples/s")
    else:
        with ExitStack() as stack:
            path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="planner-")))
            forks = stack.enter_context(closing(ForkServer.start()))
            if options.real:
                grid = real_grid(options.real, options.steps)
            elif options.nodes:
                cluster = stack.enter_context(raylets(2, 8))
                grid = node_grid(options.step_seconds, options.steps, cluster.address)
            elif options.splits:
                grid = split_grid(options.step_seconds, options.steps, options.splits)
            else:
                grid = mock_grid(options.step_seconds, options.steps)
            cases = [
                case
                for case in grid
                if options.match in case.name or case.name in (MEASURED, REFERENCE)
            ]
            work = (
                real_rows(cases, path, forks)
                if options.real
                else mock_rows(cases, path, options.beside, forks)
            )
            rows = asyncio.run(work)
        print(table(rows))
        if options.splits:
            for bound in (1, 2):
                print(
                    share_of_best(
                        [
                            row
                            for row in rows
                            if row.name.startswith(f"eta {bound}, ") and row.name != REFERENCE
                        ]
                    )
                )
        document = [{**asdict(row), "error": row.error} for row in rows]
    if options.json:
        options.json.write(document)


if __name__ == "__main__":
    configure()
    main()
