"""The comparison of starts: one arm of it."""

from __future__ import annotations

import pkgutil

from benchmarks.runs import first_step
from benchmarks.runs.starts import measure
from tests.orchestration.runs import forks


async def test_a_start_and_a_recovery_are_timed() -> None:
    found = await measure("forkserver", 1, forks())
    assert found.keys() == {"start", "recovery", "private"}
    assert all(value > 0 for value in found.values())


def test_what_is_timed_is_where_the_table_says() -> None:
    """A name that is not there ends the fork server, and nothing of its children is timed."""
    for module, names in first_step.PHASES.items():
        for name in names:
            assert callable(pkgutil.resolve_name(f"{module}:{name}"))


def test_each_process_is_in_the_timeline_to_the_first_step() -> None:
    phases, seconds = first_step.measure("mock", [])
    processes = {phase["process"] for phase in phases}
    assert {
        "the command",
        "fork server",
        "worker flow-0",
        "worker rollout-0",
        "worker update-0",
    } <= processes
    assert all(0 <= phase["start"] < seconds for phase in phases)
    assert "running" in {phase["phase"] for phase in phases if phase["process"] == "event"}
