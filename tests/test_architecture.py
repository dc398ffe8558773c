"""docs/architecture.md names files and folders that exist, and each walk names files with functions
of them that are called."""

from __future__ import annotations

import ast
import functools
import re

import pytest

from tests.sources import PACKAGES, ROOT, nodes_of, tree_of

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
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
        for package in (*PACKAGES, "benchmarks")
        for path in (ROOT / package).rglob("*/__init__.py")
        if len(path.relative_to(ROOT).parts) > 2
    }
    assert two_levels - drawn == set()


@pytest.mark.parametrize(("title", "steps"), WALKS, ids=[title for title, _ in WALKS])
def test_a_walk_names_each_file_once_with_a_function_of_it(title: str, steps: str) -> None:
    walk = re.findall(r"^\d+\. `([^`]+)` `([\w.]+)`: ", steps, re.MULTILINE)
    assert len(walk) == len(re.findall(r"^\d+\. ", steps, re.MULTILINE)) >= 6
    assert len({file for file, _ in walk}) == len(walk)
    assert [step for step in walk if not defines(*step)] == []
    used = used_names()
    assert [name for _, name in walk if name.rpartition(".")[2] not in used] == []


def defines(file: str, name: str) -> bool:
    """Return whether ``file`` has the function, class or method ``name``."""
    if file.endswith(".lua"):
        source = (ROOT / file).read_text(encoding="utf-8")
        return re.search(rf"function {name}\(", source) is not None
    body = tree_of(ROOT / file).body
    for part in name.split("."):
        named = [
            node
            for node in body
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and node.name == part
        ]
        if not named:
            return False
        body = named[0].body
    return True


@functools.cache
def used_names() -> set[str]:
    """The names that the packages call, pass on, or register by a decorator."""
    names = set[str]()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in nodes_of(path):
                if isinstance(node, ast.Name):
                    names.add(node.id)
                elif isinstance(node, ast.Attribute):
                    names.add(node.attr)
                elif isinstance(node, ast.AsyncFunctionDef | ast.FunctionDef):
                    registered = any(isinstance(each, ast.Call) for each in node.decorator_list)
                    names.update([node.name] if registered else [])
        for path in (ROOT / package).rglob("*.lua"):
            names.update(re.findall(r"(?<!function )\b(\w+)\(", path.read_text(encoding="utf-8")))
    return names


def test_there_are_four_walks() -> None:
    assert len(WALKS) == 4
