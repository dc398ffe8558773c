"""JSON Schema of keys with values that another model checks: options of an engine, an algorithm, a
task.

A recipe keeps such a table as it was given, since what it may hold depends on another key
(``rollout.mock`` on ``rollout.engine``, ``algorithm.options`` on ``algorithm.name``). Its schema is
that of the model that it is checked against.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, get_type_hints

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
