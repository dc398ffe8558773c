"""What went wrong, as RFC 9457 tells it: ``application/problem+json`` with the field, the value and the fix.

raised anywhere below a handler ──▶ problem_of ──▶ Problem ──▶ response
  a Problem: as it stands    pydantic, RecipeError: all that is wrong at once    unexpected: 500, no details
"""

from __future__ import annotations

import http
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pydantic
import structlog
from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field

from api.schemas.text import Text, sendable
from orchestration.recipe.problems import RecipeError
from orchestration.service.registry import KeyReused, UnknownRun, WrongState
from pipeline.index.client import IndexUnreachable

log = structlog.get_logger()

MEDIA_TYPE = "application/problem+json"
RETRY_SECONDS = 2  # what a client is asked to wait for an index that does not answer
BEGAN = web.RequestKey("began", bool)  # whether the answer's headers are out
LONGEST_VALUE = 200  # characters of a value that are told back
LONGEST_READ = 4096  # characters of a value that are looked at for that
MOST_ERRORS = 100
TOO_MANY_ERRORS = 2000  # pydantic lists all errors or none; more than this many are not listed
# Of a URL's user and password up to the last "@". Linear in the text: a match is tried after "://" alone, and ends at "/".
_PASSWORD = re.compile(r"(?<=\w://)[^\s/]+@")


class Wrong(BaseModel):
    """One thing that is wrong: the field, its value as it was given, what is wrong with it, and what to do."""

    model_config = ConfigDict(extra="forbid")

    field: Text
    value: Any = None
    wrong: Text
    fix: Text = ""


class ProblemDetails(BaseModel):
    """RFC 9457, with ``field``, ``value`` and ``fix`` of the first thing that is wrong, and ``errors`` with all of them."""

    model_config = ConfigDict(extra="forbid")

    type: str = Field(default="about:blank", description="What kind of problem: a URN that stays as it is.")
    title: str
    status: int = Field(ge=400, le=599)
    detail: Text
    field: Text | None = None
    value: Any = None
    fix: Text | None = None
    errors: list[Wrong] = []


class Problem(Exception):
    """An answer that is a problem. ``kind`` is a short name that a program can tell it by (``urn:asyncdock:KIND``)."""

    def __init__(
        self,
        status: int,
        detail: str,
        *,
        title: str = "",
        kind: str = "",
        field: str | None = None,
        value: object = None,
        fix: str | None = None,
        errors: Sequence[Wrong] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status, self.headers = status, dict(headers or {})
        self.details = ProblemDetails(
            type=f"urn:asyncdock:{kind}" if kind else "about:blank",
            title=title or http.HTTPStatus(status).phrase,
            status=status,
            detail=detail,
            field=field,
            value=shown(value),
            fix=fix,
            errors=list(errors),
        )

    def body(self) -> bytes:
        """The problem as JSON."""
        details = self.details.model_dump(mode="json", exclude_none=True)
        return json.dumps(details, ensure_ascii=False, allow_nan=False).encode()

    @classmethod
    def from_details(cls, details: Mapping[str, Any]) -> Problem:
        """The problem that another process made."""
        problem = cls(details["status"], details["detail"])
        problem.details = ProblemDetails.model_validate(details)
        return problem

    def response(self) -> web.Response:
        headers = {"Content-Type": f"{MEDIA_TYPE}; charset=utf-8", **self.headers}
        return web.Response(status=self.status, body=self.body(), headers=headers)


def shown(value: object) -> Any:
    """``value`` as it may be told back: as JSON, short, and without a URL's password."""
    text = without_password(_beginning(value))
    if len(text) > LONGEST_VALUE:
        return text[:LONGEST_VALUE] + "…"
    try:
        return json.loads(text, parse_constant=str)
    except ValueError:  # a cut number or a text that only looked like a URL
        return text


def _beginning(value: object) -> str:
    """The first characters of ``value`` as JSON, whatever its size."""
    if isinstance(value, str):
        value = value[: LONGEST_READ + 1]
    text = ""
    for piece in json.JSONEncoder(ensure_ascii=False, default=str).iterencode(value):
        text += piece[: LONGEST_READ + 1]
        if len(text) > LONGEST_READ:
            text = text[:LONGEST_READ] + "@"  # ends what may be a password that goes on
            break
    return str(sendable(text))


def without_password(text: str) -> str:
    """``text`` with the user and password of every URL in it replaced."""
    return _PASSWORD.sub("***@", text)


def of_recipe(error: RecipeError) -> Problem:
    """All problems of a recipe, by their dotted keys."""
    errors = [
        Wrong(field=p.key, value=shown(p.value), wrong=without_password(p.wrong), fix=p.fix)
        for p in error.problems[:MOST_ERRORS]
    ]
    return several(422, "recipe", "The recipe is not sound", errors)


def of_validation(status: int, error: pydantic.ValidationError, prefix: str = "") -> Problem:
    """All that pydantic says of one part of a request. Values of headers are not told back."""
    errors = []
    if (count := error.error_count()) > TOO_MANY_ERRORS:
        where = prefix.rstrip(".") or "body"
        wrong = f"has {count} errors, too many to be listed"
        return several(
            status, "request", "The request is not valid", [Wrong(field=where, wrong=wrong, fix="see /docs")]
        )
    for item in error.errors(include_url=False, include_context=False)[:MOST_ERRORS]:
        field = prefix + ".".join(str(part) for part in item["loc"])
        wrong, fix = _said(item["type"], item["msg"])
        # What is missing has no value; pydantic gives the whole that it is missing in.
        value = None if item["type"] in ("missing", "json_invalid") or prefix == "header." else shown(item["input"])
        errors.append(Wrong(field=field or "body", value=value, wrong=wrong, fix=fix))
    return several(status, "request", "The request is not valid", errors)


def several(status: int, kind: str, title: str, errors: Sequence[Wrong]) -> Problem:
    """One problem that tells ``errors``, with the first one's field, value and fix as its own."""
    first, more = errors[0], len(errors) - 1
    detail = f"{first.field} {first.wrong}" + (f", and {more} more" if more else "")
    return Problem(
        status, detail, title=title, kind=kind, field=first.field, value=first.value, fix=first.fix, errors=errors
    )


def _said(kind: str, message: str) -> tuple[str, str]:
    """What is wrong and what to do, from pydantic's kind of error and its message."""
    match kind:
        case "missing":
            return "is missing", "give it"
        case "extra_forbidden":
            return "is not known here", "remove it, or see /docs for what is"
        case "json_invalid":
            return f"is not JSON ({message.removeprefix('Invalid JSON: ')})", "send one JSON object"
    if message.startswith("Input should be "):
        return "is not right", "give " + message.removeprefix("Input should be ")
    return f"is refused ({message})", "see /docs for what it takes"


def problem_of(error: Exception) -> Problem:
    """``error`` as a problem. One that nobody expected is logged, and tells nothing of itself."""
    match error:
        case Problem():
            return error
        case RecipeError():
            return of_recipe(error)
        case IndexUnreachable():
            return Problem(
                503,
                "The index does not answer; runs go on by themselves as soon as it does.",
                kind="index-unreachable",
                fix="try again shortly",
                headers={"Retry-After": str(RETRY_SECONDS)},
            )
        case UnknownRun():
            return Problem(404, "There is no such run.", kind="unknown-run", field="path.run", fix="see GET /v1/runs")
        case WrongState():
            fix = "wait until it is in a state in which it can, or leave it"
            return Problem(409, str(error), kind="wrong-state", field="state", value=error.state, fix=fix)
        case KeyReused():
            field, fix = "header.Idempotency-Key", "give another key, or what the first request said"
            return Problem(422, "This key came with another request before.", kind="key-reused", field=field, fix=fix)
        case web.HTTPException():
            return _of_http(error)
    log.error("a request failed", error=type(error).__name__, exc_info=error)
    return Problem(500, "Something went wrong here, and the server's log says what.", kind="internal")


def _of_http(error: web.HTTPException) -> Problem:
    """aiohttp's own refusals (no such path, wrong method, too large)."""
    headers = {name: value for name, value in error.headers.items() if name.lower() in ("allow", "location")}
    match error.status:
        case 404:
            return Problem(404, "There is nothing at this path.", kind="no-such-path", fix="see /docs", headers=headers)
        case 405:
            fix = f"use {headers.get('Allow', 'another method')}"
            return Problem(405, "This path has no such method.", kind="method", fix=fix, headers=headers)
    return Problem(error.status, error.reason or "The request was refused.", headers=headers)


@web.middleware
async def problems(request: web.Request, handler: Any) -> web.StreamResponse:
    """Every error that comes out of a handler becomes a problem; one in the middle of an answer ends the connection."""
    try:
        return await handler(request)
    except Exception as error:
        problem = problem_of(error)
        if request.get(BEGAN):
            raise
        return problem.response()
