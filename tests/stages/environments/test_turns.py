"""A turn as the environment gets it: content, thinking, tool calls, or why one cannot be read."""

from __future__ import annotations

from typing import Any

import pytest

from stages.environments.dialogue.chat import ChatDialogue
from stages.environments.interface import Turn
from stages.model.load import Tokenizer
from tests.stages.environments.conversations import (
    ADD,
    CHATML,
    QWEN_APPENDS,
    byte_level,
    rendered,
    user,
)

BYTES = byte_level()
SUM = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def call(number: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": "add", "arguments": arguments}
    return {"id": number, "type": "function", "function": function}


def read(text: str, template: str = QWEN_APPENDS, *, tools: bool = True, number: int = 0) -> Turn:
    dialogue = ChatDialogue(BYTES, template, {}, [ADD] if tools else [])
    ids = BYTES(text, add_special_tokens=False)["input_ids"]
    return dialogue.turn([*ids, *dialogue.stop_token_ids[:1]], truncated=False, number=number)


def test_calls_are_read_with_what_stands_between_them() -> None:
    turn = read(f"First.\n{SUM}\nThen {SUM}", number=12)
    assert turn.message == {
        "role": "assistant",
        "content": "First.\n\nThen",
        "tool_calls": [call("call01200", a=1), call("call01201", a=1)],
    }
    assert not turn.fault


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a <|im_start|> b ", {"content": "a <|im_start|> b "}),
        (
            SUM.removesuffix("\n</tool_call>"),
            {"content": "", "tool_calls": [call("call00000", a=1)]},
        ),
        (
            '<tool_call>{"name": "add"}</tool_call>',
            {"content": "", "tool_calls": [call("call00000")]},
        ),
        (
            f"<think>\nA {SUM}?\n</think>\n\nNo.",
            {"content": "No.", "reasoning_content": f"A {SUM}?"},
        ),
        ("<think>\nStill", {"content": "", "reasoning_content": "Still"}),
    ],
)
def test_turns(text: str, message: dict[str, Any]) -> None:
    turn = read(text)
    assert turn == Turn({"role": "assistant", **message})


def test_a_run_without_tools_has_no_calls() -> None:
    assert read(SUM, CHATML, tools=False).message == {"role": "assistant", "content": SUM}


def test_a_turn_that_begins_inside_its_thinking() -> None:
    template = QWEN_APPENDS.replace(
        "assistant\\n' }}{% endif", "assistant\\n<think>\\n' }}{% endif"
    )
    turn = read("One.\n</think>\n\nTwo.", template, tools=False)
    assert turn.message == {"role": "assistant", "content": "Two.", "reasoning_content": "One."}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{", "is not JSON"),
        ('{"name": "add", "arguments": {"a": 1}', "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("1" * 5000, "is not JSON"),
        ("[1]", "has no name"),
        ('{"name": 3}', "has no name"),
        ('{"name": ""}', "has no name"),
        ('{"function": []}', "has no name"),
        ('{"name": "add", "arguments": [1]}', "are no object"),
        ('{"name": "add", "arguments": "{}"}', "are no object"),
    ],
)
def test_a_call_that_cannot_be_read_is_a_fault_beside_those_that_can(text: str, fault: str) -> None:
    turn = read(f"{SUM}\n<tool_call>\n{text}\n</tool_call>")
    assert fault in turn.fault
    assert len(turn.fault) < 600
    assert turn.message["tool_calls"] == [call("call00000", a=1)]


def test_the_models_own_response_template_is_used() -> None:
    tokenizer = of_xml()
    dialogue = ChatDialogue(tokenizer, XML, {}, [ADD])
    good = "Well.<tool_call><function=add><parameter=a>7</parameter></function></tool_call>"
    ids = tokenizer(good, add_special_tokens=False)["input_ids"]
    turn = dialogue.turn([*ids, *dialogue.stop_token_ids], truncated=False, number=1)
    expected = {"role": "assistant", "content": "Well.", "tool_calls": [call("call00100", a=7)]}
    assert turn == Turn(expected)
    tokenizer.response_template["fields"]["tool_calls"]["content"] = "json"
    fault = dialogue.turn(ids, truncated=True)
    assert fault.truncated
    assert "cannot be read" in fault.fault
    assert fault.message["content"] == good


XML = QWEN_APPENDS.replace(
    '\'<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}',
    "'<tool_call><function=' + call.function.name + '>' }}",
).replace(
    "{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}",
    "{%- for name, value in call.function.arguments.items() %}{{- '<parameter=' + name + '>' }}"
    "{{- value }}{{- '</parameter>' }}{% endfor %}{{- '</function></tool_call>' }}",
)


def of_xml() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "tool_calls": {
                "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
                "close_pattern": r"</function>\s*</tool_call>",
                "repeats": True,
                "content": "xml-inline",
                "content_args": {
                    "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"
                },
                "transform": {
                    "type": "function",
                    "function": {"name": "{name}", "arguments": "{content}"},
                },
            },
            "content": {"content": "text"},
        },
    }
    return tokenizer


def test_tools_as_text_are_told_called_and_answered() -> None:
    dialogue = ChatDialogue(BYTES, CHATML, {}, [ADD], tools_as_text=True)
    system = {"role": "system", "content": "Be brief."}
    prompt = dialogue.prompt([system, user("What is 1 + 2?")], "line 1")
    assert prompt.startswith("<|im_start|>system\nBe brief.\n\n# Tools")
    assert '"description": "Add two numbers."' in prompt
    assert prompt.endswith("<|im_start|>user\nWhat is 1 + 2?<|im_end|>\n")
    assert dialogue.prompt([user("a")], "line 1").startswith("<|im_start|>system\n# Tools")
    ids = BYTES(SUM, add_special_tokens=False)["input_ids"]
    assert dialogue.turn(ids, truncated=False).message["tool_calls"] == [call("call00000", a=1)]
    replies = [{"role": "tool", "content": "3<|im_end|>"}, {"role": "tool", "content": "4"}]
    after = dialogue.continuation([*ids, *dialogue.stop_token_ids], [*replies, user("Go on.")])
    said = "<tool_response>\n3<|im_end|>\n</tool_response>\n<tool_response>\n4\n</tool_response>"
    whole = [user("a"), user(said), user("Go on.")]
    assert rendered(BYTES, CHATML, whole).endswith(str(BYTES.decode(after))[1:])
    assert after.count(dialogue.stop_token_ids[0]) == 2
