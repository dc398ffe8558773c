"""Every benchmark starts as its page says: ``python -m benchmarks.NAME``, in the root of a clone, without PYTHONPATH."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.plain import ROOT

# Each in a fork of a process that has imported what all of them import, once.
EACH = """
import contextlib, importlib, io, json, os, runpy, sys

for name in sys.argv[1:]:
    with contextlib.suppress(Exception):  # raised again below
        importlib.import_module(f"benchmarks.{name}")
for name in sys.argv[1:]:
    if os.fork() == 0:
        sys.argv, output, code = [name, "--help"], io.StringIO(), 0
        try:
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)
        except SystemExit as ended:
            code = ended.code or 0
        except BaseException as error:
            code = repr(error)
        print(json.dumps([name, code, output.getvalue()]), flush=True)
        os._exit(0)
    os.wait()
"""
NAMES = [
    path.stem for path in sorted((ROOT / "benchmarks").glob("*.py")) if 'if __name__ == "__main__"' in path.read_text()
]


@pytest.fixture(scope="module")
def helps() -> dict[str, tuple[int | str, str]]:
    """Exit code, or the error, and output of each benchmark with ``--help``."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", EACH, *NAMES],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return {name: (code, output) for name, code, output in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_prints_its_help(name: str, helps: dict[str, tuple[int | str, str]]) -> None:
    code, output = helps[name]
    assert code == 0, output
    assert output.startswith("usage: "), output


def test_a_benchmark_starts_as_a_module(tmp_path: Path) -> None:
    """One that imports another, by the command itself."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-m", "benchmarks.planner_scale", "--help"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ")
