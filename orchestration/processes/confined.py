"""Answers to questions of strangers, in processes of their own, within limits of memory and time.

A template, a regular expression or a simulation may take all of either, and a thread that computes
cannot be ended.

    ask ──▶ the turn of its owner ──▶ a thread ──▶ a process, which answers and waits for the next question
             one of each owner at a time     └ cancelled ──▶ the process is killed, which ends the thread
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, Protocol

from orchestration.processes.environment import without_secrets

# that a process may keep after an answer; with more it ends, and gives them back
GROWN_BYTES = 512 << 20
# A thread pool of each library for all cores would count as memory, and take them from the service.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
}


class Lost(RuntimeError):
    """The process ended before it answered."""


class TurnsFull(RuntimeError):
    """As many questions of one owner wait as may."""


class Turns:
    """At most ``most`` turns at a time, and one of each owner, of which ``waiting`` questions may
    wait. Owners that wait take theirs one after the other. May be used from several threads and
    event loops."""

    def __init__(self, most: int, waiting: int) -> None:
        self._most = most
        self._most_waiting = waiting
        self._lock = threading.Lock()
        self._running: set[str] = set()
        self._waiting: OrderedDict[str, deque[Future[None]]] = OrderedDict()

    async def take(self, owner: str) -> None:
        """Wait for a turn of ``owner``. Raises TurnsFull."""
        turn: Future[None] = Future()
        with self._lock:
            waiting = self._waiting.setdefault(owner, deque())
            if len(waiting) >= self._most_waiting:
                raise TurnsFull(f"{len(waiting)} requests of this token wait for their turn")
            waiting.append(turn)
            self._grant()
        try:
            await asyncio.wrap_future(turn)
        except asyncio.CancelledError:
            if not turn.cancel():  # it was granted meanwhile
                self.give_back(owner)
            raise

    def give_back(self, owner: str) -> None:
        with self._lock:
            self._running.discard(owner)
            self._grant()

    def _grant(self) -> None:
        for owner in list(self._waiting):
            if len(self._running) >= self._most:
                return
            turns = self._waiting[owner]
            while turns and owner not in self._running:
                turn = turns.popleft()
                if turn.set_running_or_notify_cancel():
                    self._running.add(owner)
                    self._waiting.move_to_end(owner)
                    turn.set_result(None)
            if not turns:
                del self._waiting[owner]


class Worker(Protocol):
    """A process that answers one line of JSON after the other."""

    pid: int

    def ask(self, question: bytes) -> bytes:
        """Send a line and return the answer's. Raises Lost."""

    def poll(self) -> int | None:
        """Return None while it lives."""

    def kill(self) -> None: ...

    def close(self) -> None:
        """Kill the process. May be repeated, but not called during :meth:`ask`."""


def exchange(question: bytes, to: IO[bytes], answers: IO[bytes]) -> bytes:
    """Write a line and read one. Raises Lost."""
    try:
        to.write(question)
        to.flush()
        answer = answers.readline()
    except (OSError, ValueError) as error:
        raise Lost("it ended before it was asked") from error
    if not answer.endswith(b"\n"):
        raise Lost("it ended before it answered")
    return answer


class Interpreter(subprocess.Popen[bytes]):
    """A worker that is a new interpreter, which runs ``module``."""

    def __init__(self, module: str) -> None:
        path = os.pathsep.join(path for path in sys.path if path)
        super().__init__(
            [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # so that Ctrl-C reaches the server alone
            env={**without_secrets(os.environ), **ENVIRONMENT, "PYTHONPATH": path},
        )

    def ask(self, question: bytes) -> bytes:
        assert self.stdin is not None
        assert self.stdout is not None
        return exchange(question, self.stdin, self.stdout)

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError), self:
            self.kill()


class _Call:
    """One question.

    The thread sets ``worker`` and then reads ``cancelled``, and :meth:`cancel` does it the other
    way round, so the process is killed in any order. It may have answered then, and wait:
    :meth:`Confined._answer` replaces it.
    """

    def __init__(self) -> None:
        self.worker: Worker | None = None
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True
        if worker := self.worker:
            worker.kill()


class Confined:
    """A pool that asks the processes that ``start`` makes in a thread, whose main function calls
    :func:`answer_questions`. At most ``most`` questions are answered at a time, and ``waiting`` of
    an owner wait. ``idle`` processes are kept; where there is none, one in use is waited for for
    ``patience`` seconds. May be used from several event loops."""

    def __init__(
        self,
        start: Callable[[], Worker],
        *,
        most: int,
        waiting: int = 64,
        idle: int = 1,
        patience: float = 0.0,
    ) -> None:
        self._start = start
        self._most_idle = idle
        self._patience = patience
        self._threads = ThreadPoolExecutor(most, "confined")
        self._changed = threading.Condition()
        self._turns = Turns(most, waiting)
        self._free: list[Worker] = []
        self._used = 0
        self._calls: set[_Call] = set()
        self._closed = False

    def prepare(self) -> None:
        """Start a process in advance, so that the first question does not wait for its imports."""
        if not self._free:
            self._free.append(self._start())

    async def ask(self, question: Mapping[str, Any], owner: str) -> dict[str, Any]:
        """Return the answer to a ``question`` of ``owner``, the id of a token.

        Raises Lost and TurnsFull.
        """
        line = json.dumps(question).encode() + b"\n"
        await self._turns.take(owner)
        call = _Call()
        try:
            answering = self._threads.submit(self._ask, line, call, owner)
        except RuntimeError:
            self._turns.give_back(owner)
            raise Lost("the server is going down") from None
        self._calls.add(call)
        try:
            return await asyncio.wrap_future(answering)
        except asyncio.CancelledError:
            call.cancel()
            if answering.cancel():  # its thread had not begun, and gives nothing back
                self._turns.give_back(owner)
            raise
        finally:
            self._calls.discard(call)

    def _ask(self, question: bytes, call: _Call, owner: str) -> dict[str, Any]:
        try:
            return self._answer(question, call)
        finally:
            self._turns.give_back(owner)

    def _answer(self, question: bytes, call: _Call) -> dict[str, Any]:
        while not call.cancelled:
            idle = self._take_idle()
            try:
                call.worker = worker = idle or self._start()
                if call.cancelled:
                    worker.kill()
                answer = worker.ask(question)
            except Lost:
                self._keep(None if call.worker is None else call.worker, broken=True)
                if idle is None:
                    raise
                continue  # it may have ended while it was idle
            except BaseException:
                self._keep(None)
                raise
            finally:
                call.worker = None
            self._keep(worker)
            return json.loads(answer)  # type: ignore[no-any-return]
        raise Lost("the request was cancelled")

    def _take_idle(self) -> Worker | None:
        with self._changed:
            if self._used:
                self._changed.wait_for(lambda: self._free or not self._used, self._patience)
            self._used += 1
            return self._free.pop() if self._free else None

    def _keep(self, worker: Worker | None, *, broken: bool = False) -> None:
        """Keep ``worker`` for the next question, or end it."""
        with self._changed:
            self._used -= 1
            keeps = worker is not None and not broken and not self._closed and worker.poll() is None
            if keeps and len(self._free) < self._most_idle and worker is not None:
                self._free.append(worker)
                worker = None
            self._changed.notify()
        if worker is not None:
            worker.close()

    def close(self) -> None:
        """End all processes. Calls of :meth:`ask` that still wait raise Lost."""
        self._closed = True
        for call in list(self._calls):
            call.cancel()
        self._threads.shutdown(wait=True, cancel_futures=False)
        while self._free:
            self._free.pop().close()


# --------------------------------------------------------------------------------------------------
# In the process


def answer_questions(
    answer: Callable[[dict[str, Any]], dict[str, Any]],
    questions: IO[bytes],
    answers: IO[bytes],
    *,
    memory: int,
    seconds: int,
    too_large: Mapping[str, Any],
) -> None:
    """Answer ``questions`` until they end.

    ``memory``: bytes that one may take beside what the process has now; one that needs more is
    answered ``too_large``. ``seconds``: after which the process ends, a backstop to the one that
    asks, which kills it sooner.
    """
    os.nice(5)  # gives way to the service on the same core
    before = _data_bytes()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if before:
        resource.setrlimit(resource.RLIMIT_DATA, (before + memory, before + memory))
    for question in questions:
        signal.alarm(seconds)
        try:
            text = json.dumps(answer(json.loads(question)))
        except MemoryError:
            text = json.dumps(too_large)
        signal.alarm(0)
        answers.write(text.encode() + b"\n")
        answers.flush()
        if _data_bytes() > before + GROWN_BYTES:
            return


def _data_bytes() -> int:
    """Return the bytes of this process that RLIMIT_DATA counts; 0 where the system does not say."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    return int(status.partition("VmData:")[2].split()[0]) << 10
