"""Forecasts for large clusters, and for published results. Nothing is run: it is arithmetic and
simulation (`orchestration/simulation`), with every assumption named.

    python -m benchmarks.planning.scale [--devices 64 384 1000 10000] [--json FILE]

Model: a dense 7B (the sizes of Qwen2.5-7B), bfloat16. Device: 150 TFLOP/s and 1.2 TB/s that are
really reached, about half of an Ascend 910B's data sheet; 200 GB/s between the 8 devices of a node,
25 GB/s between nodes. Prompts of 2,000 tokens, responses log-normal (sigma 0.8) with 2,000 on
average and 16,384 at most, groups of 16. Ranks are data-parallel.

Index: 505 µs of its one thread for a sample and 6 calls a second of 85 µs for each worker, at 1,000
clients (docs/measurements/scale.md).
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks import harness
from benchmarks.planning.assumed import Hardware, LognormalLengths, analytic_costs
from benchmarks.planning.memory import recipe_of
from benchmarks.planning.products import SHAPES
from benchmarks.runs.overlap import Workload
from orchestration.recipe.loading.load import compare_recipe
from orchestration.recipe.schema import Recipe
from orchestration.simulation.costs import Costs
from orchestration.simulation.forecast import Forecast, forecast, setup_of
from orchestration.simulation.mock_costs import mock_costs, mock_lengths

HARDWARE = Hardware(flops=150e12, bandwidth=1.2e12)
PROMPT = 2000
RESPONSE = 2000
LONGEST = 16384
SIGMA = 0.8
SIZE = 16
STEPS = 16
# of the index's thread: a sample, and a second of a worker
SAMPLE_SECONDS = 505e-6
WORKER_SECONDS = 6 * 85e-6


@dataclass(frozen=True)
class Row:
    """``linearity``: tokens/s of a device over those of the first row. ``index``: share of its one
    thread that the run needs."""

    devices: int
    rollouts: int
    ranks: int
    groups: int
    bound: int
    tokens_per_second: float
    linearity: float
    busiest: str
    staleness_mean: float
    step_seconds: float
    index: float
    seconds: float  # of the planner


def lengths(seed: int = 0) -> LognormalLengths:
    median = RESPONSE / math.exp(SIGMA**2 / 2)
    return LognormalLengths(SIZE, LONGEST, median=median, sigma=SIGMA, seed=seed)


def cluster(
    model: Path, rollouts: int, ranks: int, groups: int, bound: int, *, colocated: bool = False
) -> Recipe:
    base = recipe_of(
        "mock", {"rollout.engine": "mock", "train.engine": "mock", "algorithm.options": {}}
    )
    return compare_recipe(
        base,
        [
            f"model.source={json.dumps(str(model))}",
            "model.dtype=bfloat16",
            "rollout.engine=torch",
            "train.engine=torch",
            "rollout.device=auto",
            "train.device=auto",
            f"prompts.max_prompt_tokens={PROMPT}",
            f"rollout.max_tokens={LONGEST}",
            "rollout.max_rows=256",
            f"rollout.workers={1 if colocated else rollouts}",
            f"launch.placement={'colocated' if colocated else 'separate'}",
            f"algorithm.group_size={SIZE}",
            f"train.dp={ranks}",
            f"train.groups_per_step={groups}",
            "train.token_budget=32768",
            "train.activation_checkpointing=true",
            f"pipeline.staleness={bound}",
            "pipeline.arena=1TiB",
        ],
    )


def costs_of(recipe: Recipe, share: float = 1.0) -> Costs:
    """``share``: of the rate of decoding that memory allows."""
    costs = replace(analytic_costs(recipe, HARDWARE, RESPONSE), prompt_tokens=PROMPT)
    return replace(costs, row_rate=costs.row_rate * share, row_seconds=costs.row_seconds / share)


def best(
    model: Path, devices: int, groups: int, bound: int, share: float = 1.0
) -> tuple[Recipe, Forecast]:
    """The split of ``devices`` with the highest throughput, among those around the one that keeps
    both stages as busy."""
    found: list[tuple[Recipe, Forecast]] = []
    low = 1
    high = min(devices - 1, groups)
    # throughput rises with the trainer's share until generation limits it
    while high - low > max(1, devices // 64):
        ranks = (low + high) // 2
        recipe = cluster(model, devices - ranks, ranks, groups, bound)
        found.append(
            (recipe, forecast(setup_of(recipe, steps=STEPS), costs_of(recipe, share), lengths()))
        )
        if found[-1][1].busiest == "training":
            low = ranks
        else:
            high = ranks
    return max(found, key=lambda one: one[1].tokens_per_second)


def sizes(model: Path, counts: list[int], bound: int = 2) -> list[Row]:
    """The work grows with the devices: two groups of a step for three devices."""
    rows: list[Row] = []
    for devices in counts:
        began = time.perf_counter()
        groups = max(8, 2 * devices // 3)
        recipe, found = best(model, devices, groups, bound)
        each = found.tokens_per_second / devices
        linearity = each / (rows[0].tokens_per_second / rows[0].devices) if rows else 1.0
        samples = found.tokens_per_second / RESPONSE
        workers = recipe.rollout.workers + recipe.train.dp
        index = samples * SAMPLE_SECONDS + workers * WORKER_SECONDS
        rows.append(
            Row(
                devices,
                recipe.rollout.workers,
                recipe.train.dp,
                groups,
                bound,
                found.tokens_per_second,
                linearity,
                found.busiest,
                found.staleness_mean,
                found.step_seconds,
                index,
                time.perf_counter() - began,
            )
        )
        print(line(rows[-1]), flush=True)
    return rows


HEADER = (
    "devices  rollout + training  tokens/s a device  linearity  busiest      staleness  s a step  "
    "index  planned in"
)


def line(row: Row) -> str:
    split = f"{row.rollouts} + {row.ranks}"
    each = row.tokens_per_second / row.devices
    return (
        f"{row.devices:7}  {split:>18}  {each:17.0f}  {row.linearity:9.3f}  {row.busiest:11}  "
        f"{row.staleness_mean:9.2f}  {row.step_seconds:8.0f}  {row.index:5.0%}  {row.seconds:8.1f} "
        f"s"
    )


def published(model: Path) -> dict[str, float]:
    """Ratios that papers report, beside those that the simulation gives."""
    work = Workload(steps=40)
    plain = {}
    for bound in (0, 1, 2):
        recipe = work.recipe(bound)
        plain[bound] = forecast(
            setup_of(recipe), mock_costs(recipe), mock_lengths(recipe)
        ).tokens_per_second
    ratios = dict[str, float]()
    for share in (1.0, 0.2):
        together = cluster(model, 64, 64, 64, 0, colocated=True)
        synchronous = forecast(
            setup_of(together, steps=STEPS), costs_of(together, share), lengths()
        ).tokens_per_second
        recipe, split = best(model, 64, 64, 2, share)
        name = f"64 devices, decoding at {share:g} of what memory allows"
        ratios[f"{name}: devices that generate"] = recipe.rollout.workers
        ratios[f"{name}: over all devices in turns"] = split.tokens_per_second / synchronous
    return {
        "streams, delayed by one version, over synchronous": plain[1] / plain[0],
        "delayed by two versions, over synchronous": plain[2] / plain[0],
        **ratios,
    }


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--devices", type=int, nargs="+", default=[64, 384, 1000, 10_000])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="planner-") as folder:
        model = Path(folder)
        SHAPES["dense 7B"].save_pretrained(model)
        print(HEADER)
        rows = sizes(model, options.devices)
        ratios = published(model)
    print()
    for name, value in ratios.items():
        print(f"{name:84} {value:.3g}")
    if options.json:
        document = {"sizes": [asdict(row) for row in rows], "published": ratios}
        options.json.write(document)


if __name__ == "__main__":
    main()
