"""The report of a disk that refuses a file: the path, the room that is needed, and the way out."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from orchestration.units import format_size


def refusal(path: Path, need: int, error: OSError) -> str:
    """Return in words that ``path`` could not be written for ``error``; ``need``: bytes, 0 where
    that is not known."""
    reason = error.strerror or str(error)
    try:
        free = f"{format_size(shutil.disk_usage(path.parent).free)} free"
    except OSError:
        free = "unknown room"
    needed = f"{format_size(need)} are needed, and" if need else "it needs room, and"
    return (
        f"{path} cannot be written ({reason}): {needed} its disk has {free}; free room there, "
        f"or make it writable"
    )


@contextlib.contextmanager
def replacing(path: Path, need: int) -> Iterator[Path]:
    """Yield a path to write to; the file there replaces ``path`` in one step, once it is on the
    disk. ``need``: about its bytes. Raises OSError with :func:`refusal`; then ``path`` is as it
    was."""
    partial = path.with_name(f".{path.name}")
    partial.unlink(missing_ok=True)
    try:
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise OSError(error.errno, refusal(path, need, error)) from error


def sync(path: Path | str) -> None:
    """Wait until a file, or the list of a folder's files, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
