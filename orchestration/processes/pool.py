"""Pools of processes that end with the process that has made them, also when that is killed.

A process of a ``ProcessPoolExecutor`` waits for calls for ever when its maker was killed.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context


def spawned_pool(processes: int, calls: int | None = None) -> ProcessPoolExecutor:
    """Return a pool of so many spawned ``processes``. Each is replaced after so many ``calls``
    (None: never)."""
    context = get_context("spawn")
    return ProcessPoolExecutor(
        processes, context, initializer=_end_with_maker, max_tasks_per_child=calls
    )


def _end_with_maker() -> None:
    maker = multiprocessing.parent_process()
    assert maker is not None

    def end() -> None:
        maker.join()
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()
