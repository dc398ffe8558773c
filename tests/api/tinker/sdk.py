"""Tinker's SDKs, each in an environment of its own, as pip installs it; made once, in the cache of
the user.

    CACHE/tinker-sdk      a virtual environment with the newest SDK and what it needs
    CACHE/tinker-0.25.0   an older SDK alone: what the SDKs need is the same
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from platformdirs.unix import Unix

from pipeline.locks import locked

NEWEST = "0.38.0"
VERSIONS = ("0.25.0", "0.30.4", "0.34.0", NEWEST)
CACHE = Unix("asyncdock").user_cache_path / "tests"
SECONDS = 900.0  # for an installation
PROGRAM_SECONDS = 300.0
# The losses of a program's own need a torch: that of this environment, last on the path.
WITH_TORCH = """
import runpy, sys
sys.path.append(sys.argv[1])
del sys.argv[:2]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
READY = "ready"  # a file in what is complete


@contextmanager
def running(
    version: str, script: Path, url: str, key: str, *arguments: str
) -> Iterator[subprocess.Popen[str]]:
    """Yield the process of ``script`` with the SDK ``version``, a client of the server at ``url``.
    Skips the test where the SDK cannot be installed."""
    environment = _environment()
    own = {} if version == NEWEST else {"PYTHONPATH": str(_older(version, environment))}
    user = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    settings = {
        "TINKER_BASE_URL": url,
        "TINKER_API_KEY": key,
        "NO_PROXY": "127.0.0.1,localhost",
        "HF_HUB_OFFLINE": "1",
    }
    python = [str(environment / "bin" / "python"), "-W", "ignore", "-c", WITH_TORCH]
    process = subprocess.Popen(
        [*python, sysconfig.get_path("purelib"), str(script), *arguments],
        env=user | settings | own,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def program(version: str, script: Path, url: str, key: str, *arguments: str) -> str:
    """Return what ``script`` has printed on standard output when it has ended without an error."""
    with running(version, script, url, key, *arguments) as process:
        output, errors = process.communicate(timeout=PROGRAM_SECONDS)
        assert process.returncode == 0, errors
    return output


def _environment() -> Path:
    folder = CACHE / "tinker-sdk"
    if not (folder / READY).exists():
        with locked(_lock(folder), wait=SECONDS):
            if not (folder / READY).exists():
                shutil.rmtree(folder, ignore_errors=True)
                venv.create(folder, symlinks=True, with_pip=True)
                _install(folder, f"tinker=={NEWEST}")
                (folder / READY).touch()
    return folder


def _older(version: str, environment: Path) -> Path:
    folder = CACHE / f"tinker-{version}"
    if not (folder / READY).exists():
        with locked(_lock(folder), wait=SECONDS):
            if not (folder / READY).exists():
                shutil.rmtree(folder, ignore_errors=True)
                _install(environment, "--no-deps", "--target", str(folder), f"tinker=={version}")
                (folder / READY).touch()
    return folder


def _lock(folder: Path) -> Path:
    folder.parent.mkdir(parents=True, exist_ok=True)
    return folder.with_name(f"{folder.name}.lock")


def _install(environment: Path, *arguments: str) -> None:
    command = [str(environment / "bin" / "python"), "-m", "pip", "install", "--quiet", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["?"])[-1]
        pytest.skip(f"tinker cannot be installed from the package index: {reason}")
