"""Events that a run's index still has when its command was killed before it wrote them down.

index.json is there ─▶ the command did not end ─▶ the index's file (or the index of a user) ─▶ events after the last
                                                                                               one in metrics.jsonl
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import redis
import structlog

from orchestration.state.paths import INDEX, WHERE
from pipeline.data.events import Event
from pipeline.index.client import Index, IndexUnreachable
from pipeline.index.embedded import EmbeddedIndex
from pipeline.node import owned_prefix

log = structlog.get_logger()


async def former_events(path: Path, after: str) -> AsyncIterator[Event]:
    """Yield the events after the id ``after`` of the run in ``path``, whose command was killed.

    Nothing is yielded where the command has ended by itself, or its index cannot be read.
    """
    try:
        where = json.loads((path / WHERE).read_text())
    except (OSError, ValueError):
        return
    try:
        async with _former_url(path / INDEX, where["index"]) as url:
            index = Index(url, where["run"])
            try:
                while events := await index.past_events(after):
                    for event in events:
                        yield event
                    after = events[-1].id
            finally:
                await index.close()
    except (OSError, RuntimeError, IndexUnreachable, redis.RedisError) as error:
        log.warning("the last events before the kill cannot be read", reason=str(error))


@contextlib.asynccontextmanager
async def _former_url(folder: Path, url: str) -> AsyncIterator[str]:
    """Serve what the embedded index of the former command has left in ``folder``; that of a user,
    at ``url``, is still there."""
    if not await asyncio.to_thread(lambda: any(folder.rglob("*.aof"))):
        yield url
        return
    with tempfile.TemporaryDirectory(prefix=owned_prefix(os.getpid())) as sockets:
        server = EmbeddedIndex(folder, socket=Path(sockets) / "index.sock")
        try:
            for pause in server.starting():
                await asyncio.sleep(pause)
            yield server.url
        finally:
            await asyncio.to_thread(server.stop)
