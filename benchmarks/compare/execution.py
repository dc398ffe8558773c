"""A benchmark in a process of its own, by the files of this tree or of another one."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, read_result


class BenchmarkFailed(Exception):
    """It ended with another exit code than 0, or wrote no result."""


def result_of(name: str, options: Sequence[str], tree: Path = ROOT) -> Any:
    """Return what the benchmark ``name`` of ``tree`` writes with ``options``.

    Raises :class:`BenchmarkFailed` with the exit code and the last line of its errors.
    """
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        file = Path(folder) / "result.json"
        done = started(name, [*options, "--json", str(file)], tree)
        result = read_result(file)
        if done.returncode or result is None:
            last = done.stderr.strip().splitlines()[-1:] or ["no output"]
            raise BenchmarkFailed(f"exit code {done.returncode}: {last[0]}")
        return result


def takes_json(name: str, tree: Path) -> bool:
    """Whether the benchmark ``name`` of ``tree`` has the option ``--json``, by its help."""
    return "--json" in started(name, ["--help"], tree).stdout


def started(name: str, arguments: Sequence[str], tree: Path) -> subprocess.CompletedProcess[str]:
    """Run the benchmark with the packages of ``tree``. Its processes import them too, because
    ``PYTHONPATH`` comes before installed packages."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
    paths = [str(tree), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    return subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *arguments],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
    )
