"""Machines of a network, as far as one kernel can imitate them: each has a network, a host name,
shared memory and process numbers of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import pytest

from benchmarks.flow.scale import PORT, Infeasible, Network, index_server, inside, run_ip
from pipeline.data.arena import shared_memory_directory
from tests.compose.sandbox import missing

ROOT = Path(__file__).resolve().parents[1]


class Machines:
    """Two machines, and an index on a third one, at ``url`` for them and at ``near`` for this
    process. All see the same disk, as from a network file system."""

    def __init__(self, network: Network, near: str) -> None:
        self._network = network
        self.near = near
        self.url = f"redis://{network.address(-1)}:{PORT}"
        self._started: list[subprocess.Popen[str]] = []

    def address(self, machine: int) -> str:
        return self._network.address(machine)

    def start(
        self,
        machine: int,
        module: str,
        *arguments: str,
        name: str = "node",
        hidden: Sequence[Path] = (),
        **options: Any,
    ) -> subprocess.Popen[str]:
        """Run the Python ``module`` on ``machine``, whose host name is ``name``.

        ``hidden``: folders in whose place it has empty ones.
        """
        mounts = [
            f"mount -t tmpfs none {folder}" for folder in (shared_memory_directory(), *hidden)
        ]
        inside = " && ".join([f"hostname {name}", *mounts, 'exec "$0" "$@"'])
        apart = [
            "unshare",
            "--uts",
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
            "sh",
            "-c",
            inside,
        ]
        network = ["nsenter", f"--net=/run/netns/{self._network.name(f'host{machine}')}"]
        command = [*network, *apart, sys.executable, "-P", "-m", module, *arguments]
        pipes: dict[str, int | IO[Any]] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        there = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(command, text=True, **{**pipes, "env": there, **options})
        self._started.append(process)
        return process

    def inside(self, machine: int) -> AbstractContextManager[None]:
        """While it lasts, connections of this thread are made in the network of ``machine``."""
        return inside(self._network.name(f"host{machine}"))

    def unplug(self, machine: int, *, again: bool = False) -> None:
        """Take the cable of ``machine`` out of the switch, or with ``again`` put it back."""
        switch = self._network.name("switch")
        run_ip("ip", "-n", switch, "link", "set", f"port{machine + 1}", "up" if again else "down")

    def end(self) -> None:
        for process in self._started:
            process.kill()
            process.communicate()


@contextmanager
def two_machines(home: Path, mbit: float = 1000.0) -> Iterator[Machines]:
    """Skips the test where there is no root, or a program is missing."""
    if why := missing("tc"):
        pytest.skip(why)
    with ExitStack() as stack:
        try:
            network = stack.enter_context(Network(2, mbit))
        except Infeasible as lacking:
            pytest.skip(str(lacking))
        machines = Machines(network, stack.enter_context(index_server(network, home)).url)
        stack.callback(machines.end)
        yield machines
