"""A sample as one row of columns, by which it is filtered and shown. Imports nothing of ours."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

Row = dict[str, Any]


def columns(sample: Mapping[str, Any]) -> Row:
    """Return what is known of a sample as one row: numbers, truth values and texts by name. A name
    of ours goes before one of a reward function, and that before those of stages of the recipe and
    of fields of the prompt's row.

    ``length``: tokens of the response, observed ones included. ``age``: staleness. ``failed``:
    whether a reward function failed on it.

    >>> row = columns({"step": 3, "versions": [[2, 5], [-1, 2]], "rewards": {"exact": 0.5}})
    >>> row["length"], row["exact"], row["step"], row["failed"]
    (7, 0.5, 3, False)
    """
    plain = {name: value for name, value in sample.items() if not isinstance(value, dict | list)}
    return {
        **sample.get("fields", {}),
        **sample.get("columns", {}),
        **sample.get("rewards", {}),
        **plain,
        "length": sum(tokens for _, tokens in sample.get("versions", ())),
        "age": sample.get("staleness"),
        "failed": bool(sample.get("failed")),
    }


def prompt_id(prompt: str) -> str:
    """Return a short name of a prompt's text, by which it is found again in other steps."""
    return "p" + hashlib.blake2s(prompt.encode("utf-8", "replace"), digest_size=5).hexdigest()
