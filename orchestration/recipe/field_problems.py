"""Pydantic's errors about single keys, as problems of a recipe; and the part of a recipe that is
valid in spite of them."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from orchestration.recipe.problems import suggest
from orchestration.recipe.schema import Recipe
from orchestration.recipe.sections.retired import GONE, RENAMED_VALUES, RETIRED
from pipeline.problems import Problem
from stages.device_names import PATTERN, device_fix

# Pydantic's error types, and what to write instead.
EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "a text in quotes",
    "bool_type": "true or false",
    "list_type": "a list",
    "tuple_type": "a list of two numbers",
    "dict_type": "a table",
    "model_type": "a table",
}
SIGNS = {"greater_than_equal": ">=", "greater_than": ">", "less_than_equal": "<=", "less_than": "<"}
TOML_TYPES = {bool: "boolean", int: "whole number", float: "number", str: "text", list: "list"}

# Keys that [train] does not have yet: the parallelism, and a layout that `asyncdock plan reshard`
# can plan instead.
FUTURE_KEYS = {
    "train.etp": ("expert tensor", "dp=2,tp=2,etp=2"),
}

# Replaces required keys that are missing or wrong, so that relations between the other keys can
# still be checked.
STAND_INS: dict[str, dict[str, Any]] = {
    "model": {"source": "tiny"},
    "prompts": {"source": "jsonl", "path": "?"},
    "train": {"steps": 1},
}


def missing_parallelism(key: str) -> str:
    """Says which parallelism the train engine lacks for ``key``, one of :data:`FUTURE_KEYS` or
    ``train.ep_order``."""
    if key == "train.ep_order":
        return "in the train engine neighbours hold different experts"
    return f"the train engine has no {FUTURE_KEYS[key][0]} parallelism, only dp, cp, tp, pp and ep"


def field_problem(
    error: ErrorDetails, prefix: str = "", allowed: Collection[str] | None = None
) -> Problem:
    """Translate one of pydantic's errors.

    ``prefix`` precedes its key; ``allowed`` are the keys of the table in which it is (default:
    looked up in the recipe's schema).
    """
    loc = error["loc"]
    kind = error["type"]
    value = error["input"]
    context = error.get("ctx", {})
    key = ".".join(map(str, (prefix, *loc) if prefix else loc))
    match kind:
        case "missing" if isinstance(loc[-1], int):
            return Problem(
                key, None, "is missing", f"give more values in {'.'.join(map(str, loc[:-1]))}"
            )
        case "missing":
            is_section = key in Recipe.model_fields and key != "name"
            return Problem(
                key,
                None,
                "is missing",
                f"add a [{key}] section" if is_section else f"add {loc[-1]} = ...",
            )
        case "extra_forbidden" if key in FUTURE_KEYS:
            layout = FUTURE_KEYS[key][1]
            reason = f"is not there yet: {missing_parallelism(key)}"
            plan = f"`asyncdock plan reshard RECIPE --train {layout}` plans such a layout"
            return Problem(key, value, reason, f"take it out and set train.dp and train.tp; {plan}")
        case "extra_forbidden" if key in RETIRED:
            return Problem(key, value, GONE, RETIRED[key].fix)
        case "extra_forbidden" if key == "extends":
            fix = "write it at the top of the recipe's own file"
            return Problem(key, value, "cannot be set where a recipe is whole already", fix)
        case "extra_forbidden":
            names = _keys_at(loc[:-1]) if allowed is None else allowed
            return Problem(key, value, "is not a known key", suggest(str(loc[-1]), names))
        case "literal_error" if (key, str(value)) in RENAMED_VALUES:
            name = RENAMED_VALUES[key, str(value)]
            return Problem(key, value, "has another name now", f"write {name!r}")
        case "literal_error":
            choices = re.findall(r"'([^']*)'", context["expected"])
            return Problem(key, value, "is not allowed", suggest(str(value), choices))
        case "fault":  # see stages.json_schema
            return Problem(key, value, context["wrong"], context["fix"])
        case "value_error":  # of a user's validator
            return Problem(key, value, f"is {context['error']}")
        case "string_pattern_mismatch" if context["pattern"] == PATTERN:
            return Problem(key, value, "is not the name of a device", device_fix(str(value)))
        case "string_pattern_mismatch":
            return Problem(
                key,
                value,
                "is not a name",
                "use letters, digits, '.', '_' and '-', a letter or digit first",
            )
        case "too_short" | "too_long" | "string_too_short":
            return Problem(key, value, "has the wrong length", error["msg"])
    if kind in EXPECTED:
        given = TOML_TYPES.get(
            type(value), "table" if isinstance(value, Mapping) else type(value).__name__
        )
        return Problem(key, value, f"is a {given}", f"write {EXPECTED[kind]}")
    if kind in SIGNS:
        return Problem(
            key,
            value,
            "is out of range",
            f"use a value {SIGNS[kind]} {next(iter(context.values()))}",
        )
    return Problem(key, value, error["msg"])


def _keys_at(loc: Sequence[int | str]) -> Collection[str]:
    """The keys of the recipe's table at ``loc``."""
    table: Any = Recipe
    for part in loc:
        table = get_args(table)[0] if isinstance(part, int) else table.model_fields[part].annotation
    return table.model_fields if isinstance(table, type) and issubclass(table, BaseModel) else ()


def valid_part(
    data: Mapping[str, Any], error: ValidationError
) -> tuple[Recipe, set[str], list[ErrorDetails]]:
    """Return a recipe of the valid keys, with defaults and :data:`STAND_INS` for the others; the
    dotted names of those others; and all errors, including those that show only when the first ones
    are gone."""
    valid = copy.deepcopy(dict(data))
    reason = set[str]()
    stood_in = set[str]()
    errors: list[ErrorDetails] = []
    while True:
        removed = set(reason)
        for item in error.errors():
            # An error inside a list makes the whole list wrong; a key that is wrong even without
            # its value, its section.
            path = list(itertools.takewhile(lambda part: isinstance(part, str), item["loc"]))
            name = ".".join(map(str, path))
            if name not in removed and item["loc"][0] not in stood_in:
                errors.append(item)
            if name in removed:
                path = path[:1]
            reason.add(".".join(map(str, path)))
            table: Any = valid
            for part in path[:-1]:
                table = table.get(part) if isinstance(table, dict) else None
            if isinstance(table, dict):
                table.pop(path[-1], None)
        valid.setdefault("name", "recipe")
        for section, keys in STAND_INS.items():
            given = valid.get(section, {})
            if next(iter(keys)) not in given:
                valid[section] = keys | given
                stood_in.add(section)
        try:
            return Recipe.model_validate(valid, strict=True), reason, errors
        except ValidationError as remaining:
            error = remaining
