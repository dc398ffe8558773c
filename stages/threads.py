"""Work in a thread of its own, which ends with it.

``aside``: nobody has to wait for it, so one that never returns does not keep its process from ending. ``asyncio.to_thread``
is for what surely ends: its threads are joined, without a limit, before the loop and the process end.

``apart``: for what computes in parallel once, beside a thread that does so all the time. OpenMP keeps helpers for each
thread that has used it, until that thread ends, and where all threads together have more of them than there are cores,
libgomp has none of them wait awake: every parallel loop then begins with a system call, which for small ones is most of
their time.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def run_in_thread(work: Callable[[], T], name: str) -> asyncio.Future[T]:
    """What ``work`` returns or raises, from a daemon thread called ``name``. Cancelling the future leaves the thread be."""
    outcome: Future[T] = Future()

    def run() -> None:
        if not outcome.set_running_or_notify_cancel():
            return
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return asyncio.wrap_future(outcome)


def run_in_temporary_thread(work: Callable[[], T]) -> T:
    """What ``work`` returns or raises, once its thread and the helpers that OpenMP gave it are gone."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return outcome.result()
