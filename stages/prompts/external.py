"""Prompts that other programs put into the run while it goes on, asked in the order in which they came.

    put ─▶ index (a few MiB wait there) ─▶ ExternalPrompts.run: a valid prompt? ─▶ prompts.jsonl ─▶ gate: group n asks line n
             └ no room: who puts waits         └ no, or too long: an event, left out

The file is the source of the run: a lost group, or a resumed run, asks it for the same line and gets the same prompt. When
the feed is ended its lines are gone through again and again, as a table's.
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

from pipeline.index.client import Index
from stages.prompts.sources import LISTED, Prompt, PromptError, PromptForm, Row, TooLong, given_of
from stages.rewards.registry import RESERVED

log = structlog.get_logger()

WAITING_BYTES = 16 * 2**20  # of prompts that the run has not taken over yet
AT_ONCE = 256
WAIT_SECONDS = 10.0


class ExternalPromptsFull(TimeoutError):
    """More prompts wait than the run takes over."""


class ExternalPrompts:
    """A :class:`~stages.prompts.sources.PromptSource` of the ``available`` prompts put so far, all in the file ``path``."""

    def __init__(self, index: Index, path: Path, form: PromptForm) -> None:
        self.index, self.path, self.form = index, path, form
        self.too_long = TooLong(form.options, path.with_name(LISTED))
        self.ended = False
        self._rows: list[Row] = []
        self._position = 0  # of the next prompt to take over; those that made no prompt have one too, and no line

    @property
    def size(self) -> int | None:
        return len(self._rows) if self.ended else None

    @property
    def available(self) -> int | None:
        """Groups that have a prompt so far, 0 .. this - 1; None: all, as the feed has ended and begins anew."""
        return None if self.ended and self._rows else len(self._rows)

    def prompt(self, seq: int) -> Prompt:
        row = self._rows[seq % len(self._rows) if self.ended else seq]
        return self.form.prompt(row, f"prompt {seq}")

    async def begin(self) -> None:
        """Read what the run has already."""
        self.too_long.resume()
        self.path.touch(mode=0o600)
        text = self.path.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        if len(whole) < len(text):  # a line that its writer's death cut in two; its prompt still waits in the index
            os.truncate(self.path, len(whole))
        for line in whole.splitlines():
            said = json.loads(line)
            self._rows.append(said["row"])
            self._position = said["position"] + 1
        await self.index.remove_prompts(self._position)

    async def run(self) -> None:
        """Take prompts over as they come. Runs until it is cancelled. Raises PromptError when they have ended without one
        that can be asked."""
        while True:
            found = await self.index.read_prompts(self._position, AT_ONCE)
            if found.prompts:
                await self._take(found.prompts)
            elif found.ended and not self.ended:
                self.ended = True
                if not self._rows:
                    raise PromptError(
                        f"prompts: all {self._position} prompts that were put are left out, and no more will come; see the "
                        f"`prompt` events and {self.too_long.path}"
                    )
                await self.index.wake("version")
            else:
                await self.index.wait("fed", found.wait, WAIT_SECONDS)

    async def _take(self, prompts: Sequence[str]) -> None:
        lines, rows = [], []
        for position, text in enumerate(prompts, self._position):
            row = json.loads(text)
            try:
                if self.form.bounded(row, f"prompt {position}", self.too_long) is not None:
                    lines.append(json.dumps({"position": position, "row": row}) + "\n")
                    rows.append(row)
                    continue
                reason = f"it is longer than {self.form.limits.tokens} tokens, {self.form.limits.why}"
            except Exception as error:  # whatever a chat template raises: another program's prompt ends no run
                reason = str(error) if isinstance(error, PromptError) else f"{type(error).__name__}: {error}"
            log.warning("prompt left out", position=position, reason=reason)
            await self.index.emit("prompt", {"position": position, "change": "left out", "reason": reason})
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        self._rows += rows
        self._position += len(prompts)
        await self.index.remove_prompts(self._position)
        await self.index.wake("version")


async def put_prompts(
    index: Index,
    rows: Sequence[Mapping[str, Any]],
    *,
    column: str,
    first: int | None = None,
    last: bool = False,
    timeout: float = 30.0,
) -> int:
    """Put ``rows``, whose prompt is in ``column``, at position ``first`` and on (None: after those that are there) and
    return the next free position. A repeat with the same ``first`` changes nothing. ``last``: no more will come. Waits up
    to ``timeout`` seconds while too many wait to be taken over. Raises PromptError for a row that is no prompt, as far as
    that is seen without a tokenizer, IndexRefused for a wrong position, and ExternalPromptsFull."""
    for i, row in enumerate(rows):
        given_of(row, column, f"prompt {i}")
        if taken := [name for name in RESERVED if name in row and name != column]:
            raise PromptError(
                f"prompts: prompt {i} has fields {taken}, which reward functions get from the run; rename"
            )
    try:
        texts = await asyncio.to_thread(lambda: [json.dumps(dict(row), allow_nan=False) for row in rows])
    except (TypeError, ValueError, RecursionError) as error:
        raise PromptError(f"prompts: they cannot be kept as JSON ({error}); use texts, finite numbers, lists") from None
    deadline = time.monotonic() + timeout
    while (put := await index.put_prompts(texts, first=first, last=last, most_bytes=WAITING_BYTES)).wait is not None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise ExternalPromptsFull(
                f"prompts: {WAITING_BYTES >> 20} MiB of them wait to be taken over, and nobody took any for {timeout:g} s; "
                "put these again later, at the same position"
            )
        await index.wait("feed", put.wait, min(left, WAIT_SECONDS))
    return put.next
