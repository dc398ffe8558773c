"""Clocks that are set, and machines that sleep: no run, no worker and no row is taken for lost."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest

from orchestration.events_file import METRICS, read_metrics
from orchestration.service.registry import RunRecord
from pipeline.events import Event
from tests.forked import asyncdock
from tests.orchestration.runs import MOCK, recipe
from tests.orchestration.services import Service, serving
from tests.shifted_clock import COMPILER, WITHOUT_COMPILER, ShiftedClock

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason=WITHOUT_COMPILER),
    pytest.mark.timeout(300),
]
# Ahead by an hour, back by two, and ahead by a day.
JUMPS = (3600, -3600, 86400)
# Leases, signs of life and calls that are over before the processes go on.
SHORT: dict[str, Any] = {"pipeline__lease_seconds": 3.0, "launch__hang_timeout": 4.0, "launch__launcher": "process"}
FROZEN_SECONDS = 8.0


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ShiftedClock:
    """The clock of all processes that the test starts."""
    clock = ShiftedClock(tmp_path)
    for name, value in clock.environment.items():
        monkeypatch.setenv(name, value)
    return clock


async def freeze(roots: Iterable[int]) -> None:
    """Stop the processes ``roots`` and all that they have started, as a machine that sleeps does, and let them go on."""
    processes = [
        each for root in roots for each in (psutil.Process(root), *psutil.Process(root).children(recursive=True))
    ]
    for each in processes:
        each.send_signal(signal.SIGSTOP)
    await asyncio.sleep(FROZEN_SECONDS)
    for each in processes:
        each.send_signal(signal.SIGCONT)


def disturbances(events: Iterable[Event]) -> tuple[list[dict[str, Any]], int]:
    """The events of workers that were taken for dead, and how many rows were delivered again."""
    workers, redelivered = [], 0
    for event in events:
        if event.kind == "worker" and event.data["change"] in ("died", "restarted", "taken over", "absent"):
            workers.append(event.data)
        elif event.kind == "ledger":
            redelivered = event.data["redelivered"]
    return workers, redelivered


def events_in(metrics: Path) -> list[Event]:
    return list(read_metrics(metrics)) if metrics.exists() else []


async def steps_of(metrics: Path, count: int) -> int:
    """Wait for ``count`` further steps; the number of all of them."""
    wanted = None
    async with asyncio.timeout(60):
        while True:
            steps = sum(event.kind == "step" for event in events_in(metrics))
            wanted = steps + count if wanted is None else wanted
            if steps >= wanted:
                return steps
            await asyncio.sleep(0.2)  # the file has no reader that could be woken


def started(command: list[str], folder: Path) -> subprocess.Popen[bytes]:
    with (folder / "out").open("wb") as out:
        return subprocess.Popen(command, stdout=out, stderr=out, cwd=folder)


async def test_a_run_is_not_disturbed(clock: ShiftedClock, tmp_path: Path) -> None:
    (tmp_path / "recipe.json").write_text(recipe(MOCK, train__steps=100_000, **SHORT).to_json())
    command = [*asyncdock(), "run", str(tmp_path / "recipe.json"), "--plain", "--out", str(tmp_path / "run")]
    metrics = tmp_path / "run" / METRICS
    run = started(command, tmp_path)
    try:
        await steps_of(metrics, 2)
        for shift in JUMPS:
            clock.set(shift)
            await steps_of(metrics, 2)
            await asyncio.sleep(2)  # leases are renewed, and could end
        await freeze([run.pid])
        await steps_of(metrics, 5)
        run.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(run.wait, 60) == 130, (tmp_path / "out").read_text()
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
        agent = service.start_agent(runs=2)
        await service.agent_works()
        endless = recipe(MOCK, train__steps=100_000, **SHORT)
        runs = [await service.submit(endless) for _ in range(2)]
        for run in runs:
            await service.steps(run, 2)
        for shift in JUMPS:
            clock.set(shift)
            await asyncio.sleep(7)  # past the next look of the agent, and the next renewal
            await runs_are_undisturbed(service, runs)
        await freeze([agent.pid, service.index_process().pid])
        await asyncio.sleep(7)
        await runs_are_undisturbed(service, runs)
        for run in runs:
            await service.registry.ask(run, "stop")
        for run in runs:
            assert (await service.ended(run)).state == "stopped"


def test_the_shift_reaches_the_processes(clock: ShiftedClock) -> None:
    """Otherwise the tests above see nothing."""
    clock.set(7200)
    told = subprocess.run(["date", "+%s"], env=os.environ, capture_output=True, text=True, check=True).stdout
    now = subprocess.run(["date", "+%s"], env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, check=True)
    assert 7190 < int(told) - int(now.stdout) < 7210
