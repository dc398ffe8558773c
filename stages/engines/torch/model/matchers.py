"""Structured outputs: which tokens may follow in a response of a given structure, by llguidance.

    Structure ─▶ Matchers.of, a copy for each response ─▶ allowed(): a bit of each token ─▶ logits of the others: -inf
                                                           ▲ follow(the token that was drawn) ──────────┘

Imported with the first structure.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from pipeline.compat.extras import extra
from stages import device as devices
from stages.engines.structure import Structure

MOST_KEPT = 64  # compiled structures of a tokenizer


class Matcher:
    """One turn of a response. ``matcher``: of llguidance, whose end token is ``eos``. ``ends``:
    tokens that end the turn where it may end."""

    def __init__(self, matcher: Any, eos: int, ends: Sequence[int]) -> None:
        self._matcher = matcher
        self._eos = eos
        self._ends = np.array(ends, dtype=np.int64)

    def follow(self, tokens: Sequence[int]) -> None:
        """Take in the next ``tokens``. Raises ValueError where one may not follow."""
        if not self._matcher.consume_tokens(list(tokens)):
            raise ValueError(f"the response leaves its structure: {self._matcher.get_error()}")

    @property
    def is_complete(self) -> bool:
        """Whether no text may follow."""
        return bool(self._matcher.is_stopped())

    def allowed(self) -> np.ndarray:
        """Return uint8 [V / 8], the bits of the tokens that may follow, the lowest one first."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8).copy()
        _set(bits, np.array([self._eos]), False)
        if self._matcher.is_accepting():
            _set(bits, self._ends, True)
        return bits

    def mask(self, logits: torch.Tensor) -> None:
        """Overwrite the logits [V] of the tokens that may not follow."""
        allowed = np.unpackbits(self.allowed(), count=len(logits), bitorder="little")
        forbidden = torch.from_numpy(allowed == 0)
        logits.masked_fill_(devices.put(forbidden, logits.device), -torch.inf)


class Matchers:
    """Makes matchers for the tokens of ``tokenizer``, for a model with ``vocabulary`` of them.
    Raises ExtraMissing."""

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        self._tokens = _tokens_of(tokenizer, vocabulary)
        self._vocabulary = vocabulary
        self._first = lru_cache(MOST_KEPT)(self._compiled)

    def of(self, structure: Structure, ends: Sequence[int]) -> Matcher:
        """Return the matcher of a new turn. Raises ValueError."""
        known_ends = [end for end in ends if end < self._vocabulary]
        return Matcher(self._first(structure).deep_copy(), self._tokens.eos_token, known_ends)

    def masks(
        self, structure: Structure, ends: Sequence[int], response: torch.Tensor
    ) -> torch.Tensor:
        """Return uint8 [T, V / 8]: the bits of the tokens that could have been at each place of
        ``response`` int64 [T]. Raises ValueError where it has not this structure."""
        matcher = self.of(structure, ends)
        masks = []
        for token in response.tolist():
            masks.append(matcher.allowed())
            if token not in ends:
                matcher.follow([token])
        return torch.from_numpy(np.stack(masks))

    def _compiled(self, structure: Structure) -> Any:
        with extra("structured"):
            from llguidance import LLMatcher
        matcher = LLMatcher(self._tokens, structure.compiled(), log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher


def _set(bits: np.ndarray, tokens: np.ndarray, is_set: bool) -> None:
    for token in tokens:
        bit = np.uint8(1 << (token & 7))
        bits[token >> 3] = bits[token >> 3] | bit if is_set else bits[token >> 3] & ~bit


class _Spelled:
    """The tokens of a tokenizer whose decoder llguidance does not know, each as it is decoded
    alone."""

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.eos_token_id
        self.bos_token_id = tokenizer.bos_token_id
        self.special_token_ids = tokenizer.all_special_ids
        self.tokens = [
            b"" if token in self.special_token_ids else tokenizer.decode([token]).encode()
            for token in range(vocabulary)
        ]

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return [token for token in ids if token not in self.special_token_ids]


def _tokens_of(tokenizer: Any, vocabulary: int) -> Any:
    with extra("structured"):
        from llguidance import LLTokenizer, TokenizerWrapper
        from llguidance.hf import from_tokenizer
    try:
        return from_tokenizer(tokenizer, vocabulary)
    except ValueError:
        return LLTokenizer(TokenizerWrapper(_Spelled(tokenizer, vocabulary)), vocabulary)
