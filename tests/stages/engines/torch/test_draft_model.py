"""Drafts of a second model: the tokens, logprobs and rows of an engine without them, in fewer
forwards of the engine's model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from stages.engines.drafts import MODEL, Drafts
from stages.engines.protocols import Begun, Completion, GroupRequest
from stages.engines.torch.decoding.drafted import MOST_FAILED, DraftedSteps
from stages.engines.torch.draft_model import DraftModel, cost_of
from stages.engines.torch.rollout import TorchRolloutEngine
from tests.stages.engines.torch.test_drafts import Forwards
from tests.stages.engines.torch.test_rollout import (
    MODELS,
    SHAPE,
    ask,
    collect,
    llama,
    parameters,
    running,
    same,
)
from tests.stages.engines.torch.test_rollout import _one_thread as _one_thread

Found = dict[tuple[int, int], Completion]


@pytest.fixture(autouse=True)
def _costs_a_tenth(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models of these tests are as small as the one that drafts for them."""
    monkeypatch.setattr("stages.engines.torch.draft_model.cost_of", lambda model, target: 0.1)


def steps_of(engine: TorchRolloutEngine) -> DraftedSteps:
    steps = engine._batch._drafted
    assert steps is not None
    return steps


def model_of(engine: TorchRolloutEngine) -> DraftModel:
    model = steps_of(engine).model
    assert model is not None
    return model


def share_that_holds(engine: TorchRolloutEngine) -> float:
    drafts = steps_of(engine).drafts
    return drafts._held[MODEL] / drafts._tried[MODEL]


async def answers(requests: Sequence[GroupRequest], **options: Any) -> tuple[Found, Forwards]:
    """Return the answers of an engine that has answered nothing before, and its forwards."""
    async with running(**options) as engine:
        forwards = Forwards(engine)
        return await collect(engine.generate(requests)), forwards


@pytest.mark.parametrize("accelerated", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS.keys())
async def test_a_model_that_is_the_engines_own_drafts_what_is_drawn(
    build: Any, temperature: float, accelerated: bool
) -> None:
    requests = [
        ask(group, places=2, length=3 + 4 * group, temperature=temperature, max_tokens=30)
        for group in range(3)
    ]
    torch.manual_seed(1)
    weights = build().state_dict()
    models = [build() for _ in range(3)]
    for each in models:
        each.load_state_dict(weights)
    plain, before = await answers(requests, model=models[0], accelerated=accelerated)
    options = {"speculate": True, "draft_model": models[2], "accelerated": accelerated}
    drafted, after = await answers(requests, model=models[1], **options)
    assert plain.keys() == drafted.keys()
    for key, done in plain.items():
        assert same(done, drafted[key])
        assert done.versions == drafted[key].versions
    assert after.count < before.count / 2
    assert all(done.held_tokens > 0.8 * done.drafted_tokens for done in drafted.values())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_another_model_changes_no_token_and_soon_drafts_little(temperature: float) -> None:
    requests = [
        ask(group, places=3, length=4 + group, temperature=temperature, max_tokens=40)
        for group in range(2)
    ]
    plain, before = await answers(requests)
    async with running(speculate=True, draft_model=llama(seed=7)) as engine:
        forwards = Forwards(engine)
        drafted = await collect(engine.generate(requests))
        assert all(same(done, drafted[key]) for key, done in plain.items())
        assert share_that_holds(engine) < 0.6
    fed = sum(forwards.drafted)
    assert len(forwards.drafted) < before.count / 2, "what does not hold goes on being drafted"
    assert fed < 8 * len(forwards.drafted) * 6


async def test_rows_that_come_and_go_have_their_own_drafts() -> None:
    """Prompts that are long, short and shared, rows that end apart, and new ones between them."""
    requests = [
        ask(group, places=1 + group % 3, length=2 + 5 * group, max_tokens=6 + 7 * group)
        for group in range(6)
    ]
    plain, _ = await answers(requests)
    async with running(speculate=True, draft_model=llama()) as engine:
        tasks = []
        for request in requests:
            tasks.append(asyncio.create_task(collect(engine.generate([request]))))
            await asyncio.sleep(0.01)
        drafted = {
            key: done for found in await asyncio.gather(*tasks) for key, done in found.items()
        }
        assert share_that_holds(engine) > 0.9
        assert await collect(engine.generate([ask(9)]))
        model = model_of(engine)
        assert len(model._rows) == len(model._decoder.rows) <= 2, "rows that are gone are kept"
        assert len(model._decoder.prompts) == 1
    assert drafted.keys() == plain.keys()
    assert all(same(done, drafted[key]) for key, done in plain.items())


async def test_requests_that_change_logits_have_no_draft() -> None:
    requests = [ask(0, max_tokens=20), ask(1, max_tokens=20, logit_bias=((5, 1.0),))]
    plain, _ = await answers(requests)
    drafted, _ = await answers(requests, speculate=True, draft_model=llama())
    assert all(same(done, drafted[key]) for key, done in plain.items())
    assert all((done.drafted_tokens > 0) == (group == 0) for (group, _), done in drafted.items())


async def test_a_response_is_continued_with_drafts() -> None:
    """Tokens of an earlier request are fed to the model that drafts, too."""
    async with running(speculate=True, draft_model=llama()) as engine:
        whole = await collect(engine.generate([ask(0, places=1, max_tokens=40)]))
        first = await collect(engine.generate([ask(0, places=1, max_tokens=40, budget=11)]))
        cut = first[0, 0]
        request = ask(0, places=1, max_tokens=40)
        continued = GroupRequest(
            request.group,
            request.places,
            request.prompt_ids,
            request.params,
            request.seed,
            begun={0: Begun(cut.token_ids, cut.logprobs, cut.versions)},
        )
        steps_of(engine).drafts = Drafts()  # forgets what it could look up
        found = await collect(engine.generate([continued]))
        assert found[0, 0].held_tokens > 10
    assert same(whole[0, 0], found[0, 0])


async def test_new_weights_of_the_engine_leave_the_model_as_it_is() -> None:
    request = ask(0, places=2, max_tokens=30)
    other = llama(seed=3)
    plain, _ = await answers([request], model=llama(seed=3))
    async with running(speculate=True, draft_model=llama()) as engine:
        await collect(engine.generate([request]))
        held = share_that_holds(engine)
        await engine.load_weights(1, parameters(other))
        steps_of(engine).drafts._pasts.clear()
        drafted = await collect(engine.generate([request]))
        assert share_that_holds(engine) < held
    assert all(same(done, drafted[key]) for key, done in plain.items())


async def test_a_model_that_fails_is_left_out() -> None:
    request = ask(0, places=2, max_tokens=20)
    plain, _ = await answers([request])
    async with running(speculate=True, draft_model=llama()) as engine:
        failed = []

        def fails(*arguments: Any) -> torch.Tensor:
            failed.append(arguments)
            raise RuntimeError("no memory")

        model_of(engine)._decoder.extend = fails  # type: ignore[method-assign]
        drafted = await collect(engine.generate([request]))
        assert len(failed) == MOST_FAILED
        assert not model_of(engine)._decoder.rows
    assert all(same(done, drafted[key]) for key, done in plain.items())


async def test_an_engine_that_sleeps_keeps_nothing_of_the_model() -> None:
    async with running(speculate=True, draft_model=llama(), packed=False) as engine:
        stream = engine.stream([ask(0, places=1, max_tokens=200)])
        for _ in range(5):
            await anext(stream)
        assert model_of(engine)._rows
        await engine.sleep()
        assert not model_of(engine)._rows
        assert not model_of(engine)._decoder.prompts
        await stream.aclose()


async def test_a_sequence_longer_than_the_models_context_has_no_draft() -> None:
    small = llama()
    small.config.max_position_embeddings = 40
    request = ask(0, places=1, length=8, max_tokens=60)
    plain, _ = await answers([request])
    drafted, forwards = await answers([request], speculate=True, draft_model=small)
    assert forwards.drafted
    assert forwards.plain > 10
    assert same(plain[0, 0], drafted[0, 0])


def test_a_model_that_costs_more_drafts_less() -> None:
    drafts = Drafts()
    counts = [drafts.worth(MODEL, 2, cost) for cost in (0.01, 0.1, 0.3, 0.5)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[2] > 0
    assert [Drafts().worth(MODEL, rows, 0.1) for rows in (1, 4, 16)] == [9, 4, 0]
    assert drafts.worth(MODEL, 1, 1.0) == 0


def test_a_forward_costs_its_share_of_parameters_or_of_layers() -> None:
    embedding = 97 * 32
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32
    one, two = (embedding + layers * layer + 32 for layers in (1, 2))
    assert cost_of(llama(), llama()) == 1.0
    assert cost_of(smaller(num_hidden_layers=1), llama()) == one / two > 0.5
    assert cost_of(smaller(num_hidden_layers=1, intermediate_size=4), llama()) == 0.5
    assert cost_of(smaller(intermediate_size=4), llama()) == 1.0


def smaller(**sizes: int) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**{**SHAPE, **sizes}, tie_word_embeddings=True))
