"""`pipeline.staleness = "auto"` against fixed bounds, while the balance of the stages changes
twice. Mock engines, one process, all runs at once: what else the machine does slows all of them
alike.

    python -m benchmarks.runs.auto_staleness [--fixed 1 2 3 4] [--smoke] [--json FILE]

In the middle third of the steps responses are ``times`` as long, so that generation needs as much
time as training; before and after it needs half. Throughput: optimizer steps over time between the
first and the last step. Staleness: mean over all samples. The best fixed bound is the smallest one
that takes at most 2 % longer than the fastest.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from benchmarks import harness
from benchmarks.runs.executed import executed
from orchestration.logs import configure
from orchestration.recipe.loading.load import parse_recipe
from orchestration.recipe.schema import Recipe
from pipeline.data.events import Event

WITHIN = 0.02  # of the shortest time, for the best fixed bound


@dataclass(frozen=True)
class Workload:
    """``share``: time of generation over time of training with short responses; ``times`` as much
    with long ones."""

    share: float = 0.5
    times: float = 2.0
    steps: int = 96
    groups: int = 8
    group_size: int = 4
    rows: int = 16
    tokens: int = 40
    step_seconds: float = 1.0
    most: int = 4

    def recipe(self, bound: int) -> Recipe:
        """With a fixed bound; 0: the run decides it."""
        rate = (
            self.groups
            * self.group_size
            * self.tokens
            / (self.share * self.rows * self.step_seconds)
        )
        staleness = {"staleness": bound} if bound else {"staleness": self.most, "staleness_min": 1}
        load = {
            "times": self.times,
            "groups": self.groups * self.steps,
            "rate": rate,
            "tokens": self.tokens,
        }
        return parse_recipe(
            {
                "name": f"staleness-{bound or 'auto'}",
                "model": {"source": "mock"},
                "prompts": {"source": "builtin", "task": "repeat", "max_prompt_tokens": 16},
                "rollout": {
                    "engine": "benchmarks.runs.autoscale:engine",
                    "options": load,
                    "max_rows": self.rows,
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
                "pipeline": {**staleness, "arena": "64MiB"},
                "checkpoint": {"every": self.steps},
                "launch": {"launcher": "inline"},
            }
        )


SMOKE = Workload(steps=60, step_seconds=0.15, most=3)


@dataclass(frozen=True)
class Arm:
    """``bound`` 0: decided by the run. ``bounds``: (step from which on, bound) of each change.
    ``error``: median of predicted over measured seconds of a step, less 1."""

    bound: int
    seconds: float
    staleness_mean: float
    staleness_max: int
    bounds: list[tuple[int, int]]
    error: float | None


def arm_of(bound: int, events: Sequence[Event]) -> Arm:
    """Returns what ``events`` of a run say."""
    steps = [event for event in events if event.kind == "step"]
    changes = [
        event.data
        for event in events
        if event.kind == "forecast" and event.data["bound"] != event.data["before"]
    ]
    errors = sorted(
        step.data["predicted_seconds"] / step.data["seconds"] - 1
        for step in steps
        if step.data.get("predicted_seconds")
    )
    return Arm(
        bound,
        steps[-1].time - steps[0].time,
        fmean(step.data.get("staleness_mean", 0.0) for step in steps),
        max(int(step.data.get("staleness_max", 0)) for step in steps),
        [(change["step"], change["bound"]) for change in changes],
        errors[len(errors) // 2] if errors else None,
    )


async def compare(workload: Workload, fixed: Sequence[int]) -> tuple[list[Arm], Arm]:
    """Returns the arms of the ``fixed`` bounds, and the one that decides."""

    async def one(bound: int, folder: Path) -> Arm:
        return arm_of(bound, await executed(workload.recipe(bound), folder))

    with tempfile.TemporaryDirectory(prefix="staleness-") as home:
        auto, *arms = await asyncio.gather(
            *(one(bound, Path(home) / str(bound)) for bound in (0, *fixed))
        )
    return arms, auto


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--fixed", type=int, nargs="+", default=[1, 2, 3, 4], metavar="N")
    parser.add_argument("--smoke", action="store_true", help="a short run, to test the benchmark")
    options = parser.parse_args()
    workload = SMOKE if options.smoke else Workload()
    fixed, auto = asyncio.run(compare(workload, options.fixed))
    shortest = min(arm.seconds for arm in fixed)
    best = next(arm for arm in fixed if arm.seconds <= (1 + WITHIN) * shortest)
    share = workload.share
    times = workload.times
    print(
        f"{workload.steps} steps, generation takes {share:g} of training, in the middle "
        f"{times:g} × as much"
    )
    print(f"{'bound':24} {'seconds':>8} {'mean staleness':>15} {'largest':>8}")
    for arm in [*fixed, auto]:
        name = (
            str(arm.bound)
            if arm.bound
            else "auto: " + " ".join(f"{bound} from {step}," for step, bound in arm.bounds)
        )
        mark = " (best fixed)" if arm is best else ""
        print(
            f"{name.rstrip(',') + mark:24} {arm.seconds:8.1f} {arm.staleness_mean:15.2f} "
            f"{arm.staleness_max:8}"
        )
    print(
        f"auto against the best fixed bound: {auto.seconds / best.seconds - 1:+.1%} time, "
        f"{auto.staleness_mean:.2f} against {best.staleness_mean:.2f} mean staleness"
    )
    if auto.error is not None:
        print(f"predicted seconds of a step over measured: {auto.error:+.1%} in the median")
    if options.json:
        figures = {
            "fixed": [asdict(arm) for arm in fixed],
            "auto": asdict(auto),
            "best": best.bound,
        }
        options.json.write(figures)


if __name__ == "__main__":
    configure()
    main()
