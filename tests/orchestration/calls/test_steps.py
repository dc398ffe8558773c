"""The steps of a model: what each was made of, for good, and in bounded room."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgpack

from orchestration.calls.steps import WHOLE, Steps
from tests.orchestration.calls.services import Client, datum, prompt, small_service


async def test_a_step_has_what_was_trained_and_sampled_since_the_one_before(
    tmp_path: Path,
) -> None:
    async with small_service(tmp_path) as service:
        client = await Client.create(service)
        sampler = (await client.done(await client.snapshot(0)))["sampling_session_id"]
        asked = await service.sample("ann", sampler, 0, prompt(max_tokens=4))
        await client.done(asked)
        passes = [await client.train(datum(1, 2), datum(3)), await client.train(datum(4))]
        losses = [(await client.done(each)).metrics["loss:sum"] for each in passes]
        norm = (await client.done(await client.step()))["metrics"]["grad_norm"]
        stale = datum(5, 6, sampled=((asked.sequence_ids[0], 0, 2),))
        await client.sampled(sampler, 1)  # by weights of a step before
        await client.train(stale)
        await client.done(await client.step())
        first, second = await service.steps("ann", client.model_id, 0)
        expected: dict[str, Any] = {
            "number": 1,
            "step": 1,
            "data": 3,
            "tokens": 4,
            "loss": sum(losses),
            "grad_norm": norm,
            "staleness_mean": None,
            "sampled_sequences": 1,
            "sampled_tokens": 4,
            "sampled_newest": 4,
            "waiting": 0,
            "waiting_samples": 0,
        }
        assert {name: first[name] for name in expected} == expected
        assert second["time"] >= first["time"]
        expected = {
            "number": 2,
            "step": 2,
            "data": 1,
            "staleness_mean": 1.0,
            "staleness_max": 1,
            "sampled_tokens": 8,
            "sampled_newest": 0,
        }
        assert {name: second[name] for name in expected} == expected
        assert await service.steps("ann", client.model_id, 1) == [second]
        model = await service.model("ann", client.model_id)
        assert (model.steps, model.waiting) == (2, 0)


async def test_data_whose_gradients_were_dropped_are_in_no_step(tmp_path: Path) -> None:
    async with small_service(tmp_path, gap_seconds=0.1) as service:
        client = await Client.create(service)
        await client.train(datum(1))
        await client.train(datum(2), seq=3)  # the second call never comes
        await client.failure(await client.step(seq=4))
        await client.done(await client.train(datum(7)))
        await client.done(await client.step())
        (step,) = await service.steps("ann", client.model_id, 0)
        assert (step["number"], step["step"], step["data"]) == (1, 1, 1)


async def test_the_next_server_has_the_steps_and_when_a_model_was_called_last(
    tmp_path: Path,
) -> None:
    async with small_service(tmp_path, state_steps=2) as service:
        client = await Client.create(service)
        for _ in range(5):
            await client.train(datum(1))
            await client.done(await client.step())
        await client.done(await client.train(datum(1)))
        steps = await service.steps("ann", client.model_id, 0)
        assert len(steps) == 5
    async with small_service(tmp_path, state_steps=2) as service:
        assert await service.steps("ann", client.model_id, 0) == steps
        model = await service.model("ann", client.model_id)
        assert steps[-1]["time"] <= model.last_request <= steps[-1]["time"] + 60
        client.service = service
        await client.done(await client.step())
        newest = (await service.steps("ann", client.model_id, 5))[0]
        assert (newest["number"], newest["data"]) == (6, 1), "the pass of before is in it"


def test_the_newest_steps_are_whole_and_the_room_is_bounded() -> None:
    steps = Steps()
    for number in range(1, 10 * WHOLE + 1):
        steps.count({"kind": "optim_step"}, {"time": float(number), "step": number})
        if number % 97 == 0:  # as a state has them
            steps = Steps(msgpack.unpackb(msgpack.packb(steps.packed())))
            assert len(steps.after(0)) < 2 * WHOLE
    numbers = [step["number"] for step in steps.after(0)]
    assert numbers[-WHOLE:] == list(range(9 * WHOLE + 1, 10 * WHOLE + 1))
    assert numbers[0] == 1
    assert numbers == sorted(set(numbers))
    assert WHOLE < len(numbers) < 2 * WHOLE
