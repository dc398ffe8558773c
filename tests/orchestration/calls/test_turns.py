"""Turns between owners, counted in turns, and places for models."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from orchestration.calls.engines.turns import Places, Turns


async def take_turns(turns: Turns, owner: str, model: str, count: int, taken: list[str]) -> None:
    for _ in range(count):
        async with turns.turn(owner, model):
            taken.append(owner)
            await asyncio.sleep(0)


@given(flood=st.integers(1, 6), others=st.integers(1, 3))
def test_a_flood_of_an_owner_delays_another_ones_next_turn_by_one(flood: int, others: int) -> None:
    async def scenario() -> list[str]:
        turns = Turns(1)
        taken = list[str]()
        async with asyncio.TaskGroup() as tasks:
            for model in range(flood):
                tasks.create_task(take_turns(turns, "flood", f"model-{model}", 30, taken))
            for number in range(others):
                tasks.create_task(take_turns(turns, f"owner-{number}", "model", 10, taken))
        return taken

    taken = asyncio.run(scenario())
    mine = [place for place, owner in enumerate(taken) if owner == "owner-0"]
    between = [later - earlier - 1 for earlier, later in itertools.pairwise(mine)]
    assert max(between) <= others  # one of each other owner


async def test_a_cancelled_wait_takes_no_turn() -> None:
    turns = Turns(1)
    taken = list[str]()
    async with turns.turn("a", "m"):
        waiting = [asyncio.create_task(take_turns(turns, "b", str(n), 1, taken)) for n in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
    waiting[1].cancel()  # it may have the turn already
    await asyncio.gather(*waiting, return_exceptions=True)
    await take_turns(turns, "c", "m", 1, taken)
    assert taken[-2:] == ["b", "c"]


@dataclass(eq=False)
class Guest:
    left: list[str]
    name: str = ""
    events: list[str] = field(default_factory=list)

    async def leave(self) -> None:
        self.left.append(self.name)
        await asyncio.sleep(0)


async def test_the_model_that_was_used_the_longest_time_ago_leaves() -> None:
    left = list[str]()
    places = Places(2, 100)
    guests = {name: Guest(left, name) for name in "abcd"}
    await places.take(guests["a"], 10)
    await places.take(guests["b"], 10)
    await places.take(guests["a"], 10)  # used again
    await places.take(guests["c"], 10)
    assert left == ["b"]
    await places.take(guests["d"], 95)  # there is no room beside it
    assert left == ["b", "a", "c"]


async def test_models_that_wait_for_each_others_places_all_get_one() -> None:
    left = list[str]()
    places = Places(1, 100)
    guests = [Guest(left, str(number)) for number in range(5)]
    async with asyncio.timeout(10):
        await asyncio.gather(*(places.take(guest, 60) for guest in guests for _ in range(3)))
