"""The graded tasks are learned: real runs of their recipes, from far below the optimum to it."""

from __future__ import annotations

import asyncio
import statistics
from pathlib import Path

import pytest

from benchmarks.executed import executed
from orchestration.recipe.loading.load import load_recipe

RECIPES = Path(__file__).resolve().parents[3] / "recipes"
SETS = ["launch.launcher=inline", "checkpoint.every=1000"]


@pytest.mark.parametrize(("name", "least"), [("modular-sum", 0.8), ("maze", 0.8)])
def test_a_task_is_learned(name: str, least: float, tmp_path: Path) -> None:
    recipe = load_recipe(RECIPES / f"{name}.toml", SETS)
    events = asyncio.run(executed(recipe, tmp_path / "run"))
    rewards = [event.data["reward_mean"] for event in events if event.kind == "step"]
    assert statistics.fmean(rewards[:3]) < 0.3
    assert statistics.fmean(rewards[-5:]) > least
