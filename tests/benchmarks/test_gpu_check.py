"""The check for machines with an accelerator runs where there is none, and says what that means."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_check import Figure, line, main


def test_on_a_cpu_the_smoke_run_passes_and_disowns_its_speeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert main(["--device", "cpu", "--smoke", "--repeat", "1", "--json", str(tmp_path / "check.json")]) == 0
    finally:
        torch.set_num_threads(before)
    figures = [Figure(**figure) for figure in json.loads((tmp_path / "check.json").read_text())["figures"]]
    limited = [figure for figure in figures if figure.limit is not None]
    assert len(limited) == 9
    assert all(figure.value <= 1e-4 for figure in limited), "the CPU agrees with itself far closer than another device"
    lines = capsys.readouterr().out.splitlines()[1:]
    for figure, told in zip(figures, lines, strict=True):
        assert told.endswith("(no meaning on a CPU)") == figure.timed
    timed = (
        "rollout",
        "update",
        "swap, exposed",
        "swap, rate",
        "matmul rate",
        "memory bandwidth",
        "turn, to host memory",
    )
    for name in (*timed, "turn, back", "colocated: exposed", "colocated, prefetch: step"):
        assert any(figure.timed and figure.name.startswith(name) for figure in figures)


@pytest.mark.parametrize("value", [0.5, float("nan")])
def test_a_gap_past_its_limit_fails(value: float) -> None:
    figure = Figure("logprobs", value, "largest gap", limit=0.1, timed=False)
    assert figure.failed
    assert line(figure, torch.device("cpu")).endswith("FAILED")


def test_without_an_accelerator_the_full_check_says_what_runs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--device", "cpu"])
    assert "--device cpu --smoke" in capsys.readouterr().err
