"""Reading files of prompts: line by line, within bounds, with errors that name file and line.

    path ── open_file: a regular file? ──▶ lines: no longer than LINE_BYTES ──▶ parse_line: UTF-8? JSON? an object? ──▶ row
                                            └ a check reads them within a Reading: a budget of rows, bytes, seconds

Lines are counted from 1. Nothing here imports torch: a recipe is checked without it.
"""

from __future__ import annotations

import json
import os
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from pipeline.problems import Fatal, Problem, ProblemError

Row = dict[str, Any]

LINE_BYTES = 16 * 2**20  # of one line; a longer one is not read
SKIP_BYTES = 2**20  # read at once of a longer line
MOST_SKIPPED = 2**30  # bytes of a longer line, of which only the end is looked for
BYTE_ORDER_MARK = "\ufeff"  # some editors put it before UTF-8
TO_UTF8 = "save it as UTF-8, for example with `iconv -f {} -t utf-8`"
# First bytes of files that are no JSON Lines, with what they are and what to do.
FORMATS = {
    b"PAR1": ("is a Parquet file", "set prompts.source = 'parquet'"),
    b"\x1f\x8b": ("is compressed by gzip", "unpack it with `gunzip`"),
    b"\x28\xb5\x2f\xfd": ("is compressed by zstd", "unpack it with `unzstd`"),
    b"PK\x03\x04": ("is a zip archive", "unpack it"),
    b"ARROW1": ("is an Arrow file", "set prompts.source = 'datasets' and give its folder"),
    b"\xff\xfe\x00\x00": ("is UTF-32", TO_UTF8.format("utf-32")),
    b"\xff\xfe": ("is UTF-16", TO_UTF8.format("utf-16")),
    b"\xfe\xff": ("is UTF-16", TO_UTF8.format("utf-16")),
}
KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class PromptError(Fatal, ProblemError, ValueError):
    """A source of prompts, or one of its rows, cannot be used.

    ``key``: as if the source were the only one.
    """

    def __init__(self, wrong: str, fix: str = "", key: str = "prompts", value: Any = None) -> None:
        super().__init__(Problem(key, value, wrong, fix))


class EmptyFile(PromptError):
    """A file of 0 bytes."""


class Reading:
    """Budget of what a check may read of the files that a recipe names: rows, bytes and seconds, of
    all files together. The seconds begin with the first :meth:`spend`. Setting ``stop``, from any
    thread, ends it at once."""

    def __init__(
        self,
        rows: int = 20_000,
        nbytes: int = 32 * 2**20,
        seconds: float = 2.0,
        stop: threading.Event | None = None,
    ) -> None:
        self.rows = rows
        self.nbytes = nbytes
        self.seconds = seconds
        self.stop = stop or threading.Event()
        self._deadline: float | None = None

    def spend(self, *, rows: int = 0, nbytes: int = 0) -> bool:
        """Take ``rows`` and ``nbytes`` from the budget before they are read; False when they must
        not be read."""
        self._deadline = self._deadline or time.monotonic() + self.seconds
        self.rows -= rows
        self.nbytes -= nbytes
        return (
            min(self.rows, self.nbytes) >= 0
            and time.monotonic() < self._deadline
            and not self.stop.is_set()
        )


def kind_of(path: Path) -> str:
    """Return the kind of file at ``path``: "a file", "a folder", "a pipe", "a device", "a socket".

    Raises OSError.
    """
    return KINDS.get(stat.S_IFMT(path.stat().st_mode), "a file")


def existing(path: Path) -> Path:
    """Return ``path`` with the home directory expanded. Raises PromptError when nothing is
    there."""
    try:
        if path.expanduser().exists():
            return path.expanduser()
    except (OSError, RuntimeError, ValueError) as error:
        raise path_error(path, f"cannot be read ({error})", "give another path") from None
    raise path_error(path, f"does not exist, seen from {Path.cwd()}", "give another path")


def path_error(path: Path, wrong: str, fix: str) -> PromptError:
    """Return the error of ``prompts.path``, or of a file below it."""
    return PromptError(wrong, fix, "prompts.path", str(path))


def open_file(path: Path) -> BinaryIO:
    """Open a regular file, without waiting as one would for a pipe.

    Raises PromptError for anything else, and for an empty file.
    """
    try:
        full_path = path.expanduser()
        kind = kind_of(full_path)  # a device must not even be opened: that may have effects
        if kind != "a file":
            raise path_error(path, f"is {kind}", "give a file")
        file = os.fdopen(os.open(full_path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    except PromptError:
        raise
    except FileNotFoundError:
        raise path_error(
            path, f"does not exist, seen from {Path.cwd()}", "give another path"
        ) from None
    except (OSError, RuntimeError, ValueError) as error:
        # not allowed; an unknown home directory; a zero character
        fix = "give a file that can be read"
        raise path_error(path, f"cannot be opened ({error})", fix) from None
    if not os.fstat(file.fileno()).st_size:
        file.close()
        raise EmptyFile("is empty", "give a file with prompts", "prompts.path", str(path))
    return file


def lines(path: Path) -> Iterator[tuple[int, bytes | None]]:
    """Yield the lines of a file with their numbers, from 1; None in the place of one longer than
    :data:`LINE_BYTES`. Raises PromptError."""
    with open_file(path) as file:
        try:
            head = file.peek(8) if hasattr(file, "peek") else b""
            for magic, (problem, fix) in FORMATS.items():
                if head.startswith(magic):
                    raise path_error(path, f"{problem}, not JSON Lines in UTF-8", fix)
            number = 0
            while raw := file.readline(LINE_BYTES):
                if len(raw) == LINE_BYTES and not raw.endswith(b"\n"):
                    number += 1
                    yield number, None
                    _skip_line(file, path, number)
                    continue
                for line in raw.splitlines():  # also at a carriage return alone
                    number += 1
                    yield number, line
        except OSError as error:
            fix = "give a file that can be read"
            raise path_error(path, f"cannot be read ({error})", fix) from error


def _skip_line(file: BinaryIO, path: Path, number: int) -> None:
    """Read the rest of a line. Raises PromptError after :data:`MOST_SKIPPED` bytes."""
    for _ in range(MOST_SKIPPED // SKIP_BYTES):
        raw = file.readline(SKIP_BYTES)
        if len(raw) < SKIP_BYTES or raw.endswith(b"\n"):
            return
    problem = f"line {number} has more than {MOST_SKIPPED >> 30} GiB"
    raise path_error(path, problem, "write one JSON object on each line")


def parse_line(line: bytes, where: str) -> Row | None:
    """Return the row in ``line``; None when it is blank. Raises PromptError, naming ``where``."""
    try:
        text = line.decode("utf-8").removeprefix(BYTE_ORDER_MARK)
    except UnicodeDecodeError as error:
        byte = f"byte 0x{line[error.start]:02x} at column {error.start + 1}"
        raise PromptError(f"{where} is not UTF-8 ({byte})", TO_UTF8.format("latin1")) from None
    if "\0" in text:
        column = line.index(0) + 1
        fix = TO_UTF8.format("utf-16")
        raise PromptError(f"{where} has a zero byte at column {column}, as UTF-16 has", fix)
    if not text.strip():
        return None
    to_lines = "write one JSON object on each line"
    to_lines += ", as `jq -c '.[]'` makes of a list" if begins_list(line) else ""
    try:
        row = json.loads(text)
    except RecursionError:
        raise PromptError(f"{where} is nested too deeply", "make it flatter") from None
    except ValueError as error:  # JSONDecodeError, and a number with more digits than Python reads
        reason = getattr(error, "msg", str(error).partition(";")[0])
        column_text = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        raise PromptError(f"{where} is not JSON ({reason}{column_text})", to_lines) from None
    if not isinstance(row, dict):
        name = type(row).__name__
        kind = {"list": "a list", "str": "a text", "NoneType": "null"}.get(name, f"a {name}")
        raise PromptError(f"{where} is {kind}", to_lines)
    return row


def begins_list(line: bytes) -> bool:
    """Return whether a line begins a JSON list."""
    return line.lstrip(b"\xef\xbb\xbf \t").startswith(b"[")


class Table:
    """A table of rows by their numbers. ``rows``: anything with ``len`` that returns mappings by
    number. ``about`` says for people which files they are of."""

    about = ""

    def __init__(self, rows: Any, name: str) -> None:
        self._rows = rows
        self._name = name

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> Row:
        try:
            row: Row = self._rows[number]
        except PromptError:
            raise
        except Exception as error:
            raise PromptError(
                f"{self.where(number)} cannot be read ({error!r})", "correct it"
            ) from error
        return row

    def where(self, number: int) -> str:
        """Return a name of the row for people, counted from 1."""
        return f"{self._name}, row {number + 1}"

    def is_unread(self, number: int) -> bool:
        """Return whether the row was too large to be read."""
        return False
