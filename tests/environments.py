"""Virtual environments of programs that are not the tests' own; made once, in the cache of the user."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sysconfig
import venv
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from platformdirs.unix import Unix

from pipeline.locks import locked

CACHE = Unix("asyncdock").user_cache_path / "tests"
SECONDS = 900.0  # for an installation
READY = "ready"  # a file in what is complete
# Exit codes of a program that has done its work. A client is sometimes aborted while its interpreter
# ends, after its last line and without a message (SDK 0.38, Python 3.11).
ENDS = (0, -signal.SIGABRT)
# Last on the path of a program: the packages of the tests. The cache serves several checkouts, so
# this is no part of an environment.
START = """
import runpy, sys
packages, kind, name, *arguments = sys.argv[1:]
sys.path.append(packages)
sys.argv = [name, *arguments]
{"script": runpy.run_path, "module": runpy.run_module}[kind](name, run_name="__main__")
"""


def environment(name: str, *installations: tuple[str, ...]) -> Path:
    """Return the folder of the virtual environment ``name``, made with what each of
    ``installations`` tells pip. Skips the test where one is impossible."""
    folder = CACHE / name
    with _making(folder) as missing:
        if missing:
            venv.create(folder, symlinks=True, with_pip=True)
            for arguments in installations:
                _pip(folder, "install", *arguments)
    return folder


def packages(name: str, maker: Path, *arguments: str) -> Path:
    """Return a folder of packages, for PYTHONPATH, installed by the environment ``maker``."""
    folder = CACHE / name
    with _making(folder) as missing:
        if missing:
            _pip(maker, "install", "--no-deps", "--target", str(folder), *arguments)
    return folder


def source(name: str, maker: Path, requirement: str) -> Path:
    """Return the unpacked source distribution of ``requirement``, as pip of ``maker`` gets it."""
    folder = CACHE / name
    with _making(folder) as missing:
        if missing:
            options = ("--no-deps", "--no-binary", ":all:", "--dest", str(folder), requirement)
            _pip(maker, "download", *options)
            (archive,) = folder.glob("*.tar.gz")
            shutil.unpack_archive(archive, folder, filter="data")
            archive.unlink()
    (unpacked,) = (path for path in folder.iterdir() if path.is_dir())
    return unpacked


@contextmanager
def running(
    environment: Path, kind: str, name: str, arguments: tuple[str, ...], **options: object
) -> Iterator[subprocess.Popen[str]]:
    """Yield the process of a ``kind``, "script" or "module", with its standard output and what
    ``subprocess.Popen`` has as ``options``."""
    python = [str(environment / "bin" / "python"), "-W", "ignore", "-c", START]
    command = [*python, sysconfig.get_path("purelib"), kind, name, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)  # type: ignore[call-overload]
    with process:
        try:
            yield process
        finally:
            process.kill()


def variables(url: str, key: str, **more: str) -> Mapping[str, str]:
    """Return the environment variables of a client of the server at ``url``."""
    user = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    client = {
        "TINKER_BASE_URL": url,
        "TINKER_API_KEY": key,
        "TINKER_TELEMETRY": "0",
        "NO_PROXY": "127.0.0.1,localhost",
        "HF_HUB_OFFLINE": "1",
    }
    return user | client | more


@contextmanager
def _making(folder: Path) -> Iterator[bool]:
    """Yield whether ``folder`` is to be made, by this process alone."""
    if (folder / READY).exists():
        yield False
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_name(f"{folder.name}.lock"), wait=SECONDS):
        missing = not (folder / READY).exists()
        if missing:
            shutil.rmtree(folder, ignore_errors=True)
        yield missing
        (folder / READY).touch()


def _pip(folder: Path, command: str, *arguments: str) -> None:
    pip = [str(folder / "bin" / "python"), "-m", "pip", command, "--quiet", *arguments]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=SECONDS)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["?"])[-1]
        pytest.skip(f"the package index has not what this test needs: {reason}")
