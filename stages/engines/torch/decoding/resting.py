"""Rows at rest: keys and values of turns that have ended, for the next turn of the same response.

a turn ends ─▶ a copy of the row's own keys and values; its prompt stays in the pool
a request continues the response ─▶ only tokens that are new are computed
newer weights, no room, the engine sleeps ─▶ dropped: the request computes all of its tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from stages.engines.torch.decoding.adapters import OWN
from stages.engines.torch.decoding.attention import Pool, nbytes_of
from stages.engines.torch.decoding.decoder import Prompt, TorchDecoder
from stages.engines.torch.decoding.rows import ResponseRow


@dataclass(frozen=True)
class RestingRow:
    """Keys and values of ``tokens``, the first of a response to the prompt ``ids``."""

    ids: torch.Tensor  # int64 [P]
    prompt: Prompt
    tokens: Sequence[int]
    copied: Pool

    @property
    def nbytes(self) -> int:
        return nbytes_of(self.copied)

    def shared(self, row: ResponseRow) -> int:
        """Return how many tokens of ``row`` have keys and values here; its last one is fed in any
        case."""
        most = min(len(self.tokens), len(row.tokens) - 1)
        return next((n for n in range(most) if self.tokens[n] != row.tokens[n]), most)


class RestingRows:
    """The rows at rest of ``decoder``: at most as many bytes as it has for rows that decode."""

    def __init__(self, decoder: TorchDecoder) -> None:
        self._decoder = decoder
        # by adapters, group and place, the newest last
        self._rows: dict[tuple[str, int, int], RestingRow] = {}
        self.nbytes = 0

    def rest(self, number: int, row: ResponseRow) -> None:
        """Let ``row``, which leaves the batch and has the ``number``, rest."""
        decoder_row = self._decoder.rows[number]
        fed = row.tokens[: decoder_row.length]
        self.drop(row)
        if not fed:  # it has ended with its first token
            return
        copied = self._decoder.attention.copy_row(number, len(fed))
        resting = RestingRow(row.group.ids, decoder_row.prompt, fed, copied)
        decoder_row.prompt.holders += 1
        self._rows[_key(row)] = resting
        self.nbytes += resting.nbytes
        while self.nbytes > self._decoder.attention.row_nbytes():
            self._remove(next(iter(self._rows)))

    def of(self, row: ResponseRow) -> RestingRow | None:
        """Return what rests of the response that ``row`` continues."""
        resting = self._rows.get(_key(row)) if row.begun else None
        return resting if resting and torch.equal(resting.ids, row.group.ids) else None

    def drop(self, row: ResponseRow) -> None:
        if _key(row) in self._rows:
            self._remove(_key(row))

    def clear(self, adapters: str = OWN) -> None:
        """Drop the rows of the set ``adapters``, by default all."""
        for key in list(self._rows):
            if adapters in (OWN, key[0]):
                self._remove(key)

    def _remove(self, key: tuple[str, int, int]) -> None:
        resting = self._rows.pop(key)
        self.nbytes -= resting.nbytes
        self._decoder.release(resting.prompt)


def _key(row: ResponseRow) -> tuple[str, int, int]:
    return row.request.adapters, row.request.group, row.place
