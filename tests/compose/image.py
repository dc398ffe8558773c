"""The Dockerfile's steps, run in order without a container engine: each stage is a folder, and its
RUN steps run with that folder as root file system.

    base ──copy──▶ stage: COPY (only what .dockerignore lets through), RUN as USER in WORKDIR with ENV ──▶ next stage
"""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dockerfile_parse import DockerfileParser

from tests.compose.sandbox import ROOT, as_user

DOCKERFILE = ROOT / "compose" / "Dockerfile"
IGNORED = ROOT / "compose" / "Dockerfile.dockerignore"
BASE_PATH = "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"


class StepFailed(RuntimeError):
    """A step of the Dockerfile, with what it printed."""


@dataclass
class Stage:
    """One FROM and what follows it: ``steps`` are (instruction, value) in order."""

    name: str
    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def last(self, instruction: str) -> str:
        """The value of the last such instruction, "" when there is none."""
        return next((value for name, value in reversed(self.steps) if name == instruction), "")

    def command(self, instruction: str) -> list[str]:
        """ENTRYPOINT or CMD in their exec form."""
        return list(json.loads(self.last(instruction) or "[]"))


def stages(path: Path = DOCKERFILE) -> dict[str, Stage]:
    """The stages by name, with the ARGs that stand before the first one filled in.

    One without a name is called "".
    """
    found: dict[str, Stage] = {}
    defaults: dict[str, str] = {}
    current: Stage | None = None
    with path.open("rb") as file:
        structure = DockerfileParser(fileobj=file).structure
    for entry in structure:
        name = entry["instruction"]
        value = entry["value"]
        if name == "FROM":
            base, _, alias = re.sub(
                r"\$\{(\w+)\}", lambda match: defaults[match[1]], value
            ).partition(" AS ")
            current = found[alias] = Stage(alias, base)
        elif current is not None and name != "COMMENT":
            current.steps.append((name, value))
        elif name == "ARG":
            key, _, given = value.partition("=")
            defaults[key] = given
    return found


def environment(name: str, found: Mapping[str, Stage] | None = None) -> dict[str, str]:
    """What ENV makes of the environment in the stage ``name``, those it builds on included."""
    found = stages() if found is None else found
    stage = found[name]
    made = environment(stage.base, found) if stage.base in found else {"PATH": BASE_PATH}
    for instruction, value in stage.steps:
        if instruction == "ENV":
            for pair in shlex.split(value):
                key, _, given = pair.partition("=")
                made[key] = given.replace("$PATH", made["PATH"])
    return made


def let_through(path: str) -> bool:
    """Whether .dockerignore lets ``path``, relative to the repository, into the build.

    The last line that fits decides.
    """
    verdict = True
    for line in IGNORED.read_text().splitlines():
        if line and not line.startswith("#"):
            pattern = line.removeprefix("!")
            kept = line.startswith("!")
            parents = [str(parent) for parent in (Path(path), *Path(path).parents)]
            if any(fnmatch.fnmatch(parent, pattern.removeprefix("**/")) for parent in parents) or (
                pattern.startswith("**/") and Path(pattern).name in Path(path).parts
            ):
                verdict = kept
    return verdict


class Builder:
    """Builds stages as folders in ``folder``.

    ``base`` is the folder of the image that the others begin with; ``around`` are bwrap's further
    arguments for every step (mounts), ``variables`` is what it adds to every step's environment.
    """

    def __init__(
        self,
        folder: Path,
        base: Path,
        *,
        arguments: Mapping[str, str],
        around: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self.base = base
        self.arguments = dict(arguments)
        self.around = list(around)
        self.variables = dict(variables or {})
        self.stages = stages()
        self.seconds: dict[str, float] = {}

    def build(self, name: str) -> Path:
        """The root file system of the stage ``name``. Raises StepFailed."""
        root = self.folder / name
        if root.exists():
            return root
        stage = self.stages[name]
        before = self.build(stage.base) if stage.base in self.stages else self.base
        draft = self.folder / f"{name}.draft"
        subprocess.run(["cp", "-a", "--reflink=auto", str(before), str(draft)], check=True)
        known: dict[str, str] = {}
        user, where = self._inherited(name)
        for instruction, value in stage.steps:
            if instruction == "ARG":
                key, _, default = value.partition("=")
                known[key] = self.arguments.get(key, shlex.split(default)[0] if default else "")
            elif instruction == "WORKDIR":
                where = value
                (draft / where.lstrip("/")).mkdir(parents=True, exist_ok=True)
            elif instruction == "USER":
                user = value
            elif instruction == "COPY":
                self._copy(draft, where, value)
            elif instruction == "RUN":
                began = time.monotonic()
                self._run(draft, where, user, {**environment(name, self.stages), **known}, value)
                self.seconds[f"{name}: {value[:60]}"] = time.monotonic() - began
        return draft.rename(root)

    def run(
        self, name: str, command: Sequence[str], variables: Mapping[str, str] | None = None
    ) -> str:
        """What ``command`` prints in the built stage ``name``, as its user, its file system
        read-only."""
        user, where = self._after(name)
        variables = {**environment(name, self.stages), **(variables or {})}
        return self._step(self.folder / name, where, user, variables, command, readonly=True)

    def _inherited(self, name: str) -> tuple[str, str]:
        base = self.stages[name].base
        return self._after(base) if base in self.stages else ("0:0", "/")

    def _after(self, name: str) -> tuple[str, str]:
        user, where = self._inherited(name)
        return self.stages[name].last("USER") or user, self.stages[name].last("WORKDIR") or where

    def _copy(self, root: Path, where: str, value: str) -> None:
        flags = dict(part[2:].split("=", 1) for part in value.split() if part.startswith("--"))
        *sources, target = [part for part in value.split() if not part.startswith("--")]
        into = root / (target if target.startswith("/") else f"{where}/{target}").lstrip("/")
        for source in sources:
            origin = (
                self.build(flags["from"]) / source.lstrip("/") if "from" in flags else ROOT / source
            )
            if "from" not in flags and not let_through(source):
                raise FileNotFoundError(f"COPY {source}: .dockerignore keeps it out of the build")
            place = into / origin.name if target.endswith("/") else into
            place.parent.mkdir(parents=True, exist_ok=True)
            if origin.is_dir():
                leave = shutil.ignore_patterns("__pycache__") if "from" not in flags else None
                shutil.copytree(origin, place, symlinks=True, ignore=leave, dirs_exist_ok=True)
            else:
                shutil.copy(origin, place)
            if "chmod" in flags:
                place.chmod(int(flags["chmod"], 8))

    def _run(
        self, root: Path, where: str, user: str, variables: Mapping[str, str], script: str
    ) -> None:
        self._step(root, where, user, variables, ["/bin/sh", "-c", script], readonly=False)

    def _step(
        self,
        root: Path,
        where: str,
        user: str,
        variables: Mapping[str, str],
        command: Sequence[str],
        *,
        readonly: bool,
    ) -> str:
        given = {**variables, **self.variables}
        bwrap = ["bwrap", "--die-with-parent", "--unshare-pid", "--clearenv", "--cap-add", "ALL"]
        bwrap += [part for key, value in given.items() for part in ("--setenv", key, value)]
        bwrap += ["--ro-bind" if readonly else "--bind", str(root), "/", *self.around]
        bwrap += [
            "--proc",
            "/proc",
            "--dev",
            "/dev",
            "--perms",
            "1777",
            "--tmpfs",
            "/tmp",
            "--chdir",
            where,
            "--",
        ]
        privileges = [] if user.startswith("0") else as_user(user)
        done = subprocess.run([*bwrap, *privileges, *command], capture_output=True, text=True)
        if done.returncode:
            raise StepFailed(f"{' '.join(command)}\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
        return done.stdout
