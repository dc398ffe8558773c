"""Responses, Anthropic's messages and tokens of a served checkpoint: the values are those of chat
completions and of transformers."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.environments.dialogue.tool_text import describe
from tests.api.policy.answers import (
    CHAT,
    Client,
    byte_model,
    byte_tokenizer,
    checkpoint,
)
from tests.sources import ROOT

RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
TOKENIZER = byte_tokenizer()
SAID = [
    {"role": "system", "content": "Be."},
    {"role": "user", "content": "hi é"},
    {"role": "assistant", "content": "no"},
    {"role": "user", "content": "why"},
]
ITEMS = [
    SAID[1],
    {**SAID[2], "content": [{"type": "output_text", "text": "no"}]},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "why"}]},
]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"name": "add", "description": "Adds.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
ASKED: dict[str, Any] = {"temperature": 0, "seed": 3}
# a template with tools and calls as Qwen's and Hermes' have them
QWEN = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}{% endfor %}{% if add_generation_prompt %}={% endif %}"
)


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[Client]:
    with checkpoint(tmp_path / "model", byte_model(5), TOKENIZER) as client:
        yield client
        await client.policies.close()


PIECES = ["So:", " <to", 'ol_call>\n{"name": "add", "arg', 'uments": {"a": 1}}\n</tool_call>']


def caller() -> tuple[Any, Any]:
    """A model that writes PIECES after a prompt, each of them a token, and its tokenizer."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(PIECES)
    chain = [*tokenizer.convert_tokens_to_ids(["=", *PIECES]), tokenizer.eos_token_id]
    model = byte_model(5, context=1024)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
        for token, following in itertools.pairwise(chain):
            model.lm_head.weight[following] = 1e4 * model.model.embed_tokens.weight[token]
    return model, tokenizer


async def test_text_and_usage_are_those_of_a_chat(client: Client) -> None:
    for limit in (1, 24):
        chat = await client.whole(CHAT, messages=SAID, max_tokens=limit, **ASKED)
        text = chat["choices"][0]["message"]["content"]
        usage = chat["usage"]
        asked = {**ASKED, "input": ITEMS, "instructions": "Be.", "max_output_tokens": limit}
        whole = await client.whole(RESPONSES, **asked)
        assert whole["output"][0]["content"][0]["text"] == text
        assert whole["usage"]["input_tokens"] == usage["prompt_tokens"]
        assert whole["usage"]["output_tokens"] == usage["completion_tokens"]
        assert whole["usage"]["total_tokens"] == usage["total_tokens"]
        assert whole["status"] == "incomplete"
        assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
        events = await client.events(RESPONSES, **asked)
        assert [event["sequence_number"] for event in events] == [*range(len(events))]
        deltas = [e["delta"] for e in events if e["type"] == "response.output_text.delta"]
        assert "".join(deltas) == text
        last = events[-1]["response"]
        assert (last["output"][0]["content"], last["usage"]) == (
            whole["output"][0]["content"],
            whole["usage"],
        )
        assert {event["response"]["id"] for event in events if "response" in event} == {last["id"]}

        asked = {**ASKED, "messages": SAID[1:], "system": "Be.", "max_tokens": limit}
        message = await client.whole(MESSAGES, **asked)
        assert message["content"] == [{"type": "text", "text": text}]
        assert message["stop_reason"] == "max_tokens"
        assert [*message["usage"].values()] == [usage["prompt_tokens"], usage["completion_tokens"]]
        events = await client.events(MESSAGES, **asked)
        deltas = [e["delta"]["text"] for e in events if e["type"] == "content_block_delta"]
        assert "".join(deltas) == text
        assert len(deltas) > 1 or limit == 1, "as its tokens come"
        assert events[0]["message"]["usage"]["input_tokens"] == usage["prompt_tokens"]
        assert events[-2]["usage"] == {"output_tokens": usage["completion_tokens"]}


async def test_a_stop_sequence_is_named(client: Client) -> None:
    asked: dict[str, Any] = {**ASKED, "messages": SAID[1:], "max_tokens": 40}
    text = (await client.whole(MESSAGES, **asked))["content"][0]["text"]
    stop = text[5:7]
    message = await client.whole(MESSAGES, **asked, stop_sequences=[stop])
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", stop)
    assert message["content"][0]["text"] == text.partition(stop)[0]
    events = await client.events(MESSAGES, **asked, stop_sequences=[stop])
    assert events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": stop}


async def test_tokens_are_those_of_transformers(client: Client) -> None:
    for special in (True, False):
        view = await client.whole(
            "/tokenize", prompt="hi é", add_special_tokens=special, return_token_strs=True
        )
        ids = TOKENIZER("hi é", add_special_tokens=special)["input_ids"]
        assert view == {
            "count": len(ids),
            "max_model_len": 256,
            "tokens": ids,
            "token_strs": TOKENIZER.convert_ids_to_tokens(ids),
        }
        back = await client.whole("/detokenize", tokens=ids)
        assert back == {"prompt": TOKENIZER.decode(ids)}
    assert (await client.whole("/tokenize", prompt=""))["tokens"] == TOKENIZER("")["input_ids"]
    long = await client.whole("/tokenize", prompt="a" * 5000)
    assert long["count"] == len(TOKENIZER("a" * 5000)["input_ids"]) > long["max_model_len"]
    said = SAID[:3]
    for options in (
        {},
        {"add_generation_prompt": False},
        {"continue_final_message": True},
    ):
        view = await client.whole("/tokenize", messages=said, **options)
        how: dict[str, Any] = {"add_generation_prompt": not options, **options}
        text = TOKENIZER.apply_chat_template(said, tokenize=False, **how)
        assert view["tokens"] == TOKENIZER(text, add_special_tokens=False)["input_ids"]
        assert view["token_strs"] is None
    count = await client.whole(COUNT, messages=SAID[1:], system="Be.")
    ids = TOKENIZER.apply_chat_template(SAID, add_generation_prompt=True)["input_ids"]
    assert count == {"input_tokens": len(ids)}


@pytest.mark.parametrize("template", [QWEN, None], ids=["written by the template", "as text"])
async def test_tools_reach_the_prompt_and_their_calls_and_results_too(
    tmp_path: Path, template: str | None
) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    call = {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "2"}
    messages = [
        SAID[1],
        {"role": "assistant", "content": [{"type": "text", "text": "So:"}, call]},
        {"role": "user", "content": [result]},
    ]
    tools = [{"name": "add", "description": "Adds.", "input_schema": SCHEMA}]
    written = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    function = {"name": "add", "arguments": {"a": 1}}
    if template:
        said = [
            SAID[1],
            {"role": "assistant", "content": "So:", "tool_calls": [{"function": function}]},
            {"role": "tool", "content": "2"},
        ]
        text = tokenizer.apply_chat_template(
            said, tools=[TOOL], tokenize=False, add_generation_prompt=True
        )
    else:
        text = f"{describe([TOOL])}hi éSo:\n{written}<tool_response>\n2\n</tool_response>="
    assert written in text
    with checkpoint(tmp_path / "model", byte_model(5, context=1024), tokenizer) as client:
        count = await client.whole(COUNT, messages=messages, tools=tools)
        assert count == {"input_tokens": len(tokenizer(text)["input_ids"])}
        without = await client.whole(
            COUNT, messages=messages, tools=tools, tool_choice={"type": "none"}
        )
        assert without["input_tokens"] < count["input_tokens"]
        called = {
            "id": "c1",
            "type": "function",
            "function": {"name": "add", "arguments": '{"a": 1}'},
        }
        chat = [
            SAID[1],
            {"role": "assistant", "content": "So:", "tool_calls": [called]},
            {"role": "tool", "tool_call_id": "c1", "content": "2"},
        ]
        asked = {"messages": chat, "tools": [TOOL], "max_tokens": 1, "return_token_ids": True}
        answer = await client.whole(CHAT, **asked)
        assert answer["prompt_token_ids"] == tokenizer(text)["input_ids"]
        answer = await client.whole(CHAT, **asked, tool_choice="none")
        assert len(answer["prompt_token_ids"]) == without["input_tokens"]
        await client.policies.close()


async def test_a_chat_calls_tools_as_its_text_has_them(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"messages": SAID[1:2], "tools": [TOOL], "temperature": 0}
    with checkpoint(tmp_path / "model", *caller()) as client:
        (choice,) = (await client.whole(CHAT, **asked))["choices"]
        (call,) = choice["message"]["tool_calls"]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "So:")
        assert call["function"]["name"] == "add"
        assert json.loads(call["function"]["arguments"]) == {"a": 1}
        deltas = [event["choices"][0] for event in await client.stream(CHAT, **asked)]
        assert "".join(delta["delta"]["content"] or "" for delta in deltas) == "So:"
        assert deltas[-1]["finish_reason"] == "tool_calls"
        (streamed,) = deltas[-1]["delta"]["tool_calls"]
        assert (streamed["index"], streamed["function"]) == (0, call["function"])
        (plain,) = (await client.whole(CHAT, **{**asked, "tools": None}))["choices"]
        assert "<tool_call>" in plain["message"]["content"]
        (cut,) = (await client.whole(CHAT, **asked, max_tokens=3))["choices"]
        assert (cut["finish_reason"], cut["message"].get("tool_calls")) == ("length", None)
        assert "<tool_call>" in cut["message"]["content"]
        await client.policies.close()


async def test_calls_of_tools_are_read_and_their_text_is_never_sent(tmp_path: Path) -> None:
    with checkpoint(tmp_path / "model", *caller()) as client:
        asked: dict[str, Any] = {
            "temperature": 0,
            "input": "hi",
            "tools": [{"type": "function", **FUNCTION}],
        }
        whole = await client.whole(RESPONSES, **asked)
        message, call = whole["output"]
        assert message["content"][0]["text"] == "So:"
        assert (call["type"], call["name"]) == ("function_call", "add")
        assert json.loads(call["arguments"]) == {"a": 1}
        events = await client.events(RESPONSES, **asked)
        kinds = [event["type"].removeprefix("response.") for event in events]
        assert kinds[2:] == [
            *("output_item.added", "content_part.added", "output_text.delta"),
            *("output_text.done", "content_part.done", "output_item.done"),
            *("output_item.added", "function_call_arguments.delta"),
            *("function_call_arguments.done", "output_item.done", "completed"),
        ]
        assert events[4]["delta"] == "So:"

        asked = {"temperature": 0, "messages": SAID[1:2], "max_tokens": 9}
        text = (await client.whole(MESSAGES, **asked))["content"][0]["text"]
        assert text == "".join(PIECES), "without tools a text is a text"
        asked["tools"] = [{"name": "add", "input_schema": SCHEMA}]
        whole = await client.whole(MESSAGES, **asked)
        said, use = whole["content"]
        assert (said["text"], use["name"], use["input"]) == ("So:", "add", {"a": 1})
        assert whole["stop_reason"] == "tool_use"
        events = await client.events(MESSAGES, **asked)
        deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        assert [delta.get("text") for delta in deltas] == ["So:", None]
        assert json.loads(deltas[1]["partial_json"]) == {"a": 1}
        # a call that is cut is a text
        cut = await client.whole(MESSAGES, **{**asked, "max_tokens": 3})
        assert cut["content"] == [{"type": "text", "text": "".join(PIECES[:3])}]
        events = await client.events(MESSAGES, **{**asked, "max_tokens": 3})
        deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        assert "".join(delta["text"] for delta in deltas) == "".join(PIECES[:3])
        await client.policies.close()


@pytest.mark.parametrize(
    ("path", "field", "asked"),
    [
        (RESPONSES, "input", {"input": [{"type": "computer_call"}]}),
        (RESPONSES, "input", {"input": [{"role": "assistant", "content": "a"}]}),
        (RESPONSES, "messages", {"input": "a" * 200_000}),
        (MESSAGES, "messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
        (MESSAGES, "messages", {"messages": [{"role": "assistant", "content": "a"}]}),
        (COUNT, "messages", {"messages": [{"role": "root", "content": "a"}]}),
        (MESSAGES, "max_tokens", {"messages": SAID[1:], "max_tokens": 2**30}),
        (RESPONSES, "max_output_tokens", {"input": "a", "max_output_tokens": 2**30}),
    ],
)
async def test_what_is_refused_names_its_field(
    client: Client, path: str, field: str, asked: dict[str, Any]
) -> None:
    more = {"max_tokens": 5} if path == MESSAGES else {}
    problem = await client.problem(path, **{**more, **asked})
    assert problem.status == 400
    assert (problem.details.field or "").startswith(
        {"messages": ("messages", "input")}.get(field, field)
    )


def test_a_process_that_is_not_asked_these_forms_imports_none_of_them() -> None:
    forms = "stages.environments.programs.responses stages.environments.programs.anthropic "
    forms += "stages.environments.dialogue.turns api.policy.forms api.policy.encodings"
    code = "import sys, api.policy.worker, api.server.app; "
    code += f"print(sorted({{*{forms.split()}}} & sys.modules.keys()))"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert out.stdout.strip() == "[]"
