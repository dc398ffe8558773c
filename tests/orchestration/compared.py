"""Runs that tests compare."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from orchestration.history.events_file import MetricsFile
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from tests.orchestration.runs import MOCK, complete, recipe

STEPS = 12
RUNS: dict[str, dict[str, Any]] = {
    "a": {"seed": 0},
    "b": {"seed": 1},
    "c": {"seed": 0, "train__learning_rate": 1e-4},
}


def compared_runs(root: Path) -> list[Path]:
    """Execute the runs in folders of ``root``: two settings, the first with two seeds."""
    for name, changes in RUNS.items():
        settings = {"evaluate__every": 4, "train__steps": STEPS, **changes}
        data = {**MOCK, "seed": settings.pop("seed")}
        folder = RunFolder.create(recipe(data, **settings), root / name)
        watched, _ = asyncio.run(complete(Execution(folder)))
        with MetricsFile(root / name / "metrics.jsonl") as file:
            for event in watched.events:
                file.event(event)
    return [root / name for name in RUNS]
