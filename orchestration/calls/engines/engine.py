"""The engine of a served base model, as the server sees it: a process that is started again.

call ─▶ wait until it is ready ─▶ message ─▶ answer, or EngineDied: it has lost all of its models
keep ─▶ start ─▶ ready ─▶ answers … ─▶ its end ─▶ a pause that doubles ─▶ start
              └▶ what no restart can mend: it stays down
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import structlog

from orchestration.calls.engines.channel import BUFFER_BYTES, Message, receive, send
from orchestration.processes.forkserver import Launch
from orchestration.processes.handles import Process
from orchestration.processes.leftovers import remove_shared_memory
from orchestration.processes.starter import spawn
from stages.calls.interface import CallRefused, ServedBase

log = structlog.get_logger()

FIRST_PAUSE = 0.25  # seconds between an end and the next start
LONGEST_PAUSE = 30.0


class EngineDied(RuntimeError):
    """The process has ended, or does not have the model: what was asked may be asked again."""


class EngineDown(RuntimeError):
    """The process does not start any more; the message has the reason. ``is_lasting``: no restart
    can mend it."""

    def __init__(self, message: str, *, is_lasting: bool) -> None:
        super().__init__(message)
        self.is_lasting = is_lasting


class EngineFailed(RuntimeError):
    """The engine could not do what was asked, and it was not the client's mistake."""


class NotFinite(ValueError):
    """A loss or a gradient is not finite."""


class Engine:
    """The process that serves ``base``. ``entry``: "module:function" that opens its parts (an
    :data:`~orchestration.calls.engines.parts.Opening`) with ``options`` and those of ``base``,
    which come first; ``log_file``: of its output; ``restarts``: ends without any answer before,
    after which it counts as down. It is down at once where its process says that another start
    would fail in the same way."""

    def __init__(
        self,
        base: ServedBase,
        entry: str,
        options: Mapping[str, Any],
        log_file: Path,
        restarts: int,
    ) -> None:
        self.base = base
        self.generation = 0
        """The number of its process; models of an earlier one are lost."""
        self.process: Process | None = None
        path = os.pathsep.join(path for path in sys.path if path)
        settings = {
            "base": asdict(base),
            "entry": entry,
            "options": {**options, **base.options},
        }
        self._launch = Launch(
            "orchestration.calls.engines.process:main",
            [json.dumps(settings)],
            {**os.environ, "PYTHONPATH": path},
            os.getcwd(),
            str(log_file),
            f"engine of {base.name}",
        )
        self._restarts = restarts
        self._failures = 0
        self._reason = ""  # that its process gave for its end
        self._is_lasting = False
        self._writer: asyncio.StreamWriter | None = None
        self._changed = asyncio.Condition()
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Message]] = {}
        self._keeping = asyncio.create_task(self._keep())

    @property
    def down(self) -> EngineDown | None:
        """Why it does not start any more."""
        if self._writer is not None or not (self._is_lasting or self._failures > self._restarts):
            return None
        reason = self._reason or "its process ended without a word"
        return EngineDown(
            f"the engine of {self.base.name!r} does not start: {reason} ({self._launch.log} has "
            f"more)",
            is_lasting=self._is_lasting,
        )

    async def started(self) -> None:
        """Wait until its process takes calls. Raises EngineDown."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._writer is not None or self.down is not None)
        if (down := self.down) is not None:
            raise down

    async def call(self, operation: str, blob: bytes = b"", **fields: Any) -> Message:
        """Return the answer. Raises CallRefused, NotFinite, EngineFailed, EngineDied, and
        EngineDown."""
        await self.started()
        assert self._writer is not None
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            send(self._writer, {"number": number, "operation": operation, **fields}, blob)
            with contextlib.suppress(ConnectionError):  # then the answer has the error
                await self._writer.drain()
            head, answer_blob = await answer
        finally:
            self._answers.pop(number, None)
        match head.get("error"):
            case None:
                return head, answer_blob
            case "absent":
                raise EngineDied("the process has been started again")
            case "refused":
                raise CallRefused(message=head["message"])
            case "not finite":
                raise NotFinite(head["message"])
            case _:
                raise EngineFailed(head["message"])

    async def _keep(self) -> None:
        while True:
            try:
                await self._live()
            except Exception:
                log.exception("the engine's process failed", base=self.base.name)
            self._failures += 1
            async with self._changed:
                self._changed.notify_all()
            if self._is_lasting:
                log.error("an engine cannot start", base=self.base.name, reason=self._reason)
                return
            pause = min(FIRST_PAUSE * 2 ** (self._failures - 1), LONGEST_PAUSE)
            log.error(
                "an engine has ended",
                base=self.base.name,
                reason=self._reason,
                output=self._launch.log,
                failures=self._failures,
                seconds_to_start=pause,
            )
            await asyncio.sleep(pause)

    async def _live(self) -> None:
        """Start the process, and pass its answers on until it ends."""
        server_end, engine_end = socket.socketpair()
        with engine_end:
            process = self.process = spawn(self._launch, engine_end.fileno())
        reader, writer = await asyncio.open_connection(sock=server_end, limit=BUFFER_BYTES)
        try:
            self._reason = ""
            if (first := await receive(reader)) is None:
                return
            if "failed" in first[0]:
                self._reason = first[0]["failed"]
                self._is_lasting = first[0]["is_lasting"]
                return
            self.generation += 1
            async with self._changed:
                self._writer = writer
                self._changed.notify_all()
            while (message := await receive(reader)) is not None:
                self._failures = 0
                answer = self._answers.get(message[0]["number"])
                if answer is not None and not answer.done():
                    answer.set_result(message)
        finally:
            self._writer = None
            writer.close()
            process.end()
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(EngineDied("the process has ended"))
            await process.wait()
            await asyncio.to_thread(remove_shared_memory, process.pid)

    async def close(self) -> None:
        self._keeping.cancel()
        await asyncio.wait([self._keeping])
