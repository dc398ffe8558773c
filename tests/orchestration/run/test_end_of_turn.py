"""A response ends with any of the end tokens that the tokenizer, the model's generation_config and
the recipe name."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from orchestration.recipe.models import tokenizer_of
from orchestration.recipe.problems import RecipeError
from orchestration.recipe.schema import Recipe
from orchestration.workers.engines import rollout_engine, sampling_of
from stages.engines.protocols import GroupRequest
from stages.engines.responses import Responses
from stages.engines.vllm.rows import VllmRow, sampling_params
from stages.model.load import tiny_model, tiny_tokenizer
from tests.orchestration.runs import TINY, recipe

TOKENS = tiny_tokenizer()
EOS, GENERATION, OWN = (int(TOKENS.convert_tokens_to_ids(token)) for token in ("<eos>", "y", "z"))


def two_ends(folder: Path, ends: Any = (EOS, GENERATION)) -> Path:
    """A checkpoint with heads as wide as vLLM's attention on the CPU takes them; its
    generation_config has ``ends``."""
    config = tiny_model(0).config
    config.num_attention_heads = 2
    config.num_key_value_heads = 1
    config.head_dim = 32
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    TOKENS.save_pretrained(folder)
    given = list(ends) if isinstance(ends, tuple) else ends
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": given}))
    return folder


def of_two_ends(folder: Path, **changes: Any) -> Recipe:
    changes = {"rollout__max_tokens": 48, "rollout__stop_token_ids": [OWN], **changes}
    return recipe(TINY, model__source=str(two_ends(folder)), **changes)


async def assert_each_token_ends(of: Recipe) -> None:
    """Checks 64 responses of random weights: each stops at its first end token, and each of the
    three ends some of them."""
    sampling = sampling_of(of, tokenizer_of(of))
    engine = rollout_engine(of, version=0)
    assert sampling.stop_token_ids == (EOS, GENERATION, OWN)
    ended = set()
    try:
        places = tuple(range(64))
        async for made in engine.generate(
            [GroupRequest(0, places, torch.tensor([5, 6, 7]), sampling, seed=1)]
        ):
            ids = made.token_ids.tolist()
            found = [
                position for position, token in enumerate(ids) if token in sampling.stop_token_ids
            ]
            if made.finish_reason == "stop":
                assert found == [len(ids) - 1], "the first end token is the last token"
                ended.add(ids[-1])
            else:
                assert not found
                assert len(ids) == sampling.max_tokens
    finally:
        await engine.close()
    assert ended == {EOS, GENERATION, OWN}


async def test_each_of_three_end_tokens_ends_a_response(tmp_path: Path) -> None:
    await assert_each_token_ends(of_two_ends(tmp_path, rollout__max_rows=64))


def test_vllm_is_asked_to_stop_at_each_of_them(tmp_path: Path) -> None:
    of = of_two_ends(tmp_path)
    sampling = sampling_of(of, tokenizer_of(of))
    row = VllmRow(
        GroupRequest(0, (0,), torch.tensor([5]), sampling, seed=1),
        0,
        Responses(1, lambda _: None),
        None,
    )
    vllm = SimpleNamespace(SamplingParams=dict, RequestOutputKind=SimpleNamespace(DELTA="delta"))
    asked = sampling_params(vllm, row)
    assert asked["stop_token_ids"] == [EOS, GENERATION, OWN]
    assert asked["ignore_eos"]


@pytest.mark.parametrize(
    ("ends", "expected"), [(GENERATION, [EOS, GENERATION]), (None, [EOS]), ((), [EOS])]
)
def test_generation_config_has_an_id_a_list_or_none(
    ends: Any, expected: list[int], tmp_path: Path
) -> None:
    of = recipe(TINY, model__source=str(two_ends(tmp_path, ends)))
    assert list(sampling_of(of, tokenizer_of(of)).stop_token_ids) == expected


def test_without_a_generation_config_the_config_is_asked(tmp_path: Path) -> None:
    of = recipe(TINY, model__source=str(two_ends(tmp_path)))
    (tmp_path / "generation_config.json").unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": [GENERATION]}))
    assert sampling_of(of, tokenizer_of(of)).stop_token_ids == (EOS, GENERATION)


@pytest.mark.parametrize(
    ("changes", "key", "message"),
    [
        (
            {"rollout__stop_token_ids": [5, 49]},
            "rollout.stop_token_ids.1",
            "is no token of model.source",
        ),
        ({"rollout__stop_token_ids": [-1]}, "rollout.stop_token_ids.0", "out of range"),
        (
            {"ends": (EOS, 49)},
            "model.source",
            "has eos_token_id = 49 in its configs, where its vocabulary has 49",
        ),
        ({"ends": "</s>"}, "model.source", "generation_config.json with eos_token_id = '</s>'"),
    ],
)
def test_a_token_outside_of_the_vocabulary_is_refused(
    changes: dict[str, Any], key: str, message: str, tmp_path: Path
) -> None:
    source = two_ends(tmp_path, changes.pop("ends", EOS))
    with pytest.raises(RecipeError) as refused:
        recipe(TINY, model__source=str(source), **changes)
    found = {problem.key: problem.wrong for problem in refused.value.problems}
    assert list(found) == [key]
    assert message in found[key]
