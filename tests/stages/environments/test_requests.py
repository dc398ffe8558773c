"""Requests of programs in the three forms: what is read of them, and that any other body is refused
by the field."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.environments.interface import Request, Turn, TurnTokens
from stages.environments.programs import anthropic, chat, responses
from stages.environments.programs.endpoint import BODY_BYTES, Endpoint
from stages.environments.programs.exchange import Exchange
from stages.environments.programs.messages import RequestRefused

FORMS: dict[str, Any] = {"chat": chat, "responses": responses, "anthropic": anthropic}
WORDS = [
    *("role", "content", "type", "text", "tool_calls", "function", "name", "arguments", "id"),
    *("tool_call_id", "user", "assistant", "tool", "system", "function_call", "call_id", "output"),
    *("function_call_output", "message", "tool_use", "tool_result", "input", "tool_use_id"),
    *("parameters", "input_schema", "none", "{", '{"a": 1}'),
]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(WORDS) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=5)
    ),
    max_leaves=12,
)
OTHER_FIELDS = ["n", "stream", "previous_response_id", "logprobs", "stream_options", "model"]
OTHER_FIELDS += ["system", "instructions", "tool_choice", "return_token_ids"]
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "system", "root"]), "content": VALUES},
    optional={
        name: VALUES
        for name in ("tool_calls", "type", "name", "arguments", "call_id", "tool_call_id")
    },
)
TOOLS = st.fixed_dictionaries(
    {"name": VALUES, "function": VALUES, "parameters": VALUES, "input_schema": VALUES}
)
BODIES = st.builds(
    lambda main, others: {**others, **main},
    st.fixed_dictionaries(
        {},
        optional={
            "messages": st.lists(MESSAGES, max_size=3) | VALUES,
            "input": st.lists(MESSAGES | VALUES, max_size=3) | VALUES,
            "tools": st.lists(TOOLS | VALUES, max_size=2) | VALUES,
        },
    ),
    st.dictionaries(st.sampled_from(OTHER_FIELDS), VALUES, max_size=3),
)
TURN = Turn(
    {
        "role": "assistant",
        "content": "I add.",
        "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
        ],
    },
    tokens=TurnTokens(5, 2, [1], [2, 3], [-0.5, -1.0]),
)


@pytest.mark.parametrize("form", FORMS)
@given(body=BODIES)
def test_any_body_is_read_or_refused(form: str, body: dict[str, Any]) -> None:
    try:
        request = FORMS[form].read(body)
    except RequestRefused:
        return
    assert isinstance(request, Request)
    assert request.messages[-1]["role"] != "assistant"
    assert all(isinstance(message["content"], str) for message in request.messages)
    json.dumps([request.messages, request.tools])
    json.dumps(FORMS[form].answer(body, TURN))
    assert all(event.endswith("\n\n") for event in FORMS[form].events(body, TURN))


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"[" * 100_000, 400),
        (b"\xff", 400),
        (b"[]", 400),
        (b'{"messages": [{"role": "root", "content": "?"}]}', 400),
        (b" " * (BODY_BYTES + 1), 413),
    ],
)
async def test_a_broken_or_a_large_body_is_refused_and_nothing_waits(
    body: bytes, status: int
) -> None:
    endpoint = Endpoint()
    exchange = Exchange()
    url = await endpoint.open(exchange)
    async with httpx.AsyncClient(headers={"x-api-key": exchange.key}, timeout=None) as http:
        for path in ("chat/completions", "responses", "messages"):
            answer = await http.post(f"{url}/{path}", content=body)
            assert answer.status_code == status, answer.text
            assert answer.json()["error"]["message"]
        assert (await http.get(f"{url}/models")).json()["data"][0]["id"] == "policy"
    await endpoint.end()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "demanded", "free"),
    [
        ("chat/completions", "required", "auto"),
        ("chat/completions", {"type": "function", "function": {"name": "add"}}, "none"),
        ("responses", {"type": "function", "name": "add"}, None),
        ("messages", {"type": "any"}, {"type": "auto"}),
    ],
)
async def test_an_answer_says_that_a_demanded_call_was_not_enforced(
    path: str, demanded: Any, free: Any, stream: bool
) -> None:
    endpoint = Endpoint()
    exchange = Exchange()
    url = await endpoint.open(exchange)
    messages = [{"role": "user", "content": "1 + 1?"}]
    body = {"messages": messages, "input": messages, "stream": stream}
    async with httpx.AsyncClient(headers={"x-api-key": exchange.key}, timeout=None) as http:
        for choice, ignored in ((demanded, "tool_choice"), (free, None)):
            asking = http.post(f"{url}/{path}", json={**body, "tool_choice": choice})
            answer = asyncio.create_task(asking)
            await exchange.next_request()
            exchange.answer(TURN)
            assert (await answer).status_code == 200
            assert (await answer).headers.get("AsyncDock-Ignored") == ignored
    await endpoint.end()


async def test_ten_thousand_sessions_without_an_end_leave_nothing_once_they_are_closed() -> None:
    endpoint = Endpoint()
    exchanges = [Exchange() for _ in range(10_000)]
    url = await endpoint.open(exchanges[0])
    for exchange in exchanges[1:]:
        await endpoint.open(exchange)
    async with httpx.AsyncClient() as http:

        async def status(exchange: Exchange) -> int:
            headers = {"x-api-key": exchange.key}
            return (await http.get(f"{url}/models", headers=headers)).status_code

        assert [await status(exchange) for exchange in exchanges[::2000]] == [200] * 5
        for exchange in exchanges:
            endpoint.close(exchange)
        assert [await status(exchange) for exchange in exchanges[::2000]] == [401] * 5
    assert not vars(endpoint)["_by_key"]
    await endpoint.end()
