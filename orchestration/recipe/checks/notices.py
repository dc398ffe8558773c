"""Notices: what a recipe may ask for, and is better otherwise. ``asyncdock check`` prints them, and a run logs them."""

from __future__ import annotations

from collections.abc import Iterator

from orchestration.recipe.problems import Problem
from orchestration.recipe.schema import Recipe


def notices(recipe: Recipe) -> Iterator[Problem]:
    """Return the notices of a sound ``recipe``."""
    if recipe.train.precision == "model" and recipe.model.dtype != "float32" and recipe.runs_stage("update"):
        wrong = f"rounds updates to {recipe.model.dtype}: at usual learning rates most weights do not change"
        yield Problem("train.precision", "model", wrong, "leave it out, for float32 master weights")
