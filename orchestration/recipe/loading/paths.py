"""Relative paths in a recipe's file, which are relative to that file.

prompts.path = "sums.jsonl" in exercises/sums.toml ─▶ /home/ann/exercises/sums.jsonl, wherever the command was called
"""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from orchestration.recipe.model_files import KNOWN_MODELS
from orchestration.recipe.schema import Recipe
from pipeline.problems import Problem
from stages.json_schema import IsPath, marked


def resolve_paths(tables: dict[str, Any], folder: Path) -> list[Problem]:
    """Make the relative paths in ``tables``, of a recipe's file in ``folder``, absolute.

    What names nothing there is left as it is: it may be a model's name, or code. Returns a problem
    of each one that names something in the working directory alone.
    """
    problems = []
    folder = folder.resolve()
    for key, table, name in _places(tables):
        values = table[name] if isinstance(table[name], list) else [table[name]]
        for at, value in enumerate(values):
            if not isinstance(value, str) or not value or value in KNOWN_MODELS:
                continue
            path = os.path.expanduser(value)
            if os.path.isabs(path):
                continue
            if os.path.exists(folder / path):
                values[at] = str((folder / path).resolve())
            elif os.path.exists(path):
                wrong = f"is in the working directory, and not beside the recipe, in {folder}"
                fix = f"write it relative to the recipe: {os.path.relpath(path, folder)}"
                problems.append(Problem(key, value, wrong, fix))
        table[name] = values if isinstance(table[name], list) else values[0]
    return problems


def name_of(text: str) -> str:
    """Return the name of a run by ``text``, the name of a file or folder.

    >>> name_of("Grün & gut")
    'Grun-gut'
    """
    letters = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    allowed = "".join(letter if letter.isalnum() or letter in "._-" else " " for letter in letters)
    return "-".join(allowed.split()).lstrip("._-") or "recipe"


def _places(tables: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield the keys of paths that ``tables`` has, each with its table and its name there."""
    for key, _ in marked(Recipe, tables, IsPath):
        *sections, name = key.split(".")
        table: Any = tables
        for section in sections:
            if isinstance(table, list):
                table = table[int(section)]
            else:
                table = table.get(section) if isinstance(table, dict) else None
        if isinstance(table, dict) and name in table:
            yield key, table, name
