"""What does staleness cost, and which correction holds?

Bounds × corrections × learning rates × admission of groups.

    python -m benchmarks.learning.staleness tiny --rates 3e-3 6e-3 --admission paced eager --json staleness-tiny.json
    python -m benchmarks.learning.staleness quickstart --staleness 0 2 8 --arms none truncate --rates 3e-5 --seeds 0
      --json quick.json

Arms, by the policy that the ratio is clipped around and the weight of what is older than it:

    none          the rollout policy: clipped importance sampling; the ratio is the weight (``correction = "none"``)
    unweighted    the recomputed policy, and no weight at all: samples are taken for those of the current policy
    truncate …    the recomputed policy, or an interpolated one, and a weight that is truncated or masked

Each run is a real run. Runs that ``--json`` already holds are not repeated, so a grid can be ended
at any time and extended by any part. The table has a row for each learning rate, correction and
admission, and a column for each bound: the mean reward of the last ten steps over the seeds; in
brackets that of the worst seed; after the bar, the step from which the reward (the mean of ten
steps and of the seeds) is at least ``--level``, "–" where it never is. A seed has collapsed (✗, one
for each) when it ends below half of the highest mean of ten steps that it had before.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import harness
from benchmarks.learning.trials import Trial, read_trials, trial, write_trials
from orchestration.logs import configure
from orchestration.recipe.loading.load import load_recipe

LAST = 10  # a cell of the table is the mean reward of this many last steps
# Options of a policy gradient, by the name of the correction.
ARMS: Mapping[str, Mapping[str, str]] = {
    "none": {"correction": "none"},
    "unweighted": {"correction": "none", "proximal": "recomputed"},
    "truncate": {"correction": "truncate", "proximal": "recomputed"},
    "interpolated": {"correction": "truncate", "proximal": "interpolated"},
    "mask": {"correction": "mask"},
    "mask-recomputed": {"correction": "mask", "proximal": "recomputed"},
    "auto": {"correction": "auto"},
}


def label(recipe: str, arm: str, rate: str, admission: str) -> str:
    return f"{recipe}/{arm}/{float(rate):g}/{admission}"


async def measure(options: argparse.Namespace) -> list[Trial]:
    trials = read_trials(options.json) if options.json.exists() else []
    done = {(t.recipe, t.staleness, t.seed) for t in trials}
    axes = options.seeds, options.rates, options.staleness, options.arms, options.admission
    for seed, rate, staleness, arm, admission in itertools.product(*axes):
        name = label(options.recipe, arm, rate, admission)
        if (name, staleness, seed) in done:
            continue
        sets = [f"algorithm.options.{key}={value}" for key, value in ARMS[arm].items()]
        sets += [
            f"train.learning_rate={rate}",
            f"pipeline.admission={admission}",
            *(options.set or []),
        ]
        with tempfile.TemporaryDirectory() as folder:
            path = Path("recipes") / f"{options.recipe}.toml"
            sets += [f"pipeline.staleness={staleness}", f"seed={seed}"]
            one = await trial(load_recipe(path, sets), Path(folder) / "run")
        trials.append(replace(one, recipe=name))
        write_trials(options.json, trials)
        print(f"{name} η {staleness} seed {seed}: {one.last(LAST):.3f}", flush=True)
    return trials


def smooth(one: Trial) -> list[float]:
    """Mean reward of each ten steps in a row."""
    return [
        statistics.fmean(one.reward[at : at + LAST])
        for at in range(max(1, len(one.reward) - LAST + 1))
    ]


def cell(seeds: list[Trial], level: float) -> str:
    if not seeds:
        return ""
    curves = [smooth(t) for t in seeds]
    last = [curve[-1] for curve in curves]
    mean = [statistics.fmean(at) for at in zip(*curves, strict=True)]
    collapsed = "✗" * sum(curve[-1] < max(curve) / 2 for curve in curves)
    reached = next((str(at + LAST) for at, value in enumerate(mean) if value >= level), "–")
    return f"{statistics.fmean(last):.3f} ({min(last):.3f}){collapsed} | {reached}"


def table(trials: list[Trial], level: float) -> Table:
    cells: dict[tuple[float, str, str], dict[int, list[Trial]]] = {}
    ages: dict[tuple[str, int], list[float]] = {}
    for t in trials:
        _, arm, rate, admission = t.recipe.split("/")
        cells.setdefault((float(rate), arm, admission), {}).setdefault(t.staleness, []).append(t)
        ages.setdefault((admission, t.staleness), []).append(t.staleness_mean)
    bounds = sorted({t.staleness for t in trials})
    most = max(len(seeds) for by_bound in cells.values() for seeds in by_bound.values())
    shown = Table(
        title=f"last {LAST} steps, (worst seed), ✗ a seed that collapsed | step to "
        f"{level:g}; {most} seeds"
    )
    for column in (
        "learning rate",
        "correction",
        "admission",
        *(f"η = {bound}" for bound in bounds),
    ):
        shown.add_column(column, justify="right")
    for rate, arm, admission in sorted(
        cells, key=lambda of: (of[0], list(ARMS).index(of[1]), of[2])
    ):
        of_bounds = (cell(cells[rate, arm, admission].get(bound, []), level) for bound in bounds)
        shown.add_row(f"{rate:g}", arm, admission, *of_bounds)
    shown.add_section()
    for admission in sorted({admission for admission, _ in ages}):
        means = (ages.get((admission, bound)) for bound in bounds)
        shown.add_row(
            "",
            "mean staleness",
            admission,
            *(f"{statistics.fmean(of):.1f}" if of else "" for of in means),
        )
    return shown


def main() -> None:
    parser = harness.parser(__doc__, json_file=False)
    parser.add_argument("recipe", help="the name of a recipe in recipes/")
    parser.add_argument("--staleness", type=int, nargs="*", default=[0, 1, 2, 4, 8])
    parser.add_argument(
        "--arms", nargs="+", default=["none", "truncate", "mask"], choices=list(ARMS)
    )
    parser.add_argument("--rates", nargs="+", required=True, metavar="RATE")
    parser.add_argument("--admission", nargs="+", default=["paced"], choices=["paced", "eager"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--level",
        type=float,
        default=0.9,
        help="mean reward; the table has the first step that reaches it",
    )
    parser.add_argument("--set", action="append", metavar="KEY=VALUE")
    parser.add_argument(
        "--json", type=Path, required=True, help="written after each run; its runs are not repeated"
    )
    options = parser.parse_args()
    configure()
    Console(width=140).print(table(asyncio.run(measure(options)), options.level))


if __name__ == "__main__":
    main()
