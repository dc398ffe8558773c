"""What a run writes is its user's alone: files, shared memory and sockets, while it runs and
afterwards."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.data.arena import shared_memory_directory
from tests.api.served import environment
from tests.orchestration.runs import MOCK

# As another user: prints which of the paths on standard input it can list, read or connect to.
READ = """
import json, os, socket, sys
os.setgroups([]), os.setgid(65534), os.setuid(65534)
read = []
for path in json.load(sys.stdin):
    try:
        if os.path.isdir(path):
            os.listdir(path)
        elif path.endswith((".sock", "policies", "line")):
            socket.socket(socket.AF_UNIX).connect(path)
        else:
            open(path, "rb").close()
    except FileNotFoundError:
        continue
    except OSError:
        continue
    read.append(path)
print(json.dumps(read))
"""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that others may enter, unlike those of pytest."""
    folder = Path(tempfile.mkdtemp(prefix="readers-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def started(folder: Path, *options: str, **changes: object) -> subprocess.Popen[str]:
    data = {**MOCK, "name": "readers", "launch": {"startup_timeout": 120.0, **changes}}
    data["train"] = {**MOCK["train"], "steps": 40}
    data["checkpoint"] = {"every": 2}
    (folder / "recipe.json").write_text(json.dumps(data))
    command = [
        sys.executable,
        "-P",
        "-m",
        "tests.command",
        "run",
        str(folder / "recipe.json"),
        "--plain",
        *options,
    ]
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        umask=0o022,
    )


def read_by_nobody(*folders: Path) -> list[str]:
    paths = [str(path) for folder in folders for path in (folder, *folder.rglob("*"))]
    assert len(paths) > len(folders), folders
    done = subprocess.run(
        [sys.executable, "-c", READ],
        input=json.dumps(paths),
        capture_output=True,
        text=True,
        check=True,
    )
    found: list[str] = json.loads(done.stdout)
    return found


def owned(process: subprocess.Popen[str]) -> list[Path]:
    """What the run has in memory and for its sockets."""
    places = {shared_memory_directory(), Path(tempfile.gettempdir())}
    return [path for place in places for path in place.glob(f"asyncdock-{process.pid}-*")]


def finish(process: subprocess.Popen[str]) -> None:
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 0, output


def until_saved(process: subprocess.Popen[str], runs: Path) -> Path:
    """Wait until the run has a checkpoint; return its folder."""
    deadline = time.monotonic() + 120
    while not (found := [*runs.glob("**/checkpoints/step-*/run.json")]):
        assert process.poll() is None, process.stdout and process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found[0].parents[2]


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's rights need root to be tried")
def test_another_user_reads_nothing_of_a_run(open_folder: Path) -> None:
    process = started(open_folder)
    try:
        run = until_saved(process, open_folder / "runs")
        live = owned(process)
        assert len(live) >= 2, "memory, and the index's socket"
        assert read_by_nobody(run, *live) == []
        finish(process)
    finally:
        process.kill()
    assert stat.S_IMODE(run.stat().st_mode) == 0o700
    run.parent.chmod(0o755), run.chmod(0o755)  # the files themselves
    names = {path.name for path in run.iterdir()}
    assert {"metrics.jsonl", "summary.json", "logs", "samples", "begun-in"} <= names
    assert read_by_nobody(run) == [str(run)]


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's rights need root to be tried")
def test_a_folder_that_is_there_keeps_its_mode_and_its_files_are_private(open_folder: Path) -> None:
    out = open_folder / "out"
    out.mkdir(mode=0o755)
    process = started(open_folder, "--out", str(out), "--set", "train.steps=3")
    try:
        finish(process)
    finally:
        process.kill()
    assert stat.S_IMODE(out.stat().st_mode) == 0o755
    assert read_by_nobody(out) == [str(out)]


def test_a_group_reads_a_run_that_says_so(open_folder: Path) -> None:
    process = started(open_folder, "--set", "train.steps=3", readers="group")
    try:
        finish(process)
    finally:
        process.kill()
    (run,) = (open_folder / "runs").iterdir()
    assert stat.S_IMODE(run.stat().st_mode) == 0o750
    modes = {
        path.relative_to(run).as_posix(): stat.S_IMODE(path.stat().st_mode)
        for path in run.rglob("*")
    }
    assert modes["recipe.json"] == 0o600
    assert modes["index"] == 0o700
    shared = [name for name in modes if name != "recipe.json" and not name.startswith("index")]
    assert [name for name in modes if modes[name] & 0o007] == []
    assert {
        name: oct(modes[name])
        for name in shared
        if not modes[name] & 0o040 and name.startswith("checkpoints")
    } == {}
