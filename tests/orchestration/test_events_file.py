"""metrics.jsonl on a disk that is full for a while, with torn lines, and with ids that go on after
all before."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestration.disk import replacing
from orchestration.history import events_file
from orchestration.history.events_file import METRICS, MetricsFile, read_metrics
from orchestration.history.lines import line_of
from orchestration.private_files import write_private
from pipeline.data.events import Event, order
from pipeline.index.client import Index
from pipeline.index.embedded import EmbeddedIndex


def event(number: int, kind: str = "step") -> Event:
    return Event(
        f"{number}-0", float(number), kind, {"version": number, "step": number, "metrics": {}}
    )


@contextlib.contextmanager
def disk(patch: pytest.MonkeyPatch, room: int) -> Iterator[None]:
    """A disk with ``room`` bytes left: it takes a part of what is written, and then refuses."""
    write = os.write
    left = [room]

    def refusing(file: int, data: Any) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = write(file, bytes(data)[: left[0]])
        left[0] -= taken
        return taken

    with patch.context() as context:
        context.setattr(events_file.os, "write", refusing)
        yield


@pytest.mark.parametrize("room", [0, 1, 100, 101, 250])
def test_a_full_disk_tears_no_line_and_loses_no_event_once_it_has_room(
    room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / METRICS
    with MetricsFile(path) as file:
        file.event(event(1))
        with disk(monkeypatch, room):
            for number in (2, 3, 4, 5, 6):
                file.event(event(number))
            for line in path.read_bytes().splitlines(keepends=True):
                assert line.endswith(b"\n"), "no part of a line is there"
                json.loads(line)
            for part in (
                str(path),
                "No space left on device",
                "are needed, and its disk has",
                "free room there",
            ):
                assert part in file.refused
        file.event(event(7))
        assert file.refused == ""
        assert file.close() == ""
    assert [each.id for each in read_metrics(path)] == [f"{number}-0" for number in range(1, 8)]


def test_events_that_no_room_came_for_are_reported_and_a_limit_ends_the_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events_file, "MOST_KEPT", 2 * len(line_of(event(1))))
    file = MetricsFile(tmp_path / METRICS)
    with disk(monkeypatch, 0):
        file.event(event(1))
        file.event(event(2))
        with pytest.raises(OSError, match=f"{tmp_path / METRICS} cannot be written"):
            file.event(event(33333333333333333333333333333))
        assert "events of the run are lost: " in file.close()
    assert (tmp_path / METRICS).read_bytes() == b""


def test_torn_lines_are_named_and_change_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / METRICS
    with MetricsFile(path) as file:
        for number in range(1, 7):
            file.event(event(number))
    lines = path.read_bytes().splitlines(keepends=True)
    torn = lines[1][:20] + b"\n"
    fused = lines[3][:30] + lines[4]
    path.write_bytes(b"".join([lines[0], torn, lines[2], fused, lines[5], b'{"id": "7-0", "ti']))
    assert [each.id for each in read_metrics(path)] == ["1-0", "3-0", "6-0"]
    said = capsys.readouterr()
    assert str(path) in said.out + said.err
    assert "[2, 4]" in said.out + said.err
    with MetricsFile(path) as file:
        assert file.last == "6-0"
        file.rewind(3)
        file.event(event(8))
    assert [each.id for each in read_metrics(path)] == ["1-0", "3-0", "8-0"]
    assert torn in path.read_bytes(), "what cannot be read is not removed"


def test_a_file_that_a_full_disk_does_not_take_is_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "recipe.json"
    write_private(path, "before")
    refused = pytest.raises(
        OSError,
        match=rf"{path} cannot be written .*: 2 KiB are needed, and "
        rf"its disk has",
    )
    with refused, replacing(path, 2048) as partial:
        partial.write_text("half of")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert path.read_text() == "before"
    assert [each.name for each in tmp_path.iterdir()] == ["recipe.json"]
    assert path.stat().st_mode & 0o777 == 0o600


async def test_ids_go_on_after_those_of_before_where_the_clock_is_behind(tmp_path: Path) -> None:
    """As after a resume with an index that is new, and a clock that was set back."""
    server = EmbeddedIndex(tmp_path / "index", socket=tmp_path / "index.sock")
    for _ in server.starting():
        pass
    ahead = "99999999999999-7"  # by which no clock has come
    try:
        async with Index(server.url, "run") as index:
            await index.load()
            await index.continue_events(ahead)
            assert await index.events("0", timeout=0.0) == []
            await index.transition([""], "created")
            await index.transition(["created"], "starting")
            found = [each.id for each in await index.events(ahead, timeout=10.0)]
            assert found == ["99999999999999-8", "99999999999999-9"]
            await index.continue_events("99999999999999-99")
            await index.transition(["starting"], "running")
            (last,) = await index.events(found[-1], timeout=10.0)
            assert order(last.id) == (99999999999999, 10), (
                "a stream that is there counts on by itself"
            )
    finally:
        server.stop()
