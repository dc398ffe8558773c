"""Which dialogue a run has: of a library that knows the model, by its chat template, or plain."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from pipeline.compat.extras import is_installed
from stages.environments.dialogue.chat import ChatDialogue
from stages.environments.dialogue.interface import ROLES, Dialogue
from stages.environments.dialogue.plain import PlainDialogue
from stages.environments.dialogue.renderer import RendererDialogue, known_renderers
from stages.environments.dialogue.template import USER
from stages.environments.interface import Tool
from stages.prompts.conversations import Conversations, chosen_template
from stages.prompts.rows.files import PromptError
from stages.prompts.rows.options import PromptOptions

if TYPE_CHECKING:
    from stages.model.load import Tokenizer


TEMPLATE = "none"  # of the renderers: the chat template


def choose_dialogue(
    options: PromptOptions,
    tokenizer: Tokenizer,
    tools: Sequence[Tool] = (),
    *,
    tools_as_text: bool = False,
    renderer: str | None = None,
    roles: Collection[str] = ROLES,
) -> Dialogue:
    """Return the dialogue of a run with ``tools``, with the chat template that its prompts have.

    ``renderer``: a name of the library ``renderers``, or "none"; by default the one of a model that
    the library knows, where it is installed and writes as the model's own template does.
    ``roles``: those that its environments' messages may have. Raises PromptError for a template
    that does not only append, or that has no tools.
    """
    template = chosen_template(options.chat_template, tokenizer)
    if template is None or options.chat is False:
        if tools and not tools_as_text:
            problem = "has tools, and its prompts no chat template that could write them"
            raise PromptError(problem, "set environment.tools = 'text'", "environment")
        return PlainDialogue(tokenizer, tools)
    chat_options = options.chat_template_options
    if renderer not in (None, TEMPLATE):
        if tools_as_text:
            problem = "means nothing beside environment.tools = 'text'"
            raise PromptError(problem, "take one of them out", "environment.renderer", renderer)
        return RendererDialogue(tokenizer, renderer, chat_options, tools, roles=roles)
    may_know = renderer is None and options.chat_template is None and not tools_as_text
    chats = Conversations(tokenizer, template, chat_options, tools)
    for name in known_renderers(tokenizer) if may_know and is_installed("renderers") else ():
        try:
            dialogue = RendererDialogue(tokenizer, name, chat_options, tools, roles=roles)
        except PromptError:  # of other models, or without these options
            continue
        opened = f"{dialogue.prompt([USER], 'a prompt')}{tokenizer.decode(dialogue.opening([]))}"
        if opened == chats.prompt([USER], "a prompt"):
            return dialogue
    return ChatDialogue(
        tokenizer, template, chat_options, tools, tools_as_text=tools_as_text, roles=roles
    )
