"""Base of the index client: calls of server-side functions, and blocking waits on topics.

call ──▶ FCALL asyncdock_NAME  (one msgpack value in, one out), all on one connection, pipelined
  lost connection: retried with backoff; the server repeats the reply that it kept instead of running the call twice
wait ──▶ XREAD BLOCK on a topic's stream, from the position that an empty reply carried: no wake-up is missed
wait, then call ──▶ both at once, on a connection of their own: the server makes the call when the wait ends
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Self

import msgpack
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from pipeline.documents.kinds import Topic
from pipeline.index.address import redacted
from pipeline.index.errors import IndexUnreachable, from_reply
from pipeline.index.link import Link, is_loading

_PARTS = (
    *("clock", "base", "arrays", "ranges", "blocks", "groups", "claims"),
    *("prompts", "training", "warehouses", "runs", "transfer_queue"),
)


@dataclass(frozen=True)
class Wait:
    """A wait before a call: until ``topic`` is woken after position ``after``, for at most
    ``seconds``, or until ``early`` is done."""

    topic: Topic
    after: str
    seconds: float
    early: asyncio.Future[None] | None = None


class Calls:
    """Calls on the index of one run at ``where``: the URL of its server, or a :class:`Link` shared
    with other indexes. ``timeout`` is the deadline of one call in seconds, for a link of its own.
    """

    def __init__(self, where: str | Link, run: str, *, timeout: float = 60.0) -> None:
        self._link = (
            where if isinstance(where, Link) else Link(where, timeout=timeout, shares_waits=False)
        )
        self._shared = isinstance(where, Link)
        self.url = self._link.url
        self.run = run
        self.timeout = self._link.timeout
        self.prefix = key_prefix(run)
        self._redis: Any = self._link.retried  # redis-py types the replies of each protocol version
        self.closed = False  # whether :meth:`close` was called
        self._waits: set[asyncio.Timeout] = set()

    async def close(self) -> None:
        """End every call under way; blocked waits raise IndexUnreachable. A shared link stays
        open."""
        self.closed = True
        for wait in self._waits:
            wait.reschedule(0.0)
        if not self._shared:
            await self._link.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def own_address(self) -> str:
        """Return the address of this machine on the way to the index; "" where that is a Unix
        socket."""
        return await self._link.own_address()

    async def load(self, code: str = "") -> None:
        """Put the library of functions on the server, or another one (replacing another version of
        it). The same one stays: it remembers the time."""
        code = code or library()
        name = code.partition("\n")[0].rpartition("=")[2]
        if not any(
            code.encode() in library_info
            for library_info in await self._redis.function_list(name, withcode=True)
        ):
            await self._redis.function_load(code, replace=True)

    async def call(self, function: str, /, **arguments: Any) -> Any:
        """Call a server-side function by its name, for the class that owns it: everything else
        calls a typed method. After a lost connection the call is repeated, and the server runs it
        once."""
        return msgpack.unpackb(await self._reply(function, arguments), strict_map_key=False)

    async def _call_raw(
        self, function: str, wait: Wait | None = None, /, **arguments: Any
    ) -> dict[str, Any]:
        """Call like :meth:`call`, for replies that contain bytes: strings come as bytes.

        ``wait``: the server makes the call when that has ended.
        """
        reply = msgpack.unpackb(
            await self._reply(function, arguments, wait), raw=True, strict_map_key=False
        )
        return {key.decode(): value for key, value in reply.items()} if reply else {}

    async def _reply(
        self, function: str, arguments: Mapping[str, Any], wait: Wait | None = None
    ) -> bytes:
        packed = msgpack.packb(arguments, use_bin_type=False)  # the server knows one kind of string
        link = self._link
        request = f"{link.client}-{next(link.calls)}:"
        lane = link.lanes.pop() if link.lanes else next(link.lane)
        head = ("FCALL", f"asyncdock_{function}", 1, self.prefix, packed, request)
        tail = (link.client, lane)
        began = time.monotonic()
        tries = 0
        try:
            try:
                if wait is not None:
                    streams = {f"{self.prefix}wake:{wait.topic}": wait.after}
                    # it may come late, when the connection is lost and the call has been repeated
                    command = (*head, "1", *tail)
                    return await link.send_behind(streams, wait.seconds, wait.early, command)
                # nearly always; it has a timer of its own
                if (connection := link.connection) is not None:
                    return await connection.send((*head, "0", *tail))
            except (RedisConnectionError, OSError):
                tries = 1
            except ResponseError as refused:
                if not is_loading(refused):
                    raise
            return await link.retry(
                lambda again: link.send((*head, "1" if again or tries else "0", *tail)),
                began=began if wait is None else None,
                failures=tries,
            )
        except ResponseError as refused:
            raise from_reply(refused) from None
        finally:
            link.lanes.append(lane)

    async def wake(self, topic: Topic) -> None:
        """Wake all clients that wait on ``topic``."""
        await self.call("wake", topic=topic)

    async def wait(self, topic: Topic, after: str, timeout: float) -> bool:
        """Block until ``topic`` is woken after position ``after``; False when ``timeout`` seconds
        pass first."""
        return await self.wait_any({topic: after}, timeout)

    async def wait_any(self, after: Mapping[Topic, str], timeout: float) -> bool:
        """Wait on several topics at once, each from a position of its own; see :meth:`wait`."""
        return bool(
            await self._read(
                {f"wake:{topic}": position for topic, position in after.items()}, timeout, 1
            )
        )

    async def woken(self, topic: Topic, after: str, timeout: float) -> str:
        """Wait like :meth:`wait`, and return the position of the last wake-up, or ``after`` ("":
        from the topic's beginning)."""
        streams = await self._read({f"wake:{topic}": after or "0"}, timeout, 1)
        return streams[0][1][0][0].decode() if streams else after

    async def _read(self, streams: Mapping[str, str], timeout: float, count: int) -> Any:
        """Return entries of ``streams`` after their positions, waiting for some."""
        keys = {self.prefix + name: position for name, position in streams.items()}
        if not self._shared:
            return await self._link.read(keys, timeout, count)
        try:
            async with asyncio.timeout(None) as ending:
                self._waits.add(ending)
                try:
                    return await self._link.read(keys, timeout, count)
                finally:
                    self._waits.discard(ending)
        except TimeoutError:
            raise IndexUnreachable(f"index {redacted(self.url)}: its client was closed") from None


def key_prefix(run: str) -> str:
    """Return the beginning of all keys of a run.

    The braces make it one hash tag, so that a cluster keeps them on one node.
    """
    return f"asyncdock:{{{run}}}:"


@cache
def library(name: str = "asyncdock", functions: str = "") -> str:
    """Return the code of the library of functions: the files of ``lua/`` in the order in which they
    use each other. Or that of another one with ``functions``, which uses ``clock.lua``."""
    folder = resources.files("pipeline.index") / "lua"
    needed = _PARTS[:1] if functions else _PARTS
    parts = [folder.joinpath(f"{part}.lua").read_text(encoding="utf-8") for part in needed]
    return "\n".join([f"#!lua name={name}", *parts, functions])
