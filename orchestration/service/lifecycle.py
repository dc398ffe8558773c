"""What a service's runs have on a machine, and how one of them ends: known to its agent as to its runner."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from pathlib import Path

from orchestration.service.registry import LIVE, Registry
from pipeline.index.client import Index
from pipeline.warehouse.arena import shared_memory_directory

WHERE = "index.json"  # in a run's folder while it is alive: the index's URL and the run's id
LEASE_VARIABLE = "ASYNCDOCK_LEASE"  # in a runner's environment: the token of its lease


def shared_of(folder: Path) -> Path:
    """Where a hosted run in ``folder`` has its shared memory: a name that no number of a process is part of."""
    return shared_memory_directory() / f"{shared_prefix(folder.parent)}{folder.name}"


def shared_prefix(folders: Path) -> str:
    """What the names in shared memory of all runs below ``folders`` begin with, and no others."""
    return f"asyncdock-run-{hashlib.sha256(os.fsencode(folders.resolve())).hexdigest()[:8]}-"


async def conclude(registry: Registry, run: str, token: str, state: str, reason: str) -> bool:
    """The run has ended: as its own keys say, or else in ``state`` for ``reason``. Its samples go, from the index and from
    shared memory. False, and nothing is done, when ``token`` does not hold it. Harmless when repeated."""
    held = await registry.held(run)
    if held is None or held.token != token:
        return False
    index = Index(registry.link, run)
    try:
        await index.transition(["", "created", *LIVE, "stopping"], state, reason)
        state, reason, _ = await index.state()
        await index.retire()
    finally:
        await index.close()
    if held.record.folder:
        with contextlib.suppress(OSError):  # a killed runner has left it
            (Path(held.record.folder) / WHERE).unlink(missing_ok=True)
        shutil.rmtree(shared_of(Path(held.record.folder)), ignore_errors=True)
    return await registry.end(run, token, state, reason)
