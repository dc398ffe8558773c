"""The index's client: each call is one atomic round trip to the function library ``index.lua``.

    call ──▶ FCALL asyncdock_NAME  (one msgpack value in, one out)
      lost connection: bounded retries with backoff; the server answers a repeated call with what it answered first
    wait ──▶ XREAD BLOCK on a topic's stream, from the id that an empty answer carried: no wake-up is ever missed

Metadata only. Payloads lie in warehouses.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any, Literal

import msgpack
import redis.asyncio as redis
from redis.backoff import ExponentialBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from pipeline.columns import StaleHandle

Takes = Literal["rows", "groups", "batch"]


class IndexRefused(RuntimeError):
    """The index refused a call; the message says which rule it would have broken."""


class LeaseLost(IndexRefused):
    """The lease expired or the row was committed already: somebody else has the row, and what was computed is dropped."""


class BoundBroken(IndexRefused):
    """A sample older than the staleness bound reached the update. Pacing must make this impossible."""


class GateClosed(IndexRefused):
    """A group was admitted past the gate."""


class WrittenTwice(IndexRefused):
    """A column, or a sample's training, was written a second time."""


class NeverFits(IndexRefused):
    """A block is larger than the warehouse can ever hold."""


class IndexUnreachable(ConnectionError):
    """The index did not answer within the deadline, retries included."""


_ERRORS: dict[str, type[Exception]] = {
    "LEASE": LeaseLost,
    "LOST": LeaseLost,
    "STALE": BoundBroken,
    "GATE": GateClosed,
    "TWICE": WrittenTwice,
    "NOFIT": NeverFits,
    "GONE": StaleHandle,
    "BAD": IndexRefused,
    "NORUN": IndexRefused,
    "INTERNAL": IndexRefused,
}


@dataclass(frozen=True)
class StageSpec:
    """What the index knows of a stage: the columns it needs and makes, and whether it takes rows, whole groups or train
    batches (P groups by the anchored window)."""

    name: str
    takes: Takes
    needs: int
    makes: int


@dataclass(frozen=True)
class RunConfig:
    """What the index enforces: P groups a step, slack S, window W and bound η (``pipeline.staleness`` derives S)."""

    stages: tuple[StageSpec, ...]
    groups_per_step: int
    slack: int
    window: int
    staleness: int

    def packed(self) -> dict[str, Any]:
        stages = [
            {"name": s.name, "takes": s.takes, "needs": s.needs, "makes": s.makes, "bit": 1 << i}
            for i, s in enumerate(self.stages)
        ]
        return {
            "stages": stages,
            "groups_per_step": self.groups_per_step,
            "slack": self.slack,
            "window": self.window,
            "staleness": self.staleness,
        }


@dataclass(frozen=True)
class Handle:
    """One row as a claim hands it out. ``blocks`` are the (block, slot) pairs where its columns lie."""

    row: int
    generation: int
    group: int
    place: int
    oldest_version: int  # -1 before it is generated
    tokens: int
    blocks: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Place:
    """Where a block lies: ``nbytes`` bytes at ``offset`` of a warehouse's arena."""

    block: int
    warehouse: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Claim:
    """A lease on rows of a stage. ``token`` fences: a commit under a lost lease is refused."""

    stage: str
    token: int
    rows: tuple[Handle, ...]
    places: dict[int, Place] = field(repr=False)


@dataclass(frozen=True)
class Nothing:
    """Nothing to claim. ``wait`` is the wake stream's position at that moment, ``due`` seconds until a lease may expire."""

    wait: str
    due: float | None


@dataclass(frozen=True)
class Event:
    """One entry of the run's event stream: ``time`` in Unix seconds."""

    id: str
    time: float
    kind: str
    data: dict[str, Any]


class Index:
    """The index of one run at ``url`` (``redis://``, ``rediss://`` or ``unix://``).

    ``timeout`` is the deadline of one call in seconds, all retries included; past it :class:`IndexUnreachable` is raised.
    """

    def __init__(self, url: str, run: str, *, timeout: float = 30.0) -> None:
        self.url, self.run, self.timeout = url, run, timeout
        self.prefix = f"asyncdock:{{{run}}}:"
        self._redis = redis.from_url(url, socket_timeout=timeout, socket_connect_timeout=min(5.0, timeout))
        # Waiting calls block for as long as they say; their deadline is kept here, not by the socket.
        self._waiting = redis.from_url(url, socket_timeout=None, socket_connect_timeout=min(5.0, timeout))
        self._closed = False
        self._client = uuid.uuid4().hex[:12]
        self._calls = itertools.count()

    async def close(self) -> None:
        """End every call under way; those that wait raise IndexUnreachable."""
        self._closed = True
        await self._redis.aclose()
        await self._waiting.aclose()

    async def load(self) -> None:
        """Put the function library on the server (replacing another version of it)."""
        await self._retry(lambda again: self._redis.function_load(_library(), replace=True))

    async def call(self, name: str, **arguments: Any) -> Any:
        """Run ``index.lua``'s function ``name``. A repeat after a lost connection is answered, not done again."""
        packed = msgpack.packb(arguments, use_bin_type=False)  # the server knows one kind of string
        request = f"{self._client}-{next(self._calls)}"

        async def once(again: bool) -> Any:
            return await self._redis.fcall(f"asyncdock_{name}", 1, self.prefix, packed, request, "1" if again else "0")

        try:
            return msgpack.unpackb(await self._retry(once), strict_map_key=False)
        except ResponseError as refused:
            code, _, text = str(refused).partition(" ")
            raise _ERRORS.get(code, IndexRefused)(text or code) from None

    async def _retry(self, attempt: Any) -> Any:
        deadline, backoff, failures = time.monotonic() + self.timeout, ExponentialBackoff(cap=1.0, base=0.02), 0
        task = asyncio.current_task()
        assert task is not None
        cancelled = task.cancelling()
        while True:
            try:
                reply = await attempt(failures > 0)
                if task.cancelling() > cancelled:  # redis-py loses a cancellation that comes while it reads a reply
                    raise asyncio.CancelledError
                return reply
            except (RedisConnectionError, RedisTimeoutError, OSError) as lost:
                failures += 1
                pause = backoff.compute(failures)
                if self._closed or time.monotonic() + pause > deadline:
                    raise IndexUnreachable(
                        f"index {redacted(self.url)}: no answer for {self.timeout:.0f} s, {failures} tries ({lost}); "
                        "is the server up, and reachable from here?"
                    ) from None
                await asyncio.sleep(pause)
            except ResponseError as refused:
                if "LOADING" not in str(refused) or time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.05)

    async def wait(self, topic: str, after: str, timeout: float) -> bool:
        """Block until ``topic`` is woken after position ``after``; False when ``timeout`` seconds pass first."""
        return bool(await self._read({f"wake:{topic}": after}, timeout, 1))

    async def _read(self, streams: Mapping[str, str], timeout: float, count: int) -> Any:
        keys: Any = {self.prefix + name: position for name, position in streams.items()}
        block = max(1, int(timeout * 1000))

        async def once(again: bool) -> Any:
            async with asyncio.timeout(timeout + self.timeout):
                return await self._waiting.xread(keys, count=count, block=block)

        return await self._retry(once)

    # ── the run ──

    async def init(self, config: RunConfig, counters: Mapping[str, int], remake: Sequence[int] = ()) -> bool:
        await self.load()
        return bool(await self.call("init", config=config.packed(), counters=dict(counters), remake=list(remake)))

    async def transition(self, allowed: Iterable[str], to: str, reason: str = "") -> tuple[str, bool]:
        reply = await self.call("transition", **{"from": list(allowed), "to": to, "reason": reason})
        return reply["state"], reply["changed"]

    async def state(self) -> tuple[str, str, str]:
        """The run's state, its reason, and the position from which to wait for the next one on the topic `state`."""
        return tuple(await self.call("state"))  # type: ignore[return-value]

    async def put(self, name: str, value: str) -> None:
        """A small document of the run (its recipe)."""
        await self._retry(lambda again: self._redis.set(f"{self.prefix}doc:{name}", value))

    async def get(self, name: str) -> str | None:
        found = await self._retry(lambda again: self._redis.get(f"{self.prefix}doc:{name}"))
        return None if found is None else found.decode()

    # ── claims ──

    async def claim(
        self, stage: str, worker: str, most: int, lease: float, version: int | None = None
    ) -> Claim | Nothing:
        reply = await self.call(
            "claim", stage=stage, worker=worker, most=most, lease=int(lease * 1000), version=version
        )
        if "wait" in reply:
            return Nothing(reply["wait"], reply["due"] / 1000 if reply["due"] else None)
        return _claim(stage, reply["token"], reply)

    async def renew(self, stage: str, tokens: Sequence[int], lease: float) -> set[int]:
        kept = await self.call("renew", stage=stage, tokens=list(tokens), lease=int(lease * 1000))
        return {int(token) for token in kept or ()}

    async def replay(self, step: int) -> Claim:
        """The rows that made a step whose rows are not released yet."""
        return _claim("", 0, await self.call("replay", step=step))

    async def train(self, claim: Claim, step: int, event: Mapping[str, Any] | None = None) -> int:
        """The claim's rows made optimizer step ``step``; ``event`` becomes a `step` event in the same atomic step, so that
        every step is told exactly once. Returns the trainer's new version."""
        rows = [(handle.row, handle.generation) for handle in claim.rows]
        told = None if event is None else {"time": repr(time.time()), "data": msgpack.packb(dict(event))}
        return int(await self.call("train", stage=claim.stage, token=claim.token, step=step, rows=rows, event=told))

    async def ledger(self) -> dict[str, int]:
        return await self.call("ledger")

    async def stats(self) -> dict[str, Any]:
        return await self.call("stats")

    # ── events ──

    async def emit(self, kind: str, data: Mapping[str, Any]) -> None:
        fields = {"kind": kind, "time": repr(time.time()), "data": msgpack.packb(dict(data))}
        await self._retry(
            lambda again: self._redis.xadd(f"{self.prefix}events", fields, maxlen=100_000, approximate=True)  # type: ignore[arg-type]
        )

    async def events(self, after: str = "0", timeout: float = 1.0) -> list[Event]:
        """The next events after id ``after``, at most 500; empty when none came within ``timeout`` seconds."""
        found = await self._read({"events": after}, timeout, 500)
        return [
            Event(
                entry.decode(),
                float(fields[b"time"]),
                fields[b"kind"].decode(),
                msgpack.unpackb(fields[b"data"], strict_map_key=False),
            )
            for _, entries in found or ()
            for entry, fields in entries
        ]

    async def follow(self, after: str = "0") -> AsyncIterator[Event]:
        while True:
            for event in await self.events(after):
                after = event.id
                yield event

    async def erase(self) -> None:
        """Remove every key of the run."""
        async for key in self._redis.scan_iter(match=self.prefix.replace("[", "\\[") + "*", count=1000):
            await self._redis.unlink(key)


def _claim(stage: str, token: int, reply: Mapping[str, Any]) -> Claim:
    rows = tuple(
        Handle(row, generation, group, place, oldest, tokens, tuple(zip(b[::2], b[1::2], strict=True)))
        for row, generation, group, place, oldest, tokens, b in reply["rows"] or ()
    )
    return Claim(stage, token, rows, {p[0]: Place(*p) for p in reply["blocks"] or ()})


def redacted(url: str) -> str:
    """``url`` without its password."""
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}{'***@' + rest.rpartition('@')[2] if '@' in rest else rest}"


@cache
def _library() -> str:
    return resources.files("pipeline").joinpath("index.lua").read_text(encoding="utf-8")


def worker_name(stage: str, number: int) -> str:
    """A name that no other life of the same worker has had: leases of a dead one can be told apart."""
    return f"{stage}-{number}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
