"""What a request changes in the logits of its rows before a token is drawn.

    logits [V] of a row, its tokens ─▶ each of PROCESSORS that the request asks for, in their order ─▶ logits [V]

A further one is a function and its line in :data:`PROCESSORS`. They read tokens that are on the
device, also one that the host has not read yet, so that none waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from stages import device as devices
from stages.engines.protocols import SamplingParams

NO_TOKEN = -1  # in the place of one that may be any, or is not there


class ProcessedRow:
    """The tokens of one row's present turn and what changes its logits. ``counts`` float32 [V]: how
    often each token was generated; ``in_prompt`` bool [V]: also of earlier turns; ``newest`` int64
    [W]: the last generated tokens, as many as the longest of ``words`` [N, W] has before its last
    one.

    ``before`` int64: all tokens before the turn, of which the row itself has ``turn_start``.
    ``logits`` [V]: of its first token.
    """

    def __init__(
        self,
        params: SamplingParams,
        before: torch.Tensor,
        turn_start: int,
        logits: torch.Tensor,
    ) -> None:
        self.params = params
        self._changes = asked_of(params)
        self._device = logits.device
        self._turn_start = turn_start
        self._length = turn_start
        vocabulary = len(logits)
        self.counts = torch.zeros(vocabulary, device=self._device)
        self.in_prompt = torch.zeros(vocabulary, dtype=torch.bool, device=self._device)
        self.in_prompt[self.put(before.tolist())] = True
        self.allowed = self.put(params.allowed_token_ids)
        self.ends = self.put([token for token in params.stop_token_ids if token < vocabulary])
        self.biased = self.put([token for token, _ in params.logit_bias])
        biases = torch.tensor([bias for _, bias in params.logit_bias], dtype=torch.float32)
        self.biases = devices.put(biases, self._device)
        width = max(map(len, params.bad_words), default=1) - 1
        padded = [[NO_TOKEN] * (width - len(word) + 1) + list(word) for word in params.bad_words]
        words = self.put(padded).view(-1, width + 1)
        self.words = words[:, :-1]
        self.word_ends = words[:, -1]
        self.newest = self.put([NO_TOKEN - 1] * width)

    @property
    def turn_length(self) -> int:
        """Tokens of the present turn."""
        return self._length - self._turn_start

    def put(self, numbers: Sequence[object]) -> torch.Tensor:
        return devices.put(torch.tensor(numbers, dtype=torch.int64), self._device)

    def follow(self, tokens: Sequence[int], unread: torch.Tensor | None) -> None:
        """Take in those of the row's ``tokens`` that are new, and the one after them, int64 [1] on
        the device, that the host has not read."""
        new = self.put(tokens[self._length :])
        if unread is not None:
            new = torch.cat([new, unread])
        self._length += len(new)
        self.counts.index_add_(0, new, torch.ones_like(new, dtype=torch.float32))
        self.newest = torch.cat([self.newest, new])[len(new) :]

    def change(self, logits: torch.Tensor) -> None:
        """Overwrite the logits float32 [V] of the next token."""
        for change in self._changes:
            change(logits, self)


def allow_some(logits: torch.Tensor, row: ProcessedRow) -> None:
    allowed_logits = logits[row.allowed]
    logits.fill_(-torch.inf)
    logits[row.allowed] = allowed_logits


def forbid_words(logits: torch.Tensor, row: ProcessedRow) -> None:
    is_begun = ((row.words == row.newest) | (row.words == NO_TOKEN)).all(-1)
    limits = torch.where(is_begun, -torch.inf, torch.inf)
    logits.scatter_reduce_(0, row.word_ends, limits, "amin")


def forbid_the_end(logits: torch.Tensor, row: ProcessedRow) -> None:
    if row.turn_length < row.params.min_tokens:
        logits[row.ends] = -torch.inf


def add_biases(logits: torch.Tensor, row: ProcessedRow) -> None:
    logits.index_add_(0, row.biased, row.biases)


def penalize_repetition(logits: torch.Tensor, row: ProcessedRow) -> None:
    """CTRL (arXiv 1909.05858): of tokens of the prompt and of the response."""
    penalty = row.params.repetition_penalty
    penalized = torch.where(logits < 0, logits * penalty, logits / penalty)
    logits.copy_(torch.where(row.in_prompt | (row.counts > 0), penalized, logits))


def penalize_frequency(logits: torch.Tensor, row: ProcessedRow) -> None:
    logits.sub_(row.counts, alpha=row.params.frequency_penalty)


def penalize_presence(logits: torch.Tensor, row: ProcessedRow) -> None:
    logits.sub_((row.counts > 0).float(), alpha=row.params.presence_penalty)


# By the field of SamplingParams that asks for it. They apply in the order of CHANGES, which is
# vLLM's.
PROCESSORS: Mapping[str, Callable[[torch.Tensor, ProcessedRow], None]] = {
    "allowed_token_ids": allow_some,
    "bad_words": forbid_words,
    "min_tokens": forbid_the_end,
    "logit_bias": add_biases,
    "repetition_penalty": penalize_repetition,
    "frequency_penalty": penalize_frequency,
    "presence_penalty": penalize_presence,
}


def asked_of(params: SamplingParams) -> list[Callable[[torch.Tensor, ProcessedRow], None]]:
    """Return the processors that ``params`` ask for."""
    return [PROCESSORS[field] for field in params.changes if field in PROCESSORS]
