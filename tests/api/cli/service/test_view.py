"""Runs of this machine without a service: commands about a folder, and ``asyncdock view``."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import psutil
import pytest

from api.cli.common.exit_codes import FAILED, FINISHED
from api.client import ApiProblem, Client
from orchestration.checkpoints.checkpoint import version_of, whole
from orchestration.processes.leftovers import sweep_leftovers
from orchestration.service.own_services import find_service
from tests.pages.page import ROOT

STEPS = 6
SLOW = ("--set", "rollout.mock.time_scale=3.0", "--set", "train.steps=1000")
SECONDS = 60.0
EQUAL = """
extends = "tiny"
reward.functions = [{ name = "equal_reward:zero" }]
train.steps = 2
evaluate.every = 0
"""
ZERO = """
def zero(completions):
    return [0.0 for _ in completions]
"""


def command(*words: str) -> list[str]:
    return [sys.executable, "-P", "-m", "api.cli.main", *words]


def asyncdock(*words: str | Path, code: int = FINISHED) -> str:
    done = subprocess.run(
        command(*map(str, words)), capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert done.returncode == code, done.stderr
    return done.stdout if code == FINISHED else done.stderr


def digests(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that has ended, and one of the same name deeper in it."""
    folder = tmp_path_factory.mktemp("view") / "my runs"
    ended = folder / "a run ä"
    asyncdock("run", "mock", "--set", f"train.steps={STEPS}", "--out", ended, "--plain")
    shutil.copytree(ended, folder / "sweep" / "a run ä")
    return folder


def executing(folder: Path) -> AbstractContextManager[subprocess.Popen[bytes]]:
    return going_on("mock", folder, *SLOW)


@contextmanager
def going_on(recipe: str, folder: Path, *sets: str) -> Iterator[subprocess.Popen[bytes]]:
    """A run in ``folder`` that goes on for long, past its first step."""
    with subprocess.Popen(
        command("run", recipe, *sets, "--out", str(folder), "--plain"),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if b"step 1/" in line:
                    break
            yield process
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=SECONDS)


def until_saved(folder: Path, version: int) -> None:
    """Wait until the run in ``folder`` has a checkpoint of ``version``, or of a later one."""
    deadline = time.monotonic() + SECONDS
    while not any(version_of(path.name) >= version for path in whole(folder / "checkpoints")):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@contextmanager
def viewing(*folders: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    with subprocess.Popen(
        command("view", *map(str, folders)), stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        try:
            assert process.stdout is not None
            match = re.search(r" at (http://127\.0\.0\.1:\d+)$", process.stdout.readline().strip())
            assert match is not None
            yield match[1], process
        finally:
            process.kill()


def test_an_ended_run_is_read_by_its_folder(runs: Path) -> None:
    """As that of a service; nothing in the folder changes."""
    run = runs / "a run ä"
    before = digests(run)
    shown = asyncdock("runs", "show", run)
    assert re.search(r"^run +a-run-a *$", shown, re.MULTILINE)
    assert re.search(r"^state +finished *$", shown, re.MULTILINE)
    assert re.search(rf"^steps +{STEPS} of {STEPS} *$", shown, re.MULTILINE)
    facts = json.loads(asyncdock("runs", "show", run, "--json"))
    summary = json.loads((run / "summary.json").read_text())
    assert (facts["steps_done"], facts["state"]) == (summary["steps"], summary["state"])
    lines = asyncdock("samples", run, "--step", "2").splitlines()
    assert {json.loads(line)["step"] for line in lines} == {2}
    events = [json.loads(line) for line in asyncdock("runs", "watch", run, "--json").splitlines()]
    steps = [event["data"]["step"] for event in events if event["kind"] == "step"]
    assert steps == [*range(1, STEPS + 1)]
    assert '"event": "ready"' in asyncdock("runs", "logs", run, "--worker", "update-0")
    assert asyncdock("why", run) == "nothing: the run has ended\n"
    assert digests(run) == before


def test_a_folder_that_cannot_be_read_is_reported_in_one_line(runs: Path, tmp_path: Path) -> None:
    """Without log lines of the server, and of the client that was closed."""
    damaged = tmp_path / "damaged"
    shutil.copytree(runs / "a run ä", damaged)
    (damaged / "metrics.jsonl").unlink()
    (damaged / "metrics.jsonl").mkdir()
    [line] = asyncdock("runs", "show", damaged, code=FAILED).splitlines()
    assert f"error: run: {damaged} cannot be shown: a request failed (IsADirectoryError" in line
    assert "the traceback is in " in line
    (damaged / "recipe.json").write_text("{")
    [line] = asyncdock("samples", damaged, code=FAILED).splitlines()
    assert f"{damaged / 'recipe.json'} is no recipe in JSON; put back the one" in line


def test_a_run_that_goes_on_is_read_and_then_as_one_that_was_killed(tmp_path: Path) -> None:
    folder = tmp_path / "live"
    with executing(folder) as process:
        facts = json.loads(asyncdock("runs", "show", folder, "--json"))
        assert facts["state"] == "running"
        assert 1 <= facts["steps_done"] < 1000
        assert facts["ended"] is None
        process.send_signal(signal.SIGKILL)
        process.wait(SECONDS)
    deadline = time.monotonic() + SECONDS
    while json.loads(asyncdock("runs", "show", folder, "--json"))["state"] != "failed":
        assert time.monotonic() < deadline
    assert f"`asyncdock resume {folder}` goes on with it" in asyncdock("runs", "show", folder)
    first, how = asyncdock("why", folder).splitlines()
    assert first == "nothing: the run has ended"
    ended = r"failed at \d{4}-\d\d-\d\d \d\d:\d\d:\d\d: its command has ended before the run; "
    assert re.match(f"{ended}`asyncdock resume {folder}` goes on", how)
    waiting = json.loads(asyncdock("why", folder, "--json"))
    assert (waiting["chain"], waiting["state"]) == ([], "failed")
    sweep_leftovers()


def test_a_run_that_a_second_interrupt_has_ended_is_stopped(tmp_path: Path) -> None:
    folder = tmp_path / "live"
    with executing(folder) as process:
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)  # two signals at once are one
    facts = json.loads(asyncdock("runs", "show", folder, "--json"))
    reason = "ended at once by a second interrupt"
    assert (facts["state"], facts["reason"]) == ("stopped", reason)
    assert f": {reason}\n" in asyncdock("why", folder)


def test_why_says_of_an_ended_run_what_its_rewards_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "equal.toml").write_text(EQUAL)
    (tmp_path / "equal_reward.py").write_text(ZERO)
    folder = tmp_path / "equal"
    asyncdock("run", tmp_path / "equal.toml", "--out", folder, "--plain")
    first, note, *_ = asyncdock("why", folder).splitlines()
    assert first == "nothing: the run has ended"
    assert note.startswith("Every reward was 0, in all 2 steps: there was nothing to learn from")
    waiting = json.loads(asyncdock("why", folder, "--json"))
    assert waiting["state"] == "finished"
    assert waiting["findings"][0] == note


def test_what_would_change_a_run_is_refused(runs: Path) -> None:
    run = runs / "a run ä"
    for words in (("pause",), ("checkpoint",), ("stop",)):
        refused = asyncdock("runs", *words, run, code=FAILED)
        assert "none is alive in" in refused
        assert ": it finished at 20" in refused
        assert f"`asyncdock resume {run} --set train.steps=…` makes more steps" in refused
    assert (run / "recipe.json").exists()


async def test_the_view_shows_all_runs_below_its_folders(runs: Path, tmp_path: Path) -> None:
    before = digests(runs)
    with executing(tmp_path / "live") as live, viewing(runs, tmp_path) as (url, process):
        service = find_service(url)
        assert service is not None
        async with Client(url, service.token) as client:
            listed = {run.id: run async for run in client.runs()}
            assert {run.state for run in listed.values()} == {"running", "finished"}
            assert len(listed) == 3, "two have folders of one name"
            finished = [run async for run in client.runs(state="finished", limit=1)]
            assert [run.steps_done for run in finished] == [STEPS]
            for run in listed.values():
                stages = await client.stages(run.id)
                assert stages.stages[0].name == "rollout"
                assert stages.trained >= run.steps_done
                series = (await client.metrics(run.id)).series
                assert len(series["step"]["time"]) >= 1
            with pytest.raises(ApiProblem, match="only shown here"):
                await client.pause("live")
            with pytest.raises(ApiProblem, match="executes no runs"):
                await client.submit("mock")
        assert live.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(SECONDS) == FINISHED
    assert digests(runs) == before


def test_a_view_that_is_killed_leaves_no_process(runs: Path) -> None:
    with viewing(runs) as (_, process):
        children = psutil.Process(process.pid).children()
        assert children
        process.kill()
        process.wait(SECONDS)
    _, alive = psutil.wait_procs(children, SECONDS)
    assert not alive


def test_it_is_for_this_machine_alone(runs: Path, tmp_path: Path) -> None:
    said = asyncdock("view", runs, "--listen", "0.0.0.0:0", code=2)
    assert "0.0.0.0 can be reached from other machines" in said
    assert "is no directory" in asyncdock("view", tmp_path / "nothing", code=2)
