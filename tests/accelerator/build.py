"""The emulated device: built once for a version of its source, torch and Python, and how processes
get it.

python -m tests.accelerator.build      builds it, and prints the variables of an environment that has it
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import platformdirs
import torch
from torch.utils import cpp_extension

ROOT = Path(__file__).resolve().parents[2]
EMULATED = Path(__file__).with_name("emulated")
SOURCE = EMULATED / "torch_npu" / "device.cpp"


def missing() -> str:
    """What a build needs that is not here, or ""."""
    if shutil.which(cpp_extension.get_cxx_compiler()) is None:
        return f"a C++ compiler ({cpp_extension.get_cxx_compiler()})"
    return "" if cpp_extension.is_ninja_available() else "ninja (of the extra dev)"


def library() -> Path:
    """The compiled device.

    The first call on a machine takes about half a minute; others wait for it.
    """
    built_from = SOURCE.read_bytes() + f"{torch.__version__} {sys.version}".encode()
    folder = platformdirs.user_cache_path("asyncdock") / "tests" / "emulated-npu"
    folder.mkdir(parents=True, exist_ok=True)
    built = folder / f"device-{hashlib.sha256(built_from).hexdigest()[:16]}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            # In a process of its own: torch loads what it has built.
            subprocess.run([sys.executable, "-m", __spec__.name, str(built)], cwd=ROOT, check=True)
    return built


def build(target: Path) -> None:
    flags = {"extra_cflags": ["-O1", "-w"], "with_cuda": False, "is_python_module": False}
    with tempfile.TemporaryDirectory(dir=target.parent) as home:
        cpp_extension.load("emulated_npu", [str(SOURCE)], build_directory=home, **flags)
        os.replace(Path(home, "emulated_npu.so"), target)


def environment(version: str = "2.13") -> dict[str, str]:
    """Variables of processes that have the device, as torch_npu ``version`` brings it."""
    return {
        "EMULATED_NPU": version,
        "EMULATED_NPU_LIBRARY": str(library()),
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # one kernel of torch is replaced
        "PYTHONPATH": os.pathsep.join([str(EMULATED), str(ROOT)]),
    }


if __name__ == "__main__":
    if sys.argv[1:]:
        build(Path(sys.argv[1]))
    else:
        print(*(f"{name}={value}" for name, value in environment().items()), sep="\n")
