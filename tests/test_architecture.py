"""docs/architecture.md names files and folders that exist, and each walk names a file once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PACKAGES = ("pipeline", "stages", "orchestration", "api")
WALKS = re.findall(r"^\*\*(.+)\*\*\n\n((?:\d+\. .*\n(?: {3}.*\n)*)+)", PAGE, re.MULTILINE)


def test_every_file_of_the_page_exists() -> None:
    files = re.findall(r"`((?:pipeline|stages|orchestration|api|tests|benchmarks)/[\w./]*)`", PAGE)
    assert len(files) > 40
    assert [file for file in files if not (ROOT / file).exists()] == []


def test_the_picture_of_the_folders_is_true() -> None:
    """Each folder of the picture exists, and each folder with Python files is in it (a deeper one
    by its parent)."""
    picture = PAGE.partition("```text\n")[2].partition("```")[0]
    drawn = set[str]()
    stack = list[str]()
    for line in picture.strip().splitlines():
        match = re.match(r"^((?:│   |    )*(?:├── |└── )?)((?:\w+/ )*\w+/)", line)
        assert match, line
        depth = len(match[1]) // 4
        names = match[2].split()
        stack[depth:] = [names[-1].rstrip("/")]
        parent = "/".join(stack[:depth])
        drawn |= {f"{parent}/{name}".strip("/").rstrip("/") for name in names}
    assert [folder for folder in drawn if not (ROOT / folder).is_dir()] == []
    two_levels = {
        "/".join(path.relative_to(ROOT).parts[:2])
        for package in PACKAGES
        for path in (ROOT / package).rglob("*/__init__.py")
        if len(path.relative_to(ROOT).parts) > 2
    }
    assert two_levels - drawn == set()


@pytest.mark.parametrize(("title", "steps"), WALKS, ids=[title for title, _ in WALKS])
def test_a_walk_names_each_file_once(title: str, steps: str) -> None:
    files = re.findall(r"^\d+\. `([^`]+)`", steps, re.MULTILINE)
    assert len(files) == len(re.findall(r"^\d+\. ", steps, re.MULTILINE)) >= 6
    assert len(set(files)) == len(files)


def test_there_are_three_walks() -> None:
    assert len(WALKS) == 3
