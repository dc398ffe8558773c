"""Standard output and standard error that survive their reader: a closed pipe, a terminal that is
gone, a full disk.

    print, Rich, logs ──▶ Output.write ──▶ the descriptor
                             └─ refused ──▶ what comes later goes to /dev/null, or to the file of :func:`keep_errors_in`

A full disk takes what comes later as soon as it has room. What was refused is in
``Output.refused``.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from pathlib import Path
from typing import Any, TextIO

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Output(io.FileIO):
    """The standard stream ``descriptor``. Writing to it raises no OSError."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.refused: OSError | None = None
        self.spare: Path | None = None  # a file that takes what has no reader

    @property
    def is_gone(self) -> bool:
        """Return whether nobody reads the stream any more."""
        return self.refused is not None and self.refused.errno not in NO_ROOM

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BlockingIOError:
            raise
        except OSError as error:
            self.refused = error
        if not self.is_gone:
            return memoryview(data).nbytes
        for path in (self.spare, Path(os.devnull)):
            if path is not None and self._replace_by(path):
                return self.write(data)
        return memoryview(data).nbytes

    def _replace_by(self, path: Path) -> bool:
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError:
            return False
        os.dup2(file, self.fileno())
        os.close(file)
        self.spare = None
        return True


TIED = "ASYNCDOCK_TIED"  # set for a command that is to stop when its standard input is closed


def open_outputs() -> None:
    """Make ``sys.stdout`` and ``sys.stderr`` text streams over an :class:`Output` each, but one
    that a caller in this process has put in its place. A descriptor that was closed is opened: the
    next file would get its number."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            _open_null(descriptor)
    sys.stdout = _opened(sys.stdout, 1, "strict")
    sys.stderr = _opened(sys.stderr, 2, "backslashreplace")


def _open_null(descriptor: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    if null != descriptor:
        os.dup2(null, descriptor)
        os.close(null)


def _opened(stream: Any, descriptor: int, errors: str) -> TextIO:
    # it was closed when Python started, and its number may be another file's by now
    if stream is None:
        return open(os.devnull, "w", encoding="utf-8")
    try:
        is_own = stream.fileno() == descriptor
    except (AttributeError, OSError):  # io.UnsupportedOperation is an OSError
        is_own = False
    if not is_own:
        return stream  # type: ignore[no-any-return]
    stream.flush()
    raw = Output(descriptor)
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=stream.errors or errors,
        line_buffering=descriptor == 2 or raw.isatty(),
    )


def output_of(stream: object) -> Output | None:
    """Return the :class:`Output` of a text stream; None where it has none, as in tests."""
    raw = getattr(getattr(stream, "buffer", None), "raw", None)
    return raw if isinstance(raw, Output) else None


def output_is_gone() -> bool:
    """Return whether nobody reads standard output any more."""
    output = output_of(sys.stdout)
    return output is not None and output.is_gone


def keep_errors_in(path: Path) -> None:
    """Append to the file ``path`` what has no reader on standard error."""
    if (output := output_of(sys.stderr)) is not None:
        output.spare = path
