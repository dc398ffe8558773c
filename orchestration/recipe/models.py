"""Models that a recipe names beside its engines': the tokenizer, and a teacher behind a server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestration.recipe.schema import Recipe
from stages.model.load import load_tokenizer

if TYPE_CHECKING:
    from stages.inference.teacher import TeacherOptions
    from stages.model.load import Tokenizer


def tokenizer_of(recipe: Recipe) -> Tokenizer:
    """Return the model's tokenizer; the mock model uses that of the tiny model, which reads
    characters. Checkpoints keep it, with the chat template of the recipe."""
    tokenizer = load_tokenizer("tiny" if recipe.model.source == "mock" else recipe.model.source)
    if recipe.prompts.chat_template:
        from stages.prompts.conversations import chosen_template

        tokenizer.chat_template = chosen_template(recipe.prompts.chat_template, tokenizer)
    return tokenizer


def teacher_options(
    recipe: Recipe, timeout: float = 0.0, retries: int | None = None
) -> TeacherOptions:
    """Return how to reach ``teacher.url``; ``timeout`` and ``retries`` replace the recipe's.

    Raises TeacherRefused where the key is not set.
    """
    from stages.inference.teacher import TeacherOptions, api_key

    teacher = recipe.teacher
    key = api_key(recipe.teacher.api_key_variable)
    retries = teacher.retries if retries is None else retries
    return TeacherOptions(teacher.url, teacher.model, timeout or teacher.timeout, retries, key=key)
