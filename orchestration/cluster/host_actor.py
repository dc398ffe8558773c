"""The Ray actor of a node: starts a host, which forks the workers.

actor ──▶ fork server of the node, which the first run starts: it imports everything once
            └▶ forks the host ──▶ forks a copy of itself, from which the workers are forked
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import tempfile
from pathlib import Path

from orchestration.processes.forkserver import PRELOAD, ForkServerDied, Launch, StandingForkServer
from orchestration.processes.starter import Starter
from pipeline.index.client import INDEX_VARIABLE
from pipeline.node import owned_prefix

HOST = "orchestration.launch.hosts"
PACKAGES = ("pipeline", "stages", "orchestration", "api")


class HostActor:
    """The Ray actor that runs one host of a run.

    Ray gives it the resources of all workers that are placed on it; what it has started ends with
    it.
    """

    def __init__(self) -> None:
        # Ray's, for its own workers: the recipe gives engines their threads
        os.environ.pop("OMP_NUM_THREADS", None)
        # Not the parent process: that is another one as soon as the raylet has died.
        raylet = int(os.environ.get("RAY_RAYLET_PID") or os.getppid())
        server = None
        with contextlib.suppress(ForkServerDied, ProcessLookupError):
            folder = Path(tempfile.gettempdir()) / f"{owned_prefix(raylet)}{_release()}"
            server = StandingForkServer(folder, raylet, (*PRELOAD, HOST))
        self._starter = Starter(server=server)

    async def run(self, url: str, run: str, folder: str, name: str, begun_in: str) -> None:
        """Return when the run has ended.

        ``begun_in``: the folder in which it was begun, for modules that the recipe names, where
        this node has it. Raises RuntimeError when the host fails.
        """
        log = Path(folder) / "logs" / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, INDEX_VARIABLE: url}
        title = f"asyncdock {name} of {run}"
        child = await self._starter.start(
            Launch(f"{HOST}:forked", [run, folder, name], environment, begun_in, str(log), title)
        )
        if await child.wait():
            last = log.read_text(errors="replace").splitlines()[-1:]
            raise RuntimeError(f"{' '.join(last)} (in {log} of its node)")


def _release() -> str:
    """Return a digest of this interpreter and the program's files: another release is forked from
    another server."""
    top = Path(__file__).parents[2]
    files = sorted(path for package in PACKAGES for path in (top / package).rglob("*.py"))
    lines = [sys.executable, *(f"{path} {path.stat().st_mtime_ns}" for path in files)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:8]
