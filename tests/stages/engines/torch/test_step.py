"""The training step in its parts, as a caller of them makes it, and what one rank loads for it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from stages.algorithms.policy_gradient.grpo import GRPO
from stages.engines.torch.train import TorchTrainEngine
from tests.batches import make_batch
from tests.stages.sharded import OPTIONS, model_of, weights_of

SEVERAL_RANKS = (
    "collectives",
    "context",
    "experts",
    "mesh",
    "pipeline",
    "ring",
    "sharded",
    "tensor",
)


def test_the_two_calls_make_the_step_of_a_train_batch_bit_for_bit() -> None:
    algorithm = GRPO(kl_coef=0.1, mini_batches=2)
    by_one_call, by_parts = (TorchTrainEngine(model_of("llama"), **OPTIONS) for _ in range(2))
    metrics = by_one_call.train_batch(make_batch(), algorithm)
    _, mini_batches = by_parts.prepare(make_batch(), algorithm)
    norms = []
    for mini_batch in mini_batches:
        loss = by_parts.forward_backward(mini_batch, algorithm)["loss"]
        norms.append(by_parts.optimizer_step(loss))
    assert by_parts.step == by_one_call.step == 2
    assert metrics["grad_norm"] == pytest.approx(sum(norms) / 2)
    expected = weights_of(by_one_call)
    assert all(torch.equal(value, expected[name]) for name, value in weights_of(by_parts).items())


def test_gradients_of_several_passes_add_up_until_the_step() -> None:
    once, twice = (
        TorchTrainEngine(model_of("llama"), **{**OPTIONS, "grad_clip": None}) for _ in range(2)
    )
    norms = []
    for engine, passes in ((once, 1), (twice, 2)):
        _, (mini_batch,) = engine.prepare(make_batch(), GRPO(kl_coef=0.1))
        for _ in range(passes):
            engine.forward_backward(mini_batch, GRPO(kl_coef=0.1))
        norms.append(engine.optimizer_step())
    assert norms[1] == pytest.approx(2 * norms[0], rel=1e-5)
    assert all(parameter.grad is None for parameter in twice.trained.values())


def test_a_step_whose_loss_is_not_finite_is_not_taken() -> None:
    engine = TorchTrainEngine(model_of("llama"), **OPTIONS)
    before = weights_of(engine)
    _, (mini_batch,) = engine.prepare(make_batch(), GRPO(kl_coef=0.1))
    engine.forward_backward(mini_batch, GRPO(kl_coef=0.1))
    with pytest.raises(FloatingPointError, match="no step was taken"):
        engine.optimizer_step(float("nan"))
    assert engine.step == 0
    assert all(parameter.grad is None for parameter in engine.trained.values())
    assert all(torch.equal(value, before[name]) for name, value in weights_of(engine).items())


def test_one_rank_loads_no_code_of_several() -> None:
    modules = [f"stages.engines.torch.parallel.{name}" for name in SEVERAL_RANKS]
    code = (
        "import sys, stages.engines.torch.train, stages.engines.torch.critic; "
        f"print([name for name in {modules} if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
