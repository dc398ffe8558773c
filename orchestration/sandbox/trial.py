"""Trials of a process in a sandbox, to know whether it is in one."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable


def possible(parent: int, port: int) -> dict[str, bool]:
    """Return which of these things are possible that a sandbox without a network must refuse.

    ``parent``: a process outside, which listens on ``port`` of loopback.
    """

    def connects() -> None:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            pass

    attempts: dict[str, Callable[[], object]] = {
        "write into /usr": lambda: os.close(
            os.open("/usr/asyncdock-trial", os.O_CREAT | os.O_WRONLY)
        ),
        "read the environment of a process outside": lambda: _read(f"/proc/{parent}/environ"),
        "list /var": lambda: os.listdir("/var"),
        "signal a process outside": lambda: (
            os.kill(parent, signal.SIGCONT) if parent > 2 else _refused()
        ),
        "connect": connects,
        "become another user": lambda: os.setuid(12345),
    }
    return {name: _works(attempt) for name, attempt in attempts.items()}


def _read(path: str) -> None:
    with open(path, "rb") as file:
        file.read(1)


def _refused() -> None:
    raise OSError


def _works(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except OSError:
        return False
    return True
