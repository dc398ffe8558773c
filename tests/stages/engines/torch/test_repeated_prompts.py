"""Requests with the same prompt: it is computed once, and each response is what it would be else."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch

from stages.engines.protocols import Completion, GroupRequest
from stages.engines.torch.rollout import TorchRolloutEngine
from tests.stages.engines.torch.test_adapter_sets import adapters_for
from tests.stages.engines.torch.test_resting import Fed
from tests.stages.engines.torch.test_rollout import (
    Brake,
    ask,
    collect,
    llama,
    parameters,
    running,
    teacher_forced,
)


def repeated(count: int, **params: int) -> list[GroupRequest]:
    """Requests for one response each to one prompt."""
    request = replace(ask(0, 1, **params), is_repeated=True)
    return [replace(request, group=number, seed=number) for number in range(count)]


async def one_by_one(
    engine: TorchRolloutEngine, requests: list[GroupRequest]
) -> dict[tuple[int, int], Completion]:
    answers = await asyncio.gather(*(collect(engine.generate([each])) for each in requests))
    return {key: done for answer in answers for key, done in answer.items()}


@pytest.mark.parametrize("accelerated", [False, True])
async def test_a_repeated_prompt_is_computed_once(accelerated: bool) -> None:
    requests = repeated(12)
    async with running(accelerated=accelerated, max_rows=4) as engine:
        alone = await collect(engine.generate([replace(r, is_repeated=False) for r in requests]))
        fed = Fed(engine)
        done = await one_by_one(engine, requests)
        responses = [each.token_ids for each in done.values()]
        if not accelerated:  # a static step is padded
            decoded = sum(len(each) - 1 for each in responses)
            assert fed.since() == len(requests[0].prompt_ids) + decoded
        computed = [each for each in done.values() if not each.cached_tokens]
        assert len(computed) == 1
        for key, each in alone.items():
            assert torch.equal(done[key].token_ids, each.token_ids)
            assert torch.allclose(done[key].logprobs, each.logprobs, atol=1e-5)
        await engine.pause()  # at a boundary the rows that have ended have left
        assert not engine._decoder.prompts


async def test_rows_that_begin_after_a_swap_have_a_fresh_prompt() -> None:
    """Those of a repeated prompt too, of which a row is in the batch."""
    new = llama(1)
    first, second = repeated(2, max_tokens=120)
    async with running(max_rows=2) as engine:
        brake = Brake(engine, 5)
        stream = engine.generate([first])
        await brake.pause()
        await engine.load_weights(1, parameters(new))
        await engine.resume()
        late = await collect(engine.generate([second]))
        await collect(stream)
    for done in late.values():
        assert done.versions == ((1, 120),)
        assert torch.allclose(done.logprobs, teacher_forced(new, second, done), atol=1e-4)


async def test_each_set_of_adapters_has_a_prompt_of_its_own() -> None:
    requests = repeated(4)
    named = [replace(each, adapters="a") for each in requests]
    async with running(max_rows=8) as engine:
        await engine.put_adapters("a", 3, adapters_for(llama(), 2), scale=4.0)
        both = await asyncio.gather(one_by_one(engine, requests), one_by_one(engine, named))
        alone = [await one_by_one(engine, [each]) for each in (requests[0], named[0])]
    for together, single in zip(both, alone, strict=True):
        assert torch.equal(together[0, 0].token_ids, single[0, 0].token_ids)
        assert torch.allclose(together[0, 0].logprobs, single[0, 0].logprobs, atol=1e-5)


async def test_a_client_that_leaves_takes_no_prompt_from_the_others() -> None:
    first, second = repeated(2, max_tokens=40)
    async with running(max_rows=2) as engine:
        brake = Brake(engine, 3)
        leaving = engine.generate([first])
        staying = engine.generate([second])
        await brake.pause()
        await leaving.aclose()  # type: ignore[attr-defined]
        await engine.resume()
        done = await collect(staying)
        (late,) = (await collect(engine.generate([first]))).values()
    assert torch.allclose(
        done[1, 0].logprobs, teacher_forced(llama(), second, done[1, 0]), atol=1e-4
    )
    assert torch.allclose(late.logprobs, teacher_forced(llama(), first, late), atol=1e-4)
