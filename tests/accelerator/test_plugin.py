"""A plugin of torch that cannot be loaded, as torch_npu where CANN's set_env.sh is not sourced:
torch cannot be imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def broken(tmp_path: Path) -> dict[str, str]:
    """An environment with such a plugin."""
    (tmp_path / "torch_npu.py").write_text(
        "raise ImportError('libhccl.so: cannot open shared object file')"
    )
    record = tmp_path / "torch_npu-2.13.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.13.0\n")
    (record / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}


def asyncdock(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "api.cli.main", *arguments]
    return subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("command", ["check", "run"])
def test_a_recipe_for_a_cpu_is_refused_with_what_to_source(
    command: str, broken: dict[str, str], tmp_path: Path
) -> None:
    out = ("--out", str(tmp_path / "run")) if command == "run" else ()
    done = asyncdock(
        broken, command, "tiny", "--set", "rollout.device=cpu", "--set", "train.device=cpu", *out
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "1 problem" in done.stderr
    assert (
        "torch: cannot be imported: its plugin torch_npu fails (ImportError: libhccl.so: cannot "
        "open" in done.stderr
    )
    assert "source the set_env.sh of CANN" in done.stderr
    assert not (tmp_path / "run").exists()


def test_any_other_command_that_imports_torch_says_it_too(broken: dict[str, str]) -> None:
    done = asyncdock(broken, "plan", "reshard", "tiny")
    assert done.returncode == 1
    assert (
        "Cause: libhccl.so: cannot open shared object file; source the set_env.sh of CANN"
        in done.stderr
    )


def test_without_the_plugin_a_recipe_for_a_cpu_is_sound(broken: dict[str, str]) -> None:
    done = asyncdock(broken | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, "check", "tiny")
    assert done.returncode == 0, done.stderr
