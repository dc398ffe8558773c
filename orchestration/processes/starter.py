"""How processes start: by a fork server where there can be one, else each from nothing.

start ──▶ fork server ──▶ Child
           │ has died: another one            (its children have died with it)
           └ has died before it made any: from now on ``spawn`` ──▶ Process
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial

import structlog

from orchestration.processes.forkserver import PASSIVE, Child, Connection, ForkServer, ForkServerDied, Launch
from orchestration.processes.handles import Process
from pipeline.index.embedded import die_with_parent

log = structlog.get_logger()

FORKSERVER, SPAWN = "forkserver", "spawn"


class Starter:
    """Starts processes. ``server``: a fork server that is there already, and is closed by whoever made it. Without one, its
    own begins to load at once."""

    def __init__(self, method: str = FORKSERVER, server: ForkServer | None = None) -> None:
        self._forking, self._server, self._own = method == FORKSERVER, server, False
        self._connection: Connection | None = None
        self._worked = server is not None
        if self._forking and server is None:
            self._begin()

    async def start(self, launch: Launch) -> Child | Process:
        """Raises OSError when the machine has no process or no file to give."""
        while self._forking and self._server is not None:
            server = self._server
            try:
                if self._connection is None:
                    self._connection = server.connect()
                child = await self._connection.launch(launch)
                self._worked = True
                return child
            except ForkServerDied as died:
                if server is self._server:  # others that waited for it have not made another one yet
                    log.warning("the fork server has ended", reason=str(died), said=server.last_said())
                    self.close()
                    if self._worked:
                        self._begin()
                    else:
                        self._forking = False
        return spawn(launch)

    def close(self) -> None:
        """End those of its children that do not outlive it. Harmless when repeated."""
        if self._connection is not None:
            self._connection.close()
        if self._own and self._server is not None:
            self._server.close()
        self._connection, self._server = None, None

    def _begin(self) -> None:
        self._worked = False
        try:
            self._server, self._own = ForkServer.start(), True
        except ForkServerDied as died:
            log.info("processes are started one by one", reason=str(died))
            self._forking = False


def spawn(launch: Launch) -> Process:
    """A process that imports everything itself. Raises OSError."""
    module, _, _ = launch.entry.partition(":")
    with open(launch.log, "ab") as file:
        child = subprocess.Popen(
            # -P: a folder called `api` or `stages` where the user stands must not be taken for ours.
            [sys.executable, "-P", "-m", module, *launch.arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,  # Ctrl-C is not for it
            preexec_fn=None if launch.outlives else partial(die_with_parent, os.getpid()),
            env={**PASSIVE, **launch.env},
            cwd=launch.cwd,
        )
    return Process.of(child.pid, child)
