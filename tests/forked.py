"""One fork server for all tests of this process that start ranks: what they compute with is imported once."""

from __future__ import annotations

import multiprocessing
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

PRELOAD = ["peft", "tests.stages.sharded", "tests.stages.resharding.swaps", "stages.weights.collective"]
_own: list[int] = []  # the process of the server that has imported PRELOAD


def forks() -> ForkServerContext:
    """A context whose processes are forked from a server with PRELOAD. multiprocessing has one server for a process, which
    imports the list that was set before its first use: a server with another list is ended first."""
    context = multiprocessing.get_context("forkserver")
    server = forkserver._forkserver  # type: ignore[attr-defined]
    if [server._forkserver_pid] != _own:
        if server._forkserver_pid is not None:
            server._stop()
        context.set_forkserver_preload(PRELOAD)
        forkserver.ensure_running()
        _own[:] = [server._forkserver_pid]
    return context
