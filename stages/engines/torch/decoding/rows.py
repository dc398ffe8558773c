"""Rows of the torch rollout engine: responses in progress, their prompts, their next tokens, and
the delivery of completions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from stages.engines.protocols import Completion, FinishReason, GroupRequest, Token
from stages.engines.response_text import Decodes, ResponseText
from stages.engines.responses import ResponseInProgress
from stages.engines.torch.decoding.decoder import Prompt
from stages.engines.torch.sampling.drawing import Drawn, draw, uniform

if TYPE_CHECKING:
    from stages.engines.torch.model.matchers import Matcher, Matchers
    from stages.engines.torch.sampling.processors import ProcessedRow

# a row's token and the alternatives to it, and their logprobs
Made = tuple[Sequence[int], Sequence[float]]


@dataclass(eq=False)
class PendingGroup:
    """A request of which some rows have not started: its prefilled prompt, and the logits of the
    first token. With ``is_repeated`` the requests with one prompt are one group, as long as a row
    of theirs waits or is in the batch; ``waiting`` counts both then."""

    request: GroupRequest
    ids: torch.Tensor  # int64 [P]
    waiting: int
    prompt: Prompt | None = None
    logits: torch.Tensor | None = None  # float32 [V]
    # [P, layers * top-k]: the experts of its tokens, where they are recorded
    routing: torch.Tensor | None = None


@dataclass(eq=False)
class Submission:
    """One call of ``generate`` or ``stream``: the loop, and the queue for its completions and, of a
    stream, tokens. ``alternatives``: to each token; None: it is no stream."""

    loop: asyncio.AbstractEventLoop
    results: asyncio.Queue[Token | Completion | Exception]
    alternatives: int | None = None

    def deliver(self, items: Sequence[Token | Completion | Exception]) -> None:
        """Put ``items`` into the queue, from another thread. Does nothing when the loop is
        closed."""

        def put() -> None:
            for item in items:
                self.results.put_nowait(item)

        try:
            self.loop.call_soon_threadsafe(put)
        except RuntimeError:
            if not self.loop.is_closed():
                raise


class ResponseRow(ResponseInProgress):
    """One response in the batch or waiting for it.

    One forward computes the keys and values of the tokens that it has from earlier requests, and
    that no row at rest has (:mod:`stages.engines.torch.decoding.resting`).
    """

    def __init__(self, submission: Submission, group: PendingGroup, place: int) -> None:
        super().__init__(group.request, place)
        self.submission = submission
        self.group = group
        self.ended: FinishReason | None = None
        self.failure: Exception | None = None
        self.text: ResponseText | None = None  # in which stop strings are looked for
        self.processed: ProcessedRow | None = None  # where its request changes logits
        self.matcher: Matcher | None = None  # where its request has a structure

    @property
    def done(self) -> bool:
        return self.ended is not None or self.failure is not None

    @property
    def is_plain(self) -> bool:
        """Whether its request changes no logits."""
        return self.processed is None and self.matcher is None

    def take_routing(self, *experts: torch.Tensor) -> None:
        """Take over the ``experts`` of the first fed tokens: of those that have none yet."""
        known = 0 if self.begun_routing is None else len(self.begun_routing)
        self.routing = [torch.cat(experts)[known:]]

    def start(self, logits: torch.Tensor, matchers: Callable[[], Matchers]) -> None:
        """Prepare for what changes the ``logits`` [V] of its tokens."""
        params = self.request.params
        if params.structure is not None:
            self.matcher = matchers().of(params.structure, params.stop_token_ids)
            self.matcher.follow(self.tokens[self.turn_start :])
        if not params.changes:
            return
        from stages.engines.torch.sampling.processors import ProcessedRow, asked_of

        if asked_of(params):
            earlier = torch.tensor(self.tokens[: self.turn_start], dtype=torch.int64)
            before = torch.cat([self.group.ids.cpu(), earlier])
            self.processed = ProcessedRow(params, before, self.turn_start, logits)

    def append(self, token: int, logprob: float, version: int) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.add_version(version, 1)

    def finish_reason(self, tokenizer: Decodes | None) -> FinishReason | None:
        """Return why its newest token is the last one of the request, or None. ``tokenizer``: for
        stop strings."""
        params = self.request.params
        if self.tokens[-1] in params.stop_token_ids:
            return "stop"
        if self.matcher is not None:
            self.matcher.follow(self.tokens[-1:])
            if self.matcher.is_complete:
                return "stop"
        last = len(self.tokens) == self.limit
        if params.stop and self._has_stop_string(tokenizer, whole=last):
            return "stop"
        if last:
            return "length"
        return "cut" if params.budget and len(self.tokens) - self.begun >= params.budget else None

    def _has_stop_string(self, tokenizer: Decodes | None, *, whole: bool) -> bool:
        """Return whether its text has one of its stop strings.

        ``whole``: no more tokens follow.
        """
        assert tokenizer is not None
        if self.text is None:
            params = self.request.params
            self.text = ResponseText(
                tokenizer, params.stop, special_tokens=True, least=params.min_tokens
            )
        for token in self.tokens[self.turn_start + len(self.text) :]:
            self.text.add(token)
        if whole:
            self.text.finish()
        return bool(self.text.stopped)


def draw_next(
    rows: Sequence[ResponseRow],
    logits: torch.Tensor,
    before: Drawn | None = None,
    ahead: Sequence[int] | None = None,
) -> Drawn:
    """Draw a token of each of ``rows`` from ``logits`` [R, V]: the next one, after the token
    ``before`` it where that was not read, or the one that many tokens ``ahead``."""
    ahead = ahead or [1 if before else 0] * len(rows)
    points = [
        uniform(row.request.seed, row.place, row.aside + len(row.tokens) + beyond)
        for row, beyond in zip(rows, ahead, strict=True)
    ]
    alternatives = max(row.submission.alternatives or 0 for row in rows)
    processed = {n: row.processed for n, row in enumerate(rows) if row.processed is not None}
    for number, changes in processed.items():
        newest = before.tokens[number : number + 1] if before else None
        changes.follow(rows[number].tokens, newest)
    for number, row in enumerate(rows):
        if row.matcher is not None:
            row.matcher.mask(logits[number])
    params = [row.request.params for row in rows]
    return draw(logits, params, points, alternatives, processed)


def read(drawn: Drawn) -> list[Made]:
    return list(zip(*drawn.read(), strict=True))
