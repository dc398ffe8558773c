"""Searches of the samples that a run has kept: the newest ones, or the best and the worst.

    SampleLog, newest step first ──▶ columns ──▶ wanted? ──▶ the first ``limit``          ──▶ SearchPage
                  └ bounded bytes                      └──▶ ``best`` and ``worst`` by reward       └ next: where it goes on

Importing this needs no torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stages.samples.reading import MOST_SCANNED, backwards
from stages.samples.row import Row, columns, prompt_id
from stages.samples.sample_log import Sample, parsed

MOST_RANKED = 64 << 20  # bytes of a search for the best and the worst
PRUNED_AT = 1000  # samples of which the best and the worst are kept

_STEP = re.compile(rb'\{"step":(\d+),')


@dataclass
class SearchPage:
    """The samples that a search returns, and how far it has looked.

    ``next``: cursor of the page behind it; "": nothing is older. ``looked``: number of samples that
    it has read; ``steps``: oldest and newest step of these, None: it has read none. ``columns``:
    names that at least one of them has.
    """

    samples: list[Sample] = field(default_factory=list)
    next: str = ""
    looked: int = 0
    steps: tuple[int, int] | None = None
    columns: set[str] = field(default_factory=set)


def search(
    folder: Path,
    wanted: Callable[[Sample, Row], bool],
    *,
    after: str = "",
    limit: int = 50,
    step: int | None = None,
    best: int = 0,
    worst: int = 0,
) -> SearchPage:
    """Return the samples below ``folder`` that are ``wanted``: the ``limit`` newest ones, newest
    step first; or so many with the highest and with the lowest reward, the highest first.

    ``after``: cursor of an earlier page. ``step``: only those of this step. A search pauses after
    :data:`MOST_SCANNED` bytes, or :data:`MOST_RANKED`, so that a page may hold few samples and not
    be the last. Each sample has the ``fields`` of its prompt's row and a ``prompt_id``. Raises
    ValueError for an invalid ``after``.
    """
    page = SearchPage()
    is_ranked = best > 0 or worst > 0
    most = MOST_RANKED if is_ranked else MOST_SCANNED
    scanned = 0
    for sample, size, position in _newest(folder, after, step):
        scanned += size
        row = columns(sample)
        page.looked += 1
        page.columns |= row.keys()
        page.steps = sample["step"], page.steps[1] if page.steps else sample["step"]
        if wanted(sample, row) and (not is_ranked or _has_reward(sample)):
            page.samples.append(sample)
        if is_ranked and len(page.samples) == PRUNED_AT:
            page.samples = _extremes(page.samples, best, worst)
        is_full = not is_ranked and len(page.samples) == limit
        if is_full or scanned >= most:
            page.next = position
            break
    if is_ranked:
        extremes = _extremes(page.samples, best, worst)
        page.samples = sorted(extremes, key=lambda sample: -sample["reward"])
    return page


def _newest(folder: Path, after: str, step: int | None) -> Iterator[tuple[Sample, int, str]]:
    """Yield the samples behind the cursor ``after``, newest step first, each with its bytes and the
    cursor behind it: where its group begins, whose first sample has the prompt's row, and how many
    of the group were read."""
    start, skipped = _position(after)
    group: tuple[int, int] | None = None
    for number, _, end, line in backwards(folder, start, step):
        match = _STEP.match(line)
        if step is not None and match and int(match[1]) > step:
            continue
        if (sample := parsed(line)) is None:
            continue
        if step is not None and sample["step"] < step:
            return
        if group != (sample["step"], sample["group"]):
            skipped = skipped if group is None else 0
            group = sample["step"], sample["group"]
            fields = sample.get("fields", {})
            begin = f"{number}:{end}"
            members = 0
        members += 1
        if members > skipped:
            sample |= {"fields": fields, "prompt_id": prompt_id(sample.get("prompt", ""))}
            yield sample, len(line), f"{begin}:{members}"


def _position(after: str) -> tuple[tuple[int, int] | None, int]:
    """Return the number of a file and its bytes up to which a page reads, and how many samples of
    the group there it leaves out."""
    if not after:
        return None, 0
    parts = after.split(":")
    if len(parts) != 3 or not all(part.isascii() and part.isdigit() for part in parts):
        raise ValueError(
            f"after: {after!r} is no cursor; give the one that an earlier page ended with, or none"
        )
    number, end, skipped = map(int, parts)
    return (number, end), skipped


def _has_reward(sample: Sample) -> bool:
    reward = sample["reward"]
    return reward is not None and math.isfinite(reward)


def _extremes(samples: Sequence[Sample], best: int, worst: int) -> list[Sample]:
    """Return the ``best`` samples by reward and, of the others, the ``worst``, in their order; of
    equal ones the first."""
    rewards = [sample["reward"] for sample in samples]
    highest = sorted(range(len(samples)), key=lambda at: (-rewards[at], at))
    lowest = sorted(highest[best:], key=lambda at: (rewards[at], at))
    return [samples[at] for at in sorted([*highest[:best], *lowest[:worst]])]
