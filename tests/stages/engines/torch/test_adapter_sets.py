"""Several sets of adapters in one batch: each row is what an engine with its set alone makes."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from benchmarks.engines.families import model_of as family_model
from stages.adapters.names import adapted_layers, adapter_shapes, down_of, head_name, up_of
from stages.adapters.options import AdapterOptions
from stages.engines.protocols import AdaptersRemoved, Completion, GroupRequest, WeightMismatch
from stages.engines.torch.decoding.decoder import TorchDecoder
from stages.engines.torch.decoding.llama_forward import can_pack_in
from stages.engines.torch.rollout import TorchRolloutEngine
from stages.model.load import load_model
from tests.stages.engines.torch.test_resting import next_turn
from tests.stages.engines.torch.test_rollout import (
    VOCABULARY,
    Brake,
    ask,
    collect,
    llama,
    rows_of,
    running,
)

ALPHA = 8
RANKS = {"a": 2, "b": 5, "c": 8}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": llama,
    **{
        name: functools.partial(family_model, name, vocab_size=VOCABULARY)
        for name in ("Gemma 2", "Phi-3", "DeepSeek-V3")
    },
}
Weights = dict[str, torch.Tensor]
Made = dict[tuple[int, int], Completion]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def adapters_for(
    model: Any, rank: int, seed: int = 0, size: float = 0.3, *, head: bool = False
) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    layers = [*adapted_layers(model, ()), *([head_name(model)] if head else [])]
    shapes = adapter_shapes(model, AdapterOptions(rank, ALPHA, tuple(layers)))
    return {name: torch.randn(shape, generator=generator) * size for name, shape in shapes.items()}


def merged(model: Any, weights: Weights, rank: int) -> Any:
    """``model`` with adapters, by peft."""
    targets = sorted({name.partition(".lora_")[0] for name in weights})
    head = model.get_output_embeddings()
    if head_name(model) in targets:  # peft would change the embedding too
        model.config.tie_word_embeddings = False
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
    config = LoraConfig(r=rank, lora_alpha=ALPHA, target_modules=targets)
    adapted = get_peft_model(model, config)
    loaded = adapted.load_state_dict(
        {f"base_model.model.{name}": value for name, value in weights.items()}, strict=False
    )
    assert not loaded.unexpected_keys
    return exact(adapted.merge_and_unload())


def exact(model: Any) -> Any:
    """``model`` in float64, in which torch has no grouped matmuls of experts."""
    return model if hasattr(model.config, "n_routed_experts") else model.double()


def logprobs_of(model: Any, request: GroupRequest, done: Completion) -> torch.Tensor:
    """Logprobs of the response by the plain forward of ``model``."""
    ids = torch.cat([request.prompt_ids, done.token_ids])
    with torch.no_grad():
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
    predicted = logits.log_softmax(-1)[len(request.prompt_ids) - 1 : -1]
    return predicted.gather(1, done.token_ids[:, None])[:, 0].float()


async def put(engine: TorchRolloutEngine, name: str, weights: Weights, version: int = 0) -> None:
    await engine.put_adapters(name, version, weights, scale=ALPHA / RANKS[name])


async def change_at(
    brake: Brake, engine: TorchRolloutEngine, change: Coroutine[Any, Any, None]
) -> None:
    """Make ``change`` at the boundary after the braked step."""
    posted = asyncio.Event()
    post = engine._post

    def posting(function: Callable[[], None]) -> None:
        post(function)
        posted.set()

    await brake.reached()
    engine._post = posting  # type: ignore[method-assign]
    changing = asyncio.create_task(change)
    await posted.wait()
    brake.let_go()
    await changing


def requests_of(names: Sequence[str], **params: Any) -> list[GroupRequest]:
    """Requests whose prompts are of different lengths, for sets in turn, two rows each."""
    return [
        replace(ask(number, 2, length=3 + number, **params), adapters=name)
        for number, name in enumerate(names)
    ]


def assert_same(one: Made, other: Made, tolerance: float = 1e-5) -> None:
    assert one.keys() == other.keys()
    for key, done in one.items():
        assert torch.equal(done.token_ids, other[key].token_ids), key
        assert torch.allclose(done.logprobs, other[key].logprobs, atol=tolerance), key


@pytest.mark.parametrize("options", [{}, {"packed": False}, {"accelerated": True}], ids=str)
@pytest.mark.parametrize("kind", MODELS)
async def test_a_batch_of_several_sets_is_that_of_each_alone(
    kind: str, options: dict[str, Any]
) -> None:
    """One of them with an adapter on the head."""
    build = MODELS[kind]
    weights = {
        name: adapters_for(build(), rank, rank, head=name == "b") for name, rank in RANKS.items()
    }
    requests = requests_of(["a", "", "b", "c", "a"], temperature=0.0)
    async with running(build(), max_rows=16, **options) as engine:
        for name in RANKS:
            await put(engine, name, weights[name], version=4)
        done = await collect(engine.generate(requests))
    for name in ("", *RANKS):
        own = [request for request in requests if request.adapters == name]
        async with running(build(), **options) as engine:
            if name:
                await put(engine, name, weights[name])
            alone = await collect(engine.generate(own))
        together = {key: each for key, each in done.items() if key in alone}
        assert_same(alone, together, tolerance=1e-4)
        model = merged(build(), weights[name], RANKS[name]) if name else exact(build())
        for request in own:
            for place in request.places:
                made = done[request.group, place]
                assert made.versions == ((4 if name else 0, len(made.token_ids)),)
                expected = logprobs_of(model, request, made)
                assert torch.allclose(made.logprobs, expected, atol=2e-4)


@pytest.mark.parametrize("accelerated", [False, True])
async def test_prompts_and_continued_responses_have_their_own_set(accelerated: bool) -> None:
    """Extension, scores of prompts, and rows that are computed one by one."""
    weights = {name: adapters_for(llama(), rank, rank, head=True) for name, rank in RANKS.items()}
    requests = [replace(each, is_continued=True) for each in requests_of(["a", "", "b"])]
    async with running(max_rows=16, accelerated=accelerated) as engine:
        for name in RANKS:
            await put(engine, name, weights[name])
        done = await collect(engine.generate(requests))
        turns = [
            next_turn(each, {k: v for k, v in done.items() if k[0] == each.group})
            for each in requests
        ]
        engine._batch.resting.clear()  # one forward feeds all of the first turns
        again = await collect(engine.generate(turns))
        scores = [await engine.score_prompt(each, alternatives=3) for each in requests]
    for request, turn, scored in zip(requests, turns, scores, strict=True):
        name = request.adapters
        model = merged(llama(), weights[name], RANKS[name]) if name else llama().double()
        for place in request.places:
            start = turn.turn_start(place)
            made = again[request.group, place]
            expected = logprobs_of(model, request, made)
            assert torch.allclose(made.logprobs[start:], expected[start:], atol=1e-4)
        with torch.no_grad():
            logits = model(input_ids=request.prompt_ids[None], use_cache=False).logits[0]
        best = logits.log_softmax(-1)[:-1].topk(3)
        for (token, _), values, ids in zip(scored, best.values, best.indices, strict=True):
            assert [token for token, _ in token.alternatives] == ids.tolist()
            found = torch.tensor([logprob for _, logprob in token.alternatives])
            assert torch.allclose(found, values.float(), atol=1e-4)


@pytest.mark.parametrize("accelerated", [False, True])
async def test_a_set_replaced_in_flight_changes_its_own_rows_alone(accelerated: bool) -> None:
    old = {name: adapters_for(llama(), RANKS[name], 1) for name in ("a", "b")}
    new = adapters_for(llama(), RANKS["a"], 2)
    requests = requests_of(["a", "b", ""], max_tokens=20)
    async with running(max_rows=8, accelerated=accelerated) as engine:
        for name in old:
            await put(engine, name, old[name])
        undisturbed = await collect(engine.generate(requests))
        brake = Brake(engine, step=9)
        generating = asyncio.create_task(collect(engine.generate(requests)))
        await change_at(brake, engine, put(engine, "a", new, version=1))
        done = await generating
        after = await collect(engine.generate(requests[:1]))
    async with running(max_rows=8, accelerated=accelerated) as engine:
        await put(engine, "a", new)
        assert_same(after, await collect(engine.generate(requests[:1])))
    for key, made in done.items():
        if key[0]:
            assert torch.equal(made.token_ids, undisturbed[key].token_ids)
            assert torch.equal(made.logprobs, undisturbed[key].logprobs), "to the bit"
            assert made.versions == ((0, 20),)
        else:
            (first, count), (last, rest) = made.versions
            assert (first, last, count + rest) == (0, 1, 20)
            before = undisturbed[key]
            assert torch.equal(made.token_ids[:count], before.token_ids[:count])
            assert not torch.equal(made.token_ids[count:], before.token_ids[count:])


async def test_a_prompt_that_waits_is_computed_again_with_new_weights() -> None:
    """Rows of a group that have not started when their set is replaced, also by the same version."""
    old, new = (adapters_for(llama(), RANKS["a"], seed) for seed in (1, 2))
    request = replace(ask(3, 6, max_tokens=12), adapters="a")
    async with running(max_rows=2) as engine:
        await put(engine, "a", old)
        brake = Brake(engine, step=4)
        generating = asyncio.create_task(collect(engine.generate([request])))
        await change_at(brake, engine, put(engine, "a", new))
        done = await generating
    model = merged(llama(), new, RANKS["a"])
    for place in range(2, 6):
        expected = logprobs_of(model, request, done[3, place])
        assert torch.allclose(done[3, place].logprobs, expected, atol=1e-4)


async def test_what_rests_of_one_set_is_not_used_by_another() -> None:
    weights = {name: adapters_for(llama(), RANKS[name], 1) for name in ("a", "b")}
    request = replace(ask(0), is_continued=True, adapters="a")
    async with running() as engine:
        for name in weights:
            await put(engine, name, weights[name])
        turn = next_turn(request, await collect(engine.generate([request])))
        other = await collect(engine.generate([replace(turn, adapters="b")]))
        assert all(done.cached_tokens < len(request.prompt_ids) + 1 for done in other.values())
        await put(engine, "b", weights["b"], version=1)
        same = await collect(engine.generate([turn]))
        assert all(done.cached_tokens > len(request.prompt_ids) for done in same.values())
        turn = next_turn(turn, same)
        await put(engine, "a", weights["a"], version=1)
        fresh = await collect(engine.generate([turn]))
        assert all(done.cached_tokens <= len(request.prompt_ids) for done in fresh.values())


async def test_removal_fails_the_requests_of_its_own_set() -> None:
    weights = {name: adapters_for(llama(), RANKS[name], 1) for name in ("a", "b")}
    requests = requests_of(["a", "b", "a"], max_tokens=30)
    async with running(max_rows=4) as engine:
        for name in weights:
            await put(engine, name, weights[name])
        expected = await collect(engine.generate(requests[1:2]))
        brake = Brake(engine, step=5)
        calls = [asyncio.create_task(collect(engine.generate([each]))) for each in requests]
        await change_at(brake, engine, engine.remove_adapters("a"))
        for call in (calls[0], calls[2]):
            with pytest.raises(AdaptersRemoved, match="'a' were removed"):
                await call
        assert_same(await calls[1], expected)
        await engine.resume()  # at a boundary: what has ended has left
        assert rows_of(engine) == 0
        with pytest.raises(ValueError, match="the engine has no adapters 'a'; put them first"):
            engine.generate(requests[:1])
        for name in ("a", ""):
            with pytest.raises(KeyError):
                await engine.remove_adapters(name)
        await engine.put_adapters("a", 0, adapters_for(llama(), 3), scale=1.0)
        assert await collect(engine.generate(requests[:1])), "another rank under the same name"


async def test_adapters_that_do_not_fit_are_refused_and_change_nothing() -> None:
    weights = adapters_for(llama(), RANKS["a"], 1)
    layer = "model.layers.0.mlp.up_proj"
    request = replace(ask(0), adapters="a")
    async with running() as engine:
        await put(engine, "a", weights)
        before = await collect(engine.generate([request]))
        wrong: list[tuple[Weights, str]] = [
            ({}, "of one rank"),
            ({n: w for n, w in weights.items() if n != up_of(layer)}, "missing offered"),
            ({**weights, down_of("model.no"): torch.zeros(2, 4)}, "no such linear layer"),
            ({**weights, down_of(layer): torch.zeros(3, 32)}, r"ranks \[2, 3\]"),
            (adapters_for(llama(), 4), "another rank, scale or other layers than before"),
            ({n: weights[n] for n in (down_of(layer), up_of(layer))}, "other layers than before"),
        ]
        for offered, message in wrong:
            with pytest.raises(WeightMismatch, match=message):
                await put(engine, "a", offered)
        with pytest.raises(ValueError, match="adapters need a name"):
            await engine.put_adapters("", 0, weights, scale=1.0)
        assert_same(await collect(engine.generate([request])), before)


@pytest.mark.parametrize("packed", [True, False])
def test_a_head_has_an_adapter(packed: bool) -> None:
    """A tied one, whose embedding stays; with layers that have none."""
    down = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    up = torch.randn(VOCABULARY, 3, generator=torch.Generator().manual_seed(1)) * 0.1
    ids = torch.arange(9)
    decoder = TorchDecoder(llama(), torch.device("cpu"), packed=packed)
    weights = {down_of("lm_head"): down, up_of("lm_head"): up}
    decoder.put_adapters("a", *decoder.weights.prepare_adapters("a", weights, 2.0))
    model = llama()
    with torch.inference_mode():
        hidden = model.model(input_ids=ids[None]).last_hidden_state[0]
        expected = model.lm_head(hidden) + 2.0 * hidden @ down.T @ up.T
        assert torch.allclose(decoder.score(ids[:1], ids[1:], "a"), expected[:-1], atol=1e-4)
        assert torch.allclose(
            decoder.score(ids[:1], ids[1:]), model.lm_head(hidden)[:-1], atol=1e-4
        )


PACKS_BFLOAT16 = pytest.mark.skipif(
    not can_pack_in(torch.bfloat16), reason="needs a CPU with AVX-512 or AVX-NE-CONVERT"
)


@pytest.mark.parametrize("packed", [pytest.param(True, marks=PACKS_BFLOAT16), False])
def test_a_bfloat16_model_takes_float32_adapters(packed: bool) -> None:
    def build() -> Any:
        return family_model("Qwen3", dtype=torch.bfloat16)

    weights = {
        name: adapters_for(build(), rank, rank, 0.1, head=True) for name, rank in RANKS.items()
    }
    decoder = TorchDecoder(build(), torch.device("cpu"), packed=packed)
    for name, rank in RANKS.items():
        adapters, prepared = decoder.weights.prepare_adapters(name, weights[name], ALPHA / rank)
        decoder.put_adapters(name, adapters, prepared)
    ids = torch.arange(12)
    with torch.inference_mode():
        names = ["", *RANKS]
        _, logits = decoder.prefill([ids] * 4, names)
        decoder.clear()
        for number, name in enumerate(names):
            _, alone = decoder.prefill([ids], [name])
            assert torch.allclose(logits[number], alone[0], atol=0.05)
            model = merged(build().float(), weights[name], RANKS[name]) if name else build()
            expected = model(input_ids=ids[None], use_cache=False).logits[0, -1].float()
            assert torch.allclose(logits[number], expected, atol=0.15)
            decoder.clear()


async def test_smollm2_samples_with_three_sets_at_once() -> None:
    def build() -> Any:
        return load_model("smollm2", dtype=torch.float32, seed=0)[0]

    weights = {name: adapters_for(build(), rank, rank, 0.03) for name, rank in RANKS.items()}
    requests = requests_of(["a", "", "b", "c"], temperature=0.0, max_tokens=12)
    async with running(build(), max_rows=16) as engine:
        for name in RANKS:
            await put(engine, name, weights[name])
        done = await collect(engine.generate(requests))
        texts = set()
        for request in requests:
            alone = await collect(engine.generate([request]))
            assert_same(alone, {key: each for key, each in done.items() if key in alone})
            texts.add(tuple(done[request.group, 0].token_ids.tolist()))
    assert len(texts) == 4
    for request in requests[1:3]:
        name = request.adapters
        model = merged(build(), weights[name], RANKS[name]) if name else build().double()
        made = done[request.group, 0]
        assert torch.allclose(made.logprobs, logprobs_of(model, request, made), atol=1e-3)
