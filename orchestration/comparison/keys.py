"""Recipes by dotted keys, and the keys by which several differ; imports no numpy."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from orchestration.recipe.schema import Recipe

HELD_OUT = "evaluation."  # before the name of a metric of evaluations


def flattened(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recorded recipe by dotted keys, with the defaults that it lacks.

    >>> flattened({"unknown": {"a": 1, "b": [{"c": [2]}]}})
    {'unknown.a': 1, 'unknown.b.0.c': [2]}
    """
    with contextlib.suppress(ValueError):  # of a later version: as it was written
        tables = Recipe.recorded(tables).model_dump(mode="json")
    return dict(leaves(tables, ""))


def leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Yield the values of ``value``, at the dotted ``key`` of a recipe, by their own keys."""
    is_tables = isinstance(value, list) and bool(value) and isinstance(value[0], dict)
    if isinstance(value, dict) or is_tables:
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(item, f"{key}.{name}" if key else str(name))
    else:
        yield sys.intern(key), value


def differing(recipes: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the dotted keys by which recorded ``recipes`` differ."""
    keys = dict[str, None]()
    first: Mapping[str, Any] = {}
    for recipe in recipes:
        first = first or recipe
        for section in first.keys() | recipe.keys():
            if (one := first.get(section)) != (other := recipe.get(section)):
                before = dict(leaves(one, section))
                after = dict(leaves(other, section))
                keys |= dict.fromkeys(
                    key for key in before.keys() | after.keys() if before.get(key) != after.get(key)
                )
    return sorted(keys)
