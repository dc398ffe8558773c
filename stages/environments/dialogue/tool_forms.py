"""Which messages a chat template gets, where a conversation has tools of anybody."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stages.environments.dialogue.appending import RESULT
from stages.environments.dialogue.template import USER, calling
from stages.environments.dialogue.tool_text import results_as_text, with_tools
from stages.environments.dialogue.turns import read_turn
from stages.environments.interface import Message, Tool
from stages.prompts.conversations import Conversations
from stages.prompts.rows.files import PromptError

if TYPE_CHECKING:
    from stages.model.load import Tokenizer


def with_readable_tools(
    tokenizer: Tokenizer,
    template: str,
    options: Mapping[str, Any],
    messages: Sequence[Message],
    tools: Sequence[Tool],
) -> tuple[Sequence[Message], Sequence[Tool]]:
    """Return the messages and the tools to render. There are tools where the ``template`` writes
    them, and calls as :func:`read_turn` reads them; otherwise the messages describe them."""
    plain = Conversations(tokenizer, template, options)
    chats = Conversations(tokenizer, template, options, tools)
    call = calling([RESULT])
    try:
        opened = chats.render([USER], "a conversation")
        called = chats.render([USER, call], "a conversation")
        has_tools = opened != plain.render([USER], "a conversation")
    except PromptError:
        has_tools = False
        opened = called = ""
    turn = read_turn(called[len(opened) :], truncated=False, number=0, calls=True)
    functions = [each["function"] for each in turn.message.get("tool_calls", ())]
    if has_tools and functions == [call["tool_calls"][0]["function"]]:
        return messages, tools
    return with_tools(results_as_text(messages), tools), ()
