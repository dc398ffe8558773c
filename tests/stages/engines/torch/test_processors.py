"""What a request changes in its logits: the tokens are those that transformers' logits processors,
or OpenAI's formulas in float64, make of the same weights at the same random numbers."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from stages.engines.protocols import (
    Begun,
    Completion,
    GroupRequest,
    RequestRefused,
    ResponseFailed,
    SamplingParams,
    Token,
)
from stages.engines.torch.sampling.drawing import uniform
from tests.stages.engines.torch.test_rollout import ask, collect, llama, running

BIASES = ((3, 6.5), (50, -4.0), (96, 3.0))
ENDS = (5, 11, 12, 13, 30, 31, 60, 61, 62)


class Penalties:
    """OpenAI's presence and frequency penalties, which transformers does not have."""

    def __init__(self, params: SamplingParams, prompt: int) -> None:
        self._params = params
        self._prompt = prompt

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(ids[0, self._prompt :], minlength=scores.shape[-1]).to(scores)
        penalty = self._params.frequency_penalty * counts
        return scores - penalty - self._params.presence_penalty * (counts > 0)


def processors(params: SamplingParams, prompt: int) -> LogitsProcessorList:
    made = LogitsProcessorList()
    if params.allowed_token_ids:
        allowed = list(params.allowed_token_ids)
        made.append(PrefixConstrainedLogitsProcessor(lambda *_: allowed, 1))
    if params.bad_words:
        made.append(NoBadWordsLogitsProcessor([list(word) for word in params.bad_words]))
    if params.min_tokens:
        ends = list(params.stop_token_ids)
        made.append(MinNewTokensLengthLogitsProcessor(prompt, params.min_tokens, ends))
    if params.logit_bias:
        biases = [[[token], bias] for token, bias in params.logit_bias]
        made.append(SequenceBiasLogitsProcessor(biases))
    made.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    made.append(Penalties(params, prompt))  # type: ignore[arg-type]
    made.append(TemperatureLogitsWarper(params.temperature or 1.0))
    if params.top_k:
        made.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        made.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        made.append(MinPLogitsWarper(params.min_p))
    return made


@torch.no_grad()
def expected(model: Any, request: GroupRequest, place: int) -> tuple[list[int], list[float]]:
    """Tokens, and their logprobs after temperature alone, in float64."""
    params = request.params
    prompt = request.prompt_ids.tolist()
    ids = list(prompt)
    logprobs = []
    change = processors(params, len(prompt))
    while len(ids) - len(prompt) < params.max_tokens:
        logits = model(torch.tensor([ids])).logits[:, -1]
        scores = change(torch.tensor([ids]), logits.clone())[0]
        ends = scores.softmax(-1).cumsum(-1)
        point = uniform(request.seed, place, len(ids) - len(prompt)) * float(ends[-1])
        drawn = torch.searchsorted(ends, torch.tensor(point, dtype=ends.dtype), right=True)
        token = int(drawn) if params.temperature else int(scores.argmax())
        ids.append(token)
        plain = (logits[0] / (params.temperature or 1.0)).log_softmax(-1)
        logprobs.append(float(plain[token]))
        if token in params.stop_token_ids:
            break
    return ids[len(prompt) :], logprobs


ASKED: dict[str, dict[str, Any]] = {
    "min_p": {"min_p": 0.2},
    "min_p after the others": {"min_p": 0.1, "top_k": 20, "top_p": 0.9},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "presence_penalty": {"presence_penalty": 1.9},
    "frequency_penalty": {"frequency_penalty": -1.2},
    "logit_bias": {"logit_bias": BIASES},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": ENDS},
    "allowed_token_ids": {"allowed_token_ids": (1, 7, 40, 80, 90)},
    "bad_words": {
        "allowed_token_ids": (2, 3, 4),
        "bad_words": ((2, 3), (4,), (3, 3, 2), (2, 2, 2, 3)),
    },
    "all": {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.4,
        "logit_bias": BIASES,
        "min_tokens": 6,
        "stop_token_ids": ENDS,
        "bad_words": ((3, 96), (3, 3)),
        "top_k": 30,
        "top_p": 0.95,
        "min_p": 0.02,
    },
}


async def test_tokens_are_those_of_transformers() -> None:
    """All requests decode together, beside one that changes nothing."""
    model = llama()
    exact = copy.deepcopy(model).double()
    requests = [
        ask(number, places=1, max_tokens=14, temperature=temperature, **params)
        for number, (params, temperature) in enumerate(
            (params, temperature) for params in ({}, *ASKED.values()) for temperature in (0.0, 0.8)
        )
    ]
    completions = []
    for accelerated in (False, True):
        async with running(copy.deepcopy(model), accelerated=accelerated, max_rows=40) as engine:
            completions.append(await collect(engine.generate(requests)))
    for request in requests:
        tokens, logprobs = expected(exact, request, 0)
        for made in completions:
            completion = made[request.group, 0]
            assert completion.token_ids.tolist() == tokens, request.params
            assert completion.logprobs.tolist() == pytest.approx(logprobs, abs=1e-4)


async def test_the_logprobs_of_named_tokens_come_beside_others() -> None:
    model = llama()
    exact = copy.deepcopy(model).double()
    named = ask(0, places=1, max_tokens=3, logprob_token_ids=(8, 50), allowed_token_ids=(9,))
    plain = ask(1, places=1, max_tokens=3)
    async with running(model) as engine:
        tokens = [t async for t in engine.stream([named]) if isinstance(t, Token)]
        both = [t async for t in engine.stream([named, plain], alternatives=3)]
    ids = named.prompt_ids.tolist()
    for token in tokens:
        with torch.no_grad():
            logprobs = exact(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        assert [name for name, _ in token.alternatives] == [8, 50]
        values = [token.logprob, *(value for _, value in token.alternatives)]
        assert values == pytest.approx(logprobs[[9, 8, 50]].tolist(), abs=1e-4)
        ids.append(token.token_id)
    counts = {t.group: len(t.alternatives) for t in both if isinstance(t, Token)}
    assert counts == {0: 2, 1: 3}


async def test_a_request_that_allows_no_token_fails_alone() -> None:
    async with running() as engine:
        nothing = ask(0, places=1, allowed_token_ids=(5,), min_tokens=2, stop_token_ids=(5,))
        others = engine.generate([ask(1)])
        with pytest.raises(ResponseFailed) as failed:
            await collect(engine.generate([nothing]))
        assert isinstance(failed.value.__cause__, RequestRefused)
        assert {item.group async for item in others if isinstance(item, Completion)} == {1}
        for field in ("allowed_token_ids", "logprob_token_ids"):
            unknown: dict[str, Any] = {field: (97,)}
            with pytest.raises(RequestRefused, match=f"{field} has 97..97"):
                engine.generate([ask(0, **unknown)])
        with pytest.raises(RequestRefused, match="min_tokens 10 > max_tokens 9"):
            engine.generate([ask(0, min_tokens=10)])


async def test_a_response_that_is_continued_is_as_if_it_was_not_cut() -> None:
    """Also its penalties: they count the tokens of both parts."""
    params: dict[str, Any] = {"repetition_penalty": 1.5, "frequency_penalty": 0.9, "max_tokens": 16}
    async with running() as engine:
        whole = ask(3, places=1, **params)
        uncut = (await collect(engine.generate([whole])))[3, 0]
        part = replace(whole, params=replace(whole.params, budget=7))
        first = (await collect(engine.generate([part])))[3, 0]
        begun = {0: Begun(first.token_ids, first.logprobs, first.versions)}
        rest = (await collect(engine.generate([replace(whole, begun=begun)])))[3, 0]
    assert rest.token_ids.tolist() == uncut.token_ids.tolist()
