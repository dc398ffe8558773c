"""Silence is judged by what the judge has seen while it was awake."""

from __future__ import annotations

from typing import Any, cast

import pytest

from orchestration.launch import pulse
from orchestration.launch.pulse import BEAT_SECONDS, LOST_SECONDS, AwakeTime, Pulse
from pipeline.index.client import Index


class Time:
    def __init__(self) -> None:
        self.seconds = 1000.0

    def monotonic(self) -> float:
        return self.seconds


class Beats:
    """What of an index a pulse asks for: the last sign of life. An answer takes ``delay``."""

    def __init__(self) -> None:
        self.last: int | None = None
        self.delay = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    clock = Time()
    monkeypatch.setattr(pulse, "time", clock)
    return clock


@pytest.fixture
def beats(clock: Time, monkeypatch: pytest.MonkeyPatch) -> Beats:
    class Document:
        async def get(self, index: Any, *, host: str) -> int | None:
            clock.seconds += index.delay
            return cast("int | None", index.last)

    monkeypatch.setattr(pulse, "BEAT", Document())
    return Beats()


async def test_a_host_without_a_sign_of_life_is_silent_for_the_seconds_that_pass(
    clock: Time, beats: Beats
) -> None:
    seen = Pulse(cast("Index", beats))
    beats.last = 1
    assert await seen.silent("host") == 0
    for look in range(1, 8):
        clock.seconds += BEAT_SECONDS
        assert await seen.silent("host") == look * BEAT_SECONDS
    beats.last = 2
    assert await seen.silent("host") == 0


async def test_a_judge_that_was_stopped_leaves_time_for_the_next_sign(
    clock: Time, beats: Beats
) -> None:
    """After a stop of all processes, the judge may go on before the host does."""
    seen = Pulse(cast("Index", beats))
    beats.last = 1
    await seen.silent("host")
    clock.seconds += 3600
    assert await seen.silent("host") <= 2 * BEAT_SECONDS < LOST_SECONDS


async def test_an_index_that_does_not_answer_makes_nobody_silent(clock: Time, beats: Beats) -> None:
    seen = Pulse(cast("Index", beats))
    await seen.silent("host")
    beats.delay = BEAT_SECONDS + 0.1
    clock.seconds += LOST_SECONDS
    assert await seen.silent("host") == 0


def test_the_time_of_a_watcher_is_its_own(clock: Time) -> None:
    awake = AwakeTime(1.0)
    clock.seconds += 1.5
    assert awake.passed() == 1.5
    clock.seconds += 100
    assert awake.passed() == 2.0
    assert awake.passed() == 0.0
