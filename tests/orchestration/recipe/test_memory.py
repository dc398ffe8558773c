"""The derived memory of a step: the very bytes that autograd keeps, and refusals of what cannot fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from orchestration.recipe.checks import memory as checks
from orchestration.recipe.checks import memory_parts
from orchestration.recipe.checks.memory_parts import Sizes, layer_bytes, micro_batch
from orchestration.recipe.load import load_recipe
from orchestration.recipe.planner import memory_of, plan
from stages.engines.plans import GroupShape, plan_micro_batches
from stages.engines.torch import token_logprobs
from stages.engines.torch.packing import pack
from stages.engines.torch.train import TorchTrainEngine
from tests.orchestration.recipe.minimal import problems

CONFIG: dict[str, Any] = {"vocab_size": 64, "hidden_size": 48, "intermediate_size": 112, "num_attention_heads": 6}
CONFIG |= {"num_key_value_heads": 2, "head_dim": 10}
BIG = ("model.source=smollm2", "train.token_budget=4096", "rollout.max_tokens=512", "prompts.max_prompt_tokens=256")


def kept(layers: int, dtype: torch.dtype, checkpointing: bool) -> tuple[int, int]:
    """Bytes that autograd keeps of a forward pass beside parameters, and its tokens."""
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **CONFIG)).to(dtype)
    options: dict[str, Any] = {"learning_rate": 1e-3, "total_steps": 1, "device": "cpu"}
    engine = TorchTrainEngine(model, activation_checkpointing=checkpointing, **options)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held: dict[int, torch.Tensor] = {}

    def hold(tensor: torch.Tensor) -> torch.Tensor:
        if (at := tensor.untyped_storage().data_ptr()) not in parameters:
            held[at] = tensor
        return tensor

    packed = pack([torch.arange(9)], [[torch.arange(n) for n in (31, 17, 17)]], engine.device)
    with torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor):
        engine._hidden(packed)
    return sum(tensor.untyped_storage().nbytes() for tensor in held.values()), packed.ids.shape[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_keeps_the_derived_bytes(dtype: torch.dtype) -> None:
    (two, tokens), (three, _) = kept(2, dtype, False), kept(3, dtype, False)
    sizes = Sizes.of({**CONFIG, "num_hidden_layers": 2})
    assert sizes is not None
    assert three - two == layer_bytes(sizes, dtype.itemsize, tokens)


def test_with_checkpointing_a_layer_keeps_its_input() -> None:
    (two, tokens), (three, _) = kept(2, torch.float32, True), kept(3, torch.float32, True)
    assert three - two == 4 * tokens * CONFIG["hidden_size"]


@pytest.mark.parametrize("budget", [40, 100, 250, 300, 600, 4096])
@pytest.mark.parametrize(("groups", "size"), [(1, 4), (4, 8), (5, 2)])
def test_the_largest_micro_batch_is_that_of_the_plan(minimal: Path, budget: int, groups: int, size: int) -> None:
    prompt, response = 10, 30
    sets = [f"train.token_budget={budget}", f"rollout.max_tokens={response}", f"prompts.max_prompt_tokens={prompt}"]
    recipe = load_recipe(minimal, [*sets, f"train.groups_per_step={groups}", f"algorithm.group_size={size}"])
    shapes = [GroupShape(prompt, (response,) * size)] * groups
    planned = plan_micro_batches(shapes, budget)
    tokens = [sum(shapes[piece.group].tokens(piece.rows) for piece in pieces) for pieces in planned]
    places = [sum(1 + len(piece.rows) * (response - 1) for piece in pieces) for pieces in planned]
    found = micro_batch(recipe, prompt)
    assert (found.tokens, found.places) == max(zip(tokens, places, strict=True))
    assert found.only == (len(planned) == 1)


def test_the_bound_of_the_logits_is_the_engine_s() -> None:
    assert memory_parts.LOGITS_BYTES == token_logprobs.LOGITS_BYTES


def test_the_parts_follow_the_recipe(minimal: Path) -> None:
    one, other = (
        memory_of(load_recipe(minimal, [*BIG, *more])) for more in ((), ("train.activation_checkpointing=true",))
    )
    assert one["train"]["weights"] == 4 * 134_515_008
    assert one["train"]["optimizer"] == 2 * one["train"]["weights"]
    assert one["train"]["activations"] > 8 * other["train"]["activations"]
    longer = memory_of(load_recipe(minimal, [*BIG, "rollout.max_tokens=1024"]))
    assert longer["rollout"]["KV cache"] > 1.5 * one["rollout"]["KV cache"]
    assert plan(load_recipe(minimal, list(BIG))).memory == one
    assert not memory_of(load_recipe(minimal, ["model.source=mock", "rollout.engine=mock", "train.engine=mock"]))


@pytest.mark.parametrize(
    ("share", "more", "key", "fix"),
    [
        (0.8, (), "train.token_budget", "use a value <= "),
        (0.8, ("rollout.max_rows=512",), "rollout.max_rows", "use a value <= "),
        (0.3, ("train.activation_checkpointing=true", "train.token_budget=1024"), "model.source", "smaller model"),
    ],
)
def test_what_cannot_fit_is_refused_with_the_largest_part_and_a_fix_that_fits(
    minimal: Path, monkeypatch: pytest.MonkeyPatch, share: float, more: tuple[str, ...], key: str, fix: str
) -> None:
    sets = [*BIG, "train.device=cpu", "rollout.device=cpu", "pipeline.arena=1GiB", *more]
    needed = sum(sum(parts.values()) for parts in memory_of(load_recipe(minimal, sets)).values())
    monkeypatch.setattr(checks, "host_bytes", lambda: int(needed * share))
    [blamed] = [problem for problem in problems(minimal, *sets) if problem.key == key]
    assert fix in blamed.fix
    assert "the largest part of" in blamed.wrong
    if "<= " in blamed.fix:
        value = blamed.fix.split("<= ")[1].split(",")[0]
        load_recipe(minimal, [*sets, f"{key}={value}"])


def test_a_model_of_unknown_sizes_is_not_judged() -> None:
    assert Sizes.of({"n_embd": 64, "n_head": 4}) is None
