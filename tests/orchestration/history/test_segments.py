"""metrics.jsonl in closed parts: written by a process that is killed between any two operations,
rewound, and read."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import random
import shutil
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from orchestration.history import catalog, events_file, segments
from orchestration.history.catalog import CATALOG
from orchestration.history.events_file import (
    METRICS,
    MetricsFile,
    facts_of,
    newest_checkpoint,
    newest_id,
    read_metrics,
)
from orchestration.history.segments import FOLDER, EventLog, closed
from pipeline.data.events import Event, order

PART = 3000  # bytes of a part in these tests
KILLED = 77


def event(number: int, kind: str, **data: Any) -> Event:
    return Event(f"{1000 * number}-0", float(number), kind, data)


def story() -> list[Event]:
    """A run that is rewound to its checkpoint, over some closed parts, and makes the steps since
    again."""
    found = list[Event]()
    number = itertools.count(1)

    def steps(first: int, last: int) -> None:
        for step in range(first, last):
            numbers = {f"metric_{at}": step / (at + 7) for at in range(6)}
            found.append(
                event(
                    next(number),
                    "step",
                    step=step + 1,
                    version=step + 1,
                    rows=8,
                    groups=[step],
                    **numbers,
                )
            )

    steps(0, 30)
    found.append(event(next(number), "checkpoint", version=30, path="p", requested=False))
    found.append(
        event(next(number), "evaluation", version=30, step=30, count=1, reward_mean=0.5, samples=[])
    )
    steps(30, 70)
    found.append(
        event(next(number), "evaluation", version=60, step=60, count=1, reward_mean=0.5, samples=[])
    )
    found.append(
        event(
            next(number), "worker", stage="runner", worker="runner-0", change="rewound", version=30
        )
    )
    steps(30, 80)
    found.append(event(next(number), "state", state="finished", reason=""))
    return found


def follow(path: Path, events: list[Event]) -> None:
    """As a runner does: what comes after the events that the file has is written to it."""
    with MetricsFile(path, PART) as file:
        for each in events:
            if order(each.id) > order(file.after):
                file.event(each)


def told(path: Path) -> list[Event]:
    return list(read_metrics(path))


def dying(at: int) -> Callable[[], None]:
    """The process ends at once, without any cleanup, at the ``at``-th operation of it on a file."""
    count = itertools.count(1)
    lock = threading.Lock()

    def step() -> None:
        with lock:
            if next(count) >= at:
                os._exit(KILLED)

    def around(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def counted(*args: Any, **options: Any) -> Any:
            step()
            result = real(*args, **options)
            step()
            return result

        setattr(owner, name, counted)

    for name in ("rename", "replace", "unlink", "write", "ftruncate", "mkdir"):
        around(os, name)
    os.fsync = lambda file: None  # no power is lost here
    around(gzip, "compress")
    around(segments.shutil, "copymode")
    around(catalog.Catalog, "_execute")
    return step


def in_child(work: Callable[[], None], at: int) -> int:
    """Returns the exit code of a process that does ``work`` and dies at its ``at``-th operation."""
    child = os.fork()
    if child == 0:
        try:
            dying(at)
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_kill_between_any_two_operations_loses_and_doubles_no_event(tmp_path: Path) -> None:
    events = story()
    (tmp_path / "whole").mkdir()
    follow(tmp_path / "whole" / METRICS, events)
    expected = told(tmp_path / "whole" / METRICS)
    assert [one.data["step"] for one in expected if one.kind == "step"] == list(range(1, 81))
    assert len(closed(tmp_path / "whole" / METRICS)) > 4
    draw = random.Random(1)
    for at in itertools.count(1):
        if at > 25:  # writes of lines, mostly: some of them
            at += sum(draw.randrange(12) for _ in range(at - 25))
        folder = tmp_path / str(at)
        folder.mkdir()
        path = folder / METRICS
        code = in_child(lambda: follow(path, events), at)  # noqa: B023
        assert code in (0, KILLED)
        seen = told(path)
        assert len({one.id for one in seen}) == len(seen), (
            f"doubled, after a kill at operation {at}"
        )
        with MetricsFile(path, PART) as file:  # the next runner, which is killed as well
            assert order(file.last) <= order(events[-1].id)
        in_child(lambda: follow(path, events), at // 2 + 1)  # noqa: B023
        follow(path, events)
        assert told(path) == expected, f"after a kill at operation {at}"
        assert not [name for name in os.listdir(folder / FOLDER) if name.endswith(".jsonl")], (
            "all is compressed"
        )
        shutil.rmtree(folder)
        if code == 0:
            assert at > 100
            return


@pytest.fixture
def long(tmp_path: Path) -> Path:
    """A run of some parts, without the rewind."""
    follow(tmp_path / METRICS, [one for one in story() if one.kind != "worker"][:72])
    return tmp_path / METRICS


def test_parts_are_read_as_one_file_by_the_product_and_by_zcat(long: Path) -> None:
    events = [one for one in story() if one.kind != "worker"][:72]
    assert len(closed(long)) >= 3
    assert [one.id for one in told(long)] == [one.id for one in events]
    assert newest_id(long) == events[-1].id
    command = f"zcat -f {long.parent}/{FOLDER}/*.jsonl* {long}"
    lines = subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert [json.loads(line)["id"] for line in lines] == [one.id for one in events]
    tail = list(read_metrics(long, 2 * PART))
    assert tail == told(long)[-len(tail) :]
    assert 5 < len(tail) < 40


def test_any_page_of_the_parts_is_found(long: Path) -> None:
    events = told(long)
    log = EventLog(long)
    for count in (1, 7, 500):
        for at in range(0, len(events), 5):
            after = events[at].id
            assert log.after(after, count) == events[at + 1 : at + 1 + count]
    pages = list[Event]()
    after = "0"
    while page := log.after(after, 7):
        pages = pages + page
        after = page[-1].id
    assert pages == events


def test_a_rewind_touches_only_the_parts_that_hold_later_steps(long: Path) -> None:
    before = {one.path: one.path.stat().st_mtime_ns for one in closed(long)}
    facts = facts_of(long)
    with MetricsFile(long, PART) as file:
        assert file.rewind(40) == 30, "the newest evaluation that stays"
    later = {number for (number, _), part in facts.items() if part.made > 40}
    assert 0 < len(later) < len(before)
    for segment in closed(long):
        assert (segment.path.stat().st_mtime_ns == before[segment.path]) == (
            segment.number not in later
        )
    assert [one.data["step"] for one in told(long) if one.kind == "step"] == list(range(1, 41))
    assert {part.made for part in facts_of(long).values()} <= set(range(-1, 41))


def test_opening_a_file_for_a_resume_reads_the_open_part_alone(
    long: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts_of(long)
    opened = list[Path]()
    real = segments.Segment.open

    def noted(self: segments.Segment) -> Any:
        opened.append(self.path)
        return real(self)

    monkeypatch.setattr(segments.Segment, "open", noted)
    assert newest_checkpoint(long) == 30
    with MetricsFile(long, PART) as file:
        assert file.rewind(70) == 30
    assert set(opened) <= {closed(long)[-1].path}, "of which the last id is read"


@pytest.mark.parametrize("damage", ["missing", "garbage", "other", "readonly"])
def test_a_catalog_is_derived_from_the_parts(
    long: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = facts_of(long)
    file = long.parent / FOLDER / CATALOG
    match damage:
        case "missing":
            file.unlink()
        case "garbage":
            file.write_bytes(b"SQLite format 3\0" + random.Random(2).randbytes(20_000))
        case "other":
            with catalog.sqlite3.connect(file) as database:
                database.executescript("DROP TABLE parts; PRAGMA user_version = 99;")
            database.close()
        case "readonly":
            file.unlink()
            connected = catalog._connected

            def refusing(of: Path, mode: str) -> Any:
                return connected(of, "ro")

            monkeypatch.setattr(catalog, "_connected", refusing)
    assert facts_of(long) == expected
    assert file.exists() == (damage != "readonly")
    assert sum(part.counts["step"] for part in expected.values()) == sum(
        one.kind == "step"
        and order(one.id) <= order(max((f.last_id for f in expected.values()), key=order))
        for one in told(long)
    )


def test_a_file_of_an_older_version_is_read_resumed_and_rewound(tmp_path: Path) -> None:
    """One large metrics.jsonl, with a line that a kill cut short at its end."""
    events = [one for one in story() if one.kind != "worker"][:72]
    path = tmp_path / METRICS
    lines = [
        json.dumps({"id": e.id, "time": e.time, "kind": e.kind, "data": dict(e.data)})
        for e in events
    ]
    path.write_text("\n".join([*lines, '{"id": "999']))
    assert [one.id for one in told(path)] == [one.id for one in events]
    assert newest_checkpoint(path) == 30
    with MetricsFile(path, PART) as file:
        assert (file.last, file.rewind(40)) == (events[-1].id, 30)
        file.event(event(5000, "step", step=41, version=41))
    assert [one.data["step"] for one in told(path) if one.kind == "step"] == list(range(1, 42))
    assert len(closed(path)) == 1


def test_readers_miss_nothing_while_parts_are_closed_and_compressed(tmp_path: Path) -> None:
    path = tmp_path / METRICS
    over = threading.Event()

    def read() -> int:
        rounds = 0
        while not over.is_set():
            ids = [one.id for one in read_metrics(path)]
            assert ids == [f"{1000 * number}-0" for number in range(1, len(ids) + 1)]
            log = EventLog(path)
            after = "0"
            seen = 0
            while page := log.after(after, 50):
                after = page[-1].id
                seen = seen + len(page)
            assert after == (f"{1000 * seen}-0" if seen else "0")
            rounds += 1
        return rounds

    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(read)
        try:
            with MetricsFile(path, PART) as file:
                for number in range(1, 1500):
                    file.event(
                        event(number, "step", step=number, version=number, padding="y" * 100)
                    )
        finally:
            over.set()
        assert reading.result() > 3
    assert len(closed(path)) > 50


def test_a_disk_that_refuses_a_new_part_leaves_the_present_one_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / METRICS
    with MetricsFile(path, PART) as file:
        with monkeypatch.context() as patch:

            def refusing(path: Path) -> None:
                raise OSError(28, "No space left on device")

            patch.setattr(events_file, "close_part", refusing)
            for number in range(1, 60):
                file.event(event(number, "step", step=number, version=number, padding="y" * 100))
        assert closed(path) == []
        file.event(event(60, "step", step=60, version=60))
    assert [one.data["step"] for one in told(path)] == list(range(1, 61))
