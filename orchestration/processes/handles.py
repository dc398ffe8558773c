"""Handles of processes, also of those that this process did not start.

A process is identified by its number, its start time in ticks since boot, and the boot and PID
namespace of both. psutil is not used: its ``create_time()`` moves with the system clock, so that a
living index server would look dead after the clock is set; its ``wait()`` blocks a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from pipeline.node import process_space

CHECK_SECONDS = 0.2  # between checks where the kernel offers no handle to wait on


@dataclass(frozen=True)
class Process:
    """A process of this machine.

    ``born`` distinguishes it from a later process with the same number.
    """

    pid: int
    born: str
    child: subprocess.Popen[bytes] | None = field(default=None, compare=False)
    orphaned: ClassVar[None] = None  # as of forkserver.Child

    @classmethod
    def of(cls, pid: int, child: subprocess.Popen[bytes] | None = None) -> Process:
        """Return the handle of process ``pid``, which may have ended."""
        return cls(pid, _born(pid), child)

    @classmethod
    def parse(cls, text: str) -> Process | None:
        """Return the handle that ``str`` was called on; None for any other text, and for a process
        of another machine, boot or PID namespace: from here, nothing is known of it."""
        pid, born, space = (*text.split(":"), "", "")[:3]
        known = pid.isdigit() and born and space == process_space()
        return cls(int(pid), born) if known else None

    def __str__(self) -> str:
        return f"{self.pid}:{self.born}:{process_space()}"

    def alive(self) -> bool:
        if self.child is not None:
            # which also collects the exit code, so that no zombie stays
            return self.child.poll() is None
        return bool(self.born) and _born(self.pid) == self.born

    async def wait(self) -> int | None:
        """Wait until it has ended.

        Returns its exit code, or None when it is not a child of this process.
        """
        try:
            handle = os.pidfd_open(self.pid) if sys.platform == "linux" else -1
        except ProcessLookupError:
            handle = -1
        if handle < 0:
            while self.alive():  # noqa: ASYNC110
                await asyncio.sleep(CHECK_SECONDS)
        else:
            ended = asyncio.Event()
            loop = asyncio.get_running_loop()
            loop.add_reader(handle, ended.set)
            try:
                # checked after the handle is open: it is not the handle of a later process
                if self.alive():
                    await ended.wait()
            finally:
                loop.remove_reader(handle)
                os.close(handle)
        return self.child.wait() if self.child is not None else None

    def end(self, number: int = signal.SIGKILL) -> None:
        """Send the signal ``number``. Does nothing when it has ended."""
        if self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def _born(pid: int) -> str:
    """Return when ``pid`` started, as the system counts it; "" when it has ended or is a zombie."""
    if sys.platform == "linux":
        try:
            # Fields after the name in brackets, which may hold any character: the 3rd is the state,
            # the 22nd the start.
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return ""
        return "" if fields[0] in "ZX" else fields[19]
    ps_result = subprocess.run(
        ["ps", "-o", "lstart=,state=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    started, _, state = ps_result.stdout.strip().rpartition(" ")
    return "" if state.startswith("Z") else started.replace(" ", "-").replace(":", ".")
