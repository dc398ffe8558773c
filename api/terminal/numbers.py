"""Numbers and times as texts, for people."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def duration(seconds: float | None) -> str:
    """Return ``seconds`` as hours, minutes and seconds.

    >>> duration(75), duration(3725), duration(None)
    ('1:15', '1:02:05', '–')
    """
    if seconds is None or not math.isfinite(seconds):
        return "–"
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def counted(number: float, noun: str) -> str:
    """Return how many of ``noun`` there are.

    >>> counted(1, "sample"), counted(1200, "sample")
    ('1 sample', '1,200 samples')
    """
    return f"{number:,.0f} {noun}{'' if number == 1 else 's'}"


def unscored(failed: int, absent: int) -> str:
    """Return how many responses a mean reward leaves out, as a text.

    >>> unscored(3, 0), unscored(0, 0)
    ('  (3 failed)', '')
    """
    counts = {"failed": failed, "without a reward": absent}
    text = ", ".join(f"{count:,} {outcome}" for outcome, count in counts.items() if count)
    return f"  ({text})" if text else ""


def lost_text(figures: Mapping[str, float]) -> str:
    """Return how many responses a reward function could not score, as a text. Older files do not
    have how many there were.

    >>> lost_text({"lost": 160, "responses": 1696}), lost_text({"lost": 0}), lost_text({"lost": 1})
    ('could not score 160 of 1,696 responses (9%)', '', 'could not score 1 response')
    """
    lost, responses = figures.get("lost", 0), figures.get("responses", 0)
    if not lost:
        return ""
    if not responses:
        return f"could not score {counted(lost, 'response')}"
    return (
        f"could not score {lost:,.0f} of {counted(responses, 'response')} ({lost / responses:.0%})"
    )


def number(value: Any, form: str = ".3g") -> str:
    """Return ``value`` formatted; ``–`` for None and for numbers that are not finite."""
    if value is None or not math.isfinite(value):
        return "–"
    return format(value, form)


def count(value: int) -> str:
    """Return ``value`` with at most three digits from 100,000 on.

    >>> count(98_765), count(987_654), count(98_765_432)
    ('98,765', '988k', '98.8M')
    """
    if value < 100_000:
        return f"{value:,}"
    return f"{value / 1e3:.0f}k" if value < 999_500 else f"{value / 1e6:.3g}M"


def short_seconds(seconds: float | None) -> str:
    """Return ``seconds``, in ms below 0.0995 s.

    >>> short_seconds(0.0042), short_seconds(0.0996), short_seconds(1.25)
    ('4.2 ms', '0.0996 s', '1.25 s')
    """
    if seconds is None:
        return "–"
    return f"{seconds * 1000:.2g} ms" if seconds < 0.0995 else f"{seconds:.3g} s"


def percent(share: float | None) -> str:
    """Return ``share`` in per cent; ``–`` for None and for numbers that are not finite."""
    return "–" if share is None or not math.isfinite(share) else f"{100 * share:.0f}%"
