"""The recipe of a model that is served to training loops of clients: some keys of a run's.

FILE.toml, options of the command ──▶ keys that a server has, their values, the machine ──▶ Recipe ──▶ options of an engine

What clients decide with their calls (rank, learning rate, temperature, …) is no key of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from pydantic import ValidationError

from orchestration.recipe.checks.registry import Environment, problem, run_checks
from orchestration.recipe.field_problems import field_problem, valid_part
from orchestration.recipe.loading.load import read_recipe
from orchestration.recipe.model_files import KNOWN_MODELS
from orchestration.recipe.problems import RecipeError
from orchestration.recipe.schema import Recipe
from orchestration.units import Count, Section
from pipeline.problems import Problem
from stages.json_schema import key as declared
from stages.prompts.rows.files import Reading

SERVED = (
    *("name", "description"),
    *("model.source", "model.dtype"),
    *("train.engine", "train.device", "train.threads", "train.precision", "train.token_budget"),
    *("train.activation_checkpointing", "train.kernels", "train.dp", "train.tp"),
    *("rollout.engine", "rollout.device", "rollout.threads", "rollout.max_rows", "rollout.vllm"),
)
VALUES = {
    "train.engine": ("torch",),
    "train.precision": ("auto", "mixed"),  # masters are float32 in any case
    "rollout.engine": ("torch", "vllm"),
}
# keys of a recipe that an option of the command is for
OPTION_KEYS = {
    "device": ("train.device", "rollout.device"),
    "dtype": ("model.dtype",),
    "threads": ("train.threads", "rollout.threads"),
    "max_rows": ("rollout.max_rows",),
}
# Sections that a run needs, and a served model has not: checks that read them are left out.
REST: dict[str, dict[str, Any]] = {
    "prompts": {"source": "builtin", "task": "repeat"},
    "train": {"steps": 1},
}
UNREAD = ("prompts", "reward", "algorithm", "pipeline", "train.steps", "train.groups_per_step")


class AdapterRoomSection(Section):
    """Room of a vLLM engine for adapters of clients, beside the other keys of `rollout.vllm`."""

    max_loras: Count = declared(8, "Adapters that are sampled with at the same time.")
    max_lora_rank: Count = declared(32, "Largest rank of an adapter.")


def read_served(path: Path, options: Mapping[str, Any]) -> tuple[Recipe, AdapterRoomSection]:
    """Return the recipe at ``path``, checked against the machine, and vLLM's room for adapters.
    ``options``: those of the command that are given, by name. Raises :class:`RecipeError`."""
    data, _ = read_recipe(path)
    tables = {name: dict(value) if _is_table(value) else value for name, value in data.items()}
    without_meaning = [*_take_out(tables)]
    problems = [*_set_options(options, tables)]
    model = tables.get("model")
    source = model.get("source") if _is_table(model) else None
    if _is_table(model) and isinstance(source, str) and source not in KNOWN_MODELS:
        model["source"] = str(path.parent / Path(source).expanduser())
    room, room_problems = _adapter_room(tables)
    problems += room_problems
    for name, rest in REST.items():
        section = tables.setdefault(name, {})
        if _is_table(section):
            tables[name] = rest | section
    unread = {*UNREAD, *(each.key for each in problems)}
    try:
        recipe = Recipe.model_validate(tables, strict=True)
    except ValidationError as error:
        recipe, keys, errors = valid_part(tables, error)
        unread |= keys
        problems += [field_problem(each) for each in errors]
    problems += [
        problem(recipe, key, "is not what a server has", f"use one of: {', '.join(values)}")
        for key, values in VALUES.items()
        if key not in unread and _value(recipe, key) not in values
    ]
    unread |= {each.key for each in problems}
    environment = Environment(Reading(), Path.cwd(), devices=True, here=True)
    problems = [*without_meaning, *problems, *run_checks(recipe, unread, environment)]
    if problems:
        raise RecipeError(str(path), problems)
    return recipe, room


def engine_options(recipe: Recipe, room: AdapterRoomSection) -> dict[str, Any]:
    """Return the options of :func:`orchestration.calls.engines.torch_parts.open_parts`, as JSON
    has them."""
    train, rollout = recipe.train, recipe.rollout
    options: dict[str, Any] = {
        "dtype": recipe.model.dtype,
        "token_budget": train.token_budget,
        "activation_checkpointing": train.activation_checkpointing,
        "kernels": train.kernels,
        "max_rows": rollout.max_rows,
    }
    optional = {
        "device": None if train.device == "auto" else train.device,
        "threads": train.threads,
        "data_parallel": train.dp if train.dp > 1 else None,
        "tensor_parallel": train.tp if train.tp > 1 else None,
        "sampling_device": None if rollout.device == "auto" else rollout.device,
        "sampling_threads": rollout.threads,
    }
    options |= {name: value for name, value in optional.items() if value}
    if rollout.engine == "vllm":
        keys = rollout.vllm.model_dump(mode="json", include=set(type(rollout.vllm).model_fields))
        options["vllm"] = {**keys, **room.model_dump(), "arguments": rollout.vllm.model_extra or {}}
    return options


def _take_out(tables: dict[str, Any]) -> Iterator[Problem]:
    """Take keys of a run's recipe that say nothing about a served model out of ``tables``; yield a
    problem for each."""
    wrong = "has no meaning for a served model"
    served = defaultdict[str, list[str]](list)
    for key in SERVED:
        section, _, name = key.partition(".")
        served[section].append(name)
    for section, table in list(tables.items()):
        if section in Recipe.model_fields and section not in served:
            shown = None if isinstance(table, dict | list) else table
            yield Problem(section, shown, wrong, f"take it out; there are {', '.join(served)}")
            del tables[section]
        elif _is_table(table):
            fields: Any = getattr(Recipe.model_fields.get(section), "annotation", None)
            for name in [*table]:
                if name in getattr(fields, "model_fields", ()) and name not in served[section]:
                    fix = f"take it out; there are {', '.join(served[section])}"
                    yield Problem(f"{section}.{name}", table.pop(name), wrong, fix)


def _set_options(options: Mapping[str, Any], tables: dict[str, Any]) -> Iterator[Problem]:
    """Set the keys of ``options`` in ``tables``; yield a problem for each that has another value
    there."""
    for option, value in options.items():
        for key in OPTION_KEYS[option]:
            section, _, name = key.partition(".")
            table = tables.setdefault(section, {})
            if not _is_table(table):
                continue  # reported with its section
            if table.setdefault(name, value) != value:
                wrong = f"contradicts --{option.replace('_', '-')} {value}"
                yield Problem(key, table[name], wrong, "leave one of them out")


def _adapter_room(tables: Mapping[str, Any]) -> tuple[AdapterRoomSection, list[Problem]]:
    """Take the keys of vLLM's room for adapters out of ``tables``."""
    rollout = tables.get("rollout")
    if not _is_table(rollout) or not _is_table(vllm := rollout.get("vllm")):
        return AdapterRoomSection(), []
    names = AdapterRoomSection.model_fields
    rollout["vllm"] = {name: value for name, value in vllm.items() if name not in names}
    room = {name: value for name, value in vllm.items() if name in names}
    if room and rollout.get("engine") != "vllm":
        wrong = "has no effect without rollout.engine = 'vllm'"
        return AdapterRoomSection(), [
            Problem(f"rollout.vllm.{name}", value, wrong, "take it out")
            for name, value in room.items()
        ]
    try:
        return AdapterRoomSection.model_validate(room, strict=True), []
    except ValidationError as error:
        problems = [field_problem(each, "rollout.vllm", names) for each in error.errors()]
        return AdapterRoomSection(), problems


def _is_table(value: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


def _value(recipe: Recipe, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(recipe, section), name)
