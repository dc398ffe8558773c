"""What every benchmark shares: its options, and results that say how they were measured."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import harness
from benchmarks.harness import ResultFile
from tests.plain import ROOT

DOC = "How fast.\n\n    python -m benchmarks.flow.wire\n"


def head(path: Path) -> dict[str, object]:
    return dict(json.loads(path.read_text())["measured"])


def test_a_result_keeps_its_keys_beside_how_it_was_measured(tmp_path: Path) -> None:
    file = ResultFile(tmp_path / "result.json")
    file.write({"seconds": 2.0})
    assert json.loads(file.path.read_text())["seconds"] == 2.0
    measured = head(file.path)
    assert {"command", "date", "processor", "cores", "python"} <= set(measured)
    assert {"torch", "load_at_start", "load_at_end"} <= set(measured)
    assert measured["python"] == ".".join(map(str, sys.version_info[:3]))


@pytest.mark.parametrize("result", [{"seconds": 2.0}, [1, 2], [], {}])
def test_what_is_written_is_read(tmp_path: Path, result: object) -> None:
    file = ResultFile(tmp_path / "result.json")
    assert file.read() is None
    file.write(result)  # type: ignore[arg-type]
    assert file.read() == result


@pytest.mark.parametrize("result", [{"seconds": 2.0}, [1, 2], {"rows": [1]}])
def test_a_file_without_a_head_is_read(tmp_path: Path, result: object) -> None:
    file = ResultFile(tmp_path / "old.json")
    file.path.write_text(json.dumps(result))
    assert file.read() == result


def test_a_result_has_no_head_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'measured'"):
        ResultFile(tmp_path / "result.json").write({"measured": 1})


def test_a_head_names_the_commit_and_whether_the_tree_differs(tmp_path: Path) -> None:
    assert harness.commit(tmp_path) == {}, "no clone"
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    (tmp_path / "file").write_text("1")
    for arguments in (["init", "-q"], ["add", "file"], ["commit", "-qm", "a"]):
        subprocess.run([*git, *arguments], check=True)
    done = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    assert harness.commit(tmp_path) == {"commit": done.stdout.strip(), "changed": False}
    (tmp_path / "file").write_text("2")
    assert harness.commit(tmp_path)["changed"]
    (tmp_path / "inside").mkdir()
    assert harness.commit(tmp_path / "inside") == {}, "a folder of another project's clone"


def test_the_machine_that_is_not_quiet_is_named_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(harness.WARNED, raising=False)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.4 * harness.cores(), 0.0, 0.0))
    harness.parser(DOC).parse_args([])
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(os, "getloadavg", lambda: (40.0, 0.0, 0.0))
    harness.parser(DOC).parse_args([])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: this machine is not quiet: load 40.0 on ")
    monkeypatch.setenv(harness.WARNED, "1")  # in a process that a benchmark has started
    harness.parser(DOC).parse_args([])
    assert capsys.readouterr().err == ""


def test_the_help_has_the_whole_docstring(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        harness.parser(DOC).parse_args(["--help"])
    shown = capsys.readouterr().out
    assert (
        shown.index("How fast.") < shown.index("write the result") < shown.index("benchmarks.flow")
    )


def test_every_program_that_writes_json_uses_the_harness() -> None:
    for path in sorted((ROOT / "benchmarks").glob("*/*.py")):
        text = path.read_text(encoding="utf-8")
        if '"--json"' in text:
            assert "harness" in text or path.stem in ("first_run", "first_step"), path


def test_the_benchmark_of_mutations_imports_nothing_that_it_changes(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "benchmarks", tmp_path / "benchmarks")
    code = "import benchmarks.robustness.mutations, sys; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    packages = {name.partition(".")[0] for name in done.stdout.split()}
    assert not packages & {"pipeline", "stages", "orchestration", "api", "torch"}
