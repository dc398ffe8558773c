"""Curves of any length take the same memory, and every key counts once."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Self

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.telemetry.thinned import FIRST, LAST, MOST, Thinned


@dataclass(frozen=True)
class Counted:
    first: int
    last: int
    count: int = 1

    def plus(self, later: Self) -> Self:
        return replace(self, last=later.last, count=self.count + later.count)

    def before(self, key: int) -> Self:
        return replace(
            self,
            last=key - 1,
            count=round(self.count * (key - self.first) / (self.last + 1 - self.first)),
        )


def curve(keys: range) -> Thinned[Counted]:
    thinned = Thinned[Counted]()
    for key in keys:
        thinned.add(Counted(key, key))
    return thinned


def counted(thinned: Thinned[Counted]) -> int:
    return sum(point.count for point in thinned.points)


@pytest.mark.parametrize("length", [0, 1, MOST, MOST + 1, 3 * MOST, 100_000])
def test_a_curve_of_any_length_has_a_bounded_number_of_points(length: int) -> None:
    thinned = curve(range(length))
    assert len(thinned.points) <= MOST
    assert counted(thinned) == length
    assert all(a.last < b.first for a, b in zip(thinned.points, thinned.points[1:], strict=False))
    assert {point.count for point in [*thinned.points[:FIRST], *thinned.points[-LAST:]]} <= {1}
    even = thinned.even()
    assert sum(point.count for point in even) == length
    assert {point.count for point in even[:-1]} <= {thinned.width}
    assert thinned.width == 1 or MOST / 4 < len(even) <= MOST


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), gap=st.integers(1, 20))
def test_keys_that_come_again_or_late_or_after_a_gap_count_once(seed: int, gap: int) -> None:
    """All within the last keys, which no merge has reached."""
    choose = random.Random(seed)
    thinned = Thinned[Counted]()
    known = set[int]()
    key = 0
    for _ in range(3000):
        match choose.randrange(20):
            case 0:
                back = choose.randrange(1, LAST)
                key = sorted(known)[-min(back, len(known)) :][0] if known else 0
                thinned.remove_from(key)
                known = {other for other in known if other < key}
            case 1:
                key = max(0, max(known, default=0) - choose.randrange(LAST // 2))
            case 2:
                key = max(known, default=0) + gap
            case _:
                key = max(known, default=-1) + 1
        thinned.add(Counted(key, key))
        known.add(key)
    assert counted(thinned) == len(known)
    assert len(thinned.points) <= MOST
    assert [p.first for p in thinned.points] == sorted(p.first for p in thinned.points)


def test_what_is_made_again_from_far_back_stands_once() -> None:
    thinned = curve(range(50_000))
    thinned.remove_from(12_345)
    assert counted(thinned) == 12_345
    for key in range(12_345, 20_000):
        thinned.add(Counted(key, key))
    assert counted(thinned) == 20_000
    assert len(thinned.points) <= MOST
    thinned.remove_from(0)
    assert thinned.points == []
