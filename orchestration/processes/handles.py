"""Processes that outlive whoever started them: known by number and birth, watched without being their parent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

CHECK_SECONDS = 0.2  # where the kernel cannot tell of a process's end


@dataclass(frozen=True)
class Process:
    """A process of this machine. ``born`` tells it from a later one with the same number."""

    pid: int
    born: str
    child: subprocess.Popen[bytes] | None = field(default=None, compare=False)

    @classmethod
    def of(cls, pid: int, child: subprocess.Popen[bytes] | None = None) -> Process:
        """The process ``pid``, which need not be there any more."""
        return cls(pid, _born(pid), child)

    @classmethod
    def parse(cls, text: str) -> Process | None:
        """What ``str`` made; None for anything else."""
        pid, _, born = text.partition(":")
        return cls(int(pid), born) if pid.isdigit() and born else None

    def __str__(self) -> str:
        return f"{self.pid}:{self.born}"

    def alive(self) -> bool:
        if self.child is not None:
            return self.child.poll() is None  # which also takes its exit code: it does not stay a zombie
        return bool(self.born) and _born(self.pid) == self.born

    async def wait(self) -> int | None:
        """Return when it has ended: its exit code, or None when it is not a child of ours."""
        try:
            handle = os.pidfd_open(self.pid) if sys.platform == "linux" else -1
        except ProcessLookupError:
            handle = -1
        if handle < 0:
            while self.alive():  # noqa: ASYNC110
                await asyncio.sleep(CHECK_SECONDS)
        else:
            ended, loop = asyncio.Event(), asyncio.get_running_loop()
            loop.add_reader(handle, ended.set)
            try:
                if self.alive():  # and so the handle is that of this process, and not of a later one
                    await ended.wait()
            finally:
                loop.remove_reader(handle)
                os.close(handle)
        return self.child.wait() if self.child is not None else None

    def end(self, number: int = signal.SIGKILL) -> None:
        """Send it a signal. Harmless when it has ended."""
        if self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def _born(pid: int) -> str:
    """When ``pid`` began, in the system's own terms; "" when it is not there, or only waits for its parent to look."""
    if sys.platform == "linux":
        try:
            # The name, in brackets, may hold anything; the third field is the state, the 22nd the time since boot.
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return ""
        return "" if fields[0] in "ZX" else fields[19]
    found = subprocess.run(["ps", "-o", "lstart=,state=", "-p", str(pid)], capture_output=True, text=True, check=False)
    started, _, state = found.stdout.strip().rpartition(" ")
    return "" if state.startswith("Z") else started.replace(" ", "-").replace(":", ".")
