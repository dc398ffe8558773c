"""A conversation of a model without a chat template: contents one after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from stages.environments.dialogue.encoder import DialogueEncoder
from stages.environments.dialogue.interface import ROLES, checked_messages
from stages.environments.dialogue.tool_text import results_as_text
from stages.environments.dialogue.turns import read_turn
from stages.environments.interface import Message, Tool, Turn
from stages.prompts.rows.files import PromptError

if TYPE_CHECKING:
    from stages.model.load import Tokenizer


class PlainDialogue:
    """Writes the contents of messages as they are, without special tokens; nothing closes a turn.

    ``tools`` are called as text (:mod:`stages.environments.dialogue.tool_text`); the prompt says
    which there are.
    """

    stop_token_ids: tuple[int, ...] = ()

    def __init__(self, tokenizer: Tokenizer, tools: Sequence[Tool] = ()) -> None:
        self._tokenizer = tokenizer
        self._has_tools = bool(tools)
        self._roles = ROLES if tools else ROLES - {"tool"}
        self._encoder = DialogueEncoder(tokenizer)

    def prompt(self, messages: Sequence[Message], where: str) -> str:
        """Raise PromptError: there is no chat template."""
        raise PromptError(
            f"{where} is a conversation, which needs a chat template",
            "give texts, or a template with prompts.chat_template, and take out prompts.chat",
        )

    def opening(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of the contents. Raises MessagesRefused."""
        checked = checked_messages(messages, self._roles)
        contents = [message["content"] for message in results_as_text(checked)]
        return self._encoder.ids(self._encoder.as_data("".join(contents)))

    def conversation(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of the contents. Raises MessagesRefused."""
        return self.opening(messages)

    def continuation(self, turn_ids: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """Return the tokens of the contents. Raises MessagesRefused."""
        return self.opening(messages)

    def turn(self, token_ids: Sequence[int], truncated: bool, number: int = 0) -> Turn:
        """Return a turn as a message, or with the fault of its tool calls."""
        ended = bool(token_ids) and token_ids[-1] == self._tokenizer.eos_token_id
        text = str(self._tokenizer.decode(list(token_ids[:-1] if ended else token_ids)))
        return read_turn(text, truncated, number, calls=self._has_tools)
