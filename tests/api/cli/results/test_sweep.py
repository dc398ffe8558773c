"""`asyncdock sweep` on this machine: its lines, its table, its folder, its end by Ctrl-C."""

from __future__ import annotations

import json
import signal
import statistics
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from api.cli import main as cli
from tests.api.cli.results.test_sweep_kills import events, folders, start, steps_made, until

SETS = ("--set", "train.steps=10", "--set", "rollout.mock.time_scale=0.02")


def document(out: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((out / "sweep.json").read_bytes())
    return content


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a sweep of two staleness bounds and two seeds, and what its command printed."""
    out = tmp_path_factory.mktemp("swept") / "sweep"
    over = ["--over", "pipeline.staleness=0,1", "--over", "seed=0..1"]
    sweep = start(out, "mock", *over, *SETS, "--out", str(out), "--at-once", "2")
    output, _ = sweep.communicate(timeout=300)
    assert sweep.returncode == 0, output
    return out, output


def test_each_run_has_its_folder_and_the_table_has_their_means(swept: tuple[Path, str]) -> None:
    out, output = swept
    assert [run.name for run in folders(out)] == [
        "000-staleness-0-seed-0",
        "001-staleness-0-seed-1",
        "002-staleness-1-seed-0",
        "003-staleness-1-seed-1",
    ]
    for run in folders(out):
        assert f"{run.name}  running\n" in output
        value = events(run, "step")[-1]["reward_mean"]  # a tenth of ten steps
        assert f"{run.name}  {value:.4g}  finished\n" in output
    for bound in (0, 1):
        ends = []
        for run in folders(out):
            if f"staleness-{bound}" in run.name:
                ends.append(events(run, "step")[-1]["reward_mean"])  # a tenth of ten steps
        assert f"{statistics.fmean(ends):.4g} ± " in output
    assert document(out)["request"]["over"] == ["pipeline.staleness=0,1", "seed=0..1"]


def test_a_sweep_that_is_over_runs_nothing_again(swept: tuple[Path, str]) -> None:
    out, _ = swept
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    sweep = start(out, str(out), "--json")
    output, _ = sweep.communicate(timeout=300)
    assert sweep.returncode == 0
    assert [run["state"] for run in json.loads(output)["runs"]] == ["finished"] * 4
    changed = {path.name for path, time in before.items() if path.stat().st_mtime_ns != time}
    assert changed <= {"sweep.lock", "sweep.json"}


def test_ctrl_c_stops_the_runs_with_checkpoints_and_says_how_to_go_on(tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    arguments = ["mock", "--over", "seed=0..2", *SETS, "--set", "train.steps=60", "--out", str(out)]
    sweep = start(out, *arguments, "--at-once", "2")
    until(lambda: len(folders(out)) == 2 and steps_made(out) > 4, sweep)
    sweep.send_signal(signal.SIGINT)
    output, _ = sweep.communicate(timeout=300)
    assert sweep.returncode == 130, output
    assert f"Go on with: asyncdock sweep {out}" in output
    assert [run["state"] for run in document(out)["runs"]] == ["stopped", "stopped", "waiting"]
    for run in folders(out):
        assert events(run, "step")[-1]["version"] == events(run, "checkpoint")[-1]["version"]
    sweep = start(out, *arguments)
    output, _ = sweep.communicate(timeout=300)
    assert sweep.returncode == 0, output
    for run in folders(out):
        assert [step["version"] for step in events(run, "step")] == [*range(1, 61)]


def test_a_run_that_is_worse_stops_with_a_checkpoint_and_is_pruned(tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    sets = ["--set", "train.steps=2000", "--stop-below", "0.9@3", *SETS[2:]]
    sweep = start(out, "mock", "--over", "seed=0,1", *sets, "--out", str(out))
    output, _ = sweep.communicate(timeout=300)
    assert sweep.returncode == 0, output
    [first, second] = document(out)["runs"]
    assert first["state"] == second["state"] == "pruned"
    assert "is below 0.9 at step 3" in first["reason"]
    assert events(out / first["name"], "checkpoint")


def test_a_second_sweep_in_the_folder_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    arguments = ["mock", "--over", "seed=0..1", *SETS, "--out", str(out)]
    first = start(out, *arguments)
    until(lambda: (out / "sweep.json").exists(), first)
    second = start(out, str(out))
    output, _ = second.communicate(timeout=300)
    assert second.returncode == 2
    assert f"executes the sweep in {out}; stop it first" in output
    output, _ = first.communicate(timeout=300)
    assert first.returncode == 0, output


def test_a_run_that_fails_is_noted_with_its_reason_and_the_others_go_on(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(
        "def fails(completions, **_):\n    raise ValueError('no judge')\n\n"
        "def counts(completions, **_):\n    return [float(len(text)) for text in completions]\n"
    )
    out = tmp_path / "sweep"
    over = ["--over", "reward.functions=[{name='rewards:fails'}],[{name='rewards:counts'}]"]
    sweep = start(out, "mock", *over, *SETS, "--out", str(out))
    output, _ = sweep.communicate(timeout=300)
    assert sweep.returncode == 1, output
    [failed, finished] = document(out)["runs"]
    assert (failed["state"], finished["state"]) == ("failed", "finished")
    assert "no judge" in failed["reason"]


@pytest.mark.parametrize("place", [[], ["--out", "/proc/none"], ["--out", "sweep"]])
def test_a_wrong_setting_is_told_before_the_folder_is_judged(
    place: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    over = ["--over", "train.learning_rat=1,2"]
    refused = CliRunner().invoke(cli.app, ["sweep", "mock", *over, *place])
    assert refused.exit_code == 2
    assert "did you mean 'learning_rate'?" in refused.output
    assert "--out" not in refused.output
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_without_a_folder_is_refused() -> None:
    refused = CliRunner().invoke(cli.app, ["sweep", "mock", "--over", "seed=0,1"])
    assert refused.exit_code == 2
    assert "--out: is missing" in refused.output
