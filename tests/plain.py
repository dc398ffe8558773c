"""A plain installation: an environment with this package, as pip installs it, and what its
dependencies ask for."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import venv
from collections import defaultdict
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
SOURCES = (
    *("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "asyncdock_command.py"),
    *("pipeline", "stages", "orchestration", "api", "recipes"),
)


def required() -> dict[str, Distribution]:
    """The distributions that ``pip install .`` installs without an extra, as they are installed
    here, by their names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    closure: dict[str, Distribution] = {}
    pending = [(Requirement(text), "") for text in project["dependencies"]]
    while pending:
        requirement, wanted_extra = pending.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": wanted_extra}):
            continue
        name = canonicalize_name(requirement.name)
        extras = requirement.extras if name in closure else {"", *requirement.extras}
        closure[name] = distribution(name)
        needs = [Requirement(text) for text in closure[name].requires or ()]
        pending += [(need, extra) for need in needs for extra in extras if not extra or need.marker]
    return closure


def make_plain_environment(folder: Path) -> Path:
    """Make ``folder`` a virtual environment: links to the dependencies that are installed here, and
    this package by pip. Returns its folder of commands."""
    venv.create(folder, symlinks=True, with_pip=False)
    packages = next(folder.glob("lib/python*/site-packages"))
    closure = required()
    owners = defaultdict(set)  # names of distributions, by the first part of their files' paths
    for installed in distributions():
        name = canonicalize_name(installed.metadata["Name"])
        for first in {file.parts[0] for file in installed.files or ()}:
            owners[first].add(name)
    for needed in closure.values():
        for file in needed.files or ():
            first = file.parts[0]
            link = packages / (file if owners[first] - set(closure) else first)
            if first != ".." and not link.is_symlink():
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(Path(str(needed.locate_file(link.relative_to(packages)))))
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    options = [
        "--quiet",
        "--no-index",
        "--no-deps",
        "--no-build-isolation",
        "--no-compile",
        "--disable-pip-version-check",
    ]
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python")]
    subprocess.run([*pip, "install", *options, str(source)], check=True)
    return folder / "bin"
