"""What a chat template writes around messages.

It is the difference of two renderings of a stand-in, never of the real history:

    [user, assistant]                           ─▶ …stand-in<|im_end|>
    [user, assistant, *messages], and the       ─▶ …stand-in<|im_end|><|im_start|>user…<|im_start|>assistant
    beginning of the assistant's turn                                └──────────── added ───────────┘
"""

from __future__ import annotations

from collections.abc import Sequence

from stages.environments.dialogue.interface import MessagesRefused
from stages.environments.interface import Message
from stages.prompts.conversations import PROBE, Conversations
from stages.prompts.rows.files import PromptError

USER: Message = {"role": "user", "content": "A question."}
ASSISTANT: Message = {"role": "assistant", "content": PROBE}
PLAIN = ([USER], [USER, ASSISTANT])  # stand-ins without tool calls


class TemplateText:
    """The texts that a chat template writes. ``end``: after the content of the assistant's turn;
    ``end_token``: the special token in it at which generation stops (""); ``after_end``: what
    follows this."""

    def __init__(self, chats: Conversations) -> None:
        self._chats = chats
        self.end = chats.end_of_turn([USER], "a turn")
        self.end_token = chats.end_token(self.end)
        self.after_end = self.end.partition(self.end_token)[2] if self.end_token else self.end
        self._closed = {len(before): self.render(before) for before in PLAIN}

    def render(self, messages: Sequence[Message], *, opens: bool = False) -> str:
        """Return the text of ``messages``. ``opens``: with the beginning of the assistant's turn.
        Raises PromptError."""
        return self._chats.render(messages, "a conversation", add_generation_prompt=opens)

    def added(self, before: Sequence[Message], messages: Sequence[Message]) -> str:
        """Return the text that ``messages`` add to a conversation like ``before``, with the
        beginning of the assistant's turn. Raises MessagesRefused."""
        roles = [message["role"] for message in messages]
        try:
            text = self.render([*before, *messages], opens=True)
            closed = self._closed[len(before)] if before in PLAIN else ""
            if not closed or not text.startswith(closed):  # some templates write the date
                closed = self.render(before)
        except PromptError as error:
            raise MessagesRefused(f"messages of the roles {roles}: {error}") from error
        if not text.startswith(closed):
            raise MessagesRefused(
                f"the chat template writes what is before messages of the roles {roles} otherwise "
                "once they are there"
            )
        return text[len(closed) :]

    def added_to_turn(self, messages: Sequence[Message]) -> str:
        """Return the text that ``messages`` add after a turn that was closed. Raises
        MessagesRefused."""
        results = [message for message in messages if message["role"] == "tool"]
        if not results:
            return self.added([USER, ASSISTANT], messages)
        try:
            return self.added([USER, calling(results)], messages)
        except MessagesRefused:  # some templates take one call in a message
            return self.added([USER, calling(results[:1])], messages)


def calling(results: Sequence[Message]) -> Message:
    """Return a message of the assistant with the tool calls that have these ``results``."""
    calls = [
        {
            "id": str(result.get("tool_call_id") or f"call{place:05}"),
            "type": "function",
            "function": {"name": str(result.get("name") or "look"), "arguments": {"of": "it"}},
        }
        for place, result in enumerate(results)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def require_open(messages: Sequence[Message], where: str) -> None:
    """Raise PromptError for a prompt that ends with the assistant's message: the tokens of an
    environment could not follow it."""
    if messages[-1]["role"] == "assistant":
        raise PromptError(
            f"{where} ends with a message of the assistant, which an environment cannot follow",
            "end it with one of the user",
        )
