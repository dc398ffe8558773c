"""Errors of the REST server as RFC 9457 problems: ``application/problem+json`` with field, value
and fix; those of the policies' endpoint as OpenAI's clients read them.

exception below a handler ──▶ problem_of ──▶ HTTPProblem ──▶ response, by the path: a problem, or OpenAI's error
  HTTPProblem: unchanged     pydantic, RecipeError: all errors at once     unexpected: 500, logged, without details
"""

from __future__ import annotations

import http
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import pydantic
import structlog
from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import ErrorDetails

from api.schemas.text import Text, sendable
from orchestration.calls.interface import Busy, NotThere
from orchestration.policy.source import PoliciesBusy, PolicyUnknown
from orchestration.processes.confined import TurnsFull
from orchestration.recipe.problems import RecipeError
from orchestration.state.registry import KeyReused, ReadOnly, UnknownRun, WrongState
from pipeline.data.events import ENDED
from pipeline.index.client import IndexUnreachable
from stages.calls.interface import CallRefused
from stages.environments.programs.messages import anthropic_error, openai_error

log = structlog.get_logger()

MEDIA_TYPE = "application/problem+json"
# begin those with errors of OpenAI's, and of Anthropic's
OPENAI_PATHS = (
    *("/v1/completions", "/v1/chat/", "/v1/models", "/v1/responses"),
    *("/tokenize", "/detokenize"),
)
ANTHROPIC_PATHS = ("/v1/messages",)
# as the openai client names them
OPENAI_TYPES = {
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    429: "RateLimitError",
    503: "ServiceUnavailableError",
}
# of Anthropic's API
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
RETRY_SECONDS = 2  # for clients, when the index does not answer
BEGAN = web.RequestKey("began", bool)  # whether the headers of the answer were sent
LONGEST_VALUE = 200  # characters of a value that are sent back
LONGEST_READ = 4096  # characters of a value that are read for that
NOT_RIGHT = "is not right"
MOST_ERRORS = 100  # that are listed
TOO_MANY_ERRORS = 2000  # of which none are listed: pydantic builds the list of all of them
# User and password of a URL, up to the last "@". Linear time: a match starts after "://" only and
# ends at "/".
_PASSWORD = re.compile(r"(?<=\w://)[^\s/]+@")


class Wrong(BaseModel):
    """One error: the field, its value as given, what is wrong with it, and how to fix it."""

    model_config = ConfigDict(extra="forbid")

    field: Text
    value: Any = None
    wrong: Text
    fix: Text = ""
    rule: Annotated[str, Field(exclude=True)] = ""  # pydantic's name of it, for OpenAI's clients


class ProblemDetails(BaseModel):
    """RFC 9457, with ``field``, ``value`` and ``fix`` of the first thing that is wrong, and
    ``errors`` with all of them."""

    model_config = ConfigDict(extra="forbid")

    type: str = Field(
        default="about:blank", description="What kind of problem: a URN that stays as it is."
    )
    title: str
    status: int = Field(ge=400, le=599)
    detail: Text
    field: Text | None = None
    value: Any = None
    fix: Text | None = None
    errors: list[Wrong] = []


class OpenAIError(BaseModel):
    """An error as OpenAI's clients read it."""

    message: Text = Field(description="What is wrong, and the fix.")
    type: str
    param: Text | None = Field(description="The field of the request.")
    code: int = Field(description="The status.")
    kind: str = Field(description="What kind of problem: a URN that stays as it is.")


class ErrorView(BaseModel):
    error: OpenAIError


class AnthropicError(BaseModel):
    type: str
    message: Text = Field(description="What is wrong, and the fix.")


class AnthropicErrorView(BaseModel):
    """An error as Anthropic's clients read it."""

    type: Literal["error"]
    error: AnthropicError


class HTTPProblem(Exception):
    """An answer that is a problem.

    ``kind`` is a stable short name for programs (``urn:asyncdock:KIND``).
    """

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
        self.status = status
        self.headers = dict(headers or {})
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
        """Return the problem as JSON."""
        details = self.details.model_dump(mode="json", exclude_none=True)
        return json.dumps(details, ensure_ascii=False, allow_nan=False).encode()

    def openai(self) -> dict[str, Any]:
        """Return the problem as OpenAI's error object; what is refused has status 400 there."""
        details = self.details
        status = _clients_status(self.status)
        default = "InternalServerError" if status >= 500 else "BadRequestError"
        kind = OPENAI_TYPES.get(status, default)
        error = openai_error(kind, self._message(), details.field, status)
        return {"error": {**error["error"], "kind": details.type}}

    def _message(self) -> str:
        details = self.details
        rules = {error.rule for error in details.errors if error.rule}
        parts = [f"{details.detail.rstrip('.')}."]
        parts += [f"Fix: {details.fix}"] if details.fix else []
        return " ".join([*parts, *rules])

    def anthropic(self) -> dict[str, Any]:
        """Return the problem as Anthropic's error object, with the status as of OpenAI's."""
        default = "api_error" if self.status >= 500 else "invalid_request_error"
        return anthropic_error(ANTHROPIC_TYPES.get(self.status, default), self._message())

    @classmethod
    def from_details(cls, details: Mapping[str, Any]) -> HTTPProblem:
        """Return the problem that another process created."""
        problem = cls(details["status"], details["detail"])
        problem.details = ProblemDetails.model_validate(details)
        return problem

    def response(self, path: str = "") -> web.Response:
        """Return the answer to a request for ``path``."""
        view = error_view(path)
        if view is not ProblemDetails:
            status = _clients_status(self.status)
            error = self.openai() if view is ErrorView else self.anthropic()
            return web.json_response(error, status=status, headers=self.headers)
        headers = {"Content-Type": f"{MEDIA_TYPE}; charset=utf-8", **self.headers}
        return web.Response(status=self.status, body=self.body(), headers=headers)


def error_view(path: str) -> type[BaseModel]:
    """Return the form of errors at ``path``."""
    if path.startswith(OPENAI_PATHS):
        return ErrorView
    return AnthropicErrorView if path.startswith(ANTHROPIC_PATHS) else ProblemDetails


def _clients_status(status: int) -> int:
    """Return the status for the clients of models' APIs: what is refused has 400 there."""
    return 400 if status == 422 else status


def shown(value: object) -> Any:
    """Return ``value`` as it may be sent back: as JSON, shortened, without passwords of URLs."""
    if isinstance(value, str):
        value = value[: LONGEST_READ + 1]
    text = ""
    for piece in json.JSONEncoder(ensure_ascii=False, default=str).iterencode(value):
        text += piece[: LONGEST_READ + 1]
        if len(text) > LONGEST_READ:
            text = text[:LONGEST_READ] + "@"  # ends a password that may have been cut
            break
    text = without_password(str(sendable(text)))
    if len(text) > LONGEST_VALUE:
        return text[:LONGEST_VALUE] + "…"
    try:
        return json.loads(text, parse_constant=str)
    except ValueError:  # a number that was cut, or a text in which a URL was replaced
        return text


def without_password(text: str) -> str:
    """Return ``text`` with the user and password of every URL replaced."""
    return _PASSWORD.sub("***@", text)


def errors_of(error: pydantic.ValidationError, prefix: str = "") -> list[Wrong]:
    """Return all of pydantic's errors in one part of a request.

    Values of headers are not sent back.
    """
    if (count := error.error_count()) > TOO_MANY_ERRORS:
        field = prefix.rstrip(".") or "body"
        return [
            Wrong(field=field, wrong=f"has {count} errors, too many to be listed", fix="see /docs")
        ]
    errors = []
    for item in error.errors(include_url=False)[:MOST_ERRORS]:
        field = prefix + ".".join(str(part) for part in item["loc"])
        reason, fix = _wrong_and_fix(item)
        # A missing field has no value; pydantic reports the object that lacks it.
        value = (
            None
            if item["type"] in ("missing", "json_invalid") or prefix == "header."
            else shown(item["input"])
        )
        rule = f"({item['type']})" if reason == NOT_RIGHT else ""
        errors.append(Wrong(field=field or "body", value=value, wrong=reason, fix=fix, rule=rule))
    return errors


def invalid_request(status: int, errors: Sequence[Wrong]) -> HTTPProblem:
    return several(status, "request", "The request is not valid", errors)


def several(status: int, kind: str, title: str, errors: Sequence[Wrong]) -> HTTPProblem:
    """Return one problem with ``errors``; its field, value and fix are those of the first one."""
    first = errors[0]
    num_others = len(errors) - 1
    detail = f"{first.field} {first.wrong}" + (f", and {num_others} more" if num_others else "")
    return HTTPProblem(
        status,
        detail,
        title=title,
        kind=kind,
        field=first.field,
        value=first.value,
        fix=first.fix,
        errors=errors,
    )


def _wrong_and_fix(error: ErrorDetails) -> tuple[str, str]:
    message = error["msg"]
    context = error.get("ctx", {})
    match error["type"]:
        case "missing":
            return "is missing", "give it"
        case "extra_forbidden":
            return "is not known here", "remove it, or see /docs for what is"
        case "json_invalid":
            return f"is not JSON ({context['error']})", "send one JSON object"
        case "fault":  # see stages.json_schema
            return context["wrong"], context["fix"]
    if message.startswith("Input should be "):
        return NOT_RIGHT, "give " + message.removeprefix("Input should be ")
    return f"is refused ({message})", "see /docs for what it takes"


def problem_of(error: Exception) -> HTTPProblem:
    """Return ``error`` as a problem.

    An unexpected one is logged, and the problem has no details of it.
    """
    match error:
        case HTTPProblem():
            return error
        case RecipeError():
            errors = [
                Wrong(field=p.key, value=shown(p.value), wrong=without_password(p.wrong), fix=p.fix)
                for p in error.problems[:MOST_ERRORS]
            ]
            return several(422, "recipe", "The recipe is not sound", errors)
        case IndexUnreachable():
            detail = "The index does not answer; runs go on by themselves as soon as it does."
            headers = {"Retry-After": str(RETRY_SECONDS)}
            return HTTPProblem(
                503, detail, kind="index-unreachable", fix="try again shortly", headers=headers
            )
        case UnknownRun():
            return HTTPProblem(
                404,
                "There is no such run.",
                kind="unknown-run",
                field="path.run",
                fix="see GET /v1/runs",
            )
        case PolicyUnknown():
            return HTTPProblem(
                404, str(error), kind="unknown-model", field="model", fix="see GET /v1/models"
            )
        case TurnsFull():
            fix = "wait until some of them are answered"
            return HTTPProblem(
                429, f"{error}.".capitalize(), kind="turns", fix=fix, headers={"Retry-After": "10"}
            )
        case PoliciesBusy():
            return HTTPProblem(
                503, str(error), kind="policies", field="model", headers={"Retry-After": "10"}
            )
        case CallRefused():
            errors = [
                Wrong(field=p.key, value=shown(p.value), wrong=p.wrong, fix=p.fix)
                for p in error.problems[:MOST_ERRORS]
            ]
            if not errors:
                return HTTPProblem(422, str(error), kind="call")
            return several(422, "call", "The call is refused", errors)
        case NotThere():
            fix = "see GET /api/v1/training_runs, /api/v1/checkpoints and /api/v1/sessions"
            return HTTPProblem(404, str(error), kind="not-there", fix=fix)
        case Busy():
            headers = {"Retry-After": str(math.ceil(error.seconds))}
            return HTTPProblem(429, str(error), kind="busy", fix="try again", headers=headers)
        case ReadOnly():
            return HTTPProblem(403, str(error), kind="read-only")
        case WrongState():
            fix = (
                "resume it, with more train.steps where it has finished; or fork it"
                if error.state in ENDED
                else "wait until it is in a state in which it can, or leave it"
            )
            return HTTPProblem(
                409, str(error), kind="wrong-state", field="state", value=error.state, fix=fix
            )
        case KeyReused():
            field = "header.Idempotency-Key"
            fix = "give another key, or repeat the first request exactly"
            return HTTPProblem(
                422,
                "This key came with another request before.",
                kind="key-reused",
                field=field,
                fix=fix,
            )
        case web.HTTPException():  # aiohttp's own: no such path, wrong method, too large
            headers = {
                name: value
                for name, value in error.headers.items()
                if name.lower() in ("allow", "location")
            }
            if error.status == 404:
                detail = "There is nothing at this path."
                kind = "no-such-path"
                fix = "see /docs"
                return HTTPProblem(404, detail, kind=kind, fix=fix, headers=headers)
            if error.status == 405:
                detail = "This path has no such method."
                fix = f"use {headers.get('Allow', 'another method')}"
                return HTTPProblem(405, detail, kind="method", fix=fix, headers=headers)
            return HTTPProblem(
                error.status, error.reason or "The request was refused.", headers=headers
            )
    log.error("a request failed", error=type(error).__name__, exc_info=error)
    return HTTPProblem(
        500, "Something went wrong here; the server's log has the reason.", kind="internal"
    )


@web.middleware
async def problems(request: web.Request, handler: Any) -> web.StreamResponse:
    """Turn every exception of a handler into a problem; one after the headers were sent ends the
    connection."""
    try:
        return await handler(request)
    except Exception as error:
        problem = problem_of(error)
        if request.get(BEGAN):
            raise
        return problem.response(request.path)
