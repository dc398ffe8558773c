"""A run of tests ends at the time that is given, with fixtures torn down, and says what it left
out."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import budget
from tests.sources import ROOT

CONFTEST = """
import pytest
from tests import budget

def pytest_configure(config):
    config.pluginmanager.register(budget.Budget({until}, grace=1.0, must_run=config.getoption("lf")))

def pytest_terminal_summary(terminalreporter):
    for line in budget.summary(terminalreporter.stats):
        terminalreporter.line(line)
"""
TESTS = """
import time
from pathlib import Path
import pytest

@pytest.fixture
def resource():
    yield
    Path(__file__).with_name("torn-down").touch()

def test_quick():
    assert {result}

def test_that_goes_on(resource):
    time.sleep(100)

def test_later(resource):
    pass
"""


def run(folder: Path, until: float, result: bool = True, *options: str) -> tuple[int, str]:
    (folder / "conftest.py").write_text(CONFTEST.format(until=until))
    (folder / "test_it.py").write_text(TESTS.format(result=result))
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "-q", "-n0"]
    done = subprocess.run(
        [*command, "--rootdir", str(folder), *options, str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout + done.stderr


def test_what_goes_on_is_cut_and_torn_down_and_what_is_left_out_is_named(tmp_path: Path) -> None:
    for seconds in (4, 20, 60):  # a busy machine takes long to begin
        began = time.time()
        code, output = run(tmp_path, began + seconds)
        if (tmp_path / "torn-down").exists():
            break
    assert code == 0, output
    assert "2 tests of 1 files, not run for want of time:" in output
    assert "   2 test_it.py" in output
    assert time.time() - began < 100, "the test that goes on was not waited for"


def test_a_failure_stays_one_and_a_failed_test_that_cannot_run_again_too(tmp_path: Path) -> None:
    later = time.time() + 1000
    code, output = run(tmp_path, later, False, "-k", "quick")
    assert code == 1, output
    assert "not run" not in output
    code, output = run(tmp_path, 0.0, True, "--last-failed", "-k", "quick")
    assert code == 1, output
    assert "not run for want of time" in output


class Item:
    def __init__(self, nodeid: str) -> None:
        self.nodeid = nodeid


def test_files_nearest_to_the_last_commits_come_first_and_the_others_take_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def order(commit: str) -> list[str]:
        monkeypatch.setattr(budget, "git", lambda *arguments: commit)
        monkeypatch.setattr(budget, "changed_files", lambda: ["tests/test_near.py"])
        items = [Item(f"tests/test_{name}.py::test_it[{n}]") for name in names for n in (2, 1)]
        budget.Budget(0.0).pytest_collection_modifyitems(items)  # type: ignore[arg-type]
        return [item.nodeid for item in items]

    names = ["architecture", "errors", "house", "near", "trust"]
    first, second = order("a"), order("b")
    assert (
        first[:2]
        == second[:2]
        == ["tests/test_near.py::test_it[2]", "tests/test_near.py::test_it[1]"]
    )
    assert sorted(first) == sorted(second)
    assert first != second
