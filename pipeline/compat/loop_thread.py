"""An event loop in a thread of its own, for synchronous callers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """A thread that runs coroutines for callers in any thread and any loop.

    A call through ``anyio.from_thread.BlockingPortal`` takes at least twice as long
    (``benchmarks/flow/libraries.py``), which a put of one key would notice.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name=name, daemon=True).start()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` and wait for its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def submit(self, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """Run ``work``; returns a future of the caller's loop."""
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def stop(self) -> None:
        """End the loop and its thread, with what still runs in it."""
        self._loop.call_soon_threadsafe(self._loop.stop)
