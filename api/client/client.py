"""The service from Python: :class:`Client` for asyncio, :class:`SyncClient` for everything else, notebooks included.

    call ──▶ request ──▶ 2xx ──▶ the model of api.schemas.runs
               ▲  ├────▶ connection lost, 429, 503 ──▶ wait (doubling, with jitter, at least Retry-After) ─┐  patience over:
               │  │                                                                                       ├─▶ the failure
               └──┼───────────────────────────────────────────────────────────────────────────────────────┘
                  └────▶ anything else ──▶ ApiProblem

    events ──▶ stream after Last-Event-ID ──▶ whole events, each once ──▶ the caller
               ▲      ├─▶ "end" ──▶ done
               └──────┴─▶ lost, silent, or "dropped" ──▶ wait, as above

A submission carries an Idempotency-Key, so that one whose answer was lost can be repeated and still starts one run. An
event's id is its place in the run's stream: the client asks for what comes after the last whole event that it gave out,
and leaves out what is not after it, so none is lost and none comes twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import itertools
import json
import os
import random
import re
import threading
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar
from urllib.parse import quote, urlsplit

import aiohttp
from pydantic import BaseModel, ValidationError
from yarl import URL

from api.client.credentials import DEFAULT_SERVER
from api.schemas.runs import (
    CheckedRecipe,
    CheckpointsView,
    CheckpointView,
    MetricsView,
    RecipeSummary,
    RecipesView,
    RunPage,
    RunView,
    SamplePage,
    SampleView,
    StagesView,
    StoredRecipe,
)
from api.telemetry.progress import ENDED

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)

FIRST_WAIT, LONGEST_WAIT = 0.25, 15.0  # seconds between attempts: the first wait, and where doubling ends
SILENCE = 30.0  # seconds without a byte after which a stream is taken for lost: its heartbeats come every 10
HEALTHY = 10.0  # seconds that a stream has lasted when its loss is a new one, and patience for it begins anew
PAGE = 100  # entries asked for at once where a method reads pages
BUSY = (429, 503)
QUOTED = 300  # characters of an answer that is not AsyncDock's which an error repeats


# ---------------------------------------------------------------------------------------------------------------------
# What goes wrong


class ServiceError(Exception):
    """The base of all that calls raise."""


class Unreachable(ServiceError, ConnectionError):
    """No whole answer came from ``server`` within the client's patience."""

    def __init__(self, server: str, why: str) -> None:
        self.server, self.why = server, why
        super().__init__(f"{server} cannot be reached: {why}")


class NotAsyncDock(ServiceError):
    """Something answered, but not as an AsyncDock service of this version does."""


class ApiProblem(ServiceError):
    """The service refused: an RFC 9457 problem. ``field`` and ``value`` are what is wrong, ``fix`` what to do; ``errors``
    are all that is wrong (tables with ``field``, ``value``, ``wrong``, ``fix``)."""

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
        self.status, self.title, self.detail, self.type = status, title, detail, type
        self.field, self.value, self.fix, self.errors = field, value, fix, list(errors)
        super().__init__(status, title, detail)

    def __str__(self) -> str:
        if not self.errors:
            return _sentence(self.field, self.value, self.detail or self.title, self.fix)
        told = [
            _sentence(one.get("field"), one.get("value"), str(one.get("wrong", "is refused")), one.get("fix"))
            for one in self.errors
        ]
        return told[0] if len(told) == 1 else "\n  ".join((f"{self.title}: {len(told)} problems", *told))


class WrongInput(ApiProblem):
    """400, 413, 415, 422: what was sent is wrong."""


class NotAllowed(ApiProblem):
    """401, 403: no token, a wrong one, or one whose scope does not reach."""


class NotFound(ApiProblem):
    """404: there is no such run, recipe or path."""


class WrongState(ApiProblem):
    """409: not in the state that the run is in."""


PROBLEMS: dict[int, type[ApiProblem]] = {
    **dict.fromkeys((400, 413, 415, 422), WrongInput),
    **dict.fromkeys((401, 403), NotAllowed),
    404: NotFound,
    409: WrongState,
}


def _sentence(field: str | None, value: Any, wrong: str, fix: str | None) -> str:
    """``field = value: wrong; fix``, as far as the parts are there and not said already."""
    name = re.sub(r"^(path|query|header)\.", "", field or "")
    head = f"{name} = {json.dumps(value)}" if name and value is not None else name
    wrong = wrong if not fix else wrong.removesuffix(".")
    text = f"{head}: {wrong}" if head and not wrong.startswith(str(field)) else wrong
    return f"{text}; {fix}" if fix and fix not in text else text


def problem_from(status: int, reason: str, content_type: str, body: bytes) -> ApiProblem:
    """The exception for an answer that is no success. What is not problem+json (a proxy's page, say) is quoted."""
    kind = PROBLEMS.get(status, ApiProblem)
    if content_type == "application/problem+json":
        with contextlib.suppress(ValueError, TypeError):
            told = json.loads(body)
            known = {name: told[name] for name in ("type", "field", "value", "fix") if told.get(name) is not None}
            errors = [error for error in told.get("errors") or () if isinstance(error, dict)]
            return kind(status, str(told.get("title", reason)), str(told.get("detail", "")), **known, errors=errors)
    quoted = " ".join(body.decode(errors="replace").split())[:QUOTED]
    detail = f"{status} {reason}" + (f": {quoted}" if quoted else "")
    return kind(status, reason, detail, fix="this is no answer of AsyncDock; see whether the address is right")


# ---------------------------------------------------------------------------------------------------------------------
# Events


@dataclass(frozen=True)
class RunEvent:
    """One entry of a run's event stream: ``time`` in Unix seconds; ``id`` says where to go on (``events(after=id)``)."""

    id: str
    time: float
    kind: str
    data: Mapping[str, Any]


class Message(NamedTuple):
    """One server-sent event. ``id`` is the last one told so far. One without data, which is no event but may tell an id, has
    ``event`` empty."""

    id: str
    event: str
    data: str


class SseParser:
    """Server-sent events (WHATWG HTML, 9.2.6) out of bytes that are cut anywhere. An event counts once its empty line has
    come: what a lost connection leaves half said is not an event.

    >>> parser = SseParser()
    >>> [*parser.feed(b"id: 1-0\\nevent: step\\ndata: {"), *parser.feed(b"}\\n\\n")]
    [Message(id='1-0', event='step', data='{}')]
    """

    # A carriage return at the very end may be half of a line's end.
    _line_end = re.compile(rb"\r\n|\n|\r(?!\Z)")

    def __init__(self) -> None:
        self._rest, self._id, self._event = b"", "", ""
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> Iterator[Message]:
        *lines, self._rest = self._line_end.split(self._rest + chunk)
        for line in lines:
            if line:
                self._field(line.decode(errors="replace"))
                continue
            yield Message(self._id, (self._event or "message") if self._data else "", "\n".join(self._data))
            self._event, self._data = "", []

    def _field(self, line: str) -> None:
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        match name:
            case "id":
                self._id = value
            case "event":
                self._event = value
            case "data":
                self._data.append(value)


def _place(event_id: str) -> tuple[int, int]:
    """An event's id, ``MILLISECONDS-NUMBER``, as what it is ordered by; "" is before all. Raises ValueError."""
    milliseconds, _, number = event_id.partition("-")
    return int(milliseconds or -1), int(number or 0)


# ---------------------------------------------------------------------------------------------------------------------
# The client


class _Answer(NamedTuple):
    status: int
    body: bytes


class Client:
    """An AsyncDock service at ``server`` (``http://HOST:PORT`` or ``https://…``, with a path where a proxy adds one).

    ``token``: a bearer token, needed unless the service listens on loopback only. ``timeout``: seconds for one attempt at a
    call. ``patience``: seconds for which a call, or a stream that has lost its connection, is tried again before it raises;
    0 means one attempt. ``on_retry`` is told each failure that is tried again, and the seconds until then.

    Calls raise :class:`ApiProblem` and its kinds, :class:`Unreachable` and :class:`NotAsyncDock`. A client belongs to the
    event loop in which it is first used; close it, or use it as ``async with Client(...) as client``.
    """

    def __init__(
        self,
        server: str = DEFAULT_SERVER,
        token: str | None = None,
        *,
        timeout: float = 30.0,
        patience: float = 60.0,
        on_retry: Callable[[ServiceError, float], None] | None = None,
    ) -> None:
        self.server, self.timeout, self.patience, self.on_retry = checked_server(server), timeout, patience, on_retry
        if token is not None and not re.fullmatch(r"[\x21-\x7e]+", token):
            raise ValueError("token: is empty, or holds a space, a line's end or another character that no token has")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._session: aiohttp.ClientSession | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.server!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    # --- recipes

    async def recipes(self) -> list[RecipeSummary]:
        """What the service has to run by name."""
        return (await self._get(RecipesView, "/v1/recipes")).recipes

    async def recipe(self, name: str) -> StoredRecipe:
        return await self._get(StoredRecipe, f"/v1/recipes/{_part('recipe', name)}")

    async def check(self, recipe: str | Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> CheckedRecipe:
        """What would follow from ``recipe`` (as for :meth:`submit`), or everything that is wrong with it; starts nothing."""
        return await self._post(CheckedRecipe, "/v1/recipes/check", submission(recipe, overrides))

    # --- runs

    async def submit(
        self,
        recipe: str | Mapping[str, Any],
        overrides: Mapping[str, Any] | None = None,
        *,
        key: str | None = None,
    ) -> RunView:
        """A new run of ``recipe``: the name of one that the service has, or its tables. ``overrides`` by dotted key, as
        ``{"train.steps": 10}``. Repeating a submission with the same ``key`` gives the run that the first one made."""
        headers = {"Idempotency-Key": key or uuid.uuid4().hex}
        return await self._post(RunView, "/v1/runs", submission(recipe, overrides), headers)

    async def runs(
        self, *, state: str = "", name: str = "", owner: str = "", limit: int | None = None
    ) -> AsyncGenerator[RunView]:
        """Runs, newest first, page by page as they are asked for; at most ``limit``. Filters that are empty let all by."""
        query: dict[str, Any] = {"state": state, "name": name, "owner": owner, "limit": min(limit or PAGE, PAGE)}
        left = limit
        while left is None or left > 0:
            page = await self._get(RunPage, "/v1/runs", query)
            for run in page.runs[:left]:
                yield run
            if not page.next:
                return
            query["after"] = page.next
            left = None if left is None else left - len(page.runs)

    async def run(self, run: str) -> RunView:
        return await self._get(RunView, self._run(run))

    async def pause(self, run: str) -> RunView:
        """Ask for no more samples to begin; what is in flight ends. Harmless when it is paused already."""
        return await self._post(RunView, self._run(run, "pause"))

    async def resume(self, run: str) -> RunView:
        return await self._post(RunView, self._run(run, "resume"))

    async def stop(self, run: str) -> RunView:
        """Ask for a clean end, with a checkpoint. A run that still waits is stopped at once."""
        return await self._post(RunView, self._run(run, "stop"))

    async def checkpoint(self, run: str) -> RunView:
        """Ask for a checkpoint after the next step."""
        return await self._post(RunView, self._run(run, "checkpoint"))

    async def delete(self, run: str) -> None:
        """Remove an ended run, its data and its files."""
        await self.run(
            run
        )  # NotFound, if so; from here on that means that it is removed, by an attempt whose answer was lost
        with contextlib.suppress(NotFound):
            await self._send("DELETE", self._run(run))

    # --- of one run

    async def stages(self, run: str) -> StagesView:
        """Queues, workers, leases and the ledger, now."""
        return await self._get(StagesView, self._run(run, "stages"))

    async def samples(
        self,
        run: str,
        *,
        step: int | None = None,
        reward_min: float | None = None,
        reward_max: float | None = None,
        staleness_min: int | None = None,
        limit: int | None = None,
    ) -> AsyncGenerator[SampleView]:
        """Trained samples that fit the filters, page by page as they are asked for; at most ``limit``."""
        query: dict[str, Any] = {"step": step, "reward_min": reward_min, "reward_max": reward_max}
        query |= {"staleness_min": staleness_min, "limit": min(limit or PAGE, PAGE)}
        left = limit
        while left is None or left > 0:
            page = await self._get(SamplePage, self._run(run, "samples"), query)
            for sample in page.samples[:left]:
                yield sample
            if not page.next:
                return
            query["after"] = page.next
            left = None if left is None else left - len(page.samples)

    async def checkpoints(self, run: str) -> list[CheckpointView]:
        return (await self._get(CheckpointsView, self._run(run, "checkpoints"))).checkpoints

    async def logs(self, run: str, *, worker: str = "", lines: int = 200) -> str:
        """The last ``lines`` lines, of one worker or of all."""
        answer = await self._send("GET", self._run(run, "logs"), {"worker": worker, "lines": lines})
        return answer.body.decode(errors="replace")

    async def metrics(
        self,
        run: str,
        *,
        from_: float | None = None,
        to: float | None = None,
        every: float | None = None,
        names: Sequence[str] = (),
    ) -> MetricsView:
        """The history between two times (Unix seconds), one point for ``every`` seconds; ``names`` of series and numbers, as
        ``step.reward_mean``."""
        query = {"from": from_, "to": to, "every": every, "names": ",".join(names)}
        return await self._get(MetricsView, self._run(run, "metrics"), query)

    async def trace(self, run: str) -> dict[str, Any]:
        """A Chrome trace of every stage's spans, for Perfetto or chrome://tracing."""
        answer = await self._send("GET", self._run(run, "trace"))
        try:
            return dict(json.loads(answer.body))
        except ValueError:
            raise self._not_understood(self._run(run, "trace"), "no JSON") from None

    async def events(self, run: str, *, after: str = "", kinds: Sequence[str] = ()) -> AsyncGenerator[RunEvent]:
        """Every event of ``run`` after the id ``after`` (from its beginning by default), as they come; ends after the
        run's last. Connections may be lost in between: no event is, and none comes twice. ``kinds`` as ``("step",)``.

        Iterate it to its end, or in ``contextlib.aclosing``, which ends the connection when you leave the loop."""
        path = self._run(run, "metrics/stream")
        failing_since: float | None = None
        attempt = 0
        while True:
            opened: float | None = None
            try:
                async with contextlib.aclosing(self._stream(path, after, kinds)) as messages:
                    async for message in messages:
                        opened = opened or time.monotonic()
                        match message.event:
                            case "end":
                                return
                            case "dropped":
                                raise _Again(Unreachable(self.server, f"it dropped the stream ({message.data})"))
                            case "":  # a sign of life, with the place up to which there is nothing of these kinds
                                after = max(after, message.id, key=_place)
                                continue
                        event = self._event(path, message)
                        if _place(event.id) <= _place(after):
                            continue
                        after, failing_since, attempt = event.id, None, 0
                        yield event
                raise _Again(Unreachable(self.server, "the stream broke off"))
            except _Again as again:
                failed = again
            if opened is not None and time.monotonic() - opened > HEALTHY:
                failing_since, attempt = None, 0
            failing_since = time.monotonic() if failing_since is None else failing_since
            await self._wait(failed.failure, attempt, failed.least, failing_since)
            attempt += 1

    async def wait_until_ended(self, run: str, timeout: float | None = None) -> RunView:
        """The run once it is finished, stopped or failed. Raises TimeoutError after ``timeout`` seconds."""
        async with asyncio.timeout(timeout):
            after = ""
            while True:
                view = await self.run(run)
                if view.state in ENDED:
                    return view
                async with contextlib.aclosing(self.events(run, after=after, kinds=("state",))) as events:
                    async for event in events:
                        after = event.id

    # --- requests

    @staticmethod
    def _run(run: str, what: str = "") -> str:
        return f"/v1/runs/{_part('run', run)}" + (f"/{what}" if what else "")

    async def _get(self, model: type[M], path: str, query: Mapping[str, Any] | None = None) -> M:
        return self._read(model, path, await self._send("GET", path, query))

    async def _post(self, model: type[M], path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> M:
        return self._read(model, path, await self._send("POST", path, body=body, headers=headers))

    def _read(self, model: type[M], path: str, answer: _Answer) -> M:
        try:
            return model.model_validate_json(answer.body)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise self._not_understood(path, f"{where}: {first['msg']}" if where else first["msg"]) from None

    def _not_understood(self, path: str, why: str) -> NotAsyncDock:
        return NotAsyncDock(
            f"{self.server} answered {path} in a way that this client does not know ({why}); "
            "see whether the address is that of an AsyncDock service, and its version near this client's"
        )

    async def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any] | None = None,
        *,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> _Answer:
        """One call, tried until it is answered or refused, or ``patience`` is over."""
        began = time.monotonic()
        content = None if body is None else json.dumps(body, allow_nan=False).encode()
        sent = dict(headers or {}) | ({"Content-Type": "application/json"} if content is not None else {})
        limit = aiohttp.ClientTimeout(total=self.timeout)
        for attempt in itertools.count():
            try:
                async with self._request(method, path, query, data=content, headers=sent, timeout=limit) as answer:
                    return _Answer(answer.status, await answer.read())
            except _Again as failed:
                await self._wait(failed.failure, attempt, failed.least, began)
        raise AssertionError("unreachable")

    async def _stream(self, path: str, after: str, kinds: Sequence[str]) -> AsyncGenerator[Message]:
        """The messages of one connection, until it ends."""
        headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": after} if after else {})
        limit = aiohttp.ClientTimeout(total=None, sock_connect=self.timeout, sock_read=SILENCE)
        query = {"kinds": ",".join(kinds)}
        parser = SseParser()
        async with self._request("GET", path, query, headers=headers, timeout=limit) as answer:
            if answer.content_type != "text/event-stream":
                raise self._not_understood(path, f"it is {answer.content_type}, no text/event-stream")
            async for chunk in answer.content.iter_any():
                for message in parser.feed(chunk):
                    try:
                        _place(message.id)
                    except ValueError:
                        raise self._not_understood(path, f"{message.id!r} is no event's id") from None
                    yield message

    def _event(self, path: str, message: Message) -> RunEvent:
        try:
            data = json.loads(message.data)
            when = data.pop("time")
            return RunEvent(message.id, float(when), message.event, data)
        except (ValueError, TypeError, KeyError, AttributeError):
            raise self._not_understood(path, f"an event that is none: {message!r:.200}") from None

    @contextlib.asynccontextmanager
    async def _request(
        self, method: str, path: str, query: Mapping[str, Any] | None, **options: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """One attempt. Raises :class:`_Again` for what another one may mend, and the problem for what it cannot."""
        if self._session is None:
            # A redirect is not followed: the token and the recipe are for this server.
            self._session = aiohttp.ClientSession(headers=self._headers, cookie_jar=aiohttp.DummyCookieJar())
        told = {name: str(value) for name, value in (query or {}).items() if value is not None and value != ""}
        url = URL(self.server + path, encoded=True).with_query(told)
        try:
            async with self._session.request(method, url, allow_redirects=False, **options) as answer:
                if answer.status < 300:
                    yield answer
                    return
                if answer.status < 400:
                    to = answer.headers.get("Location", "nowhere")
                    raise NotAsyncDock(f"{self.server} sends {path} on to {to}; give the address that answers itself")
                problem = problem_from(answer.status, answer.reason or "", answer.content_type, await answer.read())
                if answer.status in BUSY:
                    raise _Again(problem, retry_after(answer.headers.get("Retry-After"), time.time()))
                raise problem
        except aiohttp.ClientConnectorCertificateError as error:  # it does not get better by asking again
            raise Unreachable(self.server, f"its certificate is not trusted ({error.certificate_error})") from None
        except aiohttp.ClientSSLError as error:
            why = f"it does not speak TLS as https:// needs ({error}); if it listens without TLS, write http://"
            raise Unreachable(self.server, why) from None
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError) as error:
            raise _Again(Unreachable(self.server, _why(error, self.timeout))) from None
        except aiohttp.ClientError as error:
            raise NotAsyncDock(
                f"{self.server} does not answer as a web server ({error}); see whether the address is right"
            ) from None

    async def _wait(self, failure: ServiceError, attempt: int, least: float, since: float) -> None:
        """Sleep before the next attempt, or raise ``failure`` if that were later than ``patience`` after ``since``."""
        seconds = max(least, backoff(attempt, random.random()))
        if time.monotonic() + seconds - since > self.patience:
            raise failure
        if self.on_retry is not None:
            self.on_retry(failure, seconds)
        await asyncio.sleep(seconds)


class _Again(Exception):
    """An attempt failed as another one may not, ``least`` seconds from now at the earliest."""

    def __init__(self, failure: ServiceError, least: float = 0.0) -> None:
        self.failure, self.least = failure, least


def backoff(attempt: int, share: float) -> float:
    """Seconds to wait after failed attempt ``attempt`` (from 0): doubling, and spread by ``share`` in [0, 1), so that
    clients which lost the same server do not all come back at once.

    >>> backoff(0, 0.0), backoff(0, 1.0), backoff(3, 1.0), backoff(40, 1.0)
    (0.125, 0.25, 2.0, 15.0)
    """
    return min(LONGEST_WAIT, FIRST_WAIT * 2.0 ** min(attempt, 30)) * (0.5 + share / 2)


def retry_after(value: str | None, now: float) -> float:
    """Seconds that a Retry-After header asks for (a number, or a date against Unix time ``now``); 0 when it says nothing.

    >>> retry_after("3", 0.0), retry_after("Thu, 01 Jan 1970 00:01:00 GMT", 20.0), retry_after("soon", 0.0)
    (3.0, 40.0, 0.0)
    """
    if value is None:
        return 0.0
    if value.strip().isascii() and value.strip().isdigit():
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - now)
    except ValueError:
        return 0.0


def checked_server(server: str) -> str:
    """``server`` without a slash at its end. Raises ValueError with the fix."""
    try:
        parts = urlsplit(server.strip())
        port_is_sound = parts.port is None or parts.port > 0
    except ValueError:
        port_is_sound = False
    fix = "write it as http://HOST:PORT or https://HOST"
    if not port_is_sound or parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"server = {server!r}: is not the address of a service; {fix}")
    if parts.query or parts.fragment or parts.username or parts.password:
        raise ValueError("server: holds more than an address (a user, a password, a query); give the token by itself")
    return server.strip().rstrip("/")


def submission(recipe: str | Mapping[str, Any], overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    """The body of a submission or a check."""
    given: dict[str, Any] = {"recipe_name": recipe} if isinstance(recipe, str) else {"recipe": dict(recipe)}
    return given | ({"overrides": dict(overrides)} if overrides else {})


def _part(name: str, value: str) -> str:
    if not value or value in (".", ".."):
        raise ValueError(f"{name} = {value!r}: names nothing")
    return quote(value, safe="")


def _why(error: BaseException, timeout: float) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {timeout:g} s"
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno  # of a name that does not resolve it is none of the system's, and below 0
        return os.strerror(number) if number and number > 0 else error.os_error.strerror or str(error.os_error)
    return str(error) or "the connection was lost"


# ---------------------------------------------------------------------------------------------------------------------
# Without asyncio


class SyncClient:
    """:class:`Client` with plain calls: the same methods, and iterators where it has async ones. Its event loop runs in a
    thread of its own, so it works where another loop runs already, as in a notebook, and from several threads at once.
    Close it, or use it as ``with SyncClient(...) as client``."""

    def __init__(
        self,
        server: str = DEFAULT_SERVER,
        token: str | None = None,
        *,
        timeout: float = 30.0,
        patience: float = 60.0,
        on_retry: Callable[[ServiceError, float], None] | None = None,
    ) -> None:
        self._client = Client(server, token, timeout=timeout, patience=patience, on_retry=on_retry)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="asyncdock-client", daemon=True)
        self._thread.start()

    @property
    def server(self) -> str:
        return self._client.server

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.server!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if not self._thread.is_alive():
            return
        self._call(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def recipes(self) -> list[RecipeSummary]:
        return self._call(self._client.recipes())

    def recipe(self, name: str) -> StoredRecipe:
        return self._call(self._client.recipe(name))

    def check(self, recipe: str | Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> CheckedRecipe:
        return self._call(self._client.check(recipe, overrides))

    def submit(
        self,
        recipe: str | Mapping[str, Any],
        overrides: Mapping[str, Any] | None = None,
        *,
        key: str | None = None,
    ) -> RunView:
        return self._call(self._client.submit(recipe, overrides, key=key))

    def runs(self, *, state: str = "", name: str = "", owner: str = "", limit: int | None = None) -> Iterator[RunView]:
        return self._iterate(self._client.runs(state=state, name=name, owner=owner, limit=limit))

    def run(self, run: str) -> RunView:
        return self._call(self._client.run(run))

    def pause(self, run: str) -> RunView:
        return self._call(self._client.pause(run))

    def resume(self, run: str) -> RunView:
        return self._call(self._client.resume(run))

    def stop(self, run: str) -> RunView:
        return self._call(self._client.stop(run))

    def checkpoint(self, run: str) -> RunView:
        return self._call(self._client.checkpoint(run))

    def delete(self, run: str) -> None:
        self._call(self._client.delete(run))

    def stages(self, run: str) -> StagesView:
        return self._call(self._client.stages(run))

    def samples(
        self,
        run: str,
        *,
        step: int | None = None,
        reward_min: float | None = None,
        reward_max: float | None = None,
        staleness_min: int | None = None,
        limit: int | None = None,
    ) -> Iterator[SampleView]:
        samples = self._client.samples(
            run, step=step, reward_min=reward_min, reward_max=reward_max, staleness_min=staleness_min, limit=limit
        )
        return self._iterate(samples)

    def checkpoints(self, run: str) -> list[CheckpointView]:
        return self._call(self._client.checkpoints(run))

    def logs(self, run: str, *, worker: str = "", lines: int = 200) -> str:
        return self._call(self._client.logs(run, worker=worker, lines=lines))

    def metrics(
        self,
        run: str,
        *,
        from_: float | None = None,
        to: float | None = None,
        every: float | None = None,
        names: Sequence[str] = (),
    ) -> MetricsView:
        return self._call(self._client.metrics(run, from_=from_, to=to, every=every, names=names))

    def trace(self, run: str) -> dict[str, Any]:
        return self._call(self._client.trace(run))

    def events(self, run: str, *, after: str = "", kinds: Sequence[str] = ()) -> Iterator[RunEvent]:
        return self._iterate(self._client.events(run, after=after, kinds=kinds))

    def wait_until_ended(self, run: str, timeout: float | None = None) -> RunView:
        return self._call(self._client.wait_until_ended(run, timeout))

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        if not self._thread.is_alive():
            work.close()
            raise RuntimeError("this client is closed; make a new one")
        over = threading.Event()

        async def told() -> T:
            try:
                return await work
            finally:
                over.set()

        future = asyncio.run_coroutine_threadsafe(told(), self._loop)
        try:
            return future.result()
        except BaseException:  # Ctrl-C among them: the call must not go on unseen
            future.cancel()
            over.wait(self._client.timeout)
            raise

    def _iterate(self, items: AsyncGenerator[T]) -> Iterator[T]:
        async def following() -> tuple[T, ...]:
            async for item in items:
                return (item,)
            return ()

        try:
            while found := self._call(following()):
                yield found[0]
        finally:
            if self._thread.is_alive():
                self._call(items.aclose())
