"""The benchmark of weights to many nodes runs, and the chain does what it is for: counts, no seconds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import weights_to_nodes
from tests.compose.sandbox import missing


def test_the_trainer_sends_once_and_a_node_has_one_copy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if why := missing("tc"):
        pytest.skip(why)
    file = tmp_path / "found.json"
    arguments = ["--only", "nodes", "--nodes", "3", "--engines", "2", "--size", "4MiB", "--mbit", "400"]
    if weights_to_nodes.main([*arguments, "--json", str(file)]) == 2:
        pytest.skip(capsys.readouterr().err)
    found = {cell["arm"]: cell for cell in json.loads(file.read_text())["nodes"]}
    assert found["direct"]["sent"] > 6.0, "two engines on three nodes"
    assert 1.0 < found["chain"]["sent"] < 1.5
    assert found["chain"]["held"] == pytest.approx(1.0, abs=0.01)
    assert found["killed"]["sent"] < 3.0


def test_a_small_step_leaves_most_numbers_of_bfloat16_as_they_are() -> None:
    weights = 0.05 * torch.randn(20_000, generator=torch.Generator().manual_seed(0))
    shares = [weights_to_nodes.equal_share(weights, rate, steps=2) for rate in (1e-6, 1e-4, 1e-2)]
    assert shares[0] > 0.98 > shares[1] > 0.5 > shares[2]
