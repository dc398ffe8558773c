"""The request handlers that hold the event loop, and for how long.

    each turn of the loop ── processor time of its thread > LIMIT_SECONDS ──▶ Hold: the request whose turn it was

Processor time, not wall time: on a busy machine a turn waits, and that is no handler's fault.
Collections of garbage are left out: how long one takes depends on what else the test process holds.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from aiohttp import web

# thrice what a handler may hold it: processor time grows too on a machine that others use
LIMIT_SECONDS = 0.15
HELD = "held the event loop for"
_REQUEST: ContextVar[str] = ContextVar("request")


class Watchdog:
    """``with watchdog.watching()``; ``holds`` are the turns that took too long, as texts;
    ``report`` is called with each."""

    def __init__(self, report: Callable[[str], object] = lambda hold: None) -> None:
        self.holds = list[str]()
        self._report = report
        self._collecting = 0.0
        self._began = 0.0

    @contextmanager
    def watching(self) -> Iterator[None]:
        run = asyncio.Handle._run
        gc.callbacks.append(self._collected)

        def timed(handle: asyncio.Handle) -> None:
            began = time.thread_time()
            collecting = self._collecting
            try:
                run(handle)
            finally:
                spent = time.thread_time() - began - (self._collecting - collecting)
                if spent > LIMIT_SECONDS:
                    self._note(handle._context.get(_REQUEST, ""), spent)  # type: ignore[attr-defined]

        asyncio.Handle._run = timed  # type: ignore[method-assign]
        try:
            yield
        finally:
            asyncio.Handle._run = run  # type: ignore[method-assign]
            gc.callbacks.remove(self._collected)

    def _collected(self, phase: str, _: object) -> None:
        if phase == "start":
            self._began = time.thread_time()
        else:
            self._collecting += time.thread_time() - self._began

    def _note(self, request: str, seconds: float) -> None:
        if request:
            self.holds.append(f"{request} {HELD} {1000 * seconds:.0f} ms")
            self._report(self.holds[-1])


@web.middleware
async def marked(request: web.Request, handler: Any) -> web.StreamResponse:
    """Mark what goes on in this task, and in those that it makes, as this request's (a
    middleware)."""
    route = request.match_info.route.resource
    _REQUEST.set(f"{request.method} {route.canonical if route else request.path[:100]}")
    return await handler(request)
