"""The requests of one journal: recorded once, answered once, and forgotten after they were read.

add ─▶ recorded ─▶ served ─▶ answer ─▶ recorded ─▶ result, again and again ─▶ forgotten
  └ the same again: the same request

Bytes of calls and answers stay in the journal; memory has a few facts of each.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import time
import zlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any, cast

import structlog

from orchestration.calls.engines.encoding import unpack_output
from orchestration.calls.interface import Busy, CallOptions, Done, Failed, Gone, Kind
from orchestration.calls.journal import Journal, Record
from stages.calls.interface import CallRefused, PassOutput

log = structlog.get_logger()

MOST_COMPLETIONS = 1000  # that are told at once
AGAIN_SECONDS = 5.0  # until an answer that the disk has refused is written again


@dataclass(eq=False)
class Account:
    """What an owner has waiting, within the limits of ``options``. ``total``: with the requests
    whose answers may still be read."""

    options: CallOptions
    requests: int = 0
    bytes: int = 0
    total: int = 0

    def charge(self, nbytes: int, *, must: bool) -> None:
        """Count a request in. Raises Busy, unless it ``must`` be taken."""
        options = self.options
        if not must and self.requests >= options.waiting_requests:
            raise Busy(f"{self.requests} requests wait, at most {options.waiting_requests} may")
        if not must and self.requests and self.bytes + nbytes > options.waiting_bytes:
            raise Busy(f"requests of {self.bytes} bytes wait, at most {options.waiting_bytes} may")
        self.requests += 1
        self.bytes += nbytes

    def check_total(self) -> None:
        """Raise Busy where an owner has too many requests in memory."""
        most = self.options.owner_requests
        if self.total >= most:
            raise Busy(
                f"{self.total} requests are not forgotten yet, at most {most} may be; read their "
                f"answers, which are forgotten {self.options.answer_seconds:.0f} s later",
                60.0,
            )

    def release(self, nbytes: int) -> None:
        self.requests -= 1
        self.bytes -= nbytes


@dataclass(eq=False)
class Request:
    """``head``: of its call, ``call``: its record, None once nothing needs it any more."""

    head: dict[str, Any]
    call: Record | None
    arrived: float = field(default_factory=time.monotonic)
    outcome: Record | None = None
    """Its answer, which may not be recorded yet."""
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    last_read: float | None = None
    attempts: int = 0
    """Ends of the engine while it was served."""

    @property
    def request_id(self) -> str:
        return str(self.head["call"])

    @property
    def kind(self) -> Kind:
        return cast(Kind, self.head["kind"])

    @property
    def size(self) -> int:
        return 0 if self.call is None else self.call.size

    @property
    def succeeded(self) -> bool:
        return self.outcome is not None and "failed" not in self.outcome.head


class Completions:
    """Requests in the order in which they were answered, by a key of them, each with a number: larger
    ones than those of an earlier process have had."""

    def __init__(self) -> None:
        self._newest = time.time_ns() // 1000
        self._by_key = dict[Hashable, list[tuple[int, Request]]]()
        self._changed = asyncio.Event()

    def add(self, key: Hashable, request: Request) -> None:
        self._newest += 1
        self._by_key.setdefault(key, []).append((self._newest, request))
        self._changed.set()
        self._changed = asyncio.Event()

    async def after(
        self, key: Hashable, number: int, seconds: float
    ) -> tuple[Sequence[Request], int]:
        """Return requests of ``key`` with numbers above ``number``, at least one unless there is none
        within ``seconds``, and the number of the last one."""
        if number > self._newest:  # of a process whose clock was ahead
            number = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self._after(key, number):
                    await self._changed.wait()
        numbered = self._after(key, number)
        return [request for _, request in numbered], numbered[-1][0] if numbered else number

    def _after(self, key: Hashable, number: int) -> Sequence[tuple[int, Request]]:
        numbered = self._by_key.get(key, [])
        start = bisect.bisect_right(numbered, number, key=itemgetter(0))
        return numbered[start : start + MOST_COMPLETIONS]

    def forget(self, requests: Sequence[Request]) -> None:
        forgotten = set(map(id, requests))
        for numbered in self._by_key.values():
            numbered[:] = [each for each in numbered if id(each[1]) not in forgotten]


class Requests:
    """``arrived`` is called with each request that is recorded, ``answered`` with each whose answer
    is; ``account``: its owner's."""

    def __init__(
        self,
        journal: Journal,
        account: Account,
        arrived: Callable[[Request], None],
        answered: Callable[[Request], None] = lambda _: None,
    ) -> None:
        self.journal = journal
        self._account = account
        self._arrived = arrived
        self._answered = answered
        self._by_id: dict[str, Request] = {}

    def load(self, record: Record) -> Request:
        """Take a call or an answer of the journal."""
        head = record.head
        if "call" in head:
            request = Request(head, record)
            self._put(request)
            self._account.charge(record.size, must=True)
            return request
        of_call = head["answer"]
        request = self._by_id.get(of_call["call"]) or Request(of_call, None)
        self._put(request)
        if request.call is not None and request.outcome is None:
            self._account.release(request.call.size)
        request.outcome = record
        request.answered.set()
        return request

    def __iter__(self) -> Iterator[Request]:
        return iter(self._by_id.values())

    async def add(self, head: dict[str, Any], blob: bytes, *, must: bool = False) -> Request:
        """Record a call with ``call``, its id, and ``kind`` in its head, or return the same one of
        before. Raises Busy, and CallRefused where the id is another call's."""
        checksum = zlib.crc32(blob)
        request = self._by_id.get(head["call"])
        if request is None:
            self._account.check_total()
            self._account.charge(len(blob), must=must)
            head = {**head, "checksum": checksum}
            request = Request(head, self.journal.append(head, blob))
            self._put(request)
            assert request.call is not None
            assert request.call.written is not None
            request.call.written.add_done_callback(partial(self._recorded, request))
        elif (request.kind, request.head["checksum"]) != (head["kind"], checksum):
            raise CallRefused(
                message=f"{head['call']}: this number was another call's ({request.kind}); "
                f"give each call a number of its own"
            )
        if request.call is not None and request.call.written is not None:
            try:
                await request.call.on_disk()
            except OSError as error:
                raise Busy(str(error), AGAIN_SECONDS) from error
        return request

    def _recorded(self, request: Request, written: asyncio.Future[None]) -> None:
        if written.cancelled() or written.exception() is not None:
            self.forget(request)
            self._account.release(request.size)
        else:
            self._arrived(request)

    def answer(self, request: Request, outcome: bytes | Failed, **facts: Any) -> None:
        """Record the answer. Until it is on the disk the request waits."""
        head: dict[str, Any] = {"answer": request.head, "time": time.time(), **facts}
        blob = b""
        if isinstance(outcome, Failed):
            head["failed"] = [outcome.message, outcome.by_client, outcome.again]
        else:
            blob = outcome
            head["result"] = zlib.crc32(blob)
        self._write(request, head, blob)

    def _write(self, request: Request, head: dict[str, Any], blob: bytes) -> None:
        request.outcome = self.journal.append(head, blob)

        def answered(written: asyncio.Future[None]) -> None:
            if written.cancelled():
                return
            if (error := written.exception()) is not None:
                log.error("an answer waits for room on the disk", reason=str(error))
                loop = asyncio.get_running_loop()
                loop.call_later(AGAIN_SECONDS, self._write, request, head, blob)
                return
            self._account.release(request.size)
            request.answered.set()
            self._answered(request)

        assert request.outcome.written is not None
        request.outcome.written.add_done_callback(answered)

    async def result(self, request_id: str, seconds: float) -> Done | Failed | None:
        """Return the answer; None when there is none within ``seconds``. Raises Gone."""
        request = self._by_id.get(request_id)
        if request is None:
            raise Gone(
                f"{request_id}: its answer was read and is forgotten, or it came after later "
                f"calls had been served"
            )
        try:
            async with asyncio.timeout(seconds):
                await request.answered.wait()
        except TimeoutError:
            return None
        request.last_read = time.time()
        record = request.outcome
        assert record is not None
        if "failed" in record.head:
            return Failed(*record.head["failed"])
        value = unpack_output(request.kind, self.journal.read(record))
        if isinstance(value, PassOutput) and (stale := record.head.get("staleness")):
            metrics = {
                **value.metrics,
                "staleness:mean": sum(stale) / len(stale),
                "staleness:max": float(max(stale)),
            }
            value = PassOutput(value.logprobs, metrics)
        return Done(request.kind, value)

    def forgettable(self, options: CallOptions) -> Sequence[Request]:
        """Return those whose answers need no longer be kept."""
        now = time.time()
        return [
            request
            for request in self
            if request.outcome is not None
            and request.answered.is_set()
            and now
            > (
                request.outcome.head["time"] + options.unread_seconds
                if request.last_read is None
                else request.last_read + options.answer_seconds
            )
        ]

    def _put(self, request: Request) -> None:
        self._account.total += request.request_id not in self._by_id
        self._by_id[request.request_id] = request

    def may_go(self, options: CallOptions) -> bool:
        """Return whether no answer of them needs to be kept."""
        return len(self.forgettable(options)) == len(self._by_id)

    def forget_all(self) -> None:
        for request in list(self):
            self.forget(request)

    def forget(self, request: Request) -> None:
        del self._by_id[request.request_id]
        self._account.total -= 1

    def records(self) -> Iterator[Record | None]:
        """Calls and answers, as far as they are needed."""
        for request in self:
            yield request.call
            yield request.outcome
