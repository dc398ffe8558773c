"""The client and the commands against a real service with real runs, from start to deletion, over a
killed server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from api.cli.main import app
from api.cli.service.serve import LISTEN
from api.client import Client, RunEvent, WrongInput, WrongState, transport
from api.client.credentials import DEFAULT_SERVER
from api.telemetry.trackers import TRL_NAMES
from orchestration.history.events_file import METRICS, read_metrics
from tests.api.served import ROOT, SECONDS, Served, environment
from tests.orchestration.runs import MOCK
from tests.orchestration.services import THINNED

RECIPE = {**MOCK, "name": "seen", "launch": {"launcher": "process", "stop_timeout": 20.0}}
# Where it is about readers and commands, the run's workers share its process: that of the run is
# another than the server's.
INLINE = {"launch.launcher": "inline"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = Served(tmp_path_factory.mktemp("served") / "data", "--runs", "2")
    made.start()
    yield made
    made.end()


@pytest.fixture
async def client(served: Served) -> AsyncGenerator[Client, None]:
    async with asyncio.timeout(SECONDS), Client(served.url) as client:
        yield client


def asyncdock(url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "api.cli.main", *arguments],
        env={**environment(), "ASYNCDOCK_SERVER": url, "ASYNCDOCK_TOKEN": ""},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        cwd=ROOT,
    )


def test_a_service_listens_where_the_client_looks() -> None:
    assert f"http://{LISTEN}" == DEFAULT_SERVER


async def test_every_method_fits_the_service(client: Client) -> None:
    assert "mock" in [recipe.name for recipe in await client.recipes()]
    assert (await client.recipe("mock")).recipe["rollout"]["engine"] == "mock"
    assert (await client.check(RECIPE, {"train.steps": 3})).recipe["train"]["steps"] == 3
    long = await client.submit(RECIPE, {"train.steps": 100_000}, key="every-method")
    assert (await client.submit(RECIPE, {"train.steps": 100_000}, key="every-method")).id == long.id
    steps = client.events(long.id, kinds=["step"])
    assert (await anext(steps)).data["step"] == 1
    assert (await client.stages(long.id)).stages[0].name == "rollout"
    assert (await client.pause(long.id)).state == "paused"
    assert (await client.resume(long.id)).state == "running"
    await client.checkpoint(long.id)
    async with contextlib.aclosing(client.events(long.id, kinds=["checkpoint"])) as written:
        version = (await anext(written)).data["version"]
    assert version in [checkpoint.version for checkpoint in await client.checkpoints(long.id)]
    assert [run.id async for run in client.runs(state="running", name="seen")] == [long.id]
    sample = await anext(client.samples(long.id, limit=1))
    assert sample.staleness <= 1
    assert sum(tokens for _, tokens in sample.versions) == sample.tokens
    assert "rollout-0" in await client.logs(
        long.id, worker="rollout-0", lines=1000
    ) or await client.logs(long.id)
    history = await client.metrics(long.id, names=["step.reward_mean"])
    assert set(history.series["step"]) == {"time", "reward_mean"}
    assert (await client.trace(long.id))["traceEvents"]
    async with contextlib.aclosing(client.events(long.id, kinds=["stage"])) as reports:
        generated = (report async for report in reports if report.data["stage"] == "rollout")
        _ = [await anext(generated) for _ in range(3)]
    foreseen = await client.what_if(long.id, {"pipeline.staleness": 0})
    assert foreseen.changed.staleness_max == 0 < foreseen.changed.tokens_per_second
    assert foreseen.now.staleness_max <= 1
    with pytest.raises(
        WrongInput,
        match=r"model\.source.*is not simulated; use some of "
        r"pipeline\.staleness",
    ):
        await client.what_if(long.id, {"model.source": "/etc"})
    with pytest.raises(WrongState):
        await client.delete(long.id)
    await client.stop(long.id)
    assert [event async for event in steps][-1].kind == "step"
    stopped = await client.wait_until_ended(long.id)
    assert stopped.state == "stopped"
    with pytest.raises(WrongInput, match=r"seed = 7: cannot change in a resumed run: it decides"):
        await client.resume(long.id, {"seed": 7})
    with pytest.raises(WrongState, match="there is nothing to resume"):
        await client.resume(long.id, {"train.steps": 1})
    last = stopped.steps_done + 2
    assert (await client.resume(long.id, {"train.steps": last})).steps == last
    ended = await client.wait_until_ended(long.id)
    assert (ended.state, ended.steps_done) == ("finished", last)
    made = [event.data["step"] async for event in client.events(long.id, kinds=["step"])]
    assert made == list(range(1, last + 1))
    fork = await client.fork(long.id, {"train.steps": 1})
    assert (await client.wait_until_ended(fork.id)).name == f"{long.name}-fork"
    await client.delete(long.id)
    assert long.id not in [run.id async for run in client.runs()]


async def test_a_server_killed_and_started_again_costs_a_reader_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All events of a run, each once, in order, though the server dies by kill -9 in the middle of
    it, twice."""
    monkeypatch.setattr(transport, "LONGEST_WAIT", 1.0)
    made = Served(tmp_path / "data")
    made.start()
    try:
        async with asyncio.timeout(SECONDS), Client(made.url, patience=60) as client:
            run = await client.submit(
                RECIPE, {"train.steps": 12, "rollout.mock": {"time_scale": 0.3}, **INLINE}
            )
            seen: list[RunEvent] = []
            async for event in client.events(run.id):
                seen.append(event)
                if event.kind == "step" and event.data["step"] in (2, 6):
                    made.kill()
                    await asyncio.to_thread(made.start)
            ended = await client.wait_until_ended(run.id)
            assert (ended.state, ended.attempts, ended.steps_done) == ("finished", 1, 12)
        written = [
            event
            for event in read_metrics(Path(ended.folder) / METRICS, detail=True)
            if event.kind not in THINNED
        ]
        ids = {event.id for event in seen}
        assert len(ids) == len(seen)
        assert [event.id for event in seen if event.kind not in THINNED] == [
            e.id for e in written if e.id in ids
        ]
        assert {event.kind for event in written if event.id not in ids} <= {"stage"}, (
            "the last ones, kept at the end"
        )
        assert [event.data["step"] for event in seen if event.kind == "step"] == list(range(1, 13))
    finally:
        await asyncio.to_thread(made.end)


async def test_the_commands_drive_a_run_from_its_start_to_its_deletion(served: Served) -> None:
    def walk() -> None:
        sets = [
            f"--set={text}" for text in ("train.steps=3", "name=walked", "launch.launcher=inline")
        ]
        started = asyncdock(served.url, "runs", "start", "mock", *sets, "--watch")
        assert started.returncode == 0, started.stderr
        assert "step 3/3  reward " in started.stdout
        run = started.stdout.splitlines()[-1].removesuffix(": finished")
        shown = json.loads(asyncdock(served.url, "runs", "show", run, "--json").stdout)
        assert (shown["state"], shown["steps_done"], shown["name"]) == ("finished", 3, "walked")
        assert run in asyncdock(served.url, "runs", "list", "--name", "walked").stdout
        assert asyncdock(served.url, "samples", run, "--limit", "2").stdout.count("staleness") == 2
        again = asyncdock(served.url, "runs", "watch", run, "--json")
        kinds = [json.loads(line)["kind"] for line in again.stdout.splitlines()]
        assert (again.returncode, kinds.count("step")) == (0, 3)
        late = asyncdock(served.url, "runs", "pause", run)
        assert late.returncode == 1
        assert late.stderr.startswith("error: ")
        wrong = asyncdock(served.url, "runs", "start", "mock", "--set", "train.stepz=3")
        assert wrong.returncode == 2
        assert "train.stepz = 3: " in wrong.stderr
        assert "did you mean 'steps'?" in wrong.stderr
        assert asyncdock(served.url, "runs", "delete", run, "--yes").returncode == 0
        assert asyncdock(served.url, "runs", "show", run).returncode == 2

    await asyncio.to_thread(walk)


async def test_a_run_of_the_service_is_tracked_in_tensorboard(
    served: Served, client: Client, tmp_path: Path
) -> None:
    """While it goes on, and again when it has ended: TensorBoard reads what the run has emitted,
    each value once."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def track(run: str, into: Path) -> Result:
        command = ["track", run, "--server", served.url, "--to", "tensorboard", "--into", str(into)]
        return CliRunner().invoke(app, command, env={"ASYNCDOCK_TOKEN": ""})

    # workers report their stages once a second
    lasting = {"train.steps": 5, "rollout.mock": {"time_scale": 0.4}}
    run = (await client.submit(RECIPE, {"name": "tracked", **lasting, **INLINE})).id
    done = await asyncio.to_thread(track, run, tmp_path / "board")
    assert done.exit_code == 0, done.output
    assert (await client.run(run)).state == "finished"  # it followed the run to its end
    again = await asyncio.to_thread(track, run, tmp_path / "board")
    assert again.stdout == f"0 points of {run} are in {tmp_path / 'board'}\n"

    events_of_run = [event async for event in client.events(run)]
    board = EventAccumulator(str(tmp_path / "board"), size_guidance={"scalars": 0})
    board.Reload()
    names = set(board.Tags()["scalars"])
    read = {
        name: [(one.step, one.wall_time, one.value) for one in board.Scalars(name)]
        for name in names
    }
    steps = [event for event in events_of_run if event.kind == "step"]
    assert len(steps) == 5
    numbers = {
        name
        for event in steps
        for name, value in event.data.items()
        if isinstance(value, int | float)
        and not isinstance(value, bool)
        and name not in ("step", "version")
    }
    assert {"reward_mean", "loss", "staleness_max", "tokens_generated"} <= numbers
    for name in numbers:
        emitted = [
            (event.data["step"], event.time, pytest.approx(event.data[name], rel=1e-6))
            for event in steps
            if name in event.data
        ]
        assert read.pop(f"train/{name}") == emitted, name
        if name in TRL_NAMES:
            assert read.pop(f"train/{TRL_NAMES[name]}") == emitted, name
    others = [name for name in read if name.startswith("train/")]
    assert all(name.startswith("train/rewards/spelling/") for name in others), others
    swaps = [
        event
        for event in events_of_run
        if event.kind == "sync" and event.data["worker"] == "rollout-0"
    ]
    assert swaps
    assert read["sync/rollout-0/exposed_seconds"] == [
        (event.data["version"], event.time, pytest.approx(event.data["exposed_seconds"], rel=1e-6))
        for event in swaps
    ]
    shares = [
        [value for *_, value in read[f"stage/rollout-0/{name}_share"]]
        for name in ("busy", "waiting_input")
    ]
    assert all(
        0 <= busy <= 1.001 and busy + waiting <= 1.001
        for busy, waiting in zip(*shares, strict=True)
    )

    unknown = await asyncio.to_thread(track, f"{run}x", tmp_path / "none")
    assert (unknown.exit_code, unknown.stdout) == (2, "")
