"""The benchmark of the index runs its flow to the end: each sample once, at any number of
clients."""

from __future__ import annotations

from pathlib import Path

from benchmarks.flow.index import cell, counts


def test_shares_of_the_clients() -> None:
    for clients in (4, 10, 100, 1000):
        assert sum(counts(clients).values()) == clients


async def test_a_cell(tmp_path: Path) -> None:
    found = await cell(8, 40.0, 1.0, tmp_path / "i")
    assert found["samples"] >= 8
    assert 0 < found["calls_per_sample"] < 20
    assert found["cpu_us_per_sample"] > 0
    assert set(found["unit_cpu_us"]) == {"warehouse heartbeat", "host heartbeat", "event", "status"}
