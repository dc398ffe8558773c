"""Prompt sources: which prompt the group with global number ``seq`` gets, on two sides, training
and held out.

    options + seed ── load_prompts ──▶ PromptSplit ── train.prompt(seq) ─────▶ Prompt (token ids, text, fields)
                          │                 └──────── held_out.prompt(seq) ──▶ Prompt, never one of ``train``
                          ├ of several sources: MixedPrompts, blocks of numbers with each source as often as its weight
                          └ longer than PromptLimits: skipped or cut, counted and listed by LongPrompts

A prompt is a pure function of ``(options, seed, seq)``: a run that resumes, or repeats a lost
group, gets the same prompt for the same ``seq``, and no position has to be saved. Tables are
shuffled in each epoch; procedural sources never end. The side of a prompt follows from its text (of
a run with environments, from all columns of its row) and the seed: the same text is never on both,
however often a source repeats it. A position in a mixture is a position in each source, and shares
are exact after each block.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import structlog

from stages.prompts.formatter import OpensConversation, Prompt, PromptFormatter, identity_of
from stages.prompts.rows.files import PromptError, Row, Table
from stages.prompts.rows.opened import open_rows
from stages.prompts.rows.options import PromptLimits, PromptOptions
from stages.prompts.rows.templates import Message
from stages.prompts.rows.values import describe
from stages.prompts.too_long import LongPrompts

if TYPE_CHECKING:
    from stages.model.load import Tokenizer


log = structlog.get_logger()

# draws for one seq, after which a procedural source has no prompt that fits
PROCEDURAL_ATTEMPTS = 10_000
# numbers of a mixture; weights that would need a longer block are rounded to its parts
LARGEST_BLOCK = 1000
# distance of the draws for one seq, so that they are not those of the next seqs
ATTEMPT_STRIDE = 1 << 20


class PromptSource(Protocol):
    @property
    def too_long(self) -> LongPrompts:
        """The prompts that were too long so far."""

    def prompt(self, seq: int) -> Prompt:
        """Return the prompt of the group with global number ``seq`` >= 0: always the same for the
        same seed."""

    def epochs(self, seq: int) -> dict[str, int]:
        """Return the epoch, from 1, of the newest prompt of each source up to ``seq``, by the
        source's key in the recipe. Sources without an end have none."""


@dataclass(frozen=True)
class PromptSplit:
    """The two sides of one source. ``held_out`` is None when nothing is held out."""

    train: PromptSource
    held_out: PromptSource | None


def load_prompts(
    options: PromptOptions,
    tokenizer: Tokenizer,
    seed: int,
    *,
    limits: PromptLimits | None = None,
    listed: Path | None = None,
    opens: OpensConversation | None = None,
) -> PromptSplit:
    """Open a source and divide it.

    ``limits``: how long a prompt may be (default: ``max_prompt_tokens``); longer ones are listed in
    the file ``listed``. ``opens``: as :class:`PromptFormatter` takes it. Every row of a table is
    checked here, so that a bad one is an error at the start. Raises :class:`PromptError`.
    """
    too_long = LongPrompts(listed)
    opened = {key: (part, open_rows(part, seed)) for key, part in options.parts().items()}
    if any(callable(rows) for _, rows in opened.values()):
        too_long.resume()
    formatters = {
        key: PromptFormatter(part, tokenizer, limits, opens) for key, (part, _) in opened.items()
    }
    splits = [
        _split(rows, formatters[key], seed, too_long, key) for key, (_, rows) in opened.items()
    ]
    for key, (_, rows) in opened.items():
        if isinstance(rows, Table) and rows.about:
            log.info("prompts are read", source=key, rows=rows.about)
    for key, formatter in formatters.items():
        for text in describe(formatter.changes):
            log.info("values of a column become others", source=key, change=text)
    if len(splits) == 1:
        return splits[0]
    weights = [source.weight for source in options.sources]
    train = MixedPrompts([split.train for split in splits], weights, seed, too_long)
    held_out = [split.held_out for split in splits if split.held_out is not None]
    return PromptSplit(train, MixedPrompts(held_out, weights, seed, too_long) if held_out else None)


def _split(
    rows: Table | Callable[[int], Row],
    formatter: PromptFormatter,
    seed: int,
    too_long: LongPrompts,
    key: str,
) -> PromptSplit:
    """Divide the rows of one source. Raises PromptError."""
    options = formatter.options
    if callable(rows):
        procedural = [
            ProceduralPrompts(rows, formatter, seed, too_long, held_out=side)
            for side in (False, True)
        ]
        return PromptSplit(procedural[0], procedural[1] if options.held_out else None)
    sides: tuple[list[int], list[int]] = ([], [])
    for number in formatter.fitting(rows, too_long):
        identity = formatter.identity(rows[number], rows.where(number))
        sides[is_held_out(identity, seed, options.held_out)].append(number)
    for name, side in zip(("train", "held-out"), sides, strict=True):
        if not side and (name == "train" or options.held_out):
            raise _empty_side(options, formatter.limits, len(rows), too_long.skipped, name)
    tables = [
        TablePrompts(rows, np.asarray(side, dtype=np.int64), formatter, seed, too_long, key)
        for side in sides
    ]
    return PromptSplit(tables[0], tables[1] if options.held_out else None)


def _empty_side(
    options: PromptOptions, limits: PromptLimits, rows: int, skipped: int, side: str
) -> PromptError:
    source = options.path or options.task
    if not rows:
        return PromptError(f"{source} has no rows", "give a file with prompts")
    if skipped == rows:
        bound = f"none has at most {limits.tokens} tokens, {limits.why}"
        fix = "raise the limit, shorten them, or set prompts.too_long = 'cut'"
        return PromptError(f"all {rows} prompts of {source} are too long: {bound}", fix)
    short = f"{rows} rows, of which {rows - skipped} are short enough"
    problem = f"{source} has no {side} rows: {short}, with held_out = {options.held_out}"
    return PromptError(problem, "change prompts.held_out")


def is_held_out(identity: str | list[Message] | Row, seed: int, share: float) -> bool:
    """Return whether a prompt belongs to the held-out side: by a hash of its identity
    (:meth:`PromptFormatter.identity`) and the seed, uniform on [0, 1)."""
    text = identity if isinstance(identity, str) else json.dumps(identity, sort_keys=True)
    digest = hashlib.blake2b(f"{seed}:{text}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


class TablePrompts:
    """The rows ``chosen`` (int64 [n]) of a table, shuffled in each epoch of ``size`` prompts,
    unless the options refuse."""

    def __init__(
        self,
        rows: Table,
        chosen: np.ndarray,
        formatter: PromptFormatter,
        seed: int,
        too_long: LongPrompts,
        key: str = "prompts",
    ) -> None:
        self._rows = rows
        self._formatter = formatter
        self._key = key
        self.too_long = too_long
        self.size = len(chosen)
        # Groups in flight span two epochs at most, unless an epoch is tiny.
        self._order = lru_cache(2)(
            lambda epoch: np.random.default_rng([seed, epoch]).permutation(chosen)
        )
        if not formatter.options.shuffle:
            self._order = lru_cache(1)(lambda epoch: chosen)

    def prompt(self, seq: int) -> Prompt:
        epoch, place = divmod(seq, self.size)
        row = int(self._order(epoch)[place])
        return self._formatter.prompt(self._rows[row], self._rows.where(row))

    def epochs(self, seq: int) -> dict[str, int]:
        return {self._key: seq // self.size + 1}


class ProceduralPrompts:
    """Rows that a function makes of their numbers.

    A ``seq`` whose row is on the other side, or is skipped as too long, gets the next of its own
    draws, so that it depends on no other ``seq``.
    """

    def __init__(
        self,
        row: Callable[[int], Row],
        formatter: PromptFormatter,
        seed: int,
        too_long: LongPrompts,
        *,
        held_out: bool,
    ) -> None:
        self._row = row
        self._formatter = formatter
        self._seed = seed
        self._held_out = held_out
        self.too_long = too_long

    def epochs(self, seq: int) -> dict[str, int]:
        return {}

    def prompt(self, seq: int) -> Prompt:
        """Return the prompt of ``seq``. Raises :class:`PromptError` where there is none."""
        formatter = self._formatter
        share = formatter.options.held_out
        task = formatter.options.task
        for number in draws(seq):
            row = self._row(number)
            where = f"row {number} of {task}"
            if is_held_out(formatter.identity(row, where), self._seed, share) != self._held_out:
                continue
            if (prompt := formatter.bounded(row, where, self.too_long)) is not None:
                return prompt
        limits = formatter.limits
        raise no_draw(
            *(formatter.options, "held-out" if self._held_out else "training", seq),
            f", or raise the limit of {limits.tokens} tokens ({limits.why})",
        )


def draws(seq: int) -> range:
    """Return the numbers of the rows that are tried in turn for the prompt of ``seq``."""
    return range(seq, seq + PROCEDURAL_ATTEMPTS * ATTEMPT_STRIDE, ATTEMPT_STRIDE)


def no_draw(options: PromptOptions, side: str, seq: int, fix: str = "") -> PromptError:
    """Return the error of a ``seq`` without a prompt; ``fix``: what else mends it."""
    return PromptError(
        f"{options.task} made no {side} prompt for group {seq} in {PROCEDURAL_ATTEMPTS} draws",
        f"change held_out = {options.held_out}, or give the task more different prompts{fix}",
    )


def holds_nothing_out(
    options: PromptOptions, seed: int, *, by_row: bool, seconds: float = 5.0
) -> PromptError | None:
    """Return an error if a task makes no held-out prompt. Return None if it makes one, if its rows
    are a table, or if the answer is not known after ``seconds``. ``by_row``: see
    :func:`~stages.prompts.formatter.identity_of`. Raises :class:`PromptError`."""
    rows = open_rows(options, seed)
    if not callable(rows):
        return None
    end = time.monotonic() + seconds
    for number in draws(0):
        where = f"row {number} of {options.task}"
        identity = identity_of(options, rows(number), where, by_row=by_row)
        if is_held_out(identity, seed, options.held_out) or time.monotonic() > end:
            return None
    return no_draw(options, "held-out", 0)


def places_of(weights: Sequence[float]) -> list[int]:
    """Return how many numbers of a block each source gets, at least one.

    Exact where :data:`LARGEST_BLOCK` allows it.

    >>> places_of([3, 1]), places_of([0.5, 0.25, 0.25]), sum(places_of([1, 2**0.5]))
    ([3, 1], [2, 1, 1], 1000)
    """
    shares = [Fraction(weight).limit_denominator(LARGEST_BLOCK) for weight in weights]
    common = math.lcm(*(share.denominator for share in shares))
    whole = [int(share * common) for share in shares]
    whole = [count // (math.gcd(*whole) or 1) for count in whole]
    if min(whole) and sum(whole) <= LARGEST_BLOCK:
        return whole
    # The largest remainders get what rounding down leaves.
    free = LARGEST_BLOCK - len(weights)
    exact = [free * weight / math.fsum(weights) for weight in weights]
    counts = [math.floor(part) for part in exact]
    order = sorted(range(len(weights)), key=lambda index: counts[index] - exact[index])
    for index in order[: free - sum(counts)]:
        counts[index] += 1
    return [1 + count for count in counts]


class MixedPrompts:
    """A :class:`PromptSource` that takes each number's prompt from one of ``sources``."""

    def __init__(
        self,
        sources: Sequence[PromptSource],
        weights: Sequence[float],
        seed: int,
        too_long: LongPrompts,
    ) -> None:
        self.sources = list(sources)
        self.too_long = too_long
        self._places = places_of(weights)
        block = np.repeat(np.arange(len(sources)), self._places)
        # Groups in flight span two blocks at most, unless a block is tiny.
        self._order = lru_cache(2)(
            lambda number: np.random.default_rng([seed, number, len(block)]).permutation(block)
        )

    def prompt(self, seq: int) -> Prompt:
        block, place = divmod(seq, sum(self._places))
        order = self._order(block)
        source = int(order[place])
        before = int((order[:place] == source).sum())
        return self.sources[source].prompt(block * self._places[source] + before)

    def epochs(self, seq: int) -> dict[str, int]:
        block, place = divmod(seq, sum(self._places))
        here = np.bincount(self._order(block)[: place + 1], minlength=len(self.sources))
        counts = [
            block * places + int(more) for places, more in zip(self._places, here, strict=True)
        ]
        epochs: dict[str, int] = {}
        for source, count in zip(self.sources, counts, strict=True):
            epochs |= source.epochs(count - 1) if count else {}
        return epochs
