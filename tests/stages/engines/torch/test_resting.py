"""Rows at rest: the next turn of a response computes what is new, and is what it would be else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from stages.engines.protocols import Begun, Completion, GroupRequest
from stages.engines.torch.rollout import TorchRolloutEngine
from stages.flow.catalogue import OBSERVED
from stages.rollout.stage import computed_again
from tests.stages.engines.torch.test_rollout import (
    MODELS,
    SHAPE,
    ask,
    collect,
    llama,
    parameters,
    running,
    teacher_forced,
)

PLACES = 3
OBSERVATION = (11, 12, 13)
FAMILIES: dict[str, Callable[[], Any]] = {
    **MODELS,
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(**SHAPE, head_dim=8, query_pre_attn_scalar=8, sliding_window=8)
    ).eval(),
}
Responses = dict[tuple[int, int], Completion]


def with_observation(done: Completion, observation: Sequence[int] = OBSERVATION) -> Begun:
    """What is begun of a response whose turn was answered."""
    count = len(observation)
    tokens = torch.cat([done.token_ids, torch.tensor(observation)])
    logprobs = torch.cat([done.logprobs, torch.zeros(count)])
    versions = (*done.versions, (OBSERVED, count))
    return Begun(tokens, logprobs, versions, turn_start=len(tokens))


def next_turn(request: GroupRequest, responses: Responses) -> GroupRequest:
    begun = {place: with_observation(done) for (_, place), done in responses.items()}
    return replace(request, begun=begun)


class Fed:
    """How many tokens the model of ``engine`` was given."""

    def __init__(self, engine: TorchRolloutEngine) -> None:
        self.tokens = 0
        self._forward = engine._decoder._forward
        engine._decoder._forward = self._count  # type: ignore[method-assign]

    def _count(self, ids: torch.Tensor, *arguments: Any) -> torch.Tensor:
        self.tokens += len(ids)
        return self._forward(ids, *arguments)

    def since(self) -> int:
        counted = self.tokens
        self.tokens = 0
        return counted


def again_of(request: GroupRequest, responses: Responses) -> int:
    """How many tokens the rollout stage counts as computed again."""
    return sum(
        computed_again(len(request.prompt_ids), request.begun[place], done.cached_tokens)
        for (_, place), done in responses.items()
    )


def assert_right(model: Any, request: GroupRequest, responses: Responses, begin: int = 0) -> None:
    """The tokens of the last turn have the logprobs of transformers' plain forward."""
    for (_, place), done in responses.items():
        start = request.turn_start(place) if begin == 0 else begin
        expected = teacher_forced(model, request, done)[start:]
        assert torch.allclose(done.logprobs[start:], expected, atol=1e-4)


@pytest.mark.parametrize("accelerated", [False, True])
@pytest.mark.parametrize("build", FAMILIES.values(), ids=FAMILIES.keys())
async def test_the_turns_of_a_response_are_right(
    build: Callable[[], Any], accelerated: bool
) -> None:
    """Two groups take turns, one of them on its own prompt's longer way."""
    torch.manual_seed(0)
    plain = build()
    torch.manual_seed(0)
    served = build()
    requests = [
        replace(ask(group, PLACES, length=5 + group), is_continued=True) for group in (0, 4)
    ]
    async with running(served, accelerated=accelerated) as engine:
        for _ in range(3):
            done = await collect(engine.generate(requests))
            for number, request in enumerate(requests):
                of_group = {key: each for key, each in done.items() if key[0] == request.group}
                assert_right(plain, request, of_group)
                requests[number] = next_turn(request, of_group)


async def test_a_further_turn_computes_what_is_new() -> None:
    first = ask(0, PLACES)
    kept = replace(first, is_continued=True)
    async with running() as engine:
        fed = Fed(engine)
        responses = await collect(engine.generate([kept]))
        made = sum(len(done.token_ids) for done in responses.values())
        decoded = made - PLACES
        assert fed.since() == len(first.prompt_ids) + decoded
        request = next_turn(kept, responses)
        again = await collect(engine.generate([request]))
        new = sum(len(done.token_ids) for done in again.values()) - made
        assert fed.since() == new, "the newest token waits for the next turn, as the last one did"
        assert again_of(request, again) == 0

        responses = await collect(engine.generate([first]))
        fed.since()
        request = next_turn(first, responses)
        again = await collect(engine.generate([request]))
        new = sum(len(done.token_ids) for done in again.values()) - made
        computed = len(first.prompt_ids) + made - PLACES
        assert fed.since() == computed + new, "all of it"
        assert again_of(request, again) == computed


async def test_a_turn_of_one_token_leaves_nothing_at_rest() -> None:
    request = replace(ask(0, 12, max_tokens=1), is_continued=True)
    async with running(max_rows=12) as engine:
        responses = await collect(engine.generate([request]))
        assert engine._batch.resting.nbytes == 0
        again = next_turn(request, responses)
        assert_right(llama(), again, await collect(engine.generate([again])))


async def test_new_weights_compute_all_of_a_response_again() -> None:
    new = llama(1)
    request = replace(ask(0, PLACES), is_continued=True)
    async with running() as engine:
        responses = await collect(engine.generate([request]))
        await engine.load_weights(1, parameters(new))
        assert engine._batch.resting.nbytes == 0
        assert not engine._decoder.prompts
        request = next_turn(request, responses)
        assert_right(new, request, await collect(engine.generate([request])))


async def test_a_response_that_went_back_is_right() -> None:
    """A program left out the end of a turn: what is before that is at rest."""
    request = replace(ask(0, 1), is_continued=True)
    async with running() as engine:
        done = (await collect(engine.generate([request])))[0, 0]
        cut = replace(done, token_ids=done.token_ids[:4], logprobs=done.logprobs[:4])
        cut = replace(cut, versions=((0, 4),))
        for begun in (with_observation(cut), with_observation(done, (done.token_ids[0].item(),))):
            again = replace(request, begun={0: begun})
            assert_right(llama(), again, await collect(engine.generate([again])))


async def test_another_prompt_of_the_same_number_is_not_mistaken() -> None:
    request = replace(ask(0, 1), is_continued=True)
    async with running() as engine:
        done = await collect(engine.generate([request]))
        other = replace(request, prompt_ids=request.prompt_ids.flip(0))
        again = next_turn(other, done)
        assert_right(llama(), again, await collect(engine.generate([again])))


async def test_rows_at_rest_take_as_much_memory_as_those_that_decode() -> None:
    requests = [replace(ask(group, 1), is_continued=True) for group in range(40)]
    async with running(max_rows=2) as engine:
        responses = await collect(engine.generate(requests))
        resting = engine._batch.resting
        assert 0 < resting.nbytes <= engine._decoder.attention.row_nbytes()
        assert len(engine._decoder.prompts) < len(requests), "the oldest ones were dropped"
        for request in requests:
            again = next_turn(request, {(0, 0): responses[request.group, 0]})
            assert_right(llama(), again, await collect(engine.generate([again])))
        await engine.load_weights(1, parameters(llama()))
        assert not engine._decoder.prompts
