"""Processes of the tests that need torch and the product are forked from one that has imported
both, once for all tests.

forks() ──▶ ranks                             (multiprocessing's fork server, with PRELOAD)
   └──▶ one process that listens ──▶ fork servers of the commands that tests start with ``asyncdock()``
"""

from __future__ import annotations

import functools
import gc
import json
import multiprocessing
import os
import select
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TextIO
from unittest.mock import patch

from setproctitle import setproctitle

from orchestration.processes.forkserver import ENVIRONMENT, ForkServer, _fork, _Server, _socketpair
from orchestration.processes.forkserver import PRELOAD as PRELOADED
from pipeline.index.embedded import die_with_parent

# environment variable: the abstract socket on which fork servers are asked for
ADDRESS = "ASYNCDOCK_TESTS_FORKS"
PRELOAD = [
    *PRELOADED,
    "orchestration.service.runner",
    "peft",
    "tests.stages.sharded",
    "tests.stages.resharding.swaps",
    "stages.weights.transport.network",
]
ROOT = Path(__file__).resolve().parents[1]
_start = ForkServer.start
# of the session: what a test has changed for itself is not passed on to later ones
environment: dict[str, str] = {}
_own: list[int] = []  # the process of the server that has imported PRELOAD


def forks() -> ForkServerContext:
    """A context whose processes are forked from a server with PRELOAD. multiprocessing has one
    server for a process, which imports the list that was set before its first use: a server with
    another list is ended first."""
    context = multiprocessing.get_context("forkserver")
    server = forkserver._forkserver  # type: ignore[attr-defined]
    if [server._forkserver_pid] != _own:
        if server._forkserver_pid is not None:
            server._stop()
        context.set_forkserver_preload(PRELOAD)
        with patch.dict(os.environ, {**ENVIRONMENT, **(environment or os.environ)}, clear=True):
            forkserver.ensure_running()
        _own[:] = [server._forkserver_pid]
    return context


def program(code: str, *arguments: str) -> tuple[BaseProcess, TextIO]:
    """Start Python ``code``, as ``python -c`` does, in a process that has imported torch.

    Returns it, and its output.
    """
    here, there = forks().Pipe(duplex=False)
    process = forks().Process(target=_execute, args=(code, arguments, there), daemon=True)
    process.start()
    there.close()
    return process, os.fdopen(os.dup(here.fileno()), encoding="utf-8")


def _execute(code: str, arguments: Sequence[str], output: Connection) -> None:
    sys.argv = ["-c", *arguments]
    with os.fdopen(os.dup(output.fileno()), "w", encoding="utf-8") as sys.stdout:
        exec(compile(code, "-c", "exec"), {"__name__": "__main__"})


@functools.cache
def listen() -> None:
    """Start the process that forks fork servers. It ends with this one."""
    address = f"asyncdock-tests-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.bind(f"\0{address}")
        line.listen()
        forks().Process(target=_fork_servers, args=(line, os.getpid()), daemon=True).start()
    os.environ[ADDRESS] = address


def asyncdock() -> list[str]:
    """The beginning of a command line: ``asyncdock`` with fork servers that have no imports to
    make, for tests of something else than a start. Its environment must have the variables of this
    one, and ROOT as PYTHONPATH."""
    listen()
    return [sys.executable, "-P", "-m", "tests.command"]


def fork_server(
    preload: Sequence[str] = PRELOADED, environment: Mapping[str, str] | None = None
) -> ForkServer:
    """Return the result of ``ForkServer.start``, with the imports made where a process of the tests
    listens. What its children show in /proc is then of that process, and not ``environment``."""
    if not {*PRELOADED} <= {*preload} or ADDRESS not in os.environ:
        return _start(preload, environment)
    ours, theirs = _socketpair()
    settings = {
        "path": [path for path in sys.path if path],
        "threads": os.environ.get("OMP_NUM_THREADS"),
    }
    with theirs, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.connect(f"\0{os.environ[ADDRESS]}")
        socket.send_fds(line, [json.dumps(settings).encode()], [theirs.fileno()])
        pid = int(line.recv(32))
    handle = os.pidfd_open(pid)
    return ForkServer(ours, pid, lambda: select.select([handle], [], []))


def _fork_servers(line: socket.socket, owner: int) -> None:
    """In the listening process: fork a server for each request, which is a message with the end of
    its line, the path of its modules and its number of threads. The answer is its process number.
    Ends with the process ``owner`` of the tests."""
    ended = os.pidfd_open(owner)
    die_with_parent(os.getppid())
    os.setsid()  # it does not get Ctrl-C
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # workers may have children
    gc.collect()
    gc.disable()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # servers that have ended need no wait
    listener = os.getpid()
    while ended not in select.select([line, ended], [], [])[0]:
        connection, _ = line.accept()
        with connection:
            text, (theirs,), _, _ = socket.recv_fds(connection, 1 << 16, 1)
            if (pid := _fork()) == 0:
                line.close()
                connection.close()
                os.close(ended)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.setsid()
                die_with_parent(listener)
                setproctitle("asyncdock fork server")
                _take(json.loads(text))
                os._exit(_Server(socket.socket(fileno=theirs)).serve())
            os.close(theirs)
            connection.send(str(pid).encode())


def _take(settings: dict[str, Any]) -> None:
    """In a forked server: take over what one that the command starts has by its environment."""
    import torch

    sys.path[:] = settings["path"]
    if settings["threads"]:
        torch.set_num_threads(int(settings["threads"]))
