"""Environments with real faults. Each says with its first tool, or ``step``, what it does."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

held = list[bytearray]()


class Faulty:
    """Does what ``reset`` or its tools are told."""

    def __init__(self) -> None:
        self.count = 0

    def reset(self, does: str = "", file: str = "") -> str | None:
        if does:
            self._do(does, file)
        return f"process {os.getpid()}"

    def count_up(self) -> int:
        """Counts the calls."""
        self.count += 1
        return self.count

    def does(self, what: str, file: str = "") -> str:
        """
        Does something.

        Args:
            what: What it does.
            file: A path that it needs.
        """
        return self._do(what, file)

    async def does_async(self, what: str) -> Any:
        """
        Does something on the event loop.

        Args:
            what: What it does.
        """
        if what == "hang":
            await asyncio.Event().wait()
        if what == "refuse":  # it swallows its cancellation
            while True:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    continue
        if what == "fork":
            return os.fork()
        return self._do(what, "")

    def _do(self, what: str, file: str) -> str:
        match what:
            case "raise":
                raise ValueError("as told")
            case "hang":
                time.sleep(1e6)
            case "spin":
                while True:
                    pass
            case "hold the interpreter":
                ctypes.PyDLL(None).usleep(2_000_000_000)
            case "exit":
                sys.exit(3)
            case "end":
                os._exit(4)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "crash":
                ctypes.string_at(0)
            case "devour":
                return str(len(bytearray(64 << 30)))
            case "hoard":
                while True:
                    held.append(bytearray(16 << 20))
            case "print":
                print("printed by an environment", "x" * 1_000_000)
                print("to the other stream", file=sys.stderr, flush=True)
            case "flood":
                block = b"y" * (1 << 20)
                for _ in range(10 << 10):
                    os.write(1, block)
            case "return a flood":
                return "z" * (200 << 20)
            case "fork":
                os.fork()
            case "start":
                child = subprocess.Popen(["sleep", "1000"])
                Path(f"{file}.part").write_text(f"{os.getpid()} {child.pid}")
                os.replace(f"{file}.part", file)
            case "start and hang":
                self._do("start", file)
                time.sleep(1e6)
            case "occupy":
                self.child = subprocess.Popen(["sleep", "1000"])
                self.files = [os.open(os.devnull, os.O_RDONLY) for _ in range(6)]
            case "read":
                return Path(file).read_text()
            case "write":
                Path(file).write_text("written")
            case "lie":
                lie_to_the_pool()
        return "done"

    def get_reward(self) -> float:
        return float(self.count)


def lie_to_the_pool() -> None:
    """Send replies that are none over all sockets: one of them is the line."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                for number in range(8):
                    reply = {"messages": [{"role": "assistant", "content": "I"}]}
                    head = json.dumps({"id": number, "reply": reply}).encode()
                    os.write(int(name), struct.pack("<IQ", len(head), 0) + head)
    time.sleep(1e6)


class Told:
    """Its constructor and ``close`` tell what is called."""

    def __init__(self, file: str) -> None:
        self.file = file

    def reset(self, **kwargs: Any) -> None:
        pass

    def close(self) -> None:
        with open(self.file, "a") as file:
            file.write("closed\n")
