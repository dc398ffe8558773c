"""What a user relies on in the torch RolloutEngine beyond the contract of tests/stages/engines: the
numbers of a plain transformers forward, the same bits in equal runs, nothing kept of what was
dropped."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from stages.engines.protocols import Completion, EngineClosed, GroupRequest, SamplingParams
from stages.engines.torch import rollout as torch_rollout
from stages.engines.torch.decoding.decoder import TorchDecoder
from stages.engines.torch.decoding.llama_forward import PackedLinear
from stages.engines.torch.rollout import TorchRolloutEngine
from stages.engines.torch.sampling.drawing import Drawn, draw, invert, keep_from, uniform
from tests.allocations import Allocations

VOCABULARY = 97
DEADLINE = 60.0
SHAPE: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    initializer_range=0.3,
)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def llama(seed: int = 0, tied: bool = True) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=tied)).eval()


def parameters(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@contextlib.asynccontextmanager
async def running(
    model: Any = None, tokenizer: Any = None, **options: Any
) -> AsyncIterator[TorchRolloutEngine]:
    engine = TorchRolloutEngine(model or llama(), tokenizer, **{"max_rows": 8, **options})
    try:
        async with asyncio.timeout(DEADLINE):
            yield engine
    finally:
        await engine.close()


def ask(
    group: int, places: int = 2, length: int = 7, seed: int | None = None, **params: Any
) -> GroupRequest:
    ids = torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(group))
    params = {"max_tokens": 9, **params}
    return GroupRequest(
        group, tuple(range(places)), ids, SamplingParams(**params), group if seed is None else seed
    )


def rows_of(engine: TorchRolloutEngine) -> int:
    """Number of rows that decode or wait."""
    return len(engine._batch.rows) + len(engine._batch.waiting)


class Brake:
    """Holds the compute thread inside its ``step``-th decode until let go, so that a test acts at a
    known token."""

    def __init__(self, engine: TorchRolloutEngine, step: int) -> None:
        self._engine = engine
        self._left = step
        self._decode = engine._decoder.decode
        self._reached = threading.Event()
        self._free = threading.Event()
        engine._decoder.decode = self._braked  # type: ignore[method-assign]

    def _braked(self, tokens: Sequence[int]) -> torch.Tensor:
        self._left -= 1
        if self._left == 0:
            self._reached.set()
            assert self._free.wait(DEADLINE)
        return self._decode(tokens)

    async def reached(self) -> None:
        assert await asyncio.to_thread(self._reached.wait, DEADLINE)

    def let_go(self) -> None:
        self._free.set()

    async def pause(self) -> None:
        """Pause the engine at the boundary after the braked decode."""
        await self.reached()
        pausing = asyncio.create_task(self._engine.pause())
        await asyncio.sleep(0)  # it has asked
        assert not pausing.done()
        self.let_go()
        await pausing


async def collect(stream: AsyncIterator[Completion]) -> dict[tuple[int, int], Completion]:
    return {(done.group, done.place): done async for done in stream}


def same(one: Completion, other: Completion, exact: bool = False) -> bool:
    close = torch.equal if exact else lambda a, b: torch.allclose(a, b, atol=1e-4)
    return torch.equal(one.token_ids, other.token_ids) and close(one.logprobs, other.logprobs)


def teacher_forced(model: Any, request: GroupRequest, done: Completion) -> torch.Tensor:
    """The logprobs that transformers' plain forward gives the response's tokens at the request's
    temperature."""
    with torch.no_grad():
        logits = model(input_ids=torch.cat([request.prompt_ids, done.token_ids])[None]).logits[0]
    logits = logits[len(request.prompt_ids) - 1 : -1] / (request.params.temperature or 1.0)
    return logits.log_softmax(-1).gather(-1, done.token_ids[:, None])[:, 0]


MODELS: dict[str, Callable[[], Any]] = {
    "llama, tied": llama,
    "llama, untied": lambda: llama(tied=False),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)).eval(),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=8)).eval(),
}


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS.keys())
async def test_greedy_is_what_transformers_generates(build: Callable[[], Any]) -> None:
    torch.manual_seed(1)
    reference = build()
    model = build()
    model.load_state_dict(reference.state_dict())
    requests = [
        ask(group, places=2, length=3 + 4 * group, temperature=0.0, max_tokens=40)
        for group in range(3)
    ]
    async with running(model) as engine:
        found = await collect(engine.generate(requests))
    assert len(found) == 6
    for (group, _), done in found.items():
        ids = requests[group].prompt_ids
        expected = reference.generate(
            ids[None],
            attention_mask=torch.ones(1, len(ids)),
            do_sample=False,
            max_new_tokens=40,
            eos_token_id=None,
        )[0, len(ids) :]
        assert torch.equal(done.token_ids, expected)
        assert torch.allclose(
            done.logprobs, teacher_forced(reference, requests[group], done), atol=1e-4
        )
        assert done.finish_reason == "length"
        assert done.versions == ((0, 40),)


async def test_responses_do_not_depend_on_the_company() -> None:
    """Alone, in a crowd that joins and leaves around it, and through a narrow batch: the same
    responses."""
    requests = [
        ask(group, places=3, length=2 + 5 * group, max_tokens=6 + 7 * group, temperature=0.9)
        for group in range(4)
    ]
    alone = {}
    async with running(max_rows=32) as engine:
        for request in requests:
            alone |= await collect(engine.generate([request]))
        crowd = [
            engine.generate([request])
            for request in [*requests, *(ask(50 + i, places=2) for i in range(3))]
        ]
        together = {
            key: done
            for found in await asyncio.gather(*map(collect, crowd))
            for key, done in found.items()
        }
    async with running(max_rows=3, prefill_tokens=4) as engine:
        narrow = await collect(engine.generate(requests))
    assert len(alone) == 12
    for key, done in alone.items():
        assert same(done, together[key])
        assert same(done, narrow[key])


async def test_equal_runs_are_equal_bit_for_bit() -> None:
    requests = [
        ask(group, places=4, length=3 + group, max_tokens=5 + 3 * group) for group in range(6)
    ]
    runs = []
    for _ in range(2):
        async with running(max_rows=7) as engine:
            runs.append([done async for done in engine.generate(requests)])
    first, second = runs
    assert [(d.group, d.place) for d in first] == [(d.group, d.place) for d in second]
    assert all(same(a, b, exact=True) for a, b in zip(first, second, strict=True))


async def test_the_accelerators_way_of_decoding_gives_the_same_responses() -> None:
    """Static steps, and a token launched before the last one is read: here without a recording, on
    the CPU."""
    stops = tuple(
        range(0, VOCABULARY, 25)
    )  # some responses end before their length, where a token was launched in vain
    requests = [
        ask(
            group,
            places=3,
            length=3 + 9 * group,
            max_tokens=8 + 40 * group,
            temperature=0.9,
            stop_token_ids=stops,
        )
        for group in range(5)
    ]
    plain = {}
    ahead = {}
    async with running(max_rows=7) as engine:
        plain = await collect(engine.generate(requests))
    async with running(max_rows=7, accelerated=True) as engine:
        ahead = await collect(engine.generate(requests))
        assert engine._batch._launched is None
        assert len(engine._decoder._static_steps._recorded) < 12  # few sizes for about 200 steps
    reasons = Counter(done.finish_reason for done in plain.values())
    assert reasons["stop"] > 2 < reasons["length"] + 3
    for key, done in plain.items():
        assert same(done, ahead[key])
        assert done.finish_reason == ahead[key].finish_reason


async def test_ahead_of_the_host_every_act_finds_the_rows_up_to_date() -> None:
    """Abort, pause and a swap while a token is launched: nothing is lost, versions count what each
    weights made."""
    old = llama(0)
    new = llama(1)
    request = ask(0, places=2, max_tokens=150, temperature=0.8)
    async with running(initial_version=3, accelerated=True) as engine:
        brake = Brake(engine, 60)
        stream = engine.generate([request])
        aborted = engine.generate([ask(1, places=3, max_tokens=200)])
        await brake.pause()
        await aborted.aclose()  # type: ignore[attr-defined]
        await engine.load_weights(4, parameters(new))
        await engine.resume()
        found = await collect(stream)
    for done in found.values():
        (first, before), (second, after) = done.versions
        assert (first, second, before + after) == (3, 4, 150)
        assert torch.allclose(done.logprobs, piecewise(old, new, request, done, before), atol=1e-4)


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS.keys())
def test_llama_like_models_are_computed_by_the_quick_forward(build: Callable[[], Any]) -> None:
    assert TorchDecoder(build(), torch.device("cpu"))._llama is not None


def test_a_llama_with_another_activation_is_computed_by_its_own_modules_with_weights_of_their_own() -> (
    None
):
    decoder = TorchDecoder(
        LlamaForCausalLM(LlamaConfig(**SHAPE, hidden_act="gelu")), torch.device("cpu"), packed=False
    )
    assert decoder._llama is None
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in decoder.model.parameters())


async def test_another_kind_of_model_is_served_by_its_own_modules() -> None:
    """Gated experts instead of a gated product: not a Llama, but two-part attention serves it."""
    shape = {
        **SHAPE,
        "moe_intermediate_size": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 8,
    }
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape)).eval()
    reference = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape)).eval()
    reference.load_state_dict(model.state_dict())
    request = ask(0, places=2, max_tokens=12)
    async with running(model) as engine:
        assert engine._decoder._llama is None
        found = await collect(engine.generate([request]))
        await engine.load_weights(1, parameters(reference))
        again = await collect(engine.generate([request]))
    for key, done in found.items():
        assert torch.allclose(done.logprobs, teacher_forced(reference, request, done), atol=1e-4)
        assert same(done, again[key])


async def test_rows_that_end_with_their_first_token_leave_before_they_have_room() -> None:
    """A large submission after a small one: its rows have no KV yet when the first of them end."""
    async with running(max_rows=40) as engine:
        await collect(engine.generate([ask(0, 4)]))
        stops = tuple(range(VOCABULARY // 2))  # about half of the first tokens end their response
        done = await collect(engine.generate([ask(1, 40, stop_token_ids=stops)]))
    lengths = [len(done[1, place].token_ids) for place in range(40)]
    assert min(lengths) == 1 < max(lengths)


async def test_weights_swapped_mid_response_are_used_from_the_next_token_on() -> None:
    old = llama(0)
    new = llama(1)
    request = ask(0, places=2, max_tokens=150, temperature=0.8)
    async with running(initial_version=3, max_rows=3) as engine:
        brake = Brake(engine, 60)
        stream = engine.generate([request])
        await brake.pause()
        times = await engine.load_weights(4, parameters(new))
        assert engine.version == 4
        assert times.exposed >= 0
        assert times.hidden > 0
        await engine.resume()
        found = await collect(stream)
        fresh = (await collect(engine.generate([ask(2, places=1)])))[2, 0]
    assert fresh.versions == ((4, 9),)
    assert torch.allclose(fresh.logprobs, teacher_forced(new, ask(2), fresh), atol=1e-4)
    for done in found.values():
        assert done.versions == ((3, 61), (4, 89))  # one token by the prefill, 60 by decodes
        assert torch.allclose(done.logprobs, piecewise(old, new, request, done, 61), atol=1e-4)


def piecewise(
    old: Any, new: Any, request: GroupRequest, done: Completion, before: int
) -> torch.Tensor:
    """Logprobs with ``before`` tokens from ``old`` and the rest from ``new`` over ``old``'s KV."""
    ids = torch.cat([request.prompt_ids, done.token_ids])
    # the newest token of the old weights is fed to the new ones
    seen = len(request.prompt_ids) + before - 1
    with torch.no_grad():
        first = old(input_ids=ids[None, :seen], use_cache=True)
        second = new(input_ids=ids[None, seen:-1], past_key_values=first.past_key_values)
    logits = (
        torch.cat([first.logits[0, len(request.prompt_ids) - 1 :], second.logits[0]])
        / request.params.temperature
    )
    return logits.log_softmax(-1).gather(-1, done.token_ids[:, None])[:, 0]


async def test_a_cancelled_swap_never_happens_or_has_happened() -> None:
    request = ask(0, places=1, max_tokens=100)
    async with running() as engine:
        brake = Brake(engine, 5)
        stream = engine.generate([request])
        await brake.reached()
        waiting = asyncio.create_task(engine.load_weights(1, parameters(llama(1)), hold=True))
        with pytest.raises(TimeoutError):  # its turn has not come
            await asyncio.wait_for(waiting, 0.3)
        brake.let_go()
        assert (await collect(stream))[0, 0].versions == ((0, 100),)
        assert engine.version == 0
        assert not engine._paused

        begun = threading.Event()
        go_on = threading.Event()
        install = engine._decoder.weights.install

        def slow(prepared: Any) -> Any:
            begun.set()
            assert go_on.wait(DEADLINE)
            return install(prepared)

        engine._decoder.weights.install = slow  # type: ignore[method-assign]
        swapping = asyncio.create_task(engine.load_weights(1, parameters(llama(1))))
        assert await asyncio.to_thread(begun.wait, DEADLINE)
        swapping.cancel()
        await asyncio.wait([swapping], timeout=0.1)
        assert not swapping.done(), "half of it cannot be undone"
        go_on.set()
        await asyncio.wait([swapping])
        assert swapping.cancelled()
        assert engine.version == 1


async def test_an_engine_whose_step_never_ends_can_be_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_rollout, "BOUNDARY_SECONDS", 0.1)
    engine = TorchRolloutEngine(llama(), max_rows=2)
    brake = Brake(engine, 2)
    stream = engine.generate([ask(0, places=1)])
    await brake.reached()
    await asyncio.wait_for(engine.close(), DEADLINE)
    assert engine._thread.daemon, "it does not keep the process either"
    brake.let_go()
    with pytest.raises(EngineClosed):
        await anext(stream)


async def test_rows_that_begin_after_a_swap_have_a_fresh_prompt() -> None:
    """A group that had begun when the weights changed: its later rows read the prompt with the new
    weights."""
    new = llama(1)
    request = ask(0, places=4, max_tokens=120)
    async with running(max_rows=2) as engine:
        brake = Brake(engine, 5)
        stream = engine.generate([request])
        await brake.pause()
        await engine.load_weights(1, parameters(new))
        await engine.resume()
        found = await collect(stream)
    late = [done for done in found.values() if done.versions == ((1, 120),)]
    assert len(late) == 2
    for done in late:
        assert torch.allclose(done.logprobs, teacher_forced(new, request, done), atol=1e-4)


async def test_closing_the_iterator_or_cancelling_its_consumer_frees_the_rows() -> None:
    async with running(max_rows=4) as engine:
        brake = Brake(engine, 5)
        closed = engine.generate([ask(0, places=6, max_tokens=200)])
        consumer = asyncio.create_task(collect(engine.generate([ask(1, places=6, max_tokens=200)])))
        kept = engine.generate([ask(2, places=2, max_tokens=100)])
        await brake.pause()
        assert rows_of(engine) == 14
        consumer.cancel()
        await asyncio.wait([consumer])
        await closed.aclose()  # type: ignore[attr-defined]
        await closed.aclose()  # type: ignore[attr-defined]
        await engine.pause()
        assert rows_of(engine) == 2
        await engine.resume()
        found = await collect(kept)
        assert await collect(closed) == {}
        await engine.pause()
        assert rows_of(engine) == 0
        assert engine._decoder.prompts == []
        assert engine._decoder.rows == []
    assert all(
        torch.allclose(d.logprobs, teacher_forced(llama(), ask(2), d), atol=1e-4)
        for d in found.values()
    )


@pytest.mark.parametrize(
    ("request_", "complaint"),
    [
        (ask(7, length=0), "group 7: prompt_ids"),
        (
            GroupRequest(7, (0,), torch.tensor([3, VOCABULARY]), SamplingParams(4), 0),
            "the model knows 0..96",
        ),
        (GroupRequest(7, (1, 1), torch.tensor([3]), SamplingParams(4), 0), "places"),
        (ask(7, max_tokens=0), "max_tokens"),
        (ask(7, top_p=0.0), "top_p"),
        (ask(7, stop=("a",)), "need a tokenizer"),
        (ask(7, length=200, max_tokens=57), "context 256"),
    ],
)
async def test_requests_that_cannot_be_served_are_refused_at_once(
    request_: GroupRequest, complaint: str
) -> None:
    async with running() as engine:
        with pytest.raises(ValueError, match=complaint):
            engine.generate([ask(0), request_])
        assert rows_of(engine) == 0


async def test_a_model_that_two_part_attention_cannot_serve_is_refused() -> None:
    from transformers import GPTNeoConfig, GPTNeoForCausalLM

    config = GPTNeoConfig(
        vocab_size=97, hidden_size=32, num_layers=2, num_heads=2, attention_types=[[["global"], 2]]
    )
    with pytest.raises(ValueError, match="GPTNeoForCausalLM"):
        TorchRolloutEngine(GPTNeoForCausalLM(config), max_rows=2)


# -- drawing
# --------------------------------------------------------------------------------------------------


def allowed(logits: torch.Tensor, params: SamplingParams) -> list[bool]:
    """Top-k and then top-p as the papers define it, one token at a time.

    A token whose mass ahead equals top-p but for rounding may be drawn or not; it counts as
    allowed.
    """
    probabilities = (logits.double() / params.temperature).softmax(-1)
    order = probabilities.argsort(descending=True).tolist()[: params.top_k or None]
    mass = 0.0
    kept = []
    for token in order:
        if mass >= params.top_p * probabilities[order].sum() + 1e-6:
            break
        kept.append(token)
        mass += float(probabilities[token])
    return [token in kept for token in range(len(probabilities))]


def first(drawn: Drawn) -> tuple[list[int], list[float]]:
    tokens, logprobs = drawn.read()
    return [row[0] for row in tokens], [row[0] for row in logprobs]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    vocabulary=st.sampled_from([2, 97, 256, 700]),
    top_k=st.sampled_from([0, 1, 3, 90, 5000]),
    top_p=st.sampled_from([1.0, 0.97, 0.5, 0.01]),
    temperature=st.sampled_from([0.3, 1.0, 4.0]),
)
def test_tokens_outside_top_k_and_top_p_are_never_drawn(
    seed: int, vocabulary: int, top_k: int, top_p: float, temperature: float
) -> None:
    params = SamplingParams(1, temperature=temperature, top_k=top_k, top_p=top_p)
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(seed)) * 2
    rows = 40
    points = [0.0, 1.0 - 2.0**-52, *(uniform(seed, place, 0) for place in range(rows - 2))]
    # One unfiltered row in the middle: rows with and without filters share a batch.
    mixed = [params] * 20 + [SamplingParams(1)] + [params] * (rows - 21)
    tokens, logprobs = first(draw(logits.repeat(rows, 1), mixed, points))
    inside = allowed(logits, params)
    assert all(inside[token] for i, token in enumerate(tokens) if i != 20)
    expected = (logits / temperature).log_softmax(-1)
    assert all(abs(logprobs[i] - float(expected[tokens[i]])) < 1e-4 for i in range(rows) if i != 20)


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_a_logit_that_is_not_finite_has_no_logprob(
    broken: float, temperature: float
) -> None:
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(0))
    logits[0, 7] = -torch.inf  # a token that cannot be drawn
    params = [SamplingParams(1, temperature=temperature)] * 2
    points = [0.5, 0.5]
    tokens, logprobs = first(draw(logits.clone(), params, points))
    assert logprobs == pytest.approx(
        [float(logits[i].log_softmax(-1)[token]) for i, token in enumerate(tokens)], abs=1e-5
    )
    logits[1, 9] = broken
    for filters in ({}, {"top_p": 0.9}, {"top_k": 3}):
        several = [replace(one, **filters) for one in params]
        tokens, logprobs = first(draw(logits.clone(), several, points))
        assert [math.isnan(logprob) for logprob in logprobs] == [False, True]
        assert tokens[0] != 7


def test_draws_follow_the_distribution() -> None:
    """Chi-square of 20,000 draws against the filtered distribution; seeds are fixed, so it passes
    always or never."""
    logits = torch.randn(300, generator=torch.Generator().manual_seed(0)) * 2
    params = SamplingParams(1, temperature=1.3, top_k=40, top_p=0.9)
    count = 20_000
    points = [uniform(5, place, 1) for place in range(count)]
    tokens, _ = first(draw(logits.repeat(count, 1), [params] * count, points))
    kept = torch.tensor(allowed(logits, params))
    probabilities = (logits / 1.3).softmax(-1) * kept
    expected = (probabilities / probabilities.sum() * count).tolist()
    drawn = Counter(tokens)
    assert set(drawn) <= set(kept.nonzero()[:, 0].tolist())
    square = sum((drawn[i] - e) ** 2 / e for i, e in enumerate(expected) if e)
    freedom = int(kept.sum()) - 1
    assert square < freedom + 4 * (2 * freedom) ** 0.5


def test_a_nucleus_wider_than_the_first_look_is_found() -> None:
    weights = torch.rand(2, 5000, generator=torch.Generator().manual_seed(0))
    threshold = keep_from(weights, [0, 3], [0.9, 1.0])
    ranked, _ = weights[0].double().sort(descending=True)
    wide = int(((ranked.cumsum(0) - ranked) < 0.9 * ranked.sum()).sum())
    assert wide > 512
    assert abs(int((weights[0] >= threshold[0]).sum()) - wide) <= 1
    assert int((weights[1] >= threshold[1]).sum()) == 3


def test_no_point_of_the_range_draws_a_token_of_weight_zero() -> None:
    weights = torch.zeros(4, 1000)
    weights[0, 999] = weights[1, 0] = weights[2, 255] = 1e-30
    weights[3, [3, 700]] = torch.tensor([1e-38, 1.0])
    for point in (0.0, 0.5, 1.0 - 2.0**-52):
        picked = invert(weights, torch.full((4,), point, dtype=torch.float64)).tolist()
        assert picked[:3] == [999, 0, 255]
        assert picked[3] in (3, 700)


def test_uniform_numbers_differ_by_seed_place_and_index() -> None:
    points = [
        uniform(seed, place, index) for seed in (1, 11) for place in (1, 11) for index in (0, 1, 11)
    ]
    assert len(set(points)) == len(points)
    assert all(0 <= point < 1 for point in points)
    many = torch.tensor([uniform(0, 0, index) for index in range(4000)])
    assert abs(float(many.mean()) - 0.5) < 0.02


ONE_POOL = """
import asyncio, os, time, torch
from stages.engines.protocols import GroupRequest, SamplingParams
from stages.engines.torch.rollout import TorchRolloutEngine
from stages.model.load import tiny_model

torch.set_num_threads(2)

def tasks():
    return len(os.listdir("/proc/self/task"))

async def main():
    engine = TorchRolloutEngine(model, max_rows=64, threads=2, device="cpu")
    end = time.monotonic() + 30  # the end of a thread emits no event
    while tasks() != before + 1 and time.monotonic() < end:
        await asyncio.sleep(0.01)
    made = tasks() - before
    asked = [GroupRequest(i, (0,), torch.arange(3, 40), SamplingParams(4, temperature=0.0), seed=i) for i in range(64)]
    async for _ in engine.generate(asked):
        pass
    print(made, tasks() - before)
    await engine.close()

model, before = tiny_model(0), tasks()
asyncio.run(main())
"""


@pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="counts the system's threads, as Linux lists them"
)
def test_one_thread_alone_computes_in_parallel() -> None:
    """The engine's own thread, later with a helper for the second core; the thread that made the
    engine has none."""
    output = subprocess.run(
        [sys.executable, "-c", ONE_POOL], capture_output=True, text=True, check=True, timeout=120
    )
    assert output.stdout.split() == ["1", "2"]


@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_packed_one_after_another(tied: bool) -> None:
    """No second set of them is held at any time."""
    torch.manual_seed(0)
    sizes = {**SHAPE, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6}
    memory = Allocations()
    model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=tied)).eval()
    whole = sum(parameter.nbytes for parameter in model.parameters())
    TorchDecoder(model, torch.device("cpu"), packed=True)
    memory.stop()
    assert whole < max(itertools.accumulate(memory.sizes())) < 1.25 * whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_weights_are_given_back_bit_for_bit(dtype: torch.dtype) -> None:
    layers = [torch.nn.Linear(48, out, bias=False, dtype=dtype) for out in (32, 7)]
    before = [layer.weight.detach().clone() for layer in layers]
    linear = PackedLinear(*layers, dtype=torch.float32)
    assert all(not layer.weight.numel() for layer in layers)
    linear.unpack()
    assert all(
        torch.equal(layer.weight, weight) for layer, weight in zip(layers, before, strict=True)
    )
