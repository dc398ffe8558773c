"""The Ray actor of a node: it runs a host, which forks the workers."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path


class HostActor:
    """Runs one host of a run, until the run has ended. Ray gives it the resources of all workers that are placed on it."""

    async def run(self, url: str, run: str, folder: str, name: str, begun_in: str) -> None:
        """``begun_in``: the folder in which the run was begun, for modules that the recipe names, where this node has it."""
        os.environ.pop(
            "OMP_NUM_THREADS", None
        )  # Ray's, for its own workers: engines are given their threads by the recipe
        with contextlib.suppress(OSError):
            os.chdir(begun_in)
        from orchestration.run.hosts import Host

        os.makedirs(folder, exist_ok=True)
        await Host(url, run, Path(folder), workers=ANY_NUMBER, name=name).run(asyncio.Event())


ANY_NUMBER = 1 << 30  # of workers: those that are placed on this host
