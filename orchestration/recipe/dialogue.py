"""How the conversations of a recipe with an environment are written."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

from orchestration.recipe.schema import Recipe
from stages.environments.dialogue.choice import choose_dialogue
from stages.environments.dialogue.interface import WRITTEN_ROLES, Dialogue
from stages.environments.dialogue.program import ProgramDialogue
from stages.environments.interface import Declarations, Tool
from stages.model.load import Tokenizer
from stages.prompts.rows.files import PromptError


def dialogue_of(
    recipe: Recipe, tokenizer: Tokenizer, declared: Declarations
) -> Dialogue | ProgramDialogue:
    """Return the dialogue of ``recipe``, whose environments are ``declared``. Raises PromptError."""
    section = recipe.environment

    def choose(tools: Sequence[Tool], roles: Collection[str]) -> Dialogue:
        return choose_dialogue(
            recipe.prompts,
            tokenizer,
            tools,
            tools_as_text=section.tools == "text",
            renderer=section.renderer,
            roles=roles,
        )

    if not declared.requests:
        return choose(declared.tools, declared.roles)
    if not all(each.requests for each in declared.by_name.values()):
        problem = "has programs and classes; a run has either"
        raise PromptError(problem, "give the classes a run of their own", "environment.use")
    return ProgramDialogue(tokenizer, partial(choose, roles=WRITTEN_ROLES))
