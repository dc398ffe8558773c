"""`make near` finds the tests that are nearest to a file."""

from __future__ import annotations

from tests.near import MOST_FILES, ROOT, nearest


def test_the_test_of_the_same_path_is_the_nearest() -> None:
    for module in ("pipeline/controller", "stages/gate", "orchestration/recipe/schema"):
        folder, _, name = module.rpartition("/")
        assert nearest([f"{module}.py"])[0] == f"tests/{folder}/test_{name}.py"


def test_a_changed_test_file_is_itself_and_others_are_those_that_import_the_module() -> None:
    own = "tests/test_near.py"
    users = nearest(["orchestration/run/execution.py"])
    assert nearest([own]) == [own]
    assert 1 < len(users) <= MOST_FILES
    assert all("orchestration.run.execution" in (ROOT / user).read_text() for user in users)


def test_a_file_that_no_test_imports_has_none() -> None:
    assert nearest(["README.md", "pipeline/index/lua/claims.lua"]) == []
