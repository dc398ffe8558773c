"""The decorator ``@operation``: routing, authorization, validation and documentation of a request
handler.

    @operation("GET", "/v1/runs/{run}", scope="read", summary="One run", tag="runs", errors=(404,))
    async def get_run(service: Service, path: RunPath) -> RunView: ...

    request ──▶ token and scope ──▶ path, query, headers, body into pydantic models ──▶ handler ──▶ answer
                    └ 401, 403             └ 400, 408, 413, 415, 422: all errors at once

A handler takes the service, and by name what it needs of ``path``, ``query``, ``headers``, ``body``
(a pydantic model each), ``raw`` (the bytes of ``body``) and ``request``. It returns a pydantic
model, None (204), a :class:`Reply` when status or headers depend on the result, a text, or, with
``produces``, a response.
"""

from __future__ import annotations

import asyncio
import contextlib
import types
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin, get_type_hints

import pydantic
from aiohttp import web
from pydantic import BaseModel, RootModel

from api.schemas.runs import Strict as Strict  # the base class of request models
from api.server.access.tokens import Scope
from api.server.http.bodies import JSON, read_body, refuse_many_values
from api.server.http.problems import (
    HTTPProblem,
    ProblemDetails,
    Wrong,
    error_view,
    errors_of,
    invalid_request,
)
from api.server.service.service import PRINCIPAL, SERVICE

T = TypeVar("T")
Method = Literal["GET", "POST", "PUT", "PATCH", "DELETE"]
PARTS = ("path", "query", "headers", "body")
# prefixes of field names in errors
_FIELDS = {"path": "path.", "query": "query.", "headers": "header.", "body": ""}
BODY_VALUES = 100_000  # of a JSON body: parsing it blocks the event loop
GONE_SECONDS = 0.25  # between checks whether the client of a long request is still connected
_MARK = "__operation__"

REASONS = {
    400: "A parameter, or the form of the body, is not valid.",
    401: "A token is needed, or the one given is not valid.",
    403: "The token's scope, the run's owner, or where the request comes from, does not allow it.",
    404: "There is no such thing.",
    408: "The body took too long to arrive.",
    409: "It makes no sense in the present state.",
    410: "It is there no more.",
    413: "The body is too large.",
    415: "The body is of another media type.",
    422: "The body is well-formed, but its content is refused: `errors` lists every reason.",
    429: "Too many requests; `Retry-After` says when to go on.",
    503: "The index does not answer, or it took too long; `Retry-After` says when to try again.",
}


@dataclass(frozen=True)
class Reply(Generic[T]):
    """An answer with a status or headers that depend on the result."""

    body: T
    status: int
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Operation:
    """A handler and the arguments of its decorator."""

    method: Method
    path: str
    handler: Callable[..., Awaitable[Any]]
    scope: Scope | None
    summary: str
    tag: str
    status: int = 200
    owned: bool = False
    """Only for the owner of the run of ``path``, and for scope admin."""
    also: Mapping[int, str] = field(default_factory=dict)
    """Further statuses of success and their meaning."""
    errors: tuple[int, ...] = ()
    """Statuses of problems beside the general ones."""
    produces: str = ""
    """Media type of an answer that is not a model."""
    consumes: str = ""
    """Media type of a body that the handler reads itself."""
    sends: Mapping[str, str] = field(default_factory=dict)
    """Headers of a successful answer and their meaning."""
    seconds: float | None = None
    """Deadline (None: the server's; 0: none)."""
    body_limit: int | None = None
    """Bytes (None: the server's)."""
    body_values: int = BODY_VALUES
    """Limit of values in a JSON body, ten times that of its tables and lists, and of its keys."""
    body_optional: bool = False
    """Whether no body is read as an empty object."""
    hidden: bool = False
    """Not in the document."""
    events: Mapping[str, type[BaseModel]] = field(default_factory=dict)
    """Payload models of an event stream."""
    streams: bool = False
    """Whether it answers an event stream, too, where the body asks for one."""

    @cached_property
    def hints(self) -> dict[str, Any]:
        return get_type_hints(self.handler)

    @cached_property
    def parts(self) -> dict[str, type[BaseModel]]:
        return {name: self.hints[name] for name in PARTS if name in self.hints}

    @cached_property
    def answer(self) -> type[BaseModel] | None:
        """The model of a successful answer; None when the answer is not JSON."""
        hint = self.hints["return"]
        hint = get_args(hint)[0] if get_origin(hint) is Reply else hint
        return hint if isinstance(hint, type) and issubclass(hint, BaseModel) else None

    @property
    def error(self) -> type[BaseModel]:
        """The model of its errors."""
        return error_view(self.path)

    @property
    def statuses(self) -> tuple[int, ...]:
        """Every status of a problem that the operation may answer."""
        statuses = {403, 429, *self.errors}
        statuses |= {400} if self.parts else set()
        statuses |= {401} if self.scope else set()
        # tokens are looked up in the index
        statuses |= {503} if self.scope or self.seconds != 0 else set()
        statuses |= {400, 408, 413, 415, 422} if "body" in self.parts or self.consumes else set()
        return tuple(sorted(statuses if self.error is ProblemDetails else statuses - {422}))

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Authorize and answer one request."""
        service = request.app[SERVICE]
        seconds = service.settings.handler_seconds if self.seconds is None else self.seconds
        deadline = asyncio.timeout(seconds or None)
        async with (
            service.authorised(request, self.scope) if self.scope else contextlib.nullcontext()
        ):
            arguments = await self._arguments(request)
            try:
                async with deadline:
                    if self.owned:
                        await service.refuse_others(request[PRINCIPAL], arguments["path"].run)
                    return self._response(await self.handler(service, **arguments))
            except TimeoutError:
                if not deadline.expired():
                    raise
                detail = f"This took more than {seconds:.0f} s and was given up."
                raise HTTPProblem(
                    503, detail, kind="timeout", fix="try again", headers={"Retry-After": "5"}
                ) from None

    async def _arguments(self, request: web.Request) -> dict[str, Any]:
        """Return the handler's arguments. Raises one HTTPProblem with all errors of the request."""
        arguments: dict[str, Any] = {"request": request} if "request" in self.hints else {}
        settings = request.app[SERVICE].settings
        status = 400
        errors: list[Wrong] = []
        for name, model in self.parts.items():
            try:
                if name != "body":
                    arguments[name] = model.model_validate(_part(name, model, request))
                elif self.body_optional and not request.body_exists:
                    arguments["body"] = model()
                elif not errors:  # errors in other parts are reported first
                    body = await read_body(
                        request, self.body_limit or settings.body_limit, settings.body_seconds
                    )
                    refuse_many_values(body, self.body_values)
                    status = 422
                    # "1" is not accepted as a number
                    arguments["body"] = model.model_validate_json(body, strict=True)
                    if "raw" in self.hints:
                        arguments["raw"] = body
            except pydantic.ValidationError as error:
                if (
                    error.error_count() == 1
                    and error.errors(include_input=False)[0]["type"] == "json_invalid"
                ):
                    status = 400
                part_errors = errors_of(error, _FIELDS[name])
                # a union: the name of the tried model is not part of the field
                if issubclass(model, RootModel):
                    part_errors = [
                        w.model_copy(update={"field": w.field.partition(".")[2] or "body"})
                        for w in part_errors
                    ]
                errors += part_errors
        if errors:
            raise invalid_request(status, errors)
        return arguments

    def _response(self, answer: Any) -> web.StreamResponse:
        status = self.status
        headers = {}
        if isinstance(answer, Reply):
            answer, status, headers = answer.body, answer.status, dict(answer.headers)
        if isinstance(answer, web.StreamResponse):
            return answer
        if answer is None:
            return web.Response(status=204 if status == 200 else status, headers=headers)
        if isinstance(answer, BaseModel):
            text = answer.model_dump_json(by_alias=True)
            return web.Response(status=status, text=text, content_type=JSON, headers=headers)
        return web.Response(
            status=status, text=answer, content_type=self.produces, charset="utf-8", headers=headers
        )


def operation(
    method: Method, path: str, *, scope: Scope | None, summary: str, tag: str, **options: Any
) -> Callable[[T], T]:
    """Mark a handler as an operation; ``options`` are the further fields of :class:`Operation`."""

    def mark(handler: T) -> T:
        setattr(handler, _MARK, Operation(method, path, handler, scope, summary, tag, **options))  # type: ignore[arg-type]
        return handler

    return mark


def operations_of(modules: Iterable[types.ModuleType]) -> list[Operation]:
    """Return the operations that ``modules`` define, in their order."""
    candidates = (
        getattr(value, _MARK, None) for module in modules for value in vars(module).values()
    )
    return list({(o.method, o.path): o for o in candidates if o is not None}.values())


def build_routes(app: web.Application, modules: Iterable[types.ModuleType]) -> None:
    for operation in operations_of(modules):
        app.router.add_route(operation.method, operation.path, operation.handle)


async def while_wanted(request: web.Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of ``work``.

    Cancels it when the handler is cancelled, the client leaves, or the server closes.
    """
    task = asyncio.create_task(work)
    closing = request.app[SERVICE].closing
    try:
        while not (await asyncio.wait([task], timeout=GONE_SECONDS))[0]:
            if request.transport is None or request.transport.is_closing():
                raise HTTPProblem(400, "The client has gone.", kind="gone")
            if closing.is_set():
                raise HTTPProblem(
                    503, "The server is going down.", kind="closing", headers={"Retry-After": "5"}
                )
        return task.result()
    finally:
        task.cancel()


def _part(name: str, model: type[BaseModel], request: web.Request) -> dict[str, Any]:
    """Return the path, query or headers of a request as its model takes them.

    A query key that is given twice becomes a list, which the model refuses where it expects one
    value.
    """
    if name == "path":
        return dict(request.match_info)
    fields = {info.alias or key: info for key, info in model.model_fields.items()}
    if name == "headers":
        return {name: request.headers[name] for name in fields if name in request.headers}
    query: dict[str, list[str]] = {}
    for key, value in request.query.items():
        query.setdefault(key, []).append(value)
    lists = {key for key, info in fields.items() if get_origin(info.annotation) is list}
    return {
        key: values if key in lists or len(values) > 1 else values[0]
        for key, values in query.items()
    }
