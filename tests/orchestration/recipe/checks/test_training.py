"""Checks of the optimizer and of what balances experts, and what plans count of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestration.recipe.checks import training
from orchestration.recipe.loading.load import load_recipe
from orchestration.recipe.sizes.planner import checkpoint_bytes
from tests.orchestration.recipe.minimal import MINIMAL, problems


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "minimal.toml"
    file.write_text(MINIMAL)
    return file


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["train.engine=mock", "train.optimizer=muon"],
            "train.optimizer = \"muon\": is not for train.engine = 'mock', which has its own; ",
        ),
        (
            ["train.dp=2", "train.optimizer=adamw8bit"],
            "is for one rank, and train has 2: 256 neighbouring numbers share a scale, which "
            "shards would cut; use one of ['adamw', 'muon'], or one rank",
        ),
        (["train.optimizer=sgd"], "is not allowed; use one of: 'adamw', 'adamw8bit', 'muon'"),
        (
            ["train.router_loss=0.01"],
            "is for a model with experts, which model.source = 'tiny' has not; set "
            "train.router_loss = 0",
        ),
        (
            ["model.source=tiny-moe", "train.router_bias_rate=0.001"],
            "is for routers that choose by a bias, which Qwen3MoeForCausalLM has not; set "
            "train.router_bias_rate = 0, or use train.router_loss",
        ),
        (
            ["model.source=tiny-moe", "train.router_bias_rate=0.001", "train.router=replay"],
            "moves biases by the routers' choices, and train.router = 'replay' takes others",
        ),
        (
            ["model.source=tiny-moe", "train.router_loss=0.01", "model.lora.rank=2"],
            "is for routers that are trained, and model.lora.rank freezes them",
        ),
        (
            ["model.reference_every=2"],
            "moves a reference, and algorithm.name = 'grpo' with these options reads none; set "
            "model.reference_every = 0",
        ),
        (
            ["model.reference_mix=0.5"],
            "has no effect without model.reference_every; set that, or take this out",
        ),
        (
            ["model.reference_every=2", "model.lora.rank=2", "algorithm.options.kl_coef=0.1"],
            "moves a reference, and with model.lora.rank = 2 that is the model without its",
        ),
        (
            [
                "model.reference_every=2",
                "model.reference=elsewhere",
                "algorithm.options.kl_coef=0.1",
            ],
            "moves a reference, and this one is another model, which stays",
        ),
    ],
)
def test_what_cannot_work_is_refused(path: Path, overrides: list[str], message: str) -> None:
    found = problems(path, *overrides)
    assert any(message in str(problem) for problem in found), found


def test_a_missing_library_is_named_with_its_extra(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "is_installed", lambda module: module != "torchao")
    (problem,) = problems(path, "train.optimizer=adamw8bit")
    assert "needs the package torchao; pip install 'asyncdock[optimizers]'" in str(problem)


def test_plans_count_the_state_of_the_optimizer(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "is_installed", lambda module: True)
    sizes = {
        name: checkpoint_bytes(load_recipe(path, [f"train.optimizer={name}"]))
        for name in ("adamw", "adamw8bit", "muon")
    }
    weights = sizes["adamw"] // 4  # the model, and what is trained of it with two moments
    matrices = sizes["adamw"] - sizes["muon"]  # a moment of them less
    assert 0 < matrices < weights
    assert sizes["adamw8bit"] == sizes["adamw"] - 2 * matrices + 2 * matrices // 4 * 260 // 256
