"""The sampler of training calls: what clients ask for and get, on real engines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from stages.adapters.names import adapter_shapes
from stages.adapters.options import AdapterOptions
from stages.calls.interface import (
    ALPHA,
    CallRefused,
    Matrix,
    ModelOptions,
    SampledSequence,
    Sampler,
    SampleRequest,
    SamplingOptions,
)
from stages.calls.prompt_scores import SLICE_VALUES, score
from stages.calls.sampler import EngineSampler
from stages.engines.protocols import GroupRequest, SamplingParams
from stages.engines.torch.decoding.decoder import TorchDecoder
from stages.engines.torch.rollout import MOST_LOGITS, TorchRolloutEngine
from stages.model.load import tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
VOCABULARY = len(TOKENIZER)
EOS = int(TOKENIZER.eos_token_id or 0)
PROMPT = np.array(TOKENIZER.encode("12+34="))
GREEDY = SamplingOptions(max_tokens=12, temperature=0.0, stop=())
DEADLINE = 60.0


def tiny() -> Any:
    return tiny_model(0)


def adapter(rank: int, seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = adapter_shapes(tiny(), AdapterOptions(rank, ALPHA))
    return {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes.items()}


def other_model(seed: int) -> dict[str, torch.Tensor]:
    """All weights of another model of the same shapes."""
    return {name: value.detach() for name, value in tiny_model(seed).named_parameters()}


def engine(**options: Any) -> TorchRolloutEngine:
    return TorchRolloutEngine(
        tiny(), TOKENIZER, **{"max_rows": 8, "threads": 1, "device": "cpu", **options}
    )


@asynccontextmanager
async def sampling(**options: Any) -> AsyncIterator[EngineSampler]:
    sampler = EngineSampler(engine(), [EOS], **options)
    _: Sampler = sampler  # it is one
    try:
        async with asyncio.timeout(DEADLINE):
            yield sampler
    finally:
        await sampler.close()


def ask(options: SamplingOptions = GREEDY, **fields: Any) -> SampleRequest:
    return SampleRequest(fields.pop("prompt", PROMPT), options, **fields)


async def tokens_of(sampler: EngineSampler, name: str, **fields: Any) -> list[int]:
    (sequence,) = (await sampler.sample(name, ask(**fields), 0)).sequences
    return sequence.tokens.tolist()  # type: ignore[no-any-return]


def logits_of(model: Any, sequence: SampledSequence) -> torch.Tensor:
    """Plain logits float64 [P + T, V] of the prompt and a response."""
    ids = torch.cat([torch.tensor(PROMPT), torch.tensor(sequence.tokens, dtype=torch.int64)])
    with torch.no_grad():
        return model.double()(input_ids=ids[None]).logits[0]  # type: ignore[no-any-return]


async def test_names_sample_with_their_own_weights_at_once() -> None:
    """Adapters of three ranks, a whole model, and the base, whose version is 0."""
    async with sampling(make_whole=engine) as sampler:
        for rank, step in ((2, 5), (4, 6), (8, 7)):
            await sampler.put(f"r{rank}", ModelOptions(rank), adapter(rank), step)
        await sampler.put("whole", ModelOptions(0), other_model(3), 9)
        versions = {"": 0, "r2": 5, "r4": 6, "r8": 7, "whole": 9}
        outputs = await asyncio.gather(*(sampler.sample(n, ask(count=2), 0) for n in versions))
        for (name, version), output in zip(versions.items(), outputs, strict=True):
            assert len(output.sequences) == 2
            for sequence in output.sequences:
                assert sequence.versions == ((version, 12),)
                assert not sequence.stopped
                assert sequence.tokens.tolist() == await tokens_of(sampler, name)
        made = [tuple(output.sequences[0].tokens.tolist()) for output in outputs]
        assert len(set(made)) == len(made)
        whole = tiny_model(3)
        expected = logits_of(whole, outputs[-1].sequences[0])[len(PROMPT) - 1 : -1].argmax(-1)
        assert made[-1] == tuple(expected.tolist())


async def test_a_sampler_that_is_paused_makes_no_token_and_then_the_same_ones() -> None:
    """Of sequences under way and new ones, of adapters and whole models, which can be put meanwhile."""
    long = replace(GREEDY, max_tokens=200)
    names = ("", "adapter", "whole")
    async with sampling(make_whole=engine) as sampler:
        await sampler.put("adapter", ModelOptions(4), adapter(4), 1)
        await sampler.put("whole", ModelOptions(0), other_model(3), 1)
        expected = [await tokens_of(sampler, name, options=long) for name in names]
        asked = [asyncio.create_task(tokens_of(sampler, name, options=long)) for name in names]
        await asyncio.sleep(0)
        await sampler.pause()
        asked += [asyncio.create_task(tokens_of(sampler, name, options=long)) for name in names]
        await sampler.put("other", ModelOptions(2), adapter(2), 1)
        assert not any(task.done() for task in asked)
        await sampler.resume()
        assert await asyncio.gather(*asked) == expected * 2


@pytest.mark.parametrize("rank", [0, 4])
async def test_newer_weights_are_used_in_flight_with_their_step(rank: int) -> None:
    """Of the name that they are put for alone."""

    def weights(seed: int) -> dict[str, torch.Tensor]:
        return adapter(rank, seed) if rank else other_model(seed)

    async with sampling(make_whole=engine, most_whole=2) as sampler:
        options = ModelOptions(rank)
        for name in "ab":
            await sampler.put(name, options, weights(1), 3)
        long = ask(SamplingOptions(max_tokens=None, temperature=0.0, stop=()))
        calls = [asyncio.create_task(sampler.sample(name, long, 0)) for name in "ab"]
        await asyncio.gather(*(tokens_of(sampler, name) for name in "ab"))  # both have begun
        await sampler.put("a", options, weights(2), 4)
        replaced, other = [(await call).sequences[0] for call in calls]
        assert [step for step, _ in replaced.versions] == [3, 4]
        assert sum(count for _, count in replaced.versions) == len(replaced.tokens)
        assert len(replaced.tokens) == engine_context(sampler) - len(PROMPT)
        assert other.versions == ((3, len(other.tokens)),)


def engine_context(sampler: EngineSampler) -> int:
    return sampler._engine.context


async def test_logprobs_are_those_at_temperature_1_with_alternatives() -> None:
    temperatures = (0.5, 0.0, 1.0, 2.0)
    options = SamplingOptions(12, stop=(), top_k=7, top_p=0.9)
    async with sampling() as sampler:
        requests = [
            ask(replace(options, temperature=temperature), count=2, top_k_sampled=4)
            for temperature in temperatures
        ]
        plain = [replace(request, top_k_sampled=0) for request in requests]
        outputs, same_outputs = [
            await asyncio.gather(*(sampler.sample("", request, 11) for request in asked))
            for asked in (requests, plain)
        ]
    for output, again in zip(outputs, same_outputs, strict=True):
        for sequence, same in zip(output.sequences, again.sequences, strict=True):
            exact = logits_of(tiny(), sequence)[len(PROMPT) - 1 : -1].log_softmax(-1)
            chosen = exact.gather(1, torch.tensor(sequence.tokens, dtype=torch.int64)[:, None])
            assert np.allclose(sequence.logprobs, chosen[:, 0], atol=1e-4)
            assert np.allclose(same.logprobs, sequence.logprobs, atol=1e-5)
            assert same.tokens.tolist() == sequence.tokens.tolist()
            best = exact.topk(4)
            ids = [[token for token, _ in at] for at in sequence.top]
            assert ids == best.indices.tolist()
            values = [[logprob for _, logprob in at] for at in sequence.top]
            assert np.allclose(values, best.values, atol=1e-4)
            assert same.top == ()
            ranks = (exact > chosen).sum(-1)
            assert int(ranks.max()) < 7


async def test_seeds() -> None:
    options = SamplingOptions(max_tokens=12, stop=())
    async with sampling() as sampler:
        first, same, other = [await sampler.sample("", ask(options), seed) for seed in (1, 1, 2)]
        fixed = [await sampler.sample("", ask(replace(options, seed=1)), n) for n in (5, 6)]
        texts = [each.sequences[0].tokens.tolist() for each in (first, same, other, *fixed)]
    assert texts[0] == texts[1] == texts[3] == texts[4] != texts[2]


async def test_what_stops_a_response_is_part_of_it() -> None:
    async with sampling() as sampler:
        free = await tokens_of(sampler, "", options=replace(GREEDY, max_tokens=60))
        end = next(n for n in range(2, 60) if free[n] not in free[:n])  # first seen at its place
        word = TOKENIZER.decode(free[end - 1 : end + 1])

        async def stopped_by(stop: Any, **fields: Any) -> tuple[list[int], bool]:
            options = SamplingOptions(60, temperature=0.0, stop=stop, **fields)
            (sequence,) = (await sampler.sample("", ask(options), 0)).sequences
            return sequence.tokens.tolist(), sequence.stopped

        whole = (free[: end + 1], True)
        assert await stopped_by((free[end],)) == whole
        assert await stopped_by((VOCABULARY - 1, np.int64(free[end]))) == whole
        assert await stopped_by((word,)) == whole
        assert await stopped_by(("no such text",)) == (free, False)
    with_end = EngineSampler(engine(), [free[end]])
    try:
        for stop in (None, ("no such text",), (VOCABULARY - 1,)):
            output = await with_end.sample("", ask(replace(GREEDY, max_tokens=60, stop=stop)), 0)
            assert output.sequences[0].tokens.tolist() == free[: end + 1], "the model's end"
            assert output.sequences[0].stopped
        output = await with_end.sample("", ask(replace(GREEDY, max_tokens=60)), 0)
        assert output.sequences[0].tokens.tolist() == free, "nothing stops it"
    finally:
        await with_end.close()


async def test_logprobs_of_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one piece, and in several."""
    one = SamplingOptions(max_tokens=1)
    for most in (MOST_LOGITS, 2 * VOCABULARY):
        monkeypatch.setattr("stages.engines.torch.rollout.MOST_LOGITS", most)
        async with sampling() as sampler:
            await sampler.put("a", ModelOptions(4), adapter(4), 3)
            output = await sampler.sample("", ask(one, prompt_logprobs=True, top_k_prompt=2), 0)
            adapted = await sampler.sample("a", ask(one, prompt_logprobs=True), 0)
            tops = await sampler.sample("", ask(one, top_k_prompt=2), 0)
            short = await sampler.sample("", ask(one, prompt=PROMPT[:1], prompt_logprobs=True), 0)
            none = await sampler.sample("", ask(one), 0)
        exact = logits_of(tiny(), output.sequences[0])[: len(PROMPT) - 1].log_softmax(-1)
        expected = exact.gather(1, torch.tensor(PROMPT)[1:, None])[:, 0]
        logprobs = output.prompt_logprobs
        assert logprobs is not None
        assert logprobs.dtype == np.float32
        assert logprobs.shape == PROMPT.shape
        assert np.isnan(logprobs[0])
        assert np.allclose(logprobs[1:], expected, atol=1e-4)
        assert adapted.prompt_logprobs is not None
        assert not np.allclose(adapted.prompt_logprobs[1:], expected, atol=1e-2)
        assert output.prompt_top == tops.prompt_top
        assert [len(at) for at in output.prompt_top] == [0, 2, 2, 2, 2, 2]
        best = exact.topk(2).indices.tolist()
        assert [[token for token, _ in at] for at in output.prompt_top[1:]] == best
        assert tops.prompt_logprobs is None
        assert short.prompt_logprobs is not None
        assert np.isnan(short.prompt_logprobs).tolist() == [True]
        assert (none.prompt_logprobs, none.prompt_top, none.cached_tokens) == (None, (), 0)


@pytest.mark.parametrize("slice_values", [SLICE_VALUES, 2 * VOCABULARY])
async def test_all_that_is_asked_of_a_prompt_is_what_plain_logits_give(
    slice_values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one slice, and in several; of the base and of adapters; dense targets and sparse ones."""
    monkeypatch.setattr("stages.calls.prompt_scores.SLICE_VALUES", slice_values)
    dense = Matrix((5, 2), np.array([-1, -1, 7, -1, -1, -1, 0, 3, VOCABULARY - 1, -1]))
    sparse = Matrix(
        (5, 10**9), np.array([4, 9, -1]), np.array([0, 0, 0, 2, 2, 3]), np.array([1, 2, 0])
    )
    options = SamplingOptions(max_tokens=1, temperature=0.0)
    async with sampling() as sampler:
        await sampler.put("a", ModelOptions(4), adapter(4), 3)
        for name in ("", "a"):
            whole = await sampler.sample(
                name, ask(options, prompt_logprobs=True, top_k_prompt=3), 0
            )
            plain = whole.prompt_logprobs
            assert plain is not None
            exact = await exact_logprobs(sampler, name)
            for last in (1, 3, 5):
                request = ask(options, prompt_logprobs=True, top_k_prompt=3, score_last=last)
                output = await sampler.sample(name, request, 0)
                assert output.prompt_logprobs is not None
                assert np.isnan(output.prompt_logprobs[:-last]).all()
                assert np.allclose(output.prompt_logprobs[-last:], plain[-last:], atol=1e-5)
                assert output.prompt_top[:-last] == ((),) * (6 - last)
                assert ids_of(output.prompt_top[-last:]) == ids_of(whole.prompt_top[-last:])
            for targets in (dense, sparse):
                request = ask(options, targets=targets, prompt_logprobs=True, score_last=1)
                output = await sampler.sample(name, request, 0)
                assert output.target_logprobs is not None
                asked = targets.values >= 0
                expected = exact[targets.rows[asked], targets.values[asked]]
                assert np.allclose(output.target_logprobs.values[asked], expected, atol=1e-4)
                assert not output.target_logprobs.values[~asked].any()
                assert output.target_logprobs.starts is targets.starts
                assert output.target_logprobs.shape == targets.shape
                assert np.isnan(output.prompt_logprobs[:-1]).all()  # type: ignore[index]
            output = await sampler.sample(name, ask(options, prompt_draws=2), 0)
            assert output.drawn is not None
            assert output.drawn[0].tolist() == [[best] * 2 for best in exact.argmax(1).tolist()]
            assert np.allclose(output.drawn[1], exact.max(1, keepdims=True), atol=1e-4)


async def exact_logprobs(sampler: EngineSampler, name: str) -> np.ndarray:
    """Logprobs float64 [P - 1, V] of transformers' own forward, of the base with or without the
    adapter ``name``."""
    model = tiny().double()
    if name:
        layers = dict(model.named_modules())
        weights = {key: value.double() for key, value in adapter(4).items()}
        for key in [key for key in weights if ".lora_A." in key]:
            up = weights[key.replace(".lora_A.", ".lora_B.")]
            layers[key.partition(".lora_")[0]].weight.data += ALPHA / 4 * up @ weights[key]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(PROMPT)[None]).logits[0, :-1]
    return np.asarray(logits.log_softmax(-1))


def ids_of(top: Sequence[Sequence[tuple[int, float]]]) -> list[list[int]]:
    return [[token for token, _ in cells] for cells in top]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
async def test_tokens_are_drawn_at_each_place_of_a_prompt_by_their_probabilities(
    temperature: float,
) -> None:
    """The same with the same seed, and others at each place; their logprobs are those at temperature
    1, and top-k and top-p do not count."""
    options = SamplingOptions(1, temperature=temperature, top_k=1, top_p=0.1)
    count = 1000
    async with sampling() as sampler:
        first, same, other = [
            await sampler.sample("", ask(options, prompt_draws=count), seed) for seed in (1, 1, 2)
        ]
        exact = await exact_logprobs(sampler, "")
    assert first.drawn is not None
    assert same.drawn is not None
    assert other.drawn is not None
    tokens, logprobs = first.drawn
    assert tokens.shape == (len(PROMPT) - 1, count)
    assert np.array_equal(tokens, same.drawn[0])
    assert not np.array_equal(tokens, other.drawn[0])
    assert not np.array_equal(tokens[0], tokens[1])
    assert np.allclose(logprobs, np.take_along_axis(exact, tokens, 1), atol=1e-4)
    scaled = np.exp(exact / temperature)
    chances = scaled / scaled.sum(1, keepdims=True)
    shares = np.stack([np.bincount(row, minlength=exact.shape[1]) / count for row in tokens])
    deviations = np.sqrt(chances * (1 - chances) / count)
    assert (np.abs(shares - chances) < 5 * deviations + 1 / count).all()


async def test_a_prompt_that_several_requests_ask_of_is_computed_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those that wait together have the same answers as one alone, and one after new weights has
    those of the new ones."""
    counted: list[int] = []
    compute = TorchDecoder.score

    def counting(decoder: TorchDecoder, *arguments: Any) -> torch.Tensor:
        counted.append(1)
        return compute(decoder, *arguments)

    monkeypatch.setattr(TorchDecoder, "score", counting)
    options = SamplingOptions(max_tokens=1, temperature=0.0)
    request = ask(options, prompt_logprobs=True, targets=Matrix((5, 1), np.arange(5)))
    async with sampling() as sampler:
        await sampler.put("a", ModelOptions(4), adapter(4), 3)
        alone = await sampler.sample("a", request, 0)
        del counted[:]
        core: Any = sampler._engine
        compute_thread_may_go_on = threading.Event()
        held = asyncio.create_task(core._at_boundary(compute_thread_may_go_on.wait))
        calls = [asyncio.create_task(sampler.sample("a", request, n)) for n in range(16)]
        while core._inbox.qsize() < len(calls):  # noqa: ASYNC110
            await asyncio.sleep(0)
        compute_thread_may_go_on.set()
        await held
        for output in await asyncio.gather(*calls):
            assert np.array_equal(output.prompt_logprobs, alone.prompt_logprobs, equal_nan=True)  # type: ignore[arg-type]
        assert len(counted) == 1
        before = asyncio.create_task(sampler.sample("a", request, 0))
        await asyncio.sleep(0)
        await sampler.put("a", ModelOptions(4), adapter(4, 2), 4)
        after = await sampler.sample("a", request, 0)
        await before
        assert not np.allclose(after.prompt_logprobs[1:], alone.prompt_logprobs[1:], atol=1e-3)  # type: ignore[index]


class WithoutLogits:
    """An engine that scores prompts, and does not let its logits be read, as vLLM."""

    def __init__(self, core: TorchRolloutEngine) -> None:
        self.score_prompt = core.score_prompt


async def test_an_engine_without_logits_scores_prompts_and_refuses_the_rest() -> None:
    core = engine()
    group = GroupRequest(0, (0,), torch.tensor(PROMPT), SamplingParams(1), 0)
    try:
        for last in (None, 2):
            request = ask(prompt_logprobs=True, top_k_prompt=2, score_last=last)
            scores = await score(WithoutLogits(core), group, request)
            same = await score(core, group, request)
            assert np.array_equal(scores.prompt_logprobs, same.prompt_logprobs, equal_nan=True)  # type: ignore[arg-type]
            assert scores.prompt_top == same.prompt_top
        for asked, message in (
            (ask(prompt_draws=1), "prompt_alt_tokens_k: needs the logits"),
            (ask(targets=Matrix((5, 1), np.arange(5))), "target_prompt_logprobs: needs the logits"),
        ):
            with pytest.raises(CallRefused, match=message):
                await score(WithoutLogits(core), group, asked)
    finally:
        await core.close()


REFUSALS: dict[str, tuple[Callable[[int], SampleRequest], str]] = {
    "empty": (lambda _: ask(prompt=PROMPT[:0]), "prompt: has no tokens"),
    "negative": (lambda _: ask(prompt=np.array([3, -1])), r"has -1\.\.3; the model knows"),
    "unknown": (lambda _: ask(prompt=np.array([VOCABULARY])), r"prompt: prompt has \d.* knows 0"),
    "floats": (lambda _: ask(prompt=PROMPT.astype(np.float64)), "give int64"),
    "long": (lambda c: ask(replace(GREEDY, max_tokens=c)), r"6 prompt tokens \+ max_tokens \d+ >"),
    "none fits": (lambda c: ask(prompt=np.ones(c, np.int64)), "prompt: has .* room for none"),
    "no tokens": (lambda _: ask(replace(GREEDY, max_tokens=0)), "max_tokens >= 1"),
    "hot": (lambda _: ask(replace(GREEDY, temperature=1e9)), "temperature is 1e"),
    "cold": (lambda _: ask(replace(GREEDY, temperature=-1.0)), "temperature is -1"),
    "top_p": (lambda _: ask(replace(GREEDY, top_p=0.0)), "top_p is 0"),
    "top_k": (lambda _: ask(replace(GREEDY, top_k=-2)), "top_k = -2"),
    "stop": (lambda _: ask(replace(GREEDY, stop=("",))), "may not be empty"),
    "count": (lambda _: ask(count=0), "count = 0"),
    "many": (lambda _: ask(count=1025), "count = 1025: is out of range; give 1 to 1024"),
    "prompt's": (lambda _: ask(top_k_prompt=1025), "top_k_prompt = 1025"),
    "sampled": (lambda _: ask(top_k_sampled=-1), "top_k_sampled = -1"),
    "draws": (lambda _: ask(prompt_draws=1025), "prompt_alt_tokens_k = 1025"),
    "last 0": (lambda _: ask(prompt_logprobs=True, score_last=0), "last_n = 0: is out of range"),
    "last": (lambda _: ask(prompt_logprobs=True, score_last=6), "last_n = 6: .* of 6 tokens"),
    "last of none": (lambda _: ask(score_last=2), "last_n = 2: is of no logprobs"),
    "rows": (lambda _: ask(targets=Matrix((6, 1), np.arange(6))), "has 6 rows, .* give 5 rows"),
    "no target": (lambda _: ask(targets=Matrix((5, 1), np.full(5, -1))), "names no token"),
    "no value": (lambda _: ask(targets=Matrix((5, 0), np.arange(0))), "names no token"),
    "negative target": (lambda _: ask(targets=Matrix((5, 1), np.arange(-2, 3))), "has -2"),
    "unknown target": (
        lambda _: ask(targets=Matrix((5, 1), np.arange(5) + VOCABULARY)),
        f"logprobs = {VOCABULARY + 4}: is no token of the model",
    ),
    "many targets": (
        lambda _: ask(targets=Matrix((5, 1025), np.zeros(5125, np.int64))),
        "has 5125 values.* at most 1024 for each token",
    ),
}


async def test_requests_that_cannot_be_served_are_refused() -> None:
    async with sampling() as sampler:
        context = engine_context(sampler)
        for request, message in REFUSALS.values():
            with pytest.raises(CallRefused, match=message):
                await sampler.sample("", request(context), 0)
        with pytest.raises(CallRefused, match='model = "x": has no weights here'):
            await sampler.sample("x", ask(), 0)
        unbounded = SamplingOptions(max_tokens=None, top_k=-1, stop=())
        full = await sampler.sample("", ask(unbounded), 0)
        assert len(full.sequences[0].tokens) == context - len(PROMPT)


async def test_weights_that_cannot_be_used_are_refused_and_change_nothing() -> None:
    async with sampling() as sampler:
        await sampler.put("a", ModelOptions(2), adapter(2), 1)
        before = await tokens_of(sampler, "a")
        for name, options, weights, message in (
            ("a", ModelOptions(4), adapter(4), "remove it first, or keep its options"),
            ("a", ModelOptions(2), adapter(4), "another rank, scale or other layers"),
            ("b", ModelOptions(2), {}, "of one rank"),
            ("", ModelOptions(2), adapter(2), "is the base model"),
            ("w", ModelOptions(0), other_model(1), "whole models are off"),
        ):
            with pytest.raises(CallRefused, match=message):
                await sampler.put(name, options, weights, 2)
        assert await tokens_of(sampler, "a") == before
        for name in ("b", "", "w"):
            with pytest.raises(CallRefused, match="has no weights here"):
                await sampler.remove(name)


@pytest.mark.parametrize("rank", [0, 4])
async def test_a_removed_name_fails_its_own_samples_and_may_come_again(rank: int) -> None:
    weights = adapter(rank) if rank else other_model(1)
    async with sampling(make_whole=engine) as sampler:
        for name in ("a", "b")[: 2 if rank else 1]:
            await sampler.put(name, ModelOptions(rank), weights, 1)
        long = ask(SamplingOptions(max_tokens=None, temperature=0.0, stop=()), count=4)
        removed = asyncio.create_task(sampler.sample("a", long, 0))
        other = asyncio.create_task(sampler.sample("b" if rank else "", long, 0))
        await tokens_of(sampler, "a")  # they have begun
        await sampler.remove("a")
        with pytest.raises(CallRefused, match='model = "a": was removed'):
            await removed
        with pytest.raises(CallRefused, match='model = "a": has no weights here'):
            await sampler.sample("a", ask(), 0)
        assert len((await other).sequences) == 4
        await sampler.put("a", ModelOptions(8), adapter(8), 2)
        assert (await sampler.sample("a", ask(), 0)).sequences[0].versions == ((2, 12),)


async def test_the_engines_of_whole_models_are_bounded() -> None:
    """The one that was used longest ago gives way when it has no requests, and comes again."""
    opened: list[TorchRolloutEngine] = []

    def make() -> TorchRolloutEngine:
        opened.append(engine())
        assert sum(not each._closed for each in opened) <= 2
        return opened[-1]

    async with sampling(make_whole=make, most_whole=2) as sampler:
        names = ("a", "b", "c")
        for step, name in enumerate(names):
            await sampler.put(name, ModelOptions(0), other_model(step + 1), step)
        assert not opened, "none before it samples"
        alone = {name: await tokens_of(sampler, name) for name in names}
        assert [each._closed for each in opened] == [True, False, False]
        calls = [tokens_of(sampler, names[n % 3], count=1) for n in range(12)]
        assert await asyncio.gather(*calls) == [alone[names[n % 3]] for n in range(12)]
        await sampler.put("a", ModelOptions(0), other_model(9), 8)
        await sampler.put("a", ModelOptions(0), other_model(2), 9)
        assert await tokens_of(sampler, "a") == alone["b"]
        await sampler.remove("b")
        with pytest.raises(CallRefused, match="no weights"):
            await tokens_of(sampler, "b")
    assert all(each._closed for each in opened)


async def test_adapters_share_the_room_of_their_engine() -> None:
    """Three names in the room of two: each samples with its newest weights, whoever was there."""
    async with sampling(room=2) as sampler:
        names = ("a", "b", "c")
        for number, name in enumerate(names):
            await sampler.put(name, ModelOptions(2 + number), adapter(2 + number, number), number)
        alone = {name: await tokens_of(sampler, name) for name in names}
        assert len({*map(tuple, alone.values())}) == 3
        calls = [tokens_of(sampler, names[n % 3]) for n in range(12)]
        assert await asyncio.gather(*calls) == [alone[names[n % 3]] for n in range(12)]
        long = ask(SamplingOptions(max_tokens=200, temperature=0.0, stop=()))
        under_way = asyncio.create_task(sampler.sample("a", long, 0))
        await tokens_of(sampler, "a")
        await sampler.put("a", ModelOptions(2), adapter(2, 7), 9)
        versions = (await under_way).sequences[0].versions
        assert [version for version, _ in versions] == [0, 9]
        await sampler.remove("a")
        with pytest.raises(CallRefused, match="no weights"):
            await tokens_of(sampler, "a")
        assert await tokens_of(sampler, "b") == alone["b"]


async def test_a_cancelled_sample_leaves_the_engine() -> None:
    async with sampling() as sampler:
        long = ask(SamplingOptions(max_tokens=None, stop=()), count=8)
        call = asyncio.create_task(sampler.sample("", long, 0))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert len(await tokens_of(sampler, "")) == 12
        core: Any = sampler._engine
        await core.resume()  # at a boundary
        assert not core._batch.rows
