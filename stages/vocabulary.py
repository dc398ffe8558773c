"""The fingerprint of a vocabulary, by which programs that exchange token ids notice that they mean other tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping


def fingerprint(vocabulary: Mapping[str, int]) -> str:
    """Returns the sha256, in hex, of a tokenizer's ``get_vocab()``: of the JSON list of its [id, token] pairs by id, then by
    token, in ASCII and without spaces.

    >>> fingerprint({"b": 1, "a": 0})[:16]
    'ed2ad7c772b1dcb6'
    """
    pairs = sorted((number, token) for token, number in vocabulary.items())
    return hashlib.sha256(json.dumps(pairs, separators=(",", ":")).encode()).hexdigest()
