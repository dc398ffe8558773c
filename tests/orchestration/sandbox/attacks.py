"""What a process in a sandbox tries, each attempt with what it gets.

Prints JSON: what each attack got, "" for nothing.

python -m tests.orchestration.sandbox.attacks FACTS      FACTS: JSON, with the mechanism and what there is outside
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from orchestration.sandbox.sandbox import NAMESPACES, Sandbox, enter

MEMORY = 1 << 30
SCRATCH = 64 << 20
PROCESSES = 40


class Attacks:
    """``facts``: what there is outside: a ``secret`` file, an ``open`` folder that all may write, a
    ``port``, a socket ``path``, an ``abstract`` name, ``shared`` memory, and the process
    ``outside``."""

    def __init__(self, facts: dict[str, Any], inherited: int) -> None:
        self.facts = facts
        self.inherited = inherited

    def reads_a_secret(self) -> object:
        return Path(self.facts["secret"]).read_text()

    def reads_a_secret_by_a_link(self) -> object:
        os.symlink(self.facts["secret"], "link")
        return Path("link").read_text()

    def writes_by_a_link(self) -> object:
        os.symlink(self.facts["open"], "folder")
        return Path("folder", "marker").write_text("was here")

    def reads_the_users_of_the_machine(self) -> object:
        return Path("/etc/shadow").read_text()

    def lists_homes(self) -> object:
        return os.listdir("/home")

    def writes_a_marker(self) -> object:
        return Path(self.facts["open"], "marker").write_text("was here")

    def writes_by_the_shell(self) -> object:
        subprocess.run(
            f"echo was here > {self.facts['open']}/marker",
            shell=True,
            check=True,
            capture_output=True,
        )
        return "written"

    def gives_a_file_other_rights(self) -> object:
        os.chmod(self.facts["secret"], 0o777)
        return oct(os.stat(self.facts["secret"]).st_mode)

    def reads_the_environment_outside(self) -> object:
        return Path(f"/proc/{self.facts['outside']}/environ").read_bytes()[:10].hex()

    def reads_the_environment_of_the_first_process(self) -> object:
        return Path("/proc/1/environ").read_bytes()[:10].hex()

    def reads_memory_outside(self) -> object:
        return os.open(f"/proc/{self.facts['outside']}/mem", os.O_RDONLY)

    def traces_a_process_outside(self) -> object:
        attached = ctypes.CDLL(None).ptrace(16, self.facts["outside"], 0, 0)
        return "attached" if attached == 0 else ""

    def signals_outside(self) -> object:
        os.kill(self.facts["outside"], signal.SIGUSR1)
        return "sent"

    def limits_a_process_outside(self) -> object:
        import resource

        return resource.prlimit(self.facts["outside"], resource.RLIMIT_CPU)

    def signals_everybody(self) -> object:
        os.kill(-1, signal.SIGUSR1)  # the test looks whether the process outside got it

    def connects_to_a_port(self) -> object:
        return socket.create_connection(("127.0.0.1", self.facts["port"]), timeout=2)

    def sends_a_datagram(self) -> object:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
            datagrams.settimeout(2)
            datagrams.sendto(b"x", ("127.0.0.1", self.facts["echo"]))
            return datagrams.recv(1)

    def connects_to_the_host_of_a_virtual_machine(self) -> object:
        return socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)

    def connects_to_a_socket(self) -> object:
        return socket.socket(socket.AF_UNIX).connect(self.facts["path"]) or "connected"

    def connects_to_an_abstract_socket(self) -> object:
        return socket.socket(socket.AF_UNIX).connect("\0" + self.facts["abstract"]) or "connected"

    def maps_shared_memory(self) -> object:
        with open(self.facts["shared"], "r+b") as file:
            return mmap.mmap(file.fileno(), 0)[:4].hex()

    def uses_an_inherited_descriptor(self) -> object:
        return os.read(self.inherited, 4).hex()

    def mounts(self) -> object:
        return "" if ctypes.CDLL(None).mount(b"none", b"/usr", b"tmpfs", 0, None) else "mounted"

    def becomes_owner_of_namespaces(self) -> object:
        return "" if ctypes.CDLL(None).unshare(0x10000000) else "unshared"

    def becomes_root(self) -> object:
        os.setresuid(0, 0, 0)
        return os.getresuid()

    def asks_for_capabilities(self) -> object:
        status = Path("/proc/self/status").read_text()
        held = [
            line.split()[1]
            for line in status.splitlines()
            if line.startswith(("CapEff", "CapPrm", "CapBnd"))
        ]
        return "" if int(held[0], 16) == int(held[1], 16) == 0 else held

    def calls_io_uring(self) -> object:
        return (
            ""
            if ctypes.CDLL(None).syscall(425, 1, ctypes.create_string_buffer(128)) < 0
            else "ring"
        )

    def holds_100_gigabytes(self) -> object:
        return len(bytearray(100 << 30))

    def holds_shared_memory(self) -> object:
        return ctypes.CDLL(None).shmget(1, 100 << 30, 0o1600) if self._shmget_works() else ""

    def _shmget_works(self) -> bool:
        return int(ctypes.CDLL(None).shmget(0, 4096, 0o1600)) >= 0

    def fills_the_disk(self) -> object:
        written = 0
        try:
            for number in range(1000):
                Path(f"fill-{number}").write_bytes(bytes(4 << 20))
                written += 4 << 20
        except OSError:
            pass
        for number in range(1000):
            Path(f"fill-{number}").unlink(missing_ok=True)
        return written if written > SCRATCH else ""

    def forks_10000_processes(self) -> object:
        children: list[int] = []
        try:
            for _ in range(10_000):
                child = os.fork()
                if child == 0:
                    time.sleep(60)
                    os._exit(0)
                children.append(child)
        except OSError:
            pass
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        return len(children) if len(children) > PROCESSES else ""


def outcome(attack: Callable[[], object]) -> str:
    try:
        got = attack()
    except (OSError, MemoryError, subprocess.CalledProcessError):
        return ""
    return "" if got in (None, "") else str(got)


def allowed(mechanism: str) -> dict[str, bool]:
    """What must go on working."""
    threading.Thread(target=time.sleep, args=(0,)).start()
    one, other = socket.socketpair()
    one.send(b"x")
    checks = {
        "imports": bool(__import__("sqlite3")),
        "pairs": other.recv(1) == b"x",
        "devices": bool(os.urandom(1)),
    }
    if mechanism == NAMESPACES:
        Path("scratch").write_text("x")
        done = subprocess.run([sys.executable, "-c", "print(1)"], capture_output=True, check=False)
        checks |= {"scratch": Path("scratch").read_text() == "x", "programs": done.stdout == b"1\n"}
        try:
            subprocess.run(["sleep", "60"], timeout=0.1, check=False)
        except subprocess.TimeoutExpired:
            checks["signals"] = True
    return checks


def main(text: str) -> None:
    facts = json.loads(text)
    inherited = os.open(facts["shared"], os.O_RDONLY)
    root = str(Path(__file__).resolve().parents[3])
    enter(
        Sandbox(
            modules=(root,),
            mechanism=facts["mechanism"],
            memory=MEMORY,
            scratch=SCRATCH,
            processes=PROCESSES,
        )
    )
    attacks = Attacks(facts, inherited)
    names = [name for name in vars(Attacks) if not name.startswith("_")]
    got = {name: outcome(getattr(attacks, name)) for name in names}
    print(json.dumps({"got": got, "allowed": allowed(facts["mechanism"])}))


if __name__ == "__main__":
    main(sys.argv[1])
