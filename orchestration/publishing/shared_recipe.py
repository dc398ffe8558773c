"""A run's recipe for other machines: without addresses, and what else they lack."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orchestration.recipe.schema import Recipe
from stages.json_schema import IsCode, IsPath, marked

CHAT_TEMPLATE = "chat_template.jinja"  # as transformers saves it
# addresses and credentials of where the run was
OF_THE_MACHINE = (
    "pipeline.index",
    "pipeline.serve",
    "pipeline.tls_certificate",
    "pipeline.tls_key",
    "pipeline.tls_authority",
    "checkpoint.url",
    "launch.address",
)


def shared_recipe(recipe: Recipe, folder: Path) -> tuple[dict[str, Any], Sequence[str]]:
    """Return the keys of ``recipe`` that differ from their defaults, as nested tables for a file in
    ``folder``, which has the tokenizer already; and the keys, with their values, that name files or
    code outside of it."""
    tables = recipe.model_dump(mode="json", exclude_defaults=True)
    for key in OF_THE_MACHINE:
        section, _, name = key.partition(".")
        tables.get(section, {}).pop(name, None)
    prompts = tables["prompts"]
    if _is_path(prompts.get("chat_template")) and (folder / CHAT_TEMPLATE).is_file():
        prompts["chat_template"] = CHAT_TEMPLATE
    paths = [text for text in _texts(tables, IsPath) if _is_path(text.partition(" = ")[2])]
    code = [text for text in _texts(tables, IsCode) if ":" in text and text not in paths]
    return {key: table for key, table in tables.items() if table != {}}, [*paths, *code]


def _is_path(text: str | None) -> bool:
    return Path(text or "").is_absolute()


def _texts(tables: dict[str, Any], mark: Any) -> Sequence[str]:
    """Return the keys of ``tables`` with ``mark``, each with its value: "KEY = VALUE"."""
    texts = []
    for key, _ in marked(Recipe, tables, mark):
        value: Any = tables
        for name in key.split("."):
            known = value[int(name)] if isinstance(value, list) else value.get(name, {})
            value = known if known is not None else {}
        values = value.values() if isinstance(value, dict) else value
        texts += [f"{key} = {each}" for each in ([value] if isinstance(value, str) else values)]
    return texts
