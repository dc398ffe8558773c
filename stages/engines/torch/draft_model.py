"""Drafts of a second, smaller model.

rows without a draft ─▶ the tokens that it was not fed ─▶ a draw after them ─▶ fed, another draw ─▶ … ─▶ their drafts

It draws each token with the random number with which the engine's model draws the token of that
place. The more alike both distributions are, the more of its tokens are the engine's, at any
temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from stages.engines.drafts import MODEL, MOST_DRAFTED, Draft, Drafts
from stages.engines.torch.decoding.decoder import TorchDecoder
from stages.engines.torch.decoding.rows import ResponseRow, draw_next, read


class DraftModel:
    """The model in ``decoder``. It keeps the keys and values of the rows that it has drafted for
    last. ``cost``: see :func:`cost_of`."""

    def __init__(self, decoder: TorchDecoder, cost: float) -> None:
        self._decoder = decoder
        self._cost = cost
        self._rows: list[ResponseRow] = []  # in the order of the decoder's rows

    def complete(
        self, rows: Sequence[ResponseRow], drafts: list[Draft | None], shares: Drafts
    ) -> None:
        """Put a draft into each place of ``drafts`` that has none, where it is worth its cost by
        the ``shares`` of earlier ones that held."""
        lacking = [n for n, row in enumerate(rows) if drafts[n] is None and self._takes(row)]
        if not lacking:
            return
        count = shares.worth(MODEL, len(rows), self._cost * len(rows) / len(lacking))
        count = min(count, max(_room(rows[n]) for n in lacking))
        if count:
            drafted = self._drafted([rows[n] for n in lacking], count)
            for number, tokens in zip(lacking, drafted, strict=True):
                drafts[number] = Draft(tokens[: _room(rows[number])], MODEL)

    def clear(self) -> None:
        """Drop all keys and values."""
        self._rows = []
        self._decoder.clear()

    def _takes(self, row: ResponseRow) -> bool:
        length = len(row.group.ids) + len(row.tokens) + MOST_DRAFTED
        return row.is_plain and _room(row) > 0 and length <= self._decoder.max_context

    def _drafted(self, rows: Sequence[ResponseRow], count: int) -> list[list[int]]:
        """Return ``count`` tokens that may follow each of ``rows``."""
        self._hold(rows)
        decoder = self._decoder
        numbers = [self._rows.index(row) for row in rows]
        behind = [row.tokens[decoder.rows[n].length :] for n, row in enumerate(self._rows)]
        logits = decoder.extend(range(len(behind)), [torch.tensor(ids) for ids in behind])
        lengths = [row.length for row in decoder.rows]
        drafted: list[list[int]] = [[] for _ in self._rows]
        for place in range(count):
            if place:
                logits = decoder.decode([tokens[-1] for tokens in drafted])
            drawn = read(draw_next(self._rows, logits, ahead=[place] * len(self._rows)))
            for tokens, ((token, *_), _) in zip(drafted, drawn, strict=True):
                tokens.append(token)
        # What is kept of a draft is fed again with the tokens after it.
        for row, length in zip(decoder.rows, lengths, strict=True):
            row.length = length
        return [drafted[n] for n in numbers]

    def _hold(self, rows: Sequence[ResponseRow]) -> None:
        """Drop all rows but ``rows``, and prefill the prompts of those that are new."""
        decoder = self._decoder
        for number in reversed(range(len(self._rows))):
            if self._rows[number] not in rows:
                decoder.leave(number)
                last = self._rows.pop()
                if number < len(self._rows):
                    self._rows[number] = last
        prompts = {
            id(row.group): each.prompt for row, each in zip(self._rows, decoder.rows, strict=True)
        }
        for row in rows:
            if row in self._rows:
                continue
            new = id(row.group) not in prompts
            if new:
                ([prompts[id(row.group)]], _) = decoder.prefill([row.group.ids])
            decoder.join(prompts[id(row.group)])
            if new:
                decoder.release(prompts[id(row.group)])
            self._rows.append(row)


def _room(row: ResponseRow) -> int:
    """Return how many tokens a draft of ``row`` may have: one more is made after it."""
    return row.limit - len(row.tokens) - 1


def cost_of(model: Any, target: Any) -> float:
    """Return about how many forwards of ``target`` a forward of ``model`` takes, both transformers
    models: it reads all parameters, and each layer has its calls."""
    models = (model, target)
    parameters, of_target = (each.num_parameters() for each in models)
    layers, layers_of_target = (each.config.get_text_config().num_hidden_layers for each in models)
    return max(parameters / of_target, layers / layers_of_target)
