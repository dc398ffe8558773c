"""What a run's environments declare, and the dialogue that follows from it, for each worker that
needs them.

environment worker ─▶ declares ─▶ ENVIRONMENTS in the index ─▶ flow worker: prompts with the tools
                                                           └─▶ rollout workers: tokens that end a turn
"""

from __future__ import annotations

from orchestration.recipe.schema import Recipe
from orchestration.state.documents import ENVIRONMENTS
from pipeline.documents.flow import STATE
from pipeline.index.client import Index
from stages.environments.dialogue.choice import choose_dialogue
from stages.environments.dialogue.interface import Dialogue
from stages.environments.interface import Declarations
from stages.model.load import Tokenizer

WAIT_SECONDS = 10.0


async def declarations(index: Index) -> Declarations:
    """Return what the run's environments declare, once their worker has said it."""
    position = ""
    while (declared := await ENVIRONMENTS.get(index)) is None:
        position = await index.woken(STATE, position, WAIT_SECONDS)
    return declared


def dialogue_of(recipe: Recipe, tokenizer: Tokenizer, declared: Declarations) -> Dialogue:
    """Return how the conversations of ``recipe`` are written. Raises PromptError."""
    as_text = recipe.environment.tools == "text"
    return choose_dialogue(recipe.prompts, tokenizer, declared.tools, tools_as_text=as_text)
