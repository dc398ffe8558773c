"""Tinker's own clients, unmodified, against ``asyncdock tinker`` over loopback."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from orchestration.processes.handles import Process
from orchestration.service.index_server import FILE
from orchestration.service.own_services import read_authorization
from tests.api.served import Served, environment
from tests.api.tinker import sdk
from tests.api.watchdog import HELD
from tests.pages.page import ROOT, blocks
from tests.ports import free_port

SECONDS = 120.0
PROGRAM = Path(__file__).with_name("program.py")
COMMANDS = Path(__file__).with_name("commands.py")
LOOP = Path(__file__).with_name("loop.py")
STEPS = 12  # of a loop
ENGINE = "orchestration.calls.engines.process"  # the module of its process


@dataclass
class Server:
    """``asyncdock tinker`` with ``models``, each a folder by the name that clients know."""

    data: Path
    port: int
    models: Mapping[str, str] = field(default_factory=lambda: {"tiny": "tiny"})
    process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def key(self) -> str:
        return f"tml-{read_authorization(self.data)}"

    @property
    def index(self) -> Process:
        """The process of its index."""
        process = Process.parse(json.loads((self.data / FILE).read_text())["process"])
        assert process is not None
        return process

    def start(self, output: int = subprocess.PIPE) -> None:
        command = ["tinker", "--data", str(self.data), "--threads", "1"]
        for name, folder in self.models.items():
            command += ["--model", f"{name}={folder}"]
        with (self.data.parent / "tinker.log").open("a") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "tests.api.watched"),
                    *command,
                    *("--listen", f"127.0.0.1:{self.port}"),
                ],
                stdout=output,
                stderr=log,
                text=True,
                cwd=ROOT,
                env=environment(),
            )
        if self.process.stdout is None:
            return
        printed = [self.process.stdout.readline() for _ in range(3)]
        assert printed == [
            f"AsyncDock serves {', '.join(self.models)} at {self.url}\n",
            f"export TINKER_BASE_URL={self.url}\n",
            # no terminal: a log gets no key
            f"export TINKER_API_KEY=$(asyncdock token show --tinker --data {self.data})\n",
        ], (self.data.parent / "tinker.log").read_text()

    def end(self, number: int = signal.SIGINT) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(SECONDS)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    served = Server(tmp_path_factory.mktemp("tinker") / "data", free_port())
    served.start()
    yield served
    assert served.end() == 0
    held = [line for line in (served.data.parent / "tinker.log").open() if HELD in line]
    assert not held, "no handler may hold the event loop"


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("version", sdk.VERSIONS)
def test_every_call_of_a_client(version: str, server: Server) -> None:
    printed = sdk.program(version, PROGRAM, server.url, server.key)
    assert printed.splitlines()[-1] == "done"


@pytest.mark.timeout(1800)
def test_commands_of_the_newest_sdk(server: Server, tmp_path: Path) -> None:
    printed = sdk.program(sdk.NEWEST, COMMANDS, server.url, server.key, str(tmp_path))
    assert printed.splitlines()[-1] == "done"
    assert (tmp_path / "adapter_config.json").is_file()
    assert (tmp_path / "model" / "config.json").is_file()


@pytest.mark.timeout(1800)
def test_the_quick_start_of_the_page(server: Server, tmp_path: Path) -> None:
    page = ROOT / "docs" / "tinker.md"
    (quick_start,) = (block for block in blocks(page) if block.kind == "python")
    script = tmp_path / quick_start.file
    script.write_text(quick_start.text)
    printed = sdk.program(sdk.NEWEST, script, server.url, server.key)
    losses = [float(number) for number in re.findall(r"loss (\S+)", printed)]
    assert losses[-1] < losses[0] / 2, printed


def test_a_service_of_runs_serves_models_too(tmp_path: Path) -> None:
    served = Served(tmp_path / "data", "--tinker", "small=tiny", "--runs", "0")
    served.start()
    try:
        for path, headers, name in (
            ("/api/v1/get_server_capabilities", {"X-API-Key": f"tml-{served.token}"}, "small"),
            ("/v1/runs", served.headers, "runs"),
        ):
            request = urllib.request.Request(served.url + path, headers=headers)
            with urllib.request.urlopen(request, timeout=SECONDS) as answer:
                assert name in answer.read().decode()
    finally:
        served.end()


@pytest.mark.timeout(1800)
def test_a_loop_does_not_notice_that_server_index_and_engine_were_killed(
    server: Server, tmp_path: Path
) -> None:
    """Its losses and samples are those of an undisturbed run, to the last bit."""
    undisturbed = sdk.program(sdk.NEWEST, LOOP, server.url, server.key, str(STEPS))
    killed = Server(tmp_path / "data", free_port())
    killed.start()

    def kill_server() -> None:
        killed.end(signal.SIGKILL)
        killed.start()

    def kill_index() -> None:
        os.kill(killed.index.pid, signal.SIGKILL)

    def kill_engine() -> None:
        assert killed.process is not None
        (engine,) = (
            child.pid
            for child in psutil.Process(killed.process.pid).children()
            if ENGINE in child.cmdline()
        )
        os.kill(engine, signal.SIGKILL)

    with sdk.running(sdk.NEWEST, LOOP, killed.url, killed.key, str(STEPS)) as process:
        assert process.stdout is not None
        lines = list[str]()
        for kill in (kill_server, kill_index, kill_engine):
            lines += [process.stdout.readline() for _ in range(STEPS // 4)]
            kill()
        output, errors = process.communicate(timeout=SECONDS * 2)
    assert killed.end() == 0
    assert "".join(lines) + output == undisturbed, (process.returncode, errors)


def asyncdock(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "api.cli.main", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment(), timeout=SECONDS
    )


def test_a_key_that_was_made_for_somebody_opens_the_server_until_it_is_revoked(
    server: Server,
) -> None:
    data = ["--data", str(server.data)]
    made = asyncdock("token", "create", "ann", "--scope", "run", "--tinker", "--json", *data)
    token = json.loads(made.stdout)
    assert token["token"].startswith("tml-")
    shown = asyncdock("token", "show", "--tinker", *data)
    assert shown.stdout.strip() == server.key

    def status() -> int:
        request = urllib.request.Request(
            f"{server.url}/api/v1/sessions", headers={"X-API-Key": token["token"]}
        )
        try:
            with urllib.request.urlopen(request, timeout=SECONDS) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    assert status() == 200
    assert asyncdock("token", "revoke", token["id"], *data).returncode == 0
    assert status() == 401


def test_a_terminal_gets_the_key_and_a_link_that_signs_a_browser_in(tmp_path: Path) -> None:
    served = Server(tmp_path / "data", free_port())
    terminal, output = pty.openpty()
    served.start(output)
    os.close(output)
    try:
        lines = list[str]()
        with os.fdopen(terminal) as printed:
            while len(lines) < 5:
                lines.append(printed.readline().rstrip())
            assert lines[2] == f"export TINKER_API_KEY={served.key}"
            assert f"`asyncdock link --server {served.url}` prints another link" in lines[4]
            page, _, code = lines[3].removeprefix("Open ").partition("#login=")
            assert page == f"{served.url}/"
            request = urllib.request.Request(
                f"{page}v1/login",
                json.dumps({"code": code}).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=SECONDS) as answer:
                session = json.load(answer)["token"]
            request = urllib.request.Request(
                f"{page}tinker/models", headers={"Authorization": f"Bearer {session}"}
            )
            with urllib.request.urlopen(request, timeout=SECONDS) as answer:
                assert json.load(answer) == {"models": [], "total": 0}
    finally:
        assert served.end() == 0


def children(process: int) -> list[int]:
    listed = Path(f"/proc/{process}/task/{process}/children").read_text()
    found = [int(number) for number in listed.split()]
    return found + [each for child in found for each in children(child)]


def test_ctrl_c_leaves_no_process_and_the_next_server_has_everything(tmp_path: Path) -> None:
    served = Server(tmp_path / "data", free_port())
    served.start()
    assert served.process is not None

    def post(path: str, **fields: object) -> dict[str, object]:
        request = urllib.request.Request(
            f"{served.url}/api/v1/{path}",
            json.dumps(fields).encode(),
            {"X-API-Key": served.key, "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            return dict(json.loads(answer.read()))

    session = post("create_session", tags=[], sdk_version="0.38.0")["session_id"]
    created = post("create_model", session_id=session, model_seq_id=0, base_model="tiny")
    assert post("retrieve_future", request_id=created["request_id"])["type"] == "create_model"
    processes = children(served.process.pid)
    assert len(processes) >= 2, "the engine's, and the index's"
    assert served.end() == 0
    assert not (served.data / FILE).exists()
    deadline = time.monotonic() + SECONDS
    while left := [each for each in processes if Path(f"/proc/{each}").exists()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    served.start()
    try:
        described = post("get_info", model_id=created["model_id"])
        assert (described["model_name"], described["lora_rank"]) == ("tiny", 32)
    finally:
        assert served.end() == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model", "/no/such/model"], "/no/such/model"),
        (["--model", "tiny", "--device", "abacus"], "device 'abacus'"),
        (["--model", "=x"], "model: '=x'"),
    ],
    ids=["model", "device", "name"],
)
def test_what_cannot_be_served_is_named_with_the_fix(
    options: list[str], words: str, tmp_path: Path
) -> None:
    done = asyncdock("tinker", *options, "--data", str(tmp_path / "data"))
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
