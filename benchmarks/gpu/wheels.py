"""What `make gpu-check` needs on a machine that has torch, transformers and triton, and perhaps no
network.

    here     make gpu-wheels                      all else that the package needs ─▶ wheels in .gpu-wheels, to be carried
    there    make gpu-check GPU_PYTHON=python3    installs them into .gpu-packages, beside what that Python has

`python -m benchmarks.gpu.wheels` prints them as requirements, in the versions of this environment.
"""

from __future__ import annotations

import argparse
import re
import tomllib
from importlib.metadata import PackageNotFoundError, distributions, requires, version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.requirements import Requirement

THERE = ("torch", "transformers", "triton")
PROJECT = Path(__file__).parents[2] / "pyproject.toml"
DEPENDENCIES: list[str] = tomllib.loads(PROJECT.read_text())["project"]["dependencies"]


def missing() -> str:
    """Which of the package's dependencies are not installed here, and what to do; empty where all
    are."""
    names = [re.split(r"[^\w-]", text)[0] for text in DEPENDENCIES]
    lacking = [name for name in names if not any(distributions(name=name))]
    fix = (
        "where there is a network: make gpu-wheels (GPU_WHEELS_FOR=3.12 for another Python); carry "
        ".gpu-wheels here, then: make gpu-check GPU_PYTHON=python3"
    )
    return f"gpu-check: this Python lacks {', '.join(lacking)}; {fix}" if lacking else ""


def needed() -> list[str]:
    """The package's dependencies and theirs, but for :data:`THERE` and what these ask for
    themselves, which has to be the machine's own (numpy)."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    found = {canonicalize_name(name) for name in THERE}
    found |= {canonicalize_name(one.name) for name in THERE for one in _asked(Requirement(name))}
    there = set(found)
    waiting = [Requirement(text) for text in DEPENDENCIES]
    while waiting:
        one = waiting.pop()
        if canonicalize_name(one.name) not in there:
            found.add(canonicalize_name(one.name))
            waiting += [need for need in _asked(one) if canonicalize_name(need.name) not in found]
    return [f"{name}=={version(name)}" for name in sorted(found - there)]


def _asked(of: Requirement) -> list[Requirement]:
    """What the package ``of`` requires here; nothing where it is not installed, as triton beside a
    CPU's torch."""
    from packaging.requirements import Requirement

    try:
        needs = [Requirement(text) for text in requires(of.name) or ()]
    except PackageNotFoundError:
        return []
    extras = {"", *of.extras}
    return [
        need
        for need in needs
        if need.marker is None or any(need.marker.evaluate({"extra": e}) for e in extras)
    ]


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    print(*needed(), sep="\n")
