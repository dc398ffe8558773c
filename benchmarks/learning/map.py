"""A map of staleness: where training without weights collapses, what holds, and what each costs.

    python -m benchmarks.learning.map --json map.json --at-once 2 --minutes 60
    python -m benchmarks.learning.map --json map.json --only maze eager --minutes 20
    python -m benchmarks.learning.map --json map.json --minutes 0      # its tables alone

task × learning rate × η × admission × correction × seed ─▶ Cell ─▶ coarse cells first ─▶ a run ─▶ --json ─▶ tables
                                                             └ the same run as another cell: not run twice

Each cell is a real run. Those that ``--json`` holds are not repeated, so that the map is made in
pieces; ``--minutes`` begins no further run after so many. ``--events FOLDER`` keeps what each run
measured, which ``python -m benchmarks.robustness.guard --runs`` judges again. Corrections, by the
policy that the ratio is clipped around and the weight of what is older than it (with one optimizer
step a batch the ratio to the recomputed policy is 1, so nothing is clipped):

    none          the recomputed policy, no weight at all
    clipped       the rollout policy: the clipped ratio is the weight (PPO)
    truncate      the recomputed policy; weight at most 2
    mask          the recomputed policy; what has a weight outside 0.5 to 2 is left out
    decoupled     the recomputed policy; the whole weight (AReaL)
    interpolated  between both by staleness (A-3PO); weight at most 2

A run has **collapsed** at the first step at which the mean reward of 80 groups (the newest 10 steps
of 8, or 20 of 4) is below the half of what it had gained: of its highest such mean before, above the
first one, where this is at least 0.4. With less, or in means of fewer groups, the reward of these
tasks goes up and down with η = 0, too.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import harness
from benchmarks.learning.trials import (
    Trial,
    interval,
    markdown,
    read_trials,
    trial,
    write_trials,
)
from orchestration.history.events_file import METRICS
from orchestration.logs import configure
from orchestration.processes.pool import spawned_pool
from orchestration.recipe.loading.load import load_recipe
from orchestration.state.paths import RECIPE

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
SHARED = (
    "launch.launcher=inline",
    "evaluate.every=0",
    "checkpoint.every=40",
    "pipeline.arena=256MiB",
)
LAST = 10  # steps at the end, whose mean reward is the score
WINDOW = 10  # steps of a mean in which a collapse is sought, where a step has GROUPS groups
GROUPS = 8
LEAST_GAIN = 0.4  # that can collapse
PER_PROCESS = 50  # runs, after which a process of the pool is replaced


@dataclass(frozen=True)
class Task:
    """A recipe, two learning rates, ``steps`` in which the lower one learns it at η = 0, and
    ``groups`` of a step."""

    recipe: str
    rates: tuple[str, str]
    steps: int
    groups: int = GROUPS


TASKS = (
    Task("tiny", ("3e-3", "6e-3"), 160),  # is learned after 80, and can be lost again
    Task("modular-sum", ("1.5e-3", "3e-3"), 160),  # at 6e-3 it is lost with η = 0, too
    Task("maze", ("3e-3", "6e-3"), 80, groups=4),
)
# Options of the algorithm by the name of the correction.
CORRECTIONS = {
    "none": ("proximal=recomputed", "correction=none"),
    "clipped": ("proximal=rollout", "correction=none"),
    "truncate": ("proximal=recomputed", "correction=truncate"),
    "mask": ("proximal=recomputed", "correction=mask"),
    "decoupled": ("proximal=recomputed", "correction=truncate", "weight_high=1e9"),
    "interpolated": ("proximal=interpolated", "correction=truncate"),
}
BOUNDS = (0, 1, 2, 4, 8, 16)
ADMISSIONS = ("eager", "paced")
COMPARED = (
    ("clipped", "none"),
    ("truncate", "none"),
    ("truncate", "clipped"),
    ("interpolated", "clipped"),
    ("interpolated", "truncate"),
    ("decoupled", "truncate"),
    ("mask", "truncate"),
)
OLD = 4  # staleness bound from which corrections are compared
# Passes in which the values of an axis come to the map; a cell comes in the sum of those of its
# values.
PASSES: dict[object, int] = {
    **{0: 0, 8: 0, 16: 1, 2: 1, 4: 2, 1: 2},
    **{"eager": 0, "paced": 1},
    **{"none": 0, "truncate": 0, "clipped": 0, "decoupled": 1, "mask": 1, "interpolated": 2},
}


@dataclass(frozen=True)
class Cell:
    """One run of the map."""

    task: Task
    rate: str
    staleness: int
    admission: str
    correction: str
    seed: int

    @property
    def label(self) -> str:
        """All but the seed and the staleness bound."""
        return "/".join((self.task.recipe, self.rate, self.admission, self.correction))

    @property
    def key(self) -> tuple[str, int, int]:
        return self.label, self.staleness, self.seed

    @property
    def folder(self) -> str:
        return f"{self.label.replace('/', '-')}-eta-{self.staleness}-seed-{self.seed}"

    @property
    def run(self) -> Cell:
        """The cell whose run is the one of this cell, but for rounding.

        With η = 0 all samples are the current policy's, so each weight is 1, and there is one way
        to admit them. With η = 1 the interpolated policy is the rollout one for all samples of age 1
        (share 1 / age), and the current one for those of age 0.
        """
        if self.staleness == 0:
            return replace(self, admission="paced", correction="clipped")
        if self.staleness == 1 and self.correction == "interpolated":
            return replace(self, correction="clipped")
        return self

    @property
    def order(self) -> int:
        """The pass in which it is run."""
        rate = self.task.rates[::-1].index(self.rate)
        values = self.staleness, self.admission, self.correction
        return sum(PASSES[value] for value in values) + rate + self.seed

    def overrides(self) -> list[str]:
        return [
            *SHARED,
            *(f"algorithm.options.{option}" for option in CORRECTIONS[self.correction]),
            f"train.learning_rate={self.rate}",
            f"train.steps={self.task.steps}",
            f"train.groups_per_step={self.task.groups}",
            f"pipeline.staleness={self.staleness}",
            f"pipeline.admission={self.admission}",
            f"seed={self.seed}",
        ]


def cells(seeds: int) -> list[Cell]:
    """All cells of the map."""
    return [
        Cell(task, rate, *rest)
        for seed in range(seeds)
        for task in TASKS
        for rate in task.rates
        for rest in itertools.product(BOUNDS, ADMISSIONS, CORRECTIONS, [seed])
    ]


def runs(seeds: int) -> list[Cell]:
    """The runs that the map needs, each once, in the order in which they are made."""
    return sorted(dict.fromkeys(cell.run for cell in cells(seeds)), key=lambda cell: cell.order)


def execute(cell: Cell, events: Path | None) -> Trial:
    """Execute the run of a cell in this process. What the tables need is kept of it, and its
    recipe and its events in the folder ``events``."""
    configure()
    recipe = load_recipe(RECIPES / f"{cell.task.recipe}.toml", cell.overrides())
    with tempfile.TemporaryDirectory(prefix="map-") as temporary:
        run = Path(temporary) / "run"
        one = asyncio.run(trial(recipe, run))
        if events is not None:
            kept = events / cell.folder
            kept.mkdir(parents=True, exist_ok=True)
            for name in (RECIPE, METRICS):
                shutil.copyfile(run / name, kept / name)
    reward = [round(value, 4) for value in one.reward]
    return replace(one, recipe=cell.label, reward=reward, tokens=[], times=[], ledger={})


def measure(options: argparse.Namespace, trials: list[Trial]) -> None:
    """Add the runs that are missing to ``trials`` and to the file, until --minutes are over."""
    done = {(t.recipe, t.staleness, t.seed) for t in trials}
    waiting = [
        cell
        for cell in runs(options.seeds)
        if cell.key not in done and set(options.only) <= words(cell)
    ]
    end = time.monotonic() + 60 * options.minutes
    todo = iter(waiting)
    running: dict[Future[Trial], Cell] = {}
    with spawned_pool(options.at_once, PER_PROCESS) as pool:
        while True:
            while len(running) < options.at_once and time.monotonic() < end:
                if (cell := next(todo, None)) is None:
                    break
                running[pool.submit(execute, cell, options.events)] = cell
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                cell = running.pop(future)
                if error := future.exception():
                    print(f"{cell.label} η {cell.staleness} seed {cell.seed}: {error}", flush=True)
                    continue
                trials.append(future.result())
                write_trials(options.json, trials)
                print(line(trials[-1]), flush=True)
    missing = len(waiting) - sum(cell.key in {key(t) for t in trials} for cell in waiting)
    print(f"{len(trials)} runs are there, {missing} of those asked for are missing\n")


def words(cell: Cell) -> set[str]:
    """What --only can choose a cell by."""
    task, *rest = cell.label.split("/")
    return {task, *rest, f"eta={cell.staleness}", f"seed={cell.seed}"}


def key(one: Trial) -> tuple[str, int, int]:
    return one.recipe, one.staleness, one.seed


def line(one: Trial) -> str:
    at = collapse_of(one)
    return (
        f"{one.recipe} η {one.staleness} seed {one.seed}: {one.last(LAST):.3f}, age "
        f"{one.staleness_mean:.1f}, {one.seconds:.0f} s"
        + (f", collapsed at step {at}" if at else "")
        + "".join(f", {metric} at {step}" for step, metric in one.alarms)
    )


def window_of(groups: int) -> int:
    """Return how many steps of ``groups`` groups have as many groups as WINDOW steps of GROUPS."""
    return math.ceil(WINDOW * GROUPS / groups)


def collapse(
    reward: Sequence[float], window: int = WINDOW, least: float = LEAST_GAIN, lost: float = 0.5
) -> int | None:
    """Return the step, from 1, at which the mean of ``window`` steps had lost the share ``lost`` of
    a gain of ``least`` or more; None: it did not."""
    means = [statistics.fmean(reward[at : at + window]) for at in range(len(reward) - window + 1)]
    highest = means[0] if means else 0.0
    for at, mean in enumerate(means):
        gain = highest - means[0]
        if gain >= least and mean < highest - lost * gain:
            return at + window
        highest = max(highest, mean)
    return None


def collapse_of(one: Trial) -> int | None:
    """Return the step at which a run of the map collapsed; None: it did not."""
    recipe = one.recipe.partition("/")[0]
    groups = next(task.groups for task in TASKS if task.recipe == recipe)
    return collapse(one.reward, window_of(groups))


# --------------------------------------------------------------------------------------------------
# Tables


ROWS = list(itertools.product(CORRECTIONS, ADMISSIONS))
RATES = [(task, rate) for task in TASKS for rate in task.rates]


def seeds_of(trials: Sequence[Trial], task: Task, rate: str) -> Iterator[list[list[Trial]]]:
    """Yield each row of a table: the seeds of each bound."""
    seeds: dict[tuple[str, int], list[Trial]] = {}
    for one in trials:
        seeds.setdefault((one.recipe, one.staleness), []).append(one)
    for correction, admission in ROWS:
        row = (Cell(task, rate, bound, admission, correction, 0).run for bound in BOUNDS)
        yield [seeds.get((cell.label, cell.staleness), []) for cell in row]


def rewards(trials: Sequence[Trial]) -> Iterator[Table]:
    """A table for each task and learning rate: the mean score of the seeds, that of the worst, and
    a ✗ for each seed that collapsed. The column of η = 0 has the same runs in all rows."""
    for task, rate in RATES:
        title = f"{task.recipe}, learning rate {rate}, {task.steps} steps"
        shown = markdown(title, ("correction", "admission", *columns()))
        for names, row in zip(ROWS, seeds_of(trials, task, rate), strict=True):
            shown.add_row(*names, *map(score, row))
        yield shown


def score(seeds: Sequence[Trial]) -> str:
    if not seeds:
        return ""
    last = [one.last(LAST) for one in seeds]
    collapsed = "✗" * sum(collapse_of(one) is not None for one in seeds)
    return f"{statistics.fmean(last):.2f} ({min(last):.2f}){collapsed}"


def plot(trials: Sequence[Trial], path: Path) -> None:
    """Draw the mean scores, and a ✗ where a seed has collapsed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        len(TASKS), 2, figsize=(11, 4 * len(TASKS)), layout="constrained", squeeze=False
    )
    for axes, (task, rate) in zip(panels.flat, RATES, strict=True):
        rows = list(seeds_of(trials, task, rate))
        scores = [
            [statistics.fmean(one.last(LAST) for one in cell) if cell else math.nan for cell in row]
            for row in rows
        ]
        image = axes.imshow(scores, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        axes.set_title(f"{task.recipe}, learning rate {rate}", fontsize=10)
        axes.set_xticks(range(len(BOUNDS)), [f"η = {bound}" for bound in BOUNDS], fontsize=8)
        axes.set_yticks(range(len(ROWS)), map(", ".join, ROWS), fontsize=8)
        for y, x in itertools.product(range(len(ROWS)), range(len(BOUNDS))):
            if any(collapse_of(one) is not None for one in rows[y][x]):
                axes.text(x, y, "✗", ha="center", va="center", color="white")
    figure.colorbar(image, ax=panels, label=f"mean reward of the last {LAST} steps", shrink=0.5)
    figure.savefig(path, dpi=130)


def costs(trials: Sequence[Trial]) -> Table:
    """The age of trained samples, and the seconds of a step as a share of those at η = 0 with the
    same task, by admission; of all corrections."""
    shown = markdown("mean age, and seconds a step (η = 0: 1)", ("task", "admission", *columns()))
    for task, admission in itertools.product(TASKS, ADMISSIONS):
        of_bound: dict[int, list[Trial]] = {bound: [] for bound in BOUNDS}
        for one in trials:
            recipe, _, how, _ = one.recipe.split("/")
            if recipe == task.recipe and (how == admission or one.staleness == 0):
                of_bound[one.staleness].append(one)
        base = statistics.median(one.seconds for one in of_bound[0]) if of_bound[0] else 0.0
        texts = (cost(of_bound[bound], base) for bound in BOUNDS)
        shown.add_row(task.recipe, admission, *texts)
    return shown


def differences(trials: Sequence[Trial]) -> Table:
    """Return the differences of the scores of two corrections, in runs that have all else in
    common: their mean and its 95 % interval, of bounds of ``OLD`` or more, and by bound."""
    bounds = BOUNDS[2:]
    names = ("task", "correction", "beside", "pairs", f"η ≥ {OLD}", *columns(bounds))
    shown = markdown(f"difference of two corrections; pairs: of η ≥ {OLD}", names)
    for task in ("", *(task.recipe for task in TASKS)):
        for first, second in COMPARED:
            gains = gains_of(trials, task, first, second)
            old = [gain for bound in bounds if bound >= OLD for gain in gains[bound]]
            if len(old) > 1:
                cells = [old, *(gains[bound] for bound in bounds)]
                means = (interval(cell) if len(cell) > 1 else "" for cell in cells)
                shown.add_row(task or "all", first, second, str(len(old)), *means)
    return shown


def gains_of(trials: Sequence[Trial], task: str, first: str, second: str) -> dict[int, list[float]]:
    """Return by bound how much higher the scores of runs with the correction ``first`` are than
    those with ``second`` that have all else in common; of one ``task``, or "": of all."""
    scores = {key(one): one.last(LAST) for one in trials}
    gains: dict[int, list[float]] = {bound: [] for bound in BOUNDS}
    for (label, bound, seed), score in scores.items():
        setting, _, correction = label.rpartition("/")
        if correction != first or task not in ("", setting.partition("/")[0]):
            continue
        if (other := scores.get((f"{setting}/{second}", bound, seed))) is not None:
            gains[bound].append(score - other)
    return gains


def columns(bounds: Sequence[int] = BOUNDS) -> Iterator[str]:
    return (f"η = {bound}" for bound in bounds)


def cost(seeds: Sequence[Trial], base: float) -> str:
    if not seeds:
        return ""
    age = statistics.fmean(one.staleness_mean for one in seeds)
    seconds = statistics.median(one.seconds for one in seeds)
    return f"{age:.1f}" + (f", {seconds / base:.2f}" if base else "")


def alarms(trials: Sequence[Trial]) -> Table:
    """Of the runs that collapsed in how many the guard's alarm came at the step of the collapse or
    before; of the others, how many had an alarm."""
    collapsed = [(one, at) for one in trials if (at := collapse_of(one)) is not None]
    early = [
        metric for one, at in collapsed for metric in {m for step, m in one.alarms if step <= at}
    ]
    warned = sum(any(step <= at for step, _ in one.alarms) for one, at in collapsed)
    clean = [one for one in trials if collapse_of(one) is None]
    late = [metric for one in clean for metric in {metric for _, metric in one.alarms}]
    alarmed = sum(bool(one.alarms) for one in clean)
    shown = markdown("the guard", ("runs", "number", "with an alarm", "of the metrics"))
    shown.add_row("collapsed: until then", str(len(collapsed)), str(warned), counted(early))
    shown.add_row("others: at any step", str(len(clean)), str(alarmed), counted(late))
    return shown


def counted(metrics: Sequence[str]) -> str:
    return ", ".join(f"{metric} {count}" for metric, count in Counter(metrics).most_common())


def main() -> None:
    parser = harness.parser(__doc__, json_file=False)
    parser.add_argument("--json", type=Path, required=True, help="its runs are not repeated")
    parser.add_argument("--seeds", type=int, default=3, help="0 to this number, without it")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="runs, in processes")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no run after so many")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="WORD",
        help="runs with all of these: a task, a rate, an admission, a correction, eta=8, seed=0",
    )
    parser.add_argument("--events", type=Path, metavar="FOLDER", help="keeps those of each run")
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    trials = read_trials(options.json) if options.json.exists() else []
    measure(options, trials)
    console = Console(width=240)
    for shown in (*rewards(trials), differences(trials), costs(trials), alarms(trials)):
        console.print(shown)
    if options.plot:
        plot(trials, options.plot)


if __name__ == "__main__":
    main()
