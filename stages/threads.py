"""Functions that run in threads of their own.

:func:`run_in_thread` starts a daemon thread: a function that never returns does not keep the
process from ending. ``asyncio.to_thread`` is for functions that surely end: its threads are joined,
without a limit, before the loop and the process end.

:func:`run_in_temporary_thread` is for one parallel computation beside a thread that computes all
the time. OpenMP keeps helper threads for each thread that has used it, until that thread ends. When
all of them together are more than the cores, libgomp's helpers do not spin, and every parallel loop
begins with a system call, which takes most of the time of small loops.
"""

from __future__ import annotations

import asyncio
import os
import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import FrameType
from typing import TypeVar

T = TypeVar("T")


def deferred(work: Callable[[], T]) -> tuple[Future[T], Callable[[], None]]:
    """Return a future, and a function to call in a thread, which sets it to what ``work`` returns
    or raises. A future that was cancelled before that is not set, and ``work`` is not called."""
    outcome: Future[T] = Future()

    def run() -> None:
        if not outcome.set_running_or_notify_cancel():
            return
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    return outcome, run


def run_in_thread(work: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Return a future of what ``work`` returns or raises in a daemon thread called ``name``.

    Cancelling the future does not end the thread.
    """
    outcome, run = deferred(work)
    threading.Thread(target=run, name=name, daemon=True).start()
    return asyncio.wrap_future(outcome)


class CallThread:
    """A daemon thread called ``name`` that calls functions one after the other, for objects that
    belong to the thread that made them, as a connection of sqlite3. It starts with the first."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._begun = 0
        self._ended = 0
        self._is_closed = False

    def run(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Return a future of what ``work`` returns or raises. Raises RuntimeError after :meth:`end`:
        nothing would call it."""
        if self._is_closed:
            raise RuntimeError("its thread was ended")
        outcome, call = deferred(work)
        self._begun += 1
        self._calls.put(call)
        if self._thread.ident is None:
            self._thread.start()
        return asyncio.wrap_future(outcome)

    def end(self) -> None:
        """Let the thread end after the calls that it has."""
        self._is_closed = True
        self._calls.put(None)

    def busy(self) -> bool:
        """Return whether a call has not returned."""
        return self._begun > self._ended

    def frame(self) -> FrameType | None:
        """Return where the thread is."""
        return sys._current_frames().get(self._thread.ident or 0)

    def _run(self) -> None:
        process = os.getpid()
        while call := self._calls.get():
            call()
            if os.getpid() != process:
                os._exit(0)  # a child that the call has forked must not go on with the next
            self._ended += 1


def run_in_temporary_thread(work: Callable[[], T]) -> T:
    """Return or raise what ``work`` does, when its thread and the OpenMP helpers of that thread
    have ended."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()
