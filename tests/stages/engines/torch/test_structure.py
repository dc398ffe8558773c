"""Responses with a structure: they have it, and their logprobs are those of the policy over the
tokens that may follow, in sampling and in training."""

from __future__ import annotations

import asyncio
import copy
import json
import re
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
import torch
from tensordict import TensorDict

from pipeline.data.columns import Packed
from stages.algorithms.policy_gradient.grpo import GRPO
from stages.engines.protocols import (
    Begun,
    Completion,
    GroupRequest,
    RequestRefused,
    ResponseFailed,
    SamplingParams,
)
from stages.engines.structure import Structure
from stages.engines.torch.model import token_logprobs
from stages.engines.torch.model.matchers import Matchers
from stages.engines.torch.train import TorchTrainEngine
from stages.model.load import tiny_model, tiny_tokenizer
from tests.api.policy.answers import PADDED, byte_model, byte_tokenizer
from tests.batches import stack
from tests.stages.engines.torch.test_rollout import Brake, collect, running

TOKENIZER = byte_tokenizer()
EOS = int(TOKENIZER.eos_token_id)
CHOICES = ["the thing", "the end", "a", "aé€", "a{b"]
SCHEMA = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": 3, "maximum": 99},
        "on": {"type": "boolean"},
    },
    "required": ["n", "on"],
    "additionalProperties": False,
}
COMPACT = {**SCHEMA, "x-guidance": {"whitespace_flexible": False}}
CHOICE = Structure("choice", json.dumps(CHOICES))
STRUCTURES = {
    "choice": CHOICE,
    "regex": Structure("regex", "[ab]{3}(the|ing)?€?"),
    "json_schema": Structure("json_schema", json.dumps(COMPACT)),
    "grammar": Structure("grammar", 'start: ("a" | "the ")+ "END"'),
}


def asked(group: int, structure: Structure | None, places: int = 4, **params: Any) -> GroupRequest:
    params = {"max_tokens": 60, "stop_token_ids": (EOS,), "structure": structure, **params}
    ids = torch.tensor(TOKENIZER(f"prompt {group}")["input_ids"])
    return GroupRequest(group, tuple(range(places)), ids, SamplingParams(**params), group)


def text_of(done: Completion) -> str:
    ids = done.token_ids.tolist()
    assert EOS not in ids[:-1], "no special token is inside"
    return str(TOKENIZER.decode(ids[:-1] if ids[-1] == EOS else ids))


def has_structure(text: str, structure: Structure) -> bool:
    match structure.kind:
        case "choice":
            return text in CHOICES
        case "regex":
            return re.fullmatch(structure.text, text) is not None
        case "grammar":
            return re.fullmatch("(a|the )+END", text) is not None
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


def bytes_of(token: int) -> bytes:
    from tests.api.policy.answers import BYTES

    return bytes(BYTES[character] for character in TOKENIZER.convert_ids_to_tokens(token))


def allowed_by_trying(begun: bytes) -> list[int]:
    """The tokens after which the text can become one of CHOICES; its end where it is one."""
    choices = [choice.encode() for choice in CHOICES]
    tokens = [EOS] if begun in choices else []
    for token in range(1, len(TOKENIZER)):
        if any(choice.startswith(begun + bytes_of(token)) for choice in choices):
            tokens.append(token)
    return tokens


@torch.no_grad()
def logprobs_by_trying(model: Any, request: GroupRequest, done: Completion) -> list[float]:
    """In float64."""
    logits = model(torch.cat([request.prompt_ids, done.token_ids])[None]).logits[0].double()
    logits = logits[len(request.prompt_ids) - 1 : -1] / (request.params.temperature or 1.0)
    begun = b""
    logprobs = []
    for token, row in zip(done.token_ids.tolist(), logits, strict=True):
        allowed = allowed_by_trying(begun)
        distribution = row[allowed].softmax(0)
        assert float(distribution.sum()) == pytest.approx(1.0, abs=1e-12)
        logprobs.append(float(distribution[allowed.index(token)].log()))
        begun += bytes_of(token) if token != EOS else b""
    return logprobs


async def test_logprobs_are_those_over_the_tokens_that_may_follow() -> None:
    model = byte_model(1, flat=0.1)
    exact = copy.deepcopy(model).double()
    requests = [asked(n, CHOICE, 12, temperature=t) for n, t in enumerate((1.0, 0.6, 0.0))]
    async with running(model, TOKENIZER, max_rows=8) as engine:
        completions = await collect(engine.generate(requests))
    for done in completions.values():
        assert text_of(done) in CHOICES
        assert done.finish_reason == "stop"
        expected = logprobs_by_trying(exact, requests[done.group], done)
        assert done.logprobs.tolist() == pytest.approx(expected, abs=2e-5)
    texts = {text_of(done) for done in completions.values()}
    assert len(texts) > 2, "they are sampled"


@pytest.mark.parametrize("accelerated", [False, True])
async def test_rows_with_structures_and_without_decode_together(accelerated: bool) -> None:
    structures = list(STRUCTURES.values())
    plain = [asked(9, None, max_tokens=20), asked(8, None, stop=("e",))]
    structured = [asked(n, structure) for n, structure in enumerate(structures)]
    options = {"max_rows": 11, "accelerated": accelerated}
    async with running(byte_model(2, flat=0.1), TOKENIZER, **options) as engine:
        alone = await collect(engine.generate(plain))
        together = await collect(engine.generate([plain[0], *structured, plain[1]]))
    for done in together.values():
        if done.group < len(structures):
            assert done.finish_reason == "stop"
            assert has_structure(text_of(done), structures[done.group]), text_of(done)
        else:
            assert torch.equal(done.token_ids, alone[done.group, done.place].token_ids)


async def test_a_response_goes_on_after_a_cut_as_it_would_have() -> None:
    request = asked(3, STRUCTURES["json_schema"])
    async with running(byte_model(3, flat=0.1), TOKENIZER) as engine:
        whole = await collect(engine.generate([request]))
        for keeps in (True, False):
            parked = replace(request, is_continued=keeps)
            parked = replace(parked, params=replace(request.params, budget=4))
            ended: dict[tuple[int, int], Completion] = {}
            while len(ended) < 4:
                done = await collect(engine.generate([parked]))
                cut = {n[1]: each for n, each in done.items() if each.finish_reason == "cut"}
                ended |= {n: each for n, each in done.items() if n[1] not in cut}
                begun = {
                    place: Begun(each.token_ids, each.logprobs, each.versions)
                    for place, each in cut.items()
                }
                parked = replace(parked, places=tuple(begun), begun=begun)
            for name, done_whole in whole.items():
                assert torch.equal(ended[name].token_ids, done_whole.token_ids)
                assert ended[name].finish_reason == done_whole.finish_reason


async def test_a_response_keeps_its_structure_over_a_swap() -> None:
    newer = {name: value.clone() for name, value in byte_model(5, flat=0.1).named_parameters()}
    async with running(byte_model(4, flat=0.1), TOKENIZER) as engine:
        brake = Brake(engine, 3)
        stream = asyncio.create_task(
            collect(engine.generate([asked(0, STRUCTURES["json_schema"])]))
        )
        await brake.pause()
        await engine.load_weights(7, newer)
        await engine.resume()
        completions = await stream
    assert any(len(done.versions) == 2 for done in completions.values())
    for done in completions.values():
        assert has_structure(text_of(done), STRUCTURES["json_schema"])


async def test_other_parameters_hold_too() -> None:
    """Turns before are not looked at; an end comes after min_tokens, where the text may go on."""
    regex = Structure("regex", "[ab]+")
    turn = TOKENIZER("{}")["input_ids"]
    begun = Begun(torch.tensor(turn), torch.zeros(2), ((0, 2),), turn_start=2)
    request = asked(0, regex, 8, max_tokens=9, min_tokens=4, logit_bias=((EOS, 9.0),))
    request = replace(request, begun={place: begun for place in request.places})
    never_ends = asked(1, regex, 2, max_tokens=12, stop_token_ids=())
    stops = asked(2, regex, 8, stop=("ab",))
    async with running(byte_model(6, flat=0.1), TOKENIZER) as engine:
        completions = await collect(engine.generate([request, never_ends, stops]))
    for (group, _), done in completions.items():
        ids = done.token_ids.tolist()
        if group == 0:
            assert ids[:2] == turn
            assert EOS not in ids[2:6]
            ids = ids[2:]
        elif group == 1:
            assert (done.finish_reason, len(ids)) == ("length", 12)
        text = str(TOKENIZER.decode([token for token in ids if token != EOS]))
        assert re.fullmatch(regex.text, text)
        assert group != 2 or ids[-1] == EOS or text.endswith("ab") or len(ids) == 60


async def test_a_response_that_cannot_go_on_fails_alone() -> None:
    """The tokens of `tiny` spell no brace."""
    json_object = Structure("json_schema", '{"type": "object"}')
    wrong = Structure("regex", "(")
    model = tiny_model(0)
    async with running(model, tiny_tokenizer()) as engine:
        ids = torch.tensor([5, 6])
        good = GroupRequest(0, (0,), ids, SamplingParams(3), 0)
        going = asyncio.create_task(collect(engine.generate([good])))
        for structure, reason in ((json_object, RequestRefused), (wrong, ValueError)):
            params = SamplingParams(5, structure=structure, stop_token_ids=(1,))
            with pytest.raises(ResponseFailed) as raised:
                await collect(engine.generate([GroupRequest(1, (0,), ids, params, 0)]))
            assert isinstance(raised.value.__cause__, reason)
        assert len((await going)[0, 0].token_ids) == 3


async def sampled(model: Any, structure: Structure) -> TensorDict:
    """A train batch of two groups."""
    requests = [asked(n, structure, 4) for n in (1, 2)]
    async with running(copy.deepcopy(model), TOKENIZER) as engine:
        completions = await collect(engine.generate(requests))
    rows = [
        {
            "group": torch.tensor(group),
            "place": torch.tensor(place),
            "prompt_ids": requests[group - 1].prompt_ids,
            "response_ids": done.token_ids,
            "rollout_logprobs": done.logprobs,
            "ref_logprobs": done.logprobs,
            "advantage": torch.tensor(1.0 if place % 2 else -1.0),
        }
        for (group, place), done in sorted(completions.items())
    ]
    return stack(rows)


def train_engine(model: Any, structure: Structure | None, **options: Any) -> TorchTrainEngine:
    matchers = Matchers(TOKENIZER, PADDED)

    def masks_of(response: torch.Tensor) -> torch.Tensor:
        assert structure is not None
        return matchers.masks(structure, (EOS,), response)

    masks = {} if structure is None else {"masks_of": masks_of}
    return TorchTrainEngine(model, learning_rate=1e-3, total_steps=9, **masks, **options)


@pytest.mark.parametrize("kind", STRUCTURES)
@pytest.mark.parametrize("budget", [None, 40])
async def test_the_trainer_has_the_distribution_of_the_rollout(
    kind: str, budget: int | None
) -> None:
    structure = STRUCTURES[kind]
    model = byte_model(7, flat=0.1)
    batch = await sampled(model, structure)
    engine = train_engine(copy.deepcopy(model), structure, token_budget=budget, vocabulary=300)
    recorded = Packed.of(batch["rollout_logprobs"]).values
    logprobs = Packed.of(engine.logprobs(batch)).values
    torch.testing.assert_close(logprobs, recorded, atol=2e-5, rtol=0)
    step = engine.train_batch(batch, GRPO())
    assert step["gap_max"] < 2e-5, "importance ratios are 1"
    unmasked = train_engine(model, None).train_batch(batch, GRPO())
    assert unmasked["gap_max"] > 0.1
    assert step["entropy"] < unmasked["entropy"]


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("chunk", [2, 1000])
def test_gradients_are_those_of_the_masked_softmax(
    softcap: float | None, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_logprobs, "LOGITS_BYTES", chunk * 4 * 11)
    torch.manual_seed(0)
    hidden = torch.randn(5, 16, requires_grad=True)
    weight = (3 * torch.randn(13, 16)).requires_grad_()
    source = torch.tensor([0, 0, 1, 3, 2, 4])
    targets = torch.tensor([5, 1, 0, 2, 7, 9])
    allowed = torch.rand(5, 16) < 0.4
    allowed[source, targets] = True
    masks = (allowed.view(5, 2, 8) * 2 ** torch.arange(8)).sum(-1).to(torch.uint8)
    arguments = (weight, None, source, targets, 0.7, True, softcap, 11, masks)
    logprobs, entropy = token_logprobs.TokenLogprobs.apply(hidden, *arguments)
    logprobs.square().sum().backward()
    gradients = hidden.grad, weight.grad
    hidden.grad = weight.grad = None
    logits = hidden @ weight[:11].T
    logits = logits if softcap is None else softcap * (logits / softcap).tanh()
    expected = (logits / 0.7).masked_fill(~allowed[:, :11], -torch.inf).log_softmax(-1)
    torch.testing.assert_close(expected.exp().sum(-1), torch.ones(5))
    expected[source, targets].square().sum().backward()
    torch.testing.assert_close(logprobs, expected[source, targets])
    terms = (expected.exp() * expected).nan_to_num(0.0)
    torch.testing.assert_close(entropy, -terms.sum(-1)[source])
    for one, other in zip(gradients, (hidden.grad, weight.grad), strict=True):
        torch.testing.assert_close(one, other, atol=2e-4, rtol=1e-4)
