"""A Docker engine of this check's own, in namespaces of its own: with them end its processes,
mounts and networks.

isolated(command) ──unshare──▶ private /run, loopback and processes ──▶ the check again, inside
                                 └─ with Engine(folder): dockerd, that all ``docker`` commands reach
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil

from pipeline.index.embedded import die_with_parent
from tests.compose.bases import WHEELS_PORT
from tests.compose.page import until

SOCKET = "unix:///run/check.sock"
START_SECONDS = 120.0
END_SECONDS = 60.0


def isolated(arguments: Sequence[str]) -> int:
    """Exit code of this module's check with ``arguments``, in namespaces that end with this
    process."""
    enter = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    prepare = 'mount -t tmpfs tmpfs /run && ip link set lo up && exec "$@"'
    check = [sys.executable, "-m", "tests.compose.check", *arguments]
    parent = partial(die_with_parent, os.getpid())
    process = subprocess.Popen([*enter, "sh", "-c", prepare, "sh", *check], preexec_fn=parent)
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:  # the check inside has it, too, and takes everything down
            continue


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


class Engine:
    """``with Engine(folder):`` dockerd with its data below ``folder``, and ``folder``/wheels for
    the build's pip."""

    def __init__(self, folder: Path) -> None:
        self._data = folder / "docker"
        self._wheels = folder / "wheels"
        self.log = folder / "dockerd.log"
        self._left: list[str] = []

    def __enter__(self) -> Engine:
        shutil.rmtree(self._data, ignore_errors=True)  # of a check that was killed
        self._server = ThreadingHTTPServer(
            ("127.0.0.1", WHEELS_PORT), partial(Quiet, directory=str(self._wheels))
        )
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        os.environ["DOCKER_HOST"] = SOCKET
        places = [
            "--data-root",
            str(self._data),
            "--exec-root",
            "/run/check",
            "--pidfile",
            "/run/check.pid",
        ]
        with self.log.open("wb") as output:
            command = ["dockerd", *places, "--host", SOCKET]
            # In a process group of its own: Ctrl-C ends the check, which then still takes down what
            # runs.
            self._daemon = subprocess.Popen(
                command, stdout=output, stderr=output, start_new_session=True
            )
        until(self._answers, START_SECONDS, f"dockerd answers (its log: {self.log})")
        return self

    def __exit__(self, *_: object) -> None:
        self._daemon.terminate()
        try:
            self._daemon.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._daemon.kill()
        self._server.shutdown()
        left = others()
        self._left = [" ".join(process.cmdline()) for process in left]
        for process in left:
            process.kill()
        psutil.wait_procs(left, END_SECONDS)
        shutil.rmtree(self._data)

    def assert_nothing_was_left(self) -> None:
        """For after its end. What it left running was ended then."""
        assert not self._left, self._left
        assert not others()

    def _answers(self) -> bool:
        assert self._daemon.poll() is None, f"dockerd ended:\n{self.log.read_text()[-3000:]}"
        return subprocess.run(["docker", "info"], capture_output=True).returncode == 0


def others() -> list[psutil.Process]:
    """The processes of these namespaces, but this one."""
    alive = [process for process in psutil.process_iter() if process.pid != os.getpid()]
    return [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
