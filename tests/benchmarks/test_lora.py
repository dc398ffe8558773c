"""The benchmark of adapters runs, and its two decoders compute the same."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.training import lora


def test_it_prints_ratios_of_both_kinds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "lora.json"
    arguments = [
        "lora.py",
        "--model",
        "tiny",
        "--rank",
        "4",
        "--repeats",
        "1",
        "--threads",
        "1",
        "--json",
        str(file),
    ]
    monkeypatch.setattr(sys, "argv", arguments)
    lora.main()
    found = json.loads(file.read_text())
    printed = capsys.readouterr().out
    assert "published: 0.0 MiB of 0.3 MiB, 10.61%" in printed
    assert 0 < found["swap"]["logit_gap"] < 1e-4
    assert found["decode"].keys() == {"1", "8", "64"}
    memory = found["memory"]
    assert memory["unmerged"]["between"] < memory["merged"]["between"] < memory["merged"]["swap"]
    new = memory["unmerged"]["swap"] - memory["unmerged"]["between"]
    assert found["published"] < new < 1.5 * found["published"], (
        "B of joined layers has zeros beside its blocks"
    )
    assert "MiB | " in printed.partition("memory during a swap")[2]
    assert 0 < found["bfloat16"]["kept"] < 1
    assert found["bfloat16"]["unmerged"] < found["bfloat16"]["merged"]
    assert all(of["ratio"] > 0 for of in (found["train"], found["swap"], *found["decode"].values()))
