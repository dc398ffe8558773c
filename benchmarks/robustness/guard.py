"""The guard: alarms of clean runs, and of runs with a fault injected.

    python -m benchmarks.robustness.guard [--clean] [--faults] [--sensitivity 8] [--json FILE]
    python -m benchmarks.robustness.guard --runs FOLDER … [--sensitivity 8]
    python -m benchmarks.robustness.guard --rewards FILE … [--sensitivity 8]

    clean runs: tiny at η = 0 and 2, and with two functions, quickstart; 3 seeds each ─▶ alarms      none is right
    fault, since step n ─▶ a run of tiny ─▶ alarms      the right one at step n (± 1) is right

Without --clean and --faults both are made. ``--rewards``: judge the mean rewards of trials that
benchmarks.learning has recorded: of those that lost half of what they had gained, how many had an
alarm by then; of the others, how many had one. ``--runs``: judge the recorded events of runs, and
count those with alarms. The faults are in benchmarks/robustness/faults.py.
"""

from __future__ import annotations

import asyncio
import re
import statistics
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks import harness
from benchmarks.learning.map import collapse, window_of
from benchmarks.learning.trials import read_trials
from benchmarks.robustness import faults
from benchmarks.runs.executed import executed
from orchestration.guard.fall import FallJudge
from orchestration.guard.guard import Guard
from orchestration.history.events_file import METRICS, read_metrics
from orchestration.recipe.loading.load import load_recipe
from orchestration.recipe.schema import Recipe
from orchestration.state.paths import RECIPE
from orchestration.supervise.watch import options_of
from orchestration.workers import rollout as worker
from pipeline.data.events import AlarmEvent, Event

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
QUARTER: dict[str, Any] = {"least": 0.2, "lost": 0.25}  # of a gain
SINCE = 12  # the policy version from which on a fault is there
TWO = "tiny with two reward functions"
TWO_FUNCTIONS = 'reward.functions=[{name = "spelling"}, {name = "benchmarks.robustness.faults:letters", weight = 0.5}]'
SHORT = (
    f"train.steps={SINCE + 6}",
    "evaluate.every=0",
    "launch.launcher=inline",
    "launch.max_restarts=1",
)


@dataclass(frozen=True)
class Injection:
    """One injected fault: a run of ``tiny`` and the ``metric`` whose alarm is expected.

    ``steps``: steps at which that alarm counts as raised within one step. ``spoilt``: the fault is
    put into the built-in torch engine instead of into an engine from a factory, because only the
    built-in one takes adapters.
    """

    name: str
    metric: str
    sets: tuple[str, ...]
    steps: tuple[int, ...] = (SINCE, SINCE + 1, SINCE + 2)
    spoilt: faults.Fault = ""


def _engine(fault: str, *sets: str, since: int = SINCE) -> tuple[str, ...]:
    options = f'rollout.options={{fault = "{fault}", since = {since}}}'
    return "rollout.engine=benchmarks.robustness.faults:engine", options, *sets


LONG = ("rollout.max_tokens=32", "rollout.on_update=cut")
INJECTIONS = (
    Injection("an update that was not delivered", "probe", _engine("undelivered")),
    Injection(
        "an adapter that was not delivered", "probe", ("model.lora.rank=4",), spoilt="undelivered"
    ),
    Injection("one stale tensor", "probe", _engine("stale tensor")),
    Injection("a wrong temperature", "probe", _engine("temperature")),
    Injection(
        "a wrong temperature of sampling", "gap_mean_0", _engine("sampling", "pipeline.staleness=0")
    ),
    Injection(
        "the KV cache kept over a swap",
        "gap_mean_resumed",
        _engine("cache", *LONG, since=0),
        (1, 2, 3),
    ),
    Injection("another tokenizer", "tokenizer", _engine("tokenizer"), (0,)),
    Injection(
        "a reward that became constant",
        "equal_groups",
        (
            'reward.functions=[{name = "benchmarks.robustness.faults:constant"}]',
            "reward.processes=1",
        ),
    ),
    Injection("responses that are one text", "distinct_responses", _engine("one text")),
)


async def events_of(recipe: Recipe) -> list[Event]:
    """The events of a run of ``recipe`` to its end."""
    with tempfile.TemporaryDirectory(prefix="guard-") as folder:
        return await executed(recipe, Path(folder) / "run", must_finish=False)


def alarms_of(events: Sequence[Event]) -> list[AlarmEvent]:
    return [data for event in events if isinstance(data := event.decoded(), AlarmEvent)]


@dataclass(frozen=True)
class Judged:
    """A recorded run: the mean ``rewards`` of its steps, each of which has ``groups`` groups, and
    the alarms that its events give."""

    name: str
    groups: int
    rewards: list[float]
    alarms: list[AlarmEvent]

    @classmethod
    def of(cls, folder: Path, sensitivity: float) -> Judged:
        recipe = Recipe.from_json((folder / RECIPE).read_text())
        guard = Guard(replace(options_of(recipe), sensitivity=sensitivity))
        rewards = list[float]()
        alarms = list[AlarmEvent]()
        for event in read_metrics(folder / METRICS):
            if event.kind == "step":
                rewards.append(event.data["reward_mean"])
            if event.kind in ("step", "sync") and (data := event.decoded()) is not None:
                alarms += guard.observe(data)
        return cls(folder.name, recipe.train.groups_per_step, rewards, alarms)

    def collapse(self, **options: float) -> int | None:
        """Return the step at which the reward collapsed (:func:`~benchmarks.learning.map.collapse`
        with its ``options``, in means of as many groups as the map's); None: it did not."""
        return collapse(self.rewards, window_of(self.groups), **options)

    def until(self, step: int | None) -> list[str]:
        """The metrics that had an alarm at ``step`` or before; None: at any step."""
        return sorted({a.metric for a in self.alarms if step is None or a.step <= step})


def summary(runs: Sequence[Judged]) -> Iterator[str]:
    """Yield a table of how many of the recorded runs have alarms: of those that collapsed, of those
    that lost a quarter of a gain of 0.2 or more, and of the others. A step of few groups is in a
    longer mean there, in which a short fall does not show: those that fell in means of ten steps
    alone have a row."""
    kinds = dict[str, list[tuple[Judged, int | None]]]()
    for run in runs:
        if (at := run.collapse()) is not None:
            kinds.setdefault("collapsed: until then", []).append((run, at))
        elif run.collapse(**QUARTER) is not None:
            kinds.setdefault("fell by a quarter", []).append((run, None))
        elif collapse(run.rewards, **QUARTER) is not None:
            kinds.setdefault("fell by a quarter in ten steps alone", []).append((run, None))
        else:
            kinds.setdefault("others", []).append((run, None))
    yield "| runs | number | with an alarm | of the metrics |"
    yield "|---|---|---|---|"
    for kind, members in sorted(kinds.items()):
        metrics = [run.until(at) for run, at in members]
        alarmed = sum(map(bool, metrics))
        counts = Counter(metric for of_run in metrics for metric in of_run).most_common()
        listed = ", ".join(f"{metric} {count}" for metric, count in counts)
        yield f"| {kind} | {len(members)} | {alarmed} | {listed} |"


def clean(
    sensitivity: float, only: Sequence[str] = ()
) -> Iterator[tuple[str, int, list[AlarmEvent]]]:
    """Of each clean run its name, its steps and its alarms."""
    for name, eta, *sets in (("tiny", 0), ("tiny", 2), (TWO, 2, TWO_FUNCTIONS), ("quickstart", 1)):
        for seed in range(3):
            if only and not any(text in f"{name}, η = {eta}, seed {seed}" for text in only):
                continue
            changes = [
                *sets,
                f"pipeline.staleness={eta}",
                f"seed={seed}",
                f"guard.sensitivity={sensitivity}",
            ]
            recipe = load_recipe(RECIPES / f"{name.partition(' ')[0]}.toml", changes)
            events = asyncio.run(events_of(recipe))
            if [event.data["state"] for event in events if event.kind == "state"][-1:] != [
                "finished"
            ]:
                raise RuntimeError(f"{name}, η = {eta}, seed {seed}: the run was not finished")
            yield (
                (f"{name}, η = {eta}, seed {seed}"),
                sum(e.kind == "step" for e in events),
                alarms_of(events),
            )


def inject(one: Injection) -> dict[str, Any]:
    """What the run with the fault gives: whether it was caught, the right alarm, and the metrics of
    the others."""
    make = worker.rollout_engine

    def spoilt(*arguments: Any, **options: Any) -> Any:
        engine = make(*arguments, **options)
        faults.spoil(engine, one.spoilt, SINCE)
        return engine

    with patch.object(worker, "rollout_engine", spoilt if one.spoilt else make):
        alarms = alarms_of(
            asyncio.run(events_of(load_recipe(RECIPES / "tiny.toml", [*SHORT, *one.sets])))
        )
    right = next((alarm for alarm in alarms if alarm.metric == one.metric), None)
    return {
        "fault": one.name,
        "caught": right is not None and right.step in one.steps,
        "alarm": None if right is None else asdict(right),
        "others": sorted({alarm.metric for alarm in alarms} - {one.metric}),
    }


def rewards(files: Sequence[Path], sensitivity: float) -> Iterator[str]:
    """Yield a table of the alarms that the mean rewards of recorded trials raise, and a line for
    each trial with one."""
    yield "| trials | lost half of a gain | of these with an alarm by then | others | of these with one |"
    yield "|---|---|---|---|---|"
    alarmed = []
    sums = Counter[str]()
    for file in files:
        counts = Counter[str]()
        for one in read_trials(file):
            lost = collapse(one.reward)
            falls = falls_of(one.reward, sensitivity)
            in_time = bool(falls) and (lost is None or falls[0] <= lost)
            counts[f"{'lost' if lost else 'other'}{' alarmed' if in_time else ''}"] += 1
            if falls:
                means = ", ".join(f"{mean:.2f}" for mean in means_of(one.reward))
                alarmed.append(
                    f"{file.name} {one.recipe} η {one.staleness} seed {one.seed}, at step "
                    f"{falls[0]}: {means}"
                )
        yield as_counts(file.name, counts)
        sums += counts
    yield as_counts("all", sums)
    yield ""
    yield from alarmed


def as_counts(name: str, counts: Counter[str]) -> str:
    lost = counts["lost"] + counts["lost alarmed"]
    others = counts["other"] + counts["other alarmed"]
    return f"| {name} | {lost} | {counts['lost alarmed']} | {others} | {counts['other alarmed']} |"


def falls_of(reward: Sequence[float], sensitivity: float) -> list[int]:
    """Return the steps, from 1, at which an alarm of the mean reward begins."""
    judge = FallJudge(sensitivity)
    judged = [judge.of_reward(step, mean) for step, mean in enumerate(reward, start=1)]
    fell = [False, *(found is not None and found[0] for found in judged)]
    return [step for step in range(1, len(fell)) if fell[step] and not fell[step - 1]]


def means_of(reward: Sequence[float], parts: int = 12) -> Iterator[float]:
    """Yield the means of ``parts`` parts of a run."""
    length = max(1, len(reward) // parts)
    for begin in range(0, len(reward), length):
        yield statistics.fmean(reward[begin : begin + length])


def as_row(found: dict[str, Any]) -> str:
    """One row of the table. Of what to look at the first sentence."""
    alarm = found["alarm"]
    cells = ["MISSED", "", ""]
    if found["caught"]:
        look = re.split(r"(?<=[.:]) (?=[A-Z])", alarm["look"])[0]
        cells = [
            f"`{alarm['metric']}`",
            str(alarm["step"]),
            f"{alarm['reason'].partition(': ')[2]}. {look}",
        ]
    return f"| {' | '.join([found['fault'], *cells, ', '.join(f'`{name}`' for name in found['others'])])} |"


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--clean", action="store_true", help="clean runs alone")
    parser.add_argument("--faults", action="store_true", help="injected faults alone")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="TEXT",
        help="runs with one of these in their names",
    )
    parser.add_argument("--runs", type=Path, nargs="+", default=[], metavar="FOLDER")
    parser.add_argument("--sensitivity", type=float, default=8.0, help="of clean runs")
    parser.add_argument("--rewards", type=Path, nargs="+", default=[], metavar="FILE")
    asked = parser.parse_args()
    if asked.rewards:
        print("\n".join(rewards(asked.rewards, asked.sensitivity)))
        return
    if asked.runs:
        runs = [Judged.of(folder, asked.sensitivity) for folder in asked.runs]
        for run in runs:
            if run.alarms:
                found = "; ".join(f"step {alarm.step}: {alarm.reason}" for alarm in run.alarms)
                print(f"{run.name}: {found}")
        print("", *summary(runs), sep="\n")
        return
    both = asked.clean == asked.faults
    out = dict[str, list[dict[str, Any]]](clean=[], faults=[])
    if both or asked.clean:
        print("| clean run | steps | alarms |\n|---|---|---|")
        for name, steps, alarms in clean(asked.sensitivity, asked.only):
            out["clean"].append(
                {"run": name, "steps": steps, "alarms": [asdict(alarm) for alarm in alarms]}
            )
            print(
                f"| {name} | {steps} | {'; '.join(alarm.reason for alarm in alarms) or 'none'} |",
                flush=True,
            )
    if both or asked.faults:
        print(
            f"\nFaults from version {SINCE} on:\n\n| fault | alarm | at step | what it says | "
            f"beside it |"
        )
        print("|---|---|---|---|---|")
        for one in INJECTIONS:
            if asked.only and not any(text in one.name for text in asked.only):
                continue
            found = inject(one)
            out["faults"].append(found)
            print(as_row(found), flush=True)
    if asked.json:
        asked.json.write(out)


if __name__ == "__main__":
    main()
