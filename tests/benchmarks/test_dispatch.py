"""What the dispatch benchmarks say holds: Eq. 2 gives Table 1, every byte that is counted was
really moved, and the hosts that they make are gone afterwards, however they end."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.flow import scale, volume
from benchmarks.flow.scale import Cell, Infeasible, Network, Work, summary, warehouse_volume
from benchmarks.flow.volume import STEPS, TABLE_1, Batch, transfer_volume

ROOT = Path(__file__).resolve().parents[2]


def test_equation_2_gives_every_figure_of_table_1() -> None:
    """The paper prints 15.25 as 15.2, 3973 as 3.9K and 31622 as 31K: cut, not rounded, so a cut
    digit is allowed for."""
    for row in TABLE_1:
        for computed, printed in zip(row.computed, (row.gb, row.slow, row.fast), strict=True):
            assert computed == pytest.approx(printed, rel=0.021), row
    assert transfer_volume(1, 1, 1, 0, 0, 0) == 8, (
        "a prompt of one element is put once and got once"
    )


def test_the_iteration_makes_the_moves_that_the_equation_counts() -> None:
    batch = Batch(groups=2, samples=3, prompt=5, response=7)
    gets = [name for step in STEPS for name in step.gets]
    puts = [name for step in STEPS for name in step.puts]
    assert sorted(puts) == sorted(set(puts)), "each column is put once"
    assert (gets.count("prompt_ids"), sum(name in volume.LONG for name in gets)) == (
        1,
        2 * 5,
    )
    integers = sum(name in volume.INTEGERS for name in (*gets, *puts))
    missing = (8 * 3 - integers) * batch.rows * 4
    assert sum(batch.counted(step) for step in STEPS) == batch.equation - missing


def test_measured_bytes_are_the_counted_ones_and_the_dock_needs_fewer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    volume.main(
        [
            "--groups",
            "3",
            "--prompt",
            "64",
            "--response",
            "96",
            "--json",
            str(tmp_path / "result.json"),
        ]
    )
    result = json.loads((tmp_path / "result.json").read_text())["iteration"]
    central, dock, ragged = (result["arms"][arm] for arm in ("central", "dock", "dock, ragged"))
    for moved in central:
        counted = result["counted_bytes"][moved["step"]]
        assert counted <= moved["got"] + moved["put"] <= counted + 64 * 3, (
            "at most gaps, as columns begin at multiples of 64"
        )
    assert all(moved["put"] == 0 for moved in dock), "what is written stays on its node"
    total = {name: sum(m["got"] for m in arm) for name, arm in (("dock", dock), ("ragged", ragged))}
    assert total["ragged"] < total["dock"] < 0.3 * result["equation_bytes"]
    printed = capsys.readouterr().out
    assert f"{result['equation_bytes']:,}" in printed
    assert "31,622" in printed


# ── across hosts ──


@pytest.fixture
def hosts() -> Iterator[Network]:
    """Two hosts, where this machine lets us make them."""
    try:
        with Network(2, mbit=20) as network:
            yield network
    except Infeasible as missing:
        pytest.skip(str(missing))


def namespaces(process: int) -> list[str]:
    listed = subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, check=True
    ).stdout
    return [line for line in listed.splitlines() if line.startswith(f"{scale.PREFIX}-{process}-")]


def test_equation_4_is_equation_2_shared_among_warehouses() -> None:
    whole = transfer_volume(64, 8, 100, 3, 1000, 5)
    assert warehouse_volume(64 * 8, 100, 3, 1000, 8 * 5, warehouses=1) == whole
    assert warehouse_volume(64 * 8, 100, 3, 1000, 8 * 5, warehouses=4) == whole / 4
    work = Work()
    assert work.row_in + work.row_out == warehouse_volume(1, work.prompt, 2, work.response, 5, 1)


def test_linearity_is_taken_round_by_round_and_bytes_from_the_worst_warehouse() -> None:
    def cell(nodes: int, rate: float, moved: list[int]) -> Cell:
        return Cell("dock", nodes, rate, moved, [0] * nodes, 1000.0, 0.0, 0.1)

    # another program ran all this round
    slow = [cell(1, 5.0, [1000]), cell(4, 18.0, [1000, 1000, 1030, 990])]
    fast = [cell(1, 10.0, [1000]), cell(4, 38.0, [1000, 1010, 1000, 1000])]
    one, four = summary(Work(), [slow, fast, fast])
    assert (one["linearity"], one["within"]) == (1.0, True)
    assert four["linearities"] == [0.9, 0.95, 0.95]
    assert four["linearity"] == 0.95
    assert (four["within"], four["moved_bytes"]) == (False, [1000, 1000, 1030, 990])
    assert four["deviation"] == pytest.approx(0.03)


def test_without_root_or_tools_it_says_so_and_ends_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert scale.main(["--quick"]) == 2
    assert "need root" in capsys.readouterr().err
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    assert scale.main(["--quick"]) == 2
    assert "install iproute2" in capsys.readouterr().err


def test_hosts_are_taken_down_and_so_is_what_a_killed_run_has_left(hosts: Network) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    subprocess.run(["ip", "netns", "add", f"{scale.PREFIX}-{dead.pid}-host0"], check=True)
    assert namespaces(dead.pid)
    hosts.__exit__()
    with contextlib.suppress(RuntimeError), hosts:
        assert len(namespaces(os.getpid())) == 4, "two hosts, the index, the bridge"
        assert not namespaces(dead.pid)
        raise RuntimeError("of the run")
    assert not namespaces(os.getpid())


@pytest.mark.parametrize("on_ray", [False, True])
def test_a_quick_run_moves_what_equation_4_says(
    hosts: Network, tmp_path: Path, capsys: pytest.CaptureFixture[str], on_ray: bool
) -> None:
    hosts.__exit__()
    arms = ["dock", "central", "peers"][: 2 if on_ray else 3]
    command = [
        "--quick",
        "--json",
        str(tmp_path / "result.json"),
        "--arms",
        *arms,
        *(["--ray"] if on_ray else []),
    ]
    assert scale.main(command) == 0
    result = json.loads((tmp_path / "result.json").read_text())["summary"]
    assert [(row["arm"], row["nodes"]) for row in result] == [
        (arm, n) for arm in arms for n in (1, 2)
    ]
    assert all(row["within"] and row["linearity"] > 0 for row in result), result
    found = {(row["arm"], row["nodes"]): row for row in result}
    wire = {cell: sum(row["wire_bytes"]) for cell, row in found.items()}
    assert wire["dock", 1] == wire["central", 1] == 0, "one host moves nothing over its link"
    assert wire["central", 2] > 0.1 * found["central", 2]["equation_bytes"], (
        "the other host's samples at least went in"
    )
    assert "Eq. 4" in capsys.readouterr().out
    assert not namespaces(os.getpid())


def test_ctrl_c_takes_the_hosts_down(hosts: Network) -> None:
    hosts.__exit__()
    command = [
        sys.executable,
        "-m",
        "benchmarks.flow.scale",
        "--nodes",
        "2",
        "--batches",
        "4",
        "--repeats",
        "99",
    ]
    run = subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    try:
        assert run.stderr is not None
        assert run.stderr.readline().startswith("round 1"), "it is under way"
        assert namespaces(run.pid)
        run.send_signal(signal.SIGINT)
        errors = run.communicate(timeout=60)[1]
        assert (run.returncode, errors.splitlines()[-1]) == (
            130,
            "interrupted; the hosts are taken down",
        ), errors
        assert not namespaces(run.pid)
    finally:
        run.kill()
        run.wait()
