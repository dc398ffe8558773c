"""Responses in progress, and the iterator that ``generate`` returns.

engine ── put(Completion) as each response ends, put(error) when it fails ──▶ Responses ──▶ async for
consumer closes it, is cancelled or drops it ──▶ abort(responses), once: the engine drops what has not been yielded
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, Protocol, TypeVar

import torch

from stages.engines.protocols import (
    Completion,
    EngineFailed,
    FinishReason,
    GroupRequest,
    ResponseFailed,
    Token,
)


class Waiting(Protocol):
    """A row that waits for an engine. ``begun``: tokens of earlier requests."""

    @property
    def request(self) -> GroupRequest: ...
    @property
    def begun(self) -> int: ...


Row = TypeVar("Row", bound=Waiting)


def line_up(waiting: deque[Row], rows: Iterable[Row]) -> None:
    """Insert ``rows`` into those that wait for an engine, in the order in which it should start
    them: those that go on with a response first, the oldest group first, as optimizer steps wait
    for them; then the others, as they came."""
    for row in rows:
        insort(waiting, row, key=lambda row: (0, row.request.group) if row.begun else (1, 0))


class ResponseInProgress:
    """The response at ``place`` of ``request``: all its tokens so far.

    The first ``begun`` are of earlier requests, the first ``turn_start`` of them of earlier turns.
    At ``limit`` tokens its turn ends. Random numbers count ``aside`` tokens more.
    """

    def __init__(self, request: GroupRequest, place: int) -> None:
        self.request = request
        self.place = place
        begun = request.begun.get(place)
        self.tokens: list[int] = begun.token_ids.tolist() if begun else []
        self.logprobs: list[float] = begun.logprobs.tolist() if begun else []
        self.versions = list(begun.versions) if begun else []
        self.begun = len(self.tokens)
        self.turn_start = request.turn_start(place)
        self.limit = request.limit(place)
        self.aside = request.aside(place)
        self.cached_tokens = 0  # of the prompt and of earlier requests
        self.drafted_tokens = self.held_tokens = 0
        self.begun_routing = begun.routed_experts if begun else None
        self.routing: list[torch.Tensor] = []  # [n, layers * top-k] of the fed tokens after those

    def add_version(self, version: int, tokens: int) -> None:
        """Record that weights of ``version`` made the next ``tokens`` tokens."""
        if not tokens:
            return
        if self.versions and self.versions[-1][0] == version:
            tokens += self.versions.pop()[1]
        self.versions.append((version, tokens))

    def completion(self, reason: FinishReason) -> Completion:
        return Completion(
            group=self.request.group,
            place=self.place,
            token_ids=torch.tensor(self.tokens, dtype=torch.int64),
            logprobs=torch.tensor(self.logprobs, dtype=torch.float32),
            versions=tuple(self.versions),
            finish_reason=reason,
            cached_tokens=self.cached_tokens,
            drafted_tokens=self.drafted_tokens,
            held_tokens=self.held_tokens,
            routed_experts=self._routed_experts(),
        )

    def _routed_experts(self) -> torch.Tensor | None:
        if not self.routing:
            return None
        begun = [] if self.begun_routing is None else [self.begun_routing]
        # A token that was launched after the last one is none of the response.
        return torch.cat([*begun, torch.cat(self.routing).cpu()])[
            : len(self.request.prompt_ids) + len(self.tokens) - 1
        ]


def engine_failed(error: BaseException) -> EngineFailed:
    failed = EngineFailed(f"the rollout engine failed: {error!r}")
    failed.__cause__ = error
    return failed


def response_failed(error: Exception) -> ResponseFailed:
    failed = ResponseFailed(f"the response failed in the rollout engine: {error!r}")
    failed.__cause__ = error
    return failed


class Responses(AsyncIterator[Any]):
    """Yields ``rows`` completions, and tokens where the engine streams them.

    Calls ``abort`` with this object when it ends before all of them were yielded.
    """

    def __init__(self, rows: int, abort: Callable[[Responses], None]) -> None:
        self._left = rows
        self._abort = abort
        self.queue: asyncio.Queue[Token | Completion | Exception] = asyncio.Queue()

    def put(self, item: Token | Completion | Exception) -> None:
        """Add a token, a response that has ended, or the error that ends all the others.

        Called in the consumer's loop.
        """
        self.queue.put_nowait(item)

    async def __anext__(self) -> Any:
        if not self._left:
            raise StopAsyncIteration
        try:
            item = await self.queue.get()
        except asyncio.CancelledError:
            await self.aclose()
            raise
        if isinstance(item, Exception):
            self._left = 0
            raise item
        self._left -= isinstance(item, Completion)
        return item

    async def aclose(self) -> None:
        """Abort the rows that have not been yielded. May be called again."""
        if self._left:
            self._left = 0
            self._abort(self)

    def __del__(self) -> None:
        if self._left:
            self._abort(self)
