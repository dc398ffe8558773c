"""The unmodified clients of OpenAI and Anthropic at the forms of a served checkpoint, and hostile
requests to them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import aiohttp
import openai
import pytest

from tests.api.policy.answers import byte_model, byte_tokenizer
from tests.api.served import Served

MODEL = "bytes"
SECONDS = 120.0
SAID: list[Any] = [
    {"role": "user", "content": "hi é"},
    {"role": "assistant", "content": "no"},
    {"role": "user", "content": "why"},
]
TOOL: Any = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    "strict": False,
}
PATHS = {
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"max_tokens": 4, "messages": SAID},
    "/v1/messages/count_tokens": {"messages": SAID},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    model = byte_model(5)
    model.config.max_position_embeddings = 1024
    model.save_pretrained(folder / MODEL)
    byte_tokenizer().save_pretrained(folder / MODEL)
    server = Served(folder / "data", "--runs", "0", "--checkpoint", f"{MODEL}={folder / MODEL}")
    server.start()
    yield server
    server.end()


async def test_openais_client_reads_responses(served: Served) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{served.url}/v1", api_key=served.token, timeout=SECONDS, max_retries=0
    ) as client:
        asked: dict[str, Any] = {"model": MODEL, "temperature": 0, "extra_body": {"seed": 1}}
        chat = await client.chat.completions.create(
            **asked, messages=[{"role": "system", "content": "Be."}, *SAID], max_tokens=20
        )
        asked |= {"input": SAID, "instructions": "Be.", "max_output_tokens": 20, "store": False}
        response = await client.responses.create(**asked)
        assert response.output_text == chat.choices[0].message.content
        assert response.usage is not None
        assert chat.usage is not None
        assert response.usage.input_tokens == chat.usage.prompt_tokens
        assert response.usage.output_tokens == chat.usage.completion_tokens
        events = [event async for event in await client.responses.create(**asked, stream=True)]
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        last = events[-1]
        assert last.type == "response.incomplete"
        assert len(deltas) > 1
        assert "".join(deltas) == last.response.output_text == response.output_text
        with pytest.raises(openai.APIStatusError, match="takes"):
            await client.responses.create(**{**asked, "tools": [TOOL], "input": SAID[:2]})
        for change, field in (
            ({"previous_response_id": "resp_1"}, "previous_response_id"),
            ({"tool_choice": "required"}, "tool_choice"),
            ({"truncation": "auto"}, "truncation"),
            ({"background": True}, "background"),
            ({"tools": [{"type": "web_search"}]}, "tools"),
            ({"reasoning": {"effort": "low"}}, "reasoning"),
            ({"max_output_tokens": 9999}, "max_output_tokens"),
            ({"input": [{"type": "image_generation_call"}]}, "input"),
        ):
            with pytest.raises(openai.BadRequestError) as refused:
                await client.responses.create(**{**asked, **change})
            body: Any = refused.value.body
            assert body["param"].startswith(field)
        with pytest.raises(openai.NotFoundError):
            await client.responses.create(**{**asked, "model": "nobody"})


async def test_anthropics_client_reads_messages(served: Served) -> None:
    anthropic = pytest.importorskip("anthropic", reason="the extra dev has anthropic")
    async with anthropic.AsyncAnthropic(
        base_url=served.url, api_key=served.token, timeout=SECONDS, max_retries=0
    ) as client:
        tools = [{"name": "add", "input_schema": TOOL["parameters"]}]
        asked: dict[str, Any] = {
            "model": MODEL,
            "messages": SAID,
            "system": "Be.",
            "max_tokens": 20,
        }
        asked |= {"extra_body": {"seed": 1, "temperature": 0}}
        message = await client.messages.create(**asked)
        async with client.messages.stream(
            **asked, tools=tools, tool_choice={"type": "none"}
        ) as stream:
            deltas = [text async for text in stream.text_stream]
            last = await stream.get_final_message()
        assert len(deltas) > 1
        assert "".join(deltas) == message.content[0].text == last.content[0].text
        assert (last.usage.output_tokens, last.stop_reason) == (20, "max_tokens")
        assert message.usage.output_tokens == 20
        count = await client.messages.count_tokens(model=MODEL, messages=SAID, system="Be.")
        assert count.input_tokens == message.usage.input_tokens == last.usage.input_tokens
        for change in (
            {"tool_choice": {"type": "any"}},
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            {"tools": [{"type": "bash_20250124", "name": "bash"}]},
            {"max_tokens": 9999},
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        ):
            with pytest.raises(anthropic.BadRequestError) as refused:
                await client.messages.create(**{**asked, **change})
            assert refused.value.body["error"]["type"] == "invalid_request_error"
            assert next(iter(change)) in str(refused.value)
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(**{**asked, "model": "nobody"})
        with pytest.raises(anthropic.AuthenticationError):
            await client.with_options(api_key="wrong").messages.create(**asked)


async def test_hostile_requests_are_refused_and_the_next_is_answered(served: Served) -> None:
    deep = "[" * 100_000
    async with aiohttp.ClientSession(served.url, headers=served.headers) as http:

        async def status(path: str, body: bytes) -> int:
            headers = {"Content-Type": "application/json"}
            async with http.post(path, data=body, headers=headers) as answer:
                error = await answer.json()
                if answer.status != 200:
                    assert error["error"]["message"]
                    assert (error.get("type") == "error") == path.startswith("/v1/messages")
                return answer.status

        for path, fields in PATHS.items():
            right = {"model": MODEL, **fields}
            unknown = {**right, "unknown": 1}
            name = next(iter(fields))
            nested = '{"model": "bytes", "metadata": ' + "[" * 3000 + "]" * 3000 + "}"
            assert await status(path, deep.encode()) in (400, 413)
            assert await status(path, nested.encode()) == 400
            assert await status(path, b" " * (10 << 20)) == 413
            assert await status(path, b'{"a": "\xff"}') == 400
            assert await status(path, json.dumps(unknown).encode()) == 400
            assert await status(path, json.dumps({**right, name: {}}).encode()) == 400
            assert await status(path, json.dumps({**right, "model": "../a"}).encode()) == 404
            many = [{**right, "model": MODEL}] * 8
            texts = [json.dumps(body).encode() for body in many]
            assert set(await asyncio.gather(*(status(path, text) for text in texts))) == {200}
    async with aiohttp.ClientSession(served.url) as http:
        for path, fields in PATHS.items():
            async with http.post(path, json={"model": MODEL, **fields}) as answer:
                assert answer.status == 401
            headers = {"x-api-key": served.token}
            async with http.post(path, json={"model": MODEL, **fields}, headers=headers) as answer:
                assert answer.status == 200
