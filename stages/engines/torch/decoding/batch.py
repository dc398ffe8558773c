"""The continuous batch of the torch rollout engine, as its compute thread sees it.

    waiting rows (first in, first out) ─▶ admit: prefill new prompts, draw the first token ─▶ rows
    rows ─▶ decode: one token of each ─▶ ended rows leave and are delivered

Nothing here is thread-safe: one thread makes all calls. A turn depends on the queue and the rows alone, so the same
submissions give the same batches and the same bits.

On an accelerator the next token's decode is launched before the newest token is read: the host reads, checks for ends and
delivers while the device computes. A token that was launched for a row that had ended is dropped. A call that changes the
batch first reads what was launched.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from stages import device as devices
from stages.engines.protocols import Completion, FinishReason, Token
from stages.engines.torch.decoding.decoder import TorchDecoder
from stages.engines.torch.decoding.rows import PendingGroup, ResponseRow, Submission
from stages.engines.torch.decoding.sampling import Drawn, draw, uniform

STOP_SLACK = 8  # tokens decoded beyond a stop string's length: its first byte may be inside a token


class Decodes(Protocol):
    """The method of a tokenizer that stop strings need."""

    def decode(self, token_ids: list[int]) -> Any: ...


class ContinuousBatch:
    """Rows that decode together, at most ``max_rows``, and rows that wait. One prefill has at most ``prefill_tokens``
    padded tokens, or one prompt. ``launch_ahead``: launch a token before the previous one is read."""

    def __init__(
        self,
        decoder: TorchDecoder,
        tokenizer: Decodes | None,
        *,
        max_rows: int,
        prefill_tokens: int,
        version: int,
        launch_ahead: bool,
    ) -> None:
        self.decoder, self.version = decoder, version
        self.waiting: deque[ResponseRow] = deque()
        self.rows: list[ResponseRow] = []  # in the order of the decoder's rows
        self._tokenizer, self._max_rows, self._prefill_tokens = tokenizer, max_rows, prefill_tokens
        self._launch_ahead = launch_ahead
        self._launched: Drawn | None = None  # a token of every row that has not been read

    def step(self) -> None:
        """Start waiting rows if there is room for one, else make one more token of every row."""
        if self.waiting and len(self.rows) < self._max_rows:
            self.read_launched()
        if not self._admit():
            self._decode()

    def submit(self, rows: Sequence[ResponseRow]) -> None:
        self.waiting.extend(rows)

    def abort(self, submission: Submission) -> None:
        """Remove the rows of ``submission``."""
        dropped = [row for row in self.waiting if row.submission is submission]
        self.waiting = deque(row for row in self.waiting if row.submission is not submission)
        for row in dropped:
            self._leave_queue(row.group)
        for number in reversed(range(len(self.rows))):
            if self.rows[number].submission is submission:
                self._remove(number)

    def cut(self) -> None:
        """Deliver every row that has a token of this claim, unfinished."""
        for row in self.rows:
            row.ended = "cut"
        self._deliver_ended()

    def sleep(self) -> None:
        """Cut, and free the device's memory. Waiting rows stay; their prompts are prefilled again with the next weights."""
        self.cut()
        for row in self.waiting:
            row.group.prompt = row.group.logits = None
        self.decoder.clear()
        devices.release_cached(self.decoder.device)

    def fail(self, error: Callable[[], Exception]) -> None:
        """Deliver ``error()`` to every submission and remove all rows."""
        for submission in {id(row.submission): row.submission for row in [*self.rows, *self.waiting]}.values():
            submission.deliver([error()])
        self.rows.clear()
        self.waiting.clear()
        self._launched = None
        self.decoder.clear()

    def read_launched(self) -> None:
        """Append the launched token to its rows and deliver those that end."""
        launched, self._launched = self._launched, None
        if launched is not None:
            self._append(0, launched)
            self._deliver_ended()

    def _admit(self) -> bool:
        """Start waiting rows in order, as far as rows and the tokens of one prefill allow. Returns whether any started."""
        count = min(len(self.waiting), self._max_rows - len(self.rows))
        new: list[PendingGroup] = []
        longest = 0
        for i, row in enumerate(itertools.islice(self.waiting, count)):
            needed = [
                group
                for group in (row.group, row.whole)
                if group is not None and (group.prompt is None or group.version != self.version) and group not in new
            ]
            if needed:
                widest = max(longest, *(len(group.ids) for group in needed))
                if new and widest * (len(new) + len(needed)) > self._prefill_tokens:
                    count = i
                    break
                new += needed
                longest = widest
        if not count:
            return False
        self._prefill(new)
        started = [self.waiting.popleft() for _ in range(count)]
        self.rows += started
        for row in started:
            assert row.group.prompt is not None
            self.decoder.join(row.group.prompt, row.whole.prompt if row.whole else None)
        sources = [row.whole or row.group for row in started]
        logits = torch.stack([source.logits for source in sources if source.logits is not None])
        for row, source in zip(started, sources, strict=True):
            row.start(source)
            row.whole = None
            self._leave_queue(row.group)
        first = len(self.rows) - len(started)
        self._append(first, self._draw(first, logits))
        self._deliver_ended()
        return True

    def _prefill(self, groups: list[PendingGroup]) -> None:
        if not groups:
            return
        for group in groups:
            if group.prompt is not None:  # computed with older weights; rows in flight keep it
                self.decoder.release(group.prompt)
        prompts, logits = self.decoder.prefill([group.ids for group in groups])
        for group, prompt, first in zip(groups, prompts, logits, strict=True):
            group.prompt, group.logits, group.version = prompt, first, self.version
        if self.decoder.routing is not None:
            parts = self.decoder.routing.split([len(group.ids) for group in groups])
            for group, chosen in zip(groups, parts, strict=True):
                group.routing = chosen

    def _leave_queue(self, group: PendingGroup) -> None:
        """Count one row of ``group`` less in the queue; without any the group releases its prompt."""
        group.waiting -= 1
        if not group.waiting and group.prompt is not None:
            self.decoder.release(group.prompt)
            group.prompt = group.logits = None

    def _decode(self) -> None:
        """Launch one more token of every row, and read it unless the next one can be launched first."""
        before = self._launched
        fed = before.tokens if before else torch.tensor([row.tokens[-1] for row in self.rows])
        launched = self._draw(0, self.decoder.decode(fed), unread=1 if before else 0)
        if self.decoder.routing is not None:
            for row, chosen in zip(self.rows, self.decoder.routing.split(1), strict=True):
                row.routing.append(chosen)
        finished = before is not None and self._append(0, before)
        self._launched = launched
        if finished or not self._launch_ahead or self._next_may_end():
            self.read_launched()

    def _next_may_end(self) -> bool:
        """Whether the launched token may be a row's last one; then nothing is launched beyond it."""
        return any(len(row.tokens) + 1 >= row.request.params.max_tokens for row in self.rows)

    def _draw(self, first: int, logits: torch.Tensor, unread: int = 0) -> Drawn:
        """Draw the next token of each row from number ``first`` on, ``unread`` tokens after its last one."""
        rows = self.rows[first:]
        points = [uniform(row.request.seed, row.place, len(row.tokens) + unread) for row in rows]
        alternatives = max(row.submission.alternatives or 0 for row in rows)
        return draw(logits, [row.request.params for row in rows], points, alternatives)

    def _append(self, first: int, drawn: Drawn) -> bool:
        """Append the drawn tokens to the rows from number ``first`` on that have not ended. Returns whether any ends."""
        ended, streamed = False, dict[int, tuple[Submission, list[Token]]]()
        for row, tokens, logprobs in zip(self.rows[first:], *drawn.read(), strict=True):
            if row.ended is None:
                row.append(tokens[0], logprobs[0], self.version)
                row.ended = self._finish_reason(row)
                ended = ended or row.ended is not None
                if (alternatives := row.submission.alternatives) is not None:
                    others = tuple(zip(tokens[1 : alternatives + 1], logprobs[1 : alternatives + 1], strict=True))
                    made = Token(row.request.group, row.place, tokens[0], logprobs[0], self.version, others)
                    streamed.setdefault(id(row.submission), (row.submission, []))[1].append(made)
        for submission, new in streamed.values():
            submission.deliver(new)
        return ended

    def _deliver_ended(self) -> None:
        results: dict[int, tuple[Submission, list[Completion | Exception]]] = {}
        for row in self.rows:
            if row.ended is not None:
                results.setdefault(id(row.submission), (row.submission, []))[1].append(row.completion(row.ended))
        for submission, completions in results.values():
            submission.deliver(completions)
        for number in reversed(range(len(self.rows))):
            if self.rows[number].ended is not None:
                self._remove(number)

    def _remove(self, number: int) -> None:
        self.decoder.leave(number)
        last = self.rows.pop()
        if number < len(self.rows):
            self.rows[number] = last

    def _finish_reason(self, row: ResponseRow) -> FinishReason | None:
        params = row.request.params
        if row.tokens[-1] in params.stop_token_ids:
            return "stop"
        if params.stop:
            assert self._tokenizer is not None
            # A token has at least one byte, so this many tokens hold any stop string that the newest one completes.
            tail = max(len(stop.encode()) for stop in params.stop) + STOP_SLACK
            text = self._tokenizer.decode(row.tokens[-tail:])
            if any(stop in text for stop in params.stop):
                return "stop"
        if len(row.tokens) == params.max_tokens:
            return "length"
        return "cut" if params.budget and len(row.tokens) - row.begun >= params.budget else None
