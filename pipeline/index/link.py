"""Connections to the index's server: one pipelined connection for calls, others for blocking reads,
and for calls that wait behind one.

Two places do without a library, for speed (`benchmarks/flow/libraries.py` compares them): redis-py's
client takes one connection for each call under way, and `stamina.retry_context` takes longer than
the call that it repeats.
"""

from __future__ import annotations

import asyncio
import itertools
import resource
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import hiredis
import redis.asyncio as redis
import structlog
from redis.backoff import ExponentialBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from pipeline.index.address import redacted
from pipeline.index.errors import IndexUnreachable

log = structlog.get_logger()

# one in so many of the files that a process may open can be a blocking connection of one link
WAITS_SHARE = 8
UNBLOCK_SECONDS = 0.01  # between two tries to end a wait


class PipelinedConnection(asyncio.Protocol):
    """A pipelined connection: commands are sent at once, and replies arrive in the order of the
    commands.

    ``connection`` is a connected one of redis-py, which handles URLs, TLS and passwords. Its
    transport is taken over. ``patience``: seconds after which it is closed when no byte of a reply
    comes (None: commands may block)."""

    def __init__(self, connection: Any, patience: float | None) -> None:
        self._connection = connection  # kept, because it closes its transport when it is deleted
        self._reader = hiredis.Reader()
        self._waiting = deque[asyncio.Future[Any]]()
        self.lost = False
        self.number: int | None = None  # the server's for it, where it was asked
        self._heard = time.monotonic()
        self._patience = patience
        self._loop = asyncio.get_running_loop()
        self._watch: asyncio.TimerHandle | None = None
        self._transport: Any = connection._writer.transport
        self._transport.set_protocol(self)

    @property
    def own_address(self) -> Any:
        """The address of this end, as its socket gives it."""
        return self._transport.get_extra_info("sockname")

    def send(self, command: tuple[Any, ...]) -> asyncio.Future[Any]:
        """Send a command; the future gets its reply, ResponseError for an error reply,
        ConnectionError when it is lost."""
        answer = self._loop.create_future()
        if self.lost:
            answer.set_exception(ConnectionError("the connection was lost"))
            return answer
        if not self._waiting:
            self._heard = time.monotonic()
            if self._watch is None and self._patience is not None:
                self._watch = self._loop.call_later(self._patience, self._check)
        self._waiting.append(answer)
        self._transport.write(hiredis.pack_command(command))
        return answer

    def _check(self) -> None:
        """Close the connection when calls wait and no byte came for ``patience`` seconds.

        One timer serves all calls: a deadline for each would cost as much as the call.
        """
        self._watch = None
        if self._waiting and self._patience is not None:
            remaining = self._heard + self._patience - time.monotonic()
            if remaining <= 0:
                self.close(TimeoutError(f"no reply for {self._patience:.0f} s"))
            else:
                self._watch = self._loop.call_later(remaining, self._check)

    def close(self, reason: Exception | None = None) -> None:
        """Close the connection; calls under way raise ConnectionError."""
        self.connection_lost(reason)
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._heard = time.monotonic()
        try:
            self._reader.feed(data)
            while (reply := self._reader.gets()) is not False:
                answer = self._waiting.popleft()
                if answer.done():  # its caller was cancelled
                    continue
                if isinstance(reply, hiredis.ReplyError):
                    answer.set_exception(ResponseError(str(reply)))
                else:
                    answer.set_result(reply)
        except (hiredis.ProtocolError, IndexError):
            log.error("the index's server sent a reply without a command")
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        while self._waiting:
            answer = self._waiting.popleft()
            if not answer.done():
                answer.set_exception(
                    ConnectionError(f"the connection was lost ({error or 'closed'})")
                )


class _Commands(redis.Redis):
    """redis-py's command methods, over ``send`` of a link."""

    def __init__(
        self, pool: redis.ConnectionPool, send: Callable[[tuple[Any, ...]], Awaitable[Any]]
    ) -> None:
        super().__init__(connection_pool=pool)
        self._send = send

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        name = args[0]
        reply = await self._send((*name.split(), *args[1:]))
        options.pop("keys", None)
        callback = self.response_callbacks.get(name)
        return callback(reply, **options) if callback else reply


class Link:
    """Connections to the server at ``url`` (``redis://``, ``rediss://`` or ``unix://``) that any
    number of indexes share: one for all calls, and one for each set of streams and positions that
    callers wait on.

    ``timeout`` is the deadline of one call in seconds, retries included; after it
    :class:`IndexUnreachable` is raised. ``shares_waits``: equal waits share one connection, and the
    number of connections is bounded. The link of a single index needs neither. A wait's connection
    serves later ones.
    """

    def __init__(self, url: str, *, timeout: float = 30.0, shares_waits: bool = True) -> None:
        self.url = url
        self.timeout = timeout
        self.closed = False
        self._shares_waits = shares_waits
        # No deadlines in redis-py: they would make a task of each call.
        patience = min(5.0, timeout / 3)
        options: dict[str, Any] = {"socket_timeout": None, "socket_connect_timeout": patience}
        pool = redis.ConnectionPool.from_url(url, **options)
        self.redis, self.retried = _Commands(pool, self.send), _Commands(pool, self.send_retried)
        self._waiting = _Commands(pool, self._send_blocking)
        self._blocking = set[PipelinedConnection]()
        self._idle = list[PipelinedConnection]()  # of these
        self._free_waits = asyncio.Semaphore(_most_waits()) if shares_waits else nullcontext()
        self._reads: dict[Any, asyncio.Future[Any]] = {}
        self._connection: PipelinedConnection | None = None
        self._connecting = asyncio.Lock()
        self.client = uuid.uuid4().hex[:12]
        self.calls = itertools.count()
        self.lanes: list[int] = []  # free lanes; the server keeps the last reply of each
        self.lane = itertools.count()

    async def close(self) -> None:
        """End every call under way; blocked reads raise IndexUnreachable."""
        self.closed = True
        for connection in (self._connection, *self._blocking):
            if connection is not None:
                connection.close()
        await self.redis.connection_pool.disconnect()

    @property
    def connection(self) -> PipelinedConnection | None:
        """The connection for calls; None when it is not connected."""
        return (
            self._connection if self._connection is not None and not self._connection.lost else None
        )

    async def send(self, command: tuple[Any, ...]) -> Any:
        """Send one command and return its reply, without a retry; see :meth:`retry`."""
        return await (self.connection or await self._connect()).send(command)

    async def send_retried(self, command: tuple[Any, ...]) -> Any:
        """Send like :meth:`send`, repeated after a lost connection."""
        return await self.retry(lambda again: self.send(command))

    async def send_all(self, commands: Iterable[tuple[Any, ...]]) -> list[Any]:
        """Send commands in one round trip, one directly after the other, and return their replies.

        Repeated after a lost connection.
        """

        async def once(again: bool) -> list[Any]:
            connection = self.connection or await self._connect()
            return await asyncio.gather(*[connection.send(command) for command in commands])

        return await self.retry(once)  # type: ignore[no-any-return]

    async def _connect(self) -> PipelinedConnection:
        async with self._connecting:
            if self.closed:
                raise ConnectionError("the index's client was closed")
            if self.connection is None:
                self._connection = await self._open(self.timeout / 3)
            assert self._connection is not None
            return self._connection

    async def _open(self, patience: float | None) -> PipelinedConnection:
        connection = self.redis.connection_pool.make_connection()
        try:
            await connection.connect()
        except (
            BaseException
        ):  # otherwise each attempt at a server that accepts and does not reply stays open
            await connection.disconnect(nowait=True)
            raise
        return PipelinedConnection(connection, patience)

    @asynccontextmanager
    async def _blocking_connection(self) -> AsyncIterator[PipelinedConnection]:
        """A connection for commands that block; it is closed when they are given up."""
        async with self._free_waits:
            connection = await self._idle_connection()
            try:
                yield connection
            except BaseException:
                self._blocking.discard(connection)
                connection.close()
                raise
            self._idle.append(connection)

    async def _idle_connection(self) -> PipelinedConnection:
        while self._idle:
            connection = self._idle.pop()
            if not connection.lost:
                return connection
            self._blocking.discard(connection)
        if self.closed:
            raise ConnectionError("the index's client was closed")
        connection = await self._open(None)
        self._blocking.add(connection)
        return connection

    async def _send_blocking(self, command: tuple[Any, ...]) -> Any:
        async with self._blocking_connection() as connection:
            return await connection.send(command)

    async def send_behind(
        self,
        streams: Mapping[str, str],
        timeout: float,
        early: asyncio.Future[None] | None,
        command: tuple[Any, ...],
    ) -> Any:
        """Wait as :meth:`read` does, or until ``early`` is done, and have the server make
        ``command`` at once then. Return its reply, without a retry."""
        block = max(1, int(timeout * 1000))
        read = ("XREAD", "COUNT", 1, "BLOCK", block, "STREAMS", *streams, *streams.values())
        async with asyncio.timeout(timeout + self.timeout / 3), self._blocking_connection() as own:
            if own.number is None:
                own.number = await own.send(("CLIENT", "ID"))
            own.send(read).add_done_callback(_drop)
            answer = own.send(command)
            answer.add_done_callback(_drop)  # of a wait that is cancelled
            if early is None:
                return await answer
            await asyncio.wait([answer, early], return_when=asyncio.FIRST_COMPLETED)
            while not answer.done():  # the server may see this before the wait
                await self.send(("CLIENT", "UNBLOCK", own.number))
                await asyncio.wait([answer], timeout=UNBLOCK_SECONDS)
            return answer.result()

    async def own_address(self) -> str:
        """Return the address of this machine on the way to the server; "" where that is a Unix
        socket."""

        async def once(again: bool) -> Any:
            return (self.connection or await self._connect()).own_address

        address = await self.retry(once)
        return str(address[0]) if isinstance(address, tuple) else ""

    async def read(self, streams: Mapping[str, str], timeout: float, count: int) -> Any:
        """Block until one of ``streams`` has entries after its position, for at most ``timeout``
        seconds."""
        deadline = time.monotonic() + timeout
        keys: Any = dict(streams)

        async def once(again: bool) -> Any:
            block = max(1, int((deadline - time.monotonic()) * 1000))
            return await self._waiting.xread(keys, count=count, block=block)

        if not self._shares_waits:
            return await self.retry(once, timeout + self.timeout)
        key = (tuple(sorted(streams.items())), count)
        while (shared := self._reads.get(key)) is not None:
            await asyncio.wait([shared], timeout=max(0.0, deadline - time.monotonic()))
            if shared.done() and (reply := shared.result()):
                return reply
            if time.monotonic() >= deadline:
                return None
        shared = self._reads[key] = asyncio.get_running_loop().create_future()
        try:
            shared.set_result(await self.retry(once, timeout + self.timeout))
        except IndexUnreachable as error:
            shared.set_exception(error)
        finally:
            del self._reads[key]
            if not shared.done():  # cancelled: one of the other callers reads now
                shared.set_result(None)
        return shared.result()

    async def retry(
        self,
        attempt: Any,
        patience: float | None = None,
        *,
        began: float | None = None,
        failures: int = 0,
    ) -> Any:
        """Repeat ``attempt`` until it succeeds or the deadline passes, counted from ``began``, and
        at least once: a process that was frozen for longer has not waited. One attempt may take
        ``patience`` seconds (default: a third of the deadline). ``failures``: attempts made before.
        """
        deadline = (began or time.monotonic()) + self.timeout
        backoff = ExponentialBackoff(cap=1.0, base=0.02)
        task = asyncio.current_task()
        assert task is not None
        cancelled = task.cancelling()
        while True:
            try:
                async with asyncio.timeout(patience or self.timeout / 3):
                    reply = await attempt(failures > 0)
                # redis-py drops a cancellation that arrives while it reads a reply
                if task.cancelling() > cancelled:
                    raise asyncio.CancelledError
                return reply
            except (RedisConnectionError, RedisTimeoutError, OSError) as lost:
                failures += 1
                pause = backoff.compute(failures)
                if self.closed or (failures > 1 and time.monotonic() + pause > deadline):
                    raise IndexUnreachable(
                        f"index {redacted(self.url)}: no answer for {self.timeout:.0f} s, "
                        f"{failures} tries ({lost}); "
                        "is the server up, and reachable from here?"
                    ) from None
                await asyncio.sleep(pause)
            except ResponseError as refused:
                if not is_loading(refused) or time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.05)


def _drop(reply: asyncio.Future[Any]) -> None:
    """Take what nobody waits for."""
    if not reply.cancelled():
        reply.exception()


def _most_waits() -> int:
    """Return how many connections of one link may block at the same time; further reads queue for
    one of them."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 4096 if files == resource.RLIM_INFINITY else max(16, files // WAITS_SHARE)


def is_loading(refused: ResponseError) -> bool:
    """Return whether the server still reads its data file, and refuses all commands until then."""
    return "LOADING" in str(refused)
