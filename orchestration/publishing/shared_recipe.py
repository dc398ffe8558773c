"""A run's recipe as a file for other machines."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from orchestration.recipe.loading.toml import toml_tables
from orchestration.recipe.schema import Recipe

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
# a text that is an absolute path, or code as module:name
OUTSIDE = re.compile(r'"(/[^"]*|[\w.]+:[\w.]+)"')


def write_recipe(recipe: Recipe, path: Path) -> Sequence[str]:
    """Write what ``recipe`` has beside defaults as TOML to ``path``, in a folder that has the
    tokenizer already. Returns its lines that name files or code outside of that folder."""
    tables = recipe.model_dump(mode="json", exclude_defaults=True)
    for key in OF_THE_MACHINE:
        section, _, name = key.partition(".")
        tables.get(section, {}).pop(name, None)
    prompts = tables["prompts"]
    is_file = Path(prompts.get("chat_template", "")).is_absolute()
    if is_file and path.with_name(CHAT_TEMPLATE).is_file():
        prompts["chat_template"] = CHAT_TEMPLATE
    text = toml_tables(tables)
    path.write_text(text, encoding="utf-8")
    return [line for line in text.splitlines() if OUTSIDE.search(line)]
