"""Reads a recipe, applies overrides and checks it: the result is a Recipe, or one error with all
problems.

TOML ──▶ extends ──▶ --set key=value ──▶ fields (unknown keys, types, ranges) ──▶ checks of keys and machine ──▶ Recipe
                                           └─────────────────── all problems at once ──────────────────┘──▶ RecipeError
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from orchestration.bounds import NotToml, out_of_bounds, read_toml
from orchestration.recipe.checks import (  # noqa: F401  # registers their checks
    code,
    flow,
    machine,
    memory,
    relations,
)
from orchestration.recipe.checks.registry import Environment, run_checks
from orchestration.recipe.loading.paths import name_of, resolve_paths
from orchestration.recipe.problems import RecipeError, suggest
from orchestration.recipe.schema import Recipe
from pipeline.problems import Problem
from stages.algorithms.registry import built_in
from stages.json_schema import FixedOnResume, marked
from stages.prompts.rows.files import Reading

MOST_PROBLEMS = 100  # of single keys that are reported; more are counted
SHIPPED = Path(__file__).resolve().parents[3] / "recipes"  # whose names `extends` may give
MOST_EXTENDED = 8  # recipes that extend one another
OWN_KEYS = ("name", "description")  # are not taken over from an extended recipe


def load_recipe(
    path: str | Path,
    overrides: Sequence[str] = (),
    folder: Path | None = None,
    *,
    files: bool = True,
) -> Recipe:
    """Read, override and check the recipe at ``path``: TOML, or JSON as a run's folder keeps it.
    ``overrides`` are ``section.key=value`` with a TOML value; what is no TOML value is a string. A
    recipe without a name gets its file's.
    ``folder``, ``files``: see :func:`parse_recipe`. Raises :class:`RecipeError`."""
    data, problems = read_recipe(path, overrides)
    shorten_warmup(data, {text.partition("=")[0].strip() for text in overrides})
    return parse_recipe(data, where=str(path), problems=problems, folder=folder, files=files)


def read_recipe(
    path: str | Path, overrides: Sequence[str] = ()
) -> tuple[dict[str, Any], list[Problem]]:
    """Return the tables at ``path``, over those that it extends, with ``overrides``, not checked
    any further, and the problems of the overrides. Raises :class:`RecipeError` when there is no
    TOML."""
    path = Path(path)
    data = extended(read_tables(path), path)
    data.setdefault("name", name_of(path.stem))
    return data, _override_all(data, overrides)


def read_tables(path: Path) -> dict[str, Any]:
    """Return the tables that the file at ``path`` itself has, with absolute paths. Raises
    :class:`RecipeError`."""
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text) if path.suffix == ".json" else read_toml(text)
        if not isinstance(data, dict):
            raise ValueError(f"it holds a {type(data).__name__}, not an object")
    except NotToml as error:
        raise RecipeError(str(path), [Problem("file", None, f"is not TOML: {error}")]) from error
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(
            str(path), [Problem("file", str(path), f"cannot be read ({error})")]
        ) from error
    except (ValueError, RecursionError) as error:
        raise RecipeError(
            str(path), [Problem("file", None, f"is not a recipe in JSON: {error}")]
        ) from error
    if problems := resolve_paths(data, path.parent):
        raise RecipeError(str(path), problems)
    return data


def recorded_recipe(path: Path) -> Recipe:
    """Return the recipe that a run has recorded at ``path``. Raises OSError, and
    :class:`RecipeError` for keys that are not, or no longer, those of a recipe."""
    try:
        return Recipe.from_json(path.read_bytes())
    except ValidationError as error:
        from orchestration.recipe.field_problems import field_problem

        problems = [field_problem(item) for item in error.errors()[:MOST_PROBLEMS]]
        raise RecipeError(str(path), problems) from error


def extended(data: Mapping[str, Any], file: Path | None = None) -> dict[str, Any]:
    """Return the tables of ``data``, key by key over those of the recipe that its key ``extends``
    names, and so on.

    ``file``: that of ``data``, to which paths are relative; None for a request, which may name
    recipes of the package alone. Raises :class:`RecipeError`.
    """
    tables = dict(data)
    if "extends" not in tables:
        return tables
    files = [] if file is None else [file.resolve()]
    layers = [tables]
    while "extends" in layers[-1]:
        where = str(files[-1]) if files else "recipe"
        name = layers[-1].pop("extends")
        problems = [*out_of_bounds(layers[-1])]  # merging could fail on such values
        base = _extended_file(name, files[-1].parent if files else None)
        if isinstance(base, Problem):
            problems.append(base)
        elif base in files:
            circle = " → ".join(f"{path.name}" for path in [*files, base])
            problems.append(
                Problem("extends", name, f"leads back to itself: {circle}", "take one of them out")
            )
        elif len(files) >= MOST_EXTENDED:
            reason = f"is the {len(files)}th recipe in a row that is extended"
            fix = f"extend at most {MOST_EXTENDED - 1} in a row"
            problems.append(Problem("extends", name, reason, fix))
        if problems or isinstance(base, Problem):
            raise RecipeError(where, problems)
        files.append(base)
        layers.append(
            {key: value for key, value in read_tables(base).items() if key not in OWN_KEYS}
        )
    merged: dict[str, Any] = {}
    for layer in reversed(layers):
        merged = layered(merged, layer)
    return merged


def _extended_file(name: object, folder: Path | None) -> Path | Problem:
    """The file of the recipe ``name``, given in a recipe in ``folder``; or why there is none."""
    names = {path.stem: path for path in SHIPPED.glob("*.toml")}
    if not isinstance(name, str):
        fix = 'write the name of a recipe, as extends = "tiny"'
        return Problem("extends", name, "is no text", fix)
    if name in names:
        return names[name].resolve()
    fix = f"name a recipe of the package: {suggest(name, names)}"
    if folder is None:
        return Problem("extends", name, "is no recipe of the package", fix)
    try:
        path = (folder / Path(name).expanduser()).resolve()
        exists = path.is_file()
    except (OSError, RuntimeError, ValueError):  # too long, no such home, a zero character
        exists = False
    if not exists:
        fix = f"{fix}; or a file, by its path relative to {folder}"
        return Problem("extends", name, "is neither a recipe of the package nor a file", fix)
    return path


def layered(base: Mapping[str, Any], tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``tables`` over ``base``: what both have as tables key by key."""
    merged = dict(base)
    for key, value in tables.items():
        below = base.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            value = layered(below, value)
        merged[key] = value
    return merged


def parse_recipe(
    data: Mapping[str, Any],
    where: str = "recipe",
    problems: Sequence[Problem] = (),
    *,
    reading: Reading | None = None,
    folder: Path | None = None,
    devices: bool = True,
    files: bool = True,
    runs: bool = False,
) -> Recipe:
    """Check ``data`` (nested tables) and return the recipe, or raise :class:`RecipeError` with all
    that is wrong, added to ``problems`` found before. A check that reads a wrong key is left out.

    ``files``: whether the recipe is compared with files and machine at all. Files are read as far
    as ``reading`` allows; there must be room on the disk of ``folder``, the run's (default: the
    working directory); ``devices``: whether the run will be executed on this machine, which must
    then have its devices, and its addresses unless it ``runs`` already."""
    found = list(problems)
    if too_large := list(out_of_bounds(data)):
        # other checks could fail on such values, or take long
        raise RecipeError(where, [*found, *too_large])
    reason = {problem.key for problem in problems}
    try:
        recipe = Recipe.model_validate(data, strict=True)
    except ValidationError as error:
        from orchestration.recipe.field_problems import field_problem, valid_part

        recipe, keys, errors = valid_part(data, error)
        reason |= keys
        found += [field_problem(item) for item in errors[:MOST_PROBLEMS]]
        if len(errors) > MOST_PROBLEMS:
            found.append(
                Problem(
                    "recipe", None, f"has {len(errors) - MOST_PROBLEMS} more keys that are wrong"
                )
            )
    environment = None
    if files:
        environment = Environment(
            reading or Reading(), folder or Path.cwd(), devices, here=devices and not runs
        )
    found += run_checks(recipe, reason, environment)
    if found:
        raise RecipeError(where, found)
    return recipe


def change_recipe(
    recipe: Recipe, overrides: Sequence[str], *, runs: bool = False, free: Collection[str] = ()
) -> Recipe:
    """Return ``recipe`` with ``overrides``, for a run that goes on.

    ``runs``: it listens on its addresses already. Raises :class:`RecipeError`, also for keys in
    :func:`fixed_keys` that are not in ``free``.
    """
    before = json.loads(recipe.to_json())
    data = copy.deepcopy(before)
    problems = _override_all(data, overrides)
    problems += [problem for problem in fixed_problems(before, data) if problem.key not in free]
    return parse_recipe(data, where=recipe.name, problems=problems, runs=runs)


def overridden(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the values of ``overrides``, ``section.key=value`` each, by key."""
    parts = [text.partition("=") for text in overrides]
    return {key.strip(): toml_value(value) for key, equals, value in parts if equals}


def compare_recipe(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """Return ``recipe`` with ``overrides``, of which nothing is executed here: files and machine
    are not looked at. Raises :class:`RecipeError`."""
    data = json.loads(recipe.to_json())
    problems = _override_all(data, overrides)
    return parse_recipe(data, where=recipe.name, problems=problems, files=False)


def fixed_keys() -> dict[str, str]:
    """Return the keys, and sections, that may not change when a run is resumed, and why. Whatever
    was in flight is made again, so every other key takes effect from the checkpoint's step on."""
    found = {key: mark.reason for key, mark in marked(Recipe, {}, FixedOnResume)}
    for algorithm in built_in().values():
        of_options = marked(algorithm, {}, FixedOnResume, "algorithm.options.")
        found |= {key: mark.reason for key, mark in of_options}
    return found


def fixed_problems(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Problem]:
    """Return a problem for each of :func:`fixed_keys` that differs between two recipes, as nested
    tables."""
    old = dict(_values(before))
    new = dict(_values(after))
    reasons = fixed_keys()
    return [
        Problem(
            key,
            new.get(key),
            f"cannot change in a resumed run: {reason}",
            "begin a new run with it",
        )
        for key in sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
        for fixed, reason in reasons.items()
        if f"{key}.".startswith(f"{fixed}.")
    ]


def _values(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys below ``table`` with values that are no tables."""
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _values(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _override_all(data: dict[str, Any], overrides: Sequence[str]) -> list[Problem]:
    """Apply overrides ``section.key=value`` to ``data``; return the problems of those that cannot
    be applied."""
    problems: list[Problem | None] = []
    for text in overrides:
        key, equals, value = text.partition("=")
        if equals:
            problems.append(override(data, key, toml_value(value), "--set", text))
        else:
            problems.append(
                Problem("--set", text, "is not key=value", "write for example --set train.steps=10")
            )
    return [problem for problem in problems if problem]


def shorten_warmup(data: Mapping[str, Any], overridden_keys: Collection[str]) -> None:
    """End the warm-up with the run where an override makes that shorter than the recipe's."""
    train = data.get("train")
    if not isinstance(train, dict) or "train.steps" not in overridden_keys:
        return
    steps = train.get("steps")
    warmup = train.get("warmup_steps")
    is_longer = type(steps) is int and type(warmup) is int and 0 < steps < warmup
    if is_longer and "train.warmup_steps" not in overridden_keys:
        train["warmup_steps"] = steps


def override(
    data: dict[str, Any], key: str, value: Any, where: str = "override", text: str = ""
) -> Problem | None:
    """Set the dotted ``key`` of ``data`` to ``value``.

    Where that cannot be done, return a problem of the key ``where`` that shows ``text`` (default:
    ``key``).
    """
    parts = [part.strip() for part in key.split(".")]
    text = text or key
    if not all(parts):
        return Problem(where, text, "is not a key", "write for example train.steps")
    table: Any = data
    for part in parts[:-1]:
        if isinstance(table, list):
            table = table[int(part)] if _is_index(table, part) else None
        else:
            table = table.setdefault(part, {})
        if not isinstance(table, dict | list):
            return Problem(
                where, text, f"{part} is a value, not a section", "name an existing section"
            )
    if isinstance(table, dict):
        table[parts[-1]] = value
    elif _is_index(table, parts[-1]):
        table[int(parts[-1])] = value
    else:
        return Problem(
            where,
            text,
            f"{parts[-2]} is a list of {len(table)}",
            f"use an index below {len(table)}",
        )
    return None


def _is_index(items: list[Any], part: str) -> bool:
    return re.fullmatch("[0-9]{1,9}", part) is not None and int(part) < len(items)


def toml_value(text: str) -> Any:
    """Return ``text`` as TOML reads it after ``key =``; what is no TOML value is a string."""
    try:
        parsed = read_toml(f"value = {text.strip()}")
    except NotToml:
        return text.strip()
    return parsed["value"] if set(parsed) == {"value"} else text.strip()
