"""The benchmark of colocated runs measures real ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.runs.colocated import ARMS, SECONDS, Arm, main


def test_the_smoke_run_prints_what_each_arm_holds_and_waits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SECONDS, "0")  # put back at the end
    assert main(["--smoke", "--json", str(tmp_path / "arms.json")]) == 0
    separate, plain, prefetch = (
        Arm(**arm) for arm in json.loads((tmp_path / "arms.json").read_text())["rows"]
    )
    assert [arm.arm for arm in (separate, plain, prefetch)] == list(ARMS)
    assert {arm.steps for arm in (separate, plain, prefetch)} == {3}
    assert (separate.training, separate.released) == (0, 0)
    for arm in (plain, prefetch):
        assert arm.released >= arm.training, "all of it"
        assert 0 < arm.generating - arm.training / 3 < arm.training, (
            "the rollout's weights, and keys and values"
        )
        assert arm.exposed > 0
    assert prefetch.hidden > 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in ARMS)
