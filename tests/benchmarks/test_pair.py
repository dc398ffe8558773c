"""`python -m benchmarks pair` runs a benchmark at another commit and here, in turns."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.compare.pair import commit_of, numbers, ratios, worktree
from tests.plain import ROOT

# It writes what the package `pipeline` says, which is installed from this clone too.
TOY = """
import argparse, json, os, pathlib, time
import pipeline

parser = argparse.ArgumentParser()
parser.add_argument("--json", type=pathlib.Path)
parser.add_argument("--wait", type=pathlib.Path)
parser.add_argument("--fails", action="store_true")
if __name__ == "__main__":
    options = parser.parse_args()
    if options.wait:
        options.wait.write_text(os.getcwd())
        time.sleep(600)
    if options.fails:
        raise SystemExit("no right")
    with open(os.environ["TURNS"], "a") as turns:
        turns.write(f"{pipeline.SECONDS} ")
    options.json.write_text(json.dumps({"arms": [{"seconds": pipeline.SECONDS, "rows": 7}]}))
"""
SILENT = TOY.replace('parser.add_argument("--json", type=pathlib.Path)', "")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone whose benchmark takes 2 s in its last commit, and 1 s in its files."""
    clone = tmp_path / "clone"
    for part in ("__init__.py", "__main__.py", "harness.py"):
        (clone / "benchmarks").mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "benchmarks" / part, clone / "benchmarks" / part)
    shutil.copytree(ROOT / "benchmarks" / "compare", clone / "benchmarks" / "compare")
    for name, text in {"toy": TOY, "silent": SILENT}.items():
        (clone / "benchmarks" / "room").mkdir(exist_ok=True)
        (clone / "benchmarks" / "room" / f"{name}.py").write_text(text)
    (clone / "pipeline").mkdir()
    (clone / "pipeline" / "__init__.py").write_text("SECONDS = 2\n")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(clone)]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "a"]):
        subprocess.run([*git, *arguments], check=True)
    (clone / "pipeline" / "__init__.py").write_text("SECONDS = 1\n")
    return clone


@pytest.fixture
def begin(clone: Path, tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Begin the command in the clone, with folders of temporary files in ``tmp_path / "tmp"``."""
    (tmp_path / "tmp").mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"TMPDIR": str(tmp_path / "tmp"), "TURNS": str(tmp_path / "turns")}

    def begin(*arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "benchmarks", "pair", *arguments],
            cwd=clone,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    return begin


def worktrees(clone: Path) -> list[str]:
    command = ["git", "-C", str(clone), "worktree", "list"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def test_each_side_runs_its_own_files_in_turns(
    begin: Callable[..., subprocess.Popen[str]], clone: Path, tmp_path: Path
) -> None:
    file = tmp_path / "pair.json"
    process = begin("HEAD", "room.toy", "--rounds", "3", "--json", str(file))
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert (tmp_path / "turns").read_text().split() == ["2", "1", "1", "2", "2", "1"]
    result = json.loads(file.read_text())
    seconds, rows = result["numbers"]
    assert (seconds["name"], seconds["there"], seconds["here"]) == ("arms[0].seconds", 2, 1)
    assert seconds["ratio"] == seconds["least"] == seconds["largest"] == 0.5
    assert rows["is_equal"]
    assert "arms[0].seconds" in output
    assert "1 more numbers are equal in all runs" in output
    assert result["measured"]["changed"]
    assert len(worktrees(clone)) == 1
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("nosuch", "room.toy"), "error: nosuch is no commit of clone/"),
        (("HEAD", "room.nosuch"), "error: there is no benchmark room.nosuch here"),
        (("HEAD", "room.silent"), "error: the benchmark room.silent has no --json here"),
        (("HEAD", "room.toy", "--there", "old"), "error: there is no benchmark old at HEAD"),
        (("HEAD", "room.toy", "--rounds", "0"), "error: --rounds 0: at least one"),
    ],
)
def test_what_cannot_be_compared_is_named_in_one_line(
    begin: Callable[..., subprocess.Popen[str]],
    clone: Path,
    arguments: tuple[str, ...],
    line: str,
) -> None:
    process = begin(*arguments)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (2, "")
    (only,) = errors.splitlines()
    assert only.startswith(line)
    assert len(worktrees(clone)) == 1


def test_a_benchmark_that_fails_ends_it_with_its_last_line(
    begin: Callable[..., subprocess.Popen[str]], clone: Path
) -> None:
    process = begin("HEAD", "room.toy", "--", "--fails")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors.splitlines()[-1] == "error: room.toy failed: exit code 1: no right"
    assert len(worktrees(clone)) == 1


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_one_leaves_no_worktree(
    begin: Callable[..., subprocess.Popen[str]],
    clone: Path,
    tmp_path: Path,
    kind: signal.Signals,
) -> None:
    waiting = tmp_path / "waiting"
    process = begin("HEAD", "room.toy", "--", "--wait", str(waiting))
    while not waiting.exists() or not waiting.read_text():
        assert process.poll() is None, process.communicate()
    tree = Path(waiting.read_text())
    assert tree.exists()
    assert len(worktrees(clone)) == 2
    os.killpg(process.pid, kind)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert not tree.exists()
    assert len(worktrees(clone)) == 1
    assert list((tmp_path / "tmp").iterdir()) == []


def test_numbers_are_named_by_their_keys() -> None:
    result = {"seconds": 2, "arms": [{"rate": 0.5, "name": "a"}], "met": True, "none": None}
    assert dict(numbers(result)) == {"seconds": 2.0, "arms[0].rate": 0.5}
    assert dict(numbers([1, [2]])) == {"[0]": 1.0, "[1][0]": 2.0}


def test_ratios_are_of_rounds_and_of_numbers_that_all_have() -> None:
    there = [{"s": 2.0, "old": 1}, {"s": 4.0}, {"s": 3.0}]
    here = [{"s": 1.0}, {"s": 4.0}, {"s": 6.0, "new": 1}]
    (one,) = ratios(there, here)
    assert (one.there, one.here) == (3.0, 4.0)
    assert (one.ratio, one.least, one.largest) == (1.0, 0.5, 2.0)
    assert not one.is_equal
    (zero,) = ratios([{"s": 0}], [{"s": 0}])
    assert (zero.ratio, zero.is_equal) == (1.0, True)


def test_an_error_inside_removes_the_worktree(clone: Path) -> None:
    def fail() -> None:
        with worktree(commit_of("HEAD", clone), clone) as tree:
            assert (tree / "pipeline").is_dir()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert len(worktrees(clone)) == 1
