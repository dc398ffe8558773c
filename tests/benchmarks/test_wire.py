"""The wire benchmark reads what it says it reads, and still runs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.flow.wire import CASES, SMALL, Case, fill, main, schema
from pipeline.data.arena import Arena
from pipeline.data.blocks import BlockReader


def test_the_cases_lie_in_the_arena_as_their_names_say(tmp_path: Path) -> None:
    cases = [case for case in CASES if case.name != "a'"]
    placed = fill(tmp_path / "arena", cases)
    arena = Arena(tmp_path / "arena")
    for one in placed:
        reader = BlockReader(arena.slice(0, arena.nbytes), schema())
        found = reader.read(one.blocks, one.offsets, one.slots, one.case.columns)
        tokens = [len(packed.values) for packed in found.values()]
        assert len(set(tokens)) == 1
        assert (
            tokens[0] == one.case.rows * one.case.tokens
            or 16 * one.case.rows <= tokens[0] <= 240 * one.case.rows
        )
        assert len(np.unique(one.blocks)) == one.case.blocks
        assert bool((np.diff(one.slots) == 1).all()) == (not one.case.shuffled)


def test_the_smoke_run_compares_reads_with_the_raw_socket(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["--smoke", "--json", str(tmp_path / "wire.json")])
    report = json.loads((tmp_path / "wire.json").read_text())
    assert [case["case"] for case in report["cases"]] == ["a", "a*", "c'", "c*"]
    for case in report["cases"]:
        named: Case = next(c for c in CASES if c.name == case["case"])
        assert case["ratio"] == pytest.approx(case["raw_seconds"] / case["read_seconds"])
        assert case["ratio"] > 0
        if named.tokens:
            assert case["nbytes"] == 32 * named.rows * named.tokens
        else:
            assert case["nbytes"] > 32 * 16 * SMALL.rows
    assert [calls["connections"] for calls in report["calls"]] == [1, 2, 4, 8]
    assert all(calls["alone"] > 0 and calls["beside_large"] > 0 for calls in report["calls"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:5]] == ["a", "a*", "c'", "c*"]
