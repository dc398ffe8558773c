"""The index's client: each call is one atomic round trip to the function library ``index.lua``.

    call ──▶ FCALL asyncdock_NAME  (one msgpack value in, one out), all on one connection, pipelined
      lost connection: bounded retries with backoff; the server answers a repeated call with what it answered first
    wait ──▶ XREAD BLOCK on a topic's stream, from the id that an empty answer carried: no wake-up is ever missed

Metadata only. Payloads lie in warehouses.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import resource
import secrets
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import hiredis
import msgpack
import numpy as np
import redis.asyncio as redis
import structlog
from redis.backoff import ExponentialBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from pipeline.events import Event, EventData, StateEvent
from pipeline.warehouse.arena import StaleHandle

if TYPE_CHECKING:
    from pipeline.events import RunState

log = structlog.get_logger()

Takes = Literal["rows", "groups", "batch"]

MAX_STAGES = 16  # the index keeps the stages that are done with a row as bits of a 16-bit word
UNLIMITED = 2**40
INDEX_VARIABLE = (
    "ASYNCDOCK_INDEX"  # in a process's environment: the URL, which may hold a password; command lines are public
)
EVENTS_KEPT = 100_000  # about; older ones are in the run's folder alone
EVENTS_AT_ONCE = 500
WAITS_SHARE = 8  # of the files that a process may open, one in so many may be a connection of one link that waits

# Where a row's columns of one producer lie: `slot` of the packed rows that begin at `place` & 2**48 - 1 of the arena of
# warehouse `place` >> 48, as part of `block`. Block 0: nowhere yet.
REF = np.dtype([("block", "<u4"), ("slot", "<u4"), ("place", "<u8")])
_FIXED = np.dtype([("group", "<u4"), ("place", "<u2"), ("samples", "<u2")])
_MADE = np.dtype([("oldest", "<i4"), ("tokens", "<u4")])
_STATE = np.dtype([("columns", "<u4"), ("done", "<u2"), ("state", "u1"), ("unused", "u1")])
STATES = ("not there", "live", "generated", "trained")


class IndexRefused(RuntimeError):
    """The index refused a call; the message says which rule it would have broken."""


class LeaseLost(IndexRefused):
    """The lease expired or the row was committed already: somebody else has the row, and what was computed is dropped."""


class BlockLost(LeaseLost):
    """The block that was written to was taken back, as its worker was declared dead. The rows must be written again."""


class BoundBroken(IndexRefused):
    """A sample older than the staleness bound reached the update. Pacing must make this impossible."""


class GateClosed(IndexRefused):
    """A group was admitted past the gate."""


class WrittenTwice(IndexRefused):
    """A column, or a sample's training, was written a second time."""


class FieldsChanged(IndexRefused):
    """The fields of a partition are not those that the put was made for; it must be made again for what they are now."""


class NeverFits(IndexRefused):
    """A block is larger than the warehouse can ever hold."""


class WarehouseGone(IndexRefused):
    """The warehouse is leaving the run, or its node was lost."""


class IndexUnreachable(ConnectionError):
    """The index did not answer within the deadline, retries included."""


_ERRORS: dict[str, type[Exception]] = {
    "LEASE": LeaseLost,
    "LOST": BlockLost,
    "STALE": BoundBroken,
    "GATE": GateClosed,
    "TWICE": WrittenTwice,
    "FIELDS": FieldsChanged,
    "NOFIT": NeverFits,
    "NOHOUSE": WarehouseGone,
    "GONE": StaleHandle,
    "BAD": IndexRefused,
    "NORUN": IndexRefused,
    "INTERNAL": IndexRefused,
}


@dataclass(frozen=True)
class StageSpec:
    """What the index knows of a stage: the columns it needs and makes, as masks, and whether it takes rows, whole groups or
    train batches (P groups by the anchored window). A stage that ``releases`` is the last of its rows: its commit frees
    them."""

    name: str
    takes: Takes
    needs: int
    makes: int
    releases: bool = False


@dataclass(frozen=True)
class RunConfig:
    """What the index enforces: P groups a step, slack S, window W and bound η (``pipeline.staleness`` derives S).

    ``reach``: a claim prefers rows that were made ready on its own node, and passes older ones elsewhere while they are at
    most so many groups older. ``headstart``: rows that become ready on a node where their stage has workers are left to
    these for so many seconds. The defaults are those of a flow without a trainer: nothing is held back at the gate.
    """

    stages: tuple[StageSpec, ...]
    groups_per_step: int = 1
    slack: int = UNLIMITED
    window: int = 1
    staleness: int = UNLIMITED
    reach: int = 64
    headstart: float = 0.1  # enough for a woken worker to claim on a busy machine, little beside what a stage computes

    def __post_init__(self) -> None:
        if len(self.stages) > MAX_STAGES:
            raise ValueError(f"stages: {len(self.stages)} are too many; join some, at most {MAX_STAGES} fit")

    def packed(self) -> dict[str, Any]:
        stages: list[dict[str, Any]] = []
        producers = 1  # 0 is the admission
        for i, s in enumerate(self.stages):
            stages.append(
                {"name": s.name, "takes": s.takes, "needs": s.needs, "makes": s.makes, "releases": s.releases}
                | {"bit": 1 << i, "producer": producers if s.makes else -1}
            )
            producers += bool(s.makes)
        for stage in stages:
            stage["reads"] = [0, *self._before(stage["needs"], stages)]
        return {
            "stages": stages,
            "producers": producers,
            "row_fields": ["s", "f", "g", *(f"b{producer}" for producer in range(producers))],
            "groups_per_step": self.groups_per_step,
            "slack": self.slack,
            "window": self.window,
            "staleness": self.staleness,
            "reach": self.reach,
            "headstart": int(self.headstart * 1000),
        }

    @staticmethod
    def _before(needs: int, stages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The producers that have surely written before a stage that needs these columns: their columns it may fetch."""
        makers = {stage["producer"]: stage for stage in stages if stage["producer"] > 0}
        found: set[int] = set()
        while more := {p for p, maker in makers.items() if maker["makes"] & needs and p not in found}:
            found |= more
            for producer in more:
                needs |= makers[producer]["needs"]
        return sorted(found)


class Handle(NamedTuple):
    """One row as a claim hands it out. ``row`` is its global index, which no other row ever gets: it is its own generation,
    so a handle to a released row is an error, not somebody else's data."""

    row: int
    group: int
    place: int
    samples: int  # in its group
    oldest_version: int  # -1 before it is generated
    tokens: int


class Claim:
    """A lease on rows of a stage, as parallel arrays [B]: ``row``, ``group``, ``place``, ``oldest_version``, ``tokens``, and
    ``refs``, one array for each producer, that says where its columns lie. ``token`` fences: a commit under a lost lease
    is refused, and so is any call for it by another ``owner``."""

    def __init__(self, stage: str, token: str, reply: Mapping[str, Any], owner: str = "") -> None:
        self.stage, self.token, self.owner = stage, token, owner
        edges = np.array(reply["rows"] or (), np.int64).reshape(-1, 2)
        self.row = np.concatenate([np.arange(a, b + 1) for a, b in edges]) if len(edges) else np.zeros(0, np.int64)
        self._fixed = np.frombuffer(reply["fixed"], _FIXED)
        self._made = np.frombuffer(reply["made"], _MADE)
        self.refs = [np.frombuffer(refs, REF) for refs in reply["refs"]]

    def __len__(self) -> int:
        return len(self.row)

    @property
    def group(self) -> np.ndarray:
        return self._fixed["group"]

    @property
    def place(self) -> np.ndarray:
        return self._fixed["place"]

    @property
    def oldest_version(self) -> np.ndarray:
        return self._made["oldest"]

    @property
    def tokens(self) -> np.ndarray:
        return self._made["tokens"]

    def record(self) -> dict[str, Any]:
        """What makes the same claim again, in another process."""
        breaks = np.flatnonzero(np.diff(self.row) != 1)
        edges = np.stack([self.row[np.r_[0, breaks + 1]], self.row[np.r_[breaks, len(self.row) - 1]]], 1)
        arrays = {
            "fixed": self._fixed.tobytes(),
            "made": self._made.tobytes(),
            "refs": [r.tobytes() for r in self.refs],
        }
        return {"token": self.token, "rows": edges.reshape(-1).tolist(), **arrays}

    def part(self, positions: Sequence[int]) -> Claim:
        """The rows at ``positions`` under the same token."""
        at, part = np.asarray(positions, np.int64), Claim.__new__(Claim)
        part.stage, part.token, part.owner, part.row = self.stage, self.token, self.owner, self.row[at]
        part._fixed, part._made = self._fixed[at], self._made[at]
        part.refs = [refs[at] if len(refs) else refs for refs in self.refs]
        return part

    def only(self, position: int) -> Claim:
        """The claim narrowed to one of its rows."""
        out = object.__new__(Claim)
        out.stage, out.token, out.owner, at = self.stage, self.token, self.owner, slice(position, position + 1)
        out.row, out._fixed, out._made, out.refs = (
            self.row[at],
            self._fixed[at],
            self._made[at],
            [r[at] for r in self.refs],
        )
        return out

    @cached_property
    def rows(self) -> tuple[Handle, ...]:
        """The rows one by one."""
        columns = (self.row, *(self._fixed[n] for n in _FIXED.names or ()), *(self._made[n] for n in _MADE.names or ()))
        return tuple(map(Handle._make, zip(*(column.tolist() for column in columns), strict=True)))


@dataclass(frozen=True)
class Nothing:
    """Nothing to claim. ``wait`` is the position of the wake stream ``topic`` at that moment, ``due`` seconds until there
    may be something without a wake-up: a lease may expire, or another node's headstart end."""

    wait: str
    due: float | None
    topic: str


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
                if not _is_loading(refused) or time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.05)


def _most_waits() -> int:
    """Connections of one link that block at the same time; further waits queue for one of them."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 4096 if files == resource.RLIM_INFINITY else max(16, files // WAITS_SHARE)


class Index:
    """The index of one run at ``where``: the URL of its server, or a :class:`Link` that it shares with others. ``timeout``
    is that of a link of its own."""

    def __init__(self, where: str | Link, run: str, *, timeout: float = 30.0) -> None:
        self._link = where if isinstance(where, Link) else Link(where, timeout=timeout, shares_waits=False)
        self._shared = isinstance(where, Link)
        self.url, self.run, self.timeout = self._link.url, run, self._link.timeout
        self.prefix = _prefix(run)
        self._redis, self._retry = self._link.redis, self._link.retry
        self._closed = False
        self._waits: set[asyncio.Timeout] = set()

    async def close(self) -> None:
        """End every call under way; those that wait raise IndexUnreachable. A shared link stays."""
        self._closed = True
        for wait in self._waits:
            wait.reschedule(0.0)
        if not self._shared:
            await self._link.close()

    @property
    def closed(self) -> bool:
        return self._closed

    async def load(self, library: str | None = None) -> None:
        """Put the function library, or another one, on the server (replacing another version of it)."""
        await self._retry(lambda again: self._redis.function_load(library or _library(), replace=True))

    async def call(self, name: str, /, **arguments: Any) -> Any:
        """Run ``index.lua``'s function ``name``. A repeat after a lost connection is answered, not done again."""
        return msgpack.unpackb(await self._answer(name, arguments), strict_map_key=False)

    async def _call_raw(self, name: str, **arguments: Any) -> dict[str, Any]:
        """Like :meth:`call`, for answers whose strings are bytes."""
        reply = msgpack.unpackb(await self._answer(name, arguments), raw=True, strict_map_key=False)
        return {key.decode(): value for key, value in reply.items()} if reply else {}

    async def _answer(self, name: str, arguments: Mapping[str, Any]) -> bytes:
        packed = msgpack.packb(arguments, use_bin_type=False)  # the server knows one kind of string
        link = self._link
        request, lane = f"{link.client}-{next(link.calls)}:", link.lanes.pop() if link.lanes else next(link.lane)
        head, tail = ("FCALL", f"asyncdock_{name}", 1, self.prefix, packed, request), (link.client, lane)
        began, tries = time.monotonic(), 0
        try:
            if (line := link.line) is not None:  # nearly always; the line watches over its own silence
                try:
                    return await line.send((*head, "0", *tail))
                except ConnectionError:
                    tries = 1
                except ResponseError as refused:
                    if not _is_loading(refused):
                        raise
            return await link.retry(
                lambda again: link.send((*head, "1" if again or tries else "0", *tail)), began=began, failures=tries
            )
        except ResponseError as refused:
            code, _, text = str(refused).partition(" ")
            raise _ERRORS.get(code, IndexRefused)(text or code) from None
        finally:
            link.lanes.append(lane)

    async def wait(self, topic: str, after: str, timeout: float) -> bool:
        """Block until ``topic`` is woken after position ``after``; False when ``timeout`` seconds pass first."""
        return await self.wait_any({topic: after}, timeout)

    async def wait_any(self, after: Mapping[str, str], timeout: float) -> bool:
        """:meth:`wait` on several topics at once, each from a position of its own."""
        return bool(await self._read({f"wake:{topic}": position for topic, position in after.items()}, timeout, 1))

    async def woken(self, topic: str, after: str, timeout: float) -> str:
        """Like :meth:`wait`; returns where ``topic`` was woken last, or ``after`` ("": from its beginning)."""
        found = await self._read({f"wake:{topic}": after or "0"}, timeout, 1)
        return found[0][1][0][0].decode() if found else after

    async def _read(self, streams: Mapping[str, str], timeout: float, count: int) -> Any:
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

    # ── the run ──

    async def init(self, config: RunConfig, counters: Mapping[str, int], remake: Sequence[int] = ()) -> bool:
        await self.load()
        return bool(await self.call("init", config=config.packed(), counters=dict(counters), remake=list(remake)))

    async def transition(self, allowed: Iterable[str], to: str, reason: str = "") -> tuple[str, bool]:
        """Move the run's state to ``to`` where it is one of ``allowed``; returns the state then, and whether it has changed.
        In the same atomic step its readers get a `state` event, so that each change is told exactly once."""
        event = _stamped(StateEvent(state=cast("RunState", to), reason=reason))
        reply = await self.call("transition", **{"from": list(allowed), "to": to, "reason": reason, "event": event})
        return reply["state"], reply["changed"]

    async def state(self) -> tuple[str, str, str]:
        """The run's state, its reason, and the position from which to wait for the next one on the topic `state`."""
        return tuple(await self.call("state"))  # type: ignore[return-value]

    async def states(self, runs: Sequence[str]) -> list[tuple[str, str]]:
        """State and reason of several runs of this server, in one round trip; empty for one that it does not know."""

        asked = [("HMGET", _prefix(run) + "state", "state", "reason") for run in runs]
        found = await self._retry(lambda again: self._link.send_all(asked)) if runs else []
        return [((state or b"").decode(), (reason or b"").decode()) for state, reason in found]

    async def put(self, name: str, value: str) -> None:
        """A small document of the run (its recipe)."""
        await self._retry(lambda again: self._redis.set(f"{self.prefix}doc:{name}", value))

    async def put_once(self, name: str, value: str) -> str:
        """Like :meth:`put`, unless it is there; returns what is there then."""
        await self._retry(lambda again: self._redis.set(f"{self.prefix}doc:{name}", value, nx=True))
        return await self.get(name) or value

    async def get(self, name: str) -> str | None:
        found = await self._retry(lambda again: self._redis.get(f"{self.prefix}doc:{name}"))
        return None if found is None else found.decode()

    # ── claims ──

    async def config(self) -> dict[str, Any]:
        """What :meth:`init` was given, packed."""
        return await self.call("config")

    async def claim(
        self,
        stage: str,
        worker: str,
        most: int,
        lease: float,
        version: int | None = None,
        home: int = 0,
        least: int = 1,
        patient: bool = False,
        owner: str = "",
    ) -> Claim | Nothing:
        """Lease what is ready, rows made ready on warehouse ``home`` first (``RunConfig.reach``): ``most`` rows (groups, as
        the stage takes them), and nothing while there are fewer than ``least``. A ``patient`` one leaves to other nodes what
        has just become ready there (``RunConfig.headstart``). ``owner`` binds the lease: only calls that name the same owner
        can renew, end or commit it ("": the run's own workers)."""
        token = secrets.token_hex(16)  # made here, so that a repeated request needs no answer to know it
        limits = {"most": most, "least": least, "lease": int(lease * 1000), "version": version, "patient": patient}
        lessee = {"worker": worker, "home": home, "token": token, "owner": owner}
        reply = await self._call_raw("claim", stage=stage, **lessee, **limits)
        if "wait" in reply:
            return Nothing(
                reply["wait"].decode(), reply["due"] / 1000 if reply["due"] else None, reply["topic"].decode()
            )
        return Claim(stage, token, reply, owner)

    async def lease(self, token: str, owner: str = "") -> tuple[Claim, int] | None:
        """The claim that goes by ``token``, as its holder was told it, and how many of its rows are left; None when it has
        ended, or is of another ``owner``."""
        reply = await self._call_raw("lease", token=token, owner=owner)
        return (Claim(reply["stage"].decode(), token, reply, owner), reply["left"]) if reply else None

    async def renew(self, stage: str, tokens: Sequence[str], lease: float, owner: str = "") -> set[str]:
        """Hold the leases of ``stage`` and ``owner`` for another ``lease`` seconds; returns the tokens that still hold."""
        held = await self.call("renew", stage=stage, tokens=list(tokens), lease=int(lease * 1000), owner=owner)
        return set(held or ())

    async def hand_back(self, claim: Claim) -> None:
        """Make what is left under the claim's lease ready for others at once. Harmless when it has ended."""
        await self.call("hand_back", stage=claim.stage, token=claim.token, owner=claim.owner)

    async def replay(self, step: int) -> Claim:
        """The rows that made a step whose rows are not released yet."""
        return Claim("", "", await self._call_raw("replay", step=step))

    async def train(self, claim: Claim, step: int, event: EventData | None = None) -> int:
        """The claim's rows made optimizer step ``step``; ``event`` becomes a `step` event in the same atomic step, so that
        every step is told exactly once. Returns the trainer's new version."""
        rows, _ = ranges(claim.row)
        lease = {"stage": claim.stage, "token": claim.token, "owner": claim.owner}
        return int(await self.call("train", **lease, step=step, rows=rows, event=event and _stamped(event)))

    async def inspect(self, group: int) -> tuple[Claim, np.ndarray] | None:
        """The rows of a group as a claim would bring them, and their states; None when it is not there."""
        reply = await self._call_raw("inspect", group=group)
        return (Claim("", "", reply), np.frombuffer(reply["states"], _STATE)) if reply else None

    async def ledger(self) -> dict[str, int]:
        return await self.call("ledger")

    async def stats(self) -> dict[str, Any]:
        return await self.call("stats")

    # ── logs: numbered entries that several readers agree on ──

    async def append_log(self, log: str, number: int, entry: bytes) -> None:
        """Write entry ``number`` of ``log``; refused when it was written before."""

        async def once(again: bool) -> None:
            try:
                await self._redis.xadd(self.prefix + log, {"e": entry}, id=f"{number + 1}-0")
            except ResponseError as refused:
                if not again:
                    raise IndexRefused(
                        f"log {log!r} has an entry {number} already ({refused}); give another name"
                    ) from None

        await self._retry(once)

    async def read_log(self, log: str, number: int, timeout: float) -> bytes | None:
        """Entry ``number`` of ``log``, waiting ``timeout`` seconds for it. One that was struck is refused."""
        found = await self._read({log: f"{number}-0"}, timeout, 1)
        if not found:
            return None
        position, fields = found[0][1][0]
        if position != f"{number + 1}-0".encode():
            raise IndexRefused(f"entry {number} of log {log!r} was struck: all of its readers were done with it")
        return fields[b"e"]

    async def put_signed(self, paper: str, who: str) -> int:
        """Put ``who`` under ``paper``, once; returns how many have."""

        async def once(again: bool) -> int:
            both = self._redis.pipeline(transaction=True)
            both.sadd(self.prefix + paper, who)
            both.scard(self.prefix + paper)
            return int((await both.execute())[1])

        return await self._retry(once)

    async def trim_log(self, log: str, number: int, paper: str) -> None:
        """Forget entry ``number`` of ``log``, and who has signed ``paper``."""
        await self._retry(lambda again: self._redis.xdel(self.prefix + log, f"{number + 1}-0"))
        await self._retry(lambda again: self._redis.delete(self.prefix + paper))

    # ── events ──

    async def emit(self, event: EventData) -> None:
        """Append ``event`` to the run's stream, with the time of this moment."""
        fields = {"kind": event.kind, **_stamped(event)}
        await self._retry(
            lambda again: self._redis.xadd(f"{self.prefix}events", fields, maxlen=EVENTS_KEPT, approximate=True)  # type: ignore[arg-type]
        )

    async def events(self, after: str = "0", timeout: float = 1.0) -> list[Event]:
        """The next events after id ``after``, waiting for them; empty when none came within ``timeout`` seconds."""
        found = await self._read({"events": after}, timeout, EVENTS_AT_ONCE)
        return [_event(entry, fields) for _, entries in found or () for entry, fields in entries]

    async def past_events(self, after: str = "0", count: int = EVENTS_AT_ONCE) -> list[Event]:
        """The next events after id ``after`` that are there now, at most ``count``; :meth:`events` would wait for some. The
        stream keeps about :data:`EVENTS_KEPT`: ask :meth:`event_ends` whether ``after`` is still in it."""
        found = await self._retry(
            lambda again: self._redis.xrange(f"{self.prefix}events", min=f"({after}", max="+", count=count)
        )
        return [_event(entry, fields) for entry, fields in found]

    async def event_ends(self) -> tuple[str, str]:
        """The ids of the oldest and of the newest event that are there; "0" and "0" when none is."""

        key = f"{self.prefix}events"
        both = [("XRANGE", key, "-", "+", "COUNT", 1), ("XREVRANGE", key, "+", "-", "COUNT", 1)]
        found = await self._retry(lambda again: self._link.send_all(both))
        oldest, newest = (entries[0][0].decode() if entries else "0" for entries in found)
        return oldest, newest

    async def newest(self, kind: str, within: int = 1000) -> Event | None:
        """The newest event of this kind among the last ``within`` of all; None when there is none."""
        found = await self._retry(lambda again: self._redis.xrevrange(f"{self.prefix}events", count=within))
        return next((_event(entry, fields) for entry, fields in found if fields[b"kind"] == kind.encode()), None)

    async def follow(self, after: str = "0") -> AsyncIterator[Event]:
        while True:
            for event in await self.events(after):
                after = event.id
                yield event

    async def rewind(self, config: RunConfig, counters: Mapping[str, int], remake: Sequence[int] = ()) -> None:
        """Begin the sample flow anew where a checkpoint stands: what it was made of is lost. Events and documents stay, and
        prompts from outside that wait."""
        await self.erase(keep=("events", "state", "doc:*", "feed", "feed:n"))
        await self.init(config, counters, remake)

    async def retire(self) -> None:
        """The run has ended: its samples go, and all that belongs to their flow. Events, state, documents and the ledger
        stay for readers. Harmless when repeated."""
        if await self._retry(lambda again: self._redis.exists(f"{self.prefix}config")):
            await self.call("retire")
        await self.erase(keep=("events", "state", "doc:*", "config", "n"))

    async def erase(self, keep: Sequence[str] = ()) -> None:
        """Remove every key of the run, but for those that ``keep`` names (a name that ends in ``*``: all that begin so)."""
        kept = tuple(name.removesuffix("*") for name in keep if name.endswith("*"))

        async def once(again: bool) -> None:
            async for key in self._redis.scan_iter(match=self.prefix.replace("[", "\\[") + "*", count=1000):
                name = key.decode().removeprefix(self.prefix)
                if name not in keep and not (kept and name.startswith(kept)):
                    await self._redis.unlink(key)

        await self._retry(once, self.timeout)


def _stamped(event: EventData) -> dict[str, Any]:
    """The fields of an event of this moment, but for its kind."""
    return {"time": repr(time.time()), "data": msgpack.packb(event.wire())}


def _prefix(run: str) -> str:
    return f"asyncdock:{{{run}}}:"


def ranges(rows: np.ndarray) -> tuple[list[int], np.ndarray]:
    """Row numbers [B] as ascending ranges (first, last, first, last, …), and the order that puts them so."""
    if len(rows) == 1 or (rows[-1] - rows[0] == len(rows) - 1 and (np.diff(rows) == 1).all()):  # as claims give them
        return [int(rows[0]), int(rows[-1])], np.arange(len(rows))
    order = np.argsort(rows, kind="stable")
    ordered = rows[order]
    breaks = np.flatnonzero(np.diff(ordered) != 1)
    firsts, lasts = ordered[np.concatenate([[0], breaks + 1])], ordered[np.concatenate([breaks, [len(ordered) - 1]])]
    return np.stack([firsts, lasts], 1).reshape(-1).tolist(), order


def _event(entry: bytes, fields: Mapping[bytes, bytes]) -> Event:
    data = msgpack.unpackb(fields[b"data"], strict_map_key=False)
    return Event(entry.decode(), float(fields[b"time"]), fields[b"kind"].decode(), data)


def _is_loading(refused: ResponseError) -> bool:
    """Whether the server only has not read its file yet."""
    return "LOADING" in str(refused)


def redacted(url: str) -> str:
    """``url`` without its password."""
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}{'***@' + rest.rpartition('@')[2] if '@' in rest else rest}"


@cache
def _library() -> str:
    return resources.files("pipeline.index").joinpath("index.lua").read_text(encoding="utf-8")


def worker_name(stage: str, number: int) -> str:
    """A name that no other life of the same worker has had: leases of a dead one can be told apart."""
    return f"{stage}-{number}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
