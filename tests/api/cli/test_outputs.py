"""Every command with nobody who reads its output: a closed pipe, a closed descriptor, a terminal
that is gone."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
import typer.main
from rich.console import Console

from api.cli.main import app
from api.cli.service import runs
from orchestration.checkpoints import checkpoint
from orchestration.history.events_file import METRICS, read_metrics
from pipeline.data.events import Event

ROOT = Path(__file__).resolve().parents[3]
CLOSED = "import os, sys; os.close(1); os.execv(sys.argv[1], sys.argv[1:])"
KINDS = ("pipe", "closed", "terminal", "full")


@contextlib.contextmanager
def output(kind: str) -> Iterator[int]:
    """A descriptor of which nobody reads what is written to it."""
    if kind == "full":
        file = os.open("/dev/full", os.O_WRONLY)
    elif kind == "terminal":
        other, file = os.openpty()
        os.close(other)
    else:
        other, file = os.pipe()
        os.close(other)
    yield file
    os.close(file)


def asyncdock(*arguments: str, kind: str, folder: Path) -> tuple[int, str]:
    """The exit code of a command, and what it says on standard error."""
    command = [sys.executable, "-P", "-m", "api.cli.main", *arguments]
    if kind == "closed":
        command = [sys.executable, "-c", CLOSED, *command]
    variables = {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "XDG_STATE_HOME": str(folder / "state"),
    }
    with output(kind) as file:
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, **variables},
            stdout=file,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
            start_new_session=True,
        )
    return done.returncode, done.stderr


def commands(group: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, (*path, name))


@pytest.mark.parametrize("command", [*commands(typer.main.get_command(app))], ids=" ".join)
def test_every_command_ends_as_if_it_were_read(command: tuple[str, ...], tmp_path: Path) -> None:
    code, errors = asyncdock(*command, "--help", kind="pipe", folder=tmp_path)
    assert (code, errors) == (0, "")


@pytest.mark.parametrize(
    ("command", "expected", "kind"),
    [
        *[
            (command, 0, kind)
            for command in ("recipes", "recipes --keys --json", "--version")
            for kind in KINDS
        ],
        ("check mock", 0, "pipe"),
        ("check mock --json", 0, "closed"),
        ("check mock --set train.steps=0", 2, "terminal"),
        ("plan reshard tiny", 0, "full"),
        ("runs list --server http://127.0.0.1:9", 3, "pipe"),
        ("dock status .", 2, "closed"),
        ("resume .", 2, "full"),
    ],
)
def test_results_that_nobody_reads_are_no_error_and_those_that_a_full_disk_refuses_are(
    command: str, expected: int, kind: str, tmp_path: Path
) -> None:
    code, errors = asyncdock(*command.split(), kind=kind, folder=tmp_path)
    lost = kind == "full" and expected == 0
    assert code == (1 if lost else expected), errors
    assert ("standard output cannot be written ([Errno 28]" in errors) == lost
    assert "Traceback" not in errors
    assert "Broken pipe" not in errors
    assert not (tmp_path / "state" / "asyncdock" / "errors.log").exists()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("view", ["--plain", "--json"])
def test_a_run_that_nobody_watches_goes_on_to_its_end(kind: str, view: str, tmp_path: Path) -> None:
    code, errors = asyncdock(
        "run", "mock", view, "--set=train.steps=4", "--out=run", kind=kind, folder=tmp_path
    )
    assert code == (1 if kind == "full" else 0), errors
    assert "Traceback" not in errors
    run = tmp_path / "run"
    assert json.loads((run / "summary.json").read_text())["state"] == "finished"
    newest = checkpoint.latest(run / "checkpoints")
    assert newest is not None
    assert newest.version == 4
    assert [
        event.data["step"] for event in read_metrics(run / METRICS) if event.kind == "step"
    ] == [1, 2, 3, 4]
    log = run / "logs" / "run.log"
    said = (
        [json.loads(line)["event"] for line in log.read_text().splitlines()] if log.exists() else []
    )
    gone = "nobody reads the output of this command any more; the run goes on"
    assert said == ([gone] if kind in ("pipe", "terminal") else [])


def test_a_run_of_which_errors_have_no_reader_either_logs_them_in_its_folder(
    tmp_path: Path,
) -> None:
    with output("pipe") as file:
        done = subprocess.run(
            [
                sys.executable,
                "-P",
                "-m",
                "api.cli.main",
                "run",
                "mock",
                "--set=train.steps=2",
                "--out=run",
            ],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=file,
            stderr=file,
            timeout=120,
            check=False,
        )
    assert done.returncode == 0
    assert "nobody reads the output" in (tmp_path / "run" / "logs" / "run.log").read_text()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["state"] == "finished"


async def test_a_view_of_a_services_run_ends_when_nobody_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would go on for as long as the run does. The run is not asked for anything."""

    class Service:
        patience = 0.0

        async def run(self, run: str) -> SimpleNamespace:
            recipe = {"pipeline": {"staleness": 1}}
            return SimpleNamespace(name="mine", steps=9, recipe=recipe, devices=1, position=None)

        async def events(self, run: str) -> AsyncIterator[Event]:
            yield Event("1-0", 1.0, "state", {"state": "running"})
            raise AssertionError("it went on after nobody had read the first event")

    monkeypatch.setattr(runs, "output_is_gone", lambda: True)
    console = Console(file=io.StringIO())
    with pytest.raises(typer.Exit) as ended:
        await runs.watch_run(Service(), "mine", console, json=False, plain=True, say=[])  # type: ignore[arg-type]
    assert ended.value.exit_code == 141
