"""How the conversations of a recipe with an environment are written."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache, partial

from orchestration.recipe.schema import Recipe
from stages.environments.dialogue.choice import Dialogues, choose_dialogue
from stages.environments.dialogue.interface import WRITTEN_ROLES, Dialogue
from stages.environments.dialogue.program import ProgramDialogue
from stages.environments.interface import Declarations, EnvironmentDeclaration, Tool
from stages.model.load import Tokenizer


def dialogues_of(recipe: Recipe, tokenizer: Tokenizer, declared: Declarations) -> Dialogues:
    """Return the dialogues of ``recipe``, whose environments are ``declared``. Raises
    PromptError."""
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

    @cache
    def of_programs() -> ProgramDialogue:
        return ProgramDialogue(tokenizer, partial(choose, roles=WRITTEN_ROLES))

    def of(environment: EnvironmentDeclaration) -> Dialogue | ProgramDialogue:
        if environment.requests:
            return of_programs()
        return choose(environment.tools, environment.roles)

    return Dialogues({name: of(environment) for name, environment in declared.by_name.items()})
