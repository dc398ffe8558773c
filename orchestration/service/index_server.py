"""The index server of a service without an external index: a Valkey server that outlives the
process that starts it.

    start ─▶ DATA/service.json names a live server? ─yes─▶ its URL
                                                    └no──▶ start one on the same data, in its own session
    keep  ─▶ wait for its end ─▶ start, and so on

Its append-only file holds everything that was acknowledged, so a server that was killed restarts
without loss.
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

from orchestration.private_files import private_folder, write_private
from orchestration.processes.handles import Process
from pipeline.index.embedded import SOCKET_PATH_LIMIT, EmbeddedIndex
from pipeline.locks import locked

log = structlog.get_logger()

# in the service's folder: URL and process of its index; readable by its owner only
FILE = "service.json"
STOP_SECONDS = 10.0
AGAIN_SECONDS = 1.0  # between attempts to start it
# for which another process may hold the lock: longer than a start or a stop takes
LOCK_SECONDS = 30.0


class ServiceIndex:
    """The index server of the service in ``data``.

    Objects in several processes refer to the same server.
    """

    def __init__(self, data: Path) -> None:
        self._named = data
        self.data = data.resolve()  # another user may have made the link that was named
        self._process: Process | None = None

    @property
    def pid(self) -> int | None:
        """Its process number, once this object has started or found it."""
        return self._process.pid if self._process else None

    def start(self) -> str:
        """Start the server unless it runs.

        Returns its URL. Raises RuntimeError (Locked is one) or TimeoutError when it does not start,
        and NotPrivate.
        """
        private_folder(self._named)
        with locked(self.data / "service.lock", wait=LOCK_SECONDS):
            known = self._read_file()
            if self._process is not None and self._process.alive():
                return str(known["index"])
            server = EmbeddedIndex(self.data / "index", socket=self._socket(known), outlives=True)
            server.start()
            assert server.pid is not None
            self._process = Process.of(server.pid, server.process)
            write_private(
                self.data / FILE, json.dumps({"index": server.url, "process": str(self._process)})
            )
            log.info("index started", data=str(self.data), pid=server.pid)
            return server.url

    async def keep(self) -> None:
        """Start the server whenever it is not running, until cancelled."""
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
        """End the server if it runs. No run may be active: its runner would wait for the index."""
        with locked(self.data / "service.lock", wait=LOCK_SECONDS):
            known = self._read_file()
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

    def _read_file(self) -> dict[str, str]:
        """Return the content of FILE, and remember the process that it names."""
        try:
            known = json.loads((self.data / FILE).read_text())
        except (OSError, ValueError):
            known = {}
        process = Process.parse(known.get("process", ""))
        # an equal one may have an exit code, as a child of this process
        if process != self._process:
            self._process = process
        return known

    def _socket(self, known: dict[str, str]) -> Path:
        """Return the path of the socket: the previous one if possible, so that connected clients
        find the server again."""
        before = Path(known.get("index", "").removeprefix("unix://"))
        near = self.data / "index" / "index.sock"
        if before == near or len(os.fsencode(near)) <= SOCKET_PATH_LIMIT:
            return near
        if before.is_absolute() and _is_private(before.parent):
            return before
        return Path(tempfile.mkdtemp(prefix="asyncdock-index-")) / "index.sock"


def _is_private(folder: Path) -> bool:
    """Return whether no other user can have created files in ``folder``."""
    try:
        folder_stat = folder.lstat()
    except OSError:
        return False
    return (
        folder_stat.st_uid == os.getuid()
        and folder_stat.st_mode & 0o777 == 0o700
        and not folder.is_symlink()
    )
