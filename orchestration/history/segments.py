"""The parts of a run's file of events, and how they are read.

    metrics/000001.jsonl.gz  000002.jsonl.gz  …  000007.jsonl          metrics.jsonl
             closed: never written, but by a rewind    └ until compressed      └ open: new events are appended

Closing is a rename, compressing is a rename: at any moment each event is in one of these names. A
reader that meets a rename looks again. A part that is much larger than :data:`SEGMENT_BYTES`, as of
a run of an older version, stays as it is.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO

from orchestration.disk import replacing
from orchestration.history.lines import ID_OF_LINE, event_of, id_of
from pipeline.data.events import Event, order

FOLDER = "metrics"  # beside metrics.jsonl: the closed parts of it
SEGMENT_BYTES = 4 << 20  # of a part when it is closed: a question may read all of one
# a larger part is not compressed: a page of it is found without reading all
MOST_COMPRESSED = 8 * SEGMENT_BYTES
LEVEL = 6  # of gzip
LOOKS = 100  # at names that a writer changes meanwhile
_NAME = re.compile(r"(\d{6,})\.jsonl(\.gz)?")


@dataclass(frozen=True)
class Segment:
    """A closed part, numbered from 1."""

    number: int
    path: Path

    @property
    def compressed(self) -> bool:
        return self.path.suffix == ".gz"

    def open(self) -> BinaryIO:
        """Open it, and return its lines. Raises FileNotFoundError where a writer has taken it
        away."""
        if self.compressed:
            return io.BytesIO(gzip.decompress(self.path.read_bytes()))
        try:
            return self.path.open("rb")
        except FileNotFoundError:
            return self.twin.open()

    @property
    def twin(self) -> Segment:
        """The same part when it is compressed."""
        return Segment(self.number, self.path.with_name(f"{self.path.name}.gz"))

    def head(self) -> bytes:
        """Return its first line."""
        if self.compressed:
            with gzip.open(self.path, "rb") as lines:
                return lines.readline()
        with self.open() as lines:
            return lines.readline()

    @property
    def stamp(self) -> str:
        """Text that is the same while its content is: gzip's checksum and size; of one that is not
        compressed, its size."""
        if not self.compressed:
            return str(self.size)
        with self.path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 8))
            return file.read().hex()

    @property
    def size(self) -> int:
        """Bytes of its lines."""
        if self.compressed:
            return int.from_bytes(bytes.fromhex(self.stamp)[4:], "little")
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return self.twin.size


def folder_of(path: Path) -> Path:
    """Return where the closed parts of the file ``path`` (a ``metrics.jsonl``) are."""
    return path.with_name(FOLDER)


def closed(path: Path) -> list[Segment]:
    """Return the closed parts of ``path``, in order."""
    segments: dict[int, Segment] = {}
    with (
        contextlib.suppress(FileNotFoundError, NotADirectoryError),
        os.scandir(folder_of(path)) as entries,
    ):
        for entry in entries:
            if name := _NAME.fullmatch(entry.name):
                number = int(name[1])
                if name[2] or number not in segments:  # the compressed one is whole
                    segments[number] = Segment(number, Path(entry.path))
    return [segments[number] for number in sorted(segments)]


def parts(path: Path) -> tuple[list[Segment], BinaryIO | None]:
    """Return the closed parts of ``path`` and the open one, of one moment; None where there is no
    open one."""
    for _ in range(LOOKS):
        file = None
        with contextlib.suppress(FileNotFoundError):
            file = path.open("rb")
        segments = closed(path)
        if _inode(path) == (os.fstat(file.fileno()).st_ino if file else 0):
            return segments, file
        if file:
            file.close()
    raise OSError(f"{path} is renamed again and again; it is to have one writer")


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return 0


def close_part(path: Path) -> Segment:
    """Make the open part ``path`` the newest closed one. Raises OSError."""
    before = closed(path)
    number = before[-1].number + 1 if before else 1
    folder_of(path).mkdir(exist_ok=True)
    segment = Segment(number, folder_of(path) / f"{number:06}.jsonl")
    os.rename(path, segment.path)
    return segment


def compress(segment: Segment) -> Segment:
    """Return ``segment`` compressed.

    One that is large, or is compressed already, is left as it is. Raises OSError.
    """
    if segment.compressed or segment.path.stat().st_size > MOST_COMPRESSED:
        return segment
    target = segment.path.with_name(f"{segment.path.name}.gz")
    write(target, segment.path.read_bytes(), segment.path)
    segment.path.unlink()
    return Segment(segment.number, target)


def write(target: Path, content: bytes, former: Path) -> None:
    """Have ``target`` hold ``content`` compressed, in one step, with the mode of ``former``.

    Raises OSError.
    """
    packed = gzip.compress(content, LEVEL, mtime=0)
    with replacing(target, len(packed)) as partial:
        partial.write_bytes(packed)
        shutil.copymode(former, partial)


class EventLog:
    """Reader of the events of a ``metrics.jsonl`` and of its closed parts, in the order of their
    ids.

    Holds the content of one compressed part at most, for the pages that follow.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        # of the part that was read last, with its stamp
        self._content: tuple[Segment, str, bytes] | None = None

    def after(self, event_id: str, count: int) -> list[Event]:
        """Return the next ``count`` events after ``event_id``; empty when there are none, or no
        file.

        Torn lines are skipped.
        """
        last = order(event_id)
        segments, file = parts(self._path)
        events: list[Event] = []
        with file or contextlib.nullcontext():
            for segment in segments[self._place(segments, last) :]:
                with self._opened(segment) as lines:
                    events += events_after(lines, last, count - len(events))
                if len(events) == count:
                    return events
                last = order(events[-1].id) if events else last
            self._content = None
            if file:
                events += events_after(file, last, count - len(events))
        return events

    def _place(self, segments: list[Segment], last: tuple[int, int]) -> int:
        """Return the position of the first of ``segments`` with ids past ``last``, or of the one
        before it."""
        low = 0
        high = len(segments)
        while high - low > 1:
            middle = (low + high) // 2
            first = id_of(segments[middle].head())
            if first and order(first) <= last:
                low = middle
            else:
                high = middle
        return low

    def _opened(self, segment: Segment) -> IO[bytes]:
        if not segment.compressed:
            return segment.open()
        stamp = segment.stamp
        if self._content is None or self._content[:2] != (segment, stamp):
            self._content = segment, stamp, gzip.decompress(segment.path.read_bytes())
        return io.BytesIO(self._content[2])


def events_after(file: IO[bytes], last: tuple[int, int], count: int) -> list[Event]:
    """Return the next ``count`` events of the lines of ``file`` whose ids are past ``last``."""
    events: list[Event] = []
    file.seek(_place_in(file, last))
    for line in file:
        if (event := event_of(line)) is not None and order(event.id) > last:
            last = order(event.id)
            events.append(event)
            if len(events) >= count:
                break
    return events


def _place_in(file: IO[bytes], wanted: tuple[int, int]) -> int:
    """Start of a line at or a few lines before the first id past ``wanted``, found by bisection."""
    low = 0
    high = file.seek(0, 2)  # a line begins at `low`; ids before it are not past `wanted`
    while high - low > 4096:
        middle = (low + high) // 2
        file.seek(middle)
        file.readline()  # the rest of a line
        at = file.tell()
        id_match = None
        while (
            at < high and (line := file.readline()) and (id_match := ID_OF_LINE.match(line)) is None
        ):
            at = file.tell()  # a line that was cut short
        if id_match is None or order(id_match[1].decode()) > wanted:
            high = middle
        else:
            low = at
    return low


def lines_of(path: Path, last_bytes: int = 0) -> Iterator[tuple[Path, int, bytes]]:
    """Yield the lines of ``path`` and of its closed parts in order, or those in their last bytes:
    the file, the line's number in it (from 1, or from where reading begins), the line. Lines that
    are closed and compressed meanwhile are not missed."""
    segments, file = parts(path)
    skipped = _beyond(segments, file, last_bytes) if last_bytes else 0
    with file or contextlib.nullcontext():
        for segment in segments:
            size = segment.size
            if size <= skipped:
                skipped -= size
                continue
            for number, line in _numbered(segment.open(), skipped):
                yield segment.path, number, line
            skipped = 0
        if file:
            for number, line in _numbered(file, skipped):
                yield path, number, line


def lines_of_open(path: Path) -> Iterator[bytes]:
    """Yield the lines of the open part of ``path``."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as lines:
        yield from lines


def _beyond(segments: list[Segment], file: BinaryIO | None, last_bytes: int) -> int:
    """Return the bytes before the last ones."""
    sizes = sum(segment.size for segment in segments)
    return max(0, sizes + (os.fstat(file.fileno()).st_size if file else 0) - last_bytes)


def _numbered(lines: BinaryIO, skipped: int) -> Iterator[tuple[int, bytes]]:
    if skipped:
        lines.seek(skipped)
        lines.readline()
    yield from enumerate(lines, start=1)
