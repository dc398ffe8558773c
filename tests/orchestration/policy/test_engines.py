"""The engines of a served policy: which version a request gets, how many engines there are, and how
much they compute."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import torch

from orchestration.policy.engines import PolicyEngines, keep_share
from stages.engines.mock.engines import MockRolloutEngine
from stages.engines.mock.options import MockRolloutOptions
from stages.engines.protocols import WeightMismatch

WEIGHTS = {"w": torch.zeros(1)}


class Time:
    """A clock that goes on while somebody sleeps, and only then."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        await RUN_OTHERS(0)


RUN_OTHERS = asyncio.sleep
TO_PAUSE = 0.03  # seconds until what an engine has begun is computed


class Counted(MockRolloutEngine):
    """An engine that adds up for how long it could compute."""

    def __init__(self, version: int) -> None:
        super().__init__(MockRolloutOptions(copy_seconds=0, swap_seconds=0), version=version)
        self.time = Time()
        self.computed = 0.0
        self.closed = False
        self._since = self.time.now
        self._pausing = asyncio.Event()

    async def pause(self) -> None:
        self.time.now += TO_PAUSE
        await super().pause()
        self.computed += self.time.now - self._since
        self._pausing.set()

    async def resume(self) -> None:
        await super().resume()
        self._since = self.time.now

    async def paused(self, times: int) -> None:
        for _ in range(times):
            self._pausing.clear()
            await self._pausing.wait()

    async def close(self) -> None:
        await super().close()
        self.closed = True


@pytest.fixture
async def made() -> AsyncIterator[tuple[PolicyEngines, list[Counted]]]:
    made: list[Counted] = []

    def make(version: int, checkpoint: Path | None) -> Counted:
        made.append(Counted(version))
        return made[-1]

    engines = PolicyEngines(make)
    await engines.open(0, None)
    yield engines, made
    await engines.close()
    assert all(engine.closed for engine in made)


async def test_a_request_keeps_its_version_and_the_next_one_gets_the_newest(
    made: tuple[PolicyEngines, list[Counted]],
) -> None:
    engines, all_of_them = made
    await engines.swap(1, WEIGHTS)
    assert len(all_of_them) == 1, "without requests, one engine is enough"
    async with AsyncExitStack() as old, AsyncExitStack() as new:
        first = await old.enter_async_context(engines.engine(mixed=False))
        await engines.swap(2, WEIGHTS)
        second = await new.enter_async_context(engines.engine(mixed=False))
        assert (first.version, second.version, len(all_of_them)) == (1, 2, 2)
        swap = asyncio.create_task(engines.swap(3, WEIGHTS))
        await asyncio.wait([swap], timeout=0.05)
        assert (first.version, second.version, swap.done()) == (1, 2, False)
        await old.aclose()
        await swap
        async with engines.engine(mixed=False) as third:
            assert (third.version, third is first, second.version) == (3, True, 2)
    assert len(all_of_them) == 2


async def test_a_request_that_mixes_versions_is_swapped(
    made: tuple[PolicyEngines, list[Counted]],
) -> None:
    engines, all_of_them = made
    async with engines.engine(mixed=True) as engine:
        await engines.swap(1, WEIGHTS)
        assert (engine.version, len(all_of_them)) == (1, 1)
        async with engines.engine(mixed=False):
            await engines.swap(2, WEIGHTS)
        await engines.swap(3, WEIGHTS)
        assert (engine.version, len(all_of_them)) == (3, 2), "not one that is idle"


async def test_weights_that_do_not_fit_leave_the_old_ones(
    made: tuple[PolicyEngines, list[Counted]],
) -> None:
    engines, _ = made
    await engines.swap(1, WEIGHTS)
    with pytest.raises(WeightMismatch):
        await engines.swap(2, {"other": torch.zeros(1)})
    async with engines.engine(mixed=False) as engine:
        assert engine.version == 1


async def test_a_checkpoint_is_a_new_engine(made: tuple[PolicyEngines, list[Counted]]) -> None:
    engines, all_of_them = made
    async with engines.engine(mixed=False) as under_way:
        await engines.open(5, None)
        async with engines.engine(mixed=False) as engine:
            assert (engine.version, under_way.version) == (5, 0)
    await engines.open(6, None)
    assert [one.closed for one in all_of_them] == [True, False, False]
    assert engines.version == 6


@pytest.mark.parametrize("share", [0.2, 0.5])
async def test_engines_compute_for_their_share_of_the_time(
    share: float, made: tuple[PolicyEngines, list[Counted]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while an engine takes its time to pause, in which it computes."""
    engines, (engine,) = made
    monkeypatch.setattr("orchestration.policy.engines.time", engine.time)
    monkeypatch.setattr("orchestration.policy.engines.asyncio.sleep", engine.time.sleep)
    busy = asyncio.Event()
    busy.set()
    keeping = asyncio.create_task(keep_share(busy, engines.all, lambda: share))
    try:
        async with engines.engine(mixed=False):
            await engine.paused(1)
            began = engine.time.now
            computed = engine.computed
            await engine.paused(5)
            used = (engine.computed - computed) / (engine.time.now - began)
        assert used == pytest.approx(share)
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
