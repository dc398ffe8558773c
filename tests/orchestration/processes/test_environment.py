"""What processes show of their environment: in `os.environ`, and in /proc."""

from __future__ import annotations

import os
import site
import subprocess
import sys
from pathlib import Path

import pytest

from orchestration.processes.environment import importable, of_user_code, without_secrets

ROOT = Path(__file__).resolve().parents[3]
SECRETS = {
    "ASYNCDOCK_INDEX": "redis://:pw@h",
    "ASYNCDOCK_TOKEN": "t",
    "ASYNCDOCK_HOST_TOKEN": "h",
    "ASYNCDOCK_LEASE": "l",
}


def test_our_secrets_are_left_out_and_other_variables_stay() -> None:
    environment = {
        **SECRETS,
        "ASYNCDOCK_TRACE": "1",
        "AWS_SECRET_ACCESS_KEY": "k",
        "PATH": "/bin",
        "HF_TOKEN": "x",
    }
    assert without_secrets(environment).keys() == {
        "ASYNCDOCK_TRACE",
        "AWS_SECRET_ACCESS_KEY",
        "PATH",
        "HF_TOKEN",
    }
    assert of_user_code(environment, None).keys() == {"AWS_SECRET_ACCESS_KEY", "PATH", "HF_TOKEN"}
    assert of_user_code(environment, []).keys() == {"PATH"}
    assert of_user_code(environment, ["HF_TOKEN", "ASYNCDOCK_TOKEN"]).keys() == {"PATH", "HF_TOKEN"}


@pytest.mark.skipif(sys.platform != "linux", reason="it needs /proc")
def test_what_is_taken_is_shown_nowhere() -> None:
    code = (
        "import os, subprocess; from orchestration.processes.environment import take\n"
        "assert take('ASYNCDOCK_INDEX') == 'redis://:a-password@host'\n"
        "shown = open('/proc/self/environ', 'rb').read() + repr(dict(os.environ)).encode()\n"
        "shown += subprocess.run(['env'], capture_output=True, check=True).stdout\n"
        "assert b'a-password' not in shown, shown\n"
        "assert b'KEPT=1' in shown\n"
    )
    environment = {
        **os.environ,
        "ASYNCDOCK_INDEX": "redis://:a-password@host",
        "KEPT": "1",
        "PYTHONPATH": str(ROOT),
    }
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def test_a_new_interpreter_finds_the_packages_where_this_one_did(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = str(ROOT)
    monkeypatch.setattr(
        sys, "path", [root, *(path for path in sys.path if path != root)]
    )  # as `python -m` in a checkout
    assert importable({"A": "b"}) == {"A": "b", "PYTHONPATH": root}
    found = importable({"PYTHONPATH": f"/mine{os.pathsep}"})
    assert found == {"PYTHONPATH": f"/mine{os.pathsep}{root}"}, "what the user gave goes before"
    assert importable(found) == found
    monkeypatch.setattr(site, "getsitepackages", lambda: [root])
    assert importable({}) == {}, "installed: packages of others must not go before Python's own"


def test_the_fork_server_of_a_checkout_that_is_not_installed_starts(tmp_path: Path) -> None:
    """The packages are found in the current folder alone: no installed copy, none on PYTHONPATH."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.meta_path[:] = [one for one in sys.meta_path if 'editable' not in "
        "repr(one)]\n"
    )
    log = str(tmp_path / "log")
    program = (
        "import asyncio, os; from orchestration.processes.forkserver import ForkServer, Launch\n"
        f"launch = Launch('builtins:print', ['it started'], dict(os.environ), {str(tmp_path)!r}, "
        f"{log!r}, 'it')\n"
        "async def main():\n"
        "    server = ForkServer.start(['orchestration.processes.handles'])\n"
        "    await (await server.connect().launch(launch)).wait()\n"
        "asyncio.run(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert Path(log).read_text() == "['it started']\n", done.stderr
