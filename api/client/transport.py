"""HTTP requests to a service, repeated while it cannot be reached or is busy.

    call ──▶ attempt ──▶ 2xx ──▶ the answer
               ▲  ├────▶ connection lost, 429, 503 ──▶ wait (doubling, with jitter, at least Retry-After) ─┐
               └──┼──────────────────────────────────────────────────────── within the patience ◀──────────┤
                  └────▶ anything else ──▶ ServiceError ◀───────────────────────── beyond the patience ◀───┘

Three libraries were tried for this and not taken. Downloads and small calls take longer with httpx
than with aiohttp (`benchmarks/flow/libraries.py`); httpx also takes a server that does not speak HTTP
for a lost connection, and httpx-sse needs it. stamina sleeps past its timeout when Retry-After is
longer, and reports every repeat through hooks of the whole process (by default a line on standard
output).
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import json
import os
import random
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

import aiohttp
from yarl import URL

from api.client.credentials import DEFAULT_SERVER, Credential, ServiceGone
from api.client.errors import NotAsyncDock, ServiceError, Unreachable, problem_from

# seconds between attempts: the first wait, and the longest one
FIRST_WAIT = 0.25
LONGEST_WAIT = 15.0
# seconds without a byte after which an event stream counts as lost: its heartbeats come every 10
SILENCE = 30.0
# bytes of a body that are given to the socket at once: a larger part would be copied while it waits
PIECE = 2**20

OnRetry = Callable[[ServiceError, float], None]
Query = Mapping[str, Any]


class Answer(NamedTuple):
    """A successful answer, read completely."""

    status: int
    media_type: str
    body: bytes


class Message(NamedTuple):
    """One server-sent event.

    ``id`` is the last one that was sent. A heartbeat has no data, and ``event`` is empty.
    """

    id: str
    event: str
    data: str


class Transport:
    """A sender of requests to ``server`` (``http://HOST:PORT`` or ``https://…``, with a path where
    a proxy adds one).

    ``token``: a bearer token; by default the one that commands use (:mod:`api.client.credentials`).
    ``timeout``: seconds for one attempt at a call. ``patience``: seconds for which a call, or a
    stream that has lost its connection, is repeated before it raises; 0 means one attempt.
    ``on_retry``: called with each failure that leads to another attempt, and the seconds until
    then.

    A transport belongs to the event loop in which it is first used.
    """

    def __init__(
        self,
        server: str = DEFAULT_SERVER,
        token: str | None = None,
        *,
        timeout: float = 30.0,
        patience: float = 60.0,
        on_retry: OnRetry | None = None,
    ) -> None:
        if token is not None and not re.fullmatch(r"[\x21-\x7e]+", token):
            raise ValueError(
                "token: is empty, or holds a space, a line end or another character "
                "that no token has"
            )
        self.server = checked_server(server)
        self.timeout = timeout
        self.patience = patience
        self.on_retry = on_retry
        self._credential = Credential(self.server, token)
        # belongs to the event loop in which it is first used
        self._session: aiohttp.ClientSession | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.server!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
        self._credential.close()

    async def send(
        self,
        method: str,
        path: str,
        query: Query | None = None,
        *,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        silence: float | None = None,
    ) -> Answer:
        """Return the answer.

        ``silence``: seconds without a byte that end an attempt, in place of ``timeout``. Raises
        ServiceError when the service refuses, or ``patience`` is over.
        """
        headers = dict(headers or {}) | ({"Content-Length": str(len(body))} if body else {})
        total = self.timeout if silence is None else None
        timeout = aiohttp.ClientTimeout(total, sock_connect=self.timeout, sock_read=silence)
        retries = Retries(self.patience, self.on_retry)
        while True:
            data = _pieces(body) if body else None
            try:
                async with self._attempt(
                    method, path, query, headers=headers, data=data, timeout=timeout
                ) as answer:
                    return Answer(answer.status, answer.content_type, await answer.read())
            except ServiceError as failure:
                await retries.wait(failure)

    async def send_json(
        self,
        method: str,
        path: str,
        value: Any,
        headers: Mapping[str, str] | None = None,
        **options: Any,
    ) -> Answer:
        """Send ``value`` as JSON. As :meth:`send` otherwise."""
        body = json.dumps(value, allow_nan=False).encode()
        kind = {"Content-Type": "application/json"}
        return await self.send(
            method, path, body=body, headers={**kind, **(headers or {})}, **options
        )

    async def stream(self, path: str, query: Query, after: str) -> AsyncGenerator[Message]:
        """Yield the server-sent events of one connection, from event id ``after`` on, until the
        connection ends."""
        headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": after} if after else {})
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self.timeout, sock_read=SILENCE)
        parser = SseParser()
        async with self._attempt("GET", path, query, headers=headers, timeout=timeout) as answer:
            if answer.content_type != "text/event-stream":
                raise self.not_understood(
                    path, f"it is {answer.content_type}, not text/event-stream"
                )
            async for chunk in answer.content.iter_any():
                for message in parser.feed(chunk):
                    yield message

    def not_understood(self, path: str, why: str) -> NotAsyncDock:
        return NotAsyncDock(
            f"{self.server} answered {path} in a way that this client does not know ({why}); "
            "check that the address is that of an AsyncDock service, and its version near this "
            "client's"
        )

    @contextlib.asynccontextmanager
    async def _attempt(
        self, method: str, path: str, query: Query | None, **options: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request once, and yield a successful answer before its body is read.

        Raises ServiceError.
        """
        if self._session is None:
            self._session = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar())
        parameters = {
            name: str(value)
            for name, value in (query or {}).items()
            if value is not None and value != ""
        }
        try:
            server, token = self._credential.find()
            if token is not None:
                options["headers"] = {
                    **(options.get("headers") or {}),
                    "Authorization": f"Bearer {token}",
                }
            url = URL(server + path, encoded=True).with_query(parameters)
            # Redirects are not followed: the token and the recipe are for this server alone.
            async with self._session.request(
                method, url, allow_redirects=False, **options
            ) as answer:
                if answer.status < 300:
                    yield answer
                    return
                if answer.status < 400:
                    to = answer.headers.get("Location", "nowhere")
                    raise NotAsyncDock(
                        f"{self.server} redirects {path} to {to}; give the address "
                        f"that answers itself"
                    )
                problem = problem_from(
                    answer.status, answer.reason or "", answer.content_type, await answer.read()
                )
                problem.retry_after = retry_after(answer.headers.get("Retry-After"), time.time())
                # A server that begins to listen lets its token be found a moment later.
                problem.is_temporary |= answer.status == 401 and self._credential.find() != (
                    server,
                    token,
                )
                raise problem
        except aiohttp.ClientConnectorCertificateError as error:
            reason = f"its certificate is not trusted ({error.certificate_error})"
            raise Unreachable(self.server, reason, is_temporary=False) from None
        except aiohttp.ClientSSLError as error:
            reason = (
                f"it does not speak TLS as https:// needs ({error}); if it listens without TLS, "
                f"write http://"
            )
            raise Unreachable(self.server, reason, is_temporary=False) from None
        except TimeoutError:
            limit: aiohttp.ClientTimeout = options["timeout"]
            raise Unreachable(
                self.server, f"no answer within {limit.total or limit.sock_read:g} s"
            ) from None
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            raise Unreachable(self.server, _reason(error)) from None
        except ServiceGone as gone:
            raise Unreachable(self.server, str(gone)) from None
        except aiohttp.ClientError as error:
            raise NotAsyncDock(
                f"{self.server} does not answer as a web server ({error}); check the address"
            ) from None


class SseParser:
    """Parser of server-sent events (WHATWG HTML, 9.2.6) from bytes that are cut anywhere.

    An event is complete with its empty line: what a lost connection leaves before that is dropped.

    >>> parser = SseParser()
    >>> [*parser.feed(b"id: 1-0\\nevent: step\\ndata: {"), *parser.feed(b"}\\n\\n")]
    [Message(id='1-0', event='step', data='{}')]
    """

    # A carriage return at the very end may be half of a line's end.
    _line_end = re.compile(rb"\r\n|\n|\r(?!\Z)")

    def __init__(self) -> None:
        self._rest = b""
        self._id = ""
        self._event = ""
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> Iterator[Message]:
        """Yield the events that ``chunk`` completes."""
        *lines, self._rest = self._line_end.split(self._rest + chunk)
        for line in lines:
            if line:
                self._field(line.decode(errors="replace"))
                continue
            yield Message(
                self._id, (self._event or "message") if self._data else "", "\n".join(self._data)
            )
            self._event = ""
            self._data = []

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


class Retries:
    """The waits between the attempts of one call. Attempts count from the last :meth:`restart`."""

    def __init__(self, patience: float, on_retry: OnRetry | None) -> None:
        self._patience = patience
        self._on_retry = on_retry
        self.restart()

    def restart(self) -> None:
        """Treat the next failure as the first one: the call has made progress."""
        self._since: float | None = None
        self._attempt = 0

    async def wait(self, failure: ServiceError) -> None:
        """Sleep until the next attempt.

        Raises ``failure`` when another attempt cannot help, or comes later than ``patience``
        seconds after the first failure.
        """
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        seconds = max(failure.retry_after, backoff(self._attempt, random.random()))
        if not failure.is_temporary or now + seconds - self._since > self._patience:
            raise failure
        if self._on_retry is not None:
            self._on_retry(failure, seconds)
        self._attempt += 1
        await asyncio.sleep(seconds)


async def _pieces(body: bytes) -> AsyncGenerator[bytes]:
    for start in range(0, len(body), PIECE):
        yield body[start : start + PIECE]


def backoff(attempt: int, share: float) -> float:
    """Return the seconds to wait after failed attempt ``attempt`` (from 0): doubling, and spread by
    ``share`` in [0, 1), so that clients which lost the same server do not all return at the same
    moment.

    >>> backoff(0, 0.0), backoff(0, 1.0), backoff(3, 1.0), backoff(40, 1.0)
    (0.125, 0.25, 2.0, 15.0)
    """
    return min(LONGEST_WAIT, FIRST_WAIT * 2.0 ** min(attempt, 30)) * (0.5 + share / 2)


def retry_after(value: str | None, now: float) -> float:
    """Return the seconds that a Retry-After header asks for: a number, or a date against Unix time
    ``now``. 0 for any other value.

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
    """Return ``server`` without a slash at its end.

    Raises ValueError with the fix when it is not an address.
    """
    try:
        parts = urlsplit(server.strip())
        is_port = parts.port is None or parts.port > 0
    except ValueError:
        is_port = False
    if not is_port or parts.scheme not in ("http", "https") or not parts.hostname:
        fix = "write it as http://HOST:PORT or https://HOST"
        raise ValueError(f"server = {server!r}: is not the address of a service; {fix}")
    if parts.query or parts.fragment or parts.username or parts.password:
        raise ValueError(
            "server: holds more than an address (a user, a password, a query); pass "
            "the token separately"
        )
    return server.strip().rstrip("/")


def _reason(error: aiohttp.ClientError) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno  # name resolution has its own numbers, below 0
        return (
            os.strerror(number)
            if number and number > 0
            else error.os_error.strerror or str(error.os_error)
        )
    return str(error) or "the connection was lost"
