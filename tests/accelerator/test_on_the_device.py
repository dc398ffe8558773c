"""The tests of ``on_device``, and one whole run, in processes that have the emulated device.

It is no NPU: that these pass says that the code asks the right device in the right order, not that
a device was used.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.accelerator import build

pytestmark = pytest.mark.timeout(900)
INSIDE = Path(__file__).with_name("on_device")
FILES = sorted(path.stem for path in INSIDE.glob("test_*.py"))


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    if missing := build.missing():
        pytest.skip(f"the emulated device needs {missing}")
    return {**os.environ, **build.environment(), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def outcomes(
    environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[ElementTree.Element]]:
    """The tests of each file, with the allocator of torch_npu before 2.13, which torch.accelerator
    cannot ask."""
    report = tmp_path_factory.mktemp("on-device") / "report.xml"
    command = [
        sys.executable,
        "-m",
        "pytest",
        str(INSIDE),
        "-p",
        "no:cacheprovider",
        f"--junitxml={report}",
    ]
    done = subprocess.run(
        command,
        cwd=build.ROOT,
        env=environment | {"EMULATED_NPU": "2.10"},
        capture_output=True,
        text=True,
    )
    assert report.exists(), done.stdout + done.stderr
    cases: dict[str, list[ElementTree.Element]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        cases.setdefault(case.get("classname", "").rpartition(".")[2], []).append(case)
    return cases


@pytest.mark.parametrize("name", FILES)
def test_the_tests_of_a_file_pass_on_the_device(
    name: str, outcomes: dict[str, list[ElementTree.Element]]
) -> None:
    assert outcomes.get(name), f"{name} was not run: {sorted(outcomes)}"
    failed = [
        f"{case.get('name')}\n{problem.text}"
        for case in outcomes[name]
        for kind in ("failure", "error", "skipped")
        for problem in case.iter(kind)
    ]
    assert not failed, "\n\n".join(failed)


def test_a_run_computes_with_the_fused_operators(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """Two steps of bfloat16 ``tiny``, both engines on the device: how often each operator is called
    is a matter of the recipe alone."""
    calls = tmp_path / "calls"
    calls.mkdir()
    chosen = ("rollout.device=npu", "train.device=npu", "train.steps=2", "model.dtype=bfloat16")
    command = [sys.executable, "-m", "api.cli.main", "run", "tiny", "--out", str(tmp_path / "run")]
    done = subprocess.run(
        [*command, *(part for key in chosen for part in ("--set", key))],
        cwd=tmp_path,
        env=environment | {"EMULATED_NPU_CALLS": str(calls)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 2
    counted: Counter[str] = Counter()
    for path in calls.iterdir():
        counted.update(json.loads(path.read_text()))
    assert counted == {
        "npu_fusion_attention": 172,  # four of them where the decoder is compared at its start
        "npu_fusion_attention_grad": 72,
        "npu_rms_norm": 135,
        "npu_rms_norm_backward": 10,
        "npu_swiglu": 54,
        "npu_swiglu_backward": 4,
    }
