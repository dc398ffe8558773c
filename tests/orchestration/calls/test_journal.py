"""The journal of calls: what is written is there after any death, and nothing else is."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from orchestration.calls.journal import FILE_HEAD_BYTES, FRAME, Journal, JournalDamaged, Record
from tests.orchestration.calls.services import files_of_at_most


async def written(journal: Journal, *records: Record) -> None:
    for record in records:
        assert record.written is not None
        await record.written


async def write(path: Path, *blobs: bytes) -> list[int]:
    """Write a frame for each of ``blobs``. Returns where each ends."""
    journal, _ = Journal.open(path)
    ends = []
    for number, blob in enumerate(blobs):
        await written(journal, journal.append({"number": number}, blob))
        ends.append(journal.size)
    await journal.close()
    return ends


async def blobs_of(path: Path) -> list[bytes]:
    journal, records = Journal.open(path)
    assert [record.head for record in records] == [{"number": n} for n in range(len(records))]
    blobs = [journal.read(record) for record in records]
    await journal.close()
    return blobs


async def test_records_come_back_in_their_order_with_their_blobs(tmp_path: Path) -> None:
    blobs = [b"", b"a", os.urandom(100_000)]
    await write(tmp_path / "journal", *blobs)
    assert await blobs_of(tmp_path / "journal") == blobs


async def test_many_writers_share_one_frame(tmp_path: Path) -> None:
    journal, _ = Journal.open(tmp_path / "journal")
    first = journal.append({"number": 0})
    await asyncio.sleep(0)  # its commit begins
    others = [journal.append({"number": number}) for number in range(1, 100)]
    await written(journal, first, *others)
    await journal.close()
    content = (tmp_path / "journal").read_bytes()
    assert content.count(content[8:12]) == 3  # in the file's head, and one in each frame's
    assert len(await blobs_of(tmp_path / "journal")) == 100


@pytest.mark.parametrize("missing", [1, FRAME.size - 1, FRAME.size, 60])
async def test_a_torn_end_is_cut_off_and_the_rest_goes_on(tmp_path: Path, missing: int) -> None:
    path = tmp_path / "journal"
    ends = await write(path, b"first", b"second" * 20)
    os.truncate(path, max(ends[1] - missing, ends[0] + 1))
    assert await blobs_of(path) == [b"first"]
    assert path.stat().st_size == ends[0]
    journal, _ = Journal.open(path)
    await written(journal, journal.append({"number": 1}, b"again"))
    await journal.close()
    assert await blobs_of(path) == [b"first", b"again"]


async def test_damage_before_the_end_is_named_with_file_and_offset(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    ends = await write(path, b"first", b"second", b"third")
    for place in (ends[0] + 2, ends[0] + FRAME.size + 3, ends[1] - 1):
        content = bytearray(path.read_bytes())
        content[place] ^= 1
        damaged = tmp_path / f"damaged-{place}"
        damaged.write_bytes(content)
        with pytest.raises(JournalDamaged, match=rf"{damaged}: offset {ends[0]} .* restore"):
            Journal.open(damaged)
        assert damaged.read_bytes() == content


async def test_what_looks_like_a_frame_in_a_torn_blob_is_no_damage(tmp_path: Path) -> None:
    """A client's bytes are in the blob: here the frames of a whole other journal."""
    await write(tmp_path / "other", b"frame")
    inner = (tmp_path / "other").read_bytes()[FILE_HEAD_BYTES:]
    path = tmp_path / "journal"
    ends = await write(path, b"first", inner + bytes(100))
    os.truncate(path, ends[1] - 50)
    assert await blobs_of(path) == [b"first"]


async def test_a_file_that_is_no_journal_is_refused(tmp_path: Path) -> None:
    (tmp_path / "journal").write_bytes(b"something else entirely")
    with pytest.raises(JournalDamaged, match="offset 0"):
        Journal.open(tmp_path / "journal")


async def test_a_journal_whose_creation_was_interrupted_is_created_again(tmp_path: Path) -> None:
    (tmp_path / "journal").write_bytes(b"ADCA")
    assert await blobs_of(tmp_path / "journal") == []


async def test_a_full_disk_refuses_a_record_whole_and_the_next_one_that_fits_is_taken(
    tmp_path: Path,
) -> None:
    path = tmp_path / "journal"
    (end,) = await write(path, b"first")
    journal, _ = Journal.open(path)
    with files_of_at_most(end + 1000):
        refused = journal.append({"number": 1}, bytes(100_000))
        assert refused.written is not None
        with pytest.raises(OSError, match=r"journal cannot be written .* free room there"):
            await refused.written
        assert path.stat().st_size == end
        await written(journal, journal.append({"number": 1}, b"small"))
    await journal.close()
    assert await blobs_of(path) == [b"first", b"small"]


async def test_a_rewritten_journal_has_the_live_records_and_what_came_meanwhile(
    tmp_path: Path,
) -> None:
    path = tmp_path / "journal"
    journal, _ = Journal.open(path)
    old = [journal.append({"number": n}, bytes(10_000)) for n in (5, 0, 6)]
    await written(journal, *old)
    size = path.stat().st_size
    later = list[Record]()

    def live() -> list[Record | None]:
        later.append(journal.append({"number": 1}, b"later"))
        return [None, old[1], *later]

    await journal.rewrite(live)
    await written(journal, *later)
    assert path.stat().st_size < size / 2
    assert journal.read(old[1]) == bytes(10_000)
    assert journal.read(later[0]) == b"later"
    await journal.close()
    assert await blobs_of(path) == [bytes(10_000), b"later"]


async def test_a_rewrite_without_room_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal, _ = Journal.open(path)
    record = journal.append({"number": 0}, bytes(10_000))
    await written(journal, record)
    content = path.read_bytes()
    with files_of_at_most(1000), pytest.raises(OSError, match="free room"):
        await journal.rewrite(lambda: [record])
    assert path.read_bytes() == content
    await written(journal, journal.append({"number": 1}, b"x"))
    await journal.close()
    assert await blobs_of(path) == [bytes(10_000), b"x"]
    assert os.listdir(tmp_path) == ["journal"]
