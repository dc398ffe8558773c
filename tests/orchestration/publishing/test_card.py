"""What a model card knows: names on the Hub, licences, citations."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from orchestration.publishing.card import ExportedModel, base_of, write_card
from orchestration.recipe.loading.load import parse_recipe
from pipeline.data.events import Event
from stages.algorithms.registry import built_in
from tests.orchestration.runs import TINY

QWEN = "hub/models--Qwen--Qwen3-0.6B/snapshots/0123abcd"


def card_of(folder: Path, base: str = "tiny", **sections: object) -> ModelCard:
    folder.mkdir(exist_ok=True)
    recipe = parse_recipe({**TINY, **sections}, files=False)
    write_card(folder, ExportedModel("letters", 6, "merged", "", base_of(base)), recipe, [], [], [])
    return ModelCard.load(folder / "README.md")


def test_a_base_model_of_the_hubs_cache_has_its_name_revision_and_licence(tmp_path: Path) -> None:
    folder = tmp_path / QWEN
    folder.mkdir(parents=True)
    (folder / "README.md").write_text(
        "---\nlicense: other\nlicense_name: qwen\nlicense_link: https://qwen.ai\n---\n# Qwen\n"
    )
    base = base_of(str(folder))
    assert (base.name, base.revision) == ("Qwen/Qwen3-0.6B", "0123abcd")
    assert base.for_peft == {"base_model_name_or_path": "Qwen/Qwen3-0.6B", "revision": "0123abcd"}
    card = card_of(tmp_path / "card", str(folder))
    assert card.data.base_model == "Qwen/Qwen3-0.6B"
    licence = (card.data.license, card.data.license_name, card.data.license_link)
    assert licence == ("other", "qwen", "https://qwen.ai")
    assert "[Qwen/Qwen3-0.6B](https://huggingface.co/Qwen/Qwen3-0.6B) (0123abcd)" in card.text


@pytest.mark.parametrize(
    "text", ["", "# without front matter", "---\n- a list\n---\n", "---\n{\n---\n"]
)
def test_a_base_model_whose_card_says_nothing_has_no_licence(text: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(text)
    base = base_of(str(tmp_path))
    assert (base.name, base.licence, base.for_peft) == ("", {}, {})


def test_results_by_function_before_and_after(tmp_path: Path) -> None:
    def evaluated(version: int, *scores: float) -> Event:
        data = {"version": version, "step": version, "count": 8, "reward_mean": sum(scores)}
        functions = dict(zip(["exact", "brevity"], scores, strict=True))
        return Event("1-0", 1.0, "evaluation", {**data, "functions": functions, "samples": []})

    events = [evaluated(0, 0.25, 0.5), evaluated(2, 0.5, 0.25), evaluated(4, 1.0, 0.125)]
    model = ExportedModel("letters", 4, "merged", "", base_of("tiny"))
    write_card(tmp_path, model, parse_recipe(TINY, files=False), [], [], events)
    card = ModelCard.load(tmp_path / "README.md")
    table = card.text.partition("sampling:\n\n")[2].partition("\n\n")[0]
    assert table == (
        "| policy version | answers | reward | exact | brevity |\n"
        "|---|---|---|---|---|\n"
        "| 0 (before) | 8 | 0.75 | 0.25 | 0.5 |\n"
        "| 4 (after) | 8 | 1.125 | 1.0 | 0.125 |"
    )
    assert [result.metric_value for result in card.data.eval_results or []] == [1.125]


def test_data_sets_of_the_hub_are_named(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    (saved / "train").mkdir(parents=True)
    origin = "hf://datasets/openai/gsm8k@e53f048/main/train-00000-of-00001.parquet"
    info = {"download_checksums": {origin: {"num_bytes": 1}}}
    (saved / "train" / "dataset_info.json").write_text(json.dumps(info))
    sources = [
        {"source": "datasets", "path": str(saved)},
        {"source": "jsonl", "path": f"{tmp_path}/datasets--ann--sums/snapshots/7/sums.jsonl"},
        {"source": "builtin", "task": "repeat"},
    ]
    card = card_of(tmp_path / "card", prompts={"sources": sources})
    assert card.data.datasets == ["openai/gsm8k", "ann/sums"]
    assert "- `sums.jsonl` (jsonl)\n- `repeat` (builtin)\n" in card.text
    assert "- from [openai/gsm8k](https://huggingface.co/datasets/openai/gsm8k)\n" in card.text


def test_a_run_with_an_environment(tmp_path: Path) -> None:
    card = card_of(
        tmp_path / "card",
        prompts={"source": "builtin", "task": "guess"},
        environment={"use": "guess", "max_turns": 3},
        reward={"functions": [{"name": "environment"}]},
    )
    assert "Environment: `guess`, up to 3 turns." in card.text


@pytest.mark.parametrize("name", [*built_in()])
def test_an_algorithm_cites_the_paper_that_its_module_names(name: str, tmp_path: Path) -> None:
    algorithm = built_in()[name]
    numbers = re.findall(r"eprint = \{(\d{4}\.\d{5})\}", algorithm.citation)
    if name == "sft":
        assert not numbers
        return
    assert numbers
    assert numbers[0] in (inspect.getmodule(algorithm) or inspect).__doc__  # type: ignore[operator]
    assert "citation" in vars(algorithm), "not that of its base"
    entry = inspect.cleandoc(algorithm.citation)
    assert re.match(r"@misc\{[a-z0-9]+,\n", entry)
    assert entry.count("{") == entry.count("}")


def test_a_class_of_the_user_is_named_and_not_imported(tmp_path: Path) -> None:
    recipe = parse_recipe(TINY, files=False)
    recipe = recipe.model_copy(
        update={"algorithm": recipe.algorithm.model_copy(update={"name": "absent_module:Mine"})}
    )
    model = ExportedModel("letters", 6, "merged", "", base_of("tiny"))
    write_card(tmp_path, model, recipe, [], [], [])
    card = ModelCard.load(tmp_path / "README.md")
    assert "Trained with `absent_module:Mine`." in card.text
    assert "absent_module-Mine" in card.data.tags
    assert "Citation" not in card.text
