"""Files of prompts: opened without waiting, read line by line, within bounds, each fault named by file and line.

    path ── open_file: a regular file? ──▶ lines: no longer than LINE_BYTES ──▶ parse_line: UTF-8? JSON? an object? ──▶ row
                                            └ a check reads them within a Reading: so many rows, bytes and seconds

Lines are counted from 1, as editors count them. Nothing here imports torch: a recipe is checked without it.
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

Row = dict[str, Any]

LINE_BYTES = 16 * 2**20  # of one line; a longer one is not read
PIECE = 2**20
MOST_PASSED_OVER = 2**30  # bytes of a longer one that are passed over to find its end
BYTE_ORDER_MARK = "\ufeff"  # which some editors put before UTF-8
TO_UTF8 = "save it as UTF-8, for example with `iconv -f {} -t utf-8`"
# What a file that is no JSON Lines begins with: what it is, and what to do.
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


class PromptError(ValueError):
    """A prompt source or one of its rows cannot be used: the message names it and the fix."""


class Reading:
    """How much a check may read of the files that a recipe names: ``rows``, ``nbytes`` and ``seconds``, of all files
    together. The time counts from the first :meth:`spend`. Setting ``stop``, from any thread, ends it at once."""

    def __init__(
        self,
        rows: int = 20_000,
        nbytes: int = 32 * 2**20,
        seconds: float = 2.0,
        stop: threading.Event | None = None,
    ) -> None:
        self.rows, self.nbytes, self.seconds = rows, nbytes, seconds
        self.stop = stop or threading.Event()
        self._ends: float | None = None

    def spend(self, *, rows: int = 0, nbytes: int = 0) -> bool:
        """Count what is about to be read; False when it is more than is left: then it is not read."""
        self._ends = self._ends or time.monotonic() + self.seconds
        self.rows -= rows
        self.nbytes -= nbytes
        return min(self.rows, self.nbytes) >= 0 and time.monotonic() < self._ends and not self.stop.is_set()


def kind_of(path: Path) -> str:
    """What lies at ``path``: "a file", "a folder", "a pipe", "a device", "a socket". Raises OSError."""
    return KINDS.get(stat.S_IFMT(path.stat().st_mode), "a file")


def open_file(path: Path, key: str = "prompts.path") -> BinaryIO:
    """Open the regular file ``path`` to read it. Never waits for a writer. Raises PromptError for anything else, and for a
    file that is empty."""
    given = f"prompts: {key} = {str(path)!r}"
    try:
        path = path.expanduser()
        kind = kind_of(path)  # a device must not even be opened: that may have effects
        if kind != "a file":
            raise PromptError(f"{given} is {kind}; give a file")
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    except PromptError:
        raise
    except FileNotFoundError:
        raise PromptError(f"{given} does not exist, seen from {Path.cwd()}; give another path") from None
    except (OSError, RuntimeError, ValueError) as error:  # not allowed; a home that is not known; a zero character
        raise PromptError(f"{given} cannot be opened ({error}); give a file that can be read") from None
    about = os.fstat(file.fileno())
    if not stat.S_ISREG(about.st_mode) or not about.st_size:
        file.close()
        raise PromptError(
            f"{given} is {'empty' if stat.S_ISREG(about.st_mode) else 'no file'}; give a file with prompts"
        )
    return file


def lines(path: Path) -> Iterator[tuple[int, bytes | None]]:
    """The lines of the file ``path`` with their numbers, from 1; None in the place of one longer than :data:`LINE_BYTES`,
    which is passed over when the next one is asked for. Raises PromptError."""
    with open_file(path) as file:
        try:
            head = file.peek(8) if hasattr(file, "peek") else b""
            for magic, (wrong, fix) in FORMATS.items():
                if head.startswith(magic):
                    raise PromptError(f"prompts: {path} {wrong}, not JSON Lines in UTF-8; {fix}")
            number = 0
            while raw := file.readline(LINE_BYTES):
                if len(raw) == LINE_BYTES and not raw.endswith(b"\n"):
                    number, raw = number + 1, b""
                    yield number, None
                    _pass_over(file, f"{path}, line {number}")
                    continue
                for line in raw.splitlines():  # where a line ends with a carriage return alone too
                    number += 1
                    yield number, line
        except OSError as error:
            raise PromptError(f"prompts: {path} cannot be read ({error}); give a file that can be read") from error


def _pass_over(file: BinaryIO, where: str) -> None:
    """Read the rest of a line. Raises PromptError when there is no end to it."""
    for _ in range(MOST_PASSED_OVER // PIECE):
        raw = file.readline(PIECE)
        if len(raw) < PIECE or raw.endswith(b"\n"):
            return
    raise PromptError(
        f"prompts: {where} has more than {MOST_PASSED_OVER >> 30} GiB; write one JSON object on each line"
    )


def parse_line(line: bytes, where: str) -> Row | None:
    """The row that ``line`` holds; None when it is blank. Raises PromptError, naming ``where``."""
    try:
        text = line.decode("utf-8").removeprefix(BYTE_ORDER_MARK)
    except UnicodeDecodeError as error:
        byte = f"byte 0x{line[error.start]:02x} at column {error.start + 1}"
        raise PromptError(f"prompts: {where} is not UTF-8 ({byte}); {TO_UTF8.format('latin1')}") from None
    if "\0" in text:
        raise PromptError(
            f"prompts: {where} has a zero byte at column {line.index(0) + 1}, as UTF-16 has; {TO_UTF8.format('utf-16')}"
        )
    if not text.strip():
        return None
    try:
        row = json.loads(text)
    except RecursionError:
        raise PromptError(f"prompts: {where} is nested too deeply; make it flatter") from None
    except ValueError as error:  # JSONDecodeError, and a number with more digits than Python reads
        reason = getattr(error, "msg", str(error).partition(";")[0])
        column = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        raise PromptError(f"prompts: {where} is not JSON ({reason}{column}); {_as_lines(line)}") from None
    if not isinstance(row, dict):
        what = {"list": "a list", "str": "a text", "NoneType": "null"}.get(
            type(row).__name__, f"a {type(row).__name__}"
        )
        raise PromptError(f"prompts: {where} is {what}; {_as_lines(line)}")
    return row


def _as_lines(line: bytes) -> str:
    """What to do with a line that is no JSON object."""
    return "write one JSON object on each line" + (", as `jq -c '.[]'` makes of a list" if begins_list(line) else "")


def begins_list(line: bytes) -> bool:
    return line.lstrip(b"\xef\xbb\xbf \t").startswith(b"[")
