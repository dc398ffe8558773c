"""What callers of ``first_of`` rely on."""

from __future__ import annotations

import asyncio

import pytest

from pipeline.first_of import first_of


async def test_results_stand_in_the_order_given_and_the_others_are_cancelled() -> None:
    cancelled = []

    async def waits_for_ever(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(name)

    assert await first_of(waits_for_ever("a"), asyncio.sleep(0, "done"), waits_for_ever("c")) == [
        None,
        "done",
        None,
    ]
    assert cancelled == ["a", "c"]


async def test_a_timeout_gives_no_results() -> None:
    assert await first_of(asyncio.sleep(60), timeout=0.01) == [None]


async def test_an_error_is_raised_after_the_others_have_ended() -> None:
    ended = asyncio.Event()

    async def cleans_up() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            ended.set()

    async def fails() -> None:
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        await first_of(cleans_up(), fails())
    assert ended.is_set()


async def test_cancelling_the_caller_cancels_all() -> None:
    started = asyncio.Event()
    ended = []

    async def waits() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    caller = asyncio.create_task(first_of(waits(), waits()))
    await started.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert ended == [True, True]
