"""tinker_cookbook with Tinker's SDK, unmodified; torch, transformers and datasets are the tests' own."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests import environments

ALONE = "tinker_cookbook==0.6.1"  # it names tml-renderers, which is not imported here
NEEDED = (
    *("tinker==0.38.0", "blobfile>=3", "chz>=0.4", "cloudpickle>=3", "pandas", "pillow>=10"),
    *("pylatexenc>=2", "rich>=13", "sympy>=1.12", "termcolor", "tiktoken>=0.12"),
    *("marimo", "matplotlib", "pyrage"),  # of the tutorials
)
TUTORIALS = "tutorials"  # of the source distribution


def installed() -> Path:
    """Return the environment with the cookbook. Skips the test where it cannot be installed."""
    return environments.environment("tinker-cookbook-0.6.1", NEEDED, ("--no-deps", ALONE))


@contextmanager
def running(
    recipe: str, url: str, key: str, folder: Path, *options: str
) -> Iterator[subprocess.Popen[str]]:
    """Yield the process of the ``recipe`` in ``folder``, a client of the server at ``url``."""
    name = f"tinker_cookbook.recipes.{recipe}"
    with _running("module", name, url, key, folder, options) as process:
        yield process


def tutorial(name: str, url: str, key: str, folder: Path, seconds: float) -> str:
    """Return what the tutorial ``name`` has printed when it has ended without an error."""
    tutorials = environments.source("tinker-cookbook-source-0.6.1", installed(), ALONE) / TUTORIALS
    with _running("script", str(tutorials / f"{name}.py"), url, key, folder, ()) as process:
        printed, _ = process.communicate(timeout=seconds)
        assert process.returncode in environments.ENDS, printed
    return printed


@contextmanager
def _running(
    kind: str, name: str, url: str, key: str, folder: Path, options: tuple[str, ...]
) -> Iterator[subprocess.Popen[str]]:
    alone = {
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(folder / "hub"),
        "TINKER_COOKBOOK_RUNS_DIR": str(folder / "runs"),
        "MPLBACKEND": "agg",  # no window
    }
    settings = environments.variables(url, key, **alone)
    with environments.running(
        installed(), kind, name, options, env=settings, cwd=folder, stderr=subprocess.STDOUT
    ) as process:
        yield process
