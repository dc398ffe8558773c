"""Problems of single keys: pydantic's errors in the recipe's words, and a recipe of the keys that are right."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from orchestration.recipe.problems import Problem, suggest, wrong_and_fix
from orchestration.recipe.schema import Recipe
from stages.device_names import PATTERN, device_fix

MOST_PROBLEMS = 100  # keys of a recipe that are wrong by themselves; more are counted
NAMES_ITS_KEY = re.compile(r"(?P<key>\w+\.\w+)(?: = .*?)? (?P<wrong>(?:is|means|must|needs) .*)", re.DOTALL)

TYPE_NAMES = {
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


# Keys that [train] will have: what is not there yet, and with which layout a plan shows where its weights would lie.
LATER = {
    "train.pp": ("pipeline", "dp=2,pp=2"),
    "train.cp": ("context", "dp=4"),  # dp=2 times cp=2
    "train.ep": ("expert", "dp=2,ep=2"),
    "train.etp": ("expert tensor", "dp=2,tp=2,etp=2"),
}


def lacking(key: str) -> str:
    """What the train engine does not have, of the keys in :data:`LATER`."""
    return f"the train engine has no {LATER[key][0]} parallelism, only dp and tp"


def field_problem(error: dict[str, Any], allowed: Sequence[str]) -> Problem:
    """``error`` is one of pydantic's; ``allowed`` are the keys that the table it stands in may have."""
    loc, kind, context = error["loc"], error["type"], error.get("ctx", {})
    key, value = ".".join(map(str, loc)), error["input"]
    if kind == "missing" and isinstance(loc[-1], int):
        return Problem(key, None, "is missing", f"give more values in {'.'.join(map(str, loc[:-1]))}")
    if kind == "missing":
        wanted = _annotation(loc)
        table = isinstance(wanted, type) and issubclass(wanted, BaseModel)
        return Problem(key, None, "is missing", f"add a [{key}] section" if table else f"add {loc[-1]} = ...")
    if kind == "extra_forbidden" and key in LATER:
        layout, wrong = LATER[key][1], f"is not there yet: {lacking(key)}"
        shares = ", in which ranks of cp count as dp," if key == "train.cp" else ""
        plan = f"`asyncdock plan reshard RECIPE --train {layout}`{shares} plans such a layout"
        return Problem(key, value, wrong, f"take it out and set train.dp and train.tp; {plan}")
    if kind == "extra_forbidden":
        return Problem(key, value, "is not a known key", suggest(str(loc[-1]), allowed))
    if kind == "literal_error":
        return Problem(key, value, "is not allowed", suggest(str(value), re.findall(r"'([^']*)'", context["expected"])))
    if kind in TYPE_NAMES:
        return Problem(key, value, f"is a {_toml_type(value)}", f"write {TYPE_NAMES[kind]}")
    if kind == "value_error":
        message = str(context["error"])
        if (named := NAMES_ITS_KEY.fullmatch(message)) and isinstance(value, Mapping):  # about a section as a whole
            return Problem(named["key"], value.get(named["key"].split(".")[1]), *wrong_and_fix(named["wrong"]))
        return Problem(key, value, *wrong_and_fix(f"is {message}"))
    if kind in ("greater_than_equal", "greater_than", "less_than_equal", "less_than"):
        sign = {"greater_than_equal": ">=", "greater_than": ">", "less_than_equal": "<=", "less_than": "<"}[kind]
        limit = next(iter(context.values()))
        return Problem(key, value, "is out of range", f"use a value {sign} {limit}")
    if kind == "string_pattern_mismatch" and context["pattern"] == PATTERN:
        return Problem(key, value, "is not the name of a device", device_fix(str(value)))
    if kind == "string_pattern_mismatch":
        return Problem(key, value, "is not a name", "use letters, digits, '.', '_' and '-', a letter or digit first")
    if kind in ("too_short", "too_long", "string_too_short"):
        return Problem(key, value, "has the wrong length", error["msg"])
    return Problem(key, value, error["msg"])


def _key_of(error: Mapping[str, Any]) -> str:
    """The key that one of pydantic's errors of a whole section names; "" where it names none."""
    if error["type"] != "value_error" or not isinstance(error["input"], Mapping):
        return ""
    named = NAMES_ITS_KEY.fullmatch(str(error["ctx"]["error"]))
    return named["key"] if named else ""


def _annotation(loc: Sequence[int | str]) -> Any:
    """The declared type at ``loc``, without its ``Annotated`` wrapping."""
    at: Any = Recipe
    for part in loc:
        if isinstance(part, int):
            at = get_args(at)[0]
        elif isinstance(at, type) and issubclass(at, BaseModel) and part in at.model_fields:
            at = at.model_fields[part].annotation
        if get_origin(at) is Annotated:
            at = get_args(at)[0]
    return at


def fields_of(loc: Sequence[int | str]) -> Mapping[str, Any]:
    at = _annotation(loc)
    return at.model_fields if isinstance(at, type) and issubclass(at, BaseModel) else {}


def _toml_type(value: object) -> str:
    names: dict[type, str] = {bool: "boolean", int: "whole number", float: "number", str: "text", list: "list"}
    return names.get(type(value), "table" if isinstance(value, Mapping) else type(value).__name__)


# Stands in for what is missing or wrong, so that the relations of the rest can be checked all the same.
_STAND_IN: dict[str, Any] = {
    "model": {"source": "tiny"},
    "prompts": {"source": "jsonl", "path": "?"},
    "reward": {"functions": [{"name": "?"}]},
    "train": {"steps": 1},
}


def sound_part(data: Mapping[str, Any], error: ValidationError) -> tuple[Recipe, set[str], list[dict[str, Any]]]:
    """A recipe of the sound fields, stand-ins and defaults for the others; the dotted keys of those others; and all of
    pydantic's errors, with those that show only when the first ones are out of the way."""
    sound, unsound, stood_in = copy.deepcopy(dict(data)), set[str](), set[str]()
    errors: list[dict[str, Any]] = [dict(item) for item in error.errors()]
    new = errors
    while new:
        for item in new:
            # An entry of a list makes the list as a whole unsound; what a section says of one of its keys, that key.
            loc = list(itertools.takewhile(lambda part: isinstance(part, str), item["loc"]))
            named = _key_of(item)
            if named and named not in unsound:
                loc = named.split(".")
            unsound.add(".".join(loc))
            at: Any = sound
            for part in loc[:-1]:
                at = at.get(part) if isinstance(at, dict) else None
            if isinstance(at, dict):
                at.pop(loc[-1], None)
        sound.setdefault("name", "recipe")
        for section, fields in _STAND_IN.items():
            given = sound.get(section, {})
            if next(iter(fields)) not in given:
                sound[section] = fields | given
                stood_in.add(section)
        try:
            return Recipe.model_validate(sound, strict=True), unsound, errors
        except ValidationError as again:
            new = [dict(item) for item in again.errors() if ".".join(map(str, item["loc"])) not in unsound]
            known = [(item["loc"], item["msg"]) for item in errors]
            shown = [item for item in new if item["loc"][0] not in stood_in]
            errors = errors + [item for item in shown if (item["loc"], item["msg"]) not in known]
    raise error
