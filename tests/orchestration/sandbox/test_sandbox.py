"""The sandbox attacked from inside, for real: by root and by another user, in each mechanism."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from orchestration.sandbox import seccomp
from orchestration.sandbox.sandbox import LANDLOCK, NAMESPACES, Available, refusal, visible
from orchestration.sandbox.sandbox import Sandbox as Bounds

ROOT = Path(__file__).resolve().parents[3]
AS_NOBODY = Path(__file__).with_name("as_nobody.py")
USERS = ("this user", "nobody")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it needs Linux")


@pytest.fixture
def outside() -> Iterator[dict[str, Any]]:
    """Things outside of the sandbox that its user may use."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    (folder / "secret").write_text("a secret")
    (folder / "secret").chmod(0o644)
    (folder / "open").mkdir()
    (folder / "open").chmod(0o777)
    handle, shared = tempfile.mkstemp(dir="/dev/shm")
    os.write(handle, bytes(4096))
    os.chmod(shared, 0o666)
    path = str(folder / "socket")
    with (
        socket.create_server(("127.0.0.1", 0)) as port,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as echo,
        socket.socket(socket.AF_UNIX) as named,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        echo.bind(("127.0.0.1", 0))
        threading.Thread(target=answer_datagrams, args=(echo,), daemon=True).start()
        named.bind(path)
        os.chmod(path, 0o777)
        named.listen()
        name = f"asyncdock-{os.getpid()}"
        abstract.bind("\0" + name)
        abstract.listen()
        yield {
            "secret": str(folder / "secret"),
            "open": str(folder / "open"),
            "shared": shared,
            "port": port.getsockname()[1],
            "echo": echo.getsockname()[1],
            "path": path,
            "abstract": name,
        }
    os.close(handle)
    os.unlink(shared)
    shutil.rmtree(folder)


def answer_datagrams(echo: socket.socket) -> None:
    with suppress(OSError):  # it is closed
        while True:
            data, sender = echo.recvfrom(1)
            echo.sendto(data, sender)


def command(user: str, *arguments: str) -> list[str]:
    """The command that runs Python with ``arguments`` as ``user``.

    Skips the test where that cannot be done.
    """
    if user == "this user":
        return [sys.executable, "-P", *arguments]
    if os.geteuid() != 0:
        pytest.skip("only root becomes another user")
    return [sys.executable, str(AS_NOBODY), sys.executable, "-P", *arguments]


def environment() -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("mechanism", [NAMESPACES, LANDLOCK])
def test_nothing_gets_out(mechanism: str, user: str, outside: dict[str, Any]) -> None:
    if reason := refusal(mechanism):
        pytest.skip(reason)
    code = (
        "import signal, time; signal.signal(signal.SIGUSR1, lambda *_: print('hit', flush=True)); "
        "print(0, flush=True)"
    )
    sleeper = [*command(user, "-c", code + "\nwhile True: time.sleep(60)")]
    with subprocess.Popen(sleeper, stdout=subprocess.PIPE, text=True, env=environment()) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "0\n"
            facts = outside | {"mechanism": mechanism, "outside": process.pid}
            attacks = command(user, "-m", "tests.orchestration.sandbox.attacks", json.dumps(facts))
            done = subprocess.run(
                attacks,
                capture_output=True,
                text=True,
                env=environment(),
                cwd="/",
                timeout=120,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            report = json.loads(done.stdout)
            assert {name: got for name, got in report["got"].items() if got} == {}
            assert len(report["got"]) > 25
            assert all(report["allowed"].values()), report["allowed"]
            assert process.poll() is None
        finally:
            process.kill()
        assert process.stdout.read() == ""
    assert os.listdir(outside["open"]) == []
    assert Path(outside["secret"]).stat().st_mode & 0o777 == 0o644


def test_the_attacks_succeed_without_a_sandbox(outside: dict[str, Any]) -> None:
    """Otherwise the other tests would show nothing."""
    code = (
        "import json, sys; from tests.orchestration.sandbox import attacks; attacks.enter = lambda "
        "*_, **__: None\nfacts = json.loads(sys.argv[1]); a = attacks.Attacks(facts, 0)\nnames = "
        "['reads_a_secret', 'writes_a_marker', 'reads_the_environment_outside', "
        "'signals_outside',\n  'connects_to_a_port', 'connects_to_a_socket', "
        "'connects_to_an_abstract_socket', 'maps_shared_memory',\n  'gives_a_file_other_rights', "
        "'limits_a_process_outside', 'sends_a_datagram']\nprint(json.dumps({name: "
        "attacks.outcome(getattr(a, name)) for name in names}))"
    )
    with subprocess.Popen(["sleep", "60"]) as process:
        facts = outside | {"outside": process.pid}
        time.sleep(0.2)
        done = subprocess.run(
            [sys.executable, "-P", "-c", code, json.dumps(facts)],
            capture_output=True,
            text=True,
            env=environment(),
            check=True,
        )
        process.kill()
    assert all(json.loads(done.stdout).values()), done.stdout


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize(
    ("how", "code"), [("os._exit(7)", 7), ("os.kill(os.getpid(), 9)", -9), ("os.abort()", -6)]
)
def test_it_ends_as_the_sandboxed_process_does(how: str, code: int, user: str) -> None:
    if reason := refusal(NAMESPACES):
        pytest.skip(reason)
    text = (
        "import os; from orchestration.sandbox.sandbox import Sandbox, enter; "
        f"enter(Sandbox(modules=({str(ROOT)!r},), mechanism='namespaces')); {how}"
    )
    done = subprocess.run(
        command(user, "-c", text), env=environment(), cwd="/", timeout=60, check=False
    )
    assert done.returncode == code


def test_no_process_is_left_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    if reason := refusal(NAMESPACES):
        pytest.skip(reason)
    name = f"asyncdock-sandbox-{os.getpid()}"
    text = (
        "import os, subprocess, sys, time; from orchestration.sandbox.sandbox import Sandbox, "
        "enter; "
        f"enter(Sandbox(modules=({str(ROOT)!r},), mechanism='namespaces')); "
        f"subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)', {name!r}], "
        f"start_new_session=True); "
        "print('up', flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        command("this user", "-c", text, name),
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
        cwd="/",
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "up\n"
            _await(name, 4)  # the supervisor, the first process, the sandboxed one, and its child
        finally:
            process.send_signal(signal.SIGKILL)
    _await(name, 0)


def _await(name: str, count: int) -> None:
    deadline = time.monotonic() + 20
    while len(_named(name)) != count and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(_named(name)) == count


def _named(name: str) -> list[int]:
    """The processes that have ``name`` in their command."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                command_line = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if name.encode() in command_line:
                found.append(int(folder.name))
    return found


def test_all_processes_together_are_bounded_in_memory() -> None:
    """Shared memory counts for no process, and children each have a limit of their own."""
    if reason := refusal(NAMESPACES):
        pytest.skip(reason)
    text = (
        "import mmap; from orchestration.sandbox.sandbox import Sandbox, enter; "
        f"enter(Sandbox(modules=({str(ROOT)!r},), mechanism='namespaces', memory=200 << 20))\n"
        "held = mmap.mmap(-1, 8 << 30)\nfor at in range(0, 8 << 30, 4096): held[at] = 1\n"
    )
    done = subprocess.run(
        command("this user", "-c", text), env=environment(), cwd="/", timeout=120, check=False
    )
    assert done.returncode == -signal.SIGKILL


def test_a_machine_without_namespaces_gives_landlock() -> None:
    """The real trial, in a process to which the kernel refuses new namespaces, as Docker's default
    profile does."""
    if reason := refusal(LANDLOCK):
        pytest.skip(reason)
    text = (
        "from orchestration.sandbox.seccomp import Rule, install; from "
        "orchestration.sandbox.sandbox import available; install([Rule('unshare'), Rule('clone3', "
        "error=38)]); found = available(); print(found.mechanism); print(found.shortfall)"
    )
    done = subprocess.run(
        command("this user", "-c", text),
        capture_output=True,
        text=True,
        env=environment(),
        timeout=60,
        check=True,
    )
    mechanism, shortfall = done.stdout.splitlines()
    assert mechanism == LANDLOCK
    assert "namespaces are refused (" in shortfall
    assert "Operation not permitted" in shortfall


def test_a_machine_with_neither_says_so() -> None:
    text = (
        "from orchestration.sandbox import seccomp; from orchestration.sandbox.seccomp import "
        "Rule, install; from orchestration.sandbox.sandbox import "
        "available\nseccomp.NUMBERS['landlock_create_ruleset'] = (444, "
        "444)\ninstall([Rule('unshare'), Rule('landlock_create_ruleset', error=95)]); found = "
        "available()\nprint(repr(found.mechanism)); print(found.shortfall)"
    )
    done = subprocess.run(
        command("this user", "-c", text),
        capture_output=True,
        text=True,
        env=environment(),
        timeout=60,
        check=True,
    )
    assert done.stdout.startswith("''\nno sandbox: ")
    assert Available("", "").shortfall == ""


def test_of_a_folder_on_the_import_path_modules_are_seen_and_nothing_else(tmp_path: Path) -> None:
    for name in ("mine.py", ".env", "index.json", "tokens.json"):
        (tmp_path / name).write_text("")
    for name in ("package", ".ssh", "runs", "data-1.0.dist-info"):
        (tmp_path / name).mkdir()
    (tmp_path / "package/__init__.py").write_text("")
    seen = {
        path for path in visible(Bounds(modules=(str(tmp_path),))) if path.startswith(str(tmp_path))
    }
    assert {Path(path).name for path in seen} == {"mine.py", "package", "data-1.0.dist-info"}
    more = {*visible(Bounds(modules=(str(tmp_path),), read=(str(tmp_path / "index.json"),)))}
    assert str(tmp_path / "index.json") in more


def test_numbers_of_system_calls_are_the_kernels() -> None:
    """libseccomp, where the system has it, knows them for both machines."""
    try:
        library = ctypes.CDLL("libseccomp.so.2")
    except OSError:
        pytest.skip("the system has no libseccomp")
    library.seccomp_syscall_resolve_name_arch.argtypes = [ctypes.c_uint32, ctypes.c_char_p]
    newer = {"file_setattr", "open_tree_attr", "removexattrat", "setxattrat"}
    for machine, (number, column) in seccomp.MACHINES.items():
        for name, numbers in seccomp.NUMBERS.items():
            known = library.seccomp_syscall_resolve_name_arch(number, name.encode())
            if name not in newer:
                assert (known if known >= 0 else None) == numbers[column], (machine, name)


def test_a_machine_of_unknown_calls_is_refused() -> None:
    with pytest.raises(seccomp.SandboxRefused, match="riscv64"):
        seccomp.program([], "riscv64")
    assert platform.machine() in seccomp.MACHINES
