"""Seconds of reward functions are those inside them: what their calls wait for stands apart."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from orchestration.rewards.pool import RewardPool
from stages.rewards import stage
from stages.rewards.calls import CallCounts
from stages.rewards.stage import ErrorPolicy, RewardSet
from tests.orchestration.rewards.timed import SECONDS

TIMED = "tests.orchestration.rewards.timed"
SLACK = 0.1  # seconds by which a sleep of this machine may be longer, each
TIMEOUT = 1.0
PLACES = pytest.mark.parametrize("processes", [1, 0], ids=["processes", "here"])


@asynccontextmanager
async def rewards_of(
    *names: str, processes: int, tmp_path: Path, batched: bool = False, **policy: float
) -> AsyncGenerator[RewardSet, None]:
    """The functions ``names`` in a pool, or, without ``processes``, in this process."""
    full = [f"{TIMED}:{name}" for name in names]
    log = tmp_path / "rewards.log"
    pool = RewardPool(full, processes=processes, memory=0, log=log) if processes else None
    rewards = RewardSet(
        [(name, 1.0) for name in full],
        policy=ErrorPolicy(**{"retries": 0, "max_error_share": 1.0, **policy}),  # type: ignore[arg-type]
        pool=pool,
        batched=full if batched else (),
    )
    try:
        yield rewards
    finally:
        await rewards.close()


async def counted(rewards: RewardSet, rows: int) -> dict[str, CallCounts]:
    """What the calls for ``rows`` responses came to, by the names of the functions."""
    texts = [f"r{row}" for row in range(rows)]
    await rewards.score(["q"] * rows, texts, [[1]] * rows, [{}] * rows)
    return {name.partition(":")[2]: counts for name, counts in rewards.counts.items()}


@PLACES
async def test_a_quick_function_is_quick_though_it_waits_for_a_slow_one(
    processes: int, tmp_path: Path
) -> None:
    async with rewards_of("slow", "quick", processes=processes, tmp_path=tmp_path) as rewards:
        await rewards.open()
        began = time.monotonic()
        for _ in range(3):
            counts = await counted(rewards, 4)
        wall = time.monotonic() - began
    assert (counts["slow"].calls, counts["quick"].calls) == (3, 3)
    assert (counts["slow"].responses, counts["slow"].lost) == (12, 0)
    assert counts["slow"].seconds == pytest.approx(3 * SECONDS, abs=3 * SLACK)
    assert 0 < counts["quick"].seconds < 0.02
    for each in counts.values():
        assert 0 <= each.waited <= wall - each.seconds + 0.01
    if processes:  # the one process is held by the slow one
        assert counts["quick"].waited == pytest.approx(3 * SECONDS, abs=3 * SLACK)


@PLACES
@pytest.mark.parametrize(
    ("name", "rows", "seconds", "lost"),
    [
        ("lazy", 2, 2 * SECONDS, 0),
        ("deferring", 2, SECONDS, 0),
        ("raising", 1, SECONDS, 1),
        ("hanging", 1, TIMEOUT, 1),
        ("never", 1, TIMEOUT, 1),
    ],
)
async def test_seconds_of_what_returns_late_or_never(
    name: str,
    rows: int,
    seconds: float,
    lost: int,
    processes: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if name == "hanging" and not processes:
        pytest.skip("it keeps its thread for a minute")
    monkeypatch.setattr(stage, "BACKOFF_SECONDS", 0.0)
    options = {"processes": processes, "tmp_path": tmp_path, "timeout": TIMEOUT}
    async with rewards_of(name, **options) as rewards:  # type: ignore[arg-type]
        counts = await counted(rewards, rows)
    assert (counts[name].calls, counts[name].responses, counts[name].lost) == (1, rows, lost)
    assert counts[name].seconds == pytest.approx(seconds, abs=rows * SLACK)


@PLACES
@pytest.mark.parametrize("batched", [False, True], ids=["by row", "batch"])
async def test_an_async_call_does_not_have_the_wait_for_its_turn(
    batched: bool, processes: int, tmp_path: Path
) -> None:
    calls = 1 if batched else 4
    options = {"processes": processes, "tmp_path": tmp_path, "batched": batched, "concurrency": 1}
    async with rewards_of("asking", **options) as rewards:  # type: ignore[arg-type]
        counts = await counted(rewards, 4)
    assert counts["asking"].calls == calls
    assert counts["asking"].seconds == pytest.approx(calls * SECONDS, abs=calls * SLACK)
    turns = sum(range(calls)) * SECONDS  # the second call waits for one, the third for two …
    assert counts["asking"].waited >= turns


async def test_retries_are_calls_and_no_responses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "BACKOFF_SECONDS", 0.0)
    options = {"processes": 1, "tmp_path": tmp_path, "retries": 2}
    async with rewards_of("raising", **options) as rewards:  # type: ignore[arg-type]
        counts = (await counted(rewards, 2))["raising"]
    assert (counts.responses, counts.lost) == (2, 2)
    # both rows at once, then each three times
    assert (counts.calls, counts.failed, counts.again) == (7, 7, 6)
    assert counts.seconds == pytest.approx(7 * SECONDS, abs=7 * SLACK)
