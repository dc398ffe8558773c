"""What runs: the containers of the stack by ``docker``, and its API and Prometheus by HTTP, as a
person on the machine."""

from __future__ import annotations

import json
import os
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.compose.page import until

SLOW = 600.0  # seconds; a deadline, for a machine that is busy with other things
ENDED = ("finished", "stopped", "failed")


@dataclass
class Container:
    """A container as ``docker inspect`` shows it."""

    name: str
    service: str
    shown: dict[str, Any]

    @property
    def health(self) -> str:
        """ "" for one without a health check."""
        return self.shown["State"].get("Health", {}).get("Status", "")

    def processes(self) -> list[psutil.Process]:
        first = psutil.Process(self.shown["State"]["Pid"])
        return [first, *first.children(recursive=True)]

    def execute(self, *command: str) -> subprocess.CompletedProcess[str]:
        return docker("exec", self.name, *command, check=False)

    def kill(self) -> None:
        """Kill its first process, as the kernel does when memory is short; the engine then starts
        the container again."""
        psutil.Process(self.shown["State"]["Pid"]).kill()

    def logs(self) -> str:
        done = docker("logs", self.name)
        return done.stdout + done.stderr


def docker(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        ["docker", *arguments], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert not check or done.returncode == 0, (
        f"docker {' '.join(arguments)}\n{done.stdout}{done.stderr}"
    )
    return done


class Stack:
    """The project ``name``, whose files and secrets lie in ``home``."""

    def __init__(self, name: str, home: Path) -> None:
        self.name = name
        self.home = home
        self.outputs: dict[str, str] = {}  # of the page's commands
        self.kept: dict[str, str] = {}  # ids of the containers that were healthy after the start
        port = os.environ.get
        self.api = f"http://127.0.0.1:{port('ASYNCDOCK_PORT', '8765')}"
        self.prometheus = f"http://127.0.0.1:{port('PROMETHEUS_PORT', '9090')}"

    def compose(self, *arguments: str) -> str:
        done = subprocess.run(
            ["docker", "compose", *arguments], cwd=self.home, capture_output=True, text=True
        )
        assert done.returncode == 0, f"docker compose {' '.join(arguments)}\n{done.stderr}"
        return done.stdout

    def containers(self, service: str = "") -> list[Container]:
        """Those of one service, or all; the ended ones too, but not those of ``docker compose
        run``."""
        label = f"label=com.docker.compose.project={self.name}"
        ids = docker("ps", "--all", "--quiet", "--filter", label).stdout.split()
        found = json.loads(docker("inspect", *ids).stdout) if ids else []
        marked = [(each, each["Config"]["Labels"]) for each in found]
        containers = [
            Container(each["Name"].lstrip("/"), labels["com.docker.compose.service"], each)
            for each, labels in marked
            if labels.get("com.docker.compose.oneoff") != "True"
        ]
        return sorted(
            (each for each in containers if service in ("", each.service)),
            key=lambda each: each.name,
        )

    def container(self, service: str) -> Container:
        [container] = self.containers(service)
        return container

    def until_healthy(self, *services: str) -> None:
        def all_are() -> bool:
            states = {each.name: each.health for name in services for each in self.containers(name)}
            assert states
            assert set(states.values()) == {"healthy"}, states
            return True

        until(all_are, SLOW, f"{', '.join(services)} healthy")

    def secret(self, name: str) -> str:
        return (self.home / "secrets" / name).read_text().strip()

    def ask(
        self, path: str, *, method: str = "GET", body: Any = None, token: str | None = None
    ) -> tuple[int, Any]:
        """Status and answer of the API. ``token`` instead of the admin's; "": none."""
        text = self.secret("token") if token is None else token
        headers = {
            "Content-Type": "application/json",
            **({"Authorization": f"Bearer {text}"} if text else {}),
        }
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.api}{path}", data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, _parsed(response.read())
        except urllib.error.HTTPError as error:
            return error.code, _parsed(error.read())

    def run(self, name: str) -> dict[str, Any]:
        """The newest run of the recipe ``name``."""
        status, page = self.ask(f"/v1/runs?name={name}&limit=1")
        assert status == 200, page
        assert page["runs"], f"no run is called {name}"
        return page["runs"][0]

    def until_run(
        self, name: str, condition: Callable[[dict[str, Any]], bool], what: str
    ) -> dict[str, Any]:
        def reached() -> dict[str, Any]:
            view = self.run(name)
            if condition(view):
                return view
            shown = {key: view[key] for key in ("state", "reason", "steps_done", "reward")}
            assert view["state"] not in ENDED, shown
            raise LookupError(shown)

        return until(reached, SLOW, f"{name}: {what}")

    def begin(self, name: str) -> None:
        """Start a run of the recipe ``name``, unless there is one that has not ended."""
        _, page = self.ask(f"/v1/runs?name={name}&limit=1")
        if not page["runs"] or page["runs"][0]["state"] in ENDED:
            started = self.ask("/v1/runs", method="POST", body={"recipe_name": name})
            assert started[0] == 201, started

    def stop(self, name: str) -> None:
        run = self.run(name)["id"]
        assert self.ask(f"/v1/runs/{run}/stop", method="POST")[0] == 202
        view = self.until_run(name, lambda view: view["state"] in ENDED, "ended")
        assert view["state"] == "stopped", view["reason"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """What Prometheus answers now: one entry for each series."""
        url = f"{self.prometheus}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
        with urllib.request.urlopen(url, timeout=60) as response:
            return json.load(response)["data"]["result"]

    def logs_of_runs(self) -> Iterator[str]:
        for agent in self.containers("agent"):
            yield agent.execute("sh", "-c", "cat /data/agent-*/runs/*/logs/*").stdout


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text.decode()
