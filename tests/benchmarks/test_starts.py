"""The comparison of starts: one arm of it."""

from __future__ import annotations

from benchmarks.starts import measure
from tests.orchestration.runs import forks


async def test_a_start_and_a_recovery_are_timed() -> None:
    found = await measure("forkserver", 1, forks())
    assert found.keys() == {"start", "recovery", "private"}
    assert all(value > 0 for value in found.values())
