"""How the conversations of a recipe with an environment are written."""

from __future__ import annotations

from orchestration.recipe.schema import Recipe
from stages.environments.dialogue.choice import choose_dialogue
from stages.environments.dialogue.interface import Dialogue
from stages.environments.interface import Declarations
from stages.model.load import Tokenizer


def dialogue_of(recipe: Recipe, tokenizer: Tokenizer, declared: Declarations) -> Dialogue:
    """Return the dialogue of ``recipe``, whose environments are ``declared``. Raises PromptError."""
    section = recipe.environment
    return choose_dialogue(
        recipe.prompts,
        tokenizer,
        declared.tools,
        tools_as_text=section.tools == "text",
        renderer=section.renderer,
        roles=declared.roles,
    )
