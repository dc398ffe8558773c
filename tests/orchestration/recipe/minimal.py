"""The smallest recipe, and the problems that overrides of it cause."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestration.recipe.loading.load import load_recipe
from orchestration.recipe.problems import RecipeError
from pipeline.problems import Problem

MINIMAL = """
[model]
source = "tiny"
[prompts]
source = "builtin"
task = "repeat"
[reward]
functions = [{ name = "spelling" }]
[train]
steps = 10
"""


def problems(path: Path, *overrides: str) -> list[Problem]:
    with pytest.raises(RecipeError) as raised:
        load_recipe(path, overrides)
    return raised.value.problems
