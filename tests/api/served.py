"""A service of the tests' own, as its command starts it, on a port that a second server can take
again."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

from orchestration.service.index_server import FILE, ServiceIndex
from orchestration.service.own_services import read_authorization
from tests.api.watchdog import HELD
from tests.forked import listen
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 120.0


class Served:
    """``asyncdock serve`` on one port, which a second server can take again."""

    def __init__(self, data: Path, *options: str, descriptors: int = 0) -> None:
        self.port = free_port()
        self.data = data
        self.options = options
        self.url = f"http://127.0.0.1:{self.port}"
        self.descriptors = descriptors  # that its process may have; 0: as many as this one
        self.process: subprocess.Popen[str] | None = None
        self.log = data.parent / "serve.log"

    def start(self) -> None:
        command = [
            "serve",
            "--data",
            str(self.data),
            "--listen",
            f"127.0.0.1:{self.port}",
            *self.options,
        ]
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tests.api.watched", *command],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=ROOT,
                env=environment(),
                preexec_fn=self._limit if self.descriptors else None,
            )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == (f"AsyncDock serves {self.url}\n"), (
            self.log.read_text()
        )

    @property
    def token(self) -> str:
        """That of the user who runs it, which commands and clients find by its address."""
        return read_authorization(self.data)

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"}

    def _limit(self) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (self.descriptors, self.descriptors))

    def stop(self, number: int = signal.SIGINT) -> int:
        """The server alone, by a signal: its exit code. Harmless when it has ended."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(SECONDS)

    def kill(self) -> None:
        """The server alone, by kill -9."""
        self.stop(signal.SIGKILL)

    def end(self) -> None:
        """The server, cleanly, and its index. No handler may have held the event loop."""
        self.stop()
        if (self.data / FILE).exists():
            ServiceIndex(self.data).stop()
        assert not (held := [line for line in self.log.read_text().splitlines() if HELD in line]), (
            held
        )


def environment() -> dict[str, str]:
    listen()
    return {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "150"}
