"""Sizes are read as they are written, and nothing else is read as a size."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestration.units import format_size, parse_size


@settings(deadline=None)
@given(size=st.integers(1, 2**45))
def test_a_size_is_read_as_it_is_written(size: int) -> None:
    assert parse_size(str(size)) == size
    assert parse_size(f"{size} B") == size
    assert parse_size(f"{size}KiB") == 1024 * size
    shown = parse_size(format_size(size))
    assert isinstance(shown, int)
    assert abs(shown - size) <= size * 1e-3


@pytest.mark.parametrize("text", ["", "MiB", "-1MiB", "1 2", "1e3", "64 mebibytes", "0x10"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_size(text)
