"""Tinker's SDKs, unmodified, as pip installs them.

CACHE/tinker-sdk      a virtual environment with the newest SDK and what it needs
CACHE/tinker-0.25.0   an older SDK alone: what the SDKs need is the same
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests import environments

NEWEST = "0.38.0"
VERSIONS = ("0.25.0", "0.30.4", "0.34.0", NEWEST)
PROGRAM_SECONDS = 300.0


@contextmanager
def running(
    version: str, script: Path, url: str, key: str, *arguments: str
) -> Iterator[subprocess.Popen[str]]:
    """Yield the process of ``script`` with the SDK ``version``, a client of the server at ``url``.
    Skips the test where the SDK cannot be installed."""
    made = environments.environment("tinker-sdk", (f"tinker=={NEWEST}",))
    own = {}
    if version != NEWEST:
        older = environments.packages(f"tinker-{version}", made, f"tinker=={version}")
        own = {"PYTHONPATH": str(older)}
    settings = environments.variables(url, key, **own)
    with environments.running(
        made, "script", str(script), arguments, env=settings, stderr=subprocess.PIPE
    ) as process:
        yield process


def program(version: str, script: Path, url: str, key: str, *arguments: str) -> str:
    """Return what ``script`` has printed on standard output when it has ended without an error."""
    with running(version, script, url, key, *arguments) as process:
        output, errors = process.communicate(timeout=PROGRAM_SECONDS)
        assert process.returncode in environments.ENDS, errors
    return output
