"""A call of a user's function that ends after a time, whatever the function does.

    plain function ──▶ a daemon thread                                 ┬─▶ its result, or what it raised
    async function ──▶ an event loop in a daemon thread, for all calls ┴─▶ TimeLimit, with the line where it is

A thread that blocks cannot be ended: it goes on until its process ends, which it does not hinder.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from pipeline.compat.loop_thread import LoopThread
from stages.threads import run_in_thread
from stages.user_code import place_in


class TimeLimit(Exception):
    """The call took too long. ``place``: file and line of the function where it was then."""

    def __init__(self, place: str) -> None:
        super().__init__(place)
        self.place = place


class BoundedCalls:
    """Calls of ``function``, plain or async, each within ``timeout`` seconds (None: without a
    limit). ``name``: of its threads."""

    def __init__(self, function: Callable[[Any], Any], timeout: float | None, name: str) -> None:
        self._function = function
        self._timeout = timeout
        self._name = name
        self._loop: LoopThread | None = None

    async def call(self, argument: Any) -> Any:
        """Return the function's result for ``argument``.

        Raises TimeLimit, and what the function raises.
        """
        if inspect.iscoroutinefunction(self._function):
            return await self._within(self._function(argument))
        threads: list[int] = []

        def run() -> Any:
            threads.append(threading.get_ident())
            return self._function(argument)

        result = await self._until(
            run_in_thread(run, self._name), lambda: sys._current_frames().get(threads[0])
        )
        return await self._within(result) if isinstance(result, Awaitable) else result

    def close(self) -> None:
        """End the event loop. A call that blocks it goes on."""
        if self._loop is not None:
            self._loop.stop()

    async def _within(self, made: Any) -> Any:
        self._loop = self._loop or LoopThread(self._name)
        return await self._until(
            self._loop.submit(_awaited(made)), lambda: getattr(made, "cr_frame", None)
        )

    async def _until(self, work: asyncio.Future[Any], frame: Callable[[], Any]) -> Any:
        try:
            done, _ = await asyncio.wait([work], timeout=self._timeout)
            if not done:
                raise TimeLimit(place_in(frame(), self._function))
            return work.result()
        finally:
            work.cancel()


async def _awaited(made: Awaitable[Any]) -> Any:
    return await made
