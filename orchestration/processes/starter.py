"""Starts processes: through a fork server where one works, otherwise each as a new interpreter.

start ──▶ fork server ──▶ Child
           ├ it died after it had started processes: start another one (its children died with it)
           └ it died before its first one: from now on ``spawn`` ──▶ Process
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial

import structlog

from orchestration.processes.environment import importable
from orchestration.processes.forkserver import (
    ENVIRONMENT,
    PRELOAD,
    Child,
    Connection,
    ForkServer,
    ForkServerDied,
    Launch,
)
from orchestration.processes.handles import Process
from pipeline.index.embedded import die_with_parent

log = structlog.get_logger()

FORKSERVER = "forkserver"
SPAWN = "spawn"


class Starter:
    """A starter of processes.

    ``server``: an existing fork server, which its owner closes; by default a new one is started,
    which imports ``preload``, with ``environment`` (:meth:`ForkServer.start`).
    """

    def __init__(
        self,
        method: str = FORKSERVER,
        server: ForkServer | None = None,
        preload: Sequence[str] = PRELOAD,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._preload = preload
        self._environment = environment
        self._server = server
        self._owns_server = False
        self._connection: Connection | None = None
        self._worked = server is not None
        self._forks = method == FORKSERVER
        if self._forks and server is None:
            self._start_server()

    async def start(self, launch: Launch, stdin: int | None = None) -> Child | Process:
        """Start a process, with the file ``stdin`` as its standard input.

        Raises OSError when the machine has no process or file descriptor left.
        """
        _create(launch.log)
        while self._forks and self._server is not None:
            server = self._server
            try:
                if self._connection is None:
                    self._connection = server.connect()
                child = await self._connection.launch(launch, stdin)
                self._worked = True
                return child
            except ForkServerDied as died:
                if server is self._server:  # otherwise a concurrent call has replaced it
                    log.warning(
                        "the fork server has ended", reason=str(died), output=server.last_output()
                    )
                    self.close()
                    if self._worked:
                        self._start_server()
                    else:
                        self._forks = False
        return spawn(launch, stdin)

    def close(self) -> None:
        """End the children, except those that outlive their starter. Does nothing when repeated."""
        if self._connection is not None:
            self._connection.close()
        if self._owns_server and self._server is not None:
            self._server.close()
        self._connection = None
        self._server = None

    def _start_server(self) -> None:
        self._worked = False
        try:
            self._server = ForkServer.start(self._preload, self._environment)
            self._owns_server = True
        except ForkServerDied as died:
            log.info("each process is started as a new interpreter", reason=str(died))
            self._forks = False


def _create(log_file: str) -> None:
    """Create the file with the mode that this process gives files.

    The fork server's may be another one.
    """
    with open(log_file, "ab"):
        pass


def spawn(launch: Launch, stdin: int | None = None) -> Process:
    """Start a process that imports everything itself. Raises OSError."""
    module, _, _ = launch.entry.partition(":")
    with open(launch.log, "ab") as file:
        child = subprocess.Popen(
            # -P: a folder called `api` or `stages` in the current directory must not be imported as
            # this package.
            [sys.executable, "-P", "-m", module, *launch.arguments],
            stdin=subprocess.DEVNULL if stdin is None else stdin,
            stdout=file,
            stderr=file,
            start_new_session=True,  # it does not get Ctrl-C
            preexec_fn=None if launch.outlives else partial(die_with_parent, os.getpid()),
            env={**ENVIRONMENT, **importable(launch.env)},
            cwd=launch.cwd,
        )
    return Process.of(child.pid, child)
