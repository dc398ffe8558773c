"""``asyncdock compare``, and what people write to runs, as users call them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from api.cli.common.exit_codes import BAD_INPUT
from api.cli.results import compare as command
from orchestration.comparison.compare import compare
from orchestration.comparison.results import read_run
from orchestration.comparison.view import as_tables
from tests.api.cli.service.test_view import asyncdock
from tests.orchestration.compared import compared_runs


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return compared_runs(tmp_path_factory.mktemp("compared") / "runs")


def test_a_folder_of_runs_counts_as_all_of_them(folders: list[Path]) -> None:
    tables = json.loads(asyncdock("compare", folders[0].parent, "--json"))
    assert tables == as_tables(compare([read_run(folder) for folder in folders]))
    assert [run["id"] for run in tables["runs"]] == ["a", "b", "c"]


def test_runs_are_a_table_with_plot_and_page(folders: list[Path], tmp_path: Path) -> None:
    """The page has all curves, and asks nobody for anything."""
    files = ("--plot", tmp_path / "runs.png", "--html", tmp_path / "runs.html")
    shown = asyncdock("compare", *folders, "--metric", "loss", "--by", "tokens", *files)
    title, head, *rows = shown.splitlines()
    assert re.split(r"  +", head.strip()) == [
        "train.learning_rate",
        "runs",
        "end",
        "best",
        "steps",
        "hours",
        "tokens",
    ]
    assert title == "loss"
    results, names = rows[:2], rows[3:]
    assert [row.split()[:3] for row in results] == [["1", "1e-05", "2"], ["2", "0.0001", "1"]]
    ids = [folder.name for folder in folders]
    assert names == [f"1  {ids[0]}, {ids[1]}", f"2  {ids[2]}"]
    assert (tmp_path / "runs.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "runs.html").read_text()
    data = json.loads(page.partition('id="comparison">')[2].partition("</script>")[0])
    assert {key.split()[1] for key in data["curves"]} == {"step", "tokens", "hours"}
    assert len(data["curves"]["loss tokens settings"]) == 2
    assert len(data["curves"]["loss hours runs"]) == 3
    markup = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert "default-src 'none'" in markup
    assert not re.search(r"(src|href)=|url\((?!\"(?:data:|#))|@import", markup)


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_table_fits_the_terminal(
    folders: list[Path],
    width: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Keys that have no room beside the results stand below them."""
    monkeypatch.setattr(command, "safe_console", lambda: Console(width=width, markup=False))
    command.print_comparison(compare([read_run(folder) for folder in folders]))
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= width
    for text in ("train.learning_rate", "1e-05", "0.0001", "reward_mean"):
        assert text in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("--metric", "rewad_mean"),
            "metric = 'rewad_mean': no run has it; did you mean 'reward_mean'",
        ),
        (("--by", "epochs"), "--by: 'epochs' is no axis; use step, tokens or hours"),
        (("--plot", "runs.gif"), "--plot: runs.gif has no form that is drawn"),
        (("--html", "/nowhere/runs.html"), "/nowhere/runs.html cannot be written: No such file"),
    ],
)
def test_what_cannot_be_compared_is_said(
    folders: list[Path], words: tuple[str, ...], said: str
) -> None:
    assert re.search(said, asyncdock("compare", *folders, *words, code=BAD_INPUT))


def test_a_folder_without_runs_is_refused(tmp_path: Path) -> None:
    said = asyncdock("compare", tmp_path, code=BAD_INPUT)
    assert f"no run is in {tmp_path}" in said


def test_tags_and_notes_are_in_the_folder(folders: list[Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(folders[0], run)
    assert asyncdock("runs", "tag", run, "+good", "slow", "-bad") == "good slow\n"
    assert asyncdock("runs", "tag", run, "-slow") == "good\n"
    asyncdock("runs", "note", run, "the one to keep")
    assert "the one to keep" in asyncdock("runs", "show", run)
    (shown,) = json.loads(asyncdock("compare", run, "--json"))["runs"]
    assert (shown["tags"], shown["notes"]) == (["good"], "the one to keep")
    assert "'a,b' is no tag" in asyncdock("runs", "tag", run, "a,b", code=BAD_INPUT)
