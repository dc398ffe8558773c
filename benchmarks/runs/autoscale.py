"""Autoscaling against fixed numbers of rollout workers, while the load changes twice.

Mock engines, one process, all runs at once: what else the machine does slows all of them alike.

In the middle third of the steps responses are several times as long. Each fixed number trains the
same steps; so does a run with `launch.autoscale`, which begins with the fewest. The best fixed
number is the smallest one whose time is within 2 % of the shortest. A second column has what the
time took: seconds times workers.

    python -m benchmarks.runs.autoscale [--smoke] [--fixed 4 5 6] [--json FILE]
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness
from benchmarks.runs.executed import executed
from orchestration.recipe.loading.load import parse_recipe
from orchestration.recipe.schema import Recipe
from pipeline.data.events import Event
from stages.engines.mock.engines import MockRolloutEngine, _Row
from stages.engines.mock.options import MockRolloutOptions
from stages.engines.protocols import GroupRequest
from stages.engines.responses import Responses

WITHIN = 0.02  # of the shortest time, for the best fixed number
MOST_SLOWER = 0.10  # than with the best fixed number: what autoscaling may cost


@dataclass(frozen=True)
class Workload:
    """``need`` rollouts keep the trainer busy with short responses, ``times`` as many with long
    ones."""

    need: float = 1.6
    times: float = 3.0
    steps: int = 90
    groups: int = 8
    group_size: int = 4
    rows: int = 8  # that one rollout decodes at the same time
    tokens: int = 40
    step_seconds: float = 1.0
    window: float = 4.0
    least: int = 1
    most: int = 6

    def recipe(self, workers: int) -> Recipe:
        """With ``workers`` rollouts; 0: their number follows the load."""
        rate = (
            self.groups
            * self.group_size
            * self.tokens
            / (self.need * self.rows * self.step_seconds)
        )
        launch: dict[str, Any] = {"launcher": "inline"}
        if not workers:
            launch["autoscale"] = {"min": self.least, "max": self.most, "window": self.window}
        return parse_recipe(
            {
                "name": f"autoscale-{workers or 'auto'}",
                "model": {"source": "mock"},
                "prompts": {"source": "builtin", "task": "repeat", "max_prompt_tokens": 16},
                "rollout": {
                    "engine": f"{__spec__.name if __spec__ else 'benchmarks.runs.autoscale'}:engine",
                    "options": {
                        "times": self.times,
                        "groups": self.groups * self.steps,
                        "rate": rate,
                        "tokens": self.tokens,
                    },
                    "workers": workers or self.least,
                    "max_rows": self.rows,
                    # none is cut off: lengths are log-normal
                    "max_tokens": round(4 * self.tokens * self.times),
                },
                "reward": {"functions": [{"name": "spelling"}]},
                "algorithm": {"group_size": self.group_size},
                "train": {
                    "engine": "mock",
                    "steps": self.steps,
                    "groups_per_step": self.groups,
                    "mock": {"step_seconds": self.step_seconds, "token_seconds": 0.0},
                },
                "pipeline": {"staleness": 2, "arena": "64MiB"},
                "checkpoint": {"every": self.steps},
                "launch": launch,
            }
        )


SMOKE = Workload(steps=24, step_seconds=0.15, window=0.5, most=3)


class LoadedEngine(MockRolloutEngine):
    """The mock engine, with longer responses for the groups of the middle third."""

    times = 1.0
    groups = 1

    def _row(self, request: GroupRequest, place: int, stream: Responses) -> _Row:
        row = super()._row(request, place, stream)
        if self.groups / 3 <= request.group < 2 * self.groups / 3:
            row.length = row.tokens = min(round(row.length * self.times), request.params.max_tokens)
        return row


def engine(
    recipe: Recipe,
    version: int,
    weights: Mapping[str, torch.Tensor] | None,
    *,
    times: float,
    groups: int,
    rate: float,
    tokens: int,
) -> LoadedEngine:
    """The engine that the recipe names, with the options of the load."""
    made = LoadedEngine(
        MockRolloutOptions(
            max_rows=recipe.rollout.max_rows,
            row_rate=rate,
            saturation_rows=recipe.rollout.max_rows,
            prefill_rate=1e6,
            median_tokens=tokens,
            sigma=0.3,
            swap_seconds=0.01,
        ),
        version=version,
    )
    made.times = times
    made.groups = groups
    return made


@dataclass(frozen=True)
class Arm:
    """``workers`` 0: autoscaled. ``seconds`` between the first and the last step, ``spent`` seconds
    times workers in that time, ``numbers`` of workers in their order, ``waits``: the share in which
    the trainer waited."""

    workers: int
    seconds: float
    spent: float
    numbers: list[int]
    waits: float


async def measure(workload: Workload, workers: int, out: Path) -> Arm:
    """Train once. Raises RuntimeError when the run does not finish."""
    return arm_of(workers, await executed(workload.recipe(workers), out))


def arm_of(workers: int, events: list[Event]) -> Arm:
    """Returns what ``events`` of a run say."""
    steps = [event.time for event in events if event.kind == "step"]
    begin = steps[0]
    end = steps[-1]
    alive = 0
    numbers = list[int]()
    spent = 0.0
    since = begin
    for event in events:
        if (
            event.kind == "worker"
            and event.data["stage"] == "rollout"
            and event.data["change"] in ("ready", "left")
        ):
            at = min(max(event.time, begin), end)
            spent = spent + alive * (at - since)
            since = at
            alive += 1 if event.data["change"] == "ready" else -1
            numbers.append(alive)
    spent += alive * (end - since)
    updates = [
        e.data
        for e in events
        if e.kind == "stage" and e.data["stage"] == "update" and begin <= e.time <= end
    ]
    waits = (updates[-1]["waiting_input"] - updates[0]["waiting_input"]) / (
        updates[-1]["wall"] - updates[0]["wall"]
    )
    return Arm(workers, end - begin, spent, numbers, waits)


async def compare(workload: Workload, fixed: Sequence[int]) -> tuple[list[Arm], Arm]:
    """Returns the arms of the ``fixed`` numbers, and the autoscaled one."""
    with tempfile.TemporaryDirectory() as folder:
        runs = (measure(workload, workers, Path(folder) / str(workers)) for workers in (0, *fixed))
        auto, *arms = await asyncio.gather(*runs)
        return arms, auto


def best_of(fixed: list[Arm]) -> Arm:
    """The smallest number that is as fast as any."""
    shortest = min(arm.seconds for arm in fixed)
    return next(arm for arm in fixed if arm.seconds <= (1 + WITHIN) * shortest)


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument(
        "--smoke", action="store_true", help="a short run, whose figures say little"
    )
    parser.add_argument(
        "--fixed",
        type=int,
        nargs="+",
        metavar="N",
        help="fixed numbers; default: all that there may be",
    )
    options = parser.parse_args()
    workload = SMOKE if options.smoke else Workload()
    numbers = options.fixed or range(workload.least, workload.most + 1)
    fixed, auto = asyncio.run(compare(workload, numbers))
    best = best_of(fixed)
    print(
        f"{workload.steps} steps; load × {workload.times:g} in the middle third; needs "
        f"{workload.need:g} rollouts, then more"
    )
    print("| rollouts | s | trainer waits | worker-seconds |")
    print("|---|---|---|---|")
    for arm in [*fixed, auto]:
        name = (
            str(arm.workers) if arm.workers else "autoscaled: " + " → ".join(map(str, arm.numbers))
        )
        mark = " (best fixed)" if arm is best else ""
        print(f"| {name}{mark} | {arm.seconds:.1f} | {arm.waits:.0%} | {arm.spent:.0f} |")
    slower = auto.seconds / best.seconds - 1
    print(
        f"Autoscaled against the best fixed number: {slower:+.1%} time, "
        f"{auto.spent / best.spent - 1:+.1%} worker-seconds."
    )
    if options.json:
        figures = {
            "fixed": [asdict(arm) for arm in fixed],
            "auto": asdict(auto),
            "best": best.workers,
            "slower": slower,
        }
        options.json.write(figures)


if __name__ == "__main__":
    main()
