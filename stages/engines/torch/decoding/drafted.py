"""A step in which rows with a draft make several tokens.

newest token + draft of each row ─▶ one packed forward ─▶ a draw after each token ─▶ those up to the first that differs
the batch appends them, until a row ends ─▶ settle: their keys and values are kept, the others overwritten
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from stages.engines.drafts import Draft, Drafts
from stages.engines.torch.decoding.beginnings import warn_of_one_by_one
from stages.engines.torch.decoding.decoder import TorchDecoder
from stages.engines.torch.decoding.rows import Made, ResponseRow, draw_next, read

MOST_FAILED = 3  # forwards in a row, after which no further draft is made


class Drafter(Protocol):
    """What :class:`stages.engines.torch.draft_model.DraftModel` is."""

    def complete(
        self, rows: Sequence[ResponseRow], drafts: list[Draft | None], shares: Drafts
    ) -> None: ...

    def clear(self) -> None: ...


class DraftedSteps:
    """The steps of ``decoder`` in which rows have drafts. ``model``: drafts for rows that have
    none of earlier responses."""

    def __init__(self, decoder: TorchDecoder, model: Drafter | None = None) -> None:
        self.drafts = Drafts()
        self.model = model
        self._decoder = decoder
        self._counts: list[int] = []  # of the tokens that each row was fed
        self._known: list[int] = []  # tokens of each row before
        self._failed = 0  # forwards since the last good one

    def make(self, rows: Sequence[ResponseRow]) -> list[Sequence[Made]]:
        """Return the tokens that were made of each of ``rows``, at least one; none where no row has
        a draft, or the forward fails, or the last ones did."""
        if self._failed == MOST_FAILED:
            return []
        drafts = [self.drafts.of(row, len(rows)) if row.is_plain else None for row in rows]
        self._known = [len(row.tokens) for row in rows]
        try:
            if self.model is not None:
                self.model.complete(rows, drafts, self.drafts)
            if not any(drafts):
                return []
            drafted = [draft.tokens if draft else [] for draft in drafts]
            fed = [[row.tokens[-1], *draft] for row, draft in zip(rows, drafted, strict=True)]
            self._counts = list(map(len, fed))
            of_each = [
                row for row, count in zip(rows, self._counts, strict=True) for _ in range(count)
            ]
            ahead = [beyond for count in self._counts for beyond in range(count)]
            drawn = read(draw_next(of_each, self._decoder.decode_drafts(fed), ahead=ahead))
        except Exception as error:
            self._failed += 1
            if self.model is not None:
                self.model.clear()
            warn_of_one_by_one(error)
            return []
        self._failed = 0
        tokens_of_rows = []
        for draft, tokens, count in zip(drafts, drafted, self._counts, strict=True):
            of_row, drawn = drawn[:count], drawn[count:]
            tokens_of_rows.append(holding(of_row, tokens))
            if draft:
                self.drafts.judge(draft, len(tokens_of_rows[-1]) - 1)
        return tokens_of_rows

    def settle(self, rows: Sequence[ResponseRow]) -> None:
        """Keep the keys and values of the tokens that ``rows`` have taken of the last step."""
        taken = [len(row.tokens) - known for row, known in zip(rows, self._known, strict=True)]
        for decoder_row, count in zip(self._decoder.rows, taken, strict=True):
            decoder_row.length += count
        for row, fed, count in zip(rows, self._counts, taken, strict=True):
            row.drafted_tokens += fed - 1
            row.held_tokens += count - 1
        if self._decoder.routing is not None:
            parts = self._decoder.routing.split(self._counts)
            for row, chosen, count in zip(rows, parts, taken, strict=True):
                row.routing.append(chosen[:count])


def holding(made: Sequence[Made], draft: Sequence[int]) -> Sequence[Made]:
    """Return those of the tokens ``made``, one after each that was fed, before which the ``draft``
    holds."""
    differing = (n for n, token in enumerate(draft) if made[n][0][0] != token)
    return made[: next(differing, len(draft)) + 1]
