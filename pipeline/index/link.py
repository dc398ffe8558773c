"""Connections to the index's server: one pipelined connection for calls, others for blocking reads."""

from __future__ import annotations

import asyncio
import itertools
import resource
import time
import uuid
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import hiredis
import redis.asyncio as redis
import structlog
from redis.backoff import ExponentialBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from pipeline.index.errors import IndexUnreachable

log = structlog.get_logger()

WAITS_SHARE = 8  # one in so many of the files that a process may open can be a blocking connection of one link


class _Line(asyncio.Protocol):
    """A connection to the server: commands go out as they come, answers come back in their order. redis-py's own clients
    take a connection for each call and wait for its answer, which is most of what a small call costs."""

    def __init__(self, connection: Any, patience: float) -> None:
        self._connection = connection  # lives as long as this
        self._reader, self._waiting = hiredis.Reader(), deque[asyncio.Future[Any]]()
        self.lost, self._heard, self._patience = False, time.monotonic(), patience
        self._loop = asyncio.get_running_loop()
        self._watch: asyncio.TimerHandle | None = None
        self._transport: Any = connection._writer.transport  # greeted and authenticated; from here on it is ours
        self._transport.set_protocol(self)

    def send(self, command: tuple[Any, ...]) -> asyncio.Future[Any]:
        answer = self._loop.create_future()
        if self.lost:
            answer.set_exception(ConnectionError("the connection was lost"))
            return answer
        if not self._waiting:
            self._heard = time.monotonic()
            if self._watch is None:
                self._watch = self._loop.call_later(self._patience, self._look)
        self._waiting.append(answer)
        self._transport.write(hiredis.pack_command(command))
        return answer

    def _look(self) -> None:
        """Give the connection up when something was waited for, and nothing was heard for as long as patience lasts. One
        timer for all calls: a deadline for each would cost as much as the call."""
        self._watch = None
        if self._waiting:
            left = self._heard + self._patience - time.monotonic()
            if left <= 0:
                self._end(TimeoutError(f"nothing was heard for {self._patience:.0f} s"))
            else:
                self._watch = self._loop.call_later(left, self._look)

    def _end(self, reason: Exception | None) -> None:
        self.connection_lost(reason)
        self._transport.abort()

    def close(self) -> None:
        self._end(None)

    def data_received(self, data: bytes) -> None:
        self._heard = time.monotonic()
        try:
            self._reader.feed(data)
            while (said := self._reader.gets()) is not False:
                answer = self._waiting.popleft()
                if answer.done():  # its caller was cancelled
                    continue
                if isinstance(said, hiredis.ReplyError):
                    answer.set_exception(ResponseError(str(said)))
                else:
                    answer.set_result(said)
        except (hiredis.ProtocolError, IndexError):
            log.error("the index's server said what nobody asked for")
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        while self._waiting:
            answer = self._waiting.popleft()
            if not answer.done():
                answer.set_exception(ConnectionError(f"the connection was lost ({error or 'closed'})"))


class _Commands(redis.Redis):
    """redis-py's commands over a link's one connection. Its own clients take a connection for each command under way, and
    refuse commands when a hundred are."""

    def __init__(self, link: Link, pool: redis.ConnectionPool) -> None:
        super().__init__(connection_pool=pool)
        self._link = link

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        name = args[0]
        reply = await self._link.send((*name.split(), *args[1:]))
        options.pop("keys", None)
        callback = self.response_callbacks.get(name)
        return callback(reply, **options) if callback else reply


class Link:
    """Connections to the server at ``url`` (``redis://``, ``rediss://`` or ``unix://``) that any number of indexes share:
    one for all calls, and one for each position of streams that is waited on, however many wait there.

    ``timeout`` is the deadline of one call in seconds, all retries included; past it :class:`IndexUnreachable` is raised.
    ``shares_waits``: whether those that wait for the same share a connection, and the number of connections is bounded. A
    link of one index alone needs neither.
    """

    def __init__(self, url: str, *, timeout: float = 30.0, shares_waits: bool = True) -> None:
        self.url, self.timeout, self.closed, self._shares_waits = url, timeout, False, shares_waits
        # Deadlines are kept here: redis-py's own would make a task of each call.
        patience = min(5.0, timeout / 3)
        pool = redis.ConnectionPool.from_url(url, socket_timeout=None, socket_connect_timeout=patience)
        self.redis = _Commands(self, pool)
        # Waiting calls block for as long as they say; their deadline is kept here, not by the socket.
        waits: redis.ConnectionPool = (
            redis.BlockingConnectionPool.from_url(
                url, socket_timeout=None, socket_connect_timeout=patience, max_connections=_most_waits(), timeout=None
            )
            if shares_waits
            else redis.ConnectionPool.from_url(url, socket_timeout=None, socket_connect_timeout=patience)
        )
        self._waiting = redis.Redis(connection_pool=waits)
        self._reads: dict[Any, asyncio.Future[Any]] = {}
        self._line: _Line | None = None
        self._connecting = asyncio.Lock()
        self.client = uuid.uuid4().hex[:12]
        self.calls = itertools.count()
        self.lanes: list[int] = []  # free ones; the server keeps the last answer of each
        self.lane = itertools.count()

    async def close(self) -> None:
        """End every call under way; those that wait raise IndexUnreachable."""
        self.closed = True
        if self._line is not None:
            self._line.close()
        await self.redis.connection_pool.disconnect()
        await self._waiting.connection_pool.disconnect()

    @property
    def line(self) -> _Line | None:
        """The connection of the calls while it stands."""
        return self._line if self._line is not None and not self._line.lost else None

    async def send(self, command: tuple[Any, ...]) -> Any:
        """One command and its answer, once; see :meth:`retry`."""
        return await (self.line or await self._connect()).send(command)

    async def send_all(self, commands: Iterable[tuple[Any, ...]]) -> list[Any]:
        """Commands in one round trip, and their answers."""
        line = self.line or await self._connect()
        return await asyncio.gather(*[line.send(command) for command in commands])

    async def _connect(self) -> _Line:
        async with self._connecting:
            if self.closed:
                raise ConnectionError("the index's client was closed")
            if self.line is None:
                connection = self.redis.connection_pool.make_connection()
                try:
                    await connection.connect()  # redis-py knows about URLs, TLS and passwords
                except BaseException:  # of a server that takes connections and does not answer, each would stay open
                    await connection.disconnect(nowait=True)
                    raise
                self._line = _Line(connection, self.timeout / 3)
            assert self._line is not None
            return self._line

    async def read(self, streams: Mapping[str, str], timeout: float, count: int) -> Any:
        """Block until one of ``streams`` has entries after its position, for at most ``timeout`` seconds."""
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
            if shared.done() and (found := shared.result()):
                return found
            if time.monotonic() >= deadline:
                return None
        shared = self._reads[key] = asyncio.get_running_loop().create_future()
        try:
            shared.set_result(await self.retry(once, timeout + self.timeout))
        except IndexUnreachable as error:
            shared.set_exception(error)
        finally:
            del self._reads[key]
            if not shared.done():  # cancelled: one of the others that wait reads for itself
                shared.set_result(None)
        return shared.result()

    async def retry(
        self, attempt: Any, patience: float | None = None, *, began: float | None = None, failures: int = 0
    ) -> Any:
        """Try until the deadline, counted from ``began``; an attempt ends after ``patience`` seconds (a third of the
        deadline). ``failures`` are attempts made before."""
        deadline = (began or time.monotonic()) + self.timeout
        backoff = ExponentialBackoff(cap=1.0, base=0.02)
        task = asyncio.current_task()
        assert task is not None
        cancelled = task.cancelling()
        while True:
            try:
                async with asyncio.timeout(patience or self.timeout / 3):
                    reply = await attempt(failures > 0)
                if task.cancelling() > cancelled:  # redis-py loses a cancellation that comes while it reads a reply
                    raise asyncio.CancelledError
                return reply
            except (RedisConnectionError, RedisTimeoutError, OSError) as lost:
                failures += 1
                pause = backoff.compute(failures)
                if self.closed or time.monotonic() + pause > deadline:
                    raise IndexUnreachable(
                        f"index {redacted(self.url)}: no answer for {self.timeout:.0f} s, {failures} tries ({lost}); "
                        "is the server up, and reachable from here?"
                    ) from None
                await asyncio.sleep(pause)
            except ResponseError as refused:
                if not is_loading(refused) or time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.05)


def _most_waits() -> int:
    """Connections of one link that block at the same time; further waits queue for one of them."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 4096 if files == resource.RLIM_INFINITY else max(16, files // WAITS_SHARE)


def is_loading(refused: ResponseError) -> bool:
    """Whether the server still reads its data file, and refuses all commands until then."""
    return "LOADING" in str(refused)


def redacted(url: str) -> str:
    """``url`` without its password."""
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}{'***@' + rest.rpartition('@')[2] if '@' in rest else rest}"
