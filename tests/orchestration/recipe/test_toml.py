"""Recipes written as TOML are read as they were."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestration.recipe.loading.load import SHIPPED, load_recipe, parse_recipe
from orchestration.recipe.loading.toml import toml_tables

SCALARS = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text()
VALUES: Any = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(tables=st.dictionaries(st.text(), VALUES, max_size=4))
def test_any_tables(tables: dict[str, Any]) -> None:
    assert tomllib.loads(toml_tables(tables)) == tables


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.toml")), ids=lambda path: path.stem)
def test_each_recipe_of_the_package(path: Path) -> None:
    recipe = load_recipe(path, files=False)
    text = toml_tables(recipe.model_dump(mode="json", exclude_defaults=True))
    assert parse_recipe(tomllib.loads(text), files=False) == recipe
