"""What killed runs have left on this machine: shared memory, and the sockets of their indexes."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import structlog

from orchestration.processes.handles import Process
from pipeline.data.arena import shared_memory_directory
from pipeline.node import owned_prefix

log = structlog.get_logger()


def sweep_leftovers() -> None:
    """Remove what killed runs have left in shared memory, and the socket directories of their
    indexes."""
    for parent in (shared_memory_directory(), Path(tempfile.gettempdir())):
        for folder in parent.glob("asyncdock-*-*-*"):
            pid = folder.name.split("-")[1]
            owned = pid.isdigit() and folder.name.startswith(owned_prefix(int(pid)))
            if owned and not Process.of(int(pid)).alive():
                shutil.rmtree(folder, ignore_errors=True)
                log.info("removed what a killed run left behind", folder=str(folder))


def remove_shared_memory(pid: int) -> None:
    """Remove what process ``pid``, which has ended, has left in shared memory."""
    for folder in shared_memory_directory().glob(f"{owned_prefix(pid)}*"):
        shutil.rmtree(folder, ignore_errors=True)
