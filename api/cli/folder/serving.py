"""A server of this process that shows runs in folders, and a client of it for one command.

FOLDER… ─▶ FolderRuns ─▶ the server of `asyncdock serve`, which changes none
RUN_DIR ─▶ the same, for as long as one command asks it
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog

from api.client.client import Client

TEMPORARY = "asyncdock-view-"
INDEX_SECONDS = 10.0  # for which a request waits for the index of a run


async def serve_folders(
    folders: Sequence[Path],
    data: Path,
    stop: asyncio.Event,
    ready: Callable[[str, str], None],
    address: Mapping[str, Any],
) -> None:
    """Show the runs in ``folders`` until ``stop``; ``data``: an empty folder. Raises ServeError and
    ValueError."""
    from api.server.access.settings import Settings
    from api.server.app import serve
    from orchestration.service.folder_runs import FolderRuns
    from pipeline.index.embedded import EmbeddedIndex

    server = EmbeddedIndex(data / "index")  # ends with this process, however that ends
    settings = Settings(
        **address, data=data, index=server.url, runs=0, runs_of="folders", policies=0
    )
    if not settings.loopback:
        raise ValueError(
            f"--listen: {settings.host} can be reached from other machines; a view is for this "
            f"one: give 127.0.0.1, or use `asyncdock serve`"
        )

    def registry_of(url: str) -> FolderRuns:
        return FolderRuns(url, folders, data / "copies", timeout=INDEX_SECONDS)

    try:
        await asyncio.to_thread(server.start)
        await serve(settings, stop, ready, registry_of=registry_of)
    finally:
        await asyncio.to_thread(server.stop)


class FolderClient(Client):
    """A client of a server that shows the run in ``folder``, which calls may name by its path."""

    def __init__(self, folder: str, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._folder = folder
        self._id = ""

    async def __aenter__(self) -> FolderClient:
        await super().__aenter__()
        async for run in self.runs(limit=1):
            self._id = run.id
        return self

    def _run(self, run: str, subject: str = "") -> str:
        return super()._run(self._id if run == self._folder else run, subject)


@contextlib.asynccontextmanager
async def client_of_folder(folder: str, **options: Any) -> AsyncIterator[FolderClient]:
    """Yield a client that reads the run in ``folder``, live or ended. Raises ServeError."""
    from orchestration.service.own_services import read_authorization

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    stop = asyncio.Event()
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def ready(at: str, _: str) -> None:
        url.set_result(at)

    with tempfile.TemporaryDirectory(prefix=TEMPORARY) as data:
        showing = serve_folders([Path(folder)], Path(data), stop, ready, {"port": 0})
        serving = asyncio.create_task(showing)
        try:
            beginning: set[asyncio.Future[Any]] = {serving, url}
            await asyncio.wait(beginning, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
            token = read_authorization(Path(data))
            async with FolderClient(folder, url.result(), token, **options) as client:
                yield client
        finally:
            stop.set()
            await asyncio.wait([serving])
