"""Keys of a table: their meaning, unit and marks (fixed on resume, a path, code), declared with
them; and JSON Schema of keys with values that another model checks: options of an engine, an
algorithm, a task.

A recipe keeps such a table as it was given, since what it may hold depends on another key
(``rollout.mock`` on ``rollout.engine``, ``algorithm.options`` on ``algorithm.name``). Its schema is
that of the model that it is checked against.

    source: Annotated[str, FixedOnResume("..."), IsPath()] = key(...)
                                     └─ marked(Recipe, tables, IsPath) ──▶ ("model.source", IsPath())
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, get_args, get_type_hints

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    create_model,
)
from pydantic.fields import FieldInfo
from pydantic_core import InitErrorDetails, PydanticCustomError


def key(default: Any, meaning: str, **limits: Any) -> Any:
    """Declare a key of a table: its default (``...``: required), its meaning for JSON Schema and
    the documentation, and arguments of pydantic's ``Field``."""
    return Field(default=default, description=meaning, **limits)


def fault(wrong: str, fix: str) -> PydanticCustomError:
    """Return what a validator raises of a value: what is ``wrong`` with it and the ``fix``, in the
    error's ``ctx``."""
    return PydanticCustomError("fault", "{wrong}; {fix}", {"wrong": wrong, "fix": fix})


def faults(model: BaseModel, found: Iterable[tuple[str, str, str]]) -> None:
    """Raise one ValidationError with all that is ``found``: fields of ``model``, each with what is
    wrong and the fix."""
    errors = [
        InitErrorDetails(type=fault(problem, fix), loc=(name,), input=getattr(model, name))
        for name, problem, fix in found
    ]
    if errors:
        raise ValidationError.from_exception_data(type(model).__name__, errors)


def unit(name: str) -> FieldInfo:
    """Return the annotation of a number with its unit: ``x-unit`` in the JSON Schema, a column of
    docs/recipe.md."""
    field: FieldInfo = Field(json_schema_extra={"x-unit": name})
    return field


def schema_of(shown: Any) -> BeforeValidator:
    """Return the annotation of a dict: its JSON Schema is that of the type ``shown``; the dict
    itself is not changed."""
    return BeforeValidator(lambda value: value, json_schema_input_type=shown)


def only_where(
    conditions: Mapping[str, str], table: str, core: Any, handler: GetJsonSchemaHandler
) -> dict[str, Any]:
    """Return the JSON Schema of a section whose ``table`` is a union: where the keys are as in
    ``conditions``, it is the first of them (``if`` and ``then``)."""
    schema = handler(core)
    section = handler.resolve_ref_schema(schema)
    if handler.mode == "validation":
        section["if"] = {"properties": {key: {"const": value} for key, value in conditions.items()}}
        section["then"] = {"properties": {table: section["properties"][table]["anyOf"][0]}}
    return schema


def options_model(function: Callable[..., Any]) -> type[BaseModel]:
    """Return a model with the keyword-only parameters of ``function``; their meanings are
    ``Annotated`` to their types."""
    hints = get_type_hints(function, include_extras=True)
    parameters = inspect.signature(function).parameters.values()
    fields: dict[str, Any] = {
        p.name: (hints[p.name], p.default) for p in parameters if p.kind is p.KEYWORD_ONLY
    }
    config = ConfigDict(extra="forbid", strict=True, frozen=True)
    return create_model(
        f"{function.__name__.capitalize()}Config", __config__=config, __module__=__name__, **fields
    )


# --- marks of keys
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FixedOnResume:
    """A key, or a section with all its keys, that may not change when a run is resumed: why."""

    reason: str


@dataclass(frozen=True)
class IsPath:
    """A key that may have the path of a file or folder, or several."""


@dataclass(frozen=True)
class IsCode:
    """A key that may name code, as ``module:name``.

    ``kind``: of the code, in the option of `asyncdock serve` that allows it. ``harmless``: a value
    that takes the place of code that is refused.
    """

    kind: str
    harmless: str


CRITIC_IN_CHECKPOINT = FixedOnResume(
    "the checkpoint has the weights of the critic that the run began with"
)
Mark = TypeVar("Mark", FixedOnResume, IsPath, IsCode)


def marked(
    model: type[BaseModel], tables: object, kind: type[Mark], prefix: str = ""
) -> Iterator[tuple[str, Mark]]:
    """Yield the dotted keys of ``model`` with a mark of ``kind``, and the mark. Keys of tables in a
    list have the number of each table that ``tables`` has."""
    for name, field in model.model_fields.items():
        key = f"{prefix}{name}"
        for mark in field.metadata:
            if isinstance(mark, kind):
                yield key, mark
        value = tables.get(name) if isinstance(tables, Mapping) else None
        if isinstance(table := field.annotation, type) and issubclass(table, BaseModel):
            yield from marked(table, value, kind, f"{key}.")
        for part in get_args(field.annotation):
            if isinstance(part, type) and issubclass(part, BaseModel) and isinstance(value, list):
                for number, item in enumerate(value):
                    yield from marked(part, item, kind, f"{key}.{number}.")
