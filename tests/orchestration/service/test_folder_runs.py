"""Runs in folders, while their commands go on and after they have ended."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from orchestration.service.folder_runs import FolderRuns
from orchestration.state.paths import WHERE
from tests.forked import ROOT, asyncdock


def started(out: Path, log: Path, how: str = "run") -> subprocess.Popen[bytes]:
    """A run with its files in ``out``, once its index can be found there."""
    arguments = ["mock", "--set", "train.steps=1000", "--out"] if how == "run" else []
    command = [*asyncdock(), how, *arguments, str(out)]
    with log.open("w") as output:
        run = subprocess.Popen(
            [*command, "--plain"],
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
    while not (out / WHERE).exists():
        assert run.poll() is None, log.read_text()
        time.sleep(0.05)
    return run


async def test_a_run_that_ends_between_two_looks_is_read_on(index_url: str, tmp_path: Path) -> None:
    """Its own index has gone by then: what it has recorded is read from a copy of its file."""
    run = await asyncio.to_thread(started, tmp_path / "runs" / "mine", tmp_path / "log")
    folders = FolderRuns(index_url, [tmp_path / "runs"], tmp_path / "copies", timeout=3.0)
    try:
        assert (await folders.get("mine")).ended is None
        live = await folders.index("mine").event_ends()
        run.send_signal(signal.SIGINT)
        await asyncio.to_thread(run.wait, 60)
        folders.look_again()
        assert (await folders.get("mine")).state == "stopped"
        assert await folders.index("mine").event_ends() > live
        before = await folders.get("mine")
        assert before.ended is not None
        assert before.started is not None

        run = await asyncio.to_thread(
            started, tmp_path / "runs" / "mine", tmp_path / "log", "resume"
        )
        folders.look_again()
        again = await folders.get("mine")
        assert again.started is not None
        assert again.started > before.ended
        assert again.former_seconds == pytest.approx(before.ended - before.started)
    finally:
        try:
            run.send_signal(signal.SIGINT)  # a killed one would leave its shared memory
            await asyncio.to_thread(run.wait, 60)
        finally:
            run.kill()
            run.wait()
            await folders.close()
