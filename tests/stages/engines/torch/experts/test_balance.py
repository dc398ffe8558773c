"""What balances the load of experts, beside transformers' function and float64 formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from benchmarks.engines.families import model_of as family_model
from stages.engines.torch.rollout import TorchRolloutEngine
from stages.engines.torch.train import TorchTrainEngine
from stages.flow.catalogue import MASK
from stages.parallel.layout import RankCoordinates
from tests.batches import VOCABULARY, make_batch
from tests.ranks import of_product
from tests.stages.sharded import (
    OPTIONS,
    algorithm,
    gradients_of_step,
    model_of,
    parallel_of,
    share,
)

COEFFICIENT = 0.5
BIAS = "e_score_correction_bias"
RATE = 0.01


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def engine_of(model: PreTrainedModel, **options: Any) -> TorchTrainEngine:
    return TorchTrainEngine(model, **{**OPTIONS, "grad_clip": None, **options})


def by_hand(model: PreTrainedModel, batch: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of the plain model on all rows, one by one, of their generated tokens that are fed;
    and its gradients."""
    rows = zip(batch["prompt_ids"].unbind(), batch["response_ids"].unbind(), strict=True)
    masks = [None] * len(batch) if MASK not in batch else batch[MASK].unbind()
    layers: list[list[torch.Tensor]] = []
    for (prompt, response), mask in zip(rows, masks, strict=True):
        ids = torch.cat([prompt, response])[None, :-1]
        logits = model(ids, output_router_logits=True).router_logits
        fed = torch.ones(len(response) - 1, dtype=bool) if mask is None else mask[:-1]
        layers.append([of_layer[len(prompt) :][fed] for of_layer in logits])
    loss: Any = 0.0
    config = model.config
    for of_layer in zip(*layers, strict=True):
        joined = torch.cat(of_layer)
        loss += load_balancing_loss_func((joined,), config.num_experts, config.num_experts_per_tok)
    loss = COEFFICIENT * loss / config.num_hidden_layers
    model.zero_grad()
    loss.backward()
    named = model.named_parameters()
    return loss.item(), {n: p.grad.clone() for n, p in named if p.grad is not None}


@pytest.mark.parametrize(
    "options", [{}, {"token_budget": None}, {"activation_checkpointing": True}]
)
@pytest.mark.parametrize("masked", [False, True])
def test_the_loss_is_transformers_of_the_whole_batch_whatever_the_micro_batches(
    options: dict[str, Any], masked: bool
) -> None:
    batch = make_batch()
    if masked:
        batch[MASK] = torch.nested.nested_tensor(
            [torch.arange(len(row)) % 3 != 1 for row in batch["response_ids"].unbind()],
            layout=torch.jagged,
        )
    loss, expected = by_hand(model_of("experts", dtype=torch.float64), batch)
    model = model_of("experts", dtype=torch.float64)
    without, _ = gradients_of_step(engine_of(model, **options), batch, algorithm())
    model = model_of("experts", dtype=torch.float64)
    with_loss, metrics = gradients_of_step(
        engine_of(model, router_loss=COEFFICIENT, **options), batch, algorithm()
    )
    assert metrics["router_loss"] == pytest.approx(loss, rel=1e-6)
    for name, gradient in expected.items():
        added = with_loss[name] - without[name]
        gap = float((added - gradient).norm()) / float(gradient.norm().clamp(min=1e-12))
        assert gap < 1e-5 or float(gradient.norm()) < 1e-9, f"{name}: {gap}"
    routers = [name for name in expected if name.endswith("gate.weight")]
    assert routers
    assert all(float(expected[name].norm()) > 1e-6 for name in routers)


def balanced_step(
    ranks: RankCoordinates | None, kind: str, options: dict[str, Any]
) -> dict[str, Any]:
    """Gradients of a rank's parameters, the metric, and biases after the step."""
    engine = engine_of(model_of(kind), parallel=parallel_of(ranks), **options)
    batch = make_batch() if ranks is None else share(ranks)
    gradients, metrics = gradients_of_step(engine, batch, algorithm())
    biases = {name: value for name, value in engine.weights() if name.endswith(BIAS)}
    return {
        "gradients": {n: value.numpy() for n, value in gradients.items() if "gate" in n},
        "loss": metrics.get("router_loss"),
        "biases": {name: value.numpy().copy() for name, value in biases.items()},
    }


@pytest.mark.parametrize(
    "product", [{"dp": 2, "ep": 2}, {"tp": 2}, {"cp": 2, "ep": 2}, {"dp": 2, "pp": 2}]
)
def test_ranks_add_the_loss_of_one_process(product: dict[str, Any]) -> None:
    options = {"router_loss": COEFFICIENT}
    alone = balanced_step(None, "experts", options)
    for found in of_product(product, balanced_step, "experts", options):
        assert found["loss"] == pytest.approx(alone["loss"], rel=1e-5)
        for name, gradient in found["gradients"].items():
            expected = alone["gradients"][name]
            gap = np.linalg.norm(gradient - expected) / np.linalg.norm(expected)
            assert gap < 1e-5, f"{name}: {gap}"


def test_biases_move_to_the_mean_load_and_ranks_agree() -> None:
    """By the choices of the plain model, at its biases before the step."""
    model = model_of("moe")
    chosen: dict[str, list[torch.Tensor]] = {}
    handles = [
        module.register_forward_hook(
            lambda _, __, output, name=name: chosen.setdefault(name, []).append(output[2])
        )
        for name, module in model.named_modules()
        if BIAS in module._buffers
    ]
    batch = make_batch()
    counts: dict[str, torch.Tensor] = {}
    for prompt, response in zip(
        batch["prompt_ids"].unbind(), batch["response_ids"].unbind(), strict=True
    ):
        chosen.clear()
        with torch.no_grad():
            model(torch.cat([prompt, response])[None, :-1])
        for name, outputs in chosen.items():
            experts = torch.cat(outputs)[len(prompt) :].flatten()
            counted = torch.bincount(experts, minlength=8).double()
            counts[f"{name}.{BIAS}"] = counts.get(f"{name}.{BIAS}", 0) + counted
    for handle in handles:
        handle.remove()
    before = dict(model.named_buffers())
    expected = {
        name: before[name] + RATE * (of_layer.mean() - of_layer).sign()
        for name, of_layer in counts.items()
    }
    options = {"router_bias_rate": RATE}
    alone = balanced_step(None, "moe", options)["biases"]
    assert alone.keys() == expected.keys()
    for name, bias in alone.items():
        np.testing.assert_allclose(bias, expected[name].float(), rtol=0, atol=1e-7)
    for found in of_product({"dp": 2, "ep": 2}, balanced_step, "moe", options):
        for name, bias in found["biases"].items():
            np.testing.assert_array_equal(bias, alone[name])


def test_undo_brings_biases_back() -> None:
    engine = engine_of(model_of("moe"), router_bias_rate=RATE, undoable=True)
    before = {name: value.clone() for name, value in engine.weights()}
    engine.train_batch(make_batch(), algorithm())
    assert any((value != before[name]).any() for name, value in engine.weights() if BIAS in name)
    engine.undo()
    for name, value in engine.weights():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


async def test_a_rollout_engine_takes_the_biases() -> None:
    trainer = engine_of(model_of("moe"), router_bias_rate=1.0)
    rollout = TorchRolloutEngine(model_of("moe"), max_rows=8, device="cpu", router_biases=True)
    try:
        for _ in range(2):
            trainer.train_batch(make_batch(), algorithm())
        await rollout.load_weights(2, dict(trainer.weights()))
        scored = trainer.logprobs(make_batch()).unbind()
        model: Any = rollout._decoder.model
        biases = {name: value for name, value in trainer.weights() if name.endswith(BIAS)}
        taken = dict(model.named_parameters())
        for name, value in biases.items():
            torch.testing.assert_close(taken[name].detach(), value, rtol=0, atol=0)
        assert scored
    finally:
        await rollout.close()


def test_a_model_without_such_routers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"router_loss: LlamaForCausalLM has no routers whose lo"):
        engine_of(model_of("llama"), router_loss=COEFFICIENT)
    qwen = family_model("Qwen3-MoE", vocab_size=VOCABULARY)
    with pytest.raises(ValueError, match=r"router_bias_rate: the routers of Qwen3MoeForCausalLM"):
        engine_of(qwen, router_bias_rate=RATE)
