"""Plans of which rows are computed together and on which rank: pure functions of the sizes of
groups.

    groups of a batch ─▶ cut_mini_batches: what each optimizer step trains on, on any number of ranks
                           └─▶ deal: a share of each for each data-parallel rank
                                 └─▶ plan_micro_batches: what a rank computes at once

Rows of one group share the computation of their prompt, so a plan keeps them together where it can.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pipeline.loader.balance import balanced


@dataclass(frozen=True)
class GroupShape:
    """Sizes of one group in tokens: its prompt, and each of its responses (T >= 1)."""

    prompt: int
    responses: tuple[int, ...]

    def tokens(self, rows: Iterable[int]) -> int:
        """Return the number of tokens that the model is fed for ``rows``: the prompt once, and each
        response without its last token."""
        return self.prompt + sum(self.responses[row] - 1 for row in rows)


@dataclass(frozen=True)
class Piece:
    """Rows of one group that share one computation of their prompt: the group's number and the
    rows' numbers in it."""

    group: int
    rows: tuple[int, ...]


def plan_micro_batches(
    groups: Sequence[GroupShape], token_budget: int | None, *, whole: bool = False
) -> list[list[Piece]]:
    """Put every row of ``groups`` into exactly one micro-batch, in order, each with at most
    ``token_budget`` fed tokens.

    A group is split only when it does not fit the budget alone, and a micro-batch exceeds the
    budget only when it is one row, or one group that must stay ``whole``. Longer rows come first,
    so that neighbours have similar lengths and attention pads little. None: no limit.

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
        for piece in _split(
            group, _longest_first(group, range(len(group.responses))), math.inf if whole else budget
        ):
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
# parts that the fair share of a rank is split into, at most, to even out what the ranks have
FINEST = 16


def cut_mini_batches(
    trained: Mapping[int, Mapping[int, int]], count: int, *, whole: bool = False
) -> list[dict[int, tuple[int, ...]]]:
    """Cut a train batch into at most ``count`` mini-batches, one for each optimizer step of an
    epoch. Returns the places of each one's rows, by group.

    ``trained``: tokens to train on, by group and place, of the whole batch: what a step trains on
    does not depend on the ranks. Rows without any are in no mini-batch. Each mini-batch has as many
    groups as the others, or one more, in the order of their numbers; where there are fewer groups
    than mini-batches, as many rows; where there are fewer rows, there are fewer mini-batches.
    ``whole``: groups are never cut, and one with a token to train on has all its rows.

    >>> cut_mini_batches({4: {0: 9, 1: 9}, 7: {0: 0, 1: 9}, 8: {0: 0}}, 2)
    [{4: (0, 1)}, {7: (1,)}]
    >>> cut_mini_batches({4: {0: 9, 1: 9, 2: 9}}, 2)
    [{4: (0,)}, {4: (1, 2)}]
    """
    groups = {
        group: tuple(place for place in sorted(tokens) if tokens[place] or whole)
        for group, tokens in sorted(trained.items())
        if any(tokens.values())
    }
    units = [(group, places) for group, places in groups.items()]
    if len(units) < count and not whole:
        units = [(group, (place,)) for group, places in groups.items() for place in places]
    steps = min(count, len(units))
    mini_batches: list[dict[int, tuple[int, ...]]] = []
    for step in range(steps):
        rows: dict[int, tuple[int, ...]] = {}
        for group, places in units[len(units) * step // steps : len(units) * (step + 1) // steps]:
            rows[group] = rows.get(group, ()) + places
        mini_batches.append(rows)
    return mini_batches


def deal(
    groups: Sequence[GroupShape],
    parts: int,
    *,
    whole: bool = False,
    mini_batches: int = 1,
    trained: Sequence[Sequence[int]] | None = None,
) -> list[list[Piece]]:
    """Deal every row of ``groups`` to exactly one of ``parts`` shares, none of them empty, so that
    of each mini-batch the largest share has few tokens to feed: the ranks wait for each other at
    each optimizer step. A share may have no row of a mini-batch with few rows. Groups stay whole in
    a mini-batch where its shares are even enough, or where they must (``whole``); each piece of a
    split group computes the prompt once.

    ``trained``: tokens to train on of each response; default: all. Rows without any cost nothing.

    Raises ValueError when there are fewer rows (or ``whole`` groups) than parts.

    >>> deal([GroupShape(4, (9, 9)), GroupShape(4, (9, 9))], 2)
    [[Piece(group=0, rows=(0, 1))], [Piece(group=1, rows=(0, 1))]]
    >>> deal([GroupShape(1, (9, 9, 9, 9))], 2)
    [[Piece(group=0, rows=(0, 3))], [Piece(group=0, rows=(1, 2))]]
    >>> deal([GroupShape(4, (9, 9)), GroupShape(4, (9, 9))], 2, mini_batches=2)
    [[Piece(group=0, rows=(0,)), Piece(group=1, rows=(0,))], [Piece(group=0, rows=(1,)), Piece(group=1, rows=(1,))]]
    """
    rows = sum(len(group.responses) for group in groups)
    if (len(groups) if whole else rows) < parts:
        what = f"{len(groups)} whole groups" if whole else f"{rows} rows"
        raise ValueError(f"{what} cannot be dealt to {parts} ranks: give each at least one")
    tokens = [group.responses for group in groups] if trained is None else trained
    cut = cut_mini_batches(
        {n: dict(enumerate(counts)) for n, counts in enumerate(tokens)}, mini_batches, whole=whole
    )
    shares: list[list[Piece]] = [[] for _ in range(parts)]
    fed = [0] * parts

    def give(part: int, pieces: Sequence[Piece]) -> None:
        shares[part] += pieces
        fed[part] += _tokens(groups, pieces)

    for mini_batch in cut:
        dealt = _dealt(groups, [Piece(*item) for item in mini_batch.items()], parts, whole=whole)
        # Shares without a row yet come first, then those with the fewest tokens.
        order = sorted(range(parts), key=lambda part: (bool(shares[part]), fed[part]))
        for part, pieces in zip(order, dealt, strict=True):
            give(part, pieces)
    for piece in _without(groups, cut, whole):
        give(min(range(parts), key=lambda part: (bool(shares[part]), fed[part])), [piece])
    return [_joined(share) for share in shares]


def _dealt(
    groups: Sequence[GroupShape], pieces: Sequence[Piece], parts: int, *, whole: bool
) -> list[list[Piece]]:
    """Deal the rows of one mini-batch.

    Returns the shares, the largest first; as many as possible have a row.
    """
    fair = _tokens(groups, pieces) / parts
    limits = (
        math.inf,
        *(() if whole else (*(fair / split for split in range(1, FINEST + 1)), 0.0)),
    )
    used = min(parts, len(pieces) if whole else sum(len(piece.rows) for piece in pieces))
    best: list[list[Piece]] = []
    least = math.inf
    for limit in limits:
        cut = [
            Piece(piece.group, tuple(rows))
            for piece in pieces
            for rows in _split(
                groups[piece.group], _longest_first(groups[piece.group], piece.rows), limit
            )
        ]
        positions = balanced([_tokens(groups, [piece]) for piece in cut], parts, equal=False)
        shares = [_joined([cut[at] for at in share]) for share in positions]
        largest = max(_tokens(groups, share) for share in shares)
        if sum(map(bool, shares)) == used and largest < least:
            best = shares
            least = largest
        if least <= EVEN * fair:
            break
    return sorted(best, key=lambda share: -_tokens(groups, share))


def _without(
    groups: Sequence[GroupShape], cut: Sequence[Mapping[int, Sequence[int]]], whole: bool
) -> list[Piece]:
    """Return the rows, or ``whole`` groups, that are in no mini-batch, one by one."""
    dealt = {
        (group, row) for mini_batch in cut for group, rows in mini_batch.items() for row in rows
    }
    rows = [
        (number, row) for number, group in enumerate(groups) for row in range(len(group.responses))
    ]
    pieces = [Piece(number, (row,)) for number, row in rows if (number, row) not in dealt]
    return _joined(pieces) if whole else pieces


def _joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Return ``pieces`` with those of one group as one."""
    rows: dict[int, list[int]] = {}
    for piece in pieces:
        rows.setdefault(piece.group, []).extend(piece.rows)
    return [Piece(number, tuple(sorted(members))) for number, members in sorted(rows.items())]


def _tokens(groups: Sequence[GroupShape], pieces: Iterable[Piece]) -> int:
    return sum(groups[piece.group].tokens(piece.rows) for piece in pieces)


def _longest_first(group: GroupShape, rows: Iterable[int]) -> list[int]:
    return sorted(rows, key=lambda row: -group.responses[row])
