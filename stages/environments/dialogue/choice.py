"""Which dialogue an environment has: of a library that knows the model, by its chat template, or
plain."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.compat.extras import is_installed
from stages.environments.dialogue.chat import ChatDialogue
from stages.environments.dialogue.interface import ROLES, Dialogue
from stages.environments.dialogue.plain import PlainDialogue
from stages.environments.dialogue.program import ProgramDialogue
from stages.environments.dialogue.renderer import RendererDialogue, known_renderers
from stages.environments.dialogue.template import USER
from stages.environments.interface import EnvironmentFailed, Message, Tool, environment_of
from stages.prompts.conversations import Conversations, chosen_template
from stages.prompts.rows.files import PromptError
from stages.prompts.rows.options import PromptOptions

if TYPE_CHECKING:
    from stages.model.load import Tokenizer


TEMPLATE = "none"  # of the renderers: the chat template


@dataclass(frozen=True)
class Dialogues:
    """The dialogues of a run's environments, ``by_name`` ("": its only one)."""

    by_name: Mapping[str, Dialogue | ProgramDialogue]

    @property
    def stop_token_ids(self) -> set[int]:
        """The tokens that end a turn, of any environment."""
        return {token for each in self.by_name.values() for token in each.stop_token_ids}

    def prompt(self, messages: Sequence[Message], row: Mapping[str, Any], where: str) -> str:
        """Return the text of the prompt of ``row``, with the tools of its environment, without the
        beginning of the assistant's turn. Raises PromptError."""
        try:
            name = environment_of(row, self.by_name)
        except EnvironmentFailed as failed:
            raise PromptError(f"{where}: {failed}", "correct the row") from failed
        return self.by_name[name].prompt(messages, where)


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
