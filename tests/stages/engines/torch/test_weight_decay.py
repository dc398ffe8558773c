"""What weight decay reaches: decided by what a parameter is, for every family of models, by the
modules that hold them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import CohereConfig, CohereForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from benchmarks.engines.families import FAMILIES, model_of
from stages.adapters.options import AdapterOptions
from stages.adapters.training import add_adapters
from stages.algorithms.policy_gradient.grpo import GRPO
from stages.engines.torch.critic import TorchCriticEngine
from stages.engines.torch.model.expert_load import expert_modules
from stages.engines.torch.optimizers.interface import is_decayed
from stages.engines.torch.train import TorchTrainEngine
from tests.batches import make_batch

RATE = 0.1
DECAY = 0.5
OPTIONS: dict[str, Any] = {
    "learning_rate": RATE,
    "weight_decay": DECAY,
    "total_steps": 4,
    "device": "cpu",
}


def matrices_of(model: nn.Module) -> set[str]:
    """The names of the parameters of ``model`` that are multiplied with hidden states or looked up,
    by their modules."""
    found = set()
    experts = expert_modules(model)
    for path, module in model.named_modules():
        if (
            isinstance(module, nn.Linear | nn.Embedding | Conv1D)
            or "router" in type(module).__name__.lower()
        ):
            found.add(f"{path}.weight")
        elif (
            module in experts
        ):  # [experts, features, features]; their biases are [experts, features]
            found |= {
                f"{path}.{name}"
                for name, value in module.named_parameters(recurse=False)
                if value.ndim == 3
            }
    return found & {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("family", FAMILIES)
def test_matrices_decay_and_nothing_else(family: str) -> None:
    model = model_of(family)
    decayed = {name for name, value in model.named_parameters() if is_decayed(name, value)}
    assert decayed == matrices_of(model)
    left_out = {name for name, _ in model.named_parameters()} - decayed
    assert left_out, "norms, at least"
    assert all(
        name.endswith(("bias", "sinks")) or "norm" in name or "ln_" in name for name in left_out
    )


def test_biases_of_stacked_experts_and_norms_of_single_heads_are_left_out() -> None:
    stacked = dict(model_of("gpt-oss").named_parameters())
    biases = [
        name for name, value in stacked.items() if name.endswith("_proj_bias") and value.ndim == 2
    ]
    assert len(biases) == 2 * 4
    assert not any(is_decayed(name, stacked[name]) for name in biases)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    cohere = CohereForCausalLM(
        CohereConfig(vocab_size=16, use_qk_norm=True, pad_token_id=0, **sizes)
    )
    norms = {
        name: value
        for name, value in cohere.named_parameters()
        if "q_norm" in name or "k_norm" in name
    }
    assert {value.ndim for value in norms.values()} == {2}
    assert not any(is_decayed(name, value) for name, value in norms.items())


def test_adapters_and_the_matrix_of_a_value_head_decay() -> None:
    model = model_of("Qwen3")
    add_adapters(model, AdapterOptions(rank=2, alpha=4.0, targets=("q_proj",)))
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    assert trained
    assert all(is_decayed(name, value) for name, value in trained.items())
    critic = TorchCriticEngine(model_of("Qwen3"), **OPTIONS)
    heads = {name: is_decayed(name, value) for name, value in critic.value_head.items()}
    assert heads == {"value_head.weight": True, "value_head.bias": False}


@pytest.mark.parametrize("family", ["gpt-oss", "GPT-2", "Qwen3-MoE"])
@pytest.mark.parametrize("compute", [None, torch.bfloat16])
def test_a_step_without_a_gradient_shrinks_the_matrices_alone(
    family: str, compute: torch.dtype | None
) -> None:
    model: PreTrainedModel = model_of(family)
    engine = TorchTrainEngine(model, **OPTIONS, compute=compute)
    before = {name: value.clone() for name, value in engine.state_dict()["model"].items()}
    matrices = matrices_of(model)
    batch = make_batch()
    batch["response_ids"] = torch.nested.nested_tensor(
        [row % 64 for row in batch["response_ids"].unbind()], layout=torch.jagged
    )
    batch["prompt_ids"] = torch.nested.nested_tensor(
        [row % 64 for row in batch["prompt_ids"].unbind()], layout=torch.jagged
    )
    batch["advantage"] *= 0
    engine.train_batch(batch, GRPO(scale_learning_rate=False, correction="none"))
    after = engine.state_dict()["model"]
    learned = {name for name, _ in model.named_parameters()}
    for name in learned:
        kept = before[name] * (1 - RATE * DECAY) if name in matrices else before[name]
        torch.testing.assert_close(after[name], kept, rtol=1e-6, atol=1e-7)
