"""The graded tasks are learned: real runs of their recipes, from far below the optimum to near it."""

from __future__ import annotations

import asyncio
import statistics
from pathlib import Path

import pytest

from benchmarks.runs.executed import executed
from orchestration.recipe.loading.load import load_recipe

RECIPES = Path(__file__).resolve().parents[3] / "recipes"
# The synchronous run, which is the same one each time.
SETS = ["launch.launcher=inline", "pipeline.staleness=0"]


@pytest.mark.parametrize("name", ["bandit", "maze"])
def test_a_task_is_learned(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(RECIPES / f"{name}.toml", SETS)
    events = asyncio.run(executed(recipe, tmp_path / "run"))
    rewards = [event.data["reward_mean"] for event in events if event.kind == "step"]
    assert statistics.fmean(rewards[:3]) < 0.2
    assert statistics.fmean(rewards[-10:]) > 0.7, "the bandit pays 0.9 at best, the maze 1"
