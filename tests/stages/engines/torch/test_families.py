"""Both torch engines against transformers' plain eager forward, for every family: past its window,
in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.engines.families import (
    CONTEXT,
    FAMILIES,
    ROPE_CHANGE,
    VOCABULARY,
    WINDOW,
    config_of,
    model_of,
)
from benchmarks.engines.models import batch_of
from stages.engines.plans import Piece
from stages.engines.torch.decoding.decoder import TorchDecoder
from stages.engines.torch.model.packing import Rows
from stages.engines.torch.train import TorchTrainEngine
from tests.stages.engines.contract_train import make_batch

LIMIT = 2e-4  # of logprobs in float32, with experts and four layers of large weights


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


LONGEST = 3 * WINDOW + 13  # tokens past every window, and past the length at which rope changes


def plain_of(family: str) -> Any:
    """transformers' model; one with longrope uses its long factors for sequences of any length, as
    a run does whose rows may be longer than their change."""
    rope = dict(getattr(config_of(family).get_text_config(), "rope_parameters", None) or {})
    long = (
        {"rope_parameters": rope | {"short_factor": rope["long_factor"]}}
        if "long_factor" in rope
        else {}
    )
    model = model_of(family, **long)
    model.set_attn_implementation("eager")
    return model


def plain_logprobs(model: Any, ids: torch.Tensor, first: int) -> torch.Tensor:
    """Logprobs [n - first] of the tokens of ``ids`` from ``first`` on."""
    logits = model(input_ids=ids[None], use_cache=False).logits[0].float()
    return logits.log_softmax(-1)[first - 1 : -1].gather(1, ids[first:, None])[:, 0]


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_decoder_has_the_plain_logprobs_past_windows(family: str, static: bool) -> None:
    plain = plain_of(family)
    length = LONGEST
    ids = torch.randint(VOCABULARY, (2, length), generator=torch.Generator().manual_seed(1))
    ids[1, :21] = ids[0, :21]  # two rows of one prompt
    decoder = TorchDecoder(model_of(family), torch.device("cpu"), static=static, context=LONGEST)
    with torch.inference_mode():
        (prompt, short), first = decoder.prefill([ids[0, :21], ids[0, :3]])
        decoder.join(prompt)
        decoder.join(prompt)
        decoder.join(short)
        found = [first[[0, 0]].log_softmax(-1)]
        for at in range(21, length - 1):
            fed = [*ids[:, at].tolist(), int(ids[0, at - 18])]
            found.append(decoder.decode(fed)[:2].log_softmax(-1).clone())
        decoded = torch.stack(found, 1).gather(2, ids[:, 21:, None])[..., 0]
        scored = (
            decoder.score(ids[0, :5], ids[0, 5:]).log_softmax(-1).gather(1, ids[0, 5:, None])[:, 0]
        )
        for row in range(2):
            assert float((decoded[row] - plain_logprobs(plain, ids[row], 21)).abs().max()) < LIMIT
        assert float((scored - plain_logprobs(plain, ids[0], 5)).abs().max()) < LIMIT


@pytest.mark.parametrize("family", FAMILIES)
def test_the_trainer_has_the_plain_logprobs_and_gradients_past_windows(family: str) -> None:
    plain = plain_of(family)
    length = LONGEST
    batch = make_batch([(19, (length - 19, length - 25, 4)), (5, (length - 5,))], seed=3)
    for name in ("prompt_ids", "response_ids"):
        batch[name] = torch.nested.nested_tensor(
            [x % VOCABULARY for x in batch[name].unbind()], layout=torch.jagged
        )
    engine = TorchTrainEngine(
        model_of(family),
        learning_rate=1e-5,
        total_steps=1,
        threads=1,
        device="cpu",
        context=LONGEST,
    )
    columns = (
        batch["prompt_ids"].unbind(),
        batch["response_ids"].unbind(),
        engine.logprobs(batch).unbind(),
    )
    total = torch.zeros(())
    for prompt, response, found in zip(*columns, strict=True):
        expected = plain_logprobs(plain, torch.cat([prompt, response]), len(prompt))
        assert float((found - expected).detach().abs().max()) < LIMIT
        total = total + expected.sum()
    total.backward()
    rows = Rows.of(batch, engine.device)
    pieces = [Piece(at, tuple(range(len(group.rows)))) for at, group in enumerate(rows.groups)]
    engine.packed_model.outputs(rows.pack(pieces))[0].sum().backward()
    expected_by_name = dict(plain.named_parameters())
    for name, parameter in engine.model.named_parameters():
        want = expected_by_name[name].grad
        if want is None or not want.abs().max():
            assert parameter.grad is None or float(parameter.grad.abs().max()) < 1e-4, name
            continue
        assert parameter.grad is not None, name
        assert float((parameter.grad - want).abs().max() / want.abs().max()) < 2e-3, name


@pytest.mark.parametrize("context", [None, ROPE_CHANGE, ROPE_CHANGE + 1])
def test_longrope_is_chosen_by_the_longest_sequence_not_by_each(context: int | None) -> None:
    """A short sequence has the same logprobs alone and beside a long one, by either engine, where
    long ones are possible; where they are not, those of transformers, and a long one is refused."""
    prompt = torch.arange(1, 6)
    tokens = torch.arange(7, 15)
    short = [(prompt, tokens)]
    long = [(prompt, tokens), (prompt, torch.arange(LONGEST) % VOCABULARY)]
    is_long = context is not None and context > ROPE_CHANGE
    plain = plain_of("Phi-3 longrope") if is_long else model_of("Phi-3 longrope")
    with torch.no_grad():
        expected = plain_logprobs(plain, torch.cat([prompt, tokens]), len(prompt))
    model = model_of("Phi-3 longrope")
    options = {"learning_rate": 1e-5, "total_steps": 1, "device": "cpu"}
    engine = TorchTrainEngine(model, **options, context=context)
    alone = engine.logprobs(batch_of(short, torch.zeros(len(tokens)))).unbind()[0]
    assert float((alone - expected).abs().max()) < LIMIT
    decoder = TorchDecoder(model_of("Phi-3 longrope"), torch.device("cpu"), context=context)
    with torch.inference_mode():
        decoder.prefill([torch.arange(1, min(LONGEST, decoder.max_context))])  # in the same batch
        scored = decoder.score(prompt, tokens).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    assert float((scored - expected).abs().max()) < LIMIT
    assert decoder.max_context == (CONTEXT if is_long else ROPE_CHANGE)
    beside = batch_of(long, torch.zeros(len(tokens) + LONGEST))
    if is_long:
        assert float((engine.logprobs(beside).unbind()[0] - alone).abs().max()) < 1e-5
    else:
        with pytest.raises(NotImplementedError, match="where rope changes at 32"):
            engine.logprobs(beside)
