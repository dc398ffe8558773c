"""What is computed together, and where: rows once each, whole groups where they must be, no room
given away."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.engines.plans import GroupShape, Piece, deal, plan_micro_batches

shapes = st.builds(
    GroupShape, st.integers(1, 30), st.lists(st.integers(1, 30), min_size=1, max_size=6).map(tuple)
)
batches = st.lists(shapes, min_size=1, max_size=6)


def rows_of(pieces: list[Piece]) -> list[tuple[int, int]]:
    return [(piece.group, row) for piece in pieces for row in piece.rows]


def fed(groups: list[GroupShape], pieces: list[Piece]) -> int:
    """Tokens by hand: the prompt once for each piece, and responses without their last tokens."""
    return sum(
        groups[piece.group].prompt
        + sum(groups[piece.group].responses[row] - 1 for row in piece.rows)
        for piece in pieces
    )


@settings(max_examples=200, deadline=None)
@given(groups=batches, budget=st.none() | st.integers(1, 120), whole=st.booleans())
def test_a_micro_batch_begins_only_where_the_last_one_has_no_room(
    groups: list[GroupShape], budget: int | None, whole: bool
) -> None:
    plan = plan_micro_batches(groups, budget, whole=whole)
    assert all(plan)
    limit = math.inf if budget is None else budget
    for before, after in itertools.pairwise(plan):
        assert fed(groups, [*before, after[0]]) > limit
    assert sorted(rows_of([*itertools.chain(*plan)])) == sorted(rows_of(_whole(groups)))
    for pieces in plan:
        for piece in pieces:
            lengths = [groups[piece.group].responses[row] for row in piece.rows]
            assert lengths == sorted(lengths, reverse=True), "attention pads little"
    if whole:
        assert [len(piece.rows) for pieces in plan for piece in pieces] == [
            len(group.responses) for group in groups
        ]


@settings(max_examples=200, deadline=None)
@given(groups=batches, parts=st.integers(1, 4))
def test_whole_groups_are_dealt_as_they_are(groups: list[GroupShape], parts: int) -> None:
    if len(groups) < parts:
        with pytest.raises(
            ValueError, match=f"{len(groups)} whole groups cannot be dealt to {parts} ranks"
        ):
            deal(groups, parts, whole=True)
        return
    shares = deal(groups, parts, whole=True)
    assert len(shares) == parts
    assert all(shares)
    pieces = sorted(itertools.chain(*shares), key=lambda piece: piece.group)
    assert pieces == _whole(groups)
    # No worse than the greedy bound: the fair share, and a largest group beside it.
    tokens = [fed(groups, [piece]) for piece in _whole(groups)]
    assert max(fed(groups, share) for share in shares) <= sum(tokens) / parts + max(tokens)


def _whole(groups: list[GroupShape]) -> list[Piece]:
    return [
        Piece(number, tuple(range(len(group.responses)))) for number, group in enumerate(groups)
    ]


def test_groups_stay_whole_where_the_ranks_are_even_within_two_percent() -> None:
    """1001 and 1021 tokens. Cut, they would be 1013 and 1011, and a prompt would be computed
    twice."""
    nearly_even = [GroupShape(1, (501, 491, 11)), GroupShape(1, (521, 491, 11))]
    assert [fed(nearly_even, [piece]) for piece in _whole(nearly_even)] == [1001, 1021]
    assert sorted(itertools.chain(*deal(nearly_even, 2)), key=lambda piece: piece.group) == _whole(
        nearly_even
    )


def test_a_prompt_is_computed_twice_where_that_evens_out_the_ranks() -> None:
    uneven = [GroupShape(2, (40,) * 6), GroupShape(2, (5,) * 2)]
    shares = deal(uneven, 2)
    assert max(fed(uneven, share) for share in shares) < fed(uneven, [Piece(0, tuple(range(6)))])
