"""Runs a command as the user `nobody`.

For root: Python's own folder may lie in a home that nobody else may enter.

    python as_nobody.py COMMAND…

In a mount namespace of its own, each home that is closed shows nothing but the Python that it
holds.
"""

from __future__ import annotations

import ctypes
import os
import stat
import sys
import tempfile
from pathlib import Path

NOBODY = 65534
_NEW_FILES = 0x20000
_BIND = 4096
_RECURSIVE = 16384
_PRIVATE = 1 << 18


def main(command: list[str]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)

    def call(result: int) -> None:
        if result:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    call(libc.unshare(_NEW_FILES))
    call(libc.mount(b"none", b"/", None, ctypes.c_ulong(_RECURSIVE | _PRIVATE), None))
    prefix = Path(os.path.realpath(sys.base_prefix))
    closed = [
        folder for folder in reversed(prefix.parents) if not folder.stat().st_mode & stat.S_IXOTH
    ]
    if closed:
        held = tempfile.mkdtemp()
        call(libc.mount(bytes(prefix), held.encode(), None, ctypes.c_ulong(_BIND), None))
        call(libc.mount(b"none", bytes(closed[0]), b"tmpfs", ctypes.c_ulong(0), b"mode=755"))
        prefix.mkdir(parents=True)
        call(libc.mount(held.encode(), bytes(prefix), None, ctypes.c_ulong(_BIND), None))
        call(libc.umount2(held.encode(), 2))
        os.rmdir(held)
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
