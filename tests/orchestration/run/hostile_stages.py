"""Stages that look for what is their worker's, and that send it something else than columns."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pickle
import re
import socket
import stat
import struct
import sys
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import torch

from pipeline.data.columns import Schema
from stages.flow import UserStage
from stages.flow.declarations import column
from stages.flow.packed_rows import packed_rows

OF_A_WORKER = ("pipeline.index", "pipeline.warehouse", "redis", "valkey", "orchestration.run")
MARK = Schema([column("mark", "float32")])
IMPORTS = os.environ.get("HOSTILE_IMPORTS")

if IMPORTS:  # code of the module itself, in every process that imports it
    with open(IMPORTS, "a") as _file:
        _file.write(
            f"{os.getpid()} {Path('/proc/self/cmdline').read_bytes().decode().strip(chr(0))}\n"
        )


class Marks(UserStage):
    needs: ClassVar = ("response_ids",)
    makes: ClassVar = {"mark": "float32"}

    def process(self, rows: Any) -> Any:
        return {"mark": torch.zeros(len(rows["response_ids"]))}


class Looks(Marks):
    """Writes what it finds to ``file``.

    ``pattern``: of the index's password, which it does not hold itself.
    """

    file: str
    pattern: str

    def process(self, rows: Any) -> Any:
        if not os.path.exists(self.file):
            Path(self.file).write_text(json.dumps(self.found()))
            print("printed by a stage", flush=True)
        return super().process(rows)

    def found(self) -> dict[str, Any]:
        secret = re.compile(self.pattern.encode())
        parent = os.getppid()
        worker = int(Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1])
        environments = {
            "os.environ": repr(dict(os.environ)).encode(),
            "own": Path("/proc/self/environ").read_bytes(),
            "parent": Path(f"/proc/{parent}/environ").read_bytes(),
            "worker": Path(f"/proc/{worker}/environ").read_bytes(),
        }
        return {
            "environments": [name for name, text in environments.items() if secret.search(text)],
            "variables": [name for name in os.environ if name.startswith("ASYNCDOCK_")],
            "objects": sorted({name for thing in gc.get_objects() if (name := _owned(thing))}),
            "texts": sum(len(secret.findall(text)) for text in _texts()),
            "memory": sum(len(secret.findall(piece)) for piece in _memory()),
            "mapped": [
                line
                for line in Path("/proc/self/maps").read_text().splitlines()
                if "/dev/shm" in line
            ],
            "descriptors": sorted(
                {_described(int(name)) for name in os.listdir("/proc/self/fd")} - {""}
            ),
            "connected": sum(_reached(address) for address in _addresses()),
            "titles": [
                Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
                for pid in (parent, worker)
            ],
        }


def _owned(thing: Any) -> str:
    kind = type(thing)
    return (
        f"{kind.__module__}.{kind.__qualname__}"
        if str(kind.__module__).startswith(OF_A_WORKER)
        else ""
    )


def _texts() -> list[bytes]:
    """Every text that an object refers to."""
    texts = []
    for thing in gc.get_objects():
        parts = [*thing.keys(), *thing.values()] if isinstance(thing, dict) else thing
        if isinstance(parts, list | tuple | set):
            texts += [part.encode(errors="replace") for part in parts if type(part) is str]
            texts += [bytes(part) for part in parts if type(part) is bytes]
    return texts


def _memory() -> Any:
    """What is in memory that this process may write, in pieces."""
    with open("/proc/self/mem", "rb", buffering=0) as memory:
        for line in Path("/proc/self/maps").read_text().splitlines():
            span, rights, *_ = line.split()
            begin, end = (int(edge, 16) for edge in span.split("-"))
            if rights.startswith("rw"):
                for at in range(begin, end, 1 << 24):
                    with contextlib.suppress(OSError, ValueError, OverflowError):
                        memory.seek(at)
                        yield memory.read(min(1 << 24, end - at))


def _described(descriptor: int) -> str:
    """What an open file is: of a socket its family and peer."""
    try:
        kind = os.fstat(descriptor).st_mode
        link = os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""
    if not stat.S_ISSOCK(kind):
        return (
            re.sub(r"\d+|/proc/\S+", "", link)
            if link.startswith(("anon", "pipe", "/proc"))
            else link
        )
    with socket.socket(fileno=os.dup(descriptor)) as end:
        return (
            f"socket {end.family.name} {end.getsockname()!r} "
            f"{end.getpeername() if end.family != 1 else ''}"
        )


def _addresses() -> set[str]:
    """Everything that looks like the URL of an index."""
    return {
        found.decode()
        for text in _texts()
        for found in re.findall(rb"rediss?://[^\s\"']+@[^\s\"']+", text)
    }


def _reached(url: str) -> bool:
    import redis

    try:
        return bool(redis.Redis.from_url(url).ping())
    except Exception:
        return False


class Marker:
    """Unpickled, it makes a file."""

    def __init__(self, file: str) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return (os.mkdir, (self.file,))


class Sends(Marks):
    """Sends ``kind`` to its worker in the place of an answer. ``file``: what a pickle makes."""

    kind: str
    file: str

    def process(self, rows: Any) -> Any:
        count = len(rows["response_ids"])
        data = pickle.dumps(Marker(self.file))
        good = packed_rows(MARK, {"mark": torch.zeros(count)})
        head, body = {
            "pickle": (data, b""),
            "pickle in the head": (
                json.dumps({"id": 0, "error": data.decode("latin-1")}).encode(),
                b"",
            ),
            "pickle as columns": (b'{"id": 0}', data),
            "larger than its bytes": (b'{"id": 0}', _with(good, 4 + 3, 1 << 40)),
            "more rows": (b'{"id": 0}', packed_rows(MARK, {"mark": torch.zeros(count + 1)})),
            "a list": (b"[0]", b""),
            "deep": (b"[" * 1000000, b""),
            "drop": (b'{"id": 0, "dropped": "no reason"}', b""),
            "endless": (b"", None),
        }[self.kind]
        size = 1 << 50 if body is None else len(body)
        line = next(fd for fd in map(int, os.listdir("/proc/self/fd")) if fd > 2 and _is_line(fd))
        if self.kind != "pickle":
            os.write(line, struct.pack("<IQ", len(head), size))
        _write(line, head + bytes(body or b""))
        sys.stdin.close()
        return super().process(rows)


def _with(block: bytearray, word: int, value: int) -> bytes:
    """``block`` with another number at ``word`` of its header."""
    struct.pack_into("<q", block, 8 * word, value)
    return bytes(block)


def _is_line(descriptor: int) -> bool:
    try:
        with socket.socket(fileno=os.dup(descriptor)) as end:
            # asyncio's own pair of sockets wakes its loop
            end.setsockopt(
                socket.SOL_SOCKET,
                socket.SO_SNDBUF,
                end.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF),
            )
            pid = struct.unpack("3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
            return end.family == socket.AF_UNIX and pid != os.getpid()
    except OSError:
        return False


def _write(line: int, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionError):
        while data:
            with contextlib.suppress(BlockingIOError):
                data = data[os.write(line, data) :]


class Dies(Marks):
    """Ends its process in its first call, in the way that ``kind`` says; ``file`` exists
    afterwards."""

    kind: str
    file: str

    def process(self, rows: Any) -> Any:
        if not os.path.exists(self.file):
            Path(self.file).touch()
            if self.kind == "exit":
                os._exit(3)
            if self.kind == "forks":
                _fork_one_that_stays(Path(self.file).with_suffix(".pid"))
                os._exit(3)
            import ctypes

            ctypes.string_at(0)
        return super().process(rows)


def _fork_one_that_stays(file: Path) -> None:
    """Fork a process that leaves the group, and holds what this one has open."""
    import signal

    if os.fork() == 0:
        os.setsid()
        signal.alarm(600)
        file.write_text(str(os.getpid()))
        while True:
            signal.pause()
    while not file.exists():
        pass


class Stays(Marks):
    """Writes the number of its process to ``file``, and of one that it starts, and never ends."""

    file: str

    def process(self, rows: Any) -> Any:
        import subprocess
        import time

        with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as child:
            part = Path(self.file).with_suffix(".part")
            part.write_text(f"{os.getpid()} {child.pid}")
            part.rename(self.file)
            time.sleep(600)
        return super().process(rows)


def bare_mark(completions: list[str], mark: list[float], **_: Any) -> list[float]:
    return mark


def marked(completions: list[str], mark: list[float], **_: Any) -> list[float]:
    return [value + len(text) for value, text in zip(mark, completions, strict=True)]


class Reaches(Marks):
    """Its mark says what it reached: 1 the file ``secret``, 2 the port, 4 a file beside it, 8 its
    worker; 16 if it has no scratch folder."""

    secret: str
    port: int

    def process(self, rows: Any) -> Any:
        reached = 0
        for bit, reach in enumerate((self._read, self._connect, self._write, self._signal)):
            with contextlib.suppress(OSError):
                reach()
                reached |= 1 << bit
        try:
            tempfile.TemporaryFile().close()
        except OSError:
            reached |= 16
        return {"mark": torch.full((len(rows["response_ids"]),), float(reached))}

    def _read(self) -> None:
        Path(self.secret).read_text()

    def _connect(self) -> None:
        socket.create_connection(("127.0.0.1", self.port), timeout=5).close()

    def _write(self) -> None:
        Path(self.secret + ".mine").write_text("")

    def _signal(self) -> None:
        for process in Path("/proc").iterdir():
            if process.name.isdecimal() and b"pytest" in (process / "cmdline").read_bytes():
                os.kill(int(process.name), 0)
                return
        raise ProcessLookupError


class Reads(Marks):
    """Fails where it has no texts; its mark is whether it could read ``file``."""

    file: str

    def process(self, rows: Any) -> Any:
        assert all(isinstance(text, str) for text in rows.completions)
        return {"mark": torch.full((len(rows["response_ids"]),), float(os.path.exists(self.file)))}
