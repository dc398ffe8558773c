"""vLLM's fields of requests, at a served checkpoint: token ids, prompts, ends of responses, usage."""

from __future__ import annotations

import copy
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from api.policy.handler import respond
from api.policy.latency import Latencies
from api.schemas.completions import REQUESTS
from tests.api.policy.answers import (
    CHAT,
    COMPLETIONS,
    EOS,
    Client,
    byte_model,
    byte_tokenizer,
    checkpoint,
)

TOKENIZER = byte_tokenizer()
EOS_ID = int(TOKENIZER.eos_token_id)
PROMPT = "hi there"
MESSAGES = [{"role": "user", "content": "hi", "colour": "an unknown field"}]


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[Client, Any]]:
    """A client, and the model in float64."""
    model = byte_model(5)
    with checkpoint(tmp_path / "model", model, TOKENIZER) as client:
        yield client, copy.deepcopy(model).double()
        await client.policies.close()


def ids_of(text: str) -> list[int]:
    return TOKENIZER(text)["input_ids"]


@torch.no_grad()
def logprobs_of(model: Any, ids: list[int]) -> torch.Tensor:
    """float64 [T - 1, V] of the tokens after the first one."""
    logits = model(torch.tensor([ids])).logits[0, :-1, : len(TOKENIZER)]
    return logits.log_softmax(-1)


async def choice_of(client: Client, path: str = COMPLETIONS, **request: Any) -> dict[str, Any]:
    if path == COMPLETIONS:
        request.setdefault("prompt", PROMPT)
    (choice,) = (await client.whole(path, **{"seed": 1, "max_tokens": 12, **request}))["choices"]
    return choice


async def test_token_ids_come_with_their_prompt(served: tuple[Client, Any]) -> None:
    client, _ = served
    asked: dict[str, Any] = {"max_tokens": 12, "seed": 4, "return_token_ids": True}
    whole = await client.whole(COMPLETIONS, prompt=[ids_of(PROMPT), ids_of("ab")], n=2, **asked)
    assert [choice["prompt_token_ids"] for choice in whole["choices"]] == [
        *[ids_of(PROMPT)] * 2,
        *[ids_of("ab")] * 2,
    ]
    streamed: dict[int, list[int]] = {}
    prompts: dict[int, list[int]] = {}
    for part in await client.stream(
        COMPLETIONS, prompt=[ids_of(PROMPT), ids_of("ab")], n=2, **asked
    ):
        for choice in part["choices"]:
            streamed.setdefault(choice["index"], []).extend(choice["token_ids"])
            if "prompt_token_ids" in choice:
                assert choice["index"] not in prompts, "in its first part alone"
                prompts[choice["index"]] = choice["prompt_token_ids"]
    for choice in whole["choices"]:
        assert choice["token_ids"] == streamed[choice["index"]]
        assert choice["prompt_token_ids"] == prompts[choice["index"]]
        assert TOKENIZER.decode(choice["token_ids"], skip_special_tokens=True) == choice["text"]
    chat = await client.whole(CHAT, messages=MESSAGES, **asked)
    assert chat["prompt_token_ids"] == ids_of("hi=")
    parts = await client.stream(CHAT, messages=MESSAGES, **asked)
    assert parts[0]["prompt_token_ids"] == ids_of("hi=")
    ids = [token for part in parts for token in part["choices"][0]["token_ids"]]
    assert ids == chat["choices"][0]["token_ids"]
    plain = await choice_of(client)
    assert (plain["token_ids"], plain["prompt_token_ids"]) == (None, None)


async def test_prompts_are_cut_and_continued_as_asked(served: tuple[Client, Any]) -> None:
    client, _ = served
    for side, ids in (("right", [1, 2, 3]), ("left", [3, 4, 5]), (None, [3, 4, 5])):
        asked = {"truncate_prompt_tokens": 3, "truncation_side": side, "return_token_ids": True}
        choice = await choice_of(client, prompt=[1, 2, 3, 4, 5], **asked)
        assert choice["prompt_token_ids"] == ids
    fits = await choice_of(client, prompt=[7] * 300, truncate_prompt_tokens=-1, max_tokens=6)
    assert fits["finish_reason"] in ("stop", "length")
    said = [*MESSAGES, {"role": "assistant", "content": "no"}]
    for options, text in (
        ({}, "hino="),
        ({"add_generation_prompt": False}, "hino"),
        ({"continue_final_message": True}, "hino"),
    ):
        chat = await client.whole(CHAT, messages=said, return_token_ids=True, **options)
        assert chat["prompt_token_ids"] == ids_of(text)


async def test_logprobs_of_a_prompt_are_those_of_the_model(served: tuple[Client, Any]) -> None:
    client, model = served
    ids = ids_of(PROMPT)
    right = logprobs_of(model, ids)
    for path, request in (
        (COMPLETIONS, {"prompt": PROMPT}),
        (CHAT, {"messages": [{"role": "user", "content": PROMPT[:-1]}]}),
    ):
        if path == CHAT:
            ids = ids_of(PROMPT[:-1] + "=")
            right = logprobs_of(model, ids)
        answer = await client.whole(path, **request, prompt_logprobs=2, max_tokens=3)
        holder = answer if path == CHAT else answer["choices"][0]
        first, *positions = holder["prompt_logprobs"]
        assert first is None
        for row, token, position in zip(right, ids[1:], positions, strict=True):
            assert {*position} >= {str(token), *map(str, row.topk(2).indices.tolist())}
            for number, entry in position.items():
                assert entry["logprob"] == pytest.approx(float(row[int(number)]), abs=1e-3)
                assert entry["rank"] == int((row > row[int(number)]).sum()) + 1
            assert position[str(token)]["decoded_token"] == TOKENIZER.decode([token])


@pytest.mark.parametrize("logprobs", [0, 3])
async def test_an_echo_has_the_logprobs_of_both(served: tuple[Client, Any], logprobs: int) -> None:
    client, model = served
    asked: dict[str, Any] = {"prompt": PROMPT, "echo": True, "logprobs": logprobs, "seed": 1}
    choice = await choice_of(client, **asked, return_token_ids=True)
    assert choice["text"].startswith(PROMPT)
    found = choice["logprobs"]
    right = logprobs_of(model, ids_of(PROMPT) + choice["token_ids"])
    tokens = torch.tensor(ids_of(PROMPT) + choice["token_ids"])[1:, None]
    assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
    assert found["token_logprobs"][1:] == pytest.approx(
        right.gather(1, tokens)[:, 0].tolist(), abs=1e-3
    )
    assert {len(likeliest) for likeliest in found["top_logprobs"][1:]} <= {
        max(1, logprobs),
        logprobs + 1,
    }
    assert found["text_offset"][: len(PROMPT) + 1] == list(range(len(PROMPT) + 1))
    merged: dict[str, list[Any]] = {}
    text = ""
    for part in await client.stream(COMPLETIONS, **asked, max_tokens=12):
        text += part["choices"][0]["text"]
        for key, values in part["choices"][0]["logprobs"].items():
            merged.setdefault(key, []).extend(values)
    assert (text, merged) == (choice["text"], found), "a stream has the same"
    only = await choice_of(client, **{**asked, "max_tokens": 0})
    assert (only["text"], only["versions"], only["finish_reason"]) == (PROMPT, [], "length")
    assert only["logprobs"]["token_logprobs"] == found["token_logprobs"][: len(PROMPT)]
    for more in ({}, {"logprobs": logprobs}):
        special = await choice_of(client, prompt=[EOS_ID, 70], echo=True, max_tokens=0, **more)
        assert special["text"] == EOS + TOKENIZER.decode([70]), "it was said"


async def test_named_tokens_have_logprobs_whatever_may_be_made(served: tuple[Client, Any]) -> None:
    client, model = served
    asked: dict[str, Any] = {"allowed_token_ids": [42], "logprob_token_ids": [50, 60, 50]}
    asked |= {"return_tokens_as_token_ids": True, "max_tokens": 1}
    found = (await choice_of(client, logprobs=5, **asked))["logprobs"]
    right = logprobs_of(model, [*ids_of(PROMPT), 42])[-1]
    assert found["tokens"] == ["token_id:42"]
    assert found["top_logprobs"][0] == pytest.approx(
        {f"token_id:{token}": float(right[token]) for token in (50, 60, 42)}, abs=1e-3
    )
    chat = await choice_of(client, CHAT, messages=MESSAGES, logprobs=True, **asked)
    (token,) = chat["logprobs"]["content"]
    names = [other["token"] for other in token["top_logprobs"]]
    assert (token["token"], names) == (
        "token_id:42",
        ["token_id:50", "token_id:60", "token_id:42"],
    )


async def test_penalties_and_banned_words_reach_the_engine(served: tuple[Client, Any]) -> None:
    client, model = served
    greedy: dict[str, Any] = {"temperature": 0, "return_token_ids": True, "ignore_eos": True}
    penalized = await choice_of(client, **greedy, repetition_penalty=1.4)
    penalty = RepetitionPenaltyLogitsProcessor(1.4)
    ids = ids_of(PROMPT)
    for token in penalized["token_ids"]:
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[:, -1, : len(TOKENIZER)]
        assert token == int(penalty(torch.tensor([ids]), logits).argmax())
        ids.append(token)
    biased = await choice_of(client, **greedy, logit_bias={"40": 100, "41": -100})
    assert biased["token_ids"] == [40] * 12
    two = await choice_of(
        client, **greedy, logit_bias={str(token): 60 for token in ids_of("ab")}, max_tokens=30
    )
    assert {*two["text"]} <= {"a", "b"}
    word = two["text"][:2]
    banned = await choice_of(
        client,
        **greedy,
        logit_bias={str(token): 60 for token in ids_of("ab")},
        max_tokens=30,
        bad_words=[word],
    )
    assert word not in banned["text"]
    refused = await client.problem(COMPLETIONS, prompt=PROMPT, bad_words=["  "])
    assert (refused.status, refused.details.field) == (400, "bad_words")


async def test_a_response_ends_where_it_is_asked_to(served: tuple[Client, Any]) -> None:
    client, _ = served
    ends: dict[str, Any] = {"logit_bias": {str(EOS_ID): 100}, "return_token_ids": True}
    at_once = await choice_of(client, **ends)
    assert (at_once["token_ids"], at_once["text"], at_once["stop_reason"]) == ([EOS_ID], "", None)
    shown = await choice_of(client, **ends, skip_special_tokens=False)
    assert shown["text"] == EOS
    later = await choice_of(client, **ends, min_tokens=5)
    assert later["token_ids"].index(EOS_ID) == 5
    never = await choice_of(client, **ends, ignore_eos=True)
    assert (never["token_ids"], never["finish_reason"]) == ([EOS_ID] * 12, "length")
    free = await choice_of(client, ignore_eos=True, return_token_ids=True, max_tokens=30)
    token = free["token_ids"][8]
    at_token = await choice_of(client, ignore_eos=True, stop_token_ids=[token], max_tokens=30)
    assert (at_token["finish_reason"], at_token["stop_reason"]) == ("stop", token)
    stop = free["text"][6:8]
    for include, end in ((True, stop), (False, "")):
        asked = {"stop": stop, "include_stop_str_in_output": include, "max_tokens": 30}
        choice = await choice_of(client, ignore_eos=True, **asked)
        assert choice["text"] == free["text"].partition(stop)[0] + end
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    asked = {"stop": stop, "min_tokens": 29, "max_tokens": 30, "ignore_eos": True}
    assert (await choice_of(client, **asked))["text"] == free["text"]


async def test_usage_counts_a_shared_prompt_once_and_goes_along(served: tuple[Client, Any]) -> None:
    client, _ = served
    asked: dict[str, Any] = {"prompt": PROMPT, "n": 3, "max_tokens": 6}
    asked["allowed_token_ids"] = ids_of("ab")
    usage = (await client.whole(COMPLETIONS, **asked))["usage"]
    assert usage == {
        "prompt_tokens": len(PROMPT),
        "completion_tokens": 18,
        "total_tokens": len(PROMPT) + 18,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    options = {"include_usage": True, "continuous_usage_stats": True}
    parts = await client.stream(COMPLETIONS, **asked, stream_options=options)
    counts = [part["usage"]["completion_tokens"] for part in parts]
    assert counts == sorted(counts)
    assert (counts[0], parts[-1]["usage"], parts[-1]["choices"]) == (1, usage, [])
    ends = [part for part in parts[:-1] if part["choices"][0]["finish_reason"]]
    assert len(ends) == 3
    without = await client.stream(COMPLETIONS, **asked, stream_options={"include_usage": False})
    assert not any("usage" in part for part in without)


async def test_latencies_are_counted_under_vllms_names(served: tuple[Client, Any]) -> None:
    client, _ = served
    latencies = Latencies()
    for stream in ("true", "false"):
        body = f'{{"model": "bytes", "prompt": "a", "n": 2, "max_tokens": 5, "stream": {stream}, "ignore_eos": true}}'
        request = REQUESTS[COMPLETIONS].model_validate_json(body)
        assert [part async for part in respond(client.policies, request, "", latencies)]
    text = latencies.text().decode()
    for name, count in (
        ("time_to_first_token", 4),
        ("inter_token_latency", 16),
        ("request_time_per_output_token", 4),
        ("e2e_request_latency", 2),
    ):
        assert f'vllm:{name}_seconds_count{{model_name="bytes"}} {float(count)}' in text
        assert math.isfinite(float(text.split(f"vllm:{name}_seconds_sum")[1].split()[1]))
