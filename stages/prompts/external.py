"""External prompts: other programs put them into a run while it goes on, and groups get them in
that order.

    put_prompts ─▶ index (16 MiB at most) ─▶ ExternalPrompts.run: a valid prompt? ─▶ prompts.jsonl ─▶ gate: group n, line n
                     └ full: put waits           └ no, or too long: left out, with an event

The file is the source of the run: a lost group, or a resumed run, gets the same line again. When
the last prompt was put, the lines are repeated in their order, without end.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog

from pipeline.data.events import PromptEvent
from pipeline.documents.flow import FED, FEED, VERSION
from pipeline.index.client import Index
from stages.prompts.formatter import Prompt, PromptFormatter
from stages.prompts.rows.files import PromptError, Row
from stages.prompts.rows.templates import prompt_in
from stages.prompts.rows.values import plain_row
from stages.prompts.too_long import TOO_LONG_FILE, LongPrompts
from stages.rewards.registry import RESERVED

log = structlog.get_logger()

WAITING_BYTES = 16 * 2**20  # of prompts that wait in the index
AT_ONCE = 256  # prompts taken from the index in one call
WAIT_SECONDS = 10.0


class ExternalPromptsFull(TimeoutError):
    """The index holds as many prompts as it may, and the run takes none over."""


class ExternalPrompts:
    """A :class:`~stages.prompts.sources.PromptSource` of the ``available`` prompts put so far, all
    in the file ``path``."""

    def __init__(self, index: Index, path: Path, formatter: PromptFormatter) -> None:
        self.index = index
        self.path = path
        self.formatter = formatter
        self.too_long = LongPrompts(path.with_name(TOO_LONG_FILE))
        self.ended = False
        self._rows: list[Row] = []
        # of the next prompt to take over; those left out have a position too, but no line
        self._position = 0

    @property
    def available(self) -> int | None:
        """Number of groups that have a prompt so far; None: all groups have, as the last prompt was
        put."""
        return None if self.ended and self._rows else len(self._rows)

    def prompt(self, seq: int) -> Prompt:
        row = self._rows[seq % len(self._rows) if self.ended else seq]
        return self.formatter.prompt(row, f"prompt {seq}")

    def epochs(self, seq: int) -> dict[str, int]:
        return {"prompts": seq // len(self._rows) + 1} if self.ended and self._rows else {}

    async def begin(self) -> None:
        """Read the prompts of an earlier process from the file."""
        self.too_long.resume()
        if not self.path.exists() and (await self.index.status()).admitted:
            raise PromptError(
                f"{self.path} is not there, which has the prompts that the run was given so far",
                "put it back",
            )
        self.path.touch(mode=0o600)
        text = self.path.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        if len(whole) < len(text):  # a kill cut the last line; its prompt still waits in the index
            os.truncate(self.path, len(whole))
        for line in whole.splitlines():
            entry = json.loads(line)
            self._rows.append(entry["row"])
            self._position = entry["position"] + 1
        await self.index.remove_prompts(self._position)

    async def run(self) -> None:
        """Take prompts over from the index, until cancelled.

        Raises PromptError when the last one was put and all were left out.
        """
        while True:
            batch = await self.index.read_prompts(self._position, AT_ONCE)
            if batch.prompts:
                await self._take(batch.prompts)
            elif batch.ended and not self.ended:
                self.ended = True
                if not self._rows:
                    raise PromptError(
                        f"all {self._position} prompts that were put are left out, and no more "
                        f"will come",
                        f"see the `prompt` events and {self.too_long.path}",
                    )
                await self.index.wake(VERSION)
            else:
                await self.index.wait(FED, batch.wait, WAIT_SECONDS)

    async def _take(self, prompts: Sequence[str]) -> None:
        lines = []
        rows = []
        for position, text in enumerate(prompts, self._position):
            row = json.loads(text)
            try:
                if self.formatter.bounded(row, f"prompt {position}", self.too_long) is not None:
                    lines.append(json.dumps({"position": position, "row": row}) + "\n")
                    rows.append(row)
                    continue
                reason = (
                    f"it is longer than {self.formatter.limits.tokens} tokens, "
                    f"{self.formatter.limits.why}"
                )
            except Exception as error:
                # a chat template may raise anything, and no prompt may end the run
                reason = (
                    str(error)
                    if isinstance(error, PromptError)
                    else f"{type(error).__name__}: {error}"
                )
            log.warning("prompt left out", position=position, reason=reason)
            await self.index.emit(PromptEvent(position=position, change="left out", reason=reason))
        text = "".join(lines)
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise OSError(
                error.errno,
                f"prompts: {self.path} cannot be written ({error.strerror}): {len(text.encode())} "
                f"bytes are needed; free "
                "room on its disk, the prompts wait in the index until then",
            ) from error
        self._rows += rows
        self._position += len(prompts)
        await self.index.remove_prompts(self._position)
        await self.index.wake(VERSION)


async def put_prompts(
    index: Index,
    rows: Sequence[Mapping[str, Any]],
    *,
    column: str,
    first: int | None = None,
    last: bool = False,
    timeout: float = 30.0,
) -> int:
    """Put ``rows``, whose prompts are in ``column``, and return the next free position.

    They get the positions from ``first`` on (None: after the last one); a repeat with the same
    ``first`` changes nothing. ``last``: no more will come. Waits up to ``timeout`` seconds while
    the index is full. Raises PromptError for a row without a prompt, IndexRefused for a wrong
    position, and ExternalPromptsFull."""
    plain = await asyncio.to_thread(sendable, rows)
    for i, row in enumerate(plain):
        prompt_in(row, column, f"prompt {i}")
        if reserved := [name for name in RESERVED if name in row and name != column]:
            raise PromptError(
                f"prompt {i} has fields {reserved}, which reward functions get from the run",
                "rename",
            )
    texts = await asyncio.to_thread(lambda: [json.dumps(row) for row in plain])
    deadline = time.monotonic() + timeout
    while (
        put := await index.put_prompts(texts, first=first, last=last, most_bytes=WAITING_BYTES)
    ).wait is not None:
        seconds_left = deadline - time.monotonic()
        if seconds_left <= 0:
            raise ExternalPromptsFull(
                f"prompts: {WAITING_BYTES >> 20} MiB of them wait, and the run took none over for "
                f"{timeout:g} s; "
                "put these again later, at the same position"
            )
        await index.wait(FEED, put.wait, min(seconds_left, WAIT_SECONDS))
    return put.next


def sendable(rows: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return ``rows`` as plain values that JSON has.

    Raises PromptError, which names the row, the column and the value.
    """
    plain = [plain_row(row, f"prompt {number}") for number, row in enumerate(rows)]
    for number, row in enumerate(plain):
        for name, value in row.items():
            try:
                json.dumps(value, allow_nan=False)
            except ValueError:
                problem = f"prompt {number} has a number in column {name!r} that is not finite"
                raise PromptError(
                    f"{problem}, which JSON does not have", "write null, or a text"
                ) from None
    return plain
