"""What the dispatch benchmarks say holds: Eq. 2 gives Table 1, and every byte that is counted really crossed the wire."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import dispatch_volume
from benchmarks.dispatch_volume import STEPS, TABLE_1, Batch, transfer_volume


def test_equation_2_gives_every_figure_of_table_1() -> None:
    """The paper prints 15.25 as 15.2, 3973 as 3.9K and 31622 as 31K: cut, not rounded, so a cut digit is allowed for."""
    for row in TABLE_1:
        for computed, printed in zip(row.computed, (row.gb, row.slow, row.fast), strict=True):
            assert computed == pytest.approx(printed, rel=0.021), row
    assert transfer_volume(1, 1, 1, 0, 0, 0) == 8, "a prompt of one element is put once and got once"


def test_the_iteration_makes_the_moves_that_the_equation_counts() -> None:
    batch = Batch(groups=2, samples=3, prompt=5, response=7)
    gets = [name for step in STEPS for name in step.gets]
    puts = [name for step in STEPS for name in step.puts]
    assert sorted(puts) == sorted(set(puts)), "each column is put once"
    assert (gets.count("prompt_ids"), sum(name in dispatch_volume.LONG for name in gets)) == (1, 2 * 5)
    integers = sum(name in dispatch_volume.INTEGERS for name in (*gets, *puts))
    missing = (8 * 3 - integers) * batch.rows * 4
    assert sum(batch.counted(step) for step in STEPS) == batch.equation - missing


def test_measured_bytes_are_the_counted_ones_and_the_dock_needs_fewer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dispatch_volume.main(["--groups", "3", "--prompt", "64", "--response", "96", "--json", str(tmp_path / "told.json")])
    told = json.loads((tmp_path / "told.json").read_text())["iteration"]
    central, dock, ragged = (told["arms"][arm] for arm in ("central", "dock", "dock, ragged"))
    for moved in central:
        counted = told["counted_bytes"][moved["step"]]
        assert counted <= moved["got"] + moved["put"] <= counted + 64 * 3, "at most a gap between columns of a put"
    assert all(moved["put"] == 0 for moved in dock), "what is written stays on its node"
    total = {name: sum(m["got"] for m in arm) for name, arm in (("dock", dock), ("ragged", ragged))}
    assert total["ragged"] < total["dock"] < 0.3 * told["equation_bytes"]
    printed = capsys.readouterr().out
    assert f"{told['equation_bytes']:,}" in printed
    assert "31,622" in printed
