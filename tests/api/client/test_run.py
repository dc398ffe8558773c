"""Runs in a notebook: the same lines on a folder and on a service, also where a loop runs; what
ends a call, and what ends a run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from typing import Any

import pandas
import pytest

from api.client import Client, Run, SyncClient, WrongInput, WrongState, open_run, start
from api.client.client import _iterating
from orchestration.checkpoints.checkpoint import latest
from orchestration.history.events_file import METRICS, read_metrics
from tests.api.served import ROOT, SECONDS, Served, environment
from tests.orchestration.runs import MOCK

STEPS = 3
LONG = {**MOCK, "name": "long", "train": {**MOCK["train"], "steps": 100_000}}
PROGRAM = """
import sys
from api.client import start
recipe, out, outlives = eval(sys.argv[1]), sys.argv[2], sys.argv[3] == "outlives"
run = start(recipe, out=out, outlives=outlives)
next(run.events(kinds=["step"]))
print("begun", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That of a run which has ended."""
    out = tmp_path_factory.mktemp("runs") / "ended"
    with contextlib.closing(start("tiny", {"train.steps": STEPS}, out=out)) as run:
        assert run.wait(SECONDS).state == "finished", run.view.reason
    return out


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    server = Served(tmp_path_factory.mktemp("served") / "data")
    server.start()
    yield server
    server.end()


@pytest.fixture
def long(tmp_path: Path) -> Iterator[Run]:
    with start(LONG, out=tmp_path / "long") as run:
        yield run
        if run.state != "stopped":
            run.stop().wait(SECONDS)


def test_a_folder_is_rows(folder: Path) -> None:
    with open_run(folder) as run:
        steps = pandas.DataFrame(run.metrics())
        events = [event for event in read_metrics(folder / METRICS) if event.kind == "step"]
        assert steps["version"].tolist() == [event.data["version"] for event in events]
        assert steps["reward_mean"].tolist() == [event.data["reward_mean"] for event in events]
        assert steps["version"].dtype == int
        assert run.metrics("evaluation", every=3600.0)[0]["count"] > 0  # type: ignore[operator]
        with pytest.raises(WrongInput, match="is not known here; use one of: 'sync"):
            run.metrics("sync/nobody")
        samples = pandas.DataFrame(run.samples(step=events[-1].data["step"]))
        assert len(samples) == events[-1].data["rows"]
        assert {"prompt", "response", "reward", "versions"} <= set(samples.columns)
        assert len(run.samples(limit=2)) == 2
        assert [event.data["state"] for event in run.events(kinds=["state"])][-1] == "finished"
        assert run.recipe["train"]["steps"] == STEPS
        with pytest.raises(WrongState, match="none is alive in"):
            run.stop()


async def test_it_works_where_a_loop_runs(folder: Path) -> None:
    with open_run(folder) as run:
        assert len(run.follow().metrics()) == STEPS
    assert asyncio.get_running_loop().is_running()


def test_following_shows_how_far_it_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_run(folder) as run:
        assert run.follow() is run
        bar = capsys.readouterr().err.rpartition("\r")[2]
        assert f"tiny finished: 100%|██████████| {STEPS}/{STEPS} [" in bar
        assert "reward=" in bar
        assert "loss=" in bar
        assert repr(run).startswith(
            f"<Run {folder}: state finished, steps {STEPS} of {STEPS}, reward "
        )
        table = run._repr_html_()
    assert f"<tr><th>run</th><td>{folder}</td>" in table
    assert "<tr><th>state</th><td>finished</td>" in table
    assert "this client is closed" in repr(run)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell starts a job in the background with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("at", ["start", "result"])
def test_an_interrupted_call_ends(monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    """Wherever Ctrl-C comes: it was a RuntimeError of a generator that goes on, where the call was
    only being started."""
    waits, ended = threading.Event(), threading.Event()

    async def two(_: Client) -> AsyncGenerator[int]:
        yield 1
        try:
            waits.set()
            await asyncio.Event().wait()
        finally:
            ended.set()

    with SyncClient("http://127.0.0.1:1") as client:
        begin = client._portal.start_task_soon

        def interrupted(work: Callable[..., Any], *args: Any) -> Any:
            monkeypatch.setattr(client._portal, "start_task_soon", begin)
            future = begin(work, *args)
            assert waits.wait(10)
            if at == "start":
                raise KeyboardInterrupt
            monkeypatch.setattr(future, "result", interrupt)
            return future

        def interrupt() -> None:
            raise KeyboardInterrupt

        items = _iterating(two)(client)
        assert next(items) == 1
        monkeypatch.setattr(client._portal, "start_task_soon", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(items)
        assert ended.is_set()


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_leaves_the_run_going(long: Run) -> None:
    ended = threading.Event()

    def interrupt() -> None:
        next(long.events(kinds=["step"]))
        # Python only prints what a signal raises in a destructor, as while a module is imported
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
            if ended.wait(30):
                return

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            long.follow()
    finally:
        ended.set()  # further signals would end the tests
        thread.join()
    steps = len(long.metrics())
    events = long.events(kinds=["step"])
    assert [next(events).kind for _ in range(steps + 1)] == ["step"] * (steps + 1)
    assert long.client.pause(long.id).state == "paused"
    assert long.client.resume(long.id).state == "running"
    assert long.stop().wait(SECONDS).state == "stopped"
    assert latest(Path(long.view.folder) / "checkpoints") is not None


@pytest.mark.parametrize("outlives", ["tied", "outlives"])
def test_a_run_ends_with_its_notebook_unless_it_outlives_it(tmp_path: Path, outlives: str) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-P", "-c", PROGRAM, repr(LONG), str(out), outlives]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env=environment()
    ) as notebook:
        assert notebook.stdout is not None
        assert notebook.stdout.readline() == b"begun\n"
        notebook.kill()
    with open_run(out) as run:
        if outlives == "outlives":
            steps = len(run.metrics())
            events = run.events(kinds=["step"])
            _ = [next(events) for _ in range(steps + 1)]
            assert run.state == "running"
            run.stop()
        assert run.wait(SECONDS).state == "stopped"
    assert latest(out / "checkpoints") is not None


def test_a_program_need_not_close_what_it_has_opened(folder: Path) -> None:
    program = f"from api.client import open_run\nrun = open_run({str(folder)!r})\nprint(run.state)"
    with tempfile.TemporaryDirectory() as scratch:  # a short path, as sockets need
        done = subprocess.run(
            [sys.executable, "-P", "-c", program],
            env={**environment(), "TMPDIR": scratch},
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert (done.stdout, done.stderr) == ("finished\n", "")
        assert not os.listdir(scratch)


def test_what_cannot_begin_says_why(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"train\.step = 4: is not a known key; did you mean 'steps'"
    ):
        start("tiny", {"train.step": 4}, out=tmp_path / "wrong")
    with pytest.raises(ValueError, match="holds a run; give a new folder"):
        start("tiny", out=folder)
    assert not (tmp_path / "wrong").exists()


def test_a_service_and_a_folder_say_the_same(served: Served) -> None:
    with start(MOCK, {"train.steps": STEPS}, server=served.url) as run:
        assert run.follow().state == "finished"
        assert run.process is None
        with open_run(run.view.folder) as same:
            assert same.metrics() == run.metrics()
            assert same.samples() == run.samples()
            assert same.recipe["train"] == run.recipe["train"]
            assert run.metrics()
        with open_run(run.id, server=served.url) as same:
            assert same.view == run.view


def test_a_path_that_is_no_runs_folder_is_refused_at_once(tmp_path: Path) -> None:
    for path, lacks in ((tmp_path, "has no recipe.json"), (tmp_path / "a", "does not exist")):
        with pytest.raises(ValueError, match=rf"run: {path} {lacks}; give the folder of a run"):
            open_run(path)
