"""The iterator that ``generate`` returns.

engine ── put(Completion) as each response ends, put(error) when it fails ──▶ Responses ──▶ async for
consumer closes it, is cancelled or drops it ──▶ abort(responses), once: the engine drops what has not been yielded
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from stages.engines.protocols import Completion


class Responses(AsyncIterator[Completion]):
    """Yields ``rows`` completions. Calls ``abort`` with this object when it ends before all of them were yielded."""

    def __init__(self, rows: int, abort: Callable[[Responses], None]) -> None:
        self._left, self._abort = rows, abort
        self.queue: asyncio.Queue[Completion | Exception] = asyncio.Queue()

    def put(self, item: Completion | Exception) -> None:
        """Add a response that has ended, or the error that ends all the others. Called in the consumer's loop."""
        self.queue.put_nowait(item)

    async def __anext__(self) -> Completion:
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
        self._left -= 1
        return item

    async def aclose(self) -> None:
        """Abort the rows that have not been yielded. May be called again."""
        if self._left:
            self._left = 0
            self._abort(self)

    def __del__(self) -> None:
        if self._left:
            self._abort(self)
