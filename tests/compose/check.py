"""The compose stack under a real Docker: ``make compose-check`` executes every command of
compose/README.md, in order.

    prepare (this machine's network) ──▶ isolated: Engine ──▶ for each section: its commands, what has to hold after them
                                                          └──▶ always: down, dockerd's end, an empty process table

    python -m tests.compose.check [--folder DIR] [--local-bases]

A Docker that answers here already is used as it is, under a project name of this check's own. Where
there is none, or with ``--local-bases``, dockerd is started in namespaces of its own, which reach
no network; tests.compose.bases makes the base images then, and Grafana, of which there is no
package, is left out. Needs root; exit code 1 when anything failed.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import yaml

from tests.compose import bases
from tests.compose.engine import Engine, isolated
from tests.compose.expected import AFTER, nothing_is_left
from tests.compose.image import stages
from tests.compose.page import Command, Shell, commands, variables
from tests.compose.sandbox import ROOT
from tests.compose.services import load
from tests.compose.stack import Stack, docker

PROJECT = "asyncdock-check"
BUILD_SECONDS = 3600.0  # for a command; the first one builds the image
# A program, and what to do when it is not there.
NEEDED = {
    "docker": "apt install docker.io",
    "curl": "apt install curl",
    "git": "apt install git",
}
NEEDED_FOR_AN_ENGINE = {
    "dockerd": "apt install docker.io",
    "iptables": "apt install iptables",
    "debootstrap": "apt install debootstrap",
    "ip": "apt install iproute2",
    "unshare": "apt install util-linux",
}
PLUGINS = {
    "compose": "Docker Compose 2.26 or newer, docker's plugin (Debian 13: docker-compose; Docker: "
    "docker-compose-plugin)",
    "buildx": "BuildKit's plugin of docker (Debian 13: docker-buildx; Docker: "
    "docker-buildx-plugin)",
}


@dataclass
class Report:
    """What was tried, each with its outcome: printed as it comes, and as a table at the end."""

    # section, what, seconds, failure
    rows: list[tuple[str, str, float, str]] = field(default_factory=list)

    def attempt(self, section: str, what: str, work: Callable[[], None]) -> bool:
        began = time.monotonic()
        failure = ""
        try:
            work()
        except Exception as error:
            failure = str(error) if isinstance(error, AssertionError) else traceback.format_exc()
            failure = failure or traceback.format_exc()
        seconds = time.monotonic() - began
        self.rows.append((section, what, seconds, failure))
        print(f"{'FAILED' if failure else 'ok':6s} {seconds:7.1f} s  {what}", flush=True)
        if failure:
            print("\n".join(f"         {line}" for line in failure.splitlines()[-60:]), flush=True)
        return not failure

    def failed(self) -> bool:
        return not self.rows or any(failure for _, _, _, failure in self.rows)

    def table(self) -> str:
        lines = ["", f"| {'section'} | what | outcome | seconds |", "|---|---|---|---:|"]
        for section, what, seconds, failure in self.rows:
            shown = what.split("  #")[0].strip().replace("|", "\\|")
            outcome = "FAILED" if failure else "ok"
            lines.append(f"| {section} | `{shown}` | {outcome} | {seconds:.1f} |")
        good = sum(not failure for _, _, _, failure in self.rows)
        return "\n".join([*lines, "", f"{good} of {len(self.rows)} as they have to be"])


def main() -> None:
    parser = argparse.ArgumentParser(description="Execute compose/README.md under a real Docker.")
    parser.add_argument(
        "--folder",
        type=Path,
        default=ROOT / ".compose-check",
        help="for base images and the engine",
    )
    parser.add_argument(
        "--local-bases", action="store_true", help="an engine and base images of this check's own"
    )
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    folder = given.folder.resolve()
    if given.inside:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        sys.exit(check(folder, Engine(folder)))
    own = given.local_bases or not engine_answers()
    if lacking := missing(own):
        sys.exit("compose-check cannot run here:\n" + "\n".join(f"- {line}" for line in lacking))
    folder.mkdir(parents=True, exist_ok=True)
    lock = open(folder / "lock", "w")  # noqa: SIM115  # held until this process ends
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(
            f"compose-check: another check uses {folder}; wait for its end, or give another "
            f"--folder"
        )
    if not own:
        sys.exit(check(folder, None))
    print(
        "No registry is asked: base images by debootstrap, packages by pip. The first time takes "
        "minutes.",
        flush=True,
    )
    bases.prepare(folder)
    sys.exit(isolated(["--inside", "--folder", str(folder)]))


def engine_answers() -> bool:
    """Whether this machine has a Docker that runs."""
    return (
        bool(shutil.which("docker"))
        and not subprocess.run(["docker", "info"], capture_output=True).returncode
    )


def missing(own: bool) -> list[str]:
    """What has to be installed before the check, which installs nothing."""
    lines = (
        ["it is for root: mounts, namespaces and the folders of an engine"]
        if os.getuid() != 0
        else []
    )
    programs = NEEDED | (NEEDED_FOR_AN_ENGINE if own else {})
    lines += [f"{name}: {fix}" for name, fix in programs.items() if shutil.which(name) is None]
    if shutil.which("docker"):
        for name, fix in PLUGINS.items():
            if subprocess.run(["docker", name, "version"], capture_output=True).returncode:
                lines.append(f"docker {name}: {fix}")
    if own and sys.version_info[:2] != (3, 11):
        lines.append(
            f"Python 3.11, which the image has: this is {platform.python_version()}; name "
            f"one: make PYTHON=…"
        )
    return lines


def check(folder: Path, engine: Engine | None) -> int:
    report = Report()
    home = copy_of_the_tree(folder / "tree") / "compose"
    os.environ["COMPOSE_PROJECT_NAME"] = PROJECT
    with engine or nullcontext():
        print(versions(), flush=True)
        if engine is not None:
            bases.load(folder, images())
            override = folder / "override.yaml"
            override.write_text(yaml.safe_dump(own_engine_override()))
            os.environ["COMPOSE_FILE"] = f"{home}/compose.yaml:{override}"
        stack = Stack(PROJECT, home)
        try:
            follow_the_page(stack, report, folder)
        finally:
            docker(
                "compose",
                "--project-directory",
                str(home),
                "--profile",
                "*",
                "down",
                "--volumes",
                check=False,
            )
            report.attempt(
                "Afterwards", "no container, network or volume", partial(nothing_is_left, stack)
            )
    if engine is not None:
        report.attempt("Afterwards", "no process of the engine", engine.assert_nothing_was_left)
    shutil.rmtree(folder / "tree")
    print(report.table(), flush=True)
    return int(report.failed())


def follow_the_page(stack: Stack, report: Report, folder: Path) -> None:
    """Until a command of the page fails; what has to hold after a section is judged whole."""
    page = list(commands((stack.home / "README.md").read_text(encoding="utf-8")))
    shell = Shell(stack.home.parent, folder / "tree" / ".shell", variables(page))
    for section, expectations in AFTER.items():
        print(f"\n{section}", flush=True)
        for command in (each for each in page if each.section == section):
            if not report.attempt(section, command.text, partial(execute, command, shell, stack)):
                return
        for expectation in expectations:
            what = expectation.__name__.replace("_", " ")
            report.attempt(section, what, partial(expectation, stack))


def execute(command: Command, shell: Shell, stack: Stack) -> None:
    if "rm secrets/token" in command.text:
        stack.outputs["the token before"] = stack.secret("token")
    status, output, errors = shell.run(command.text, BUILD_SECONDS)
    stack.outputs[command.text] = output + errors
    assert status == 0, f"exit code {status}\n{output}{errors}"


def copy_of_the_tree(place: Path) -> Path:
    """What git would commit here, so that the secrets that a person has stay as they are."""
    shutil.rmtree(place, ignore_errors=True)
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(
        listed, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    for name in names:
        if name and (ROOT / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place / name)
    return place


def images() -> list[str]:
    services = [spec["image"] for spec in load()["services"].values()]
    first = [stage.base for stage in stages().values() if ":" in stage.base]
    return sorted({*(image for image in services if not image.startswith("asyncdock")), *first})


def own_engine_override() -> dict[str, object]:
    """The build finds pip's packages on loopback, and what has no stand-in is in a profile that
    nobody asks for."""
    built = {
        name: {"build": {"network": "host"}}
        for name, spec in load()["services"].items()
        if "build" in spec
    }
    return {"services": built | {"grafana": {"profiles": ["with-grafana"]}}}


def versions() -> str:
    engine = docker("version", "--format", "{{.Server.Version}}").stdout.strip()
    compose = docker("compose", "version", "--short").stdout.strip()
    buildx = docker("buildx", "version").stdout.split()[1]
    return (
        f"Docker Engine {engine}, Compose {compose}, buildx {buildx}, {os.cpu_count()} processors"
    )


if __name__ == "__main__":
    main()
