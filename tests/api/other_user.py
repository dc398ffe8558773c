"""Another user of this machine: what Python's standard library can do as `nobody`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

NOBODY = 65534
PYTHON = "/usr/bin/python3"  # one that another user may execute, whatever executes the tests


@cache
def missing() -> str:
    """Return why no process of another user can be started here, or ""."""
    if os.geteuid() != 0:
        return "only root can start a process of another user"
    if not os.path.exists(PYTHON):
        return f"{PYTHON} is not installed"
    return ""


def options() -> dict[str, Any]:
    return {
        "user": NOBODY,
        "group": NOBODY,
        "extra_groups": [],
        "cwd": "/",
        "env": {"HOME": "/nonexistent"},
    }


def as_nobody(program: str, *arguments: object) -> Any:
    """Return what ``program`` prints, as JSON, when `nobody` executes it with ``arguments``, as
    JSON in ``sys.argv[1]``."""
    command = [
        PYTHON,
        "-c",
        f"import json, sys\ngiven = json.loads(sys.argv[1])\n{program}",
        json.dumps(arguments),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, **options())
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


CALL = """
import urllib.error, urllib.request
def call(url, method="GET", headers={}, body=None):
    data = None if body is None else json.dumps(body).encode()
    kind = {"Content-Type": "application/json"} if data else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, {**kind, **headers}, method=method)) as answer:
            return answer.status, answer.read().decode(errors="replace")
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read().decode()
"""

LISTEN = """
import socket
family = socket.AF_INET6 if ":" in given[0] else socket.AF_INET
listening = socket.socket(family)
listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
listening.bind((given[0], given[1]))
listening.listen()
print("listens", flush=True)
while True:
    client, _ = listening.accept()
    print(json.dumps(client.recv(65536).decode(errors="replace")), flush=True)
    body = b'{"runs": [], "next": ""}'
    head = b"HTTP/1.1 200 OK\\r\\nContent-Type: application/json\\r\\nConnection: close\\r\\nContent-Length: %d\\r\\n\\r\\n"
    client.sendall(head % len(body) + body)
    client.close()
"""


@contextmanager
def listening(host: str, port: int) -> Iterator[list[str]]:
    """`nobody` listens there as a service would; what was sent to it, once the block has ended."""
    program = f"import json, sys\ngiven = json.loads(sys.argv[1])\n{LISTEN}"
    command = [PYTHON, "-c", program, json.dumps([host, port])]
    heard: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options()) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "listens\n"
            yield heard
        finally:
            process.kill()
            heard += [json.loads(line) for line in process.stdout]


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-P", "-m", "api.cli.main", *map(str, arguments)]
