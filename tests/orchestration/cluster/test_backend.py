"""A backend for another kind of cluster is one file and one row of CLUSTERS."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from orchestration.history.events_file import METRICS, read_metrics

ROOT = Path(__file__).resolve().parents[3]

# As if it stood in orchestration/cluster_backends.py: in every process of the run.
ROW = """
import re
from orchestration.cluster_backends import CLUSTERS, ClusterBackend
CLUSTERS["toy"] = ClusterBackend(
    title="Toy",
    hosts="toy_cluster:ToyHosts",
    extra="",
    address=re.compile("here"),
    address_fix="write 'here'",
)
"""

FILE = """
import asyncio
import os
import sys

from pipeline.index.client import INDEX_VARIABLE

HOST = "from orchestration.launch.hosts import main; main()"


class ToyHosts:
    '''One node, with room for all workers.'''

    def __init__(self, recipe, out):
        self._out = out
        self._host = None

    async def connect(self):
        return "127.0.0.1"

    def begin(self, index, join):
        self._index = index
        self._join = join

    async def host_of(self, worker):
        if self._host is None:
            command = [sys.executable, "-P", "-c", HOST]
            arguments = [self._index.run, str(self._out), "toy-0"]
            environment = {**os.environ, INDEX_VARIABLE: self._join}
            self._host = asyncio.create_subprocess_exec(*command, *arguments, env=environment)
            self._host = await self._host
        return "toy-0"

    def lost(self, host):
        return "" if self._host.returncode is None else "it has ended"

    def rescale(self, recipe):
        pass

    async def close(self):
        if self._host is not None and self._host.returncode is None:
            self._host.terminate()
            await self._host.wait()
"""


def asyncdock(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(folder), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-P", "-m", "api.cli.main", *arguments],
        env={**os.environ, "PYTHONPATH": path},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_a_run_has_its_workers_where_a_further_backend_places_them(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(ROW)
    (tmp_path / "toy_cluster.py").write_text(FILE)
    keys = ["train.steps=3", "launch.launcher=toy", "launch.address=here"]
    settings = [part for key in keys for part in ("--set", key)]
    run = asyncdock(tmp_path, "run", "mock", "--plain", "--out", "run", *settings)
    assert run.returncode == 0, run.stdout + run.stderr
    events = [event.data for event in read_metrics(tmp_path / "run" / METRICS)]
    hosts = {
        event["worker"]: event.get("host")
        for event in events
        if event.get("change") == "ready" and "worker" in event
    }
    assert hosts["update-0"] == hosts["rollout-0"] == "toy-0"
    assert not hosts["flow-0"]


def test_its_row_says_what_is_wrong_with_an_address(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(ROW)
    check = asyncdock(tmp_path, "check", "mock", *("--set", "launch.launcher=toy"))
    assert check.returncode == 2
    assert "launch.address = \"auto\": is no address of a Toy cluster; write 'here'" in check.stderr
