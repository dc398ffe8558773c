"""Recipes as TOML."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def toml_tables(tables: Mapping[str, Any], section: str = "") -> str:
    """Return nested ``tables`` as TOML; keys of the value None are left out.

    >>> print(toml_tables({"name": "sums", "train": {"steps": 4, "betas": [0.9, 0.95]}}), end="")
    name = "sums"
    <BLANKLINE>
    [train]
    steps = 4
    betas = [0.9, 0.95]
    """
    inner = {_key(key): value for key, value in tables.items() if isinstance(value, Mapping)}
    lines = [
        f"{_key(key)} = {toml_text(value)}\n"
        for key, value in tables.items()
        if value is not None and not isinstance(value, Mapping)
    ]
    for key, table in inner.items():
        lines += [f"\n[{section}{key}]\n", toml_tables(table, f"{section}{key}.")]
    return "".join(lines)


def toml_text(value: object) -> str:
    """Return ``value`` as TOML writes it in one line."""
    if isinstance(value, Mapping):
        pairs = ", ".join(f"{_key(key)} = {toml_text(item)}" for key, item in value.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_text, value))}]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(name: str) -> str:
    is_bare = name.isascii() and name.replace("_", "").replace("-", "").isalnum()
    return name if is_bare else toml_text(name)
