"""A conversation as the model's chat template writes it.

opening        ids(added by the environment's messages, and the beginning of the assistant's turn)
continuation   ids(what closes the turn, unless generated, and the same)
turn           text without the token that ends it ─▶ thinking, content, tool calls
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stages.environments.dialogue.appending import KEY, RESULT, require_appending
from stages.environments.dialogue.encoder import DialogueEncoder
from stages.environments.dialogue.interface import (
    OPENING_ROLES,
    ROLES,
    WRITTEN_ROLES,
    MessagesRefused,
    checked_messages,
)
from stages.environments.dialogue.template import USER, TemplateText, calling, require_open
from stages.environments.dialogue.tool_text import results_as_text, with_tools
from stages.environments.dialogue.turns import read_turn, split_thinking, with_calls
from stages.environments.interface import Message, Tool, Turn
from stages.prompts.conversations import Conversations
from stages.prompts.rows.files import PromptError

if TYPE_CHECKING:
    from stages.model.load import Tokenizer

AS_TEXT = "set environment.tools = 'text', or give another template"


class ChatDialogue:
    """Writes conversations with the chat ``template`` and its ``options``.

    ``tools_as_text``: ``tools`` are described in the system message, and called as text
    (:mod:`stages.environments.dialogue.tool_text`), for templates that have none. ``roles``: those
    of the environment's messages; "tool" only with ``tools``. Raises PromptError for a template
    that writes messages otherwise once others of these roles follow, that has no tools, or whose
    tool calls cannot be read.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str,
        options: Mapping[str, Any],
        tools: Sequence[Tool] = (),
        *,
        tools_as_text: bool = False,
        roles: Collection[str] = ROLES,
    ) -> None:
        self._tokenizer = tokenizer
        self._tools = [dict(tool) for tool in tools]
        self._as_text = bool(tools) and tools_as_text
        self._roles = set(roles) if tools else set(roles) - {"tool"}
        template_tools = () if tools_as_text else self._tools
        self._chats = Conversations(tokenizer, template, options, template_tools)
        self._chat = TemplateText(self._chats)
        self._encoder = DialogueEncoder(tokenizer, template)
        self._opened = self._chat.render([USER], opens=True)
        self._has_thinking = "</think>" in template
        self._response_template = (
            None if tools_as_text else getattr(tokenizer, "response_template", None)
        )
        end_ids = self._encoder.ids(self._chat.end_token)
        self._end_ids = {*end_ids, tokenizer.eos_token_id}
        self.stop_token_ids = tuple(token for token in end_ids if token != tokenizer.eos_token_id)
        if template_tools:
            self._require_tools(Conversations(tokenizer, template, options))
        require_appending(
            self._chat,
            template,
            roles={"user"} if self._as_text else self._roles,
            thinks=options.get("enable_thinking") is not False,
        )

    def prompt(self, messages: Sequence[Message], where: str) -> str:
        """Return the text of a prompt, tools included, without the beginning of the assistant's
        turn. Raises PromptError, also for one whose last message is the assistant's."""
        require_open(messages, where)
        if self._as_text:
            messages = with_tools(messages, self._tools)
        return self._chats.render(messages, where)

    def opening(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens between the prompt and the first turn. Raises MessagesRefused."""
        return self._encoder.ids(self._chat.added([USER], self._as_data(messages, OPENING_ROLES)))

    def continuation(self, turn_ids: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """Return the tokens between the turn ``turn_ids`` and the next. Raises MessagesRefused."""
        end = self._chat.after_end if self._has_ended(turn_ids) else self._chat.end
        return self._encoder.ids(end + self._chat.added_to_turn(self._as_data(messages)))

    def conversation(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of a whole conversation, tools included, with the beginning of the
        assistant's turn. Raises MessagesRefused."""
        data = self._as_data(messages, WRITTEN_ROLES)
        if self._as_text:
            data = with_tools(data, self._tools)
        try:
            return self._encoder.ids(self._chat.render(data, opens=True))
        except PromptError as error:
            raise MessagesRefused(str(error)) from error

    def turn(self, token_ids: Sequence[int], truncated: bool, number: int = 0) -> Turn:
        """Return a turn as a message, or with the fault of its tool calls."""
        ids = list(token_ids[:-1] if self._has_ended(token_ids) else token_ids)
        return self._read(str(self._tokenizer.decode(ids)), truncated, number)

    def _has_ended(self, turn_ids: Sequence[int]) -> bool:
        return bool(turn_ids) and turn_ids[-1] in self._end_ids

    def _as_data(
        self, messages: Sequence[Message], further_roles: Collection[str] = ()
    ) -> list[Message]:
        """Return an environment's messages as the template gets them. Raises MessagesRefused."""
        checked = checked_messages(messages, {*self._roles, *further_roles})
        data: list[Message] = self._encoder.as_data(checked)
        return results_as_text(data) if self._as_text else data

    def _require_tools(self, without_tools: Conversations) -> None:
        """Raise PromptError unless the template writes tools, and calls that are read as they
        were."""
        if without_tools.render([USER], "a conversation") == self._chat.render([USER]):
            raise PromptError("does not write the environment's tools", AS_TEXT, KEY)
        call = calling([RESULT])
        try:
            text = self._chat.render([USER, call])[len(self._opened) :]
        except PromptError as error:
            raise PromptError(f"cannot write a tool call ({error})", AS_TEXT, KEY) from error
        turn = self._read(text.removesuffix(self._chat.end), truncated=False, number=0)
        functions = [each["function"] for each in turn.message.get("tool_calls", ())]
        if functions != [call["tool_calls"][0]["function"]]:
            problem = f"writes tool calls in a form that is not read here: {text!r:.200}"
            raise PromptError(problem, AS_TEXT, KEY)

    def _read(self, text: str, truncated: bool, number: int) -> Turn:
        """Return the turn that has this ``text``, without what ends it."""
        if self._response_template is not None:
            return self._parse(text, truncated, number)
        thinking = ""
        if self._has_thinking:
            opened = self._opened.rstrip().endswith("<think>")
            thinking, text = split_thinking(text, opened=opened)
        turn = read_turn(text, truncated, number, calls=bool(self._tools))
        if thinking:
            turn.message["reasoning_content"] = thinking
        return turn

    def _parse(self, text: str, truncated: bool, number: int) -> Turn:
        """Return the turn as the model's own response template reads it."""
        message: Message = {"role": "assistant", "content": ""}
        try:
            message |= self._tokenizer.parse_response(
                text, prefix=self._opened, tools=[*self._tools] or None
            )
        except Exception as error:  # what a policy writes is anything, and a template is a program
            fault = f"The tool call cannot be read: {str(error)[:300]}"
            return Turn(message | {"content": text}, fault, truncated)
        calls = message.pop("tool_calls", []) if self._tools else []
        return with_calls(message, calls, truncated, number)
