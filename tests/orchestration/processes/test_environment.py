"""What processes show of their environment: in `os.environ`, and in /proc."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestration.processes.environment import of_user_code, without_secrets

ROOT = Path(__file__).resolve().parents[3]
SECRETS = {
    "ASYNCDOCK_INDEX": "redis://:pw@h",
    "ASYNCDOCK_TOKEN": "t",
    "ASYNCDOCK_HOST_TOKEN": "h",
    "ASYNCDOCK_LEASE": "l",
}


def test_our_secrets_are_left_out_and_other_variables_stay() -> None:
    environment = {**SECRETS, "ASYNCDOCK_TRACE": "1", "AWS_SECRET_ACCESS_KEY": "k", "PATH": "/bin", "HF_TOKEN": "x"}
    assert without_secrets(environment).keys() == {"ASYNCDOCK_TRACE", "AWS_SECRET_ACCESS_KEY", "PATH", "HF_TOKEN"}
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
    environment = {**os.environ, "ASYNCDOCK_INDEX": "redis://:a-password@host", "KEPT": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
