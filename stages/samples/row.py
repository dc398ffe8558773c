"""A sample as one row of columns, by which it is filtered and shown. Imports nothing of ours."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

Row = dict[str, Any]


def columns(sample: Mapping[str, Any]) -> Row:
    """Return what is known of a sample as one row: numbers, truth values and texts by name, those
    of the run before those of its own: reward functions, columns of stages, fields of the prompt's
    row. ``length``: tokens of the response, observed ones included; ``age``: its staleness.

    >>> row = columns({"step": 3, "versions": [[2, 5], [-1, 2]], "staleness": 1, "rewards": {"exact": 0.5}})
    >>> row["length"], row["age"], row["exact"], row["step"]
    (7, 1, 0.5, 3)
    """
    plain = {name: value for name, value in sample.items() if not isinstance(value, dict | list)}
    return {
        **sample.get("fields", {}),
        **sample.get("columns", {}),
        **sample.get("rewards", {}),
        "length": sum(tokens for _, tokens in sample.get("versions", ())),
        "age": sample.get("staleness"),
        **plain,
    }


def prompt_id(prompt: str) -> str:
    """Return a short name of a prompt's text, by which it is found again in other steps."""
    return hashlib.blake2s(prompt.encode("utf-8", "replace"), digest_size=6).hexdigest()
