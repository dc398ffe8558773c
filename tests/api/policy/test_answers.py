"""Answers of a served checkpoint whose tokens are bytes, beside what the tokenizer's bytes and
float64 logits say."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from api.policy.pieces import BYTES, ChoiceText, Pieces
from stages.engines.protocols import Completion, ResponseFailed, Token
from stages.engines.torch.decoding.batch import ContinuousBatch
from tests.api.policy.answers import (
    CHAT,
    COMPLETIONS,
    EOS,
    WORDS,
    Client,
    byte_model,
    byte_tokenizer,
    checkpoint,
)

TOKENIZER = byte_tokenizer()
RAW = [
    b"",
    *(bytes([byte]) for byte in BYTES.values()),
    *(bytes(BYTES[one] for one in word) for word in WORDS),
]
ID_OF = {raw: number for number, raw in enumerate(RAW)}
KNOWN = len(RAW)
TEXTS = ["€", "é", "😀", "\ufffd", "END", "a", " the", "ing", "E", "EN", "👩‍👧", "\n"]
STOPS = ["END", "€", "\ufffd", "😀b", "EEN", "the\ufffd"]


def ids_of(text: str, words: bool) -> list[int]:
    """Tokens of ``text``: its bytes one by one, or WORDS where they fit."""
    data = text.encode()
    ids = list[int]()
    while data:
        longest = max(
            (raw for raw in RAW if raw and data.startswith(raw) and (words or len(raw) == 1)),
            key=len,
        )
        ids.append(ID_OF[longest])
        data = data[len(longest) :]
    return ids


def pieces_of(
    ids: list[int], stops: list[str], *, streamed: bool
) -> tuple[str, list[tuple[int, bytes, int]], str]:
    """The text, the tokens with bytes and offsets, and the reason of a choice with these tokens."""
    choice = ChoiceText(0, TOKENIZER, Pieces(TOKENIZER), stops)
    done = Completion(0, 0, torch.tensor(ids), torch.zeros(len(ids)), ((0, len(ids)),), "length")
    text = ""
    tokens = list[tuple[int, bytes, int]]()
    for item in [*([Token(0, 0, one, -1.0, 0) for one in ids] if streamed else []), done]:
        if choice.reason is None:
            choice.add(item)
            if streamed or choice.reason:
                new, placed = choice.take()
                text += new
                tokens += [(one.token.token_id, one.own, one.offset) for one in placed]
    assert choice.reason is not None
    return text, tokens, choice.reason


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    texts=st.lists(st.sampled_from(TEXTS), min_size=1, max_size=12),
    words=st.booleans(),
    special=st.booleans(),
    stops=st.lists(st.sampled_from(STOPS), max_size=2),
)
def test_bytes_and_offsets_are_those_of_the_text(
    texts: list[str], words: bool, special: bool, stops: list[str]
) -> None:
    whole = "".join(texts)
    ids = ids_of(whole, words) + [ID_OF[b""]] * special
    text, tokens, reason = pieces_of(ids, stops, streamed=False)
    assert pieces_of(ids, stops, streamed=True) == (text, tokens, reason), "a stream has the same"
    ends = [whole.index(stop) for stop in stops if stop in whole]
    assert (text, reason) == (whole[: min(ends, default=None)], "stop" if ends else "length")
    made = b"".join(own for _, own, _ in tokens)
    assert [own for _, own, _ in tokens] == [RAW[token] for token, _, _ in tokens]
    assert made.startswith(text.encode())
    assert ends or made == text.encode()
    for number, (_, _, offset) in enumerate(tokens):
        before = b"".join(RAW[token] for token, _, _ in tokens[:number])
        assert offset == min(len(before.decode(errors="ignore")), len(text))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(ids=st.lists(st.integers(0, KNOWN - 1), min_size=1, max_size=40))
def test_bytes_that_are_no_text_are_those_of_the_tokens(ids: list[int]) -> None:
    text, tokens, _ = pieces_of(ids, [], streamed=True)
    assert text == TOKENIZER.decode(ids, skip_special_tokens=True)
    assert (text, tokens) == pieces_of(ids, [], streamed=False)[:2]
    assert [own for _, own, _ in tokens] == [RAW[token] for token in ids]
    offsets = [offset for _, _, offset in tokens]
    assert offsets == sorted(offsets)
    assert offsets[0] == 0
    assert offsets[-1] <= len(text)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[Client, Any]]:
    """A client, and the model in float64. Its padded tokens would be likely."""
    model = byte_model(5)
    with torch.no_grad():
        model.lm_head.weight[KNOWN:] *= 3
    with checkpoint(tmp_path / "model", model, TOKENIZER) as client:
        yield client, copy.deepcopy(model).double()
        await client.policies.close()


def logprobs_of(model: Any, prompt: list[int], ids: list[int], temperature: float) -> torch.Tensor:
    """float64 [T, KNOWN]."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1, :KNOWN]
    return (logits / (temperature or 1.0)).log_softmax(-1)


def id_of_name(name: str) -> int:
    if name.startswith("bytes:"):
        return ID_OF[
            name.removeprefix("bytes:").encode().decode("unicode_escape").encode("latin-1")
        ]
    return ID_OF[b"" if name == EOS else name.encode()]


@pytest.mark.parametrize("temperature", [0.0, 0.02, 1.0])
async def test_all_logprobs_are_right_and_none_is_lost(
    served: tuple[Client, Any], temperature: float
) -> None:
    """At the low temperature most probabilities underflow; no padded token is named."""
    client, model = served
    prompt = ids_of("hi €", words=False)
    asked: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": 24,
        "temperature": temperature,
        "seed": 4,
    }
    (choice,) = (await client.whole(COMPLETIONS, **asked, logprobs=20))["choices"]
    found = choice["logprobs"]
    ids = [id_of_name(name) for name in found["tokens"]]
    right = logprobs_of(model, prompt, ids, temperature)
    tolerance = 1e-3 / (temperature or 1.0)
    for number, (token, likeliest) in enumerate(zip(ids, found["top_logprobs"], strict=True)):
        wanted = right[number].topk(20)
        named = {id_of_name(name): value for name, value in likeliest.items()}
        assert set(named) >= set(wanted.indices[:18].tolist()), "ties aside"
        assert len(named) == len(likeliest) == (20 if token in wanted.indices.tolist() else 21)
        assert max(named) < KNOWN
        for name, value in named.items():
            assert value == pytest.approx(float(right[number, name]), abs=tolerance)
        assert likeliest[found["tokens"][number]] == found["token_logprobs"][number]
    merged: dict[str, list[Any]] = {}
    for chunk in await client.stream(COMPLETIONS, **asked, logprobs=20):
        for key, values in chunk["choices"][0]["logprobs"].items():
            merged.setdefault(key, []).extend(values)
    assert merged == found, "a stream has the same"


async def test_a_chat_has_the_same_logprobs_and_real_bytes(served: tuple[Client, Any]) -> None:
    client, model = served
    asked: dict[str, Any] = {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 20,
        "seed": 1,
    }
    whole = (await client.whole(CHAT, **asked, logprobs=True, top_logprobs=20))["choices"][0]
    content = whole["logprobs"]["content"]
    ids = [ID_OF[bytes(one["bytes"])] for one in content]
    assert whole["message"]["content"] == TOKENIZER.decode(ids, skip_special_tokens=True)
    right = logprobs_of(model, ids_of("hi=", words=False), ids, 1.0)
    for number, one in enumerate(content):
        assert one["logprob"] == pytest.approx(float(right[number, ids[number]]), abs=1e-3)
        others = [ID_OF[bytes(other["bytes"])] for other in one["top_logprobs"]]
        assert len(set(others)) == 20
        values = [other["logprob"] for other in one["top_logprobs"]]
        assert values == sorted(values, reverse=True)
        assert values == pytest.approx(right[number, others].tolist(), abs=1e-3)
    parts = [
        chunk["choices"][0]
        for chunk in await client.stream(CHAT, **asked, logprobs=True, top_logprobs=20)
    ]
    assert [one for part in parts for one in part["logprobs"]["content"]] == content
    assert "".join(part["delta"]["content"] for part in parts) == whole["message"]["content"]


async def test_a_response_does_not_end_inside_a_character(served: tuple[Client, Any]) -> None:
    """At any stop string that is a broken character: only where the text has one."""
    client, _ = served
    asked: dict[str, Any] = {"prompt": "hi", "max_tokens": 60, "temperature": 1.5}
    for seed in range(20):
        (free,) = (await client.whole(COMPLETIONS, **asked, seed=seed))["choices"]
        for stop in ("\ufffd", free["text"][20:22] or "a"):
            (choice,) = (await client.whole(COMPLETIONS, **asked, seed=seed, stop=stop))["choices"]
            assert choice["text"] == free["text"].partition(stop)[0]
            assert choice["finish_reason"] == (
                "stop" if stop in free["text"] else free["finish_reason"]
            )


async def test_a_temperature_of_nearly_zero_is_greedy_and_its_logprobs_are_numbers(
    served: tuple[Client, Any],
) -> None:
    client, _ = served
    asked: dict[str, Any] = {"prompt": "hi", "max_tokens": 9, "logprobs": 20}
    (greedy,) = (await client.whole(COMPLETIONS, **asked, temperature=0))["choices"]
    for change in (
        {"temperature": 1e-30},
        {"temperature": 1.0, "top_p": 1e-30},
        {"temperature": 100, "top_k": 1},
    ):
        (choice,) = (await client.whole(COMPLETIONS, **asked, **change))["choices"]
        assert choice["text"] == greedy["text"]


async def test_a_default_of_tokens_is_shortened_at_the_end_of_the_context(
    served: tuple[Client, Any],
) -> None:
    client, _ = served
    for path, field in ((COMPLETIONS, "prompt"), (CHAT, "messages")):
        for length in (250, 255):

            def prompt(length: int, field: str = field) -> dict[str, Any]:
                text = "a" * (length - (field == "messages"))
                return {field: text if field == "prompt" else [{"role": "user", "content": text}]}

            answer = await client.whole(path, **prompt(length), seed=1)
            assert answer["usage"]["completion_tokens"] <= 256 - length
            assert answer["usage"]["prompt_tokens"] == length
            refused = await client.problem(path, **prompt(length), max_tokens=7)
            assert (refused.status, refused.details.field) == (400, "max_tokens")
        refused = await client.problem(path, **prompt(256))
        assert (refused.status, refused.details.field) == (400, field)


async def test_a_fault_of_one_request_ends_no_other(
    served: tuple[Client, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, _ = served
    asked: dict[str, Any] = {"max_tokens": 40, "logprobs": 2}

    async def all_of_them(bad: bool) -> list[Any]:
        requests = [
            client.whole(COMPLETIONS, prompt=f"{seed} is", seed=seed, **asked) for seed in range(20)
        ]
        if bad:
            requests.insert(9, client.problem(COMPLETIONS, prompt="bad", seed=666, **asked))
        return await asyncio.gather(*requests)

    def tokens_of(answers: list[Any]) -> list[Any]:
        choices = [answer["choices"][0] for answer in answers]
        return [
            (choice["text"], choice["finish_reason"], choice["logprobs"]["tokens"])
            for choice in choices
        ]

    undisturbed = tokens_of(await all_of_them(bad=False))
    extend = ContinuousBatch._extend

    def fails(self: ContinuousBatch, row: Any, made: Any) -> Token:
        if row.request.seed == 666 and len(row.tokens) == 7:
            raise ArithmeticError("a fault")
        return extend(self, row, made)

    monkeypatch.setattr(ContinuousBatch, "_extend", fails)
    answers = await all_of_them(bad=True)
    problem = answers.pop(9)
    assert (problem.status, problem.details.type) == (500, "urn:asyncdock:response")
    assert "ArithmeticError('a fault')" in problem.details.detail
    assert isinstance(problem.__cause__, ResponseFailed)
    assert tokens_of(answers) == undisturbed
    events = await client.stream(COMPLETIONS, prompt="bad", seed=666, **asked)
    assert events[-1]["error"]["type"] == "InternalServerError"
    assert len(events) > 1
