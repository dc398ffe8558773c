"""Trajectories of a run in figures: from the counts of `stage` events to what a person reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stages.flow.catalogue import TIMES

ENDED = "ended_"  # what counts of endings begin with


def endings(counts: Mapping[str, float]) -> dict[str, int]:
    """Return how many trajectories have ended, by reason."""
    return {
        name.removeprefix(ENDED): int(count)
        for name, count in counts.items()
        if name.startswith(ENDED)
    }


def summarize_trajectories(counts: Mapping[str, float]) -> dict[str, Any]:
    """Return the figures of a run with environments, of which ``counts`` are the
    :attr:`RunTotals.trajectories`; {} for another run. ``time``: shares of the time of all turns."""
    if not counts:
        return {}
    by_reason = endings(counts)
    ended = sum(by_reason.values())
    seconds = {name: counts.get(f"{name}_seconds", 0.0) for name in TIMES}
    total = sum(seconds.values())
    names = (
        *("turns", "branches", "generated_tokens", "observed_tokens", "computed_again_tokens"),
        *("calls", "failed_calls", "replayed", "remade"),
    )
    return {
        "ended": ended,
        "endings": by_reason,
        "turns_mean": counts.get("turns", 0) / ended if ended else None,
        **{name: int(counts.get(name, 0)) for name in names},
        "time": {name: value / total if total else None for name, value in seconds.items()},
    }


def trajectories_text(summary: Mapping[str, Any]) -> str:
    """Return such a ``summary`` in one line.

    >>> counts = {"turns": 6, "calls": 4, "failed_calls": 1, "ended_done": 2, "ended_turns": 1}
    >>> tokens = {"generated_tokens": 90, "observed_tokens": 30}
    >>> trajectories_text(summarize_trajectories({**counts, **tokens}))
    '3 of 2.0 turns (2 done, 1 turns); 90 tokens generated, 30 observed; 1 of 4 tool calls failed'
    """
    if not summary:
        return ""
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in summary["endings"].items())
    parts = [f"{summary['ended']:,} ended"]
    if summary["ended"]:
        parts = [f"{summary['ended']:,} of {summary['turns_mean']:.1f} turns ({reasons})"]
    parts.append(
        f"{summary['generated_tokens']:,} tokens generated, {summary['observed_tokens']:,} observed"
    )
    if computed_again := summary["computed_again_tokens"]:
        parts[-1] += f", {computed_again:,} computed again"
    shares = [f"{share:.0%} {name}" for name, share in summary["time"].items() if share is not None]
    if shares:
        parts.append("time: " + ", ".join(shares))
    if summary["calls"]:
        parts.append(f"{summary['failed_calls']:,} of {summary['calls']:,} tool calls failed")
    if summary["branches"]:
        parts.append(f"{summary['branches']:,} branches")
    if again := summary["replayed"] + summary["remade"]:
        parts.append(f"{again:,} environments opened again")
    return "; ".join(parts)
