"""tinker_cookbook with Tinker's SDK, unmodified; torch, transformers and datasets are the tests' own."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.api.tinker import environments

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
    made = environments.environment("tinker-cookbook", NEEDED, ("--no-deps", ALONE))
    hub = {"HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hub")}
    settings = environments.variables(url, key, **hub)
    with environments.running(
        made,
        "module",
        f"tinker_cookbook.recipes.{recipe}",
        options,
        env=settings,
        cwd=folder,
        stderr=subprocess.STDOUT,
    ) as process:
        yield process
