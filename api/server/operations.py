"""One decorator makes a handler, its validation, its authorisation, and its entry in the OpenAPI document.

    @operation("GET", "/v1/runs/{run}", scope="read", summary="One run", tag="runs", errors=(404,))
    async def get_run(service: Service, path: RunPath) -> RunView: ...

    request ──▶ who asks, and may they? ──▶ path, query, headers, body into pydantic models ──▶ handler ──▶ answer
                    └ 401, 403                     └ 400, 408, 413, 415, 422: all that is wrong at once

A handler takes the service, and by name what it needs of ``path``, ``query``, ``headers``, ``body`` (a pydantic model each),
``raw`` (the bytes that ``body`` was made of) and ``request``. It returns a pydantic model, None (204), a :class:`Reply` when
status or headers depend on what was done, a text, or, with ``produces``, a response of its own.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin, get_type_hints

import pydantic
from aiohttp import web
from pydantic import BaseModel, RootModel

from api.schemas.runs import Strict as Strict  # what handlers' models of requests derive from
from api.server.access.tokens import Scope
from api.server.problems import Problem, Wrong, of_validation, several
from api.server.service import SERVICE, Service

T = TypeVar("T")
Method = Literal["GET", "POST", "PUT", "PATCH", "DELETE"]
JSON = "application/json"
BINARY = "application/octet-stream"
PARTS = ("path", "query", "headers", "body")
BODY_VALUES = 100_000  # of a JSON body: reading it holds the event loop
GONE_SECONDS = 0.25  # after which it is looked whether the client of long work is there still
_MARK = "__operation__"

REASONS = {
    400: "A parameter, or the form of the body, is not valid.",
    401: "A token is needed, or the one given is not valid.",
    403: "The token's scope, or where the request comes from, does not allow it.",
    404: "There is no such thing.",
    408: "The body took too long to arrive.",
    409: "It makes no sense in the present state.",
    410: "It is there no more.",
    413: "The body is too large.",
    415: "The body is of another media type.",
    422: "The body is well-formed, and what it says is refused: `errors` tells all of it.",
    429: "Too many requests; `Retry-After` says when to go on.",
    503: "The index does not answer, or it took too long; `Retry-After` says when to try again.",
}


@dataclass(frozen=True)
class Reply(Generic[T]):
    """An answer whose status or headers depend on what was done."""

    body: T
    status: int
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Operation:
    """What the decorator was told, and the handler. ``seconds``: how long it may take; None: as the server's settings say;
    0: a stream, which ends by itself. ``body_limit`` in bytes; None: as the settings say. ``body_values``: how many a
    JSON body may hold, in at most a tenth as many tables and lists, under at most a tenth as many keys."""

    method: Method
    path: str
    handler: Callable[..., Awaitable[Any]]
    scope: Scope | None
    summary: str
    tag: str
    status: int
    also: Mapping[int, str]
    errors: tuple[int, ...]
    produces: str
    consumes: str
    sends: Mapping[str, str]
    seconds: float | None
    body_limit: int | None
    body_values: int
    hidden: bool
    events: Mapping[str, type[BaseModel]]

    @cached_property
    def hints(self) -> dict[str, Any]:
        return get_type_hints(self.handler)

    @cached_property
    def parts(self) -> dict[str, type[BaseModel]]:
        return {name: _without_none(self.hints[name]) for name in PARTS if name in self.hints}

    @cached_property
    def answer(self) -> type[BaseModel] | None:
        """The model of a successful answer; None when there is nothing, or no JSON, in it."""
        told = self.hints["return"]
        told = get_args(told)[0] if get_origin(told) is Reply else told
        return told if isinstance(told, type) and issubclass(told, BaseModel) else None

    @property
    def takes_body(self) -> bool:
        return "body" in self.parts or bool(self.consumes)

    @property
    def statuses(self) -> tuple[int, ...]:
        """Every status of a problem that it may answer."""
        found = {403, 429, *self.errors}
        found |= {400} if self.parts else set()
        found |= {401} if self.scope else set()
        found |= (
            {503} if self.scope or self.seconds != 0 else set()
        )  # tokens are looked up in the index; it took too long
        found |= {400, 408, 413, 415, 422} if self.takes_body else set()
        return tuple(sorted(found))

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """The whole of one request."""
        service = request.app[SERVICE]
        if self.scope is None:
            return await self._handle(service, request)
        async with service.authorised(request, self.scope):
            return await self._handle(service, request)

    async def _handle(self, service: Service, request: web.Request) -> web.StreamResponse:
        arguments = await self._arguments(request)
        seconds = service.settings.handler_seconds if self.seconds is None else self.seconds
        deadline = asyncio.timeout(seconds or None)
        try:
            with service.using(request.match_info.get("run")):
                async with deadline:
                    answer = await self.handler(service, **arguments)
        except TimeoutError:
            if not deadline.expired():
                raise
            detail = f"This took more than {seconds:.0f} s and was given up."
            raise Problem(503, detail, kind="timeout", fix="try again", headers={"Retry-After": "5"}) from None
        return self._response(answer)

    async def _arguments(self, request: web.Request) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        if "request" in self.hints:
            arguments["request"] = request
        errors: list[Wrong] = []
        status = 400
        for name, model in self.parts.items():
            try:
                if name == "body":
                    # Strict as JSON has it: a text is not a number. What is wrong elsewhere is told first.
                    if not errors:
                        body = await read_body(request, limit=self.body_limit)
                        _refuse_many_values(body, self.body_values)
                        status = 422
                        arguments["body"] = model.model_validate_json(body, strict=True)
                        if "raw" in self.hints:
                            arguments["raw"] = body
                else:
                    arguments[name] = model.model_validate(_given(name, model, request))
            except pydantic.ValidationError as error:
                prefix = {"path": "path.", "query": "query.", "headers": "header.", "body": ""}[name]
                if error.error_count() == 1 and error.errors(include_input=False)[0]["type"] == "json_invalid":
                    status = 400
                found = of_validation(status, error, prefix).details.errors
                if issubclass(model, RootModel):  # a union: which of its models was meant is no part of the field
                    found = [w.model_copy(update={"field": w.field.partition(".")[2] or "body"}) for w in found]
                errors += found
        if errors:
            raise several(status, "request", "The request is not valid", errors)
        return arguments

    def _response(self, answer: Any) -> web.StreamResponse:
        status, headers = self.status, {}
        if isinstance(answer, Reply):
            answer, status, headers = answer.body, answer.status, dict(answer.headers)
        if isinstance(answer, web.StreamResponse):
            return answer
        if answer is None:
            return web.Response(status=204 if status == 200 else status, headers=headers)
        if isinstance(answer, BaseModel):
            text = answer.model_dump_json(by_alias=True)
            return web.Response(status=status, text=text, content_type=JSON, headers=headers)
        return web.Response(status=status, text=answer, content_type=self.produces, charset="utf-8", headers=headers)


def operation(
    method: Method,
    path: str,
    *,
    scope: Scope | None,
    summary: str,
    tag: str,
    status: int = 200,
    also: Mapping[int, str] | None = None,
    errors: Sequence[int] = (),
    produces: str = "",
    consumes: str = "",
    sends: Mapping[str, str] | None = None,
    seconds: float | None = None,
    body_limit: int | None = None,
    body_values: int = BODY_VALUES,
    hidden: bool = False,
    events: Mapping[str, type[BaseModel]] | None = None,
) -> Callable[[T], T]:
    """Mark a handler.

    ``also``: further statuses of success, and what they mean. ``produces``: the media type of an answer that is no model; an
    event stream has no deadline unless ``seconds`` gives one. ``consumes``: that of a body which the handler reads itself,
    with :func:`read_body`. ``sends``: headers of a successful answer, and what they say. A ``hidden`` one is no part of the
    document (a page for people). ``events``: the payloads of a stream's messages by their ``event``.
    """

    def mark(handler: T) -> T:
        stream = produces == "text/event-stream"
        made = Operation(
            method,
            path,
            handler,  # type: ignore[arg-type]
            scope,
            summary,
            tag,
            status,
            also or {},
            tuple(errors),
            produces,
            consumes,
            sends or {},
            0 if stream and seconds is None else seconds,
            body_limit,
            body_values,
            hidden,
            events or {},
        )
        setattr(handler, _MARK, made)
        return handler

    return mark


def operations_of(modules: Iterable[types.ModuleType]) -> list[Operation]:
    """The operations that ``modules`` define, in their order."""
    found = (getattr(value, _MARK, None) for module in modules for value in vars(module).values())
    return list({(o.method, o.path): o for o in found if o is not None}.values())


def build_routes(app: web.Application, modules: Iterable[types.ModuleType]) -> None:
    for made in operations_of(modules):
        app.router.add_route(made.method, made.path, made.handle)


async def while_wanted(request: web.Request, work: Coroutine[Any, Any, T]) -> T:
    """What ``work`` returns or raises. It is cancelled with the request's handler, when the client has gone, and when the
    server goes down."""
    task, closing = asyncio.create_task(work), request.app[SERVICE].closing
    try:
        while not (await asyncio.wait([task], timeout=GONE_SECONDS))[0]:
            if request.transport is None or request.transport.is_closing():
                raise Problem(400, "The client has gone.", kind="gone")
            if closing.is_set():
                raise Problem(503, "The server is going down.", kind="closing", headers={"Retry-After": "5"})
        return task.result()
    finally:
        task.cancel()


async def read_body(request: web.Request, *, limit: int | None = None, media_type: str = JSON) -> bytes:
    """The request's body. Raises a Problem: 413 past ``limit`` bytes (default: the server's ``body_limit``), 408 when it
    does not arrive in time, 415 when it is no ``media_type``, 400 when it was cut off."""
    settings = request.app[SERVICE].settings
    limit = settings.body_limit if limit is None else limit
    if request.content_type != media_type or request.headers.get("Content-Encoding", "identity") != "identity":
        sent = request.headers.get("Content-Type", "")
        fix = f"send the header 'Content-Type: {media_type}', and no Content-Encoding"
        raise Problem(415, "The body is of another media type.", kind="media-type", field="body", value=sent, fix=fix)
    if (request.content_length or 0) > limit:
        raise _too_large(limit)
    body = bytearray()
    try:
        async with asyncio.timeout(settings.body_seconds):
            async for part in request.content.iter_any():
                body += part
                if len(body) > limit:
                    raise _too_large(limit)
    except TimeoutError:
        detail = f"The body did not arrive within {settings.body_seconds:.0f} s."
        raise Problem(408, detail, kind="slow-body", fix="send it faster", headers={"Connection": "close"}) from None
    except (web.RequestPayloadError, ConnectionError) as error:
        detail = f"The body cannot be read ({type(error).__name__})."
        raise Problem(400, detail, kind="broken-body", fix="send all of it") from None
    return bytes(body)


def _too_large(limit: int) -> Problem:
    fix = f"send at most {limit} bytes"
    return Problem(413, f"The body is larger than {limit} bytes.", kind="too-large", field="body", fix=fix)


def _refuse_many_values(body: bytes, most: int) -> None:
    """Raises a Problem (413) for JSON that would take long to read. What texts hold of these characters counts too."""
    count = body.count
    for found, limit, what in (
        (count(b","), most, "values"),
        (count(b"{") + count(b"["), most // 10, "tables and lists"),
        (count(b":"), most // 10, "keys"),
    ):
        if found > limit:
            detail = f"The body holds {found} {what}; at most {limit} are read."
            raise Problem(
                413, detail, kind="too-large", field="body", fix="send it in parts, or as bytes where that can be"
            )


def _without_none(told: Any) -> Any:
    """``X`` of ``X | None``."""
    return next((part for part in get_args(told) if part is not types.NoneType), told)


def _given(name: str, model: type[BaseModel], request: web.Request) -> dict[str, Any]:
    """One part of a request as its model takes it. A query key that is given twice stays a list, which only a list takes."""
    match name:
        case "path":
            return dict(request.match_info)
        case "headers":
            names = [info.alias or key for key, info in model.model_fields.items()]
            return {name: request.headers[name] for name in names if name in request.headers}
    lists = {info.alias or key for key, info in model.model_fields.items() if get_origin(info.annotation) is list}
    found: dict[str, list[str]] = {}
    for key, value in request.query.items():
        found.setdefault(key, []).append(value)
    return {key: values if key in lists or len(values) > 1 else values[0] for key, values in found.items()}
