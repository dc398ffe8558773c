"""Learning: recipes under settings and seeds, as asynchronous against synchronous.

    python -m benchmarks.learning.trials tiny --staleness 0 1 2 --seeds 0 1 2 --json tiny.json --plot tiny.png
    python -m benchmarks.learning.trials tiny dapo ppo --staleness 1 --metric explained_variance --json algorithms.json
    python -m benchmarks.learning.trials quickstart quickstart:ppo quickstart:dapo --staleness 0 2
      --json quickstart.json --resume
    python -m benchmarks.learning.trials tiny --set train.steps=400 --set checkpoint.every=40 --ends 200 --staleness 0 2
    python -m benchmarks.learning.trials copy --over train.learning_rate=3e-3,6e-3 --at-once 2 --json rates.json --resume

Each run is a real run; with ``--at-once N`` each of N processes executes one after the other.
``--over`` is that of ``asyncdock sweep``. η = 0 is the synchronous run, to the bit. The first table
(Markdown) gives the mean reward of the first and of the last steps (``--ends``, five), the lowest
of these last steps, the held-out reward before and after, seconds of training (from the first to
the last step), how many swaps were probed and how many refused, and the largest gap of a probe as a
share of its limit; with ``--metric``, its highest mean of five steps. Means have the 95 % interval
of Student's t over the seeds. The second table says of settings with five seeds and more how large
a difference of two settings is noise. The plot shows reward against generated tokens and against
seconds: every seed thin, the mean of the seeds thick, in the band of its interval.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shutil
import statistics
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import harness
from orchestration.comparison.curves import estimate, t_quantile
from orchestration.comparison.results import RunResult, read_run
from orchestration.history.events_file import METRICS, MetricsFile
from orchestration.logs import configure
from orchestration.processes.pool import spawned_pool
from orchestration.recipe.loading.load import read_recipe, shorten_warmup
from orchestration.recipe.problems import RecipeError
from orchestration.recipe.schema import Recipe
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from orchestration.sweep.checks import recipe_of
from orchestration.sweep.execution import SweepExecution
from orchestration.sweep.record import Request, Sweep, SweepRun
from orchestration.sweep.settings import Settings, grid, parse_over, settings_text

SMOOTHED = 5  # steps over which the plot's thick line is a mean
BAND_SEEDS = 3  # the interval of two is wider than what is drawn
WIDTH = 240  # columns of a table
STALENESS, SEED = "pipeline.staleness", "seed"
NOISE_SEEDS = 5  # of a setting, from which on its noise is shown
COMPARED_SEEDS = (3, 5, 10)  # seeds of each setting, for which the table shows the noise
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
    """One run: ``reward`` of each step (empty: its steps have none, as with a teacher),
    ``held_out`` reward by policy version, largest staleness, seconds."""

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
    settings: dict[str, Any] = field(default_factory=dict)  # by ``--over``, and the seed
    alarms: list[tuple[int, str]] = field(default_factory=list)  # of the guard: step, metric

    def first(self, steps: int) -> float:
        return statistics.fmean(self.reward[:steps])

    def last(self, steps: int) -> float:
        return statistics.fmean(self.reward[-steps:])


async def trial(
    recipe: Recipe,
    folder: Path,
    metric: str | None = None,
    seconds: float | None = None,
    enough: Callable[[Mapping[int, float]], bool] = lambda held_out: False,
) -> Trial:
    """Run the recipe once, to its end or until its held-out scores are ``enough``.

    Its events are written to ``metrics.jsonl`` in ``folder``. After ``seconds`` it is stopped: this
    raises Unfinished, and the next call with the same folder resumes it. Raises RuntimeError when
    the run cannot finish.
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
        run = Execution(RunFolder.create(recipe, folder))
    before = max((at for at, _, _ in events), default=0.0)
    began = None
    events = [of for of in events if of[1] != "step" or of[2]["step"] <= run.folder.begins]

    async def follow() -> None:
        nonlocal began
        with MetricsFile(folder / METRICS) as file:
            async for event in run.events():
                file.event(event)
                if event.kind == "step" and began is None:
                    began = event.time - event.data["seconds"] - before
                events.append((event.time - (began or event.time), event.kind, dict(event.data)))
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
        raise RuntimeError(f"{recipe.name}, {folder.name}: {result.state}: {result.reason}")
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
    rewards = [step["reward_mean"] for _, step in steps]
    values = [step[metric] for _, step in steps if metric in step]
    return Trial(
        recipe.pipeline.staleness,
        recipe.seed,
        [] if None in rewards else rewards,
        held_out,
        max(step["staleness_max"] for _, step in steps),
        steps[-1][0],
        sum(step["rows"] for _, step in steps),
        len(shares),
        refused,
        max(shares, default=0.0),
        recipe.name,
        [step["tokens_generated"] for _, step in steps],
        [at for at, _ in steps],
        max(
            statistics.fmean(of) for of in zip(*(values[i:] for i in range(SMOOTHED)), strict=False)
        )
        if values
        else None,
        statistics.fmean(step["staleness_mean"] for _, step in steps),
        next(data for _, kind, data in reversed(events) if kind == "ledger"),
        alarms=[(data["step"], data["metric"]) for _, kind, data in events if kind == "alarm"],
    )


Arm = tuple[str, int, str]  # recipe, staleness bound, other settings


def arms(trials: Sequence[Trial]) -> dict[Arm, list[Trial]]:
    """The seeds of each recipe, staleness bound and other settings."""
    seeds: dict[Arm, list[Trial]] = {}
    for one in trials:
        others = {k: v for k, v in one.settings.items() if k not in (STALENESS, SEED)}
        seeds.setdefault((one.recipe, one.staleness, settings_text(others)), []).append(one)
    return seeds


def markdown(title: str, columns: Sequence[str]) -> Table:
    shown = Table(title=title, box=box.MARKDOWN)
    for column in columns:
        shown.add_column(column, justify="right", no_wrap=True)
    return shown


def interval(values: Sequence[float]) -> str:
    """The mean, and half of its 95 % interval."""
    mean = estimate(values)
    assert mean is not None
    return f"{mean.mean:.3f}" + ("" if mean.half is None else f" ± {mean.half:.3f}")


def table(trials: Sequence[Trial], name: str, ends: int, metric: str | None) -> Table:
    columns = (
        *("recipe", "η", "settings", "seed", "first", "last", "lowest", "gain"),
        *("held out before", "after", "staleness max", "seconds", "probed", "refused", "nearest"),
        *([metric] if metric else []),
    )
    shown = markdown(f"{name}: mean reward of the first and last {ends} steps", columns)
    for (recipe, staleness, settings), seeds in arms(trials).items():
        for t in seeds:
            before, after = (
                f"{t.held_out[at(t.held_out)]:.3f}" if t.held_out else "–" for at in (min, max)
            )
            shown.add_row(
                *(recipe, str(staleness), settings, str(t.seed)),
                *rewards_of([t], ends),
                *(before, after),
                f"{t.staleness_max:.0f}",
                f"{t.seconds:.0f}",
                *(str(t.probed), str(t.refused), f"{t.nearest:.0%}"),
                *([f"{t.metric:.2f}" if t.metric is not None else "–"] if metric else []),
            )
        held_out = [t.held_out[max(t.held_out)] for t in seeds if t.held_out]
        _, *others = rewards_of(seeds, ends)
        shown.add_row(
            *(recipe, str(staleness), settings, "mean", ""),
            *(*others, ""),
            interval(held_out) if held_out else "–",
            style="bold",
        )
    return shown


def rewards_of(seeds: Sequence[Trial], ends: int) -> tuple[str, ...]:
    """Return the mean reward of the first steps, of the last ones, the lowest of these, and the
    gain; dashes where the steps have no rewards."""
    if not all(t.reward for t in seeds):
        return ("–",) * 4
    first = statistics.fmean(t.first(ends) for t in seeds)
    last = [t.last(ends) for t in seeds]
    lowest = min(min(t.reward[-ends:]) for t in seeds)
    gain = statistics.fmean(last) - first
    return f"{first:.3f}", interval(last), f"{lowest:.3f}", f"{gain:+.3f}"


def noise(values: Sequence[float], seeds: int) -> float:
    """The largest difference of two means, each of so many seeds of one setting, that chance makes
    in 95 % of all cases: by the spread of ``values``, other seeds of this setting."""
    quantile = t_quantile(len(values) - 1)
    return float(quantile * statistics.stdev(values) * (2 / seeds) ** 0.5)


def noise_table(trials: Sequence[Trial], ends: int) -> Table:
    columns = (
        *("recipe", "η", "settings", "score", "seeds", "mean", "deviation"),
        *(f"noise, {count} seeds" for count in COMPARED_SEEDS),
    )
    shown = markdown("a difference of two settings that is noise", columns)
    for (recipe, staleness, settings), seeds in arms(trials).items():
        if len(seeds) < NOISE_SEEDS:
            continue
        scores = {}
        if all(t.reward for t in seeds):
            scores[f"last {ends} steps"] = [t.last(ends) for t in seeds]
        if all(t.held_out for t in seeds):
            scores["held out"] = [t.held_out[max(t.held_out)] for t in seeds]
        for score, values in scores.items():
            shown.add_row(
                *(recipe, str(staleness), settings, score, str(len(values)), interval(values)),
                f"{statistics.stdev(values):.3f}",
                *(f"{noise(values, count):.3f}" for count in COMPARED_SEEDS),
            )
    return shown


def smoothed(rewards: Sequence[float]) -> list[float]:
    """Mean of each step and the SMOOTHED - 1 before it."""
    return [
        statistics.fmean(rewards[max(0, i - SMOOTHED + 1) : i + 1]) for i in range(len(rewards))
    ]


def plot(trials: Sequence[Trial], name: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    trials = [t for t in trials if t.reward]
    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained", sharey=True)
    several = len({t.recipe for t in trials}) > 1
    colours = COLOURS if len(arms(trials)) <= len(COLOURS) else pyplot.get_cmap("tab20").colors  # type: ignore[attr-defined]
    for axes, what in zip(panels, ("tokens", "times"), strict=True):
        for colour, (arm, seeds) in zip(colours, arms(trials).items(), strict=False):
            recipe, staleness, settings = arm
            for t in seeds:
                axes.plot(getattr(t, what), t.reward, color=colour, linewidth=0.5, alpha=0.3)
            at = [
                statistics.fmean(places)
                for places in zip(*(getattr(t, what) for t in seeds), strict=True)
            ]
            curves = zip(*(smoothed(t.reward) for t in seeds), strict=True)
            means = [mean for rewards in curves if (mean := estimate(rewards)) is not None]
            label = (f"{recipe}, " if several else "") + f"η = {staleness}, "
            label += f"{settings}, " * bool(settings) + f"{len(seeds)} seeds"
            axes.plot(at, [mean.mean for mean in means], color=colour, linewidth=2.4, label=label)
            if len(seeds) < BAND_SEEDS:
                continue
            low, high = (
                [mean.mean + sign * (mean.half or 0.0) for mean in means] for sign in (-1, 1)
            )
            axes.fill_between(at, low, high, color=colour, alpha=0.2, linewidth=0)
        axes.set_xlabel("generated tokens" if what == "tokens" else "seconds of training")
        axes.grid(alpha=0.25)
    figure.suptitle(
        f"{name}: reward while training\n"
        f"(thick: mean of the seeds, over {SMOOTHED} steps; band: its 95 % interval, of {BAND_SEEDS} seeds or more)"
    )
    panels[0].set_ylabel("mean reward")
    panels[1].legend(frameon=False, loc="lower right", fontsize=8)
    figure.savefig(path, dpi=130)


def run_trial(recipe: Recipe, folder: Path, metric: str | None, seconds: float | None) -> Trial:
    """A trial in a process of a pool."""
    configure()
    return asyncio.run(trial(recipe, folder, metric, seconds))


@contextlib.contextmanager
def processes(count: int) -> Iterator[Executor | None]:
    """A pool of processes for :func:`run_trial`; None, for this process, where ``count`` is 1."""
    if count == 1:
        yield None
        return
    with spawned_pool(count) as pool:
        yield pool


class Trials:
    """Executor of a sweep whose runs are trials under ``label``: in processes of ``pool``, or in
    this one, one after the other. ``ended`` is called with each."""

    def __init__(
        self,
        sweep: Sweep,
        label: str,
        options: argparse.Namespace,
        pool: Executor | None,
        ended: Callable[[Trial], None],
    ) -> None:
        self._sweep = sweep
        self._label = label
        self._options = options
        self._pool = pool
        self._ended = ended

    def has_room(self, running: Collection[SweepRun], run: SweepRun) -> bool:
        return True  # --at-once is the bound

    async def execute(self, run: SweepRun, *_: Any) -> tuple[str, str]:
        recipe = recipe_of(self._sweep.request.recipe, run.settings, self._sweep.folder)
        folder = self._sweep.folder_of(run)
        arguments = recipe, folder, self._options.metric, self._options.seconds
        if self._pool is None:
            one = await trial(*arguments)
        else:
            work = partial(run_trial, *arguments)
            one = await asyncio.get_running_loop().run_in_executor(self._pool, work)
        self._ended(replace(one, recipe=self._label, settings=run.settings))
        return "finished", ""

    async def result(self, run: SweepRun) -> RunResult:
        return read_run(self._sweep.folder_of(run))


def over_of(options: argparse.Namespace) -> list[str]:
    """What is run over: by --over, --staleness and --seeds, the seeds last."""
    over = list(options.over or [])
    bounds = options.staleness or ([] if over else [0, 1, 2])
    for key, values in ((STALENESS, bounds), (SEED, options.seeds)):
        if values and not any(text.partition("=")[0].strip() == key for text in over):
            over.append(f"{key}={','.join(map(str, values))}")
    return over


async def measure(options: argparse.Namespace) -> list[Trial]:
    trials = read_trials(options.json) if options.json.exists() and options.resume else []
    over = over_of(options)
    settings = grid(parse_over(over, search=False))

    def ended(one: Trial) -> None:
        trials.append(one)
        write_trials(options.json, trials)

    with processes(options.at_once) as pool:
        for recipe in options.recipe:
            name, _, algorithm = recipe.partition(":")
            path = Path(name) if name.endswith(".toml") else Path("recipes") / f"{name}.toml"
            label = f"{path.stem}:{algorithm}" if algorithm else path.stem
            sets = [*([f"algorithm.name={algorithm}"] if algorithm else []), *(options.set or [])]
            tables, problems = read_recipe(path, sets)
            shorten_warmup(tables, {text.partition("=")[0].strip() for text in sets})
            if problems:
                raise RecipeError(str(path), problems)
            with contextlib.ExitStack() as stack:
                kept = options.keep or stack.enter_context(tempfile.TemporaryDirectory())
                folder = Path(kept) / label.replace(":", "-")
                request = Request(tables, str(Path.cwd()), over, at_once=options.at_once)
                sweep = Sweep.open(folder, request, settings)
                stack.enter_context(contextlib.closing(sweep))
                measured = [measured_settings(t) for t in trials if t.recipe == label]
                for run in sweep.runs:
                    is_measured = run.settings in measured
                    sweep.change(run, "finished" if is_measured else "waiting")
                executor = Trials(sweep, label, options, pool, ended)
                await SweepExecution(sweep, executor).execute(asyncio.Event())
    return trials


def measured_settings(one: Trial) -> Settings:
    """The settings of a trial; of one from a file that has none, its staleness and seed."""
    return one.settings or {STALENESS: one.staleness, SEED: one.seed}


def read_trials(path: Path) -> list[Trial]:
    found = json.loads(path.read_text())["trials"]
    return [
        Trial(
            **{
                **one,
                "held_out": {int(v): r for v, r in one["held_out"].items()},
                "alarms": [(step, metric) for step, metric in one.get("alarms", ())],
            }
        )
        for one in found
    ]


def write_trials(path: Path, trials: Sequence[Trial]) -> None:
    path.write_text(json.dumps({"trials": [asdict(t) for t in trials]}))


def main() -> None:
    parser = harness.parser(__doc__, json_file=False)
    parser.add_argument(
        "recipe",
        nargs="+",
        help="a recipe's path, or its name in recipes/; with :ALGORITHM, that one in its place",
    )
    parser.add_argument(
        "--staleness",
        type=int,
        nargs="+",
        help="bounds; default: 0 1 2, with --over that of the recipe",
    )
    parser.add_argument(
        "--over",
        action="append",
        metavar="KEY=VALUES",
        help="settings of which every combination is run, as `asyncdock sweep` has them",
    )
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
    parser.add_argument(
        "--at-once", type=int, default=1, metavar="N", help="processes, each with a run of its own"
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
    console = Console(width=WIDTH)
    console.print(table(trials, name, options.ends, options.metric))
    if any(len(seeds) >= NOISE_SEEDS for seeds in arms(trials).values()):
        console.print(noise_table(trials, options.ends))
    if options.plot:
        plot(trials, name, options.plot)


if __name__ == "__main__":
    main()
