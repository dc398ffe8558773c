"""Changes of a run's recipe on the way, as a resume makes them: what was trained with what.

resume with other keys ─▶ note_change ─▶ changes.json: the step, and the sections as they were before
changes.json ─▶ recipe_until(step) ─▶ the recipe that made that step, and the keys that differed before
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestration.private_files import write_private
from orchestration.recipe.schema import Recipe
from orchestration.state.paths import RECIPE

CHANGES = "changes.json"  # in the run's folder


@dataclass(frozen=True)
class Change:
    """After ``step`` the dotted ``key`` was ``after``, where it had been ``before``."""

    step: int
    key: str
    before: Any
    after: Any


def note_change(folder: Path, recipe: Recipe, step: int) -> None:
    """Note that the run in ``folder`` goes on behind ``step`` with ``recipe``. Later changes, which a
    return to an earlier step takes back, are forgotten."""
    changes = [change for change in _noted(folder) if change["step"] <= step]
    recorded = Recipe.recorded(json.loads((folder / RECIPE).read_bytes()))
    before = json.loads(recorded.to_json())
    after = json.loads(recipe.to_json())
    sections = {name: tables for name, tables in before.items() if after.get(name) != tables}
    if sections:
        changes.append({"step": step, "before": sections})
    if changes or (folder / CHANGES).exists():
        write_private(folder / CHANGES, json.dumps(changes))


def recipe_until(folder: Path, step: int) -> tuple[Recipe, list[Change]]:
    """Return the recipe with which the run in ``folder`` made ``step``, and by which changes it had
    become so."""
    tables = json.loads((folder / RECIPE).read_bytes())
    for change in reversed(_noted(folder)):
        if change["step"] >= step:
            tables |= change["before"]
    recipe = Recipe.recorded(tables)
    return recipe, list(reversed([*_changes(folder, tables, step)]))


def _changes(folder: Path, tables: dict[str, Any], step: int) -> Iterator[Change]:
    """Yield the changes before ``step``, the last one first. ``tables``: the recipe at ``step``."""
    from orchestration.comparison.keys import leaves

    for change in reversed(_noted(folder)):
        if change["step"] >= step:
            continue
        before = tables | change["before"]
        olds, news = (dict(leaves(each, "")) for each in (before, tables))
        for key in sorted(olds.keys() | news.keys(), reverse=True):
            if olds.get(key) != news.get(key):
                yield Change(change["step"], key, olds.get(key), news.get(key))
        tables = before


def _noted(folder: Path) -> list[dict[str, Any]]:
    path = folder / CHANGES
    noted: list[dict[str, Any]] = json.loads(path.read_bytes()) if path.exists() else []
    return noted
