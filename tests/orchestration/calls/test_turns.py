"""Turns between owners by the seconds that they use, on a clock of the test; places for models."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from orchestration.calls.engines.turns import (
    CREDIT_SECONDS,
    GRACE_SECONDS,
    EngineTime,
    Lane,
    Places,
)


class Simulation:
    """An engine on a clock that calls move, and :meth:`ended` where all wait for time alone.
    ``order``: owners of the turns of training."""

    def __init__(self, slots: int = 4) -> None:
        self.now = 0.0
        self.order = list[str]()
        self.time = EngineTime(slots, lambda: self.now)

    def passes(self, seconds: float) -> None:
        self.now += seconds
        self.time.review()

    async def train(self, owner: str, *seconds: float, model: str = "m") -> None:
        """Make calls one after the other, of so many seconds."""
        for each in seconds:
            async with self.time.training.turn(owner, model):
                self.order.append(owner)
                await asyncio.sleep(0)
                self.passes(each)

    async def sample(self, owner: str, until: asyncio.Event, size: int = 1) -> None:
        async with self.time.sampling.turn(owner, "m", size):
            await until.wait()

    async def turns(self, count: int) -> None:
        """Wait until so many turns have begun."""
        async with asyncio.timeout(30):
            for _ in range(10**6):
                if len(self.order) >= count:
                    return
                await asyncio.sleep(0)

    async def ended(self, *tasks: asyncio.Task[None]) -> None:
        async with asyncio.timeout(30):
            for _ in range(10**6):
                if all(task.done() for task in tasks):
                    break
                await settled()
                seconds = self.time.seconds_to_review
                if seconds is not None and not self.time.training.holding:
                    self.passes(seconds)
        await asyncio.gather(*tasks)


async def settled() -> None:
    """Let all tasks come to where they wait."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_step_goes_on_until_its_owner_has_used_as_much_as_a_flood() -> None:
    simulation = Simulation()
    flood = [
        asyncio.create_task(simulation.train("flood", *[2.0] * 6, model=f"m{number}"))
        for number in range(3)
    ]
    await simulation.turns(3)
    assert simulation.now == 4.0  # the third one is under way
    pass_and_step = [
        asyncio.create_task(simulation.train("ann", 5.0, 0.5)),
        asyncio.create_task(simulation.train("ann", 0.25)),
    ]
    await simulation.ended(*pass_and_step, *flood)
    # ann comes during the fourth turn with 5 seconds less than the flood, which uses 2 more in it
    assert simulation.order == ["flood"] * 4 + ["ann"] * 3 + ["flood"] * 14


@given(
    calls=st.lists(st.lists(st.floats(0.01, 3.0), min_size=3, max_size=9), min_size=2, max_size=5)
)
def test_owners_who_always_want_something_have_used_the_same_but_for_one_call(
    calls: list[list[float]],
) -> None:
    async def scenario() -> None:
        simulation = Simulation()
        used = dict.fromkeys(map(str, range(len(calls))), 0.0)
        waiting = {owner: 2 * len(lengths) for owner, lengths in zip(used, calls, strict=True)}
        longest = max(map(max, calls)) + 1e-6

        async def model(owner: str, name: str, lengths: list[float]) -> None:
            for seconds in lengths:
                async with simulation.time.training.turn(owner, name):
                    await asyncio.sleep(0)
                    simulation.passes(seconds)
                    used[owner] += seconds
                    waiting[owner] -= 1
                    if min(waiting.values()) > 1:
                        assert max(used.values()) - min(used.values()) <= longest

        await simulation.ended(
            *(
                asyncio.create_task(model(owner, name, lengths))
                for owner, lengths in zip(used, calls, strict=True)
                for name in "ab"
            )
        )

    asyncio.run(scenario())


async def test_an_owner_with_many_models_has_one_share_in_which_they_take_turns() -> None:
    simulation = Simulation()
    models = list[str]()

    async def calls(model: str) -> None:
        for _ in range(4):
            async with simulation.time.training.turn("many", model):
                simulation.order.append("many")
                models.append(model)
                await asyncio.sleep(0)
                simulation.passes(1.0)

    tasks = [asyncio.create_task(calls(f"m{number}")) for number in range(5)]
    tasks += [asyncio.create_task(simulation.train("one", *[0.5] * 5, model=n)) for n in "ab"]
    await simulation.ended(*tasks)
    share = Counter(simulation.order[:15])
    assert share == {"many": 5, "one": 10}  # five seconds each
    assert models[:10] == [f"m{number}" for number in range(5)] * 2


async def test_idle_time_is_not_saved_up() -> None:
    simulation = Simulation()
    busy = asyncio.create_task(simulation.train("busy", *[1.0] * 100))
    await simulation.turns(50)
    simulation.order.clear()
    back = asyncio.create_task(simulation.train("back", *[1.0] * 20))
    await simulation.ended(back)
    firsts = simulation.order.index("busy", 2)
    assert simulation.order[:firsts].count("back") <= CREDIT_SECONDS + 1
    assert Counter(simulation.order)["busy"] >= 20 - CREDIT_SECONDS - 2
    busy.cancel()
    await asyncio.gather(busy, return_exceptions=True)


async def test_sampling_stops_while_an_owner_that_has_used_less_trains() -> None:
    simulation = Simulation()
    sampling = simulation.time.sampling
    end = asyncio.Event()
    samples = asyncio.create_task(simulation.sample("flood", end))
    await settled()
    simulation.passes(7.0)
    before = simulation.time.used("flood")
    async with simulation.time.training.turn("ann", "m"):
        assert sampling.is_stopped  # ann has used 5 seconds less
        simulation.passes(4.5)
        assert sampling.is_stopped
        assert simulation.time.used("flood") == before
        simulation.passes(0.75)
        assert not sampling.is_stopped  # as long as ann has used more, both go on
        simulation.passes(2.0)
        assert simulation.time.used("flood") == before + 1.0
        assert simulation.time.used("ann") == before + 1.25
    end.set()
    await samples


async def test_training_waits_while_an_owner_that_has_used_less_samples() -> None:
    simulation = Simulation()
    flood = asyncio.create_task(simulation.train("flood", *[3.0] * 4))
    await simulation.turns(2)
    end = asyncio.Event()
    samples = asyncio.create_task(simulation.sample("ann", end))
    await settled()
    assert simulation.order == ["flood"] * 3  # of four
    # ann came with 5 seconds less, and both had a half of the third turn
    simulation.passes(4.75)
    await settled()
    assert simulation.order == ["flood"] * 3
    simulation.passes(0.5)
    await settled()
    assert simulation.order == ["flood"] * 4
    end.set()
    await simulation.ended(flood, samples)


async def test_the_next_turn_waits_for_a_call_on_its_way_no_longer_than_it_takes() -> None:
    simulation = Simulation()
    training = simulation.time.training
    flood = asyncio.create_task(simulation.train("flood", *[0.1] * 9))
    await simulation.turns(5)
    await simulation.train("ann", 0.01)
    await settled()
    count = len(simulation.order)
    assert not training.holding
    simulation.passes(0.05)
    await settled()
    assert not training.holding  # ann has used less, and her next call may come
    await simulation.train("ann", 0.01)
    assert simulation.order[count:] == ["ann"]
    await settled()
    simulation.passes(0.11)
    await settled()
    assert len(simulation.order) == 9 + 2  # it has not come within 0.1 s
    await flood
    assert GRACE_SECONDS > 0.1


async def test_a_flood_of_samples_leaves_slots_for_another_owner() -> None:
    simulation = Simulation(slots=8)
    holding = simulation.time.sampling.holding
    end = asyncio.Event()
    tasks = [asyncio.create_task(simulation.sample("flood", end)) for _ in range(20)]
    await settled()
    assert holding == {"flood": 8}  # it is alone
    end.set()
    await asyncio.gather(*tasks)
    end.clear()
    tasks = [asyncio.create_task(simulation.sample("ann", end))]
    tasks += [asyncio.create_task(simulation.sample("flood", end)) for _ in range(20)]
    await settled()
    assert holding == {"ann": 1, "flood": 6}
    tasks.append(asyncio.create_task(simulation.sample("ann", end, size=100)))
    await settled()
    assert holding == {"ann": 1, "flood": 6}  # a large request counts as a quarter of all slots
    end.set()
    await asyncio.gather(*tasks)
    assert not simulation.time.sampling.owners


async def test_a_cancelled_wait_takes_no_turn() -> None:
    simulation = Simulation()
    training: Lane = simulation.time.training
    async with training.turn("a", "m"):
        waiting = [
            asyncio.create_task(simulation.train("b", 1.0, model=str(number)))
            for number in range(3)
        ]
        await asyncio.sleep(0)
        waiting[0].cancel()
    waiting[1].cancel()  # it may have the turn already
    await asyncio.gather(*waiting, return_exceptions=True)
    await simulation.train("c", 1.0)
    assert simulation.order == ["b", "c"]
    assert not training.owners


@dataclass(eq=False)
class Guest:
    left: list[str]
    name: str = ""
    owner: str = "ann"
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


async def test_many_models_of_an_owner_make_room_for_each_other_alone() -> None:
    left = list[str]()
    places = Places(3, 100)
    await places.take(Guest(left, "ann's", "ann"), 10)
    for number in range(9):
        await places.take(Guest(left, f"bob's {number}", "bob"), 10)
    assert left == [f"bob's {number}" for number in range(7)]
    await places.take(Guest(left, "cid's", "cid"), 10)
    assert left[7:] == ["bob's 7"]


async def test_models_that_wait_for_each_others_places_all_get_one() -> None:
    left = list[str]()
    places = Places(1, 100)
    guests = [Guest(left, str(number)) for number in range(5)]
    async with asyncio.timeout(10):
        await asyncio.gather(*(places.take(guest, 60) for guest in guests for _ in range(3)))
