"""What ``generate`` returns, for an engine that lives in its callers' asyncio loop.

engine ── put(Completion) as each response ends, put(error) at the end of everything ──▶ Responses ──▶ async for
consumer closes it or is cancelled ──▶ abort(responses), once: the engine drops what has not been yielded
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from stages.engines.protocols import Completion


class Responses(AsyncIterator[Completion]):
    """``rows`` completions are still to be yielded. ``abort`` is called with this object when nobody wants them any more."""

    def __init__(self, rows: int, abort: Callable[[Responses], None]) -> None:
        self._left, self._abort = rows, abort
        self._ready: asyncio.Queue[Completion | Exception] = asyncio.Queue()

    def put(self, item: Completion | Exception) -> None:
        """A response that has ended, or the error that ends all that is left."""
        self._ready.put_nowait(item)

    async def __anext__(self) -> Completion:
        if not self._left:
            raise StopAsyncIteration
        try:
            item = await self._ready.get()
        except asyncio.CancelledError:
            await self.aclose()
            raise
        if isinstance(item, Exception):
            self._left = 0
            raise item
        self._left -= 1
        return item

    async def aclose(self) -> None:
        """Abort what has not been yielded. Harmless when repeated."""
        if self._left:
            self._left = 0
            self._abort(self)
