"""Clocks that are set, and machines that sleep: no run, no worker and no row is taken for lost."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.runs.executed import on_ray, raylets
from orchestration.history.events_file import METRICS, read_metrics
from orchestration.state.paths import WHERE
from orchestration.state.registry import RunRecord
from pipeline.data.events import Event
from pipeline.index.client import INDEX_VARIABLE
from tests.forked import ROOT
from tests.orchestration.external.test_session import ROLLOUT
from tests.orchestration.run import external_run
from tests.orchestration.runs import MOCK, recipe
from tests.orchestration.services import Service, serving
from tests.shifted_clock import COMPILER, WITHOUT_COMPILER, ShiftedClock

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason=WITHOUT_COMPILER),
    pytest.mark.timeout(600),
]
# Ahead by an hour, back by two, and ahead by a day.
JUMPS = (3600, -3600, 86400)
# Leases, signs of life and calls that are over before the processes go on.
SHORT: dict[str, Any] = {
    "pipeline__lease_seconds": 3.0,
    "launch__hang_timeout": 4.0,
    "launch__launcher": "process",
}
FROZEN_SECONDS = 60.0  # Ray's own signs of life are over too


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ShiftedClock:
    """The clock of all processes that the test starts."""
    clock = ShiftedClock(tmp_path)
    for name, value in clock.environment.items():
        monkeypatch.setenv(name, value)
    return clock


async def freeze(clock: ShiftedClock) -> None:
    """Stop the processes that have ``clock``, as a machine that sleeps does, and let them go on."""
    processes = clock.processes()
    for each in processes:
        each.send_signal(signal.SIGSTOP)
    await asyncio.sleep(FROZEN_SECONDS)
    for each in processes:
        each.send_signal(signal.SIGCONT)
    await asyncio.sleep(4)  # leases could end, and the ledger is recorded


def disturbances(events: Iterable[Event]) -> tuple[list[dict[str, Any]], int]:
    """The events of workers that were taken for dead, and how many rows were delivered again, until
    the run is stopped: a stage may hand a claim back then."""
    workers = []
    redelivered = 0
    for event in events:
        if event.kind == "state" and event.data["state"] == "stopping":
            break
        if event.kind == "worker" and event.data["change"] in (
            "died",
            "restarted",
            "taken over",
            "absent",
        ):
            workers.append(event.data)
        elif event.kind == "ledger":
            redelivered = event.data["redelivered"]
    return workers, redelivered


def is_ready_rollout(event: Event) -> bool:
    return event.kind == "worker" and (event.data["stage"], event.data["change"]) == (
        "rollout",
        "ready",
    )


def events_in(metrics: Path) -> list[Event]:
    return list(read_metrics(metrics)) if metrics.exists() else []


def of_kind(metrics: Path, kind: str, change: str) -> list[dict[str, Any]]:
    return [
        event.data
        for event in events_in(metrics)
        if event.kind == kind and event.data["change"] == change
    ]


async def until(condition: Callable[[], bool], seconds: float = 240) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  (files have no reader that could be woken)
            await asyncio.sleep(0.2)


async def steps_of(metrics: Path, count: int) -> int:
    """Wait for ``count`` further steps; the number of all of them."""
    wanted = None
    async with asyncio.timeout(120):
        while True:
            steps = sum(event.kind == "step" for event in events_in(metrics))
            wanted = steps + count if wanted is None else wanted
            if steps >= wanted:
                return steps
            await asyncio.sleep(0.2)  # the file has no reader that could be woken


def started(
    arguments: list[str], folder: Path, module: str = "api.cli.main", **variables: str
) -> subprocess.Popen[bytes]:
    """The command, or another ``module``, all of whose processes have the clock: none is forked from a server of the
    tests."""
    command = [sys.executable, "-P", "-m", module, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    with (folder / "out").open("wb") as out:
        return subprocess.Popen(command, stdout=out, stderr=out, env=environment)


def running(folder: Path, **changes: Any) -> tuple[subprocess.Popen[bytes], Path]:
    """`asyncdock run` of an endless recipe, and the file of its events."""
    (folder / "recipe.json").write_text(
        recipe(MOCK, **{"train__steps": 100_000, **SHORT, **changes}).to_json()
    )
    command = ["run", str(folder / "recipe.json"), "--plain", "--out", str(folder / "run")]
    return started(command, folder), folder / "run" / METRICS


async def stopped(run: subprocess.Popen[bytes], folder: Path) -> None:
    run.send_signal(signal.SIGINT)
    assert await asyncio.to_thread(run.wait, 60) == 130, (folder / "out").read_text()


async def jump(clock: ShiftedClock, metrics: Path) -> None:
    for shift in JUMPS:
        clock.set(shift)
        await steps_of(metrics, 2)
        await asyncio.sleep(2)  # leases are renewed, and could end


async def test_a_run_is_not_disturbed(clock: ShiftedClock, tmp_path: Path) -> None:
    run, metrics = running(tmp_path)
    try:
        await steps_of(metrics, 2)
        await jump(clock, metrics)
        await freeze(clock)
        await steps_of(metrics, 5)
        await stopped(run, tmp_path)
    finally:
        run.kill()
        run.wait()
    assert disturbances(events_in(metrics)) == ([], 0)


async def test_a_run_with_a_host_is_not_disturbed(clock: ShiftedClock, tmp_path: Path) -> None:
    here = {"pipeline__serve": "127.0.0.1"}
    run, metrics = running(tmp_path, rollout__workers=2, launch__remote_rollouts=1, **here)
    host: subprocess.Popen[bytes] | None = None
    (tmp_path / "host").mkdir()
    try:
        await steps_of(metrics, 2)
        where = json.loads((tmp_path / "run" / WHERE).read_text())
        joins = {INDEX_VARIABLE: where["join"], "ASYNCDOCK_HOST_TOKEN": where["token"]}
        host = started(["host", "--run", where["run"]], tmp_path / "host", **joins)
        await until(
            lambda: (
                "rollout-1" in [event["worker"] for event in of_kind(metrics, "worker", "ready")]
            )
        )
        await jump(clock, metrics)
        await freeze(clock)
        await steps_of(metrics, 5)
        await stopped(run, tmp_path)
        await asyncio.to_thread(host.wait, 60)
    finally:
        for process in (run, host):
            if process is not None:
                process.kill()
                process.wait()
    workers, redelivered = disturbances(events_in(metrics))
    assert ([event for event in workers if event["change"] != "absent"], redelivered) == ([], 0)


async def test_a_run_on_a_ray_cluster_is_not_disturbed(clock: ShiftedClock, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    with raylets(2, cpus=4) as cluster:
        on_cluster = {f"launch__{key}": value for key, value in on_ray(cluster.address).items()}
        run, metrics = running(
            tmp_path, **on_cluster, rollout__workers=2, launch__startup_timeout=280.0
        )
        try:
            await until(
                lambda: len([each for each in events_in(metrics) if is_ready_rollout(each)]) == 2,
                280,
            )
            await steps_of(metrics, 2)
            await jump(clock, metrics)
            await freeze(clock)
            await steps_of(metrics, 5)
            await stopped(run, tmp_path)
        finally:
            run.kill()
            run.wait()
    events = events_in(metrics)
    last_ready = [number for number, event in enumerate(events) if is_ready_rollout(event)][1]
    assert disturbances(events[last_ready:]) == ([], 0)


async def test_an_external_rollout_is_not_disturbed(clock: ShiftedClock, tmp_path: Path) -> None:
    """It and the run's head are one process, which is stopped with the run's workers."""
    endless = recipe(ROLLOUT, **{**SHORT, "train__steps": 100_000})
    (tmp_path / external_run.RECIPE).write_text(endless.to_json())
    metrics = tmp_path / "run" / METRICS
    run = started([str(tmp_path)], tmp_path, external_run.__name__)
    try:
        await steps_of(metrics, 2)
        await jump(clock, metrics)
        await freeze(clock)
        await steps_of(metrics, 5)
        (tmp_path / external_run.STOP).touch()
        assert await asyncio.to_thread(run.wait, 60) == 0, (tmp_path / "out").read_text()
    finally:
        run.kill()
        run.wait()
    assert disturbances(events_in(metrics)) == ([], 0)


async def runs_are_undisturbed(service: Service, runs: Iterable[str]) -> None:
    for run in runs:
        record: RunRecord = await service.registry.get(run)
        assert (record.state, record.attempts) == ("running", 1), record.reason
        workers, redelivered = disturbances(await service.events(run))
        assert (workers, redelivered) == ([], 0), run


async def test_runs_of_a_service_are_not_disturbed(clock: ShiftedClock, tmp_path: Path) -> None:
    async with serving(tmp_path / "data") as service:
        service.start_agent(runs=2, prefix=["env"])  # by a prefix: as above
        await service.agent_works()
        endless = recipe(MOCK, train__steps=100_000, **SHORT)
        runs = [await service.submit(endless) for _ in range(2)]
        for run in runs:
            await service.steps(run, 2)
        for shift in JUMPS:
            clock.set(shift)
            await asyncio.sleep(7)  # past the next look of the agent, and the next renewal
            await runs_are_undisturbed(service, runs)
        await freeze(clock)
        await asyncio.sleep(7)
        await runs_are_undisturbed(service, runs)
        for run in runs:
            await service.registry.ask(run, "stop")
        for run in runs:
            assert (await service.ended(run)).state == "stopped"


def test_the_shift_reaches_the_processes(clock: ShiftedClock) -> None:
    """Otherwise the tests above see nothing."""
    clock.set(7200)
    told = subprocess.run(
        ["date", "+%s"], env=os.environ, capture_output=True, text=True, check=True
    ).stdout
    now = subprocess.run(
        ["date", "+%s"],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=True,
    )
    assert 7190 < int(told) - int(now.stdout) < 7210
