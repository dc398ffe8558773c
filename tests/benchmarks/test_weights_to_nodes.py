"""The benchmark of weights to many nodes runs, and the chain does what it is for: counts, no
seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.training import weights_to_nodes
from tests.compose.sandbox import missing

ROOT = Path(__file__).resolve().parents[2]


def test_the_trainer_sends_once_and_a_node_has_one_copy(tmp_path: Path) -> None:
    if why := missing("tc"):
        pytest.skip(why)
    file = tmp_path / "found.json"
    arguments = [
        "--only",
        "nodes",
        "--nodes",
        "3",
        "--engines",
        "2",
        "--size",
        "4MiB",
        "--mbit",
        "400",
    ]
    # In a process of its own: the benchmark forks, and this one may have threads of OpenMP.
    command = [
        sys.executable,
        "-m",
        "benchmarks.training.weights_to_nodes",
        *arguments,
        "--json",
        str(file),
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        timeout=120,
    )
    if done.returncode == 2:
        pytest.skip(done.stderr.decode())
    assert done.returncode == 0, done.stderr.decode()
    found = {cell["arm"]: cell for cell in json.loads(file.read_text())["nodes"]}
    assert found["direct"]["sent"] > 6.0, "two engines on three nodes"
    assert 1.0 < found["chain"]["sent"] < 1.5
    assert found["chain"]["held"] == pytest.approx(1.0, abs=0.01)
    assert found["killed"]["sent"] < 3.0
    assert found["changes"]["sent"] < 0.1 * found["chain"]["sent"]


def test_a_small_step_leaves_most_numbers_of_bfloat16_as_they_are() -> None:
    weights = 0.05 * torch.randn(20_000, generator=torch.Generator().manual_seed(0))
    steps = [weights_to_nodes.after_step(weights, rate, steps=2) for rate in (1e-6, 1e-4, 1e-2)]
    shares = [float((old.view("<u2") == new.view("<u2")).mean()) for old, new in steps]
    assert shares[0] > 0.98 > shares[1] > 0.5 > shares[2]
