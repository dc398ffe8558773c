"""Device names of recipes, checked without importing torch.

The checks look at the installed build of torch and the driver's device files;
:func:`stages.device.select` asks torch.
"""

from __future__ import annotations

import difflib
import functools
import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

KINDS = ("auto", "cpu", "cuda", "npu", "xpu", "mps", "hpu", "mlu", "musa", "mtia", "privateuseone")
PATTERN = rf"^(auto|({'|'.join(kind for kind in KINDS if kind != 'auto')})(:[0-9]{{1,4}})?)$"
EXAMPLES = ["auto", "cpu", "cuda", "cuda:1", "npu:0"]
# what torch calls them
OTHERWISE = {"gpu": "cuda", "nvidia": "cuda", "rocm": "cuda", "ascend": "npu", "metal": "mps"}
# The driver's files of each device of a kind, on Linux; what another system, or another kind, has
# is left to torch.
FILES = {"cuda": ("nvidia[0-9]*",), "npu": ("davinci[0-9]*",), "xpu": ("dri/renderD*",)}
ANY = {"cuda": ("dxg", "kfd")}  # of all devices together: in WSL, and of ROCm
VISIBLE = {
    "cuda": ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
    "npu": ("ASCEND_RT_VISIBLE_DEVICES",),
}
RESOURCES = {"cuda": "GPU", "npu": "NPU"}  # Ray's names of devices, by torch's
PLUGIN_FAILED = "Failed to load the backend extension"  # torch's words
SOURCE_CANN = (
    "source the set_env.sh of CANN (/usr/local/Ascend/ascend-toolkit/set_env.sh, or where CANN "
    "is), or, to run without NPUs, set TORCH_DEVICE_BACKEND_AUTOLOAD=0 in the environment"
)


def device_fix(name: str) -> str:
    """Return the fix for ``name``, which is not the name of a device."""
    kind = name.partition(":")[0]
    close = (
        [OTHERWISE[kind]]
        if kind in OTHERWISE
        else difflib.get_close_matches(kind, KINDS, n=1, cutoff=0.7)
    )
    meant = f"did you mean {close[0]!r}? " if close else ""
    return f"{meant}use one of: {', '.join(KINDS)}; or cuda:1, to choose among several"


def device_fault(name: str, devices: Path = Path("/dev")) -> tuple[str, str] | None:
    """Return what is wrong with the device ``name`` on this machine and the fix, or None."""
    kind, _, number = name.partition(":")
    if not re.match(PATTERN, name):
        return "is not the name of a device", device_fix(name)
    if kind in ("auto", "cpu") or not sys.platform.startswith("linux"):
        return None
    here = "set 'auto', which takes the accelerator that is here, or 'cpu'"
    if kind == "mps":
        return "is a device of macOS", here
    if kind in ("cuda", "xpu") and (build := _cpu_build()):
        return (
            f"cannot be used by the torch that is installed ({build}, a build for CPUs)",
            f"install another; or {here}",
        )
    if kind not in FILES:
        return None
    hidden = next(
        (variable for variable in VISIBLE.get(kind, ()) if os.environ.get(variable) in ("", "-1")),
        None,
    )
    if hidden:
        return f"is hidden by {hidden}", f"unset it; or {here}"
    if any((devices / file).exists() for file in ANY.get(kind, ())):
        return None
    count = sum(len(list(devices.glob(pattern))) for pattern in FILES[kind])
    if not count:
        return f"is not here: there is no /dev/{FILES[kind][0]}", f"install its driver; or {here}"
    if number.isdecimal() and int(number) >= count:
        return (
            f"is not here: there are {count}, counted from 0"
        ), f"use {kind}:0 to {kind}:{count - 1}"
    return None


@functools.cache
def plugin_fault() -> tuple[str, str] | None:
    """Return what is wrong with an installed plugin that torch imports at its own import, and the
    fix, or None. torch_npu is one; where it cannot be loaded, torch cannot either, and no run can
    begin, on a CPU neither."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and not getattr(torch.__spec__, "_initializing", False):
        return None  # it has been imported
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0" or not _plugins():
        return None
    done = subprocess.run([sys.executable, "-c", "import torch"], capture_output=True, text=True)
    if done.returncode == 0 or PLUGIN_FAILED not in done.stderr:
        return None
    lines = done.stderr.splitlines()
    reason = next(
        (line for line in lines if re.match(r"(ImportError|OSError|RuntimeError): ", line)),
        lines[-1],
    )
    return f"cannot be imported: its plugin {', '.join(_plugins())} fails ({reason})", SOURCE_CANN


def _plugins() -> list[str]:
    return sorted(
        {plugin.name for plugin in importlib.metadata.entry_points(group="torch.backends")}
    )


def visible_devices(kind: str, devices: Path = Path("/dev")) -> list[str]:
    """Return the devices of ``kind`` that a process started here would see, as the variable that
    hides others names them; none where their number is not known without the driver."""
    if not sys.platform.startswith("linux") or (kind == "cuda" and _cpu_build()):
        return []
    for variable in VISIBLE[kind]:
        if (named := os.environ.get(variable)) is not None:
            return [name.strip() for name in named.split(",") if name.strip() not in ("", "-1")]
    return [
        str(number)
        for number in range(sum(len(list(devices.glob(pattern))) for pattern in FILES[kind]))
    ]


def _cpu_build() -> str:
    """Return the version of an installed torch that was built without devices, or ""."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""
    return f"torch {version}" if re.search(r"\+cpu", version) else ""
