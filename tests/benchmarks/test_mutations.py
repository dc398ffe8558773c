"""The mutations of the core: each is a change of one place, and of code alone."""

from __future__ import annotations

from benchmarks.robustness.mutations import (
    AREAS,
    ROOT,
    TESTS,
    Result,
    changed,
    drawn,
    of_lua,
    of_python,
    shown,
)

PYTHON = '''
def most(values: list[int], limit: int = 3) -> int:
    """At most 3 < 4."""
    if not values and limit > 0:
        log("a + b")
        return -1
    return min(limit, len(values) + 1)
'''
LUA = """
-- a < b
local function room(a, b)
  if a.used == 0 then return b - 1 end
  wake(a, 'x + y')
  return max(a.size, b)
end
"""


def test_python_is_changed_in_one_place_outside_of_texts_and_signatures() -> None:
    made = {changed(PYTHON, mutation) for mutation in of_python(PYTHON)}
    assert PYTHON not in made
    for before, after in (
        ("not values and limit", "values and limit"),
        ("not values and limit", "not values or limit"),
        ("limit > 0", "limit >= 0"),
        ("if not values and limit > 0", "if False"),
        ('log("a + b")', "pass"),
        ("min(limit", "max(limit"),
        ("len(values) + 1", "len(values) - 1"),
        ("len(values) + 1", "len(values) + 2"),
    ):
        assert PYTHON.replace(before, after) in made
    assert all("At most 3 < 4." in text and "limit: int = 3" in text for text in made)


def test_lua_is_changed_in_one_place_outside_of_texts_and_comments() -> None:
    made = {changed(LUA, mutation) for mutation in of_lua(LUA)}
    assert LUA not in made
    for before, after in (
        ("a.used == 0", "a.used ~= 0"),
        ("a.used == 0", "a.used == 1"),
        ("if a.used == 0 then", "if true then"),
        ("b - 1", "b + 1"),
        ("  wake(a, 'x + y')", "  "),
        ("max(a.size", "min(a.size"),
    ):
        assert LUA.replace(before, after) in made
    assert all("-- a < b" in text for text in made)
    assert not any("'x - y'" in text for text in made)


def test_samples_of_all_modules_repeat() -> None:
    for module, tests in TESTS.items():
        text = (ROOT / module).read_text()
        assert drawn(module, text, 5, 0) == drawn(module, text, 5, 0)
        for name in tests:
            assert (ROOT / "tests" / name).is_file(), name


def test_each_module_is_of_one_area() -> None:
    for module in TESTS:
        assert sum(module.startswith(parts) for parts in AREAS.values()) == 1, module


def test_the_table_counts_by_module_and_lists_survivors() -> None:
    results = [
        Result("a.py", 3, "x < y", "x <= y", True, 1.0),
        Result("a.py", 9, "x", "pass", False, 1.0),
    ]
    table = shown(results)
    assert [line.split() for line in table.splitlines()[1:3]] == [
        ["a.py", "2", "1"],
        ["all", "2", "1"],
    ]
    results.append(Result("stages/prompts/gate.py", 3, "x < y", "x <= y", False, 1.0))
    counts = [line.split() for line in shown(results).splitlines()[3:5]]
    assert counts == [["gate", "1", "0"], ["all", "3", "1"]]
    assert table.endswith("a.py:3\n  - x < y\n  + x <= y")
