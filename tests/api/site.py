"""A whole service of the test's own: ``asyncdock serve`` as a process, with its index, its agent
and its runs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from api.server.access.tokens import Scope, Tokens
from orchestration.service.index_server import ServiceIndex
from orchestration.service.own_services import read_authorization
from pipeline.data.events import EventData
from pipeline.index.client import Index
from tests.forked import asyncdock
from tests.ports import free_port

SECONDS = 90.0  # for which a condition is waited for: a machine may be busy
LOOK_SECONDS = 0.1  # between two looks at it
ROOT = Path(__file__).resolve().parents[2]
ENDED = ("finished", "stopped", "failed")


@dataclass(frozen=True)
class Answer:
    status: int
    body: Any


class Site:
    """``url`` stays the same when the server is killed and started again."""

    def __init__(self, data: Path, *options: str) -> None:
        self.port = free_port()
        self.data = data
        self.options = options
        self.url = f"http://127.0.0.1:{self.port}/"
        self._log = data / "server.out"
        self._process: subprocess.Popen[bytes] | None = None
        self.own_token = ""  # the token of the user who runs it

    # ── the server ──

    def start(self) -> None:
        with self._log.open("ab") as log:
            command = [
                "serve",
                "--data",
                str(self.data),
                "--listen",
                f"127.0.0.1:{self.port}",
                "--runs",
                "1",
            ]
            self._process = subprocess.Popen(
                [*asyncdock(), *command, *self.options],
                stdout=log,
                stderr=log,
                cwd=self.data,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
            )
        self.until(lambda: self.get("readyz").status == 200, "the server is ready")
        self.own_token = read_authorization(self.data)

    def kill(self) -> None:
        """End the server with no chance to do anything about it."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """End every run, the server and its index."""
        assert self._process is not None
        if self._process.poll() is None:
            self.end_all_but(set())
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(timeout=SECONDS)
        ServiceIndex(self.data).stop()

    def until(self, holds: Any, what: str) -> None:
        end = time.monotonic() + SECONDS
        while not holds():
            assert self._process is not None
            assert self._process.poll() is None, (
                f"the server has ended: {self._log.read_text()[-3000:]}"
            )
            assert time.monotonic() < end, (
                f"not within {SECONDS:g} s: {what}; {self._log.read_text()[-3000:]}"
            )
            time.sleep(LOOK_SECONDS)

    # ── its API ──

    def ask_for(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Answer:
        """Status 0: no server answers."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} if data is not None else {}
        headers |= {"Authorization": f"Bearer {self.own_token}"} if self.own_token else {}
        request = urllib.request.Request(
            f"{self.url}{path}", data=data, method=method, headers=headers
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                read = answer.read()
                return Answer(answer.status, json.loads(read) if read else None)
        except urllib.error.HTTPError as refused:
            return Answer(refused.code, json.loads(refused.read()))
        except OSError:
            return Answer(0, None)

    def get(self, path: str) -> Answer:
        return self.ask_for("GET", path)

    def runs(self) -> list[dict[str, Any]]:
        return list(self.get("v1/runs?limit=200").body["runs"])

    def run(self, run: str) -> dict[str, Any]:
        answer = self.get(f"v1/runs/{run}")
        assert answer.status == 200, answer
        return dict(answer.body)

    def ask(self, run: str, what: str) -> None:
        answer = self.ask_for("POST", f"v1/runs/{run}/{what}")
        assert answer.status == 202, answer

    def submit(self, overrides: Mapping[str, Any], *, recipe: str = "mock") -> str:
        """The id of a new run of the stored ``recipe`` with ``overrides``."""
        answer = self.ask_for(
            "POST", "v1/runs", {"recipe_name": recipe, "overrides": dict(overrides)}
        )
        assert answer.status == 201, answer
        return str(answer.body["id"])

    def finished(self, overrides: Mapping[str, Any], *, recipe: str = "mock") -> str:
        """The id of a run with ``overrides`` that has gone well to its end."""
        run = self.submit(overrides, recipe=recipe)
        self.until(lambda: self.run(run)["state"] in ENDED, f"{run} has ended")
        assert self.run(run)["state"] == "finished", self.run(run)["reason"]
        return run

    def active(self) -> set[str]:
        """Runs that wait or work."""
        return {run["id"] for run in self.runs() if run["state"] not in ENDED}

    def end_all_but(self, kept: set[str]) -> None:
        """Stop what a test has left behind."""
        for run in self.active() - kept:
            self.ask(run, "stop")
        self.until(lambda: self.active() <= kept, "the other runs have ended")

    @contextmanager
    def running(self, overrides: Mapping[str, Any], *, recipe: str = "mock") -> Iterator[str]:
        """A run that goes on meanwhile."""
        run = self.submit(overrides, recipe=recipe)
        self.until(lambda: self.run(run)["state"] == "running", f"{run} is running")
        try:
            yield run
        finally:
            self.ask(run, "stop")
            self.until(lambda: self.run(run)["state"] in ENDED, f"{run} has ended")

    def emit(self, run: str, event: EventData) -> None:
        """Emit an event of the run, as its workers do."""

        async def emit() -> None:
            index = Index(ServiceIndex(self.data).start(), run)
            try:
                await index.emit(event)
            finally:
                await index.close()

        asyncio.run(emit())

    def link(self) -> str:
        """The address that signs a browser in, once."""
        return f"{self.url}#login={self.ask_for('POST', 'v1/login/links').body['code']}"

    def token(self, scope: Scope) -> str:
        """A new token."""

        async def make() -> str:
            tokens = Tokens(ServiceIndex(self.data).start())
            try:
                return (await tokens.create("tests", scope))[1]
            finally:
                await tokens.close()

        return asyncio.run(make())


@contextmanager
def site(data: Path, *options: str) -> Iterator[Site]:
    running_site = Site(data, *options)
    running_site.start()
    try:
        yield running_site
    finally:
        running_site.close()
