"""What a model has had: calls by kind, data, tokens, and how stale they were.

staleness of a datum = optimizer steps of the model at the pass − the oldest version among those of
its tokens that a sampler of the same model has made
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Versions = tuple[tuple[int, int], ...]
"""Of a sampled sequence, run-length encoded: (optimizer steps of the weights, tokens)."""
Span = tuple[str, int, int]
"""A sequence's id, and offset and length of the tokens in it."""

VERSIONS_SHOWN = 1000  # the newest ones, in a ledger


def oldest_version(versions: Versions, offset: int, length: int) -> int | None:
    """Return the oldest version among these tokens; None where the sequence has none of them.

    >>> oldest_version(((3, 10), (4, 5)), 8, 4), oldest_version(((3, 10), (4, 5)), 10, 2)
    (3, 4)
    """
    oldest = None
    begin = 0
    for version, count in versions:
        if begin < offset + length and begin + count > offset:
            oldest = version if oldest is None else min(oldest, version)
        begin += count
    return oldest


def staleness(
    data: Sequence[Sequence[Span]],
    model_id: str,
    step: int,
    versions_of: Callable[[str], tuple[str, Versions] | None],
) -> list[int]:
    """Return the staleness of those of ``data`` whose provenance is known. ``versions_of``: the
    model and the versions of a sequence."""
    values = list[int]()
    for spans in data:
        oldest = list[int]()
        for sequence_id, offset, length in spans:
            known = versions_of(sequence_id)
            if known is not None and known[0] == model_id:
                version = oldest_version(known[1], offset, length)
                if version is not None:
                    oldest.append(version)
        if oldest and min(oldest) <= step:
            values.append(step - min(oldest))
    return values


class Ledger:
    """Counts of a model. ``counts`` are JSON's values, and all that there is of it."""

    def __init__(self, counts: dict[str, Any] | None = None) -> None:
        self.counts: dict[str, Any] = counts or {
            "calls": {},
            "data": 0,
            "tokens": 0,
            "staleness": {"data": 0, "sum": 0, "max": 0},
        }

    def count(self, call: dict[str, Any], answer: dict[str, Any]) -> None:
        """Count a call by the heads of its records."""
        kinds = self.counts["calls"].setdefault(call["kind"], {"done": 0, "failed": 0})
        failed = "failed" in answer
        kinds["failed" if failed else "done"] += 1
        if call["kind"] == "forward_backward" and not failed:
            self.counts["data"] += call["data"]
            self.counts["tokens"] += call["tokens"]
            total = self.counts["staleness"]
            for value in answer.get("staleness", ()):
                total["data"] += 1
                total["sum"] += value
                total["max"] = max(total["max"], value)


class SampledLedger:
    """Counts of what was sampled with a model's weights: sequences, and tokens by version."""

    def __init__(self, counts: dict[str, Any] | None = None) -> None:
        self.counts: dict[str, Any] = counts or {"sequences": 0, "tokens": 0, "versions": {}}

    def count(self, versions: Versions) -> None:
        self.counts["sequences"] += 1
        by_version = self.counts["versions"]
        for version, tokens in versions:
            self.counts["tokens"] += tokens
            by_version[str(version)] = by_version.get(str(version), 0) + tokens
        while len(by_version) > VERSIONS_SHOWN:
            del by_version[min(by_version, key=int)]
