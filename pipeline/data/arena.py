"""Arenas: the shared memory in which a node's warehouse keeps the bytes of samples.

    writer ── bytes, once ──▶ arena ◀── maps ── reader       (same node: no server in the path)
       └── allocate, commit ──▶ index ◀── claim ──┘           (which bytes belong to which rows)

The arena is a file in memory, which processes of the node map by its path. The index records which
parts are free, so allocation is atomic across processes and the arena outlives each of them.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path

from pipeline.problems import Passing

SHARED_VARIABLE = "ASYNCDOCK_SHARED_MEMORY"


class StaleHandle(Passing, LookupError):
    """A handle points to a row or block that was released; other rows may lie in its bytes by
    now."""


class WarehouseUnreachable(ConnectionError):
    """A warehouse did not answer within the deadline, reconnections included."""


class Arena:
    """``nbytes`` bytes of shared memory at ``path``, mapped into this process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self.nbytes = len(self._map)
        self._view = memoryview(self._map)

    @classmethod
    def create(cls, path: Path, nbytes: int) -> Arena:
        """Create the arena, or map it when it exists with this size.

        Pages take memory once they are written.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            size = os.fstat(descriptor).st_size
            if size not in (0, nbytes):
                raise ValueError(
                    f"arena {path}: is {size} bytes, not {nbytes}; a run's arena "
                    f"cannot change its size"
                )
            os.ftruncate(descriptor, nbytes)
        finally:
            os.close(descriptor)
        return cls(path)

    def slice(self, offset: int, nbytes: int) -> memoryview:
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise ValueError(
                f"arena {self.path}: bytes {offset}..{offset + nbytes} lie outside "
                f"its {self.nbytes}"
            )
        return self._view[offset : offset + nbytes]


def shared_memory_directory() -> Path:
    """The folder for files in memory: the one in ``ASYNCDOCK_SHARED_MEMORY``, else ``/dev/shm`` on
    Linux and the temporary directory elsewhere. Raises NotADirectoryError for a folder that cannot
    be written to."""
    if chosen := os.environ.get(SHARED_VARIABLE):
        if not (os.path.isdir(chosen) and os.access(chosen, os.W_OK)):
            raise NotADirectoryError(
                f"{SHARED_VARIABLE} = {chosen!r} is not a folder that can be written to; give one "
                f"in memory, or unset it"
            )
        return Path(chosen)
    memory = Path("/dev/shm")  # noqa: S108  (files in it are private)
    return memory if memory.is_dir() and os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
