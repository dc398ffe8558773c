"""Tests with verifiers, which wants an older openai than the other tests have: in an environment of
their own."""

from __future__ import annotations

import os
import subprocess
import sysconfig
from pathlib import Path

import pytest

from tests import environments

PINNED = "verifiers==0.4.0"
ROOT = Path(__file__).parents[3]
TESTS = (
    "tests/stages/trajectories/test_verifiers.py",
    "tests/orchestration/run/test_verifiers.py",
)
# Also the processes that the tests start find the packages of the tests last.
START = "import sys; sys.path.append({!r})"


@pytest.mark.timeout(1200)
def test_tasksets_of_verifiers_own_source_are_played(tmp_path: Path) -> None:
    environment = environments.environment("verifiers-0.4.0", (PINNED,))
    source = environments.source("verifiers-source-0.4.0", environment, PINNED)
    packages = sysconfig.get_path("purelib")
    (tmp_path / "sitecustomize.py").write_text(START.format(packages))
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    settings = {**os.environ, "PYTHONPATH": path, "VERIFIERS": str(source)}
    options = (*TESTS, "-v", "-p", "no:cacheprovider", "-p", "no:xdist")
    with environments.running(
        environment, "module", "pytest", options, cwd=ROOT, env=settings, stderr=subprocess.STDOUT
    ) as process:
        printed, _ = process.communicate(timeout=900)
    assert process.returncode == 0, printed
    assert "skipped" not in printed.splitlines()[-1], printed
