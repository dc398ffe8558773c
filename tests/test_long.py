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
        file, _, test = name.partition("::")
        by_file[file].add(test)
    for file, listed in by_file.items():
        assert listed <= functions_of(file), f"{file}: take out what is no test any more"


def test_the_longest_are_chosen_from_what_pytest_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = """
    9.00s call     tests/a.py::test_long[1-x]
    0.50s setup    tests/a.py::test_long[2-x]
    1.00s call     tests/a.py::test_short
    30.00s call    tests/b.py::test_alone
    0.02s call     tests/d.py::test_alone
    0.50s teardown tests/c.py::test_one
    0.40s call     tests/c.py::test_other
    == 5 passed ==
    """
    monkeypatch.setattr(long, "LIST", tmp_path / "long.txt")
    monkeypatch.setattr(sys, "stdin", StringIO(said))
    long.main(sys.stdin)
    assert long.names() == ["b.py::test_alone"], "the others take less than 30 %"
