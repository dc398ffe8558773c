"""The examples in docstrings are true: those of each module that has some."""

from __future__ import annotations

import doctest
import importlib
import re

import pytest

from tests.sources import PACKAGES, ROOT, sources

MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in sources(*PACKAGES, "benchmarks", "tests")
    if re.search(r"^\s*>>> ", path.read_text(encoding="utf-8"), re.MULTILINE)
]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_are_true(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"a library is not installed: {error}")
    examples = [
        example for test in doctest.DocTestFinder().find(module) for example in test.examples
    ]
    assert examples, "they stand in no docstring"
    assert doctest.testmod(module).failed == 0
