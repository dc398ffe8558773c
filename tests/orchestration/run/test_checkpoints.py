"""Which checkpoint a run goes on from, and which failures of a disk end it."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestration.checkpoints import checkpoint
from orchestration.checkpoints.checkpoint import lasting_refusal
from orchestration.checkpoints.held import held, hold
from orchestration.checkpoints.recorded import of_version
from orchestration.checkpoints.store import CheckpointStore
from orchestration.checkpoints.verification import verified
from orchestration.state.lock import RunError


def written(folder: Path, version: int, *parts: str) -> Path:
    """A checkpoint of ``version`` with ``parts``, of files that no engine reads."""
    made = folder / f"step-{version:08d}"
    for part in parts or ("model", "train"):
        (made / part).mkdir(parents=True)
        (made / part / "file").write_text(str(version))
    state = {
        "version": version,
        "counters": {"trained": version},
        "remake": [version],
        "rates": "{}",
    }
    (made / "run.json").write_text(json.dumps(state))
    return made


def test_a_checkpoint_of_the_last_step_leaves_nothing_to_resume(tmp_path: Path) -> None:
    made = checkpoint.open_checkpoint(written(tmp_path, 4))
    assert made.nothing_left(5, finished=True) == ""
    assert made.nothing_left(4, finished=False) == "", "it goes on to its end"
    done = "has made 4 of 4 steps: there is nothing to resume"
    assert made.nothing_left(4, finished=True) == done
    assert made.nothing_left(3, finished=False) == done.replace("of 4", "of 3")
    assert (made.counters, made.remake, made.rates) == ({"trained": 4}, [4], "{}")


def test_what_is_not_complete_is_no_checkpoint(tmp_path: Path) -> None:
    written(tmp_path, 9), written(tmp_path, 10), written(tmp_path, 100)
    (tmp_path / "step-00000100" / "run.json").unlink()
    for left in (".step-00000011.partial", ".step-00000001.removed"):
        written(tmp_path, 50).rename(tmp_path / left)
    newest = checkpoint.latest(tmp_path)
    assert newest is not None
    assert newest.version == 10
    checkpoint.clean(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"step-{n:08d}" for n in (9, 10, 100)
    ]
    assert checkpoint.latest(tmp_path / "none") is None


DAMAGED = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'"text"',
    b"{}",
    b'{"version": "x", "counters": {}, "remake": []}',
    b"\xff\xfe\x00",
]


@pytest.mark.parametrize("text", DAMAGED)
def test_one_that_is_damaged_is_left_out_and_named(text: bytes, tmp_path: Path) -> None:
    for version in (3, 5, 8):
        written(tmp_path, version)
    (tmp_path / "step-00000005" / "run.json").write_bytes(text)
    assert [found.version for found in checkpoint.usable(tmp_path)] == [3, 8]
    (tmp_path / "step-00000008" / "run.json").write_bytes(text)
    with pytest.raises(
        checkpoint.CheckpointUnusable,
        match=r"step-00000008/run\.json is damaged: "
        r".* --from 5",
    ):
        checkpoint.latest(tmp_path)


def test_one_that_is_removed_while_others_are_read_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in (3, 5, 8):
        written(tmp_path, version)
    opened = checkpoint.open_checkpoint

    def late(path: Path) -> checkpoint.Checkpoint:
        if path.name == "step-00000003":
            shutil.rmtree(path.with_name("step-00000005"))
        return opened(path)

    monkeypatch.setattr(checkpoint, "open_checkpoint", late)
    assert [found.version for found in checkpoint.usable(tmp_path)] == [3, 8]


class Wrapped(Exception):
    """As torch wraps what the ranks have raised."""

    def __init__(self, failure: BaseException) -> None:
        super().__init__("it failed")
        self.failures = {0: (failure, None)}


@pytest.mark.parametrize(
    "number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG]
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_what_a_restart_does_not_mend_ends_the_run_with_what_to_do(
    tmp_path: Path, number: int, wrapped: bool
) -> None:
    error: BaseException = OSError(number, os.strerror(number))
    refused = lasting_refusal(Wrapped(error) if wrapped else error, tmp_path, 7)
    assert refused is not None
    for part in (
        "version 7 cannot be written below",
        os.strerror(number),
        "goes on from the beginning",
    ):
        assert part in str(refused)
    written(tmp_path, 5)
    assert "goes on from the checkpoint of version 5" in str(lasting_refusal(error, tmp_path, 7))


def test_what_may_pass_is_tried_again_unless_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert lasting_refusal(OSError(errno.EIO, "I/O"), tmp_path, 7) is None
    assert lasting_refusal(RuntimeError("cut short"), tmp_path, 7) is None
    free = [checkpoint.LEAST_FREE]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free[0]))
    assert lasting_refusal(RuntimeError("cut short"), tmp_path, 7) is None
    free[0] -= 1
    assert "its disk is full: cut short" in str(
        lasting_refusal(RuntimeError("cut short"), tmp_path, 7)
    )


def test_a_disk_that_cannot_be_asked_is_refused(tmp_path: Path) -> None:
    assert "No such file" in str(lasting_refusal(RuntimeError("?"), tmp_path / "gone", 7))


@pytest.mark.parametrize(
    ("here", "there", "known", "parts", "found"),
    [
        ([], [], 0, (), None),
        ([4], [], 4, (), 4),
        ([], [4], 4, (), 4),
        ([4], [6], 6, (), 6),
        ([4], [6], 4, (), 4),  # as new as the run's newest is known to be
        ([4], [6], -1, (), 6),  # that is not known
        ([6], [4], -1, (), 6),
        ([4], [4], 4, ("other",), 4),  # and its other part is fetched
    ],
)
def test_the_newest_one_is_taken_wherever_it_is(
    tmp_path: Path,
    here: list[int],
    there: list[int],
    known: int,
    parts: tuple[str, ...],
    found: int | None,
) -> None:
    local = tmp_path / "here"
    remote = tmp_path / "remote"
    local.mkdir()
    remote.mkdir()
    store = CheckpointStore(str(remote))
    for version in there:
        store.push(written(tmp_path / "made", version, "model", "train", "other"), keep=9)
    for version in here:
        written(local, version)
    newest = checkpoint.newest(local, str(remote), known, parts)
    assert (newest.version if newest else None) == found
    for part in parts:
        assert newest is not None
        assert (newest.path / part / "file").read_text() == str(found)
    without = checkpoint.newest(local, "", known, ())
    assert without == checkpoint.latest(local)


# ── a run that goes on ──


TOKENIZER: Any = SimpleNamespace(save_pretrained=lambda path: None)


def save(folder: Path, version: int, keep: int = 2) -> checkpoint.Checkpoint:
    """Write a checkpoint of ``version`` as a trainer does, which removes the oldest."""
    partial = checkpoint.begin(folder, version)
    (partial / "model").mkdir()
    (partial / "model" / "file").write_text(str(version))
    state = {"counters": {}, "remake": []}
    return checkpoint.finish(folder, TOKENIZER, version, state, keep)


@contextmanager
def saving(folder: Path) -> Iterator[None]:
    """A thread that saves one version after the other, as fast as it can."""
    is_over = threading.Event()
    save(folder, 1)

    def work() -> None:
        version = 1
        while not is_over.is_set():
            version += 1
            save(folder, version)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def test_a_checkpoint_that_is_held_stays_until_it_is_freed(tmp_path: Path) -> None:
    for version in (1, 2):
        save(tmp_path, version)
    with held(lambda: checkpoint.latest(tmp_path)) as first, hold(tmp_path / "step-00000001"):
        assert first is not None
        for version in (3, 4, 5):
            save(tmp_path, version)
        names = [path.name for path in checkpoint.whole(tmp_path)]
        assert names == [checkpoint.name_of(version) for version in (1, 2, 4, 5)]
        assert (first.model / "file").read_text() == "2"
    save(tmp_path, 6)
    assert [checkpoint.version_of(path.name) for path in checkpoint.whole(tmp_path)] == [5, 6]
    with pytest.raises(FileNotFoundError), hold(first.path):
        pass


def test_the_newest_one_is_held_while_others_are_written_and_removed(tmp_path: Path) -> None:
    with saving(tmp_path / "checkpoints"):
        for _ in range(5):
            with held(lambda: checkpoint.latest(tmp_path / "checkpoints")) as start:
                assert start is not None
                start.verify()
                text = str(start.version)
                later = start.version + 3
                while checkpoint.usable(tmp_path / "checkpoints")[-1].version < later:
                    assert (start.model / "file").read_text() == text
                assert (start.model / "file").read_text() == text
        assert all(not each.damages for each in verified(tmp_path))


def test_a_version_that_was_removed_before_it_is_held_is_refused_with_those_there_are(
    tmp_path: Path,
) -> None:
    save(tmp_path, 1)

    def removed_meanwhile() -> checkpoint.Checkpoint | None:
        found = of_version(tmp_path, "", 1)
        for version in (2, 3):
            save(tmp_path, version)
        return found

    with (
        pytest.raises(RunError, match="has no checkpoint of it; it has: 2, 3"),
        held(removed_meanwhile),
    ):
        pass
