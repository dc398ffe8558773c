"""Groups that enter as late as keeps the trainer fed, beside groups that enter as early as the
bound allows.

    python -m benchmarks.runs.pacing [--balance 0.8 1 1.5 2.5] [--bounds 1 2 4] [--sigma 1 0.3] [--steps 24] [--json FILE]

Real runs with mock engines as in ``benchmarks/runs/overlap.py``, in pairs: both of a pair generate
responses of the same lengths.
``balance``: training time over generation time. Throughput and mean staleness are between the fifth
step and the fifth last.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from benchmarks import harness
from benchmarks.runs.executed import executed
from benchmarks.runs.overlap import Workload
from orchestration.logs import configure
from orchestration.processes.forkserver import ForkServer
from orchestration.recipe.loading.load import compare_recipe

ADMISSIONS = ("eager", "paced")


@dataclass(frozen=True)
class Arm:
    tokens_per_second: float
    staleness_mean: float
    staleness_max: int


@dataclass(frozen=True)
class Pair:
    balance: float
    sigma: float
    bound: int
    eager: Arm
    paced: Arm

    @property
    def ratio(self) -> float:
        return self.paced.tokens_per_second / self.eager.tokens_per_second


async def arm(
    workload: Workload, bound: int, admission: str, home: Path, forks: ForkServer | None
) -> Arm:
    recipe = compare_recipe(workload.recipe(bound), [f"pipeline.admission={admission}"])
    steps = [event for event in await executed(recipe, home, forks=forks) if event.kind == "step"]
    between = steps[workload.margin : len(steps) - workload.margin + 1]
    tokens = sum(step.data["response_length_mean"] * step.data["rows"] for step in between)
    return Arm(
        tokens / (between[-1].time - steps[workload.margin - 1].time),
        fmean(step.data.get("staleness_mean") or 0.0 for step in between),
        max(int(step.data.get("staleness_max") or 0) for step in steps),
    )


async def pairs(
    workloads: list[Workload], bounds: list[int], forks: ForkServer | None, beside: int = 1
) -> list[Pair]:
    limit = asyncio.Semaphore(beside)

    async def one(workload: Workload, bound: int, home: Path) -> Pair:
        async with limit:
            arms = [await arm(workload, bound, name, home / name, forks) for name in ADMISSIONS]
        pair = Pair(workload.balance, workload.sigma, bound, *arms)
        print(line(pair), flush=True)
        return pair

    with tempfile.TemporaryDirectory(prefix="pacing-") as home:
        cases = enumerate(itertools.product(workloads, bounds))
        return list(
            await asyncio.gather(*(one(*case, Path(home) / str(number)) for number, case in cases))
        )


HEADER = (
    f"{'balance':>7} {'spread':>6} {'bound':>5}  {'throughput':>10}  {'mean staleness':>16}  "
    f"{'largest':>7}"
)


def line(pair: Pair) -> str:
    ages = f"{pair.eager.staleness_mean:5.2f} → {pair.paced.staleness_mean:5.2f}"
    largest = f"{pair.eager.staleness_max} → {pair.paced.staleness_max}"
    return (
        f"{pair.balance:7} {pair.sigma:6} {pair.bound:5}  {pair.ratio:8.3f} ×  {ages:>16}  "
        f"{largest:>7}"
    )


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--balance", type=float, nargs="+", default=[0.8, 1.0, 1.5, 2.5])
    parser.add_argument(
        "--sigma", type=float, nargs="+", default=[1.0, 0.3], help="spread of response lengths"
    )
    parser.add_argument("--bounds", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--step-seconds", type=float, default=2.0)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--beside", type=int, default=2, help="pairs at a time")
    options = parser.parse_args()
    workloads = [
        Workload(
            step_seconds=options.step_seconds, steps=options.steps, balance=balance, sigma=sigma
        )
        for balance, sigma in itertools.product(options.balance, options.sigma)
    ]
    print(HEADER)
    with closing(ForkServer.start()) as forks:
        found = asyncio.run(pairs(workloads, options.bounds, forks, options.beside))
    if options.json:
        options.json.write([asdict(pair) for pair in found])


if __name__ == "__main__":
    configure()
    main()
