"""The torch engines on the device: the numbers of a CPU, copies that are waited for, no tensor of
another device."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.gpu import check
from orchestration.checkpoints.checkpoint import Checkpoint, Writer
from stages.adapters.options import AdapterOptions
from stages.algorithms.policy_gradient.grpo import GRPO
from stages.algorithms.policy_gradient.ppo import PPO
from stages.engines.protocols import GroupRequest, SamplingParams
from stages.engines.torch.critic import TorchCriticEngine
from stages.engines.torch.rollout import TorchRolloutEngine
from stages.engines.torch.sampling.drawing import draw, invert
from stages.engines.torch.train import TorchTrainEngine
from stages.training.adapter_turns import AdapterSwap
from tests.batches import make_batch
from tests.stages.sharded import OPTIONS, algorithm, model_of, weights_of, whole_state

DEVICE = os.environ.get("ON_DEVICE", "npu:0")  # "cuda:0": on a GPU
LORA = AdapterOptions(4, 8.0, seed=3)


def engines(kind: str, **options: Any) -> tuple[TorchTrainEngine, TorchTrainEngine]:
    """One on the device, one on the CPU."""
    device, cpu = (
        TorchTrainEngine(model_of(kind), **{**OPTIONS, **options, "device": device})
        for device in (DEVICE, "cpu")
    )
    return device, cpu


def assert_close(
    one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], limit: float = 1e-4
) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        gap = (value.cpu().float() - other[name].float()).norm() / other[name].float().norm().clamp(
            min=1e-6
        )
        assert gap < limit, f"{name}: {gap}"


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    assert all(np.array_equal(value, other[name]) for name, value in one.items())


def test_the_check_for_accelerators_passes(tmp_path: Path) -> None:
    """Rollout, update, replay, swap and colocated runs of three families; one has experts."""
    assert check.main(["--device", DEVICE, "--rehearse", "--repeat", "1"]) == 0


@pytest.mark.parametrize(
    "options",
    [{}, {"adapters": LORA}, {"value_head": True}, {"activation_checkpointing": True}],
    ids=["plain", "lora", "value head", "checkpointing"],
)
def test_steps_are_those_of_a_cpu(options: dict[str, Any]) -> None:
    ours, theirs = engines("qwen3", **options)
    of = algorithm()
    limit = 1e-4
    if "value_head" in options:
        of = PPO(epochs=2, mini_batches=2)
        limit = 2e-3  # four times as many steps
    for seed in range(2):
        batch = make_batch(seed=seed)
        if "value_head" in options:
            batch["reward"] = torch.linspace(-1, 1, len(batch))
        found = ours.train_batch(batch, of)
        expected = theirs.train_batch(batch, of)
        assert found == pytest.approx(expected, rel=2e-3, abs=1e-4)
    assert_close(weights_of(ours), weights_of(theirs), limit)
    for one, other in zip(
        ours.logprobs(batch).unbind(), theirs.logprobs(batch).unbind(), strict=True
    ):
        torch.testing.assert_close(one.cpu(), other, rtol=10 * limit, atol=10 * limit)


def test_a_batch_is_undone_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the second of two steps the gradient is not finite: weights and moments are those before
    the batch."""
    engine, _ = engines("llama")
    engine.train_batch(make_batch(seed=1), algorithm())
    before = whole_state(engine)
    clip = engine.parallel.clip
    is_first = iter([True, False])
    spoiled = lambda *of: clip(*of) if next(is_first) else float("nan")  # noqa: E731
    monkeypatch.setattr(engine.parallel, "clip", spoiled)
    with pytest.raises(FloatingPointError):
        engine.train_batch(make_batch(), GRPO(kl_coef=0.1, epochs=2))
    assert_same(whole_state(engine), before)


def test_a_critic_on_the_device() -> None:
    found = []
    for device in (DEVICE, "cpu"):
        engine = TorchCriticEngine(model_of("llama"), **{**OPTIONS, "device": device})
        batch = make_batch()
        batch["reward"] = torch.linspace(-1, 1, len(batch))
        batch["values"] = engine.values(batch)
        engine.train_batch(batch, PPO(critic="own").critic_algorithm())
        found.append([row.cpu() for row in engine.values(batch).unbind()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"compute": torch.bfloat16}], ids=["float32", "mixed"])
def test_a_checkpoint_of_the_device_continues_it(options: dict[str, Any], tmp_path: Path) -> None:
    engine, _ = engines("llama", **options)
    engine.train_batch(make_batch(), algorithm())
    writer = Writer(engine, 0)
    writer.copy()
    expected = whole_state(engine)
    # what was copied is written beside the next step
    engine.train_batch(make_batch(seed=1), algorithm())
    writer.write(tmp_path)
    other = TorchTrainEngine(model_of("llama", seed=9), **{**OPTIONS, **options, "device": DEVICE})
    Checkpoint(tmp_path, 1, {}, []).load_into(other)
    assert_same(whole_state(other), expected)
    other.train_batch(make_batch(seed=1), algorithm())
    assert all(
        torch.equal(value, weights_of(engine)[name]) for name, value in weights_of(other).items()
    )


# --- rollout
# --------------------------------------------------------------------------------------------------


def ask(group: int, **params: Any) -> GroupRequest:
    ids = torch.randint(0, 19, (7,), generator=torch.Generator().manual_seed(group))
    return GroupRequest(group, (0, 1, 2), ids, SamplingParams(**{"max_tokens": 9, **params}), group)


async def responses(
    device: str, weights: dict[str, torch.Tensor], **options: Any
) -> dict[Any, Any]:
    engine = TorchRolloutEngine(
        model_of("qwen3"), max_rows=8, device=device, accelerated=True, **options
    )
    asked = [ask(0), ask(1, temperature=0.0), ask(2, top_k=5, temperature=0.7), ask(3, top_p=0.8)]
    found: dict[Any, Any] = {}
    try:
        for version in range(2):
            async for done in engine.generate(asked):
                found[version, done.group, done.place] = done.token_ids.tolist(), done.logprobs
            if version == 0:
                await engine.load_weights(1, weights)
    finally:
        await engine.close()
    return found


@pytest.mark.parametrize("options", [{}, {"adapters": LORA}], ids=["plain", "lora"])
def test_responses_before_and_after_new_weights_are_those_of_a_cpu(options: dict[str, Any]) -> None:
    """With every way to sample.

    A float32 sum picks the same token as one in float64 at these points.
    """
    trained, _ = engines("qwen3", **options)
    trained.train_batch(make_batch(), algorithm())
    weights = {name: value.cpu() for name, value in weights_of(trained).items()}
    ours, theirs = (
        asyncio.run(responses(device, weights, **options)) for device in (DEVICE, "cpu")
    )
    assert len(ours) == len(theirs) == 24
    for key, (tokens, logprobs) in ours.items():
        assert tokens == theirs[key][0], key
        torch.testing.assert_close(logprobs, theirs[key][1], rtol=1e-3, atol=1e-4)


def test_tokens_are_drawn_by_sums_of_float32(npu: torch.device) -> None:
    torch.manual_seed(0)
    weights = torch.rand(4000, 300).softmax(-1)
    weights[:, 7::3] = 0
    points = torch.rand(4000, dtype=torch.float64)
    points[:2] = torch.tensor([0.0, 1 - 2.0**-52], dtype=torch.float64)
    exact = invert(weights, points)
    found = invert(weights.to(npu), points.float().to(npu)).cpu()
    assert (weights.gather(1, found[:, None]) > 0).all()
    assert (found != exact).float().mean() < 0.001
    assert draw(torch.randn(2, 300).to(npu), [SamplingParams(1)] * 2, [0.5, 1 - 2.0**-52]).read()[0]


async def test_adapters_take_turns_on_the_device() -> None:
    trainer, _ = engines("qwen3", adapters=LORA)
    rollout = TorchRolloutEngine(
        model_of("qwen3"), max_rows=8, device=DEVICE, accelerated=True, adapters=LORA
    )
    try:
        swap = AdapterSwap(trainer, rollout)
        trainer.train_batch(make_batch(), algorithm())
        swap.to_rollout()
        found = {
            (1, done.group, done.place): done
            async for done in rollout.generate([ask(0), ask(1, temperature=0.0)])
        }
    finally:
        await rollout.close()
    weights = {name: value.cpu() for name, value in weights_of(trainer).items()}
    expected = await responses("cpu", weights, adapters=LORA)
    assert {key: done.token_ids.tolist() for key, done in found.items()} == {
        key: expected[key][0] for key in found
    }
