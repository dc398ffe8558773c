"""tinker_cookbook with Tinker's SDK, unmodified, in an environment of its own; made once, in the
cache of the user.

    CACHE/tinker-cookbook   a virtual environment; torch, transformers and datasets are the tests' own
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

FOLDER = Unix("asyncdock").user_cache_path / "tests" / "tinker-cookbook"
READY = "ready"  # a file in what is complete
SECONDS = 900.0  # for an installation
ALONE = "tinker_cookbook==0.6.1"  # tml-renderers and pyrage, which it names, are not imported here
NEEDED = (
    *("tinker==0.38.0", "blobfile>=3", "chz>=0.4", "cloudpickle>=3", "pandas", "pillow>=10"),
    *("pylatexenc>=2", "rich>=13", "sympy>=1.12", "termcolor", "tiktoken>=0.12"),
)


@contextmanager
def running(
    recipe: str, url: str, key: str, folder: Path, *options: str
) -> Iterator[subprocess.Popen[str]]:
    """Yield the process of the ``recipe`` in ``folder``, a client of the server at ``url``. Skips
    the test where the cookbook cannot be installed."""
    python = str(_environment() / "bin" / "python")
    user = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    settings = {
        "TINKER_BASE_URL": url,
        "TINKER_API_KEY": key,
        "TINKER_TELEMETRY": "0",
        "NO_PROXY": "127.0.0.1,localhost",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(folder / "hub"),
    }
    process = subprocess.Popen(
        [python, "-W", "ignore", "-m", f"tinker_cookbook.recipes.{recipe}", *options],
        env=user | settings,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _environment() -> Path:
    if not (FOLDER / READY).exists():
        FOLDER.parent.mkdir(parents=True, exist_ok=True)
        with locked(FOLDER.with_name(f"{FOLDER.name}.lock"), wait=SECONDS):
            if not (FOLDER / READY).exists():
                shutil.rmtree(FOLDER, ignore_errors=True)
                venv.create(FOLDER, symlinks=True, with_pip=True)
                _install(*NEEDED)
                _install("--no-deps", ALONE)
                # last on the path: what the tests have already
                packages = next(FOLDER.glob("lib/python*/site-packages"))
                (packages / "zz-tests.pth").write_text(sysconfig.get_path("purelib"))
                (FOLDER / READY).touch()
    return FOLDER


def _install(*packages: str) -> None:
    command = [str(FOLDER / "bin" / "python"), "-m", "pip", "install", "--quiet", *packages]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["?"])[-1]
        pytest.skip(f"tinker_cookbook cannot be installed from the package index: {reason}")
