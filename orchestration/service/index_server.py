"""The index of a service that was given no other: a Valkey server that outlives whoever started it.

    start ─▶ DATA/service.json names a living server? ─yes─▶ its URL
                                                      └no──▶ a new one on the same data, in a session of its own
    keep  ─▶ wait for its end ─▶ start, and so on

Its append-only file holds all that was acknowledged, so a server that was killed is there again with everything.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import tempfile
from pathlib import Path

import structlog

from orchestration.private_files import private_folder
from orchestration.processes.handles import Process
from pipeline.index.embedded import SOCKET_PATH_LIMIT, EmbeddedIndex
from pipeline.locks import locked

log = structlog.get_logger()

FILE = "service.json"  # in the service's folder: URL and process of its index; only its user can read it
STOP_SECONDS = 10.0
AGAIN_SECONDS = 1.0
LOCK_SECONDS = 30.0  # for which another process may hold the lock: longer than a start or a stop takes


class ServiceIndex:
    """The index of the service in ``data``. Any number of processes may have one; they all mean the same server."""

    def __init__(self, data: Path) -> None:
        self.data = data.resolve()
        self._process: Process | None = None

    @property
    def pid(self) -> int | None:
        """Its process, once it was started or found here."""
        return self._process.pid if self._process else None

    def start(self) -> str:
        """See to it that the server is up, and return its URL. Raises RuntimeError, Locked among them, or TimeoutError when
        it does not come, and NotPrivate."""
        private_folder(self.data)
        with locked(self.data / "service.lock", wait=LOCK_SECONDS):
            known = self._known()
            if self._process is not None and self._process.alive():
                return str(known["index"])
            server = EmbeddedIndex(self.data / "index", socket=self._socket(known), outlives=True)
            server.start()
            assert server.pid is not None
            self._process = Process.of(server.pid, server.process)
            written = {"index": server.url, "process": str(self._process)}
            partial = self.data / f".{FILE}"
            partial.unlink(missing_ok=True)
            with open(os.open(partial, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600), "w") as file:
                json.dump(written, file)
            os.replace(partial, self.data / FILE)
            log.info("index started", data=str(self.data), pid=server.pid)
            return server.url

    async def keep(self) -> None:
        """Start the server again whenever it ends; for ever."""
        while True:
            try:
                await asyncio.to_thread(self.start)
            except (OSError, RuntimeError, ValueError) as error:
                log.error("the index does not start; trying again", error=str(error))
                await asyncio.sleep(AGAIN_SECONDS)
                continue
            assert self._process is not None
            await self._process.wait()
            log.warning("the index ended; starting it again", data=str(self.data))

    def stop(self) -> None:
        """End the server, if it is up. No run may be active: their runners would wait for it in vain."""
        with locked(self.data / "service.lock", wait=LOCK_SECONDS):
            known = self._known()
            process = self._process
            if process is not None and process.alive():
                process.end(signal.SIGTERM)
                try:
                    asyncio.run(asyncio.wait_for(process.wait(), STOP_SECONDS))
                except TimeoutError:
                    process.end()
                    asyncio.run(process.wait())
            self._process = None
            if socket := str(known.get("index", "")).removeprefix("unix://"):
                Path(socket).unlink(missing_ok=True)
                if Path(socket).parent != self.data / "index":
                    with contextlib.suppress(OSError):
                        Path(socket).parent.rmdir()
            (self.data / FILE).unlink(missing_ok=True)

    def _known(self) -> dict[str, str]:
        """What the file says, and its process as ours."""
        try:
            known = json.loads((self.data / FILE).read_text())
        except (OSError, ValueError):
            known = {}
        found = Process.parse(known.get("process", ""))
        if found != self._process:  # else ours knows more: it may be our child
            self._process = found
        return known

    def _socket(self, known: dict[str, str]) -> Path:
        """Where it listens: as before, so that whoever was connected finds it again."""
        before = Path(known.get("index", "").removeprefix("unix://"))
        near = self.data / "index" / "index.sock"
        if before == near or len(os.fsencode(near)) <= SOCKET_PATH_LIMIT:
            return near
        if before.is_absolute() and _is_ours(before.parent):
            return before
        return Path(tempfile.mkdtemp(prefix="asyncdock-index-")) / "index.sock"


def _is_ours(folder: Path) -> bool:
    """Whether nobody else can have put something there."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return found.st_uid == os.getuid() and found.st_mode & 0o777 == 0o700 and not folder.is_symlink()
