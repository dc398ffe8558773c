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

AT_ONCE = 2  # checks; others wait for their turn


class CheckLost(RuntimeError):
    """The process of a check ended before it answered."""


class _Checker(subprocess.Popen[bytes]):
    """A process that answers one line of JSON after the other, until its standard input ends."""

    def __init__(self) -> None:
        path = os.pathsep.join(path for path in sys.path if path)
        super().__init__(
            [sys.executable, "-P", "-m", "api.server.check_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # so that Ctrl-C reaches the server alone
            env={**os.environ, "PYTHONPATH": path},
        )

    def ask(self, request: bytes) -> dict[str, Any]:
        """Send a line and return the answer. Raises CheckLost."""
        assert self.stdin is not None
        assert self.stdout is not None
        try:
            self.stdin.write(request)
            self.stdin.flush()
            answer = self.stdout.readline()
        except (OSError, ValueError) as error:
            raise CheckLost("it ended before it was asked") from error
        if not answer.endswith(b"\n"):
            raise CheckLost("it ended before it answered")
        return json.loads(answer)  # type: ignore[no-any-return]

    def close(self) -> None:
        """Kill the process. May be repeated, but not called during :meth:`ask`."""
        with contextlib.suppress(BrokenPipeError), self:
            self.kill()


class _Call:
    """One request. The thread sets ``checker`` and then reads ``cancelled``, and :meth:`cancel` does it the other way
    round, so the process is killed in any order. It may have answered then, and wait: :meth:`Checks._ask` replaces it."""

    def __init__(self) -> None:
        self.checker: _Checker | None = None
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True
        if checker := self.checker:
            checker.kill()


class Checks:
    """Runs at most AT_ONCE checks at the same time, each in a process. May be used from several event loops."""

    def __init__(self) -> None:
        self._threads, self._lock = ThreadPoolExecutor(AT_ONCE, "check"), threading.Lock()
        self._free: list[_Checker] = []
        self._calls: set[_Call] = set()
        self._closed = False

    def prepare(self) -> None:
        """Start a process in advance, so that the first check does not wait for its imports."""
        if not self._free:
            self._free.append(_Checker())

    async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return what :func:`api.server.check_worker.answer` returns in a process. Raises CheckLost."""
        call, loop = _Call(), asyncio.get_running_loop()
        self._calls.add(call)
        try:
            return await loop.run_in_executor(self._threads, self._ask, json.dumps(request).encode() + b"\n", call)
        except asyncio.CancelledError:
            call.cancel()
            raise
        finally:
            self._calls.discard(call)

    def _ask(self, request: bytes, call: _Call) -> dict[str, Any]:
        while not call.cancelled:
            with self._lock:
                idle = self._free.pop() if self._free else None
            call.checker = checker = idle or _Checker()
            if call.cancelled:
                checker.kill()
            try:
                answer = checker.ask(request)
            except CheckLost:
                checker.close()
                if idle is None:
                    raise
                continue  # it may have ended while it was idle
            finally:
                call.checker = None
            self._keep(checker)
            return answer
        raise CheckLost("the request was cancelled")

    def _keep(self, checker: _Checker) -> None:
        if self._closed or self._free or checker.poll() is not None:
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
