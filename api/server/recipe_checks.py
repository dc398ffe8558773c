"""Checks the recipes of requests in processes, so that a check delays no other request and can be killed with its own.

    ask ──▶ one of AT_ONCE threads ──▶ a process of api.server.check_worker ──▶ its answer; the process waits for the next
                cancelled ──▶ the process is killed, which ends the thread

Threads alone are not enough: a long call into C (a regular expression, an import) holds the interpreter and cannot be ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import structlog

AT_ONCE = 2  # checks; others wait for their turn
SIZE_BYTES = 8  # before each message: its length

log = structlog.get_logger()


class CheckLost(RuntimeError):
    """The process of a check ended before it answered."""


class _Checker:
    """A process that answers one request after the other, until its standard input ends."""

    def __init__(self) -> None:
        path = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "api.server.check_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # so that Ctrl-C reaches the server alone
            env={**os.environ, "PYTHONPATH": path},
        )
        self.pid = self._process.pid

    def ask(self, request: list[bytes]) -> bytes:
        """Send the messages of ``request`` and return the answer. Raises CheckLost."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            for message in request:
                stdin.write(len(message).to_bytes(SIZE_BYTES, "big") + message)
            stdin.flush()
            size = stdout.read(SIZE_BYTES)
            answer = stdout.read(int.from_bytes(size, "big"))
        except (OSError, ValueError) as error:
            raise CheckLost("it ended before it was asked") from error
        if not size or len(answer) < int.from_bytes(size, "big"):
            raise CheckLost("it ended before it answered")
        return answer

    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        """Kill the process. May be repeated, but not called during :meth:`ask`."""
        self.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None and not pipe.closed:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


class _Call:
    """One request: the process that answers it, and whether it was cancelled."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._checker: _Checker | None = None
        self.cancelled = False

    def begin(self, checker: _Checker) -> bool:
        """Set the process; False when the request was cancelled before."""
        with self._lock:
            self._checker = None if self.cancelled else checker
            return not self.cancelled

    def end(self) -> None:
        with self._lock:
            self._checker = None

    def cancel(self) -> None:
        with self._lock:
            self.cancelled = True
            if self._checker is not None:
                self._checker.kill()


class Checks:
    """Runs at most ``at_once`` checks at the same time, each in a process. May be used from several event loops."""

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self._threads = ThreadPoolExecutor(at_once, "check")
        self._free: list[_Checker] = []
        self._calls: set[_Call] = set()
        self._closed = False

    def prepare(self) -> None:
        """Start a process in advance, so that the first check does not wait for its imports."""
        if not self._free:
            self._free.append(_Checker())

    async def ask(self, request: dict[str, Any], submission: bytes) -> dict[str, Any]:
        """Return what :func:`api.server.check_worker.answer` returns in a process. Raises CheckLost."""
        call, loop = _Call(), asyncio.get_running_loop()
        self._calls.add(call)
        try:
            parts = [json.dumps(request).encode(), submission]
            return await loop.run_in_executor(self._threads, self._ask, parts, call)
        except asyncio.CancelledError:
            call.cancel()
            raise
        finally:
            self._calls.discard(call)

    def _ask(self, request: list[bytes], call: _Call) -> dict[str, Any]:
        while not call.cancelled:
            idle = self._free.pop() if self._free else None
            checker = idle or _Checker()
            if not call.begin(checker):
                self._keep(checker)
                break
            try:
                answer: dict[str, Any] = json.loads(checker.ask(request))
            except CheckLost:
                checker.close()
                if idle is None or call.cancelled:
                    raise
                continue  # it may have ended while it was idle
            finally:
                call.end()
            self._keep(checker)
            return answer
        raise CheckLost("the request was cancelled")

    def _keep(self, checker: _Checker) -> None:
        if self._closed or self._free or not checker.alive():
            checker.close()  # at most one idle process, to save memory
        else:
            self._free.append(checker)

    def close(self) -> None:
        """End all processes. Calls of :meth:`ask` that still wait raise CheckLost."""
        self._closed = True
        for call in list(self._calls):
            call.cancel()
        self._threads.shutdown(wait=True, cancel_futures=False)
        while self._free:
            self._free.pop().close()
