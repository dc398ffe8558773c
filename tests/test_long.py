"""The list of long tests: its names are tests."""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from io import StringIO
from pathlib import Path

import pytest

from tests import long
from tests.sources import ROOT


def functions_of(file: str) -> set[str]:
    """Names of the functions of ``file``, and CLASS::NAME of those of its classes."""
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    within = [
        ("", tree),
        *((f"{node.name}::", node) for node in tree.body if isinstance(node, ast.ClassDef)),
    ]
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {
        f"{prefix}{node.name}"
        for prefix, place in within
        for node in place.body
        if isinstance(node, kinds)
    }


def test_each_name_is_a_test() -> None:
    by_file = defaultdict(set)
    for name in long.names():
        file, _, test = long.function_of(name).partition("::")
        by_file[file].add(test)
    for file, listed in by_file.items():
        assert listed <= functions_of(file), f"{file}: take out what is no test any more"


def test_the_longest_are_chosen_from_what_pytest_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = """
    9.00s call     tests/a.py::test_long[1-x y]
    0.50s setup    tests/a.py::test_long[2-x y]
    1.00s call     tests/a.py::test_short
    30.00s call    tests/b.py::test_alone
    4.00s call     tests/d.py::test_alone
    0.60s call     tests/e.py::test_of_both[redis]
    0.60s call     tests/e.py::test_of_both[valkey]
    0.50s teardown tests/c.py::test_one
    0.40s call     tests/c.py::test_other
    == 5 passed ==
    """
    monkeypatch.setattr(long, "LIST", tmp_path / "long.txt")
    monkeypatch.setattr(sys, "stdin", StringIO(said))
    long.main(sys.stdin)
    assert long.names() == [
        "a.py::test_long[1-x y]",
        "b.py::test_alone",
        "e.py::test_of_both[redis]",
    ]
    long.main(StringIO(said), factor=0.5)
    assert long.names() == ["a.py::test_long[1-x y]", "b.py::test_alone"]


def test_a_name_is_all_of_a_function_or_one_of_its_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Item:
        def __init__(self, nodeid: str) -> None:
            self.nodeid = nodeid
            self.marks = list[str]()

        def add_marker(self, name: str) -> None:
            self.marks.append(name)

    ids = ("a.py::x[1]", "a.py::x[2 3]", "a.py::y[1]", "a.py::y[2]", "a.py::z")
    monkeypatch.setattr(long, "names", lambda: ["a.py::x[2 3]", "a.py::y"])
    items = [Item(f"tests/{name}") for name in ids]
    long.mark(items)  # type: ignore[arg-type]
    assert [item.nodeid for item in items if item.marks] == [
        "tests/a.py::x[2 3]",
        "tests/a.py::y[1]",
        "tests/a.py::y[2]",
    ]
