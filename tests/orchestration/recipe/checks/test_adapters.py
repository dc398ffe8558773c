"""Checks of ``model.lora``."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestration.recipe.loading.load import load_recipe
from orchestration.recipe.sizes.planner import memory_of, plan
from orchestration.recipe.worker_kinds import workers_of
from tests.orchestration.recipe.minimal import MINIMAL, problems

LORA = "model.lora.rank=4"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "minimal.toml"
    file.write_text(MINIMAL)
    return file


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["train.engine=mock"],
            "train.engine = \"mock\": trains no adapters; use 'torch', or model.lora.rank = 0",
        ),
        (["rollout.engine=mock"], 'rollout.engine = "mock": takes no adapters'),
        (
            ['external.stages=["rollout"]'],
            "leaves 'rollout' to a program that exchanges all weights",
        ),
        (
            ['model.lora.targets=["query"]'],
            "'query' is no linear layer of LlamaForCausalLM before its head; it has do",
        ),
        (
            ['model.lora.targets=["q_proj", "lm_head"]'],
            "names 'lm_head', the output head, which not all engines of a run adapt; name layers",
        ),
        (
            ["model.lora.rank=33"],
            "is more than the narrowest side of model.layers.0.self_attn.k_proj, which has 32 "
            "numbers",
        ),
    ],
)
def test_what_cannot_work_is_refused(path: Path, overrides: list[str], message: str) -> None:
    assert any(message in str(problem) for problem in problems(path, LORA, *overrides)), problems(
        path, LORA, *overrides
    )


def test_keys_without_a_rank_are_refused(path: Path) -> None:
    (problem,) = problems(path, "model.lora.alpha=8.0")
    assert str(problem).startswith("model.lora.alpha = 8.0: has no effect without model.lora.rank")


def test_the_plan_counts_adapters_alone_where_they_are_trained(path: Path) -> None:
    full = load_recipe(path)
    of = load_recipe(path, [LORA])
    whole = plan(full)
    adapters = plan(of)
    share = 4 * 2 * (128 + 2 * 96 + 128 + 3 * 192) / 77_184
    assert adapters.trained_parameters == round(share * 77_184)
    assert adapters.slot_bytes == pytest.approx(share * whole.slot_bytes)
    assert adapters.copy_bytes == pytest.approx(share * whole.copy_bytes)
    assert adapters.train_bytes == pytest.approx((1 + 4 * share) / 4 * whole.train_bytes)
    parts = memory_of(of)
    before = memory_of(full)
    assert parts["train"]["optimizer"] == pytest.approx(share * before["train"]["optimizer"])
    assert parts["rollout"]["new weights"] < before["rollout"]["new weights"] / 4
    assert sum(parts["train"].values()) < sum(before["train"].values())


def test_the_base_is_the_reference_unless_another_stage_reads_it(path: Path) -> None:
    def kinds(*overrides: str) -> set[str]:
        return {kind for kind, _ in workers_of(load_recipe(path, [*overrides]))}

    kl = "algorithm.options={kl_coef=0.1}"
    assert "reference" in kinds(kl)
    assert "reference" not in kinds(kl, LORA)
    assert "reference" in kinds(kl, LORA, "model.reference=tiny")
    assert "reference" not in kinds("algorithm.name=ppo", "algorithm.options={kl_reward=0.1}", LORA)
    assert "reference" in kinds("algorithm.name=distillation", LORA), (
        "credit reads it before training"
    )
