"""Exceptions of the clients, and the conversion of a service's answer into one."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

PROBLEM = "application/problem+json"
BUSY = (429, 503)
# a 503 that asks the caller to slow down: callers handle it themselves
NO_ROOM = "urn:asyncdock:no-room"
QUOTED = 300  # characters of a foreign answer that an error repeats


class ServiceError(Exception):
    """Base of the exceptions that calls raise.

    ``is_temporary``: the same call may succeed later, but not before ``retry_after`` seconds have
    passed.
    """

    is_temporary = False
    retry_after = 0.0


class Unreachable(ServiceError, ConnectionError):
    """No complete answer came from ``server`` within the client's patience."""

    def __init__(self, server: str, why: str, *, is_temporary: bool = True) -> None:
        self.server = server
        self.why = why
        self.is_temporary = is_temporary
        super().__init__(f"{server} cannot be reached: {why}")


class NotShown(ServiceError):
    """The run in a folder cannot be read."""


class NotAsyncDock(ServiceError):
    """An answer came that no AsyncDock service of this version gives."""


class ApiProblem(ServiceError):
    """The service refused the call with an RFC 9457 problem.

    ``field`` and ``value`` are what is wrong, ``fix`` is what to do; ``errors`` lists every error
    of the request (tables with ``field``, ``value``, ``wrong``, ``fix``).
    """

    def __init__(
        self,
        status: int,
        title: str,
        detail: str = "",
        *,
        type: str = "about:blank",
        field: str | None = None,
        value: Any = None,
        fix: str | None = None,
        errors: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.status = status
        self.title = title
        self.detail = detail
        self.type = type
        self.field = field
        self.value = value
        self.fix = fix
        self.errors = list(errors)
        self.is_temporary = status in BUSY and type != NO_ROOM
        super().__init__(status, title, detail)

    def __str__(self) -> str:
        if not self.errors:
            return _sentence(self.field, self.value, self.detail or self.title, self.fix)
        lines = [
            _sentence(
                error.get("field"),
                error.get("value"),
                str(error.get("wrong", "is refused")),
                error.get("fix"),
            )
            for error in self.errors
        ]
        return (
            lines[0]
            if len(lines) == 1
            else "\n  ".join((f"{self.title}: {len(lines)} problems", *lines))
        )


class WrongInput(ApiProblem):
    """400, 413, 415, 422: the request is wrong."""


class NotAllowed(ApiProblem):
    """401, 403: the token is missing or wrong, or its scope does not allow the call."""


class NotFound(ApiProblem):
    """404: there is no such run, recipe or path."""


class WrongState(ApiProblem):
    """409: the state of the run does not allow the call."""


PROBLEMS: dict[int, type[ApiProblem]] = {
    **dict.fromkeys((400, 413, 415, 422), WrongInput),
    **dict.fromkeys((401, 403), NotAllowed),
    404: NotFound,
    409: WrongState,
}


def problem_from(status: int, reason: str, content_type: str, body: bytes) -> ApiProblem:
    """Return the exception for an unsuccessful answer.

    Quotes a body that is not problem+json, such as a proxy's page.
    """
    kind = PROBLEMS.get(status, ApiProblem)
    if content_type == PROBLEM:
        with contextlib.suppress(ValueError, TypeError, AttributeError):
            problem = json.loads(body)
            details = {
                name: problem[name]
                for name in ("type", "field", "value", "fix")
                if problem.get(name) is not None
            }
            errors = [error for error in problem.get("errors") or () if isinstance(error, dict)]
            title = str(problem.get("title", reason))
            detail = str(problem.get("detail", ""))
            return kind(status, title, detail, **details, errors=errors)
    quoted = " ".join(body.decode(errors="replace").split())[:QUOTED]
    detail = f"{status} {reason}" + (f": {quoted}" if quoted else "")
    return kind(status, reason, detail, fix="this is not an answer of AsyncDock; check the address")


def _sentence(field: str | None, value: Any, wrong: str, fix: str | None) -> str:
    """Return ``field = value: wrong; fix``, without the parts that are missing or that ``wrong``
    already contains."""
    name = re.sub(r"^(path|query|header)\.", "", field or "")
    head = f"{name} = {json.dumps(value)}" if name and value is not None else name
    wrong = wrong if not fix else wrong.removesuffix(".")
    text = f"{head}: {wrong}" if head and not wrong.startswith(str(field)) else wrong
    return f"{text}; {fix}" if fix and fix not in text else text
