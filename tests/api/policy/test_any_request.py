"""Any request gets an answer, or an error that names a field: never a 500, and never an answer that
is no JSON."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pydantic
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from api.policy import answers
from api.schemas.completions import REQUESTS
from api.server.http.problems import HTTPProblem, errors_of
from tests.api.policy.answers import (
    CHAT,
    COMPLETIONS,
    Client,
    byte_model,
    byte_tokenizer,
    checkpoint,
)

MESSAGES = [
    {"role": "system", "content": "a"},
    {"role": "user", "content": [{"type": "text", "text": "b"}]},
]
DEFAULTS: dict[str, dict[str, Any]] = {
    COMPLETIONS: {
        "best_of": 1,
        "echo": False,
        "frequency_penalty": 0,
        "logit_bias": None,
        "logprobs": None,
        "max_tokens": 16,
        "n": 1,
        "presence_penalty": 0,
        "seed": None,
        "stop": None,
        "stream": False,
        "stream_options": None,
        "suffix": None,
        "temperature": 1,
        "top_p": 1,
        "user": "someone",
    },
    CHAT: {
        "audio": None,
        "frequency_penalty": 0,
        "function_call": "none",
        "functions": None,
        "logit_bias": None,
        "logprobs": False,
        "max_completion_tokens": None,
        "max_tokens": None,
        "metadata": None,
        "modalities": ["text"],
        "n": 1,
        "parallel_tool_calls": True,
        "prediction": None,
        "presence_penalty": 0,
        "prompt_cache_key": None,
        "reasoning_effort": None,
        "response_format": {"type": "text"},
        "safety_identifier": None,
        "seed": None,
        "service_tier": "auto",
        "stop": None,
        "store": False,
        "stream": False,
        "stream_options": None,
        "temperature": 1,
        "tool_choice": "none",
        "tools": None,
        "top_logprobs": None,
        "top_p": 1,
        "user": None,
        "verbosity": None,
        "web_search_options": None,
    },
}
NEEDED: dict[str, dict[str, Any]] = {COMPLETIONS: {"prompt": "ab"}, CHAT: {"messages": MESSAGES}}
TO_FORMS: dict[str, dict[str, Any]] = {
    "/v1/responses": {"input": MESSAGES},
    "/v1/messages": {"messages": MESSAGES},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/tokenize": {"prompt": "ab"},
    "/detokenize": {"tokens": [1, 2]},
}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *[
        (path, {"temperature": value}, "temperature")
        for path in NEEDED
        for value in (1e-300, 5e-324, -1, 101, 1e300)
    ],
    *[
        (path, {"top_p": value}, "top_p")
        for path in NEEDED
        for value in (1e-300, 1e-31, 0, -0.1, 1.1)
    ],
    *[(path, {"temperature": math.nan}, "temperature") for path in NEEDED],
    *[(path, {"top_p": math.inf}, "top_p") for path in NEEDED],
    *[(path, {"stop": stop}, "stop") for path in NEEDED for stop in ("", [""], ["a"] * 65)],
    *[(path, {"top_k": value}, "top_k") for path in NEEDED for value in (-2, 10**30)],
    *[(path, {"seed": value}, "seed") for path in NEEDED for value in (2**63, -(2**63) - 1)],
    *[(path, {"n": value}, "n") for path in NEEDED for value in (0, 129)],
    *[(path, {"unknown": 1}, "unknown") for path in NEEDED],
    (COMPLETIONS, {"max_tokens": 0}, "max_tokens"),
    (COMPLETIONS, {"prompt_logprobs": -1}, "prompt_logprobs"),
    (COMPLETIONS, {"use_beam_search": True}, "use_beam_search"),
    (COMPLETIONS, {"structured_outputs": {"regex": "(a"}}, "structured_outputs"),
    (COMPLETIONS, {"allowed_token_ids": [320]}, "allowed_token_ids"),
    (COMPLETIONS, {"allowed_token_ids": [319]}, "allowed_token_ids"),
    (COMPLETIONS, {"logit_bias": {"a": 1}}, "logit_bias"),
    (COMPLETIONS, {"logit_bias": {"320": 1}}, "logit_bias"),
    (COMPLETIONS, {"min_tokens": 17}, "min_tokens"),
    (COMPLETIONS, {"logprob_token_ids": [3]}, "logprob_token_ids"),
    (COMPLETIONS, {"truncate_prompt_tokens": 0}, "prompt"),
    (COMPLETIONS, {"best_of": 3, "n": 2}, "best_of"),
    (COMPLETIONS, {"prompt": None}, "prompt"),
    (COMPLETIONS, {"prompt": [2**40]}, "prompt"),
    (COMPLETIONS, {"prompt": [1, 319, 320]}, "prompt"),
    (COMPLETIONS, {"logprobs": 21}, "logprobs"),
    (CHAT, {"tools": [{"type": "function"}]}, "tools"),
    (CHAT, {"response_format": {"type": "structural_tag"}}, "response_format.type"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages.0.content"),
    (CHAT, {"echo": True}, "echo"),
    (CHAT, {"reasoning_effort": "low"}, "reasoning_effort"),
    (CHAT, {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "messages"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoint")


@pytest.fixture
async def client(folder: Path) -> AsyncIterator[Client]:
    with checkpoint(folder, byte_model(1), byte_tokenizer()) as made:
        yield made
        await made.policies.close()


async def answer(client: Client, path: str, request: dict[str, Any]) -> tuple[int, Any]:
    """The status of the answer and its events; or of the problem, and the fields that it names."""
    try:
        body = json.dumps({"model": client.model, **request})
        asked = answers.ALL[path].model_validate_json(body, strict=True)
        parts = b"".join([part async for part in answers.answer(client.policies, asked)]).decode()
    except pydantic.ValidationError as error:
        return 400, [wrong.field for wrong in errors_of(error)]
    except HTTPProblem as problem:
        return problem.status, [problem.details.field]
    texts = (
        [event.rpartition("data: ")[2] for event in parts.split("\n\n")]
        if getattr(asked, "stream", False)
        else [parts]
    )
    return 200, [
        json.loads(text, parse_constant=pytest.fail) for text in texts if text not in ("", "[DONE]")
    ]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_what_openai_has_by_default_may_be_said(path: str, client: Client) -> None:
    plain = await client.whole(path, **NEEDED[path], seed=3)
    said = await client.whole(path, **{**NEEDED[path], **DEFAULTS[path], "seed": 3})
    assert said["choices"] == plain["choices"]
    nulls = dict.fromkeys(REQUESTS[path].model_fields) | NEEDED[path]
    status, found = await answer(client, path, {**nulls, "seed": 3, "model": client.model})
    assert (status, found[0]["choices"]) == (200, plain["choices"])


async def test_an_assistant_may_have_said_nothing(client: Client) -> None:
    silent = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "tool_calls": None,
        "function_call": None,
    }
    silent |= {"audio": None, "annotations": []}
    found = await client.whole(CHAT, messages=[*MESSAGES, silent, MESSAGES[0]], seed=1)
    assert found["usage"]["prompt_tokens"] == len("aba=")
    left_out = await client.whole(
        CHAT, messages=[*MESSAGES, {"role": "assistant"}, MESSAGES[0]], seed=1
    )
    assert left_out["choices"] == found["choices"]


@pytest.mark.parametrize(("path", "change", "field"), REFUSED)
async def test_what_is_refused_names_its_field(
    path: str, change: dict[str, Any], field: str, folder: Path, client: Client
) -> None:
    for stream in (False, True):
        status, fields = await answer(client, path, {**NEEDED[path], **change, "stream": stream})
        assert status == 400
        assert any(one.startswith(field) for one in fields), fields


NUMBERS = st.sampled_from(
    [0, 1, -1, 2, 0.5, 1e-30, 1e-300, 1e300, 10**40, -(10**40), 2**31, 100, 20, True]
)
ODD = st.one_of(
    st.none(),
    NUMBERS,
    st.sampled_from(["", "a", "\ufffd", "😀", "none", "x" * 300, "\u0000", "<eos>"]),
    st.lists(st.one_of(NUMBERS, st.sampled_from(["", "a", "é"])), max_size=5),
    st.sampled_from(
        [
            {},
            {"type": "text"},
            {"include_usage": True},
            [[1, 2], [3]],
            [{"role": "user", "content": "a"}],
        ]
    ),
)


@pytest.mark.parametrize("path", answers.ALL)
async def test_any_value_of_any_field_is_answered(path: str, client: Client) -> None:
    """The requests are made first, as hypothesis runs no coroutine."""
    fields = answers.ALL[path].model_fields.keys()
    names = sorted([*fields - {"model"}, "unknown"])
    requests = list[dict[str, Any]]()

    @settings(
        max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    @given(st.dictionaries(st.sampled_from(names), ODD, max_size=4))
    def make(change: dict[str, Any]) -> None:
        few = {name: 3 for name in ("max_tokens", "max_output_tokens") if name in fields}
        requests.append({**few, **(NEEDED | TO_FORMS)[path], **change})

    make()
    for request in requests:
        if isinstance(request.get("max_tokens"), int) and isinstance(request.get("n"), int):
            request["max_tokens"] = min(request["max_tokens"], 3)
    results = await asyncio.gather(*(answer(client, path, request) for request in requests))
    statuses = {status for status, _ in results}
    assert statuses == {200, 400}, [
        request
        for request, (status, _) in zip(requests, results, strict=True)
        if status not in (200, 400)
    ]
    for request, (status, found) in zip(requests, results, strict=True):
        assert status == 200 or all(found), request
        assert status == 400 or not any(event.get("error") for event in found), request
