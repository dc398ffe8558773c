"""The prompts of a run with several environments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchestration.recipe.dialogue import dialogues_of
from orchestration.recipe.loading.load import parse_recipe
from stages.environments.classes import environments
from stages.environments.interface import Declarations
from stages.prompts.rows.files import PromptError
from stages.prompts.sources import PromptSource, load_prompts
from tests.stages.environments.conversations import QWEN_APPENDS, byte_level

USES = {
    "sums": "stages.tasks.calculator:Calculator",
    "inverses": "tests.stages.trajectories.games:Tools",
    "game": "guess",
    "program": "tests.orchestration.run.games:chat",
    "outside": "sessions",
}


def prompts_of(folder: Path, *rows: dict[str, Any]) -> PromptSource:
    """The prompts of a run with all of these, in the order of ``rows``."""
    template = folder / "template.jinja"
    template.write_text(QWEN_APPENDS)
    path = folder / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": "Go.", "answer": 3, **row}) for row in rows))
    prompts = {"source": "jsonl", "path": str(path), "chat_template": str(template)}
    recipe = parse_recipe(
        {
            "name": "several",
            "model": {"source": "tiny"},
            "prompts": {**prompts, "shuffle": False},
            "environment": {"use": USES},
            "reward": {"functions": [{"name": "environment"}]},
            "train": {"steps": 1},
        },
        files=False,
    )
    factories = environments(USES, {})
    declared = Declarations({name: each.declare() for name, each in factories.items()})
    tokenizer = byte_level()
    opens = dialogues_of(recipe, tokenizer, declared)
    return load_prompts(recipe.prompts, tokenizer, recipe.seed, opens=opens).train


def test_a_prompt_lists_the_tools_of_its_rows_own_environment(tmp_path: Path) -> None:
    prompts = prompts_of(tmp_path, *({"environment": name} for name in USES))
    texts = {name: prompts.prompt(number).text for number, name in enumerate(USES)}
    tools = {
        name: [tool for tool in ("invert", "add") if tool in text] for name, text in texts.items()
    }
    assert tools == {
        "sums": ["add"],
        "inverses": ["invert"],
        "game": [],
        "program": [],
        "outside": [],
    }
    assert texts["game"].endswith("Go.<|im_end|>\n")
    assert texts["program"] == texts["outside"] == "<|im_start|>"


@pytest.mark.parametrize("row", [{}, {"environment": "chess"}, {"environment": ["game"]}])
def test_a_row_of_no_environment_is_named_at_the_start(row: dict[str, Any], tmp_path: Path) -> None:
    name = row.get("environment")
    with pytest.raises(PromptError) as refused:
        prompts_of(tmp_path, {"environment": "game"}, row).prompt(1)
    assert "rows.jsonl" in str(refused.value)
    assert f"environment = {name!r}; give one of {sorted(USES)}" in str(refused.value)
