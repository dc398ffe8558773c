"""Learning, asynchronous against synchronous: the same recipe under several staleness bounds and seeds.

    python benchmarks/learning.py tiny --staleness 0 1 2 --seeds 0 1 2 --json tiny.json --plot tiny.png
    python benchmarks/learning.py tiny --set train.steps=400 --set checkpoint.every=40 --ends 200 --staleness 0 2

Each run is a real run in its own processes, one after the other. η = 0 is the synchronous run, to the bit. The table gives
the mean reward of the first and of the last steps (``--ends``, five), the lowest of these last steps, the held-out reward
before and after, seconds of training (from the first to the last step), how many swaps were probed and how many refused, and
the largest gap of a probe as a share of its limit. The plot shows every seed thin, and the mean of the seeds thick.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from orchestration.logs import configure
from orchestration.recipe.load import load_recipe
from orchestration.run.run import Run

SMOOTHED = 5  # steps over which the plot's thick line is a mean
COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
)  # Okabe and Ito: distinct for all kinds of colour vision


@dataclass(frozen=True)
class Trial:
    """One run: ``reward`` of each step, ``held_out`` reward by policy version, largest staleness, seconds."""

    staleness: int
    seed: int
    reward: list[float]
    held_out: dict[int, float]
    staleness_max: float
    seconds: float
    trained_samples: int
    probed: int = 0
    refused: int = 0
    nearest: float = 0.0

    def first(self, steps: int) -> float:
        return statistics.fmean(self.reward[:steps])

    def last(self, steps: int) -> float:
        return statistics.fmean(self.reward[-steps:])


async def trial(path: Path, overrides: list[str], staleness: int, seed: int, folder: Path) -> Trial:
    """Run the recipe once. Raises RuntimeError when the run does not finish."""
    recipe = load_recipe(path, [*overrides, f"pipeline.staleness={staleness}", f"seed={seed}"])
    run = Run.create(recipe, folder)
    steps: list[tuple[float, dict[str, Any]]] = []
    held_out: dict[int, float] = {}
    shares: list[float] = []
    refused = 0

    async def follow() -> None:
        nonlocal refused
        async for event in run.events():
            if event.kind == "step":
                steps.append((event.time, event.data))
            elif event.kind == "evaluation":
                held_out[event.data["version"]] = event.data["reward_mean"]
            elif event.kind == "worker":
                refused += event.data["change"] in ("died", "kept its weights")
            elif event.kind == "sync" and "gap_mean" in event.data:
                gap = event.data
                shares.append(max(gap[name.removesuffix("_limit")] / gap[name] for name in gap if "_limit" in name))

    following = asyncio.create_task(follow())
    result = await run.execute()
    await following
    if result.state != "finished":
        raise RuntimeError(f"seed {seed}, staleness {staleness}: {result.state}: {result.reason}")
    began = steps[0][0] - steps[0][1]["seconds"]
    return Trial(
        staleness,
        seed,
        [step["reward_mean"] for _, step in steps],
        held_out,
        max(step["staleness_max"] for _, step in steps),
        steps[-1][0] - began,
        sum(step["rows"] for _, step in steps),
        len(shares),
        refused,
        max(shares, default=0.0),
    )


def table(trials: list[Trial], name: str, ends: int) -> Table:
    shown = Table(title=f"{name}: mean reward of the first and last {ends} steps")
    for column in (
        "η",
        "seed",
        "first",
        "last",
        "lowest",
        "gain",
        "held out before",
        "after",
        "staleness max",
        "seconds",
        *("probed", "refused", "nearest"),
    ):
        shown.add_column(column, justify="right")
    for staleness in sorted({t.staleness for t in trials}):
        arm = [t for t in trials if t.staleness == staleness]
        for t in arm:
            before, after = (f"{t.held_out[at(t.held_out)]:.3f}" if t.held_out else "–" for at in (min, max))
            shown.add_row(
                str(staleness),
                str(t.seed),
                f"{t.first(ends):.3f}",
                f"{t.last(ends):.3f}",
                f"{min(t.reward[-ends:]):.3f}",
                f"{t.last(ends) - t.first(ends):+.3f}",
                before,
                after,
                f"{t.staleness_max:.0f}",
                f"{t.seconds:.0f}",
                *(str(t.probed), str(t.refused), f"{t.nearest:.0%}"),
            )
        last = [t.last(ends) for t in arm]
        spread, gain = statistics.pstdev(last), statistics.fmean(last) - statistics.fmean(t.first(ends) for t in arm)
        lowest = min(min(t.reward[-ends:]) for t in arm)
        cells = ("mean", "", f"{statistics.fmean(last):.3f} ± {spread:.3f}", f"{lowest:.3f}", f"{gain:+.3f}")
        shown.add_row(str(staleness), *cells, *[""] * 7, style="bold")
        shown.add_section()
    return shown


def plot(trials: list[Trial], name: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for colour, staleness in zip(COLOURS, sorted({t.staleness for t in trials}), strict=False):
        arm = [t for t in trials if t.staleness == staleness]
        for t in arm:
            axes.plot(range(1, len(t.reward) + 1), t.reward, color=colour, linewidth=0.6, alpha=0.45)
        mean = [statistics.fmean(rewards) for rewards in zip(*(t.reward for t in arm), strict=True)]
        smooth = [statistics.fmean(mean[max(0, i - SMOOTHED + 1) : i + 1]) for i in range(len(mean))]
        label = f"η = {staleness}" + (" (synchronous)" if staleness == 0 else "") + f", {len(arm)} seeds"
        axes.plot(range(1, len(smooth) + 1), smooth, color=colour, linewidth=2.4, label=label)
    axes.set(
        title=f"{name}: reward while training (thick: mean of the seeds, over {SMOOTHED} steps)",
        xlabel="optimizer step",
    )
    axes.set_ylabel("mean reward")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=130)


async def measure(options: argparse.Namespace) -> list[Trial]:
    trials: list[Trial] = []
    if options.json.exists() and options.resume:
        trials = [
            Trial(**{**one, "held_out": {int(v): r for v, r in one["held_out"].items()}})
            for one in json.loads(options.json.read_text())["trials"]
        ]
    done = {(t.staleness, t.seed) for t in trials}
    for staleness in options.staleness:
        for seed in options.seeds:
            if (staleness, seed) in done:
                continue
            with contextlib.ExitStack() as stack:
                folder = options.keep or stack.enter_context(tempfile.TemporaryDirectory())
                path = options.recipe if options.recipe.exists() else Path("recipes") / f"{options.recipe}.toml"
                out = Path(folder) / f"run-{staleness}-{seed}"
                trials.append(await trial(path, options.set or [], staleness, seed, out))
            options.json.write_text(json.dumps({"recipe": str(options.recipe), "trials": [asdict(t) for t in trials]}))
    return trials


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("recipe", type=Path, help="a recipe's path, or its name in recipes/")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--set", action="append", metavar="KEY=VALUE")
    parser.add_argument("--ends", type=int, default=5, help="number of first and of last steps to average")
    parser.add_argument("--json", type=Path, default=Path("learning.json"), help="written after each run")
    parser.add_argument("--resume", action="store_true", help="keep the runs that --json already holds")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where the runs' folders stay")
    options = parser.parse_args()
    configure()
    trials = asyncio.run(measure(options))
    Console(width=120).print(table(trials, options.recipe.stem, options.ends))
    if options.plot:
        plot(trials, options.recipe.stem, options.plot)


if __name__ == "__main__":
    main()
