"""The conversations of programs, which say all of theirs, and their tools, with each request.

prompt_ids     what any conversation begins with, such as <|im_start|>
response_ids   the rest of the first request, turn 1, what the second request adds, turn 2, …
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from stages.environments.dialogue.appending import SYSTEM
from stages.environments.dialogue.interface import (
    Dialogue,
    MessagesRefused,
    PromptDialogue,
)
from stages.environments.dialogue.template import USER
from stages.environments.interface import Message, Tool
from stages.prompts.rows.files import PromptError

if TYPE_CHECKING:
    from stages.model.load import Tokenizer

KEPT = 64  # dialogues of different tools


class ProgramDialogue(PromptDialogue):
    """Writes the conversations of programs. ``choose`` returns the dialogue of a conversation with
    the tools that it is given. Raises PromptError unless all conversations begin with the same
    special token."""

    def __init__(self, tokenizer: Tokenizer, choose: Callable[[Sequence[Tool]], Dialogue]) -> None:
        self._choose = choose
        self._by_tools: dict[str, Dialogue] = {}
        self._vocabulary = len(tokenizer)
        self._plain = choose(())
        self.stop_token_ids = self._plain.stop_token_ids
        special = {
            number for number, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        self.prefix_ids = list[int]()
        for tokens in zip(*self._examples(), strict=False):
            if len({*tokens}) > 1 or tokens[0] not in special:
                break
            self.prefix_ids.append(tokens[0])
        if not self.prefix_ids:
            raise PromptError(
                "begins conversations with no special token, and those of a program need one",
                "give a chat template that does",
                "prompts.chat_template",
            )
        self._prefix = str(tokenizer.decode(self.prefix_ids))

    def _examples(self) -> Iterator[list[int]]:
        """Yield conversations that begin differently."""
        for content in "01":
            yield self._plain.conversation([{"role": "user", "content": content}])
        with suppress(MessagesRefused):  # some templates have no system message
            yield self._plain.conversation([SYSTEM, USER])

    def prompt(self, messages: Sequence[Message], where: str) -> str:
        """Return what any conversation begins with: the program writes the rest."""
        return self._prefix

    def with_tools(self, tools: Sequence[Tool]) -> Dialogue:
        """Return the dialogue of a conversation with ``tools``. Raises MessagesRefused for a
        template that cannot write them."""
        if not tools:
            return self._plain
        name = json.dumps(tools, sort_keys=True)
        if name not in self._by_tools:
            try:
                dialogue = self._choose(tools)
            except PromptError as error:
                raise MessagesRefused(f"a request with tools: {error}") from error
            while len(self._by_tools) >= KEPT:
                del self._by_tools[next(iter(self._by_tools))]
            self._by_tools[name] = dialogue
        return self._by_tools[name]

    def check_tokens(self, token_ids: Sequence[int]) -> None:
        """Raise MessagesRefused unless ``token_ids`` may be a conversation."""
        if list(token_ids[: len(self.prefix_ids)]) != self.prefix_ids:
            raise MessagesRefused(f"token_ids must begin with {self.prefix_ids}, as the prompt")
        if not 0 <= min(token_ids) <= max(token_ids) < self._vocabulary:
            raise MessagesRefused(f"token_ids must be below the vocabulary's {self._vocabulary}")

    def after_prefix(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """Return the tokens of a whole conversation without those that it begins with. Raises
        MessagesRefused."""
        ids = self.with_tools(tools).conversation(messages)
        length = len(self.prefix_ids)
        if ids[:length] != self.prefix_ids:
            raise MessagesRefused("the chat template begins this conversation as no other one")
        return ids[length:]
