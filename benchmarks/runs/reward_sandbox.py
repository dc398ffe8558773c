"""What a sandbox costs reward functions: milliseconds of a call and of the start of a process,
without one and in each kind.

    python -m benchmarks.runs.reward_sandbox [--rounds N] [--json FILE]

Each round calls the same rows once without a sandbox and once in each kind that this machine gives,
in turn. Medians, and the median of the rounds' ratios. Needs the extra `quickstart`
(reasoning_gym).
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness
from orchestration.processes.environment import of_user_code
from orchestration.rewards.pool import RewardPool
from orchestration.sandbox.sandbox import LANDLOCK, NAMESPACES, Sandbox, refusal

ROUNDS = 200
STARTS = 7
MEMORY = 4 << 30
CASES = {
    "chain_sum, 1 row": ("chain_sum", 1),
    "chain_sum, 64 rows": ("chain_sum", 64),
    "countdown, 16 rows": ("countdown", 16),
}
NONE = "none"


def rows_of(task: str, count: int) -> dict[str, list[Any]]:
    """The arguments of ``count`` right answers."""
    import reasoning_gym

    entries = [*reasoning_gym.create_dataset(task, size=count, seed=7)]
    return {
        "prompts": [entry["question"] for entry in entries],
        "completions": [str(entry["answer"]) for entry in entries],
        "completion_ids": [[1]] * count,
        **{name: [entry[name] for entry in entries] for name in ("question", "answer", "metadata")},
    }


def kinds() -> dict[str, Sandbox | None]:
    """A sandbox of each kind that this machine gives, by its name."""
    given = [mechanism for mechanism in (NAMESPACES, LANDLOCK) if not refusal(mechanism)]
    return {NONE: None} | {name: Sandbox(memory=MEMORY, mechanism=name) for name in given}


async def measure(rounds: int, folder: Path) -> dict[str, Any]:
    """Milliseconds, by case and kind."""
    # sympy's speed depends on the order of its sets: the same in all processes.
    environment = of_user_code(os.environ, None) | {"PYTHONHASHSEED": "0"}
    pools = {
        name: RewardPool(
            ["reasoning_gym"],
            processes=1,
            memory=MEMORY,
            log=folder / f"{name}.log",
            sandbox=sandbox,
            environment=environment,
        )
        for name, sandbox in kinds().items()
    }
    report: dict[str, Any] = {"calls": {}, "starts": {}}
    try:
        for pool in pools.values():
            await pool.open()
        for case, (task, count) in CASES.items():
            rows = rows_of(task, count)
            report["calls"][case] = await _calls(pools, rows, rounds)
        for name, pool in pools.items():
            report["starts"][name] = await _starts(pool)
    finally:
        for pool in pools.values():
            await pool.close()
    return report


async def _calls(
    pools: dict[str, RewardPool], rows: dict[str, list[Any]], rounds: int
) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {name: [] for name in pools}
    for number in range(-3, rounds):  # the first calls import
        order = [*pools] if number % 2 else [*reversed(pools)]
        for name in order:
            began = time.perf_counter()
            scores = await pools[name].call("reasoning_gym", rows, 60.0)
            if number >= 0:
                seconds[name].append(time.perf_counter() - began)
            assert scores == [1.0] * len(scores), scores
    found = {}
    for name, measured in seconds.items():
        ratios = [one / other for one, other in zip(measured, seconds[NONE], strict=True)]
        found[name] = {"ms": 1e3 * statistics.median(measured), "ratio": statistics.median(ratios)}
    return found


async def _starts(pool: RewardPool) -> float:
    """Milliseconds until a further process of ``pool`` is ready for calls."""
    measured = []
    for _ in range(STARTS):
        began = time.perf_counter()
        process = await pool._start()
        measured.append(time.perf_counter() - began)
        await pool._end(process)
    return 1e3 * statistics.median(measured)


def table(report: dict[str, Any]) -> str:
    lines = ["| case | sandbox | ms | of none |", "|---|---|---|---|"]
    for case, by_kind in report["calls"].items():
        lines += [
            f"| {case} | {name} | {one['ms']:.3f} | {one['ratio']:.3f} |"
            for name, one in by_kind.items()
        ]
    lines += [
        f"| start of a process | {name} | {ms:.0f} | |" for name, ms in report["starts"].items()
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        report = asyncio.run(measure(options.rounds, Path(folder)))
    print(table(report))
    if options.json:
        options.json.write(report)


if __name__ == "__main__":
    main()
