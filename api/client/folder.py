"""A server of this process that shows runs in folders, and clients of it for one run.

FOLDER… ─▶ FolderRuns ─▶ the server of `asyncdock serve`, which changes none
RUN_DIR ─▶ the same, for as long as its client is open;
           stop, pause, … ─▶ the index of the command that executes the run
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from api.client.client import Client, M, SyncClient
from api.client.errors import NotShown, WrongState
from orchestration.state import registry
from orchestration.state.lifecycle import ask_in_folder
from orchestration.state.paths import RECIPE
from orchestration.state.registry import Ask, ask_active

ASKED = ("pause", "resume", "stop", "checkpoint")
TEMPORARY = "asyncdock-view-"
INDEX_SECONDS = 3.0  # for which a request waits for the index of a run, which ends with it


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
        self._path = Path(folder).resolve()
        self._id = ""

    async def find(self) -> None:
        """Find the run's id. Raises NotShown where there is no run."""
        async for run in self.runs(limit=1):
            self._id = run.id
        if self._id:
            return
        try:
            (self._path / RECIPE).read_bytes()
        except OSError as error:
            raise NotShown(f"run: {self._folder} cannot be read: {error}") from None
        raise NotShown(
            f"run: {self._folder} cannot be read, as {self._path / RECIPE} is no recipe in "
            f"JSON; put back the one that the run has written"
        )

    def _run(self, run: str, subject: str = "") -> str:
        return super()._run(self._id if run == self._folder else run, subject)

    async def _post(
        self, model: type[M], path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> M:
        """Post ``body``; ask the command that executes the run for what the server may not
        change."""
        asked = path.removeprefix(self._run(self._folder) + "/")
        if asked not in ASKED or body is not None:
            return await super()._post(model, path, body, headers)
        ask = functools.partial(ask_active, what=cast(Ask, asked))
        try:
            await ask_in_folder(self._path, ask)
        except (LookupError, registry.WrongState) as error:
            raise WrongState(409, "The run cannot do this now.", str(error)) from None
        return await self._get(model, self._run(self._folder))


@contextlib.asynccontextmanager
async def client_of_folder(folder: str, **options: Any) -> AsyncIterator[FolderClient]:
    """Yield a client that reads the run in ``folder``, live or ended. Raises NotShown."""
    from api.server.app import ServeError
    from orchestration.service.own_services import read_authorization

    stop = asyncio.Event()
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def ready(at: str, _: str) -> None:
        url.set_result(at)

    with tempfile.TemporaryDirectory(prefix=TEMPORARY, ignore_cleanup_errors=True) as data:
        showing = serve_folders([Path(folder)], Path(data), stop, ready, {"port": 0})
        serving = asyncio.create_task(showing)
        try:
            beginning: set[asyncio.Future[Any]] = {serving, url}
            await asyncio.wait(beginning, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                try:
                    serving.result()
                except (ServeError, OSError, RuntimeError) as error:
                    raise NotShown(f"run: {folder} cannot be shown: {error}") from error
            token = read_authorization(Path(data))
            async with FolderClient(folder, url.result(), token, **options) as client:
                await client.find()
                yield client
        finally:
            stop.set()
            await asyncio.wait([serving])
            # Where the interpreter ends, no thread can be started any more to stop the index in,
            # which ends with this process. A server that has not started was reported above.
            with contextlib.suppress(RuntimeError, OSError):
                serving.result()


class SyncFolderClient(SyncClient):
    """:class:`SyncClient` of the run in ``folder``, live or ended. Raises NotShown."""

    def __init__(self, folder: str, **options: Any) -> None:
        self._open(client_of_folder(folder, **options))
