"""What a recipe that comes in a request may say. It is checked before anything acts on it: no module that it names is
imported, and no path that it names looked at, unless the operator has allowed it.

    recipe, or a stored one ──▶ overrides ──▶ code? paths? addresses? ──▶ the recipe's own checks ──▶ limits ──▶ Recipe
                                               └ what is refused is taken out ┘└─ all problems at once ─┘

Names without a colon are of what is installed here (built in, or an entry point of a package); ``module:name`` could be any
code on the machine, and must be one that the operator has listed.
"""

from __future__ import annotations

import copy
import os
import string
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from api.server import problems as answers
from api.server.service import Settings
from orchestration.recipe.bounds import out_of_bounds, read_toml
from orchestration.recipe.load import override, parse_recipe
from orchestration.recipe.model_files import KNOWN_MODELS
from orchestration.recipe.problems import Problem, RecipeError, suggest
from orchestration.recipe.schema import Recipe
from orchestration.recipe.sections import TLS_FILES, SyncSection
from orchestration.recipe.values import format_size
from stages.prompts.files import Reading

LONGEST_NAME = 64
LISTEN_BY_DEFAULT = SyncSection().serve
SHIPPED = Path(__file__).resolve().parents[3] / "recipes"
Found = tuple[Problem, Any]  # what is wrong, and what is checked in its place


def stored_recipes(settings: Settings) -> dict[str, Path]:
    """Stored recipes by their names: the operator's, then those of the package."""
    found: dict[str, Path] = {}
    for folder in (*settings.recipes, SHIPPED):
        for path in sorted(folder.glob("*.toml")):
            found.setdefault(path.stem, path)
    return found


def stored_recipe(settings: Settings, name: str) -> dict[str, Any]:
    """The stored recipe called ``name`` as it is written. Raises LookupError, and RecipeError when it cannot be read."""
    path = stored_recipes(settings)[name]  # looked up among what is there, never joined to a path
    try:
        data = read_toml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecipeError(name, [Problem("recipe_name", name, f"cannot be read ({error})")]) from error
    data.setdefault("name", name)
    return data


def unknown_recipe(settings: Settings, name: str, status: int, field: str) -> answers.HTTPProblem:
    """That no stored recipe has this name, of the request's ``field``."""
    fix, detail = suggest(name, list(stored_recipes(settings))), "No stored recipe is called that."
    return answers.HTTPProblem(status, detail, kind="unknown-recipe", field=field, value=name, fix=fix)


def accept(
    settings: Settings, data: Mapping[str, Any], overrides: Mapping[str, Any], reading: Reading | None = None
) -> Recipe:
    """The recipe that ``data`` with ``overrides`` is. Of files below the operator's roots it reads what ``reading`` allows
    (default: what a check reads). Raises RecipeError with everything that is wrong."""
    too_large = [*out_of_bounds(data, finite=True), *out_of_bounds(overrides, "overrides", finite=True)]
    if too_large:  # other checks could fail on such values, or take long
        raise RecipeError("recipe", too_large)
    changed, overrides = copy.deepcopy((dict(data), dict(overrides)))
    problems = [p for key, value in overrides.items() if (p := override(changed, key, value, "overrides"))]
    for problem, instead in _refused(settings, changed):
        problems.append(problem)
        override(changed, problem.key, instead)
    _below_roots(settings, changed, problems)
    recipe = parse_recipe(changed, problems=problems, reading=reading, folder=settings.data, devices=settings.runs > 0)
    if problems := list(_too_much(settings, recipe)):
        raise RecipeError("recipe", problems)
    return recipe


def _at(data: Any, *keys: str) -> Any:
    """The value under ``keys``; None where there is none."""
    for key in keys:
        data = data.get(key) if isinstance(data, Mapping) else None
    return data


def _refused(settings: Settings, data: Mapping[str, Any]) -> Iterator[Found]:
    """What would run code, or reach past the service. Wrong types are left to the recipe's own checks."""
    name = data.get("name")
    if isinstance(name, str) and len(name) > LONGEST_NAME:
        yield Problem("name", name, f"is longer than {LONGEST_NAME} characters", "shorten it"), "recipe"
    yield from _code(settings, data)
    value = _at(data, "pipeline", "index")
    if value not in (None, "", "embedded"):
        yield Problem("pipeline.index", value, "is the service's own affair", "leave it out"), "embedded"
    yield from _ports(settings, data)


def _ports(settings: Settings, data: Mapping[str, Any]) -> Iterator[Found]:
    """Keys that open a port, on another address than those that the operator allows."""
    wrong, ask = "opens a port, which a request may not", "ask the operator for --allow-listen"
    value = _at(data, "pipeline", "serve")
    if value not in (None, "") and not _may_listen(settings, value):
        yield Problem("pipeline.serve", value, wrong, f"leave it out, or {ask}"), ""
    serve = _at(data, "sync", "serve")
    if _at(data, "sync", "transport") == "collective" and not _may_listen(settings, serve or LISTEN_BY_DEFAULT):
        key, shown = ("sync.transport", "collective") if serve is None else ("sync.serve", serve)
        instead = "shared_memory" if serve is None else LISTEN_BY_DEFAULT
        yield Problem(key, shown, wrong, f"take sync.transport and sync.serve out, or {ask}"), instead


def _may_listen(settings: Settings, host: Any) -> bool:
    return isinstance(host, str) and host in settings.allow_listen


def _code(settings: Settings, data: Mapping[str, Any]) -> Iterator[Found]:
    functions = _at(data, "reward", "functions")
    for at, function in enumerate(functions if isinstance(functions, list) else ()):
        name = _at(function, "name")
        if _is_code(name, settings.allow_rewards):
            key = f"reward.functions.{at}.name"
            yield Problem(key, name, "is code that this server does not run", _ask("reward")), "spelling"
    name = _at(data, "algorithm", "name")
    if _is_code(name, settings.allow_algorithms):
        yield Problem("algorithm.name", name, "is code that this server does not run", _ask("algorithm")), "grpo"
    for side in ("rollout", "train"):
        name = _at(data, side, "engine")
        if _is_code(name, settings.allow_engines):
            yield Problem(f"{side}.engine", name, "is code that this server does not run", _ask("engine")), "torch"
    path = _at(data, "prompts", "path")
    if _is_code(path, settings.allow_datasets):
        yield Problem("prompts.path", path, "could name code that this server does not run", _ask("dataset")), "refused"
    template = _at(data, "prompts", "template")
    if isinstance(template, str) and not _plain(template):
        wrong = "reaches into what it is filled with"
        yield Problem("prompts.template", template, wrong, "name columns alone, as {prompt}"), "{prompt}"


def _is_code(name: Any, allowed: Collection[str]) -> bool:
    return isinstance(name, str) and ":" in name and name not in allowed


def _ask(what: str) -> str:
    return f"use an installed name, or ask the operator for --allow-{what}"


def _plain(template: str) -> bool:
    """Whether ``str.format`` would put columns in as they are: no attributes, items, conversions or widths."""
    try:
        fields = [(name, spec, conversion) for _, name, spec, conversion in string.Formatter().parse(template)]
    except ValueError:
        return False
    return all(
        name is None or (name.isidentifier() and not spec and not conversion) for name, spec, conversion in fields
    )


def _below_roots(settings: Settings, data: dict[str, Any], problems: list[Problem]) -> None:
    """Put the real path in the place of each path; one that is not below the roots becomes a problem, whether or not there
    is anything. ``problems`` grows."""
    paths = {"model.source": "model source", **{f"pipeline.{name}": "file" for name in TLS_FILES}}
    if _at(data, "prompts", "source") in ("jsonl", "parquet", "datasets"):
        paths["prompts.path"] = "prompts"
    known = {problem.key for problem in problems}
    for key in paths:
        value = _at(data, *key.split("."))
        if key in known or not isinstance(value, str) or not value or (key == "model.source" and value in KNOWN_MODELS):
            continue
        if key == "prompts.path" and value in settings.allow_datasets:
            continue
        real = _real(settings, value)
        if real is None:
            roots = ", ".join(map(str, settings.roots))
            fix = f"give a path below {roots}" if roots else "ask the operator for --root; without one no file is read"
            if key == "model.source":
                fix = f"{suggest(value, KNOWN_MODELS)}; or {fix}"
            problems.append(Problem(key, value, "lies outside of what this server reads", fix))
        override(data, key, "refused" if real is None else str(real))


def _real(settings: Settings, value: str) -> Path | None:
    """Where ``value`` leads with every link followed, if that is below a root. A relative one is looked for in each root."""
    for root in settings.roots:
        below = Path(os.path.realpath(root))
        real = Path(os.path.realpath(below / value))
        if real.is_relative_to(below) and (real.exists() or Path(value).is_absolute() or root == settings.roots[-1]):
            return real
    return None


def _too_much(settings: Settings, recipe: Recipe) -> Iterator[Problem]:
    """What is sound, and more than the operator gives to one run."""
    workers = recipe.rollout.workers + recipe.reward.workers + recipe.train.ranks
    if workers > settings.max_workers:
        wrong = f"makes {workers} workers with reward.workers, train.dp and train.tp"
        yield Problem("rollout.workers", recipe.rollout.workers, wrong, f"at most {settings.max_workers} fit here")
    if recipe.pipeline.arena > settings.max_arena:
        fix = f"use at most {format_size(settings.max_arena)}"
        yield Problem("pipeline.arena", recipe.pipeline.arena, "is more than this server gives to a run", fix)
