"""Tools as text, for models whose chat template has none.

system       the tools as JSON, a line each, and how they are called
assistant    <tool_call>
             {"name": "add", "arguments": {"a": 1, "b": 2}}
             </tool_call>
user         <tool_response>
             3
             </tool_response>
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from stages.environments.interface import Message, Tool

CALL = '<tool_call>\n{"name": NAME, "arguments": {ARGUMENT: VALUE}}\n</tool_call>'


def describe(tools: Sequence[Tool]) -> str:
    """Return the text that tells a model which tools it has, and how to call them."""
    lines = "\n".join(json.dumps(dict(tool), ensure_ascii=False) for tool in tools)
    return (
        f"# Tools\n\nYou can call these functions:\n<tools>\n{lines}\n</tools>\n\n"
        f"To call one, write its name and its arguments as JSON:\n{CALL}\n"
        "The result follows in <tool_response></tool_response>."
    )


def with_tools(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """Return a conversation whose system message, put first where there is none, describes
    ``tools``."""
    text = describe(tools)
    first = messages[0]
    if first["role"] != "system":
        return [{"role": "system", "content": text}, *messages]
    return [{**first, "content": f"{first['content']}\n\n{text}"}, *messages[1:]]


def results_as_text(messages: Sequence[Message]) -> list[Message]:
    """Return messages in which calls are in the content, and the results of tools are the user's,
    those that follow each other in one."""
    texts = list[Message]()
    of_tool = False
    for message in messages:
        if calls := message.get("tool_calls"):
            written = [json.dumps(call["function"], ensure_ascii=False) for call in calls]
            content = [message["content"]] if message["content"] else []
            content += [f"<tool_call>\n{call}\n</tool_call>" for call in written]
            texts.append({"role": message["role"], "content": "\n".join(content)})
        elif message["role"] != "tool":
            texts.append(message)
        else:
            result = f"<tool_response>\n{message['content']}\n</tool_response>"
            if of_tool:
                result = f"{texts.pop()['content']}\n{result}"
            texts.append({"role": "user", "content": result})
        of_tool = message["role"] == "tool"
    return texts
