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
from pathlib import Path

import pytest
from platformdirs.unix import Unix

from pipeline.locks import locked

NEWEST = "0.38.0"
VERSIONS = ("0.25.0", "0.30.4", "0.34.0", NEWEST)
CACHE = Unix("asyncdock").user_cache_path / "tests"
SECONDS = 900.0  # for an installation
READY = "ready"  # a file in what is complete


def program(version: str, script: Path, url: str, key: str) -> subprocess.CompletedProcess[str]:
    """Run ``script`` with the SDK ``version`` against the server at ``url``. Skips the test where
    the SDK cannot be installed."""
    environment = _environment()
    own = {} if version == NEWEST else {"PYTHONPATH": str(_older(version, environment))}
    user = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    settings = {
        "TINKER_BASE_URL": url,
        "TINKER_API_KEY": key,
        "NO_PROXY": "127.0.0.1,localhost",
        "HF_HUB_OFFLINE": "1",
    }
    return subprocess.run(
        [environment / "bin" / "python", "-W", "ignore", script],
        env=user | settings | own,
        capture_output=True,
        text=True,
        timeout=300,
    )


def _environment() -> Path:
    folder = CACHE / "tinker-sdk"
    if not (folder / READY).exists():
        with locked(_lock(folder), wait=SECONDS):
            if not (folder / READY).exists():
                shutil.rmtree(folder, ignore_errors=True)
                venv.create(folder, symlinks=True, with_pip=True)
                _install(folder, f"tinker=={NEWEST}")
                # last on the path: the losses of a program's own need a torch
                packages = next(folder.glob("lib/python*/site-packages"))
                (packages / "torch.pth").write_text(sysconfig.get_path("purelib"))
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
    command = [environment / "bin" / "python", "-m", "pip", "install", "--quiet", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["?"])[-1]
        pytest.skip(f"tinker cannot be installed from the package index: {reason}")
