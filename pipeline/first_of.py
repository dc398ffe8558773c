"""A wait for the first of several awaitables, which cancels the others."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def first_of(*work: Coroutine[Any, Any, Any], timeout: float | None = None) -> list[Any]:
    """Run ``work`` concurrently until one of them ends, or for ``timeout`` seconds; cancel the
    others and wait for them.

    Returns one result for each awaitable, in the order given: None for those that had not ended.
    Raises the exception of the first in that order that failed. When the caller is cancelled, all
    of them are cancelled and awaited.

    >>> async def example():
    ...     return await first_of(asyncio.sleep(0, "ready"), asyncio.sleep(60, "late"))
    >>> asyncio.run(example())
    ['ready', None]
    """
    tasks = [asyncio.create_task(coroutine) for coroutine in work]
    try:
        await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        ended = [task.done() for task in tasks]
    finally:
        await cancel_all(*tasks)
    return [task.result() if done else None for task, done in zip(tasks, ended, strict=True)]


async def cancel_all(*tasks: asyncio.Future[Any] | None) -> None:
    """Cancel ``tasks`` (None: there is none) and wait until they have ended.

    What they raise is dropped.
    """
    begun = [task for task in tasks if task is not None]
    for task in begun:
        task.cancel()
    await asyncio.gather(*begun, return_exceptions=True)
