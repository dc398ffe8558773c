"""``asyncdock convert``: what it writes, `asyncdock check` accepts."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from api.cli import main as cli
from tests.orchestration.recipe.test_conversion import TRL, VERL

runner = CliRunner()


def test_a_recipe_is_written_that_check_accepts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "What is 1 + 1?", "answer": "2"}\n' * 8)
    (tmp_path / "my_rewards.py").write_text(
        "def exact(completions, **columns):\n    return [1.0 for _ in completions]\n\nbrevity = exact\n"
    )
    (tmp_path / "grpo.yaml").write_text(TRL.format(model="tiny", rows="rows.jsonl"))
    done = runner.invoke(cli.app, ["convert", "grpo.yaml", "--out", "mine.toml"])
    assert done.exit_code == 0, done.output
    assert "Not known to this converter: 1 setting\n  some_new_argument\n" in done.stderr
    checked = runner.invoke(cli.app, ["check", "mine.toml"])
    assert checked.exit_code == 0, checked.output


def test_whose_it_is_follows_from_its_keys(tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text(VERL.format(model="MODEL", rows="train.parquet"))
    done = runner.invoke(cli.app, ["convert", str(file)])
    assert done.exit_code == 0, done.output
    assert "groups_per_step = 64" in done.stdout


def test_a_file_that_is_none_is_refused() -> None:
    done = runner.invoke(cli.app, ["convert", "there-is-none.yaml"])
    assert done.exit_code == 2
    assert "FILE" in done.stderr


def test_a_script_of_something_else_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "build.sh"
    file.write_text("make --jobs 4 all && tar --create --file a.tar .\n")
    done = runner.invoke(cli.app, ["convert", str(file)])
    assert done.exit_code == 2
    assert f"FILE: {file} has no setting of TRL's or verl's trainer" in done.stderr
