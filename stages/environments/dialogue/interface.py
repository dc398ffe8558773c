"""How the tokens of a trajectory are written.

    prompt_ids     the prompt's conversation, without the beginning of the assistant's turn
    response_ids   opening, turn 1, continuation, turn 2, continuation, …
                      │         │        └ what closes the turn unless it was generated, new messages,
                      │         │          the beginning of the next turn
                      │         └ as generated
                      └ messages of the environment, the beginning of the assistant's turn

Importing this needs no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

from stages.environments.interface import EnvironmentFailed, Message, Turn

ROLES = frozenset({"user", "tool", "system", "developer"})  # of an environment's messages


OPENING_ROLES = ("user", "system")  # before the first turn
WRITTEN_ROLES = ("assistant", "user", "system", "tool")  # of a program's messages


class MessagesRefused(EnvironmentFailed):
    """An environment's messages cannot be written by the model's chat template."""


class PromptDialogue(Protocol):
    """Writes the prompts of trajectories.

    ``stop_token_ids``: tokens that end a turn, beside the tokenizer's ``eos_token_id``.
    """

    stop_token_ids: tuple[int, ...]

    def prompt(self, messages: Sequence[Message], where: str) -> str:
        """Return the text of a prompt's conversation, tools included, without the beginning of the
        assistant's turn. Raises PromptError, which names it by ``where``."""


class Dialogue(PromptDialogue, Protocol):
    """Writes what stands around the turns of a policy, and reads the turns."""

    def opening(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens between the prompt and the first turn. Raises MessagesRefused."""

    def continuation(self, turn_ids: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """Return the tokens between the turn ``turn_ids``, which ends with a token that ends turns
        or was cut before it, and the next turn. Raises MessagesRefused."""

    def conversation(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of a whole conversation, tools included, with the beginning of the
        assistant's turn. Raises MessagesRefused."""

    def turn(self, token_ids: Sequence[int], truncated: bool, number: int = 0) -> Turn:
        """Return a turn as a message, or with the fault of its tool calls.

        ``number``: of the turn in its trajectory, which makes the ids of tool calls distinct.
        """


def checked_messages(messages: Sequence[Message], roles: Collection[str]) -> list[Message]:
    """Return an environment's messages with their contents as strings.

    Raises MessagesRefused for a role that is none of ``roles``, and for a content that is no text.
    """
    for message in messages:
        if message.get("role") not in roles:
            raise MessagesRefused(
                f"an environment's message has role = {message.get('role')!r}: {message!r:.200}; "
                f"here it may have one of {sorted(roles)}"
            )
    return [{**message, "content": _text(message.get("content"))} for message in messages]


def _text(content: Any) -> str:
    """Return a content as a string. ``content``: one, None, or a list of parts of type "text"."""
    parts = content if isinstance(content, list) else [content or ""]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise MessagesRefused(
            f"an environment's message has content = {content!r:.200}, which is no text; "
            "give a string, or parts of type 'text'"
        )
    return "".join(map(str, texts))
