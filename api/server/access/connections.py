"""Limits of the number of the server's connections, and of the time that each may wait for its
client.

    accept ──▶ is there room? ──no──▶ close the connection that has waited longest for its client ──none waits──▶ 503
                 └yes─▶ Connection: headers within `header_seconds`, written bytes read within WRITE_SECONDS

A connection waits for its client while the headers or the body of a request are incomplete, between
two requests, and while the client does not read what was written. Such connections cost a client
nothing, so they are closed first. A request that is being handled, or a stream that is read, is
never closed to make room.
"""

from __future__ import annotations

import asyncio
import math
import resource
import socket
import ssl
from collections import Counter, OrderedDict
from typing import Any

import structlog
from aiohttp import HttpVersion10, HttpVersion11, web
from aiohttp.http_exceptions import (
    BadHttpMethod,
    BadStatusLine,
    HttpProcessingError,
    InvalidHeader,
    LineTooLong,
)
from aiohttp.streams import StreamReader

from api.server.access.limits import SECURITY_HEADERS, client_of
from api.server.access.settings import Settings
from api.server.http.problems import MEDIA_TYPE, HTTPProblem, problem_of

log = structlog.get_logger()

BACKLOG = 1024  # for readers that reconnect all at once after a restart
MOST_CONNECTIONS = 4096  # by default, whatever the limit of open files
MOST_DESCRIPTORS = 65_536  # to which the process raises its own limit
ACCEPTED_AT_ONCE = 32  # connections, before other events are handled
SURPLUS = 16  # connections past the limit whose requests are answered 503; further ones are closed
WRITE_SECONDS = 60.0  # in which a client has to read some of what was written
LINGER_SECONDS = 1.0  # for which data of a refused client is still read, so that it gets the answer
SWEEP_SECONDS = 1.0
PAUSE_SECONDS = 0.1  # without accepting, when the process has no descriptor left
VERSIONS = (HttpVersion11, HttpVersion10)


def raise_descriptor_limit() -> None:
    """Raise the limit of open files of this process and its children as far as allowed, at most to
    MOST_DESCRIPTORS."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))


def most_connections(settings: Settings, descriptors: int) -> tuple[int, int]:
    """Return the limits of connections, in all and of one address, for a process that may open
    ``descriptors`` files. A quarter of these, at least 64, is reserved for other files. Raises
    ValueError when the settings ask for more.

    >>> [most_connections(Settings(data="."), descriptors) for descriptors in (256, 1024, 20_000)]
    [(192, 168), (768, 672), (4096, 3584)]
    """
    room = descriptors - max(64, descriptors // 4)
    total = settings.max_connections or min(room, MOST_CONNECTIONS)
    if total > room or room < 1:
        descriptors_needed = max(total + 64, math.ceil(total * 4 / 3))
        raise ValueError(
            f"max_connections: {total} need {descriptors_needed} file descriptors, and this "
            f"process may open {descriptors}; raise the limit (`ulimit -n {descriptors_needed}`), "
            f"or give --max-connections {max(1, room)}"
        )
    return total, min(total, settings.max_connections_per_address or total - total // 8)


def _version_problem() -> HTTPProblem:
    return HTTPProblem(
        505,
        "Only HTTP/1.1 and HTTP/1.0 are spoken here.",
        kind="http",
        fix="send METHOD PATH HTTP/1.1",
    )


def _too_many() -> HTTPProblem:
    headers = {"Retry-After": "1"}
    return HTTPProblem(
        503, "Too many connections.", kind="connections", fix="try again", headers=headers
    )


class _NoRequest(web.Response):
    """The answer to data that is not an HTTP request; :meth:`Connection.send` writes it."""

    def __init__(self, problem: HTTPProblem) -> None:
        super().__init__(status=problem.status)
        self.problem = problem


class Connection(web.RequestHandler):
    """A connection from the client ``host``.

    The requests of a ``surplus`` connection, past the limit, are refused.
    """

    def __init__(
        self, server: web.Server, connections: Connections, host: str, surplus: bool, **options: Any
    ) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), **options)
        self.connections = connections
        self.host = host
        self.surplus = surplus
        self.between_requests = True  # no byte of the next one has arrived
        self.body: StreamReader | None = None  # of the current request, while it is incomplete
        self.ended = self._loop.create_future()

    def connection_lost(self, error: BaseException | None) -> None:
        super().connection_lost(error)
        if not self.ended.done():
            self.ended.set_result(None)
        self.connections.forget(self)

    def data_received(self, data: bytes) -> None:
        if self.between_requests and data:
            self.between_requests = False
            self.connections.waits(self, self.connections.header_seconds)
        elif self.body is not None:
            self.connections.waits(self)  # moves to the end of the queue
        super().data_received(data)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.connections.stalls(self)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.connections.flows(self)

    def begin(self, request: web.Request) -> None:
        """Note that the headers of ``request`` are complete: the connection handles it from now
        on."""
        self.between_requests = False
        self.connections.works(self)
        if not request.content.is_eof():
            self.body = request.content
            self.connections.waits(self)
            request.content.on_eof(lambda: self._body_ended(request.content))

    def _body_ended(self, body: StreamReader) -> None:
        if self.body is body:
            self.body = None
            self.connections.works(self)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send an answer; aiohttp's own error pages become problems."""
        if isinstance(resp, web.HTTPException):
            resp = problem_of(resp).response()
        if request.version not in VERSIONS:
            resp = _NoRequest(_version_problem())
        if isinstance(resp, _NoRequest):
            await self._refuse(resp.problem)
            return resp, True
        if self.surplus:
            resp.force_close()
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            self.body = None
            self.between_requests = True
            self.connections.waits(self)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer data that is not HTTP, and a failure outside of the middlewares.

        Raises ConnectionError, which ends the connection, when an answer has begun.
        """
        if request.writer.output_size > 0:
            if isinstance(exc, Exception) and not isinstance(exc, HTTPProblem | ConnectionError):
                log.error("an answer broke off", error=type(exc).__name__, exc_info=exc)
            raise ConnectionError("an answer broke off")
        if isinstance(exc, HttpProcessingError):
            return _NoRequest(_malformed(exc))
        return _NoRequest(
            problem_of(exc)
            if isinstance(exc, Exception)
            else HTTPProblem(status, "The request failed.")
        )

    def log_exception(self, *args: Any, **options: Any) -> None:
        """Log the server's own errors only: a client's request may contain a token, and clients may
        send millions."""
        if not isinstance(
            options.get("exc_info"), HttpProcessingError | web.RequestPayloadError | ConnectionError
        ):
            super().log_exception(*args, **options)

    async def _refuse(self, problem: HTTPProblem) -> None:
        """Send ``problem``, then read for a moment: the system discards the answer of a socket that
        is closed with unread data."""
        self.close()  # further data is read and not handled as requests
        self.send(problem)
        await asyncio.wait([self.ended], timeout=LINGER_SECONDS)

    def send(self, problem: HTTPProblem) -> None:
        """Write ``problem`` as the connection's last answer, without aiohttp, which would add its
        name."""
        if self.transport is None or self.transport.is_closing():
            return
        body = problem.body()
        headers = {
            "Content-Type": f"{MEDIA_TYPE}; charset=utf-8",
            "Content-Length": len(body),
            "Connection": "close",
        }
        lines = [
            f"{name}: {value}"
            for name, value in {**headers, **problem.headers, **SECURITY_HEADERS}.items()
        ]
        head = "\r\n".join([f"HTTP/1.1 {problem.status} {problem.details.title}", *lines, "", ""])
        self.transport.write(head.encode() + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()


def _malformed(error: HttpProcessingError) -> HTTPProblem:
    """Return the problem of data that is not HTTP.

    It does not quote the data, which may contain a token.
    """
    match error:
        case LineTooLong():
            detail = "A line of the request's head is too long."
            fix = "send lines of at most 8190 bytes"
        case BadStatusLine() | BadHttpMethod():
            detail = "The request line is not one of HTTP/1.1."
            fix = "send METHOD PATH HTTP/1.1"
        case InvalidHeader():
            detail = "A header is not valid."
            fix = "send NAME: VALUE, without control characters"
        case _:
            detail = "This is not HTTP/1.1."
            fix = "speak HTTP/1.1"
    return HTTPProblem(400, detail, kind="http", fix=fix)


class Connections(web.BaseSite):
    """The listening sockets at the address of ``settings``, and the connections within their
    limits."""

    def __init__(
        self, runner: web.AppRunner, settings: Settings, tls: ssl.SSLContext | None
    ) -> None:
        super().__init__(runner, ssl_context=tls, backlog=BACKLOG)
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.most, self.most_of_one = most_connections(
            settings, MOST_DESCRIPTORS if descriptors == resource.RLIM_INFINITY else descriptors
        )
        # A new connection's data is read some iterations of the loop later; it must not be closed
        # before.
        self._accepted_at_once = max(1, min(ACCEPTED_AT_ONCE, self.most_of_one // 16))
        self.settings = settings
        self.header_seconds = settings.header_seconds
        self.sockets: list[socket.socket] = []
        # and the task that opens it, with TLS the handshake
        self._open: dict[Connection, asyncio.Task[Any]] = {}
        self._hosts: Counter[str] = Counter()
        # Connections that wait for their client, those with the oldest data first, and their
        # deadlines.
        self._waiting: OrderedDict[Connection, float] = OrderedDict()
        # the client does not read the answer
        self._stalled: OrderedDict[Connection, float] = OrderedDict()
        self._sweeping: asyncio.TimerHandle | None = None

    @property
    def name(self) -> str:
        return (
            f"{'https' if self._ssl_context else 'http'}://{self.settings.host}"
            f":{self.settings.port}"
        )

    def __len__(self) -> int:
        return len(self._open)

    async def start(self) -> None:
        """Listen on every address of the host. Raises OSError."""
        await super().start()
        loop = asyncio.get_running_loop()
        addresses = await loop.getaddrinfo(
            self.settings.host, self.settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for family, address in dict.fromkeys(
            (family, address) for family, _, _, _, address in addresses
        ):
            listening = socket.create_server(address, family=family, backlog=self._backlog)
            listening.setblocking(False)
            self.sockets.append(listening)
        for listening in self.sockets:
            loop.add_reader(listening, self._accept, listening)
        self._sweep()

    async def stop(self) -> None:
        loop = asyncio.get_running_loop()
        for listening in self.sockets:
            loop.remove_reader(listening)
            listening.close()
        if self._sweeping is not None:
            self._sweeping.cancel()
        for task in self._open.values():
            task.cancel()  # handshakes that are not complete
        await super().stop()

    # ── called by connections when their state changes ──

    def waits(self, connection: Connection, seconds: float = math.inf) -> None:
        """Record that ``connection`` waits for its client, at most ``seconds``."""
        if connection in self._open:
            self._waiting[connection] = asyncio.get_running_loop().time() + seconds
            self._waiting.move_to_end(connection)

    def works(self, connection: Connection) -> None:
        """Record that ``connection`` handles a request."""
        self._waiting.pop(connection, None)

    def stalls(self, connection: Connection) -> None:
        """Record that the client of ``connection`` does not read what was written."""
        if connection in self._open:
            self._stalled[connection] = asyncio.get_running_loop().time() + WRITE_SECONDS

    def flows(self, connection: Connection) -> None:
        """Record that the client of ``connection`` has read most of what was written."""
        self._stalled.pop(connection, None)

    def forget(self, connection: Connection) -> None:
        """Forget ``connection``, which has ended or is about to. Does nothing when repeated."""
        if self._open.pop(connection, None) is not None:
            self._hosts[connection.host] -= 1
            if not self._hosts[connection.host]:
                del self._hosts[connection.host]
            self._waiting.pop(connection, None)
            self._stalled.pop(connection, None)

    # ── room ──

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(self._accepted_at_once):
            try:
                accepted, address = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptor or memory left
                self._pause(listening, error)
                return
            self._admit(accepted, client_of(address[0]))

    def _admit(self, accepted: socket.socket, host: str) -> None:
        surplus = not self._make_room(host)
        if surplus and len(self._open) >= self.most + SURPLUS:
            log.warning(
                "a connection was refused: all open ones handle requests", open=len(self._open)
            )
            accepted.close()
            return
        accepted.setblocking(False)
        loop = asyncio.get_running_loop()
        assert self._runner.server is not None
        connection = Connection(
            self._runner.server,
            self,
            host,
            surplus,
            access_log=None,
            keepalive_timeout=self.settings.idle_seconds,
            lingering_time=LINGER_SECONDS,
            auto_decompress=False,  # no operation takes a compressed body
        )
        tls = self._ssl_context
        patience = self.header_seconds if tls else None
        opening = loop.create_task(
            loop.connect_accepted_socket(
                lambda: connection, accepted, ssl=tls, ssl_handshake_timeout=patience
            )
        )
        self._open[connection] = opening
        self._hosts[host] += 1
        self.waits(connection, self.header_seconds)

        def opened(opening: asyncio.Task[Any]) -> None:
            # it was closed, or is not TLS
            if opening.cancelled() or opening.exception() is not None:
                self.forget(connection)
                loop.call_soon(accepted.close)

        opening.add_done_callback(opened)

    def _make_room(self, host: str) -> bool:
        """Return whether there is room for one more of ``host``.

        Closes a connection that waits for its client if necessary.
        """
        if self._hosts[host] >= self.most_of_one:
            oldest = next((c for c in (*self._waiting, *self._stalled) if c.host == host), None)
        elif len(self._open) >= self.most:
            oldest = next(iter(self._waiting), None) or next(iter(self._stalled), None)
        else:
            return True
        if oldest is None:
            return False
        log.warning(
            "too many connections; one that waits for its client is closed", open=len(self._open)
        )
        self._end(oldest, _too_many())
        return True

    def _end(self, connection: Connection, why: HTTPProblem) -> None:
        """Close a connection at once; ``why`` answers a request that has begun."""
        opening = self._open[connection]
        writable = connection not in self._stalled and not connection.between_requests
        self.forget(connection)
        if not opening.done():
            opening.cancel()
        elif connection.transport is not None:
            if writable and connection.body is None:
                connection.send(why)
            connection.transport.abort()

    def _pause(self, listening: socket.socket, error: OSError) -> None:
        """Accept nothing for a moment and close waiting connections: the socket stays readable and
        would busy the loop."""
        loop = asyncio.get_running_loop()
        log.warning("no connection can be accepted", reason=str(error), open=len(self._open))
        for connection in list(self._waiting)[:ACCEPTED_AT_ONCE]:
            self._end(connection, _too_many())
        loop.remove_reader(listening)

        def resume() -> None:
            if listening.fileno() >= 0:
                loop.add_reader(listening, self._accept, listening)

        loop.call_later(PAUSE_SECONDS, resume)

    def _sweep(self) -> None:
        """Close the connections that have waited for their client past their deadline."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        late = [
            c for c, deadline in (*self._waiting.items(), *self._stalled.items()) if deadline <= now
        ]
        for connection in late:
            if connection in self._open:
                detail = f"The request's headers did not come within {self.header_seconds:g} s."
                self._end(
                    connection,
                    HTTPProblem(408, detail, kind="slow-headers", fix="send them faster"),
                )
        self._sweeping = loop.call_later(min(SWEEP_SECONDS, self.header_seconds / 4), self._sweep)


@web.middleware
async def admit_connection(request: web.Request, handler: Any) -> web.StreamResponse:
    """Mark a connection as handling a request, and refuse requests past the limit (a
    middleware)."""
    connection = request.protocol
    if isinstance(connection, Connection):
        connection.begin(request)
        if request.version not in VERSIONS:
            raise _version_problem()
        if connection.surplus:
            raise _too_many()
    return await handler(request)
