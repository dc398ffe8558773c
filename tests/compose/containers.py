"""The services of compose.yaml as processes on this machine, each with what compose.yaml says of it: its command,
environment, user, read-only root, volumes, secrets, shared memory and health check. What stands in for the images are this
machine's redis-server and Prometheus, and the environment that runs the tests for the image that is ours.

    Stack ──setup──▶ secrets            one network of their own, in which redis, api, ... are all one address
      up(service): what it depends on, healthy or completed, then itself ──▶ Container: healthy(), kill(), logs()

Not here: limits of memory and processors, networks that are apart from one another, published ports.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil
import yaml

from pipeline.index.embedded import die_with_parent
from tests.compose.image import environment, stages
from tests.compose.sandbox import ROOT, as_user, host_system

T = TypeVar("T")

FOLDER = ROOT / "compose"
CLONE_NEWNET = 0x40000000
ADDRESS = "10.9.0.1"  # of all services: not loopback, which other machines could not reach
SOURCE, VENV = "/opt/source", "/opt/asyncdock"  # where a container finds the code; the second is the image's own path
ENTRYPOINT = f"{SOURCE}/compose/entrypoint.sh"  # the image has it on its path
SIZES = {"k": 2**10, "m": 2**20, "g": 2**30}
DEFAULT_SHARED_MEMORY = "64m"  # of a container

# What images make of their folders and which program they begin; of images of others this is knowledge, not a reading.
ENTRYPOINTS = {"redis": [], "prom/prometheus": ["prometheus"]}
OURS = {"asyncdock": "asyncdock", "asyncdock-model": "model"}


def interpolated(text: str, variables: Mapping[str, str]) -> str:
    """``${NAME:-default}`` filled in as compose does.

    >>> interpolated("${PORT:-8765} ${HOST:-}", {"PORT": "1"})
    '1 '
    """
    return re.sub(r"\$\{(\w+):-([^}]*)\}", lambda match: variables.get(match[1]) or match[2], text)


def load(variables: Mapping[str, str] | None = None) -> dict[str, Any]:
    """compose.yaml, with anchors and variables resolved."""
    return yaml.safe_load(interpolated((FOLDER / "compose.yaml").read_text(), variables or {}))


def in_bytes(size: str) -> int:
    """``2g`` in bytes."""
    return int(size[:-1]) * SIZES[size[-1]] if size[-1] in SIZES else int(size)


class Container:
    """One service that was started. ``pid`` is its first process, with whose death all of its processes end."""

    def __init__(
        self, name: str, spec: Mapping[str, Any], process: subprocess.Popen[bytes], pid: int, log: Path
    ) -> None:
        self.name, self.spec, self.process, self.pid, self._log = name, spec, process, pid, log
        self.variables: dict[str, str] = {}

    def logs(self) -> str:
        return self._log.read_text(errors="replace")

    def processes(self) -> list[psutil.Process]:
        """All of its processes but the first, which only waits for the others."""
        try:
            return psutil.Process(self.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def execute(self, command: list[str], seconds: float = 20.0) -> subprocess.CompletedProcess[str]:
        """``docker compose exec``. A command that takes too long has exit code 124."""
        inside = ["nsenter", f"--target={self.pid}", *("--mount", "--pid", "--net", "--ipc", "--uts")]
        command = [ENTRYPOINT if part == "asyncdock-entrypoint" else part for part in command]
        whole = [*inside, *as_user(self.spec["user"]), "timeout", str(seconds), *command]
        return subprocess.run(whole, env=self.variables, capture_output=True, text=True)

    def healthy(self) -> bool:
        """Whether its health check passes, within the check's own time limit."""
        kind, *test = self.spec["healthcheck"]["test"]
        command = ["sh", "-c", *test] if kind == "CMD-SHELL" else test
        seconds = float(self.spec["healthcheck"]["timeout"].removesuffix("s"))
        return self.execute(command, seconds).returncode == 0

    def signal(self, number: int) -> None:
        """Send a signal to its program, as ``docker compose kill --signal`` does."""
        for process in psutil.Process(self.pid).children():
            process.send_signal(number)

    def kill(self) -> None:
        """End it at once with everything in it. Harmless when repeated."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.process.wait(10)


class Stack:
    """The services, with their data and secrets in ``folder``. ``with Stack(...) as stack: stack.up("api")``."""

    def __init__(self, folder: Path, variables: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self.services: dict[str, dict[str, Any]] = load(variables)["services"]
        self.secrets: dict[str, dict[str, str]] = load(variables)["secrets"]
        self.containers: dict[str, Container] = {}
        self._home = folder / "compose"

    def __enter__(self) -> Stack:
        shutil.copytree(FOLDER, self._home, ignore=shutil.ignore_patterns("secrets"))
        subprocess.run([str(self._home / "setup")], check=True, capture_output=True)
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost\n{ADDRESS} {' '.join(self.services)}\n")
        command = self.folder / "asyncdock"
        command.write_text('#!/bin/sh\nexec python -P -m api.cli.main "$@"\n')
        command.chmod(0o755)
        hold = f'ip link set lo up && ip addr add {ADDRESS}/32 dev lo && echo up && exec sleep "$1"'
        self._network = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", hold, "hold", "1800"],
            stdout=subprocess.PIPE,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
        assert self._network.stdout is not None
        assert self._network.stdout.readline() == b"up\n"
        return self

    def __exit__(self, *_: object) -> None:
        for container in reversed(self.containers.values()):
            container.kill()
        self._network.kill()
        self._network.wait()

    def secret(self, name: str) -> str:
        return (self._home / self.secrets[name]["file"]).read_text().strip()

    def inside(self, call: Callable[[], T]) -> T:
        """What ``call`` returns, made in a thread whose sockets are in the stack's network: an address of a service, or
        127.0.0.1 with its port, reaches that service."""

        def entered() -> T:
            with open(f"/proc/{self._network.pid}/ns/net") as network:
                if ctypes.CDLL(None, use_errno=True).setns(network.fileno(), CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "cannot enter the stack's network")
            return call()

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(entered).result()

    def shell(self, script: str, **variables: str) -> str:
        """What a script prints that a person types in this folder, on a machine whose loopback has the published ports."""
        inside = ["nsenter", f"--net=/proc/{self._network.pid}/ns/net", "bash", "-euo", "pipefail", "-c", script]
        environ = {**os.environ, **variables}
        done = subprocess.run(inside, cwd=self._home, env=environ, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def up(self, *names: str, seconds: float = 180.0) -> None:
        """Start services as ``docker compose up --wait`` does. Raises AssertionError, with the log, for one that fails."""
        for name in names:
            if name in self.containers and self.containers[name].process.poll() is None:
                continue
            for other, how in self.services[name].get("depends_on", {}).items():
                if other not in self.containers:
                    self.up(other, seconds=seconds)
                if how["condition"] == "service_completed_successfully":
                    container = self.containers[other]
                    assert container.process.wait(seconds) == 0, f"{other} failed:\n{container.logs()}"
            container = self.containers[name] = self._start(name)
            if container.spec.get("healthcheck", {}).get("test"):
                self.wait(lambda container=container: container.healthy(), seconds, container)

    def wait(self, condition: Callable[[], bool], seconds: float, *watched: Container) -> None:
        """Until ``condition`` holds. Raises AssertionError, with the logs of ``watched``, when it does not in time."""
        deadline = time.monotonic() + seconds
        while not condition():
            late = time.monotonic() > deadline or any(container.process.poll() is not None for container in watched)
            assert not late, "\n".join(f"{container.name}:\n{container.logs()}" for container in watched)
            time.sleep(0.05)  # what is waited for says nothing by itself

    def _start(self, name: str) -> Container:
        spec = self.services[name]
        image = spec["image"].partition(":")[0]
        entry = ENTRYPOINTS.get(image, [ENTRYPOINT])
        command = [*entry, *spec.get("command", stages()[OURS[image]].command("CMD") if image in OURS else [])]
        variables = environment(OURS[image]) if image in OURS else {"PATH": "/usr/bin:/bin"}
        variables |= {"PYTHONPATH": SOURCE, **spec.get("environment", {})}
        log = self.folder / f"{name}-{secrets.token_hex(2)}.log"
        reading, writing = os.pipe()
        whole = [
            *("nsenter", f"--net=/proc/{self._network.pid}/ns/net", "bwrap", "--die-with-parent"),
            *(
                "--unshare-pid",
                "--unshare-ipc",
                "--unshare-uts",
                "--hostname",
                spec.get("hostname", name),
                "--info-fd",
                str(writing),
            ),
            *("--clearenv", *(part for pair in variables.items() for part in ("--setenv", *pair))),
            *("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_SETPCAP"),
            *self._mounts(name),
            *("--chdir", "/data" if image in OURS else "/", "--", *as_user(spec["user"]), *command),
        ]
        with log.open("wb") as output:
            process = subprocess.Popen(
                whole, stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=[writing]
            )
        os.close(writing)
        with os.fdopen(reading) as status:
            pid = json.loads(status.read() or '{"child-pid": 0}')["child-pid"]
        assert pid, f"{name} did not start:\n{log.read_text()}"
        container = Container(name, spec, process, pid, log)
        container.variables = variables
        return container

    def _mounts(self, name: str) -> list[str]:
        spec, ours = self.services[name], self.services[name]["image"].partition(":")[0] in OURS
        made = [*host_system(), "--proc", "/proc", "--dev", "/dev"]
        shared = str(in_bytes(spec.get("shm_size", DEFAULT_SHARED_MEMORY)))
        made += ["--perms", "1777", "--size", shared, "--tmpfs", "/dev/shm"]
        made += ["--ro-bind", str(self.folder / "hosts"), "/etc/hosts"]
        if ours:
            made += ["--ro-bind", str(ROOT), SOURCE, "--ro-bind", sys.prefix, VENV]
            made += ["--ro-bind", str(self.folder / "asyncdock"), f"{VENV}/bin/asyncdock", "--dir", "/data"]
        for mount in spec.get("tmpfs", []):
            place, _, options = mount.partition(":")
            given = dict(option.split("=") for option in options.split(",") if option)
            made += ["--bind", str(self._temporary(place, name, given)), place]
        for mount in spec.get("volumes", []):
            source, place, *mode = mount.split(":")
            origin = self._home / source if source.startswith(".") else self._volume(source, spec["user"])
            made += ["--ro-bind" if mode == ["ro"] else "--bind", str(origin), place]
        for secret in spec.get("secrets", []):
            made += ["--ro-bind", str(self._home / self.secrets[secret]["file"]), f"/run/secrets/{secret}"]
        return [*made, "--remount-ro", "/"] if spec["read_only"] else made

    def _volume(self, name: str, user: str) -> Path:
        """A volume takes the owner of the image's folder that it is first mounted over."""
        folder = self.folder / "volumes" / name
        if not folder.exists():
            folder.mkdir(parents=True)
            os.chown(folder, *map(int, user.split(":")))
        return folder

    def _temporary(self, place: str, name: str, given: Mapping[str, str]) -> Path:
        folder = self.folder / "tmpfs" / name / secrets.token_hex(4) / place.strip("/")
        folder.mkdir(parents=True)
        folder.chmod(int(given.get("mode", "1777"), 8))
        os.chown(folder, int(given.get("uid", 0)), int(given.get("gid", 0)))
        return folder


def ports(spec: Mapping[str, Any]) -> Iterator[tuple[str, int, int]]:
    """(address, port of this machine, port in the container) of what a service publishes."""
    for text in spec.get("ports", []):
        address, outside, within = text.rsplit(":", 2)
        yield address, int(outside), int(within)
