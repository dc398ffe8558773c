"""A whole run in which training and generation take turns on one device, beside one in which each
has its own.

    python -m benchmarks.runs.colocated [--model tiny|smollm2|FOLDER] [--dp 1] [--tp 1] [--steps 10] [--json FILE]
    python -m benchmarks.runs.colocated --smoke

Real runs of one recipe: index, worker processes, swaps. The reward takes ``--reward-seconds`` for
each call, as one that asks a judge does: that is when training can come back unseen.

    separate               weights published to host memory, taken by an engine of its own
    colocated              allgather-swap; training comes back when a batch is claimed
    colocated, prefetch    the same, as soon as nothing is left to generate

*exposed* is for how long a version's swaps kept a device waiting (the longest of all ranks),
*hidden* what of them ran beside other work. *training* and *generating* are the most bytes that
were counted on a device in either turn: weights, optimizer state, keys and values, on a CPU from
their storages; a separate run does not count them. Swaps of version 0 are left out, as nothing had
been trained before them. Where there is one device for everything, as here, seconds a step compare
the two colocated arms alone: the engines of the separate one share its cores.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import harness
from benchmarks.runs.executed import executed
from orchestration.logs import configure
from orchestration.recipe.loading.load import parse_recipe
from orchestration.recipe.schema import Recipe
from orchestration.units import format_size
from pipeline.data.events import Event

ARMS: dict[str, dict[str, Any]] = {
    "separate": {"launch": {"placement": "separate"}},
    "colocated": {"launch": {"placement": "colocated"}, "sync": {"prefetch": False}},
    "colocated, prefetch": {"launch": {"placement": "colocated"}},
}
SECONDS = "BENCHMARK_REWARD_SECONDS"


@dataclass(frozen=True)
class Arm:
    """Medians of a step in seconds, and bytes of the rank that has most (0: not counted)."""

    arm: str
    steps: int
    step_seconds: float
    exposed: float
    hidden: float
    training: int
    generating: int
    released: int


def judged(completions: list[str], **columns: Any) -> list[float]:
    """The share of letters from the first half of the alphabet, after a while."""
    time.sleep(float(os.environ.get(SECONDS, "0")))
    return [sum("a" <= c < "n" for c in text) / max(1, len(text)) for text in completions]


Changes = dict[str, dict[str, Any]]  # keys of a recipe's sections


def recipe_of(arm: str, model: str, steps: int, launcher: str, changes: Changes) -> Recipe:
    """The same work in each arm."""
    sections: dict[str, Any] = {
        "model": {"source": model},
        "prompts": {"source": "builtin", "task": "repeat", "max_prompt_tokens": 64},
        "rollout": {"max_rows": 32, "max_tokens": 16},
        "reward": {"functions": [{"name": f"{judged.__module__}:judged"}]},
        "algorithm": {"group_size": 8},
        "train": {"steps": steps, "groups_per_step": 4, "learning_rate": 1e-5},
        "pipeline": {"staleness": 0},
        "checkpoint": {"every": steps},
        "launch": {"launcher": launcher},
    }
    for more in (ARMS[arm], changes):
        for name, values in more.items():
            sections[name] = sections.get(name, {}) | values
    return parse_recipe({"name": "colocated", **sections})


async def measure(arm: str, recipe: Recipe) -> Arm:
    """Execute ``recipe`` and read its events. Raises RuntimeError when it does not finish."""
    with tempfile.TemporaryDirectory(prefix="asyncdock-benchmark-") as home:
        return arm_of(arm, await executed(recipe, Path(home) / "run"))


def arm_of(arm: str, events: Sequence[Event]) -> Arm:
    steps = [event for event in events if event.kind == "step"]
    exposed, hidden = ({rank: dict[int, float]() for rank in ranks(events)} for _ in range(2))
    for event in events:
        if event.kind == "sync" and event.data["version"] > 0:
            worker = event.data["worker"]
            version = int(event.data["version"])
            for totals, name in ((exposed, "exposed_seconds"), (hidden, "hidden_seconds")):
                totals[worker][version] = totals[worker].get(version, 0.0) + event.data[name]
    held: dict[str, int] = defaultdict(int)
    for event in events:
        if event.kind == "turn":
            held[event.data["phase"]] = max(held[event.data["phase"]], event.data["device_bytes"])
            held["generation"] = max(held["generation"], event.data.get("generating_bytes", 0))
    released = [event.data.get("released_bytes", 0) for event in events if event.kind == "sync"]
    return Arm(
        arm=arm,
        steps=len(steps),
        step_seconds=median([b.time - a.time for a, b in itertools.pairwise(steps)]),
        exposed=_slowest(exposed),
        hidden=_slowest(hidden),
        training=held["training"],
        generating=held["generation"],
        released=max(released, default=0),
    )


def ranks(events: Sequence[Event]) -> set[str]:
    return {event.data["worker"] for event in events if event.kind == "sync"}


def _slowest(seconds: dict[str, dict[int, float]]) -> float:
    """The median over versions of the rank for which it is longest."""
    return max(
        (median(versions.values()) for versions in seconds.values() if versions), default=0.0
    )


def table(arms: Sequence[Arm]) -> str:
    head = (
        f"{'':<22}{'s/step':>9}{'exposed ms':>12}{'hidden ms':>12}{'training':>12}"
        f"{'generating':>12}{'released':>12}"
    )
    return "\n".join(
        [
            head,
            *(
                f"{one.arm:<22}{one.step_seconds:>9.3f}{1e3 * one.exposed:>12.1f}"
                f"{1e3 * one.hidden:>12.1f}"
                f"{_size(one.training):>12}{_size(one.generating):>12}{_size(one.released):>12}"
                for one in arms
            ),
        ]
    )


def _size(nbytes: int) -> str:
    return format_size(nbytes) if nbytes else "-"


async def compare(model: str, steps: int, launcher: str, changes: Changes) -> list[Arm]:
    return [await measure(arm, recipe_of(arm, model, steps, launcher, changes)) for arm in ARMS]


def main(argv: Sequence[str] | None = None) -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--dp", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--reward-seconds", type=float, default=0.3)
    parser.add_argument(
        "--smoke", action="store_true", help="a few steps in one process: does it run"
    )
    args = parser.parse_args(argv)
    configure(terminal=False)
    os.environ[SECONDS] = "0.05" if args.smoke else str(args.reward_seconds)
    steps, launcher = (3, "inline") if args.smoke else (args.steps, "process")
    changes: Changes = {"train": {"dp": args.dp, "tp": args.tp}}
    if args.smoke:
        changes = {
            "train": {"groups_per_step": 2, "threads": 1},
            "rollout": {"max_tokens": 4, "threads": 1},
        }
    arms = asyncio.run(compare(args.model, steps, launcher, changes))
    print(table(arms))
    if args.json:
        args.json.write([asdict(arm) for arm in arms])
    return 0


if __name__ == "__main__":
    from benchmarks.runs import colocated  # by the name that the workers import it by

    sys.exit(colocated.main())
