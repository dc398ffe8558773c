"""What runs take on the disk, what is kept of them elsewhere, and what is removed: never a live one."""

from __future__ import annotations

import asyncio
import json
import shutil
import tarfile
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from api.cli.main import app
from orchestration.history.events_file import METRICS, read_metrics
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from orchestration.state.lock import lock_run
from tests.api.cli.test_former_steps import watched
from tests.orchestration.runs import MOCK, recipe


def asyncdock(*arguments: object, answer: str = "") -> Result:
    return CliRunner().invoke(app, ["runs", *map(str, arguments)], input=answer)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps with a checkpoint of the last one."""
    folder = tmp_path_factory.mktemp("keeping") / "run"
    of = recipe(MOCK, train__steps=4)
    asyncio.run(watched(Execution(RunFolder.create(of, folder))))
    return folder


@pytest.fixture
def run(ended: Path, tmp_path: Path) -> Path:
    """A copy, with an older checkpoint, and what a kill and `resume --from` leave among them."""
    copy = tmp_path / "runs" / "run"
    shutil.copytree(ended, copy)
    saved = copy / "checkpoints"
    for name in ("step-00000002", "aside-step-00000003", ".step-00000005.partial"):
        shutil.copytree(saved / "step-00000004", saved / name)
    return copy


def checkpoints(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_the_disk_of_runs_is_told_by_part_and_adds_up(run: Path) -> None:
    (run / "elsewhere").symlink_to("/usr")
    result = asyncdock("disk", run.parent, "--json")
    assert result.exit_code == 0, result.stderr
    ((name, parts),) = json.loads(result.stdout).items()
    assert name == str(run)
    saved = run / "checkpoints"
    assert parts["checkpoints"] == bytes_below(saved)
    assert parts["can go"] == bytes_below(saved) - bytes_below(saved / "step-00000004")
    (run / "elsewhere").unlink()
    assert parts.pop("total") == bytes_below(run) + len("/usr"), "a link is not followed"
    assert sum(parts.values()) - parts["can go"] == bytes_below(run) + len("/usr")
    shown = asyncdock("disk", run.parent)
    assert shown.stdout.splitlines()[0].split()[:3] == ["run", "total", "checkpoints"]
    assert "can go, by `asyncdock runs delete RUN --old-checkpoints`" in shown.stderr
    nowhere = asyncdock("disk", run / "checkpoints")
    assert (nowhere.exit_code, "no run is in" in nowhere.stderr) == (2, True)


@pytest.mark.parametrize("name", ["kept.tar.gz", "kept.tar", "kept"])
def test_an_archive_is_a_run_that_goes_on_once_it_is_unpacked(
    name: str, run: Path, tmp_path: Path
) -> None:
    target = tmp_path / name
    result = asyncdock("archive", run, "--to", target)
    assert result.exit_code == 0, result.stderr
    again = asyncdock("archive", run, "--to", target)
    assert (again.exit_code, "is there already" in again.stderr) == (1, True)
    unpacked = target
    if name != "kept":
        assert target.stat().st_mode & 0o777 == 0o600, "as the recipe in it"
        with tarfile.open(target) as file:
            file.extractall(tmp_path / "unpacked", filter="data")
        unpacked = tmp_path / "unpacked" / "run"
    assert checkpoints(unpacked) == ["step-00000004"]
    left_out = {"checkpoints", "index", "run.lock"}
    names = {path.name for path in run.iterdir()} - left_out
    assert {path.name for path in unpacked.iterdir()} == names | {"checkpoints"}
    asyncio.run(watched(Execution(RunFolder.resume(unpacked, ["train.steps=5"]))))
    events = read_metrics(unpacked / METRICS)
    assert [event.data["step"] for event in events if event.kind == "step"] == [*range(1, 6)]


def test_what_can_go_goes_and_the_run_stays(run: Path) -> None:
    result = asyncdock("delete", run, "--old-checkpoints", "--yes")
    assert result.exit_code == 0, result.stderr
    assert checkpoints(run) == ["step-00000004"]
    assert json.loads(asyncdock("disk", run, "--json").stdout)[str(run)]["can go"] == 0
    result = asyncdock("delete", run, "--yes")
    assert (result.exit_code, list(run.parent.iterdir())) == (0, [])


def test_nothing_is_removed_of_a_live_run_of_a_service_s_or_of_what_was_never_one(
    run: Path, tmp_path: Path
) -> None:
    lock = (run / "run.lock").stat().st_size
    before = bytes_below(run) - lock
    with lock_run(run):
        for arguments in (("delete", run, "--yes"), ("delete", run, "--old-checkpoints", "--yes")):
            result = asyncdock(*arguments)
            assert (result.exit_code, "is executed by" in result.stderr) == (1, True)
        result = asyncdock("archive", run, "--to", tmp_path / "x.tar")
        assert (result.exit_code, "is executed by" in result.stderr) == (1, True)
        assert not (tmp_path / "x.tar").exists()
    result = asyncdock("delete", run)
    assert (result.exit_code, "add --yes" in result.stderr) == (2, True)
    (tmp_path / "authorization").touch()
    result = asyncdock("delete", run, "--yes")
    assert (result.exit_code, "is a run of the service in" in result.stderr) == (2, True)
    (tmp_path / "authorization").unlink()
    (run / "run.lock").unlink()
    result = asyncdock("delete", run, "--yes")
    assert (result.exit_code, "was never executed" in result.stderr) == (2, True)
    assert bytes_below(run) == before


@pytest.mark.parametrize("name", ["kept.tar.zst", "kept.tar.br"])
def test_a_form_that_is_not_written_is_refused_with_those_that_are(
    name: str, run: Path, tmp_path: Path
) -> None:
    result = asyncdock("archive", run, "--to", tmp_path / name)
    assert result.exit_code == 1
    assert "whose name ends with .tar, .tar.gz, .tgz, .tar.xz" in result.stderr
    assert not (tmp_path / name).exists()
