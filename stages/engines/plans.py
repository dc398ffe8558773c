"""Plans of which rows are computed together and on which rank: pure functions of the sizes of groups.

    groups of a step ─▶ deal: a share for each data-parallel rank ─▶ plan_micro_batches: what a rank computes at once

Rows of one group share the computation of their prompt, so a plan keeps them together where it can.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipeline.loader.balance import balanced


@dataclass(frozen=True)
class GroupShape:
    """Sizes of one group in tokens: its prompt, and each of its responses (T >= 1)."""

    prompt: int
    responses: tuple[int, ...]

    def tokens(self, rows: Iterable[int]) -> int:
        """Tokens that the model is fed for ``rows``: the prompt once, and each response without its last token."""
        return self.prompt + sum(self.responses[row] - 1 for row in rows)


@dataclass(frozen=True)
class Piece:
    """Rows of one group that share one computation of their prompt: the group's number and the rows' numbers in it."""

    group: int
    rows: tuple[int, ...]


def plan_micro_batches(
    groups: Sequence[GroupShape], token_budget: int | None, *, whole: bool = False
) -> list[list[Piece]]:
    """Put every row of ``groups`` into exactly one micro-batch, in order, each with at most ``token_budget`` fed tokens.

    A group is split only when it does not fit the budget alone, and a micro-batch exceeds the budget only when it is one
    row, or one group that must stay ``whole``. Longer rows come first, so that neighbours have similar lengths and attention
    pads little. None: no limit.

    >>> groups = [GroupShape(10, (5, 9)), GroupShape(5, (1,)), GroupShape(30, (3, 3))]
    >>> for micro_batch in plan_micro_batches(groups, 32):
    ...     print([(piece.group, piece.rows) for piece in micro_batch])
    [(0, (1, 0)), (1, (0,))]
    [(2, (0,))]
    [(2, (1,))]
    """
    budget = math.inf if token_budget is None else token_budget
    micro_batches: list[list[Piece]] = []
    room = -math.inf
    for number, group in enumerate(groups):
        for piece in _split(group, _longest_first(group), math.inf if whole else budget):
            tokens = group.tokens(piece)
            if tokens > room:
                micro_batches.append([])
                room = budget
            micro_batches[-1].append(Piece(number, tuple(piece)))
            room -= tokens
    return micro_batches


def _split(group: GroupShape, rows: list[int], budget: float) -> Iterable[list[int]]:
    piece: list[int] = []
    for row in rows:
        if piece and group.tokens([*piece, row]) > budget:
            yield piece
            piece = []
        piece.append(row)
    yield piece


EVEN = 1.02  # times the fair share: a largest share that needs no finer pieces
FINEST = 16  # parts that the fair share of a rank is split into, at most, to even out what the ranks have


def deal(groups: Sequence[GroupShape], parts: int, *, whole: bool = False) -> list[list[Piece]]:
    """Deal every row of ``groups`` to exactly one of ``parts`` shares, none of them empty, so that the largest share has few
    tokens to feed. Groups stay whole where the shares are even enough, or where they must (``whole``); each piece of a split
    group computes the prompt once.

    Raises ValueError when there are fewer rows (or ``whole`` groups) than parts.

    >>> deal([GroupShape(4, (9, 9)), GroupShape(4, (9, 9))], 2)
    [[Piece(group=0, rows=(0, 1))], [Piece(group=1, rows=(0, 1))]]
    >>> deal([GroupShape(1, (9, 9, 9, 9))], 2)
    [[Piece(group=0, rows=(0, 3))], [Piece(group=0, rows=(1, 2))]]
    """
    rows = sum(len(group.responses) for group in groups)
    if (len(groups) if whole else rows) < parts:
        what = f"{len(groups)} whole groups" if whole else f"{rows} rows"
        raise ValueError(f"{what} cannot be dealt to {parts} ranks: give each at least one")
    fair = sum(group.tokens(range(len(group.responses))) for group in groups) / parts
    best: list[list[Piece]] = []
    for limit in (math.inf, *(() if whole else (*(fair / split for split in range(1, FINEST + 1)), 0.0))):
        shares = _dealt(groups, parts, limit)
        if all(shares) and (not best or _largest(groups, shares) < _largest(groups, best)):
            best = shares
        if best and _largest(groups, best) <= EVEN * fair:
            break
    return best


def _dealt(groups: Sequence[GroupShape], parts: int, limit: float) -> list[list[Piece]]:
    """Cut groups into pieces of at most ``limit`` tokens and deal those out. Pieces of one group in one share are joined."""
    cut = [
        Piece(number, tuple(piece))
        for number, group in enumerate(groups)
        for piece in _split(group, _longest_first(group), limit)
    ]
    shares = balanced([groups[piece.group].tokens(piece.rows) for piece in cut], parts, equal=False)
    dealt: list[list[Piece]] = []
    for share in shares:
        rows: dict[int, list[int]] = {}
        for at in share:
            rows.setdefault(cut[at].group, []).extend(cut[at].rows)
        dealt.append([Piece(number, tuple(sorted(members))) for number, members in sorted(rows.items())])
    return dealt


def _largest(groups: Sequence[GroupShape], shares: Sequence[Sequence[Piece]]) -> int:
    return max(sum(groups[piece.group].tokens(piece.rows) for piece in share) for share in shares)


def _longest_first(group: GroupShape) -> list[int]:
    return sorted(range(len(group.responses)), key=lambda row: -group.responses[row])
