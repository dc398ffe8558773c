"""Structured outputs and calls of tools, as OpenAI's and vLLM's clients ask for them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from pipeline.compat.extras import ExtraMissing
from stages.engines.structure import Structure
from stages.engines.torch.rollout import TorchRolloutEngine
from tests.api.policy.answers import (
    CHAT,
    COMPLETIONS,
    Client,
    byte_model,
    byte_tokenizer,
    checkpoint,
)

TOKENIZER = byte_tokenizer()
TOKENIZER.chat_template += "{% if tools %}{{ tools | length }}{% endif %}"
RESPONSES = "/v1/responses"
FOR_CLAUDE = "/v1/messages"
MESSAGES = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}, "way": {"enum": ["up", "down"]}},
    "required": ["on", "way"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": "It does.", "parameters": SCHEMA},
    }
    for name in ("move", "stay")
]


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[Client]:
    model = byte_model(5, flat=0.1, context=1280)
    model.generation_config.eos_token_id = None  # Llama's is the quotation mark here
    with checkpoint(tmp_path / "model", model, TOKENIZER) as client:
        yield client
        await client.policies.close()


async def texts(client: Client, **asked: Any) -> list[str]:
    """Of a completion and a chat, whole and streamed: all end by themselves."""
    asked = {"max_tokens": 200, "seed": 3, "n": 2, **asked}
    found = []
    for path, prompt in ((COMPLETIONS, {"prompt": "p"}), (CHAT, {"messages": MESSAGES})):
        whole = await client.whole(path, **prompt, **asked)
        streamed = {0: "", 1: ""}
        for part in await client.stream(path, **prompt, **asked):
            for choice in part["choices"]:
                new = choice["text"] if path == COMPLETIONS else choice["delta"]["content"]
                streamed[choice["index"]] += new
        for choice in whole["choices"]:
            assert choice["finish_reason"] == "stop"
            text = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
            assert text == streamed[choice["index"]]
            found.append(text)
    return found


async def test_texts_have_the_form_that_is_asked_for(client: Client) -> None:
    for form in (
        {"response_format": FORMAT},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
    ):
        for text in await texts(client, **form):
            jsonschema.validate(json.loads(text), SCHEMA)
    for text in await texts(client, structured_outputs={"choice": ["yes", "no: é"]}):
        assert text in ("yes", "no: é")
    for text in await texts(client, structured_outputs={"regex": r"[a-c]{2}\d€"}):
        assert re.fullmatch(r"[a-c]{2}\d€", text)
    for grammar in ('start: "a" ("the" | " a")', 'root ::= "a" ("the" | " a")'):
        for text in await texts(client, structured_outputs={"grammar": grammar}):
            assert text in ("athe", "a a")
    biases = {str(TOKENIZER("}")["input_ids"][0]): 50.0}
    for form in (
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json_object": True}},
    ):
        for text in await texts(client, **form, logit_bias=biases):
            assert isinstance(json.loads(text), dict)


async def test_logprobs_are_those_over_what_may_follow(client: Client) -> None:
    """`xa` and `xb` begin with one token, then with two: their probabilities add up to 1."""
    asked: dict[str, Any] = {"structured_outputs": {"regex": "x[ab]y"}, "logprobs": 5, "seed": 1}
    (choice,) = (await client.whole(COMPLETIONS, prompt="p", max_tokens=9, **asked))["choices"]
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"][0] == pytest.approx(0.0, abs=1e-6)
    likeliest = logprobs["top_logprobs"][1]
    assert set(likeliest) == {"a", "b"}
    assert sum(2.718281828459045**value for value in likeliest.values()) == pytest.approx(1.0)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "stay"}}])
async def test_a_tool_is_called_by_its_schema(client: Client, choice: Any) -> None:
    asked = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "max_tokens": 250}
    for seed in range(3):
        whole = await client.whole(CHAT, **asked, seed=seed)
        (answer,) = whole["choices"]
        (call,) = answer["message"]["tool_calls"]
        assert (answer["finish_reason"], answer["message"]["content"]) == ("tool_calls", None)
        assert call["type"] == "function"
        assert call["function"]["name"] in ("move", "stay") if choice == "required" else ("stay",)
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)
        *_, last = await client.stream(CHAT, **asked, seed=seed)
        (streamed,) = last["choices"][0]["delta"]["tool_calls"]
        assert streamed["index"] == 0
        assert streamed["function"] == call["function"]
    short = await client.whole(CHAT, **{**asked, "max_tokens": 3})
    (answer,) = short["choices"]
    assert answer["finish_reason"] == "length"
    assert '{"na'.startswith(answer["message"]["content"].replace(" ", ""))


@pytest.mark.parametrize(
    ("choice", "for_claude", "names"),
    [
        ("required", {"type": "any"}, {"move", "stay"}),
        ({"type": "function", "name": "stay"}, {"type": "tool", "name": "stay"}, {"stay"}),
    ],
)
async def test_responses_and_messages_call_a_tool_by_its_schema(
    client: Client, choice: Any, for_claude: dict[str, Any], names: set[str]
) -> None:
    functions = [tool["function"] for tool in TOOLS]
    tools = [{"type": "function", **function} for function in functions]
    asked = {"input": "hi", "tools": tools, "tool_choice": choice, "max_output_tokens": 250}
    (called,) = (await client.whole(RESPONSES, **asked, seed=1))["output"]
    assert called["type"] == "function_call"
    assert called["name"] in names
    jsonschema.validate(json.loads(called["arguments"]), SCHEMA)
    events = await client.events(RESPONSES, **asked, seed=1)
    (streamed,) = events[-1]["response"]["output"]
    assert streamed["arguments"] == called["arguments"]
    assert not [event for event in events if "output_text" in event["type"]]

    tools = [{"name": each["name"], "input_schema": SCHEMA} for each in functions]
    asked = {"messages": MESSAGES, "tools": tools, "tool_choice": for_claude, "max_tokens": 250}
    message = await client.whole(FOR_CLAUDE, **asked, seed=1)
    (block,) = message["content"]
    assert (block["type"], message["stop_reason"]) == ("tool_use", "tool_use")
    assert block["name"] in names
    jsonschema.validate(block["input"], SCHEMA)
    short = await client.whole(FOR_CLAUDE, **{**asked, "max_tokens": 3})
    (block,) = short["content"]
    assert (block["type"], short["stop_reason"]) == ("text", "max_tokens")
    assert '{"na'.startswith(block["text"].replace(" ", ""))
    other = {"type": "tool", "name": "other"}
    problem = await client.problem(FOR_CLAUDE, **{**asked, "tool_choice": other})
    assert (problem.details.field, problem.details.fix) == ("tool_choice", "give it in tools")


async def test_what_cannot_be_followed_is_refused_by_its_field(client: Client) -> None:
    outputs: list[dict[str, Any]] = [
        {"regex": "(a"},
        {"grammar": "start: missing"},
        {"json": {"type": "nothing"}},
        {"json": "{"},
        {"json": {"contains": {}, "type": "array"}},
    ]
    for asked in outputs:
        problem = await client.problem(COMPLETIONS, prompt="p", structured_outputs=asked)
        assert (problem.status, problem.details.field) == (400, "structured_outputs"), asked
    wrong = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": 3}}}
    problem = await client.problem(CHAT, messages=MESSAGES, response_format=wrong)
    assert (problem.status, problem.details.field) == (400, "response_format")
    both: dict[str, Any] = {"response_format": FORMAT, "structured_outputs": {"regex": "a"}}
    problem = await client.problem(CHAT, messages=MESSAGES, **both)
    assert (problem.details.field, problem.details.fix) == (
        "structured_outputs",
        "give one of them",
    )
    named = {"type": "function", "function": {"name": "other"}}
    for tools, choice in ((TOOLS, named), ([], "required")):
        problem = await client.problem(CHAT, messages=MESSAGES, tools=tools, tool_choice=choice)
        assert (problem.details.field, problem.details.fix) == ("tool_choice", "give it in tools")
    allowed = {"structured_outputs": {"regex": "a"}, "allowed_token_ids": [5]}
    problem = await client.problem(COMPLETIONS, prompt="p", **allowed)
    assert (problem.status, problem.details.field) == (400, "structured_outputs")


@pytest.mark.parametrize(
    "form",
    [
        {"structured_outputs": {}},
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        {"structured_outputs": {"structural_tag": "x"}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_object", "json_schema": FORMAT["json_schema"]}},
    ],
)
async def test_forms_that_are_no_form(client: Client, form: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(form))):
        await client.body(COMPLETIONS, {"prompt": "p", **form})


async def test_engines_without_it_and_installations_without_the_extra_refuse_it(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {"prompt": "p", "structured_outputs": {"choice": ["a"]}}
    monkeypatch.setattr(TorchRolloutEngine, "has_structures", False)
    problem = await client.problem(COMPLETIONS, **asked)
    assert (problem.details.field, problem.details.fix) == ("structured_outputs", "leave it out")
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ExtraMissing):
        Structure("choice", '["a"]').compiled()
    problem = await client.problem(COMPLETIONS, **asked)
    assert (problem.status, problem.details.field) == (400, "structured_outputs")
    assert problem.details.fix == "pip install 'asyncdock[structured]'"


def test_nothing_of_it_is_loaded_by_what_does_not_ask() -> None:
    code = (
        "import sys, api.policy.handler, stages.engines.torch.rollout, stages.engines.torch.train;"
        "print([m for m in sys.modules if 'llguidance' in m or m.endswith('matchers')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
