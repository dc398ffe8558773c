"""Catalog of a run's closed parts, in one SQLite file beside them: facts of each, and points of
their series.

    metrics/*.jsonl.gz ──Catalog.update──▶ metrics/catalog.sqlite ──▶ facts: versions, ids, steps, counts
                                                                  └─▶ points: each number of each series, at each level

All of it is derived: a part that is new or was rewound is read again, and a file that is damaged is
made again.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import structlog

from orchestration.history.facts import Facts
from orchestration.history.segments import SEGMENT_BYTES, Segment, closed, folder_of

if TYPE_CHECKING:
    from orchestration.history.columns import Columns

CATALOG = "catalog.sqlite"
WAIT_SECONDS = 10.0  # for another process that writes
_VERSION = 2  # of the tables, and of what they say
_TABLES = """
CREATE TABLE IF NOT EXISTS parts (
  number INTEGER, part INTEGER, stamp TEXT, facts TEXT, lengths TEXT, PRIMARY KEY (number, part)
);
CREATE TABLE IF NOT EXISTS names (series TEXT, name TEXT, PRIMARY KEY (series, name)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS points (
  series TEXT, name TEXT, every INTEGER, number INTEGER, part INTEGER, data BLOB,
  PRIMARY KEY (series, name, every, number, part)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS points_of_part ON points (number);
"""
Part = tuple[int, int]  # number of a segment, and of a piece of it: a large one has several

log = structlog.get_logger()


class Catalog:
    """The catalog of the closed parts of ``path``, a ``metrics.jsonl``.

    Where its file cannot be written it is made in memory. Use it as a context.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = folder_of(path) / CATALOG
        self.database = _opened(self._file)

    def __enter__(self) -> Catalog:
        return self

    def __exit__(self, *_: object) -> None:
        self.database.close()

    def update(self) -> dict[Part, Facts]:
        """Read the parts that it does not know. Returns the facts of all, in order. Raises
        OSError."""
        try:
            self._read_unknown()
        except sqlite3.OperationalError as refused:
            log.warning(
                "the catalog of a run's events is not kept",
                file=str(self._file),
                reason=str(refused),
            )
            self._go_on_in_memory()
            self._read_unknown()
        except sqlite3.DatabaseError as damaged:
            self.database.close()
            self.database = _made_again(self._file, damaged)
            self._read_unknown()
        rows = self.database.execute("SELECT number, part, facts FROM parts ORDER BY number, part")
        return {(number, part): Facts.from_json(facts) for number, part, facts in rows}

    def _read_unknown(self) -> None:
        known = dict(self.database.execute("SELECT number, stamp FROM parts WHERE part = 0"))
        segments = {segment.number: segment for segment in closed(self._path)}
        if gone := known.keys() - segments.keys():
            self._execute(_removed(gone))
        for segment in segments.values():
            stamp = segment.stamp
            if known.get(segment.number) != stamp:
                self._execute(_rows(segment, stamp))

    def _go_on_in_memory(self) -> None:
        memory = sqlite3.connect(":memory:")
        with contextlib.suppress(sqlite3.Error):
            self.database.backup(memory)
        self.database.close()
        self.database = _prepared(memory)

    def _execute(self, statements: Iterator[tuple[str, tuple[Any, ...]]]) -> None:
        self.database.execute("BEGIN IMMEDIATE")
        try:
            for statement, values in statements:
                self.database.execute(statement, values)
        except BaseException:
            self.database.rollback()
            raise
        self.database.commit()


def _removed(numbers: Iterable[int]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    for number in numbers:
        yield "DELETE FROM parts WHERE number = ?", (number,)
        yield "DELETE FROM points WHERE number = ?", (number,)


def _rows(segment: Segment, stamp: str) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield the statements that write all of ``segment``; one piece of it after the other is in
    memory."""
    # not needed where all parts are known
    from orchestration.history.columns import levels_of, packed

    yield from _removed([segment.number])
    for part, (facts, columns) in enumerate(_pieces(segment)):
        lengths = dict[str, dict[int, int]]()  # points by series and level
        for series, points in columns.series():
            lengths[series] = {}
            for every, reduced in levels_of(series, points):
                lengths[series][every] = len(reduced)
                for name, data in packed(reduced):
                    row = series, name, every, segment.number, part, data
                    yield "INSERT INTO points VALUES (?, ?, ?, ?, ?, ?)", row
            yield from (
                ("INSERT OR IGNORE INTO names VALUES (?, ?)", (series, name))
                for name in points.values
            )
        known = segment.number, part, stamp, facts.to_json(), json.dumps(lengths)
        yield "INSERT INTO parts VALUES (?, ?, ?, ?, ?)", known


def _opened(file: Path) -> sqlite3.Connection:
    """Return the database in ``file``; one in memory where it cannot be made, and a new one where
    it is damaged."""
    if not file.parent.is_dir():
        return _prepared(sqlite3.connect(":memory:"))
    for mode in ("rwc", "ro"):
        try:
            return _prepared(_connected(file, mode))
        except sqlite3.OperationalError:  # not writable, or not there
            continue
        except sqlite3.DatabaseError as damaged:
            return _made_again(file, damaged)
    return _prepared(sqlite3.connect(":memory:"))


def _made_again(file: Path, damaged: sqlite3.Error) -> sqlite3.Connection:
    log.warning("the catalog of a run's events is made again", file=str(file), reason=str(damaged))
    with contextlib.suppress(OSError, sqlite3.Error):
        file.unlink()
        return _prepared(_connected(file, "rwc"))
    return _prepared(sqlite3.connect(":memory:"))


def _connected(file: Path, mode: str) -> sqlite3.Connection:
    return sqlite3.connect(
        f"file:{quote(str(file.absolute()))}?mode={mode}",
        uri=True,
        timeout=WAIT_SECONDS,
        isolation_level=None,
    )


def _prepared(database: sqlite3.Connection) -> sqlite3.Connection:
    """Return ``database`` with its tables; those of another version are made again."""
    try:
        database.isolation_level = None
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if version != _VERSION:
            if version:
                database.executescript(
                    "DROP TABLE IF EXISTS parts; DROP TABLE IF EXISTS points; DROP TABLE IF EXISTS "
                    "names;"
                )
            database.executescript(
                f"BEGIN IMMEDIATE; {_TABLES} PRAGMA user_version = {_VERSION}; COMMIT;"
            )
    except BaseException:
        database.close()
        raise
    return database


def _pieces(segment: Segment) -> Iterator[tuple[Facts, Columns]]:
    """Yield what is known of ``segment``, for each :data:`SEGMENT_BYTES` of it; one with nothing
    where it is empty."""
    from orchestration.history.columns import Columns

    facts = Facts()
    columns = Columns()
    with segment.open() as lines:
        for line in lines:
            if (event := facts.line(line)) is not None:
                columns.add(event)
            if facts.size >= 2 * SEGMENT_BYTES:
                yield facts, columns
                facts = Facts()
                columns = Columns()
    yield facts, columns
