"""What a timeline relies on from spans: the longest are kept, nothing is counted twice, and a
failure is a span too."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.worker.spans import Spans


@given(lengths=st.lists(st.floats(0, 100, allow_nan=False), max_size=60), most=st.integers(1, 12))
def test_the_longest_are_kept_in_order_of_their_starts(lengths: list[float], most: int) -> None:
    spans = Spans(most)
    for start, seconds in enumerate(lengths):
        spans.add("reward", float(start), seconds, rows=start)
    taken, left_out = spans.take()
    assert len(taken) == min(most, len(lengths))
    assert len(taken) + left_out == len(lengths)
    assert sorted((round(s, 6) for s in lengths), reverse=True)[:most] == sorted(
        (span.seconds for span in taken), reverse=True
    )
    assert [span.start for span in taken] == sorted(span.start for span in taken)
    assert spans.take() == ([], 0)


def test_what_fails_is_taken_as_long_as_it_took() -> None:
    spans = Spans()
    began = time.time()
    with pytest.raises(ZeroDivisionError), spans.during("train", rows=8, version=3):
        raise ZeroDivisionError
    (span,), _ = spans.take()
    assert (span.name, span.rows, span.version) == ("train", 8, 3)
    assert began <= span.start <= time.time()
    assert 0 <= span.seconds < 5
