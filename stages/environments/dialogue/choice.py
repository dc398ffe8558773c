"""Which dialogue a run has: by the model's chat template, or plain without one."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from stages.environments.dialogue.chat import ChatDialogue
from stages.environments.dialogue.interface import ROLES, Dialogue
from stages.environments.dialogue.plain import PlainDialogue
from stages.environments.interface import Tool
from stages.prompts.conversations import chosen_template
from stages.prompts.rows.files import PromptError
from stages.prompts.rows.options import PromptOptions

if TYPE_CHECKING:
    from stages.model.load import Tokenizer


def choose_dialogue(
    options: PromptOptions,
    tokenizer: Tokenizer,
    tools: Sequence[Tool] = (),
    *,
    tools_as_text: bool = False,
    roles: Collection[str] = ROLES,
) -> Dialogue:
    """Return the dialogue of a run with ``tools``, with the chat template that its prompts have.

    ``roles``: those that its environments' messages may have.
    Raises PromptError for a template that does not only append, or that has no tools.
    """
    template = chosen_template(options.chat_template, tokenizer)
    if template is not None and options.chat is not False:
        return ChatDialogue(
            tokenizer,
            template,
            options.chat_template_options,
            tools,
            tools_as_text=tools_as_text,
            roles=roles,
        )
    if tools and not tools_as_text:
        problem = "has tools, and its prompts no chat template that could write them"
        raise PromptError(problem, "set environment.tools = 'text'", "environment")
    return PlainDialogue(tokenizer, tools)
