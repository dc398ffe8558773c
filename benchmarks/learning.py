"""Learning, asynchronous against synchronous: recipes, as those of several algorithms, under
staleness bounds and seeds.

    python -m benchmarks.learning tiny --staleness 0 1 2 --seeds 0 1 2 --json tiny.json --plot tiny.png
    python -m benchmarks.learning tiny dapo ppo --staleness 1 --metric explained_variance --json algorithms.json
    python -m benchmarks.learning quickstart quickstart:ppo quickstart:dapo --staleness 0 2 --json quickstart.json --resume
    python -m benchmarks.learning tiny --set train.steps=400 --set checkpoint.every=40 --ends 200 --staleness 0 2

Each run is a real run in its own processes, one after the other. η = 0 is the synchronous run, to
the bit. The table gives the mean reward of the first and of the last steps (``--ends``, five), the
lowest of these last steps, the held-out reward before and after, seconds of training (from the
first to the last step), how many swaps were probed and how many refused, and the largest gap of a
probe as a share of its limit; with ``--metric``, its highest mean of five steps. The plot shows
reward against generated tokens and against seconds: every seed thin, the mean of the seeds thick.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import shutil
import statistics
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from orchestration.comparison.results import RunResult, read_run
from orchestration.logs import configure
from orchestration.recipe.loading.load import load_recipe, read_recipe
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from orchestration.sweep.execution import SweepExecution
from orchestration.sweep.record import Request, Sweep, SweepRun

SMOOTHED = 5  # steps over which the plot's thick line is a mean
COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
)  # Okabe and Ito: distinct for all kinds of colour vision


class Unfinished(RuntimeError):
    """A run was stopped before its end. It can be resumed."""


@dataclass(frozen=True)
class Trial:
    """One run: ``reward`` of each step, ``held_out`` reward by policy version, largest staleness,
    seconds."""

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
    recipe: str = ""
    tokens: list[int] = field(default_factory=list)  # generated until each step
    times: list[float] = field(default_factory=list)  # seconds since training began, of each step
    metric: float | None = None
    staleness_mean: float = 0.0  # of all steps
    ledger: dict[str, Any] = field(default_factory=dict)  # at the end

    def first(self, steps: int) -> float:
        return statistics.fmean(self.reward[:steps])

    def last(self, steps: int) -> float:
        return statistics.fmean(self.reward[-steps:])


async def trial(
    path: Path,
    overrides: list[str],
    staleness: int,
    seed: int,
    folder: Path,
    metric: str | None = None,
    seconds: float | None = None,
    enough: Callable[[Mapping[int, float]], bool] = lambda held_out: False,
) -> Trial:
    """Run the recipe once, to its end or until its held-out scores are ``enough``.

    After ``seconds`` it is stopped: this raises Unfinished, and the next call with the same folder
    resumes it. Raises RuntimeError when the run cannot finish.
    """
    parts = folder.parent / f"{folder.name}.json"
    stop = asyncio.Event()
    # Events as [seconds since training began, kind, data], of the parts of the run before this one
    # too.
    events: list[tuple[float, str, dict[str, Any]]] = (
        json.loads(parts.read_text()) if parts.exists() else []
    )
    if events:
        run = Execution(RunFolder.resume(folder))
    else:
        shutil.rmtree(folder, ignore_errors=True)
        run = Execution(
            RunFolder.create(
                load_recipe(path, [*overrides, f"pipeline.staleness={staleness}", f"seed={seed}"]),
                folder,
            )
        )
    before = max((at for at, _, _ in events), default=0.0)
    began = None
    events = [of for of in events if of[1] != "step" or of[2]["step"] <= run.folder.begins]

    async def follow() -> None:
        nonlocal began
        async for event in run.events():
            if event.kind == "step" and began is None:
                began = event.time - event.data["seconds"] - before
            events.append((event.time - (began or event.time), event.kind, event.data))
            if event.kind == "evaluation" and enough(scores()):
                stop.set()

    def scores() -> dict[int, float]:
        return {
            data["version"]: data["reward_mean"] for _, kind, data in events if kind == "evaluation"
        }

    following = asyncio.create_task(follow())
    if seconds is not None:
        asyncio.get_running_loop().call_later(seconds, stop.set)
    result = await run.execute(stop)
    await following
    held_out = scores()
    if result.state == "stopped" and not enough(held_out):
        parts.write_text(json.dumps(events))
        raise Unfinished(f"{folder.name}: stopped after step {run.folder.begins}")
    if result.state not in ("finished", "stopped"):
        raise RuntimeError(f"seed {seed}, staleness {staleness}: {result.state}: {result.reason}")
    steps = [(at, data) for at, kind, data in events if kind == "step"]
    if [data["step"] for _, data in steps] != list(range(1, len(steps) + 1)):
        raise RuntimeError(
            f"{folder.name}: a part of the run was killed, and its steps are not "
            f"known; remove {parts}"
        )
    gaps = [data for _, kind, data in events if kind == "sync" and "gap_mean" in data]
    shares = [
        max(gap[name.removesuffix("_limit")] / gap[name] for name in gap if "_limit" in name)
        for gap in gaps
    ]
    refused = sum(
        kind == "worker" and data["change"] in ("died", "kept its weights")
        for _, kind, data in events
    )
    values = [step[metric] for _, step in steps if metric in step]
    return Trial(
        staleness,
        seed,
        [step["reward_mean"] for _, step in steps],
        held_out,
        max(step["staleness_max"] for _, step in steps),
        steps[-1][0],
        sum(step["rows"] for _, step in steps),
        len(shares),
        refused,
        max(shares, default=0.0),
        path.stem,
        [step["tokens_generated"] for _, step in steps],
        [at for at, _ in steps],
        max(
            statistics.fmean(of) for of in zip(*(values[i:] for i in range(SMOOTHED)), strict=False)
        )
        if values
        else None,
        statistics.fmean(step["staleness_mean"] for _, step in steps),
        next(data for _, kind, data in reversed(events) if kind == "ledger"),
    )


def arms(trials: list[Trial]) -> dict[tuple[str, int], list[Trial]]:
    """The seeds of each recipe and staleness bound."""
    found: dict[tuple[str, int], list[Trial]] = {}
    for one in trials:
        found.setdefault((one.recipe, one.staleness), []).append(one)
    return found


def table(trials: list[Trial], name: str, ends: int, metric: str | None) -> Table:
    shown = Table(title=f"{name}: mean reward of the first and last {ends} steps")
    for column in (
        "recipe",
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
        *([metric] if metric else []),
    ):
        shown.add_column(column, justify="right")
    for (recipe, staleness), arm in arms(trials).items():
        for t in arm:
            before, after = (
                f"{t.held_out[at(t.held_out)]:.3f}" if t.held_out else "–" for at in (min, max)
            )
            shown.add_row(
                recipe,
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
                *([f"{t.metric:.2f}" if t.metric is not None else "–"] if metric else []),
            )
        last = [t.last(ends) for t in arm]
        spread = statistics.pstdev(last)
        gain = statistics.fmean(last) - statistics.fmean(t.first(ends) for t in arm)
        lowest = min(min(t.reward[-ends:]) for t in arm)
        cells = (
            "mean",
            "",
            f"{statistics.fmean(last):.3f} ± {spread:.3f}",
            f"{lowest:.3f}",
            f"{gain:+.3f}",
        )
        shown.add_row(recipe, str(staleness), *cells, style="bold")
        shown.add_section()
    return shown


def plot(trials: list[Trial], name: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained", sharey=True)
    several = len({t.recipe for t in trials}) > 1
    colours = COLOURS if len(arms(trials)) <= len(COLOURS) else pyplot.get_cmap("tab20").colors  # type: ignore[attr-defined]
    for axes, what in zip(panels, ("tokens", "times"), strict=True):
        for colour, ((recipe, staleness), arm) in zip(colours, arms(trials).items(), strict=False):
            for t in arm:
                axes.plot(getattr(t, what), t.reward, color=colour, linewidth=0.6, alpha=0.45)
            mean = [
                statistics.fmean(rewards) for rewards in zip(*(t.reward for t in arm), strict=True)
            ]
            at = [
                statistics.fmean(places)
                for places in zip(*(getattr(t, what) for t in arm), strict=True)
            ]
            smooth = [
                statistics.fmean(mean[max(0, i - SMOOTHED + 1) : i + 1]) for i in range(len(mean))
            ]
            label = (f"{recipe}, " if several else "") + f"η = {staleness}, {len(arm)} seeds"
            axes.plot(at, smooth, color=colour, linewidth=2.4, label=label)
        axes.set_xlabel("generated tokens" if what == "tokens" else "seconds of training")
        axes.grid(alpha=0.25)
    figure.suptitle(
        f"{name}: reward while training (thick: mean of the seeds, over {SMOOTHED} steps)"
    )
    panels[0].set_ylabel("mean reward")
    panels[1].legend(frameon=False, loc="lower right", fontsize=8)
    figure.savefig(path, dpi=130)


class Trials:
    """Executor of a sweep whose runs are trials, of the recipe ``path`` under ``label``: in this
    process, one after the other. ``ended`` is called with each."""

    def __init__(
        self,
        sweep: Sweep,
        path: Path,
        overrides: list[str],
        label: str,
        options: argparse.Namespace,
        ended: Callable[[Trial], None],
    ) -> None:
        self._sweep = sweep
        self._path = path
        self._overrides = overrides
        self._label = label
        self._options = options
        self._ended = ended

    def has_room(self, running: Collection[SweepRun], run: SweepRun) -> bool:
        return not running

    async def execute(self, run: SweepRun, *_: Any) -> tuple[str, str]:
        one = await trial(
            self._path,
            self._overrides,
            run.settings["pipeline.staleness"],
            run.settings["seed"],
            self._sweep.folder_of(run),
            self._options.metric,
            self._options.seconds,
        )
        self._ended(replace(one, recipe=self._label))
        return "finished", ""

    async def result(self, run: SweepRun) -> RunResult:
        return read_run(self._sweep.folder_of(run))


async def measure(options: argparse.Namespace) -> list[Trial]:
    trials = read_trials(options.json) if options.json.exists() and options.resume else []

    def ended(one: Trial) -> None:
        trials.append(one)
        write_trials(options.json, trials)

    for recipe in options.recipe:
        name, _, algorithm = recipe.partition(":")
        path = Path(name) if name.endswith(".toml") else Path("recipes") / f"{name}.toml"
        label = f"{path.stem}:{algorithm}" if algorithm else path.stem
        overrides = [*([f"algorithm.name={algorithm}"] if algorithm else []), *(options.set or [])]
        settings = [
            {"pipeline.staleness": staleness, "seed": seed}
            for staleness, seed in itertools.product(options.staleness, options.seeds)
        ]
        with contextlib.ExitStack() as stack:
            kept = options.keep or stack.enter_context(tempfile.TemporaryDirectory())
            folder = Path(kept) / label.replace(":", "-")
            request = Request(read_recipe(path, overrides)[0], str(Path.cwd()))
            sweep = stack.enter_context(contextlib.closing(Sweep.open(folder, request, settings)))
            measured = {(t.staleness, t.seed) for t in trials if t.recipe == label}
            for run in sweep.runs:
                is_measured = (*run.settings.values(),) in measured
                sweep.change(run, "finished" if is_measured else "waiting")
            executor = Trials(sweep, path, overrides, label, options, ended)
            await SweepExecution(sweep, executor).execute(asyncio.Event())
    return trials


def read_trials(path: Path) -> list[Trial]:
    found = json.loads(path.read_text())["trials"]
    return [
        Trial(**{**one, "held_out": {int(v): r for v, r in one["held_out"].items()}})
        for one in found
    ]


def write_trials(path: Path, trials: list[Trial]) -> None:
    path.write_text(json.dumps({"trials": [asdict(t) for t in trials]}))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "recipe",
        nargs="+",
        help="a recipe's path, or its name in recipes/; with :ALGORITHM, that one in its place",
    )
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--set", action="append", metavar="KEY=VALUE")
    parser.add_argument("--metric", help="of steps: its highest mean of five steps is shown too")
    parser.add_argument(
        "--ends", type=int, default=5, help="number of first and of last steps to average"
    )
    parser.add_argument(
        "--json", type=Path, default=Path("learning.json"), help="written after each run"
    )
    parser.add_argument(
        "--resume", action="store_true", help="keep the runs that --json already holds"
    )
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where the runs' folders stay")
    parser.add_argument(
        "--seconds",
        type=float,
        help="stop a run after so many, and the command: repeated with --keep, it goes on with it",
    )
    options = parser.parse_args()
    configure()
    trials = asyncio.run(measure(options))
    name = ", ".join(Path(recipe).stem for recipe in options.recipe)
    Console(width=140).print(table(trials, name, options.ends, options.metric))
    if options.plot:
        plot(trials, name, options.plot)


if __name__ == "__main__":
    main()
