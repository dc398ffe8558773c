"""The OpenAPI document of operations. It is made when somebody asks for it: a server starts without the library it takes."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Iterable, Mapping
from typing import Any

import openapi_pydantic as openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from api.server.operations import JSON, PARTS, REASONS, Operation, operations_of
from api.server.problems import MEDIA_TYPE, ProblemDetails

_REFERENCE = "#/components/schemas/{model}"
_PATTERN = re.compile(r":[^{}]*(?=})")  # of {name:pattern} in a path


def openapi_document(modules: Iterable[types.ModuleType], *, version: str, tokens: bool = True) -> dict[str, Any]:
    """OpenAPI 3.1 of the operations in ``modules``, from their signatures and types. ``tokens``: whether the server asks for
    them."""
    operations = [o for o in operations_of(modules) if not o.hidden]
    taken = {model: "validation" for o in operations for name, model in o.parts.items() if name == "body"}
    given = {o.answer: "serialization" for o in operations if o.answer} | {ProblemDetails: "serialization"}
    given |= {model: "serialization" for o in operations for model in o.events.values()}
    wanted: list[Any] = [*taken.items(), *given.items()]
    references, components = models_json_schema(wanted, ref_template=_REFERENCE)
    paths: dict[str, openapi.PathItem] = {}
    for o in operations:
        item = paths.setdefault(_PATTERN.sub("", o.path), openapi.PathItem())
        setattr(item, o.method.lower(), _described(o, references, tokens))
    document = openapi.OpenAPI(
        openapi="3.1.1",
        info=openapi.Info(
            title="AsyncDock",
            version=version,
            summary="Start, stop and watch runs of asynchronous RL post-training.",
            license=openapi.License(name="Apache-2.0", identifier="Apache-2.0"),
        ),
        paths=paths,
        components=openapi.Components(
            schemas={name: openapi.Schema.model_validate(schema) for name, schema in components["$defs"].items()},
            securitySchemes={"token": openapi.SecurityScheme(type="http", scheme="bearer")},
        ),
        tags=[openapi.Tag(name=tag) for tag in dict.fromkeys(o.tag for o in operations)],
    )
    # The library's defaults are left out: some are not allowed where they would stand (allowEmptyValue of a header).
    return document.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_unset=True)


def _described(o: Operation, references: Mapping[Any, Any], tokens: bool) -> openapi.Operation:
    def content(model: type[BaseModel], mode: str, media_type: str = JSON) -> dict[str, openapi.MediaType]:
        return {media_type: openapi.MediaType(schema=openapi.Reference.model_validate(references[model, mode]))}  # type: ignore[call-arg]

    answered: dict[str, openapi.MediaType] | None = None
    if o.answer is not None:
        answered = content(o.answer, "serialization", o.produces or JSON)
    elif o.events:
        messages = [_message(name, references[model, "serialization"]) for name, model in o.events.items()]
        stream = {
            "type": "string",
            "contentMediaType": o.produces,
            "contentSchema": {"type": "array", "items": {"oneOf": messages}},
        }
        answered = {o.produces: openapi.MediaType(schema=openapi.Schema.model_validate(stream))}  # type: ignore[call-arg]
    elif o.produces:
        answered = {o.produces: _text_or_bytes(o.produces)}
    headers = {name: _header(text, "string") for name, text in o.sends.items()} or None
    status = 204 if answered is None and o.status == 200 else o.status
    good = {status: o.summary, **o.also}
    responses = {
        str(code): openapi.Response(description=text, content=answered, headers=headers)  # type: ignore[arg-type]
        for code, text in good.items()
    }
    for code in o.statuses:
        more = {"Retry-After": _header("Seconds to wait.", "integer")} if code in (429, 503) else None
        more = {"WWW-Authenticate": _header("Bearer.", "string")} if code == 401 else more
        responses[str(code)] = openapi.Response(
            description=REASONS[code],
            content=content(ProblemDetails, "serialization", MEDIA_TYPE),
            headers=more,  # type: ignore[arg-type]
        )
    body = None
    if "body" in o.parts:
        body = openapi.RequestBody(content=content(o.parts["body"], "validation"), required=True)
    elif o.consumes:
        body = openapi.RequestBody(content={o.consumes: _text_or_bytes(o.consumes)}, required=True)
    return openapi.Operation(
        tags=[o.tag],
        summary=o.summary,
        description=inspect.getdoc(o.handler),
        operationId=getattr(o.handler, "__name__", ""),
        parameters=[parameter for name in PARTS[:3] if name in o.parts for parameter in _parameters(name, o)] or None,
        requestBody=body,
        responses=responses,  # type: ignore[arg-type]
        security=[{"token": [o.scope]}] if o.scope and tokens else [],
    )


def _text_or_bytes(media_type: str) -> openapi.MediaType:
    """Bytes are a string of ``format`` binary, which generated clients do not take for a text."""
    binary = {} if media_type.startswith("text/") else {"format": "binary", "contentMediaType": media_type}
    return openapi.MediaType(schema=openapi.Schema.model_validate({"type": "string", **binary}))  # type: ignore[call-arg]


def _message(name: str, payload: Any) -> dict[str, Any]:
    """A server-sent event called ``name``: a stream is a list of them."""
    data = {"type": "string", "contentMediaType": JSON, "contentSchema": payload}
    properties = {"event": {"type": "string", "const": name}, "id": {"type": "string"}, "data": data}
    return {"type": "object", "title": name, "properties": properties, "required": ["event", "data"]}


def _header(text: str, kind: str) -> openapi.Header:
    return openapi.Header(description=text, schema=openapi.Schema(type=openapi.DataType(kind)))  # type: ignore[call-arg]


def _parameters(part: str, o: Operation) -> list[openapi.Parameter]:
    schema = o.parts[part].model_json_schema(ref_template=_REFERENCE)
    required = schema.get("required", ())
    return [
        openapi.Parameter.model_validate(
            {
                "name": name,
                "in": {"path": "path", "query": "query", "headers": "header"}[part],
                "required": name in required,
                "description": described.get("description"),
                "schema": {key: value for key, value in described.items() if key not in ("title", "description")},
            }
        )
        for name, described in schema["properties"].items()
    ]
