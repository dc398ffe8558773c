"""Commands and servers start at once: what takes seconds to import is left to the processes that
compute with it.

Each command runs as a person would start it, with ``-X importtime``, which lists every module that
it imports.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from orchestration.service.own_services import read_authorization
from tests.api.served import SECONDS, environment

HEAVY = {"torch", "tensordict", "transformers", "safetensors.torch"}


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-P", "-X", "importtime", "-m", "api.cli.main", *map(str, arguments)]


def asyncdock(*arguments: str | Path) -> tuple[str, set[str]]:
    """What a command prints, and the modules that it imports."""
    done = subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=SECONDS, env=environment()
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, imported(done.stderr)


def imported(output: str) -> set[str]:
    found = set(re.findall(r"^import time: +\d+ \| +\d+ \| +([\w.]+)$", output, re.MULTILINE))
    assert "api.cli.common.exit_codes" in found, "the imports are not listed"
    return found


def answer(url: str, token: str, body: object = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, data, headers)
    with urllib.request.urlopen(request, timeout=SECONDS) as response:
        return str(response.read().decode())


def started(log: Path, *arguments: str | Path) -> subprocess.Popen[str]:
    with log.open("w") as file:
        return subprocess.Popen(
            command(*arguments), stdout=subprocess.PIPE, stderr=file, text=True, env=environment()
        )


def end(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    assert process.wait(SECONDS) == 0


def test_tokens_are_handled_without_torch_and_json_stands_alone(tmp_path: Path) -> None:
    out, modules = asyncdock(
        "token", "create", "ann", "--scope", "read", "--data", tmp_path, "--json"
    )
    # the log of the index that was started for it is not in between
    assert json.loads(out)["name"] == "ann"
    assert not modules & HEAVY
    out, modules = asyncdock("token", "list", "--data", tmp_path, "--json")
    assert [token["name"] for token in json.loads(out)] == ["ann"]
    assert not modules & HEAVY


@pytest.mark.parametrize(
    "recipe", ["mock", "tiny"]
)  # others show a prompt as their tokenizer, which loads torch, makes it
def test_a_recipe_is_checked_without_torch(recipe: str) -> None:
    out, modules = asyncdock("check", recipe)
    assert f"{recipe}: sound" in out
    assert not modules & HEAVY


def test_a_service_starts_and_answers_without_torch(tmp_path: Path) -> None:
    log = tmp_path / "serve.log"
    process = started(log, "serve", "--data", tmp_path / "service", "--listen", "127.0.0.1:0")
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("AsyncDock serves "), log.read_text()
        url = line.split()[2]
        token = read_authorization(tmp_path / "service")
        for path in (
            "",
            "v1/runs",
            "v1/recipes",
            "v1/recipes/mock",
            "v1/recipes/schema",
            "metrics",
            "openapi.json",
        ):
            assert answer(f"{url}/{path}", token)
        assert (
            json.loads(answer(f"{url}/v1/recipes/check", token, {"recipe_name": "mock"}))["recipe"][
                "name"
            ]
            == "mock"
        )
        out, modules = asyncdock("runs", "list", "--server", url, "--json")
        assert json.loads(out) == []
        assert not modules & HEAVY
    finally:
        end(process)
    modules = imported(log.read_text())
    assert {
        "api.server.app",
        "api.server.routes.external",
        "orchestration.service.agent",
    } <= modules
    assert not modules & HEAVY


def test_an_agent_starts_without_torch(tmp_path: Path) -> None:
    log = tmp_path / "agent.log"
    process = started(log, "agent", "--data", tmp_path / "service")
    try:
        deadline = time.monotonic() + SECONDS
        while "agent works" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline
            os.sched_yield()
    finally:
        end(process)
    modules = imported(log.read_text())
    assert "orchestration.service.agent" in modules
    assert not modules & HEAVY
