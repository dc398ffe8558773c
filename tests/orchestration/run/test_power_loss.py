"""What a power failure finds on the disk: a checkpoint that has its name is there with every byte
of every file.

A rename may reach the disk before the bytes of what is renamed; only what was synced before is sure
to be there. Calls of the operating system are recorded, as no test can cut the power.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from orchestration.checkpoints import checkpoint
from orchestration.checkpoints.store import CheckpointStore
from orchestration.recipe.models import tokenizer_of
from orchestration.workers.engines import train_engine
from tests.orchestration.runs import TINY, recipe

State = tuple[int, int, int]


def state_of(found: os.stat_result) -> State:
    """Which file it is, and of which content."""
    return found.st_ino, found.st_size, found.st_mtime_ns


class Disk:
    """Records what is synced, and checks each rename to the name of a checkpoint, or into one."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.synced: set[State] = set()
        self.named: list[str] = []
        self.unsynced: set[Path] = set()  # folders with a new name that are not synced since
        self._sync = os.fsync
        self._replace = os.replace
        self._rename = os.rename
        patch.setattr("os.fsync", self.fsync)
        patch.setattr(
            "os.replace", lambda *names, **options: self.move(self._replace, *names, **options)
        )
        patch.setattr(
            "os.rename", lambda *names, **options: self.move(self._rename, *names, **options)
        )

    def fsync(self, descriptor: int) -> None:
        self._sync(descriptor)
        self.synced.add(state_of(os.fstat(descriptor)))
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        self.unsynced.discard(path)

    def move(self, call: Any, source: Any, target: Any, **options: Any) -> None:
        source = Path(source)
        target = Path(target)
        if target.name.startswith("step-") or target.parent.name.startswith("step-"):
            lacking = [
                str(path)
                for path in (source, *source.rglob("*"))
                if state_of(path.stat()) not in self.synced
            ]
            assert not lacking, f"{target} gets its name before these are on the disk: {lacking}"
            listed = target.name.startswith("step-") or target.name == "run.json"
            assert not listed or target.parent not in self.unsynced, (
                f"{target} may be there without what it needs"
            )
            self.named.append(target.name)
            self.unsynced.add(target.parent)
        call(source, target, **options)


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Disk, checkpoint.Checkpoint]:
    of = recipe(TINY, train__steps=1)
    tokenizer = tokenizer_of(of)
    writer = checkpoint.Writer(train_engine(of))
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    writer.copy()
    disk = Disk(monkeypatch)
    writer.write(checkpoint.begin(folder, 1))
    return disk, checkpoint.finish(folder, tokenizer, 1, {"counters": {}, "remake": []}, keep=2)


def test_a_checkpoint_gets_its_name_when_all_of_it_is_on_the_disk(
    written: tuple[Disk, checkpoint.Checkpoint],
) -> None:
    disk, _ = written
    assert disk.named == ["step-00000001"]
    assert not disk.unsynced, "the name itself is not on the disk"


def test_so_does_one_that_is_copied_from_its_url(
    written: tuple[Disk, checkpoint.Checkpoint], tmp_path: Path
) -> None:
    disk, made = written
    (tmp_path / "mounted").mkdir()
    store = CheckpointStore(str(tmp_path / "mounted"))
    store.push(made.path, keep=2)
    disk.named.clear()
    assert checkpoint.newest(tmp_path / "elsewhere", store.url, 1) is not None
    assert set(disk.named) == {"model", "train", "digests.json", "run.json"}
    assert disk.named[-1] == "run.json", "it is listed by this"
    assert not disk.unsynced
