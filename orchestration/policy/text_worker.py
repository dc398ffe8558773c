"""The process that renders chats and tokenises long texts for :mod:`orchestration.policy.texts`,
one request at a time.

    {"recipe", "messages", "tools", "options" | "texts"} ──▶ chat template ──▶ tokenizer ──▶ {"ids"} or {"refused", "fix"}

The template and the tokenizer's patterns come with a model or a recipe: they are programs of a
stranger.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from orchestration.processes.confined import answer_questions
from orchestration.recipe.models import tokenizer_of
from orchestration.recipe.schema import Recipe
from stages.model.load import Tokenizer, TokenizerFailed

MEMORY_BYTES = 1 << 30  # that one request may take
LONGEST_SECONDS = 120  # after which the process ends; the policies' process kills it long before
# arguments of apply_chat_template that a request may give
VARIABLES = {"add_generation_prompt", "continue_final_message"}
TOO_LARGE = {
    "refused": f"It needs more than {MEMORY_BYTES >> 20} MiB of memory to be read.",
    "fix": "give a shorter text, or another chat template",
}


@lru_cache(4)
def _opened(recipe: str) -> tuple[Recipe, Tokenizer]:
    parsed_recipe = Recipe.from_json(recipe)
    return parsed_recipe, tokenizer_of(parsed_recipe)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return the tokens of the ``texts``, or those of the ``messages`` as the chat template of
    ``recipe`` renders them with ``options`` and ``tools``.

    ``most``: characters of a text, None: any number. ``special_tokens``: the tokenizer adds its
    own.
    """
    try:
        return _answer(request)
    except TokenizerFailed as failed:
        return {
            "refused": f"{failed.problems[0].wrong}.",
            "fix": "give another text, or ask for another model",
        }


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    recipe, tokenizer = _opened(request["recipe"])
    special = bool(request.get("special_tokens", "texts" in request))
    if "texts" in request:
        texts = request["texts"]
        return {"ids": [_ids(tokenizer, text, add_special_tokens=special) for text in texts]}
    asked = request.get("options", {})
    taken = inspect.signature(tokenizer.apply_chat_template).parameters.keys() - VARIABLES
    if names := sorted(taken & asked.keys()):
        return {
            "refused": f"chat_template_kwargs has {', '.join(names)}.",
            "fix": "give variables of the chat template alone",
        }
    options = {
        "add_generation_prompt": True,
        **recipe.prompts.chat_template_options,
        **asked,
        "tokenize": False,
    }
    try:
        messages = request["messages"]
        if request.get("tools"):
            messages = _with_tools(tokenizer, messages, request["tools"], options)
        text = str(tokenizer.apply_chat_template(messages, **options))
    except MemoryError:
        return TOO_LARGE
    except Exception as error:  # a template is a program and may raise anything
        return {
            "refused": f"The chat template refuses the messages: {error}",
            "fix": "see the template",
        }
    if request["most"] is not None and len(text) > request["most"]:
        detail = f"The chat template makes {len(text)} characters of the messages."
        return {
            "refused": detail,
            "fix": f"give shorter ones: {request['most']} characters fit the context",
        }
    return {"ids": [_ids(tokenizer, text, add_special_tokens=special)]}


def _with_tools(
    tokenizer: Tokenizer, messages: list[Any], tools: list[Any], options: dict[str, Any]
) -> list[Any]:
    """Return the messages to render. Puts the tools into ``options``, where the template has
    some."""
    from stages.environments.dialogue.tool_forms import with_readable_tools

    variables = {
        name: value for name, value in options.items() if name not in {*VARIABLES, "tokenize"}
    }
    template = tokenizer.get_chat_template(tools=tools)
    rendered, template_tools = with_readable_tools(tokenizer, template, variables, messages, tools)
    if template_tools:
        options["tools"] = template_tools
    return list(rendered)


def _ids(tokenizer: Tokenizer, text: str, **options: bool) -> list[int]:
    ids: list[int] = tokenizer(text, **options)["input_ids"]
    return ids


def main(arguments: Sequence[str]) -> None:
    """Answer what comes by the socket that is the standard input."""
    reads = os.fdopen(os.dup(0), "rb")
    writes = os.fdopen(os.dup(0), "wb")
    limits: dict[str, Any] = {
        "memory": MEMORY_BYTES,
        "seconds": LONGEST_SECONDS,
        "too_large": TOO_LARGE,
    }
    answer_questions(answer, reads, writes, **limits)
