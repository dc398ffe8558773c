"""Recipes of models that are served to clients' training loops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from orchestration.calls.bases import describe_bases
from orchestration.calls.engines.torch_parts import open_parts
from orchestration.recipe.loading.served import SERVED, engine_options, read_served
from orchestration.recipe.problems import RecipeError
from orchestration.recipe.sections import ModelSection, RolloutSection, TrainSection
from stages.calls.interface import ModelOptions
from stages.calls.model import TorchCalledModel
from stages.model.load import tiny_model, tiny_tokenizer

WHOLE = """
name = "small"
[model]
source = "models/tiny"
dtype = "bfloat16"
[train]
device = "cpu"
threads = 1
token_budget = 128
dp = 2
tp = 1
[rollout]
device = "cpu"
max_rows = 4
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe beside the folder of its model."""
    path = tmp_path / "any.toml"
    path.write_text(WHOLE)
    tiny_model(0).save_pretrained(tmp_path / "models" / "tiny")
    tiny_tokenizer().save_pretrained(tmp_path / "models" / "tiny")
    return path


def options_of(path: Path, **options: Any) -> dict[str, Any]:
    return engine_options(*read_served(path, options))


def problems(path: Path, text: str, **options: Any) -> list[str]:
    path.write_text(text)
    with pytest.raises(RecipeError) as raised:
        read_served(path, options)
    return [str(problem) for problem in raised.value.problems]


def test_bases_have_the_names_and_the_options_of_their_recipes(
    recipe: Path, tmp_path: Path
) -> None:
    models = [str(recipe), f"other={recipe}", "tiny"]
    own, named, plain = describe_bases(models, tmp_path, {"device": "cpu", "threads": 1})
    assert (own.name, named.name, plain.name) == ("small", "other", "tiny")
    assert own.source == str(tmp_path / "models" / "tiny")
    assert own.options == {
        **{"dtype": "bfloat16", "token_budget": 128, "max_rows": 4, "data_parallel": 2},
        **{"device": "cpu", "sampling_device": "cpu", "threads": 1, "sampling_threads": 1},
        **{"kernels": "auto", "activation_checkpointing": False},
    }
    assert plain.options == {"dtype": "float32", "max_rows": 64, "device": "cpu", "threads": 1}
    with pytest.raises(ValueError, match="2 are named 'small'; give each a NAME=SOURCE"):
        describe_bases([str(recipe)] * 2, tmp_path, {})


async def test_an_engine_computes_as_its_recipe_says(recipe: Path, tmp_path: Path) -> None:
    (base,) = describe_bases([str(recipe)], tmp_path, {})
    options = {key: value for key, value in base.options.items() if key != "data_parallel"}
    parts = await open_parts(base, options)
    try:
        for rank in (4, 0):
            model = parts.new_model(ModelOptions(rank))
            assert isinstance(model, TorchCalledModel)
            assert {str(each.dtype) for each in model.adapter().values()} == {"torch.bfloat16"}
            trained = model._engine.trained.values()
            assert {str(each.dtype) for each in trained} == {"torch.float32"}
            assert str(model._base.dtype) == "torch.bfloat16"
            assert model._base.token_budget == 128
            model.close()
    finally:
        await parts.sampler.close()


def test_keys_without_a_meaning_are_refused_by_name(recipe: Path) -> None:
    """Each key of the three sections is either one of a served model, or refused."""
    sections: dict[str, type[BaseModel]] = {
        "model": ModelSection,
        "train": TrainSection,
        "rollout": RolloutSection,
    }
    for name, section in sections.items():
        for key in section.model_fields:
            if f"{name}.{key}" in SERVED:
                continue
            text = WHOLE.replace(f"[{name}]", f"[{name}]\n{key} = 3")
            (problem,) = problems(recipe, text)
            assert problem.startswith(f"{name}.{key} = 3: has no meaning for a served model; take")
    (problem,) = problems(recipe, f"{WHOLE}\n[prompts]\nsource = 'jsonl'")
    assert problem.startswith("prompts: has no meaning for a served model; take it out; there are")
    (problem,) = problems(recipe, f"seed = 1\n{WHOLE}")
    assert problem.startswith("seed = 1: has no meaning")


REFUSALS = {
    "unknown": (("dp = 2", "dpp = 2"), "train.dpp = 2: is not a known key; did you mean"),
    "no model": (("models/tiny", "nothing"), "is neither a known model nor a directory"),
    "mock": (("dp = 2", 'engine = "mock"'), 'train.engine = "mock": is not what a server has'),
    "own": (("max_rows = 4", 'engine = "a:b"'), "use one of: torch, vllm"),
    "pure": (("dp = 2", 'precision = "model"'), "use one of: auto, mixed"),
    "type": (("max_rows = 4", 'max_rows = "4"'), "rollout.max_rows"),
    "device": (('device = "cpu"', 'device = "cuda:77"'), "train.device"),
    "no table": (("[model]", "model = 1\n[modell]"), "modell"),
    "room": (("max_rows = 4", "vllm.max_loras = 2"), "no effect without rollout.engine = 'vllm'"),
    "vllm": (("max_rows = 4", "vllm.block_size = 2"), "has no effect with engine 'torch'"),
    "rank": (
        ("max_rows = 4", 'engine = "vllm"\nvllm.max_lora_rank = 0'),
        "rollout.vllm.max_lora_rank = 0: is out of range; use a value >= 1",
    ),
    "drafts": (
        ("max_rows = 4", 'engine = "vllm"\nvllm.speculative_config.method = "ngram"'),
        "rollout.vllm.speculative_config = ",
    ),
    "heads": (("max_rows = 4", 'engine = "vllm"'), "by vLLM on a CPU, whose attention has heads"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_served_is_said_before_anything_is_loaded(recipe: Path, name: str) -> None:
    change, message = REFUSALS[name]
    text = "\n".join(problems(recipe, WHOLE.replace(*change)))
    assert message in text


def test_options_of_the_command_fill_in_and_do_not_contradict(recipe: Path) -> None:
    assert options_of(recipe, threads=1, dtype="bfloat16")["sampling_threads"] == 1
    (problem,) = problems(recipe, WHOLE, dtype="float32")
    assert problem == (
        'model.dtype = "bfloat16": contradicts --dtype float32; leave one of them out'
    )
    (problem,) = problems(recipe, WHOLE, max_rows=5)
    assert problem.startswith("rollout.max_rows = 4: contradicts --max-rows 5")
