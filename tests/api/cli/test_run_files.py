"""Commands that read a run's files take its folder, or its id in a service of this machine."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from api.cli.main import app
from tests import forked
from tests.api.faulty import Service, run_view, served
from tests.sources import ROOT

COMMANDS = {
    "checkpoint verify": ["checkpoint", "verify", "RUN"],
    "pairs": ["pairs", "RUN", "--out", "OUT"],
    "plan run --costs": ["plan", "run", "mock", "--costs", "RUN", "--steps", "2", "--json"],
    "plan what-if": ["plan", "what-if", "RUN", "--set", "pipeline.staleness=2", "--json"],
    "runs disk": ["runs", "disk", "RUN", "--json"],
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run-files") / "mock-1"
    command = [*forked.asyncdock(), "run", "mock", "--out", str(folder), "--plain"]
    for key in ("train.steps=4", "rollout.mock.time_scale=0.1", "train.mock.time_scale=0.1"):
        command += ["--set", key]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return folder


def asyncdock(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_an_id_gives_what_the_folder_gives(command: str, ended: Path, tmp_path: Path) -> None:
    recorded = json.loads((ended / "recipe.json").read_text())
    results = []
    with served(Service([])) as service:
        service.runs += [run_view("mock-1", folder=str(ended), recipe=recorded, state="finished")]
        for run in (str(ended), "mock-1"):
            out = tmp_path / f"{len(run)}.jsonl"
            words = {"RUN": run, "OUT": str(out)}
            code, said, err = asyncdock(
                *(words.get(word, word) for word in COMMANDS[command]), "--server", service.url
            )
            assert code == 0, err
            results.append(said.replace(str(out), "OUT"))
    assert results[0] == results[1]
    assert results[0].strip()


def test_a_run_that_waits_has_no_files() -> None:
    with served(Service([])) as service:
        service.runs += [run_view("mock-2", folder="", state="created")]
        code, _, err = asyncdock("checkpoint", "verify", "mock-2", "--server", service.url)
    assert code == 1
    assert "run: mock-2 is created and has no files yet; wait until it runs" in err


def test_a_path_that_does_not_exist_is_asked_of_no_service(tmp_path: Path) -> None:
    nowhere = str(tmp_path / "nowhere")
    for command in (["pairs", nowhere, "--out", "x.jsonl"], ["samples", nowhere]):
        code, _, err = asyncdock(*command, "--server", "http://127.0.0.1:9")
        assert code == 2
        assert f"run: {nowhere} does not exist; give an id" in err
    code, _, err = asyncdock("resume", nowhere)
    assert code == 2
    assert "continue a run of a service by `asyncdock runs resume ID`" in err
