"""Logprobs of an answer, in the forms of completions, of chats and of prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from api.policy.pieces import Pieces, Placed
from api.schemas.completions import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
)
from stages.engines.protocols import Token

UNLIKELY = -9999.0


class LogprobViews:
    """Writes logprobs with the names that ``pieces`` has of tokens, or ``as_ids``, as
    ``token_id:N``. ``with_itself``: a token of a chat is among those beside it."""

    def __init__(self, pieces: Pieces, *, as_ids: bool, with_itself: bool = False) -> None:
        self._pieces = pieces
        self._with_itself = with_itself
        self._as_ids = as_ids

    def of_chat(self, tokens: Sequence[Placed]) -> ChatLogprobs:
        return ChatLogprobs(content=[self._named(placed) for placed in tokens])

    def of_completion(self, tokens: Sequence[Placed]) -> CompletionLogprobs:
        """Return those of ``tokens``; NaN is the logprob of one that nothing is before."""
        first = [math.isnan(placed.token.logprob) for placed in tokens]
        return CompletionLogprobs(
            tokens=[self._name(placed, "bytes:") for placed in tokens],
            token_logprobs=[
                None if is_first else _finite(placed.token.logprob)
                for placed, is_first in zip(tokens, first, strict=True)
            ],
            top_logprobs=[
                None if is_first else self._likeliest(placed)
                for placed, is_first in zip(tokens, first, strict=True)
            ],
            text_offset=[placed.offset for placed in tokens],
        )

    def of_prompt(self, scored: Sequence[tuple[Token, int]]) -> PromptLogprobs:
        """Return those of a prompt's tokens after its first one, each with its rank."""
        positions: PromptLogprobs = [None]
        for token, rank in scored:
            ranks = {token.token_id: (token.logprob, rank)}
            ranks |= {
                other: (logprob, place + 1)
                for place, (other, logprob) in enumerate(token.alternatives)
                if other != token.token_id
            }
            positions.append(
                {
                    str(number): PromptLogprob(
                        logprob=_finite(logprob),
                        rank=rank,
                        decoded_token=self._pieces.name(number, self._pieces.bytes_of(number)),
                    )
                    for number, (logprob, rank) in ranks.items()
                }
            )
        return positions

    def _candidates(self, placed: Placed) -> list[Placed]:
        """Return the likeliest tokens in the place of ``placed``, with it where it is among
        them."""
        token = placed.token
        return [
            placed if name == token.token_id else self._candidate(token, name, logprob)
            for name, logprob in token.alternatives
            if math.isfinite(logprob)
        ]

    def _candidate(self, sampled: Token, token_id: int, logprob: float) -> Placed:
        other = replace(sampled, token_id=token_id, logprob=logprob, alternatives=())
        return Placed(other, self._pieces.bytes_of(token_id), 0)

    def _named(self, placed: Placed) -> TokenLogprob:
        """Return the logprob of ``placed`` in the form of chat completions."""
        others = self._candidates(placed)
        if self._with_itself and placed not in others:
            others.append(placed)
        views = [
            TokenLogprob(
                token=self._name(candidate),
                logprob=_finite(candidate.token.logprob),
                bytes=list(candidate.own),
            )
            for candidate in (placed, *others)
        ]
        return views[0].model_copy(update={"top_logprobs": views[1:]})

    def _name(self, placed: Placed, prefix: str = "") -> str:
        number = placed.token.token_id
        if self._as_ids:
            return f"token_id:{number}"
        return self._pieces.name(number, placed.own, prefix=prefix)

    def _likeliest(self, placed: Placed) -> dict[str, float]:
        """Return the logprobs of ``placed``, and of the likeliest tokens, by their names, each of
        which is there once."""
        logprobs = {self._name(placed, "bytes:"): _finite(placed.token.logprob)}
        for candidate in self._candidates(placed):
            name = self._name(candidate, "bytes:")
            if candidate is placed:
                continue
            if name in logprobs:
                name = f"token_id:{candidate.token.token_id}"
            logprobs[name] = _finite(candidate.token.logprob)
        return logprobs


def _finite(logprob: float) -> float:
    """Return ``logprob``, or OpenAI's number for a token that is very unlikely."""
    return logprob if math.isfinite(logprob) else UNLIKELY
