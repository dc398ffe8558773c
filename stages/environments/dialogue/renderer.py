"""A conversation as the library ``renderers`` writes it, which knows families of models by hand.

opening        the difference of two renderings of a stand-in
continuation   what the library's bridge adds to a stand-in's prompt with the turn as generated
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.compat.extras import extra
from stages.environments.dialogue.encoder import DataTokenizer, DialogueEncoder
from stages.environments.dialogue.interface import (
    OPENING_ROLES,
    ROLES,
    WRITTEN_ROLES,
    MessagesRefused,
    checked_messages,
)
from stages.environments.dialogue.template import USER, require_open
from stages.environments.dialogue.turns import CallUnreadable, with_calls
from stages.environments.interface import Message, Tool, Turn
from stages.prompts.rows.files import PromptError

if TYPE_CHECKING:
    from stages.model.load import Tokenizer


class RendererDialogue:
    """Writes conversations with the renderer ``name`` of the library and its ``options``, and keeps
    what was thought in all turns. Raises PromptError for a renderer that is not of this model."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        name: str,
        options: Mapping[str, Any],
        tools: Sequence[Tool] = (),
        *,
        roles: Collection[str] = ROLES,
    ) -> None:
        with extra("renderers"):
            from renderers import config_from_name, create_renderer
        self._tokenizer = tokenizer
        self._tools = [dict(tool) for tool in tools] or None
        self._roles = set(roles) if tools else set(roles) - {"tool"}
        self._encoder = DialogueEncoder(tokenizer, str(tokenizer.chat_template))
        try:
            config = type(config_from_name(name))(thinking_retention="all")
            self._renderer = create_renderer(
                DataTokenizer(tokenizer, self._encoder), config, chat_template_kwargs=options
            )
        except (AssertionError, TypeError, ValueError) as error:
            raise PromptError(
                f"is no renderer of this model ({error!s:.300})",
                "name another one, or 'none' for the chat template",
                "environment.renderer",
                name,
            ) from error
        self._closed = self._render([USER])
        self._opened = self._render([USER], opens=True)
        stops = set(self._renderer.get_stop_token_ids())
        self._end_ids = {*stops, tokenizer.eos_token_id}
        self.stop_token_ids: tuple[int, ...] = tuple(sorted(stops - {tokenizer.eos_token_id}))

    def prompt(self, messages: Sequence[Message], where: str) -> str:
        """Return the text of a prompt, tools included, without the beginning of the assistant's
        turn. Raises PromptError, also for one whose last message is the assistant's."""
        require_open(messages, where)
        try:
            return str(self._tokenizer.decode(self._render(messages)))
        except MessagesRefused as error:
            raise PromptError(f"{where}: {error}", "change the messages") from error

    def opening(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens between the prompt and the first turn. Raises MessagesRefused."""
        ids = self._render([USER, *self._as_data(messages, OPENING_ROLES)], opens=True)
        return self._after(self._closed, ids, messages)

    def continuation(self, turn_ids: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """Return the tokens between the turn ``turn_ids`` and the next. Raises MessagesRefused."""
        data = self._as_data(messages)
        prompt_ids = self._opened
        turn = list(turn_ids)
        ids = self._bridge(prompt_ids, turn, data)
        if not ids and turn and turn[-1] in self._end_ids:  # it ended while it thought
            prompt_ids = self._closed
            turn = turn[-1:]
            ids = self._bridge(prompt_ids, turn, data)
        return self._after([*prompt_ids, *turn], ids, messages)

    def conversation(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of a whole conversation, tools included, with the beginning of the
        assistant's turn. Raises MessagesRefused."""
        return self._render(self._as_data(messages, WRITTEN_ROLES), opens=True)

    def turn(self, token_ids: Sequence[int], truncated: bool, number: int = 0) -> Turn:
        """Return a turn as a message, or with the fault of its tool calls."""
        try:
            parsed = self._renderer.parse_response(
                list(token_ids), tools=self._tools, prompt_ids=self._opened
            )
        except Exception as error:  # what a policy writes is anything
            message = {"role": "assistant", "content": str(self._tokenizer.decode(list(token_ids)))}
            fault = f"The tool call cannot be read: {str(error)[:300]}"
            return Turn(message, fault, truncated)
        message = {"role": "assistant", "content": parsed.content}
        if parsed.reasoning_content:
            message["reasoning_content"] = parsed.reasoning_content
        calls = [
            {"name": call.name, "arguments": call.arguments}
            if call.status == "ok"
            else CallUnreadable(f"The tool call {call.raw[:200]} has {call.status}.")
            for call in parsed.tool_calls
        ]
        return with_calls(message, calls if self._tools else [], truncated, number)

    def _bridge(self, prompt_ids: list[int], turn: list[int], messages: list[Message]) -> list[int]:
        """Return the prompt, the turn, and what follows it; [] where the library does not know."""
        try:
            bridged = self._renderer.bridge_to_next_turn(
                prompt_ids, turn, messages, tools=self._tools
            )
        except Exception as error:  # of a library, for messages of anybody
            raise MessagesRefused(f"the renderer refuses the messages ({error})") from error
        return list(bridged.token_ids) if bridged else []

    def _as_data(
        self, messages: Sequence[Message], further_roles: Collection[str] = ()
    ) -> list[Message]:
        data: list[Message] = self._encoder.as_data(
            checked_messages(messages, {*self._roles, *further_roles})
        )
        return data

    def _render(self, messages: Sequence[Message], *, opens: bool = False) -> list[int]:
        """Return the tokens of ``messages``. Raises MessagesRefused, also where one is left out."""
        try:
            rendered = self._renderer.render(
                list(messages), tools=self._tools, add_generation_prompt=opens
            )
        except Exception as error:  # of a library, for messages of anybody
            raise MessagesRefused(f"the renderer refuses the messages ({error})") from error
        for place in sorted(set(range(len(messages))) - set(rendered.message_indices)):
            raise MessagesRefused(f"the renderer leaves out {messages[place]!r:.200}")
        ids: list[int] = rendered.token_ids
        return ids

    def _after(self, before: list[int], ids: list[int], messages: Sequence[Message]) -> list[int]:
        """Return what follows ``before`` in ``ids``. Raises MessagesRefused."""
        if ids[: len(before)] != before:
            roles = [message["role"] for message in messages]
            raise MessagesRefused(f"the renderer does not append messages of the roles {roles}")
        return ids[len(before) :]


def known_renderers(tokenizer: Tokenizer) -> list[str]:
    """Return the names of the renderers of models that the library knows by the name of this
    model's folder."""
    with extra("renderers"):
        from renderers.base import MODEL_RENDERER_MAP
    folder = Path(tokenizer.name_or_path).name
    return [name for model, name in MODEL_RENDERER_MAP.items() if Path(model).name == folder]
