"""``test_verifiers.py``, run with verifiers, which wants an older openai than the other tests."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests import environments

PINNED = "verifiers==0.4.0"
ROOT = Path(__file__).parents[3]
TESTS = "tests/stages/trajectories/test_verifiers.py"


@pytest.mark.timeout(1200)
def test_tasksets_of_verifiers_own_source_are_played() -> None:
    environment = environments.environment("verifiers-0.4.0", (PINNED,))
    source = environments.source("verifiers-source-0.4.0", environment, PINNED)
    settings = {**os.environ, "PYTHONPATH": str(ROOT), "VERIFIERS": str(source)}
    options = (TESTS, "-v", "-p", "no:cacheprovider", "-p", "no:xdist")
    with environments.running(
        environment, "module", "pytest", options, cwd=ROOT, env=settings, stderr=subprocess.STDOUT
    ) as process:
        printed, _ = process.communicate(timeout=900)
    assert process.returncode == 0, printed
    assert "skipped" not in printed.splitlines()[-1], printed
