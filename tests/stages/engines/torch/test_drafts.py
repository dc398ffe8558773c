"""Drafts: the tokens, logprobs and rows of an engine without them, in fewer forwards; and what is
looked up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.engines import drafts
from stages.engines.drafts import Draft, Drafts, Past, Text
from stages.engines.protocols import Completion, GroupRequest, SamplingParams
from stages.engines.responses import ResponseInProgress
from stages.engines.torch.decoding.drafted import MOST_FAILED, holding
from stages.engines.torch.rollout import TorchRolloutEngine
from tests.stages.engines.torch.test_rollout import (
    MODELS,
    ask,
    collect,
    llama,
    parameters,
    running,
    same,
)
from tests.stages.engines.torch.test_rollout import _one_thread as _one_thread

Found = dict[tuple[int, int], Completion]


class Forwards:
    """Counts the tokens that each forward of an engine's rows was fed."""

    def __init__(self, engine: TorchRolloutEngine) -> None:
        decoder = engine._decoder
        self.plain = 0
        self.drafted: list[int] = []
        decode, decode_drafts = decoder.decode, decoder.decode_drafts

        def plain(tokens: Any) -> torch.Tensor:
            self.plain += 1
            return decode(tokens)

        def drafted(tokens: Sequence[Sequence[int]]) -> torch.Tensor:
            self.drafted.append(sum(map(len, tokens)))
            return decode_drafts(tokens)

        decoder.decode = plain  # type: ignore[method-assign]
        decoder.decode_drafts = drafted  # type: ignore[method-assign]

    @property
    def count(self) -> int:
        return self.plain + len(self.drafted)


async def answered_twice(requests: Sequence[GroupRequest], **options: Any) -> tuple[Found, int]:
    """Return the second answers of an engine to ``requests``, and the number of its forwards."""
    async with running(**options) as engine:
        await collect(engine.generate(requests))
        forwards = Forwards(engine)
        return await collect(engine.generate(requests)), forwards.count


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS.keys())
async def test_drafts_change_no_token(build: Any, temperature: float) -> None:
    requests = [
        ask(group, places=2, length=3 + 4 * group, temperature=temperature, max_tokens=40)
        for group in range(3)
    ]
    torch.manual_seed(1)
    weights = build().state_dict()
    answers = []
    for speculate in (False, True):
        model = build()
        model.load_state_dict(weights)
        answers.append(await answered_twice(requests, model=model, speculate=speculate))
    (plain, forwards), (drafted, fewer) = answers
    assert plain.keys() == drafted.keys()
    for key, done in plain.items():
        assert same(done, drafted[key])
        assert done.versions == drafted[key].versions
        assert done.finish_reason == drafted[key].finish_reason
    # the second answers are the first ones again
    assert fewer < forwards / 2


@pytest.mark.parametrize("max_tokens", [40, 23])  # the second one ends inside a draft
async def test_each_token_that_held_has_saved_a_forward(max_tokens: int) -> None:
    requests = [ask(0, places=1, max_tokens=max_tokens)]
    plain, forwards = await answered_twice(requests)
    drafted, fewer = await answered_twice(requests, speculate=True)
    (without,), (done,) = plain.values(), drafted.values()
    assert (without.drafted_tokens, without.held_tokens) == (0, 0)
    assert done.held_tokens == forwards - fewer > 0
    assert done.drafted_tokens >= done.held_tokens


async def test_the_accelerators_way_of_decoding_takes_drafts_too() -> None:
    """As many rows as a static step has, whose padding the drafted forwards share."""
    requests = [ask(group, places=4, length=3 + group, max_tokens=30) for group in range(2)]
    plain, forwards = await answered_twice(requests)
    drafted, fewer = await answered_twice(requests, accelerated=True, speculate=True)
    assert all(same(done, drafted[key]) for key, done in plain.items())
    assert fewer < forwards


async def test_rows_with_and_without_a_draft_decode_together() -> None:
    known = ask(0, places=2, max_tokens=30)
    new = [
        ask(1, places=1, length=12, max_tokens=24),
        ask(2, max_tokens=20, logit_bias=((5, 1.0),)),
    ]
    async with running() as engine:
        expected = await collect(engine.generate([known, *new]))
    async with running(speculate=True) as engine:
        await collect(engine.generate([known]))
        forwards = Forwards(engine)
        found = await collect(engine.generate([known, *new]))
        assert max(forwards.drafted) > 5 + 2  # tokens of five rows
        assert await collect(engine.generate([ask(9)]))  # nothing is left that harms
    assert found.keys() == expected.keys()
    assert all(same(done, found[key]) for key, done in expected.items())


@pytest.mark.parametrize("end", ["stop", "limit", "budget"])
async def test_a_response_ends_inside_a_draft_as_without_one(end: str) -> None:
    whole = ask(0, places=1, max_tokens=40)
    async with running() as engine:
        (done,) = (await collect(engine.generate([whole]))).values()
    token = done.token_ids.tolist()[20]
    params = {
        "stop": {"max_tokens": 40, "stop_token_ids": (token,)},
        "limit": {"max_tokens": 21},
        "budget": {"max_tokens": 40, "budget": 21},
    }[end]
    shorter = ask(0, places=1, **params)
    async with running() as engine:
        expected = await collect(engine.generate([shorter]))
    async with running(speculate=True) as engine:
        await collect(engine.generate([whole]))
        forwards = Forwards(engine)
        found = await collect(engine.generate([shorter]))
        assert forwards.count < 10
    assert found.keys() == expected.keys()
    for key, each in expected.items():
        assert same(each, found[key])
        assert each.finish_reason == found[key].finish_reason


async def test_a_stream_has_each_token_once_and_in_order() -> None:
    request = ask(0, places=2, max_tokens=30)
    async with running(speculate=True) as engine:
        await collect(engine.generate([request]))
        tokens: dict[int, list[int]] = {0: [], 1: []}
        ended: dict[int, list[int]] = {}
        async for each in engine.stream([request], alternatives=2):
            if isinstance(each, Completion):
                ended[each.place] = each.token_ids.tolist()
            else:
                tokens[each.place].append(each.token_id)
                assert len(each.alternatives) == 2
    assert tokens == ended


async def test_new_weights_are_used_from_the_next_token_on() -> None:
    """Drafts are of the old weights' responses; each token is drawn by the new ones."""
    request = ask(0, places=2, max_tokens=40)
    old, new = (parameters(llama(seed)) for seed in (0, 1))
    changed = {name: weight + 0.02 * new[name] for name, weight in old.items()}
    answers = []
    for speculate in (False, True):
        async with running(speculate=speculate) as engine:
            await collect(engine.generate([request]))
            await engine.load_weights(1, changed)
            answers.append(await collect(engine.generate([request])))
    plain, drafted = answers
    assert all(same(done, drafted[key]) for key, done in plain.items())
    assert {done.versions for done in drafted.values()} == {((1, 40),)}


async def test_where_a_forward_of_drafts_fails_each_row_is_computed_alone() -> None:
    request = ask(0, places=2, max_tokens=20)
    async with running(speculate=True) as engine:
        expected = await collect(engine.generate([request]))
        failed = []

        def fails(tokens: Sequence[Sequence[int]]) -> torch.Tensor:
            failed.append(len(tokens))
            raise RuntimeError("no memory")

        engine._decoder.decode_drafts = fails  # type: ignore[method-assign]
        found = await collect(engine.generate([request]))
    assert len(failed) == MOST_FAILED
    assert all(same(done, found[key]) for key, done in expected.items())


def test_draws_with_drafts_follow_the_distribution() -> None:
    """A draft that is always the same token holds as often as that token is drawn."""
    from stages.engines.torch.sampling.drawing import draw, uniform

    torch.manual_seed(0)
    logits = torch.randn(2, 7)  # of the first token, and of the second after token 3
    params = ask(0).params
    trials = 4000
    seen = Counter[tuple[int, ...]]()
    for seed in range(trials):
        points = [uniform(seed, 0, index) for index in range(2)]
        tokens, logprobs = draw(logits.clone(), [params] * 2, points).read()
        made = holding(list(zip(tokens, logprobs, strict=True)), [3])
        seen[tuple(token for (token,), _ in made)] += 1
    first, second = logits.softmax(-1).tolist()
    expected = {(token,): p for token, p in enumerate(first) if token != 3}
    expected |= {(3, token): first[3] * p for token, p in enumerate(second)}
    chi2 = sum((seen[tokens] - trials * p) ** 2 / (trials * p) for tokens, p in expected.items())
    assert seen.keys() <= expected.keys()
    assert chi2 < 32.9  # 12 degrees of freedom: passed by 0.999 of all seeds


# -- what is looked up
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def found() -> Drafts:
    return Drafts()


def row(prompt: Sequence[int], tokens: Sequence[int], limit: int = 1000) -> ResponseInProgress:
    params = SamplingParams(max_tokens=limit)
    made = ResponseInProgress(GroupRequest(0, (0,), torch.tensor(prompt), params, 0), 0)
    made.tokens = list(tokens)
    return made


@settings(max_examples=200)
@given(
    texts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=60), min_size=1, max_size=4),
    tail=st.lists(st.integers(0, 3), min_size=drafts.GRAM, max_size=40),
)
def test_the_place_with_the_longest_agreement_is_found(
    texts: list[list[int]], tail: list[int]
) -> None:
    past = Past()
    for tokens in texts:
        past.read(Text(tokens))

    def agreed(text: Sequence[int], place: int) -> int:
        most = min(drafts.LONGEST, place, len(tail))
        return next((n for n in range(most) if text[place - 1 - n] != tail[-1 - n]), most)

    everywhere = [
        (tokens, place)
        for tokens in texts
        for place in range(drafts.GRAM, len(tokens))
        if agreed(tokens, place) >= drafts.GRAM
    ]
    newest = everywhere[-drafts.PLACES :]
    best = past.longest_agreement(tail)
    if not newest:
        assert best is None
        return
    assert best is not None
    text, place, length = best
    assert agreed(text, place) == length == max(agreed(*each) for each in newest)


def test_drafts_are_of_the_same_prompt_and_of_the_row_itself(found: Drafts) -> None:
    found.keep(row([1, 2], [7, 8, 9, 10, 11, 12]))
    same_prompt = found.of(row([1, 2], [7, 8, 9]), rows=1)
    assert same_prompt is not None
    assert same_prompt.tokens[:2] == [10, 11]
    assert found.of(row([1, 3], [7, 8, 9]), rows=1) is None
    of_itself = found.of(row([1, 3], [5, 6, 7, 8, 5, 6, 7]), rows=1)
    assert of_itself is not None
    assert of_itself.tokens[0] == 8


def test_a_draft_leaves_the_row_within_its_limit(found: Drafts) -> None:
    found.keep(row([1], list(range(10, 60))))
    for _ in range(100):
        found.judge(Draft([0] * 8, 4), 8)
    draft = found.of(row([1], [10, 11, 12], limit=6), rows=1)
    assert draft is not None
    assert draft.tokens == [13, 14]
    assert found.of(row([1], [10, 11, 12], limit=4), rows=1) is None


def test_drafts_that_hold_are_longer_and_those_that_do_not_are_rare(found: Drafts) -> None:
    found.keep(row([1], list(range(100, 200))))
    tokens = list(range(100, 120))

    def length() -> int:
        draft = found.of(row([1], tokens), rows=4)
        return len(draft.tokens) if draft else 0

    for _ in range(100):
        found.judge(Draft([0] * 8, 16), 8)
    assert length() == drafts.MOST_DRAFTED
    for _ in range(3000):
        found.judge(Draft([0] * 8, 16), 0)
    apart = 4 * drafts.TRIED_ANYWAY  # of four rows
    assert Counter(length() for _ in range(10 * apart)) == {0: 10 * (apart - 1), 1: 10}


def test_more_rows_have_shorter_drafts(found: Drafts) -> None:
    found.keep(row([1], list(range(100, 200))))
    tokens = list(range(100, 120))

    def lengths() -> Iterator[int]:
        for rows in (1, 4, 16, 64):
            draft = found.of(row([1], tokens), rows=rows)
            yield len(draft.tokens) if draft else 0

    found_lengths = list(lengths())
    assert found_lengths == sorted(found_lengths, reverse=True)
    assert found_lengths[0] > 4 * found_lengths[-2]
    assert found_lengths[-1] == 0


def test_what_is_kept_is_bounded(found: Drafts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "MOST_TOKENS", 5000)
    monkeypatch.setattr(drafts, "MOST_INDEXED", 3)
    for prompt in range(200):
        for _ in range(2 if prompt else 2 * drafts.TEXTS):
            found.keep(row([prompt], list(range(50))))
        assert found.of(row([prompt], [5, 6, 7]), rows=1) is not None
    pasts = found._pasts.values()
    kept = sum(len(text.tokens) for past in pasts for text in past.texts)
    assert kept == found._tokens <= 5000
    assert sum(bool(past.places) for past in pasts) == 3


def test_the_index_of_a_prompt_that_is_always_asked_is_bounded(found: Drafts) -> None:
    for number in range(10 * drafts.TEXTS):
        tokens = list(range(1000 * number, 1000 * number + 20))
        found.keep(row([1], tokens))
        draft = found.of(row([1], tokens[:5]), rows=1)
        assert draft is not None
        assert draft.tokens[0] == tokens[5]
    (past,) = found._pasts.values()
    assert len(past.texts) == drafts.TEXTS
    assert len(past.places) <= 4 * drafts.TEXTS * 22
