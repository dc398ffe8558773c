"""The OpenAPI 3.1 document of operations, built from their signatures and pydantic models."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from api.server.http.bodies import JSON
from api.server.http.problems import MEDIA_TYPE, ProblemDetails
from api.server.service.operations import PARTS, REASONS, Operation, operations_of

_REFERENCE = "#/components/schemas/{model}"
_PATTERN = re.compile(r":[^{}]*(?=})")  # of {name:pattern} in a path
_PLACES = {"path": "path", "query": "query", "headers": "header"}


def openapi_document(
    modules: Iterable[types.ModuleType], *, version: str, tokens: bool = True
) -> dict[str, Any]:
    """Return the document of the operations in ``modules``.

    ``tokens``: whether the server requires tokens.
    """
    operations = [o for o in operations_of(modules) if not o.hidden]
    schemas: dict[Any, None] = dict.fromkeys(
        (o.parts["body"], "validation") for o in operations if "body" in o.parts
    )
    answers = [model for o in operations for model in (o.answer, o.error) if model]
    messages = [model for o in operations for model in o.events.values()]
    schemas |= dict.fromkeys((model, "serialization") for model in [*answers, *messages])
    references, components = models_json_schema(list(schemas), ref_template=_REFERENCE)
    paths: dict[str, dict[str, Any]] = {}
    for o in operations:
        paths.setdefault(_PATTERN.sub("", o.path), {})[o.method.lower()] = _describe(
            o, references, tokens
        )
    return {
        "openapi": "3.1.1",
        "info": {
            "title": "AsyncDock",
            "version": version,
            "summary": "Start, stop and watch runs of asynchronous RL post-training.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": _without_empty_defaults(components["$defs"]),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "tags": [{"name": tag} for tag in dict.fromkeys(o.tag for o in operations)],
    }


def _describe(o: Operation, references: Mapping[Any, Any], tokens: bool) -> dict[str, Any]:
    def content(model: type[BaseModel], mode: str, media_type: str = JSON) -> dict[str, Any]:
        return {media_type: {"schema": references[model, mode]}}

    answer: dict[str, Any] = {}
    if o.answer is not None:
        answer = content(o.answer, "serialization", o.produces or JSON)
    elif o.events:
        messages = [
            _message(name, references[model, "serialization"]) for name, model in o.events.items()
        ]
        items = {"type": "array", "items": {"oneOf": messages}}
        answer = {
            o.produces: {
                "schema": {"type": "string", "contentMediaType": o.produces, "contentSchema": items}
            }
        }
    elif o.produces:
        answer = _text_or_bytes(o.produces)
    answer |= _text_or_bytes("text/event-stream") if o.streams else {}
    success: dict[str, Any] = {"content": answer} if answer else {}
    if o.sends:
        success["headers"] = {name: _header(text, "string") for name, text in o.sends.items()}
    status = 204 if not answer and o.status == 200 else o.status
    responses = {
        str(code): {"description": text, **success}
        for code, text in {status: o.summary, **o.also}.items()
    }
    error_type = MEDIA_TYPE if o.error is ProblemDetails else JSON
    for code in o.statuses:
        problem = {
            "description": REASONS[code],
            "content": content(o.error, "serialization", error_type),
        }
        if code in (429, 503):
            problem["headers"] = {"Retry-After": _header("Seconds to wait.", "integer")}
        elif code == 401:
            problem["headers"] = {"WWW-Authenticate": _header("Bearer.", "string")}
        responses[str(code)] = problem
    described: dict[str, Any] = {
        "tags": [o.tag],
        "summary": o.summary,
        "operationId": o.handler.__name__,
        "responses": responses,
        "security": [{"token": [o.scope]}] if o.scope and tokens else [],
    }
    owned = (
        "Only for the run's owner, the name of the token that submitted it, and for scope `admin`."
        if o.owned
        else ""
    )
    if text := " ".join(filter(None, (inspect.getdoc(o.handler), owned))):
        described["description"] = text
    if parameters := [
        parameter for name in PARTS[:3] if name in o.parts for parameter in _parameters(name, o)
    ]:
        described["parameters"] = parameters
    if "body" in o.parts:
        required = not o.body_optional
        described["requestBody"] = {
            "content": content(o.parts["body"], "validation"),
            "required": required,
        }
    elif o.consumes:
        described["requestBody"] = {"content": _text_or_bytes(o.consumes), "required": True}
    return described


def _text_or_bytes(media_type: str) -> dict[str, Any]:
    """Return the content of a body of ``media_type``. Bytes have the ``format`` binary, so that
    generated clients do not decode them as text."""
    binary = (
        {}
        if media_type.startswith("text/")
        else {"format": "binary", "contentMediaType": media_type}
    )
    return {media_type: {"schema": {"type": "string", **binary}}}


def _message(name: str, payload: Any) -> dict[str, Any]:
    """Return the schema of one server-sent event called ``name``."""
    data = {"type": "string", "contentMediaType": JSON, "contentSchema": payload}
    properties = {
        "event": {"type": "string", "const": name},
        "id": {"type": "string"},
        "data": data,
    }
    return {
        "type": "object",
        "title": name,
        "properties": properties,
        "required": ["event", "data"],
    }


def _header(text: str, kind: str) -> dict[str, Any]:
    return {"description": text, "schema": {"type": kind}}


def _parameters(part: str, o: Operation) -> list[dict[str, Any]]:
    schema = _without_empty_defaults(o.parts[part].model_json_schema(ref_template=_REFERENCE))
    required = schema.get("required", ())
    parameters = []
    for name, field in schema["properties"].items():
        parameter = {"name": name, "in": _PLACES[part], "required": name in required}
        if "description" in field:
            parameter["description"] = field["description"]
        field_schema = {
            key: value for key, value in field.items() if key not in ("title", "description")
        }
        parameters.append({**parameter, "schema": field_schema})
    return parameters


def _without_empty_defaults(schema: Any) -> Any:
    """Return ``schema`` without the defaults null and {}, which generators of clients send or
    refuse."""
    if isinstance(schema, dict):
        entries = {
            key: value
            for key, value in schema.items()
            if not (key == "default" and value in (None, {}))
        }
        return {key: _without_empty_defaults(value) for key, value in entries.items()}
    return (
        [_without_empty_defaults(value) for value in schema] if isinstance(schema, list) else schema
    )
