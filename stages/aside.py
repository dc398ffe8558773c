"""Work in a thread that nobody has to wait for: one that never returns does not keep its process from ending.

``asyncio.to_thread`` is for what surely ends: its threads are joined, without a limit, before the loop and the process end.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def aside(work: Callable[[], T], name: str) -> asyncio.Future[T]:
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
