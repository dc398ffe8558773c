"""Rows of the torch rollout engine: requests, responses in progress, and the delivery of completions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from stages.engines.protocols import Completion, EngineFailed, FinishReason, GroupRequest
from stages.engines.torch.decoding.decoder import Prompt


@dataclass(eq=False)
class PendingGroup:
    """A request of which some rows have not started: its prefilled prompt, and the logits of the first token."""

    request: GroupRequest
    ids: torch.Tensor  # int64 [P]
    waiting: int
    prompt: Prompt | None = None
    logits: torch.Tensor | None = None  # float32 [V]
    version: int = -1


@dataclass(eq=False)
class ResponseRow:
    """One response in progress."""

    submission: Submission
    group: PendingGroup
    place: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    begun: int = 0  # tokens made before it was claimed this time
    whole: PendingGroup | None = None  # the prompt with those tokens appended, until the row starts
    ended: FinishReason | None = None

    def append(self, token: int, logprob: float, version: int) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if self.versions and self.versions[-1][0] == version:
            self.versions[-1] = (version, self.versions[-1][1] + 1)
        else:
            self.versions.append((version, 1))

    def completion(self) -> Completion:
        assert self.ended is not None
        return Completion(
            group=self.group.request.group,
            place=self.place,
            token_ids=torch.tensor(self.tokens, dtype=torch.int64),
            logprobs=torch.tensor(self.logprobs, dtype=torch.float32),
            versions=tuple(self.versions),
            finish_reason=self.ended,
        )


@dataclass(eq=False)
class Submission:
    """One call of ``generate``: the loop and the queue for its completions."""

    loop: asyncio.AbstractEventLoop
    results: asyncio.Queue[Completion | Exception]

    def deliver(self, items: Sequence[Completion | Exception]) -> None:
        def put() -> None:
            for item in items:
                self.results.put_nowait(item)

        _call_in_loop(self.loop, put)


def start_row(submission: Submission, group: PendingGroup, place: int) -> ResponseRow:
    """A new row. With tokens in ``request.begun``, one prefill computes their keys and values."""
    row, request = ResponseRow(submission, group, place), group.request
    if (begun := request.begun.get(place)) is not None:
        row.tokens, row.logprobs = begun.token_ids.tolist(), begun.logprobs.tolist()
        row.versions, row.begun = list(begun.versions), len(row.tokens)
        row.whole = PendingGroup(request, torch.cat([request.prompt_ids.cpu(), begun.token_ids.cpu()]), waiting=1)
    return row


def engine_failed(error: BaseException) -> EngineFailed:
    failed = EngineFailed(f"the rollout engine failed: {error!r}")
    failed.__cause__ = error
    return failed


def _call_in_loop(loop: asyncio.AbstractEventLoop, act: Callable[[], Any]) -> None:
    """Run ``act`` in ``loop``. Does nothing when the loop is closed."""
    try:
        loop.call_soon_threadsafe(act)
    except RuntimeError:
        if not loop.is_closed():
            raise
