"""Recipes in the documentation: each TOML block is checked as ``asyncdock check`` does, with the
files that it names."""

from __future__ import annotations

import os
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest
import torch

from orchestration.recipe.checks.examples import example_prompts
from orchestration.recipe.loading.keys import rewrite, sections
from orchestration.recipe.loading.load import extended, parse_recipe
from orchestration.recipe.loading.served import read_served
from orchestration.recipe.schema import Recipe
from stages.model.load import load_model, load_tokenizer
from stages.prompts.rows.options import Kind
from stages.prompts.sources import PromptSource, load_prompts
from stages.rewards.stage import RewardSet
from tests.pages.page import blocks as page_blocks

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "compose" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
KEYS = ROOT / "docs" / "recipe.md"
AGENTS = ROOT / "docs" / "agents.md"
MOVING = ROOT / "docs" / "moving.md"
# What a block that shows some sections leaves out.
REST: dict[str, dict[str, Any]] = {
    "model": {"source": "tiny"},
    "prompts": {"source": "builtin", "task": "repeat"},
    "reward": {"functions": [{"name": "spelling"}]},
    "train": {"steps": 10},
}
ENVIRONMENTS = ("my_env.py", "my_game.py", "my_code.py", "calculator.py")  # of pages
MODULES = {
    "my_rewards": "def brevity(completions, **columns):\n    return [1.0] * "
    "len(completions)\n\njudge = brevity\n",
    "math_rewards": "def correct(completions, **columns):\n    return [1.0] * len(completions)\n",
    "my_data": 'def questions():\n    return [{"prompt": "How high is it?", "answer": "4806"}] * '
    "3\n",
}


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(
        rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )


TOML = [(page, text) for page in PAGES for text in blocks(page, "toml")]
SOURCES = [text for page, text in TOML if page == KEYS and "[prompts]" in text]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with all that the pages' recipes name: rows as docs/recipe.md shows them,
    modules, a model."""
    import datasets
    import pyarrow
    import pyarrow.parquet

    directory = tmp_path_factory.mktemp("pages")
    text, conversation = blocks(KEYS, "json")
    (directory / "questions.jsonl").write_text(text)
    (directory / "words.txt").write_text("word\n")
    (directory / "conversations.jsonl").write_text(conversation)
    for name, rows in zip(("additions", "numbers"), blocks(AGENTS, "json"), strict=True):
        (directory / f"{name}.jsonl").write_text(rows)
    (directory / "sums.jsonl").write_text(blocks(ROOT / "docs" / "rewards.md", "json")[0])
    template = (
        "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if enable_thinking "
        "%}<think>{% endif %}"
    )
    (directory / "chat.jinja").write_text(template)
    questions = [{"prompt": "How high is it?", "answer": "4806"}]
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(questions), directory / "questions.parquet"
    )
    datasets.DatasetDict({"train": datasets.Dataset.from_list(questions)}).save_to_disk(
        str(directory / "questions")
    )
    engines = next(
        code for code in blocks(ROOT / "docs" / "engines.md", "python") if "def fast(" in code
    )
    stages = next(
        code for code in blocks(ROOT / "docs" / "stages.md", "python") if "class Judge(" in code
    )
    agents = {
        block.file.removesuffix(".py"): block.text
        for block in [*page_blocks(AGENTS), *page_blocks(MOVING)]
        if block.file in ENVIRONMENTS
    }
    for name, code in {**MODULES, "my_engines": engines, "my_stages": stages, **agents}.items():
        (directory / f"{name}.py").write_text(f"from __future__ import annotations\n\n{code}")
    model, tokenizer = load_model("tiny", dtype=torch.float32, seed=0)
    model.config.max_position_embeddings = 4096  # README.md asks for responses of 2048 tokens
    model.config.head_dim = 32  # vLLM on a CPU has no attention for smaller heads
    model = type(model)(model.config)
    model.save_pretrained(directory / "models" / "my-model")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(directory / "models" / "my-model")
    return directory


@pytest.fixture
def there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory is :func:`folder`; the machine has the four cores that README.md asks
    for, and vLLM."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(
        "orchestration.recipe.checks.machine.is_installed", lambda module: True
    )  # vLLM, where it is not
    yield folder
    environments = [file.removesuffix(".py") for file in ENVIRONMENTS]
    for name in (*MODULES, "my_engines", "my_stages", *environments):
        sys.modules.pop(name, None)


def completed(text: str) -> Recipe:
    """The recipe of a block. Raises RecipeError with all that ``asyncdock check`` would say."""
    data = extended(tomllib.loads(text))
    for section, keys in {**REST, "model": {"source": "models/my-model"}}.items():
        section_keys = data.setdefault(section, {})
        if next(iter(keys)) not in section_keys and "sources" not in section_keys:
            section_keys.update(keys)
    return parse_recipe({"name": "page", **data})


@pytest.mark.parametrize(
    ("page", "text"), TOML, ids=lambda value: value.name if isinstance(value, Path) else ""
)
def test_a_recipe_on_a_page_is_sound(page: Path, text: str, there: Path) -> None:
    if page.name == "tinker.md":
        (there / "served.toml").write_text(text)
        read_served(there / "served.toml", {})
        return
    if '"verifiers:' in text:
        pytest.importorskip("verifiers", reason="it wants an older client of OpenAI than the tests")
        (there / "tasks.jsonl").write_text('{"prompt": "", "task": 0}\n')
    completed(text)


@pytest.mark.parametrize("text", blocks(ROOT / "README.md", "toml"), ids=["your own", "larger"])
def test_the_recipes_of_the_readme_are_whole(text: str, there: Path) -> None:
    assert {
        section: next(iter(keys)) in tomllib.loads(text)[section] for section, keys in REST.items()
    } == dict.fromkeys(REST, True)


@pytest.mark.parametrize(
    "text", SOURCES, ids=lambda text: tomllib.loads(text)["prompts"].get("source", "several")
)
def test_each_source_of_prompts_gives_prompts_as_the_page_shows(text: str, there: Path) -> None:
    options = completed(text).prompts
    if options.source == "external":
        return
    tokenizer = load_tokenizer("models/my-model")
    source: PromptSource = load_prompts(options, tokenizer, seed=0).train
    assert source.prompt(0).given
    assert "answer" in source.prompt(0).fields


def test_the_check_of_an_environment_shows_a_prompt_with_its_tools(there: Path) -> None:
    [text] = [text for page, text in TOML if page == AGENTS and "my_env:" in text]
    longer = text.replace("256", "1024")  # a token is a character of the model that is here
    [example] = example_prompts(completed(longer.replace("smollm2", "models/my-model")))
    assert '"name": "add"' in example.text
    assert example.text.endswith("What is 4711 + 1234? Call add.")


async def test_a_completion_is_a_text_or_messages_as_the_prompts_are(there: Path) -> None:
    """As README.md says, and TRL does: the chat template around a text prompt changes nothing."""
    recorded: list[Any] = []

    def record(completions: list[Any], **_: Any) -> list[float]:
        recorded.extend(completions)
        return [0.0] * len(completions)

    tokenizer = load_tokenizer("tiny")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    module = ModuleType("recording")
    module.__dict__["record"] = record
    sys.modules["recording"] = module
    try:
        rewards = RewardSet([("recording:record", 1.0)])
        for text in SOURCES[:2]:  # rows with texts, rows with messages
            prompt = load_prompts(completed(text).prompts, tokenizer, seed=0).train.prompt(0)
            await rewards.score([prompt.given], ["4806"], [[1]], [prompt.fields])
    finally:
        del sys.modules["recording"]
    assert recorded == ["4806", [{"role": "assistant", "content": "4806"}]]


def test_every_source_of_prompts_has_an_example() -> None:
    shown = [tomllib.loads(text)["prompts"] for text in SOURCES]
    assert {prompts.get("source") for prompts in shown} == {*get_args(Kind), None}
    assert [len(prompts["sources"]) for prompts in shown if "sources" in prompts] == [2]


# --- the reference of keys
# ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "file",
    [KEYS, *(KEYS.with_name(f"{name}.md") for name in ("stages", "algorithms"))],
    ids=lambda file: file.stem,
)
def test_the_reference_is_what_the_model_says(file: Path) -> None:
    assert file.read_text(encoding="utf-8") == rewrite(file), (
        f"run: python -m orchestration.recipe.loading.keys docs/{file.name}"
    )


def test_every_key_has_a_type_and_a_meaning() -> None:
    keys = [key for section in sections() for key in section.keys]
    assert len(keys) > 90
    assert [key.key for key in keys if not key.meaning or not key.type] == []
    assert {key.key: key.default for key in keys}["pipeline.arena"] == '"64MiB"'
    assert {key.key: key.unit for key in keys}["pipeline.lease_seconds"] == "seconds"


def test_every_default_is_what_a_recipe_without_the_key_gets() -> None:
    """The reference's defaults, given as TOML, are the recipe's own."""
    plain = parse_recipe({"name": "page", **REST}).model_dump()
    for key in (key for section in sections() for key in section.keys):
        parts = key.key.split(".")
        value = plain
        if (
            key.default in ("", "required")
            or parts[:2] in (["rollout", "mock"], ["train", "mock"])
            or "N" in parts
        ):
            continue
        if parts[1:2] in (["options"], ["config"]) or parts[-1] in REST.get(parts[0], {}):
            continue
        for part in parts:
            value = value[part]
        documented = tomllib.loads(f"value = {key.default}")["value"]
        assert (list(value) if isinstance(value, tuple) else value) == (
            documented if key.unit != "bytes" else _bytes(documented)
        ), key.key


def _bytes(text: str | int) -> int:
    from orchestration.units import parse_size

    size = parse_size(text)
    assert isinstance(size, int)
    return size


def test_each_way_to_train_an_agent_has_files_of_less_than_thirty_lines() -> None:
    lines = {block.file: block.text.count("\n") for block in page_blocks(AGENTS) if block.file}
    ways = ("my_env.py", "calculator.toml", "my_agent.py", "drive.py", "numbers.toml")
    assert {name: lines[name] for name in ways if lines[name] >= 30} == {}
