"""Recipes by dotted keys, and the keys by which several differ; imports no numpy."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from orchestration.recipe.schema import Recipe

HELD_OUT = "evaluation."  # before the name of a metric of evaluations
ABSENT = "–"  # in place of the value of a key that a recipe does not have
PRESENT = "yes"  # value of a table that not every recipe has, as a stage
NAMING = ("name", "use")  # keys that name a table in a list
_ENTRY = re.compile(r"(.*?)\.(\d+)\.(.+)")  # of a list of tables: its key, the place, the key there


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


def beside(recipes: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return flattened ``recipes`` by keys that are comparable, and those by which they differ.

    A table in a list has its name in place of its place, and like an optional section a key of its
    own: what such a table holds is compared among the recipes that have it.
    """
    compared = [_by_names(recipe) for recipe in recipes]
    optional = {key for recipe in compared for key, value in recipe.items() if value is None}
    for recipe in compared:
        sections = optional & {above for key in recipe for above in _above(key)}
        recipe.update(dict.fromkeys(sections, PRESENT))
    lists = {match[1] for recipe in recipes for key in recipe if (match := _ENTRY.fullmatch(key))}
    keys = dict.fromkeys(key for recipe in compared for key in recipe)
    tables = {above for key in keys for above in _above(key)} & keys.keys() - lists

    def differs(key: str) -> bool:
        around = tables.intersection(_above(key))
        having = [each for each in compared if all(each.get(table) == PRESENT for table in around)]
        return any(each.get(key, ABSENT) != having[0].get(key, ABSENT) for each in having)

    return compared, [key for key in keys if key not in lists and differs(key)]


def _by_names(recipe: Mapping[str, Any]) -> dict[str, Any]:
    named: dict[str, Any] = {}
    places: dict[str, str] = {}  # of the tables with a name
    for key, value in recipe.items():
        if (match := _ENTRY.fullmatch(key)) is None:
            named[key] = value
            continue
        entries, place, rest = match.groups()
        names = (recipe.get(f"{entries}.{place}.{naming}") for naming in NAMING)
        table = f"{entries}.{next(filter(None, names), place)}"
        if places.setdefault(table, place) != place:  # two have this name
            table = f"{entries}.{place}"
        named[table] = PRESENT
        named[f"{table}.{rest}"] = value
    return named


def _above(key: str) -> list[str]:
    """Return the keys of the tables around ``key``.

    >>> _above("stages.filter.workers")
    ['stages', 'stages.filter']
    """
    parts = key.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


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
