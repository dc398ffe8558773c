"""Read a recipe, apply overrides, check it: one error with all problems, or a :class:`~orchestration.recipe.schema.Recipe`.

TOML + --set key=value ──▶ fields (pydantic: unknown keys, types, ranges) ──▶ relations between keys ──▶ Recipe
                                          └──────────── all problems at once ────────────┘──▶ RecipeError
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from orchestration.recipe.bounds import NotToml, out_of_bounds, read_toml
from orchestration.recipe.checks import code, machine, relations  # noqa: F401  # registers their checks
from orchestration.recipe.checks.registry import CHECKS, MACHINE_CHECKS, Surroundings, touches
from orchestration.recipe.field_problems import MOST_PROBLEMS, field_problem, fields_of, sound_part
from orchestration.recipe.problems import Problem, RecipeError
from orchestration.recipe.schema import Recipe
from stages.prompts.files import Reading


def load_recipe(
    path: str | Path, overrides: Sequence[str] = (), folder: Path | None = None, *, files: bool = True
) -> Recipe:
    """Read, override and check the recipe at ``path``: TOML, or JSON as a run's folder keeps it. ``overrides`` are
    ``section.key=value`` with a TOML value; what is no TOML value is a string. A recipe without a name is called like its
    file. ``folder``, ``files``: see :func:`parse_recipe`. Raises :class:`RecipeError`."""
    data, problems = read_recipe(path, overrides)
    _shorten(data, overrides)
    return parse_recipe(data, where=str(path), problems=problems, folder=folder, files=files)


def _shorten(data: dict[str, Any], overrides: Sequence[str]) -> None:
    """Let a warm-up end with the run, when the run was made shorter than the recipe's warm-up by an override alone."""
    keys = {text.partition("=")[0].strip() for text in overrides}
    train = data.get("train")
    if "train.steps" in keys and "train.warmup_steps" not in keys and isinstance(train, dict):
        steps, warmup = train.get("steps"), train.get("warmup_steps")
        if type(steps) is int and type(warmup) is int and 0 < steps < warmup:
            train["warmup_steps"] = steps


def read_recipe(path: str | Path, overrides: Sequence[str] = ()) -> tuple[dict[str, Any], list[Problem]]:
    """The tables at ``path`` with ``overrides``, not checked any further, and what is wrong with the overrides. Raises
    :class:`RecipeError` when there is no TOML."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        data = _json_tables(text) if path.suffix == ".json" else read_toml(text)
    except NotToml as error:
        raise RecipeError(str(path), [Problem("file", None, f"is not TOML: {error}")]) from error
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(str(path), [Problem("file", str(path), f"cannot be read ({error})")]) from error
    except (ValueError, RecursionError) as error:
        raise RecipeError(str(path), [Problem("file", None, f"is not a recipe in JSON: {error}")]) from error
    data.setdefault("name", path.stem)
    return data, [problem for text in overrides if (problem := _override(data, text))]


def _json_tables(text: str) -> dict[str, Any]:
    """A recipe as a run's folder keeps it."""
    data = json.loads(text)
    if not isinstance(data, dict):
        raise ValueError(f"it holds a {type(data).__name__}, not an object")
    return data


def parse_recipe(
    data: Mapping[str, Any],
    where: str = "recipe",
    problems: Sequence[Problem] = (),
    *,
    reading: Reading | None = None,
    folder: Path | None = None,
    devices: bool = True,
    files: bool = True,
) -> Recipe:
    """Check ``data`` (nested tables) and return the recipe, or raise :class:`RecipeError` with all that is wrong, added
    to ``problems`` found before. Relations between keys are checked as far as the keys themselves are sound: no check looks
    at one of which there is a problem. The files that the recipe names are read as far as ``reading`` allows; the run's own
    will lie below ``folder`` (default: the present directory), on whose disk there must be room. ``devices``: whether the
    run will be executed on this machine, so that its devices must be here. ``files``: whether the recipe is compared with
    files and machine at all."""
    found = list(problems)
    if beyond := [Problem(key, None, *said) for key, *said in out_of_bounds(data)]:
        raise RecipeError(where, [*found, *beyond])  # nothing else is asked of such a thing
    try:
        recipe = Recipe.model_validate(data, strict=True)
        unsound: set[str] = set()
    except ValidationError as error:
        recipe, unsound, errors = sound_part(data, error)
        found += [field_problem(item, list(fields_of(item["loc"][:-1]))) for item in errors[:MOST_PROBLEMS]]
        if len(errors) > MOST_PROBLEMS:
            found.append(Problem("recipe", None, f"has {len(errors) - MOST_PROBLEMS} more keys that are wrong"))
    unsound |= {problem.key for problem in problems}
    sound = (check for check, keys in CHECKS.items() if not touches(keys, unsound))
    found += [problem for check in sound for problem in check(recipe)]
    place = Surroundings(reading or Reading(), folder or Path.cwd(), devices)
    reads = (check for check, keys in MACHINE_CHECKS.items() if not touches(keys, unsound))
    found += [problem for check in reads if files for problem in check(recipe, place)]
    if found:
        raise RecipeError(where, found)
    return recipe


# What a run may have otherwise when it is resumed: where and how it is computed, not what; and what becomes of prompts that
# it cannot ask.
HOW = (
    "train.dp",
    "train.tp",
    "train.device",
    "train.threads",
    "train.token_budget",
    "train.activation_checkpointing",
    "rollout.device",
    "rollout.threads",
    "rollout.workers",
    "pipeline.keep_samples",
    "prompts.too_long",
    "sync.probe",
    "sync.probe_tolerance",
    "sync.probe_mean_tolerance",
    "launch",
)


def changed(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """``recipe`` with ``overrides`` of the keys in :data:`HOW`. Raises :class:`RecipeError`."""
    data = json.loads(recipe.to_json())
    refused = [
        Problem("--set", text, "would change what the run computes", f"only these may change: {', '.join(HOW)}")
        for text in overrides
        if not any(f"{text.partition('=')[0].strip()}.".startswith(f"{key}.") for key in HOW)
    ]
    found = refused or [problem for text in overrides if (problem := _override(data, text))]
    return parse_recipe(data, where=recipe.name, problems=found)


def _override(data: dict[str, Any], text: str) -> Problem | None:
    """Set one ``section.key=value`` in ``data``, or say why not."""
    key, equals, value = text.partition("=")
    if not equals:
        return Problem("--set", text, "is not key=value", "write for example --set train.steps=10")
    return override(data, key, toml_value(value), "--set", text)


def override(data: dict[str, Any], key: str, value: Any, where: str = "override", text: str = "") -> Problem | None:
    """Set the dotted ``key`` of ``data`` to ``value``, or say why not: of ``where``, showing ``text`` (default: the key)."""
    parts, text = [part.strip() for part in key.split(".")], text or key
    if not all(parts):
        return Problem(where, text, "is not a key", "write for example train.steps")
    at: Any = data
    for part in parts[:-1]:
        at = at[int(part)] if _in_list(at, part) else _table(at, part)
        if not isinstance(at, dict | list):
            return Problem(where, text, f"{part} is a value, not a section", "name an existing section")
    last = parts[-1]
    if isinstance(at, list):
        if not _in_list(at, last):
            return Problem(where, text, f"{parts[-2]} is a list of {len(at)}", f"use an index below {len(at)}")
        at[int(last)] = value
    else:
        at[last] = value
    return None


def _in_list(at: Any, part: str) -> bool:
    """Whether ``part`` is the number of an entry of ``at``."""
    return isinstance(at, list) and re.fullmatch("[0-9]{1,9}", part) is not None and int(part) < len(at)


def _table(at: Any, part: str) -> Any:
    return at.setdefault(part, {}) if isinstance(at, dict) else None


def toml_value(text: str) -> Any:
    """The value of ``key=text`` as TOML reads it; what is no TOML value is a string."""
    try:
        parsed = read_toml(f"value = {text.strip()}")
    except NotToml:
        return text.strip()
    return parsed["value"] if set(parsed) == {"value"} else text.strip()
