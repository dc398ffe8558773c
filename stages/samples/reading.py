"""Reads the samples that a run has kept: the newest first, or group by group from the oldest on.

Importing this needs no torch.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path

from stages.samples.sample_log import Sample, files, parsed, path_of

MOST_SCANNED = 8 << 20  # bytes that one reading looks through


def newest(folder: Path) -> Iterator[Sample]:
    """Yield the samples below ``folder``, newest step first, up to :data:`MOST_SCANNED` bytes of
    them."""
    scanned = 0
    for _, _, _, line in backwards(folder):
        scanned += len(line)
        if scanned > MOST_SCANNED:
            return
        if (sample := parsed(line)) is not None:
            yield sample


def groups(folder: Path) -> Iterator[list[Sample]]:
    """Yield the samples of each group below ``folder`` by place, oldest step first.

    One group is in memory at a time.
    """
    lines = (line for number in files(folder) for line in path_of(folder, number).open("rb"))
    samples = (sample for line in lines if (sample := parsed(line)) is not None)
    for _, members in itertools.groupby(
        samples, key=lambda sample: (sample["step"], sample["group"])
    ):
        yield sorted(members, key=lambda sample: int(sample["place"]))


def kept_steps(folder: Path) -> tuple[int, int] | None:
    """Return the oldest and the newest step of the samples below ``folder``; None: there are
    none."""
    with contextlib.suppress(FileNotFoundError, StopIteration):  # removed meanwhile
        return next(groups(folder))[0]["step"], next(newest(folder))["step"]
    return None


def backwards(
    folder: Path, start: tuple[int, int] | None = None, step: int | None = None
) -> Iterator[tuple[int, int, int, bytes]]:
    """Yield the lines below ``folder`` from the last to the first, each with its file's number and
    the bytes at which it begins and ends. ``start``: number of a file and bytes of it, from which on
    backwards it reads. ``step``: files with later steps alone are left out."""
    for number in reversed(files(folder)):
        if start is not None and number > start[0]:
            continue
        path = path_of(folder, number)
        try:
            if step is not None and _begins_after(path, step):
                continue
            data = path.read_bytes()
        except FileNotFoundError:  # removed meanwhile, after all older ones
            return
        end = data.rfind(b"\n") + 1
        if start is not None and number == start[0]:
            end = min(len(data), start[1])
        while end > 0:
            begin = data.rfind(b"\n", 0, end - 1) + 1
            yield number, begin, end, data[begin : end - 1]
            end = begin


def _begins_after(path: Path, step: int) -> bool:
    with path.open("rb") as file:
        first = parsed(file.readline())
    return first is not None and first["step"] > step
