"""The files of a folder by splits, as the library ``datasets`` finds them by name.

data/NAME-00000-of-00002.parquet           the split NAME; other files are of none
train/…  data/test_2/…  my-validation/…    by a keyword in the name of a folder, else
train.jsonl  my_test-00000-of-00002.parquet  by a keyword in the name of a file, else
anything                                   all files are of the split ``train``

A keyword stands at the beginning of a name or after one of ``- . _``, a space or a digit, and ends
at one of these.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from stages.prompts.rows.files import PromptError, existing, kind_of, path_error

TRAIN = "train"
KEYWORDS = {
    TRAIN: ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}[^.]*\..*")
BEFORE = r"(?:.*[-._ 0-9])?"
AFTER = r"[-._ 0-9].*"
IN_FOLDER = {
    split: re.compile(f"{BEFORE}(?:{'|'.join(words)})(?:{AFTER})?")
    for split, words in KEYWORDS.items()
}
IN_FILE = {
    split: re.compile(f"{BEFORE}(?:{'|'.join(words)}){AFTER}") for split, words in KEYWORDS.items()
}
MOST_NAMED = 4  # files in a text for people


@dataclass(frozen=True)
class DataFiles:
    """The ``files`` of a source: of ``split``, or of none (None), and the number of files of each
    split that is left out."""

    files: tuple[Path, ...]
    split: str | None = None
    left_out: dict[str, int] = field(default_factory=dict)

    def describe(self, rows: int | None) -> str:
        """Say for people which files and ``rows`` are taken; None: the rows are not counted."""
        names = [path.name for path in self.files[:MOST_NAMED]]
        more = f" and {len(self.files) - MOST_NAMED} more" if len(self.files) > MOST_NAMED else ""
        count = "rows" if rows is None else f"{rows} rows"
        split = f"split {self.split!r}: " if self.split else ""
        return f"{split}{count} of {', '.join(names)}{more}{describe_left_out(self.left_out)}"


def describe_left_out(counts: dict[str, int]) -> str:
    """Say which splits are left out, as the end of a sentence.

    >>> describe_left_out({"test": 2}), describe_left_out({})
    ("; left out: split 'test' (2 files)", '')
    """
    if not counts:
        return ""
    texts = [
        f"split {split!r} ({count} file{'s' * (count != 1)})" for split, count in counts.items()
    ]
    return f"; left out: {', '.join(texts)}"


def data_files(
    path: Path, split: str | None, suffix: str, spend: Callable[[int], bool] = lambda _: True
) -> DataFiles | None:
    """Return the files that ``path``, a file or a folder, and ``split`` name.

    ``suffix``: of the files in a folder. None when ``spend``, which is asked for each folder,
    allows no more. Raises PromptError.
    """
    top = existing(path)
    if kind_of(top) != "a folder":
        choose_split(str(path), split, None)
        return DataFiles((path,))
    files: list[Path] = []
    for parent, folders, names in os.walk(top):
        if not spend(1 + len(names) // 100):
            return None
        folders[:] = [name for name in folders if not name.startswith((".", "_"))]
        files += [
            Path(parent, name)
            for name in names
            if name.endswith(suffix) and not name.startswith((".", "_"))
        ]
    if not files:
        raise path_error(path, f"is a folder without *{suffix}", "give a file, or another folder")
    splits = by_split(top, sorted(files))
    chosen = choose_split(str(path), split, splits)
    assert chosen is not None
    others = {name: len(split_files) for name, split_files in splits.items() if name != chosen}
    return DataFiles(tuple(splits[chosen]), chosen if others or split else None, others)


def by_split(folder: Path, files: Iterable[Path]) -> dict[str, list[Path]]:
    """Return the ``files`` below ``folder`` by the splits that their names say.

    A file may be of two.
    """
    paths = {file: file.relative_to(folder).parts for file in files}
    shards = {
        file: SHARD.fullmatch(parts[1])
        for file, parts in paths.items()
        if len(parts) == 2 and parts[0] == "data"
    }
    splits: dict[str, list[Path]] = {}
    for file, shard in shards.items():
        if shard:
            splits.setdefault(shard[1], []).append(file)
    for patterns, part_of in ((IN_FOLDER, slice(-1)), (IN_FILE, slice(-1, None))):
        if splits:
            return splits
        for split, pattern in patterns.items():
            split_files = [
                file for file, parts in paths.items() if any(map(pattern.fullmatch, parts[part_of]))
            ]
            if split_files:
                splits[split] = split_files
    return splits or {TRAIN: list(paths)}


def choose_split(path: str, split: str | None, splits: Collection[str] | None) -> str | None:
    """Return the split to read: ``split``, or ``train`` where it is not given; None of a source
    without ``splits`` (None). Raises PromptError when there is no such split."""
    if splits is None:
        if split is not None:
            raise PromptError(f"but {path} has no splits", "drop it", "prompts.split", split)
        return None
    if (name := split or TRAIN) not in splits:
        default = "" if split else f"which means {TRAIN!r}, "
        problem = f"{default}is not in {path}"
        fix = f"use one of {sorted(splits)}"
        raise PromptError(problem, fix, "prompts.split", split)
    return name
