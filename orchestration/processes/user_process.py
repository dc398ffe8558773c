"""A process that runs a user's code, as the process that asks it sees it.

    start ─▶ forked by a server with a clean environment; its input is a socket (:mod:`orchestration.processes.line`)
    receive ─▶ its first message ─▶ begin ─▶ ask, any number at the same time: an id finds the answer
    end ─▶ it is killed, with what it has started

It ends with this process, also when that is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
from pathlib import Path
from typing import Any, Self

from orchestration.processes.forkserver import Child, Launch
from orchestration.processes.handles import Process
from orchestration.processes.line import READ_AHEAD, BadMessage, Message, packed, receive_from
from orchestration.processes.starter import Starter
from pipeline.first_of import cancel_all

END_SECONDS = 5.0  # until the exit code of a process that ended is known
# for which the line of a process that has exited is read: what it has forked may hold the other end
LINE_SECONDS = 1.0
LOG_BYTES = 16 << 20  # of what a user's code prints; then the file begins again


class ProcessEnded(RuntimeError):
    """The process has ended, or is of no use any more.

    ``str``: how, as "ended its process: killed by SIGKILL". ``shared``: other calls were in it too.
    ``is_bad``: it has sent what is no message.
    """

    def __init__(self, how: str, *, shared: bool = False, is_bad: bool = False) -> None:
        super().__init__(how)
        self.shared = shared
        self.is_bad = is_bad


class UserProcess:
    """One process. ``most``: bytes of the body of a message from it."""

    def __init__(
        self,
        child: Child | Process,
        stream: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        most: int,
    ) -> None:
        self.ended = False
        self._child = child
        self._stream = stream
        self._writer = writer
        self._most = most
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[Message]] = {}
        self._receiving: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, starter: Starter, launch: Launch, most: int = 0) -> Self:
        """Start a process by ``starter``.

        Raises OSError when the machine has no process or descriptor left.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                child = await starter.start(launch, theirs.fileno())
        except BaseException:
            ours.close()
            raise
        return cls(child, *await asyncio.open_connection(sock=ours, limit=READ_AHEAD), most)

    async def greet(self, seconds: float) -> dict[str, Any]:
        """Return the head of its first message, and begin.

        Raises ProcessEnded, also where that takes more than ``seconds``; it is then ended.
        """
        try:
            async with asyncio.timeout(seconds):
                head, _ = await self.receive()
        except (TimeoutError, ProcessEnded) as error:
            await self.end()
            if isinstance(error, ProcessEnded):
                raise
            raise ProcessEnded(f"took more than {seconds:g} s") from None
        self.begin()
        return head

    def begin(self) -> None:
        """Take messages as answers of :meth:`ask` from now on."""
        self._receiving = asyncio.create_task(self._receive_answers())
        self._closing = asyncio.create_task(self._close_line())

    async def ask(self, head: dict[str, Any], body: bytes | bytearray = b"") -> Message:
        """Send a message, and return its answer. Raises ProcessEnded."""
        if self.ended:
            raise ProcessEnded("was called in a process that had ended", shared=True)
        number = next(self._numbers)
        answer = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            await self.send({"id": number, **head}, body)
            return await answer
        finally:
            del self._calls[number]

    async def send(self, head: dict[str, Any], body: bytes | bytearray = b"") -> None:
        self._writer.write(packed(head, body))
        if body:
            self._writer.write(body)
        with contextlib.suppress(ConnectionError):  # it has ended, which its stream reports
            await self._writer.drain()

    async def receive(self) -> Message:
        """Receive the next message. Raises ProcessEnded."""
        try:
            return await receive_from(self._stream, self._most)
        except BadMessage as bad:
            raise ProcessEnded(f"made its process send {bad}", is_bad=True) from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise ProcessEnded(f"ended its process: {await self._exit()}") from None

    async def wait(self) -> None:
        """Wait until its line has ended, after :meth:`begin`."""
        assert self._receiving is not None, "begin() was not called"
        await asyncio.wait([self._receiving])

    async def end(self, patience: float = 0.0) -> None:
        """End it, and what it has started.

        ``patience``: seconds that it has to end by itself, as its line has ended.
        """
        self.ended = True
        self._writer.close()
        if patience:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    await self._child.wait()
        if isinstance(self._child, Process):
            with contextlib.suppress(ProcessLookupError):
                if self._child.alive():
                    os.killpg(self._child.pid, signal.SIGKILL)
        else:
            self._child.end()  # the fork server then kills its group
        if self._receiving is not None and self._receiving is not asyncio.current_task():
            await asyncio.wait([self._receiving], timeout=2 * END_SECONDS)
        await cancel_all(self._closing)
        await self._exit()

    async def _receive_answers(self) -> None:
        try:
            while True:
                message = await self.receive()
                number = message[0].get("id")
                call = self._calls.get(number) if isinstance(number, int) else None
                if call is not None and not call.done():
                    call.set_result(message)
        except ProcessEnded as ended:
            self.ended = True
            shared = len(self._calls) > 1
            for call in self._calls.values():
                if not call.done():
                    call.set_exception(ProcessEnded(str(ended), shared=shared, is_bad=ended.is_bad))

    async def _close_line(self) -> None:
        await self._child.wait()
        await asyncio.sleep(LINE_SECONDS)
        self._writer.transport.abort()

    async def _exit(self) -> str:
        """Return how the process ended, in words; it may have closed its socket only."""
        code = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                code = await self._child.wait()
        if code is not None and code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return "its exit code is not known" if code is None else f"it exited with code {code}"


def bound_log(log: Path, most: int) -> None:
    """Empty ``log`` when it has more than ``most`` bytes."""
    with contextlib.suppress(OSError):
        if log.stat().st_size > most:
            os.truncate(log, 0)
