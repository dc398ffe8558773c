"""Environments of processes that run code of others: without secrets of ours, or with listed
variables alone.

A process shows its environment in two places: `os.environ`, and what it was started with, in
/proc/PID/environ, where changes do not show. So processes that run such code are forked by a server
that was started with a clean one, and a worker overwrites what it was started with.
"""

from __future__ import annotations

import ctypes
import os
import re
import site
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

ROOT = str(Path(__file__).parents[2])  # the folder that has these packages
OURS = "ASYNCDOCK_"
SECRET = re.compile(r"ASYNCDOCK_([A-Z_]+_)?(INDEX|KEY|LEASE|PASSWORD|SECRET|TOKEN)")
# What programs need to run at all, and what says how much of the machine they may use. No
# credentials are among them.
HARMLESS = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|TERM|TZ|TMPDIR|PWD|LANG|LANGUAGE|LC_[A-Z]+"
    r"|PYTHON[A-Z]+|VIRTUAL_ENV|CONDA_PREFIX|LD_LIBRARY_PATH"
    r"|(OMP|GOMP|KMP|MKL|OPENBLAS|NUMEXPR|VECLIB|ONEDNN|DNNL)_[A-Z_]+|MALLOC_[A-Z_]+"
    r"|LRU_CACHE_CAPACITY|TOKENIZERS_PARALLELISM|(HF|TRANSFORMERS|HF_HUB|HF_DATASETS)_OFFLINE"
    r"|CUDA_VISIBLE_DEVICES|CUBLAS_WORKSPACE_CONFIG|ASCEND_[A-Z_]+_(VISIBLE_DEVICES|HOME|PATH)"
    r"|TORCH_DEVICE_BACKEND_AUTOLOAD"
)


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Return ``environment`` without passwords and tokens of ours."""
    return {name: value for name, value in environment.items() if not SECRET.fullmatch(name)}


def importable(environment: Mapping[str, str]) -> dict[str, str]:
    """Return ``environment``, in which a new interpreter finds these packages.

    It does not look into its current folder (-P), where alone this one may have found them:
    ``python -m benchmarks.gpu.check`` in a checkout that is not installed.
    """
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    found_here = ROOT in map(os.path.abspath, sys.path)  # of "", the current folder
    if not found_here or ROOT in [*paths, *site.getsitepackages(), site.getusersitepackages()]:
        return dict(environment)
    return {**environment, "PYTHONPATH": os.pathsep.join([*paths, ROOT])}


def of_user_code(environment: Mapping[str, str], names: Collection[str] | None) -> dict[str, str]:
    """Return what a user's code sees of ``environment``: all but our variables; or, with ``names``,
    those and what is harmless."""
    others = {name: value for name, value in environment.items() if not name.startswith(OURS)}
    if names is None:
        return others
    return {
        name: value for name, value in others.items() if name in names or HARMLESS.fullmatch(name)
    }


def take(name: str) -> str:
    """Return the value of a variable, which this process then shows nowhere. Raises KeyError."""
    value = os.environ[name]
    show({other: other_value for other, other_value in os.environ.items() if other != name})
    return value


def show(environment: Mapping[str, str]) -> None:
    """Let ``environment`` be all that this process shows of its environment."""
    os.environ.clear()
    # copies: nothing refers to what the process was started with any more
    os.environ.update(environment)
    if sys.platform == "linux":
        with open("/proc/self/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        begin = int(fields[47])
        end = int(fields[48])  # the 50th and 51st of all
        ctypes.memset(begin, 0, end - begin)
