"""Changes from one version to the next: exact for any bytes, short where little differs, refused
where they fit nothing."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stages.weights.transport.changes import MOST_CHANGED, apply_changes, changes


def both(old: bytes, new: bytes) -> tuple[np.ndarray, np.ndarray]:
    return np.frombuffer(old, np.uint8), np.frombuffer(new, np.uint8)


@given(st.binary(max_size=600), st.data())
def test_any_bytes_come_back(old: bytes, data: st.DataObject) -> None:
    new = bytearray(old)
    for at in data.draw(st.lists(st.integers(0, max(0, len(old) - 1)), max_size=len(old))):
        new[at] = data.draw(st.integers(0, 255))
    before, after = both(old, bytes(new))
    packed = changes(after, before)
    differ = sum(old[at : at + 2] != new[at : at + 2] for at in range(0, len(old), 2))
    assert (packed is None) == (len(old) % 2 == 1 or differ * MOST_CHANGED > len(old) // 2)
    if packed is not None:
        memory = np.full(len(old), 7, np.uint8)
        apply_changes(memory, before, packed)
        assert memory.tobytes() == bytes(new)


def test_bytes_at_odd_places_and_distances_beyond_two_bytes_come_back() -> None:
    old = np.random.default_rng(0).integers(0, 255, 2**20 + 1, np.uint8)
    new = old.copy()
    new[[1, 2, 900_000, 2**20]] += 100
    memory = np.zeros_like(old)
    packed = changes(new[1:], old[1:])
    assert packed is not None
    apply_changes(memory[1:], old[1:], packed)
    assert np.array_equal(memory[1:], new[1:])


@pytest.mark.parametrize(("rate", "share"), [(1e-6, 0.015), (1e-5, 0.05)])
def test_a_step_in_bfloat16_takes_less_than_two_bytes_a_change(rate: float, share: float) -> None:
    """Numbers that a step moves by the learning rate."""
    random = torch.Generator().manual_seed(0)
    master = torch.randn(2**18, generator=random) * 0.1
    old = master.bfloat16()
    new = (master + rate * torch.randn(2**18, generator=random).sign()).bfloat16()
    before, after = (one.view(torch.uint8).numpy() for one in (old, new))
    packed = changes(after, before)
    memory = np.empty(2**19, np.uint8)
    assert packed is not None
    assert 0 < len(packed) < share * len(after)
    assert len(packed) < 2 * int((old != new).sum())
    apply_changes(memory, before, packed)
    assert np.array_equal(memory, after)


@pytest.mark.parametrize(
    "packed",
    [
        b"nothing",
        zlib.compress(b"\0" * 7),
        zlib.compress(b"\xff" * 6),
        zlib.compress(b"\0" * 10**7),
    ],
    ids=["no zlib", "no changes", "beyond the end", "more than fits"],
)
def test_what_is_no_changes_of_these_bytes_is_refused(packed: bytes) -> None:
    with pytest.raises(ValueError, match=r"changes of weights|reshape|broadcast"):
        apply_changes(np.zeros(64, np.uint8), np.zeros(64, np.uint8), packed)
