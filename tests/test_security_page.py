"""SECURITY.md and the hostile suite name the same boundaries, and each test of the suite is
there."""

from __future__ import annotations

import ast
import re

import pytest

from tests.attacks import BOUNDARIES, boundaries_of
from tests.sources import ROOT


def test_each_boundary_of_the_page_is_attacked_and_no_other() -> None:
    page = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| \*\*(.+?)\*\*", page, re.MULTILINE)
    assert [name.replace("`", "") for name in named] == list(BOUNDARIES)


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_each_attack_is_a_test(boundary: str) -> None:
    assert len(set(BOUNDARIES[boundary])) == len(BOUNDARIES[boundary])
    for name in BOUNDARIES[boundary]:
        file, _, test = name.partition("::")
        tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
        functions = {
            node.name
            for node in tree.body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        assert test in functions or (
            not test and any(function.startswith("test_") for function in functions)
        ), name
        assert boundary in boundaries_of(f"tests/{file}::{test}[with a parameter]")
