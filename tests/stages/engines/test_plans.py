"""What an optimizer step trains on, and on which rank: pure functions, by their properties and by
hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.engines.plans import GroupShape, Piece, cut_mini_batches, deal

Batch = list[tuple[GroupShape, tuple[int, ...]]]  # groups, and tokens to train on of their rows


@st.composite
def groups(draw: st.DrawFn) -> tuple[GroupShape, tuple[int, ...]]:
    lengths = draw(st.lists(st.integers(1, 200), min_size=1, max_size=5))
    trained = [draw(st.sampled_from([length, length, length // 2, 0])) for length in lengths]
    return GroupShape(draw(st.integers(1, 50)), tuple(lengths)), tuple(trained)


batches = st.lists(groups(), min_size=1, max_size=10)
layouts = {
    "batch": batches,
    "dp": st.integers(1, 5),
    "count": st.integers(1, 6),
    "whole": st.booleans(),
}


def by_hand(batch: Batch, count: int, whole: bool) -> list[set[tuple[int, int]]]:
    """The rows of each optimizer step, counted out one by one: (group, place)."""
    trained = [
        [(number, place) for place, tokens in enumerate(of) if tokens or whole]
        for number, (_, of) in enumerate(batch)
        if any(of)
    ]
    units = (
        trained if whole or len(trained) >= count else [[row] for rows in trained for row in rows]
    )
    steps = min(count, len(units))
    out: list[set[tuple[int, int]]] = [set() for _ in range(steps)]
    step = 0
    for number, rows in enumerate(units):
        while number >= len(units) * (step + 1) // steps:
            step += 1
        out[step] |= set(rows)
    return out


def rows_of(mini_batch: Mapping[int, Sequence[int]]) -> set[tuple[int, int]]:
    return {(group, place) for group, places in mini_batch.items() for place in places}


def table(batch: Batch) -> dict[int, dict[int, int]]:
    return {number: dict(enumerate(trained)) for number, (_, trained) in enumerate(batch)}


def dealt(batch: Batch, dp: int, count: int, whole: bool) -> list[list[Piece]]:
    shapes = [shape for shape, _ in batch]
    trained = [tokens for _, tokens in batch]
    return deal(shapes, dp, whole=whole, mini_batches=count, trained=trained)


def possible(batch: Batch, dp: int, whole: bool) -> bool:
    return (len(batch) if whole else sum(len(shape.responses) for shape, _ in batch)) >= dp


@settings(max_examples=300, deadline=None)
@given(batch=batches, count=st.integers(1, 6), whole=st.booleans())
def test_an_optimizer_step_has_its_rows_by_order_of_admission_alone(
    batch: Batch, count: int, whole: bool
) -> None:
    cut = cut_mini_batches(table(batch), count, whole=whole)
    assert [rows_of(mini_batch) for mini_batch in cut] == by_hand(batch, count, whole)
    assert all(
        any(batch[group][1][place] for group, place in rows_of(mini_batch)) for mini_batch in cut
    )
    shuffled = dict(
        reversed([(number, dict(reversed(of.items()))) for number, of in table(batch).items()])
    )
    assert cut_mini_batches(shuffled, count, whole=whole) == cut, (
        "the order in which rows are known does not matter"
    )


@settings(max_examples=300, deadline=None)
@given(**layouts)
def test_each_row_is_dealt_once_and_each_rank_has_one(
    batch: Batch, dp: int, count: int, whole: bool
) -> None:
    if not possible(batch, dp, whole):
        with pytest.raises(ValueError, match=f"cannot be dealt to {dp} ranks"):
            dealt(batch, dp, count, whole)
        return
    shares = dealt(batch, dp, count, whole)
    assert len(shares) == dp
    assert all(shares)
    everything = [(piece.group, row) for share in shares for piece in share for row in piece.rows]
    assert sorted(everything) == [
        (n, row) for n, (shape, _) in enumerate(batch) for row in range(len(shape.responses))
    ]
    for share in shares:
        assert len({piece.group for piece in share}) == len(share), (
            "a group is one piece of a share"
        )
    if whole:
        assert all(
            len(piece.rows) == len(batch[piece.group][0].responses)
            for share in shares
            for piece in share
        )


@settings(max_examples=300, deadline=None)
@given(**layouts)
def test_the_ranks_share_each_mini_batch_evenly(
    batch: Batch, dp: int, count: int, whole: bool
) -> None:
    """As many ranks as can be have a row of it, and none has more than its fair share and the
    largest unit, a row or a whole group, with its own prompt."""
    if not possible(batch, dp, whole):
        return
    shares = dealt(batch, dp, count, whole)
    for rows in by_hand(batch, count, whole):
        owners = [
            [(p.group, row) for p in share for row in p.rows if (p.group, row) in rows]
            for share in shares
        ]
        units: dict[tuple[int, ...], list[int]] = {}
        for group, row in rows:
            units.setdefault((group,) if whole else (group, row), []).append(row)
        sizes = [batch[unit[0]][0].tokens(members) for unit, members in units.items()]
        tokens = [
            sum(
                batch[group][0].tokens([row for of, row in own if of == group])
                for group in {of for of, _ in own}
            )
            for own in owners
        ]
        assert max(tokens) <= sum(sizes) / dp + max(sizes)
        assert sum(map(bool, owners)) == min(dp, len(units))


def test_the_lengths_that_ended_runs() -> None:
    """Two long rows in the first mini-batch and short ones in the second: by tokens of the whole
    batch one rank got three groups, and the other, with one, could not cut it into two."""
    shapes = [
        GroupShape(4, (300,)),
        GroupShape(4, (40,)),
        GroupShape(4, (60,)),
        GroupShape(4, (20,)),
    ]
    shares = deal(shapes, 2, mini_batches=2)
    for step in ({0, 1}, {2, 3}):
        assert [len({piece.group for piece in share} & step) for share in shares] == [1, 1]


def test_few_rows_make_fewer_steps_and_masked_ones_none() -> None:
    assert cut_mini_batches({5: {0: 3}, 9: {0: 0, 1: 2}}, 4) == [{5: (0,)}, {9: (1,)}]
    assert cut_mini_batches({5: {0: 3, 1: 0}, 9: {0: 0, 1: 0}}, 4, whole=True) == [{5: (0, 1)}]
    assert cut_mini_batches({5: {0: 0}, 9: {0: 0, 1: 0}}, 2) == []
    assert deal(
        [GroupShape(2, (9, 9)), GroupShape(2, (5,))], 3, mini_batches=3, trained=[(9, 0), (0,)]
    ) == [
        [Piece(0, (0,))],
        [Piece(0, (1,))],
        [Piece(1, (0,))],
    ]
