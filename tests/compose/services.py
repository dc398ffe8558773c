"""compose.yaml as data, with its anchors and variables resolved."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from tests.compose.sandbox import ROOT

FOLDER = ROOT / "compose"
SIZES = {"k": 2**10, "m": 2**20, "g": 2**30}


def interpolated(text: str, variables: Mapping[str, str]) -> str:
    """``${NAME:-default}`` filled in as compose does.

    >>> interpolated("${PORT:-8765} ${HOST:-}", {"PORT": "1"})
    '1 '
    """
    return re.sub(r"\$\{(\w+):-([^}]*)\}", lambda match: variables.get(match[1]) or match[2], text)


def load(variables: Mapping[str, str] | None = None) -> dict[str, Any]:
    return yaml.safe_load(interpolated((FOLDER / "compose.yaml").read_text(), variables or {}))


def in_bytes(size: str) -> int:
    """``2g`` in bytes."""
    return int(size[:-1]) * SIZES[size[-1]] if size[-1] in SIZES else int(size)


def ports(spec: Mapping[str, Any]) -> Iterator[tuple[str, int, int]]:
    """(address, port of this machine, port in the container) of what a service publishes."""
    for text in spec.get("ports", []):
        address, outside, within = text.rsplit(":", 2)
        yield address, int(outside), int(within)
