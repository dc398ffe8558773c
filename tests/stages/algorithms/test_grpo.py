"""GRPO against a reference written row by row in plain float64 Python."""

from __future__ import annotations

import dataclasses
import math
import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from stages.algorithms import Drop, TokenBatch, build_algorithm
from stages.algorithms.policy_gradient.grpo import GRPO

Row = dict[str, Any]  # logprobs, rollout, ref: lists of floats; advantage: float


def random_rows(seed: int, rows: int = 5, spread: float = 0.4) -> list[Row]:
    """Rows whose ratios fall below, inside and above the clip range, with advantages of both signs
    and zero."""
    rng = random.Random(seed)
    made = []
    for i in range(rows):
        logprobs = [rng.uniform(-4, -0.1) for _ in range(rng.randint(1, 7))]
        made.append(
            {
                "logprobs": logprobs,
                "rollout": [p + rng.gauss(0, spread) for p in logprobs],
                "ref": [p + rng.gauss(0, spread) for p in logprobs],
                "advantage": [rng.uniform(0.1, 2), -rng.uniform(0.1, 2), 0.0][i % 3],
            }
        )
    return made


def pack(
    rows: list[Row], total_rows: int, total_tokens: int, dtype: torch.dtype = torch.float64
) -> TokenBatch:
    lengths = [len(row["logprobs"]) for row in rows]
    flat = {
        name: torch.tensor([x for row in rows for x in row[name]], dtype=dtype)
        for name in ("rollout", "ref")
    }
    logprobs = torch.tensor(
        [x for row in rows for x in row["logprobs"]], dtype=dtype, requires_grad=True
    )
    row = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(lengths))
    advantage = torch.tensor([r["advantage"] for r in rows], dtype=dtype)[row]
    columns = {
        "rollout_logprobs": flat["rollout"],
        "ref_logprobs": flat["ref"],
        "advantage": advantage,
    }
    return TokenBatch(logprobs, columns, row, torch.tensor(lengths), total_tokens, total_rows)


def credit(algorithm: GRPO, rewards: torch.Tensor) -> torch.Tensor:
    """The advantages of one group."""
    made = algorithm.credit({"reward": rewards})
    assert not isinstance(made, Drop)
    advantage: torch.Tensor = made["advantage"]
    return advantage


def whole(rows: list[Row], dtype: torch.dtype = torch.float64) -> TokenBatch:
    return pack(rows, len(rows), sum(len(row["logprobs"]) for row in rows), dtype)


def reference(algorithm: GRPO, rows: list[Row]) -> tuple[float, list[float], dict[str, float]]:
    """Loss, its gradient by token, and metrics, from the formulas, one token at a time."""
    tokens = sum(len(row["logprobs"]) for row in rows)
    loss = 0.0
    gradient = []
    clipped = 0
    ratios = []
    kl_behaviour = 0.0
    for row in rows:
        share = (
            1 / tokens
            if algorithm.loss_normalization == "token"
            else 1 / (len(rows) * len(row["logprobs"]))
        )
        advantage = row["advantage"]
        for now, behaviour, ref in zip(row["logprobs"], row["rollout"], row["ref"], strict=True):
            ratio = math.exp(now - behaviour)
            ratios.append(ratio)
            kl_behaviour += ratio - 1 - math.log(ratio)
            value = -ratio * advantage
            slope = -ratio * advantage
            if advantage > 0 and ratio > 1 + algorithm.clip_high:
                value = -(1 + algorithm.clip_high) * advantage
                slope = 0.0
                clipped = clipped + 1
            elif advantage < 0 and ratio < 1 - algorithm.clip_low:
                value = -(1 - algorithm.clip_low) * advantage
                slope = 0.0
                clipped = clipped + 1
            elif advantage < 0 and algorithm.max_ratio is not None and ratio > algorithm.max_ratio:
                value = -algorithm.max_ratio * advantage
                slope = 0.0
            if algorithm.kl_coef:
                value += algorithm.kl_coef * (math.exp(ref - now) - (ref - now) - 1)
                slope += algorithm.kl_coef * (1 - math.exp(ref - now))
            loss += value * share
            gradient.append(slope * share)
    metrics = {
        "clip_fraction": clipped / tokens,
        "kl_behaviour": kl_behaviour / tokens,
        "ess": sum(ratios) ** 2 / (tokens * sum(r * r for r in ratios)),
        "max_ratio": max(ratios),
    }
    return loss, gradient, metrics


@pytest.mark.parametrize("normalization", ["token", "sequence"])
@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
@pytest.mark.parametrize("max_ratio", [None, 1.5])
@pytest.mark.parametrize("seed", range(3))
def test_loss_gradient_and_metrics_are_those_of_the_formulas(
    normalization: Any, kl_coef: float, max_ratio: float | None, seed: int
) -> None:
    algorithm = GRPO(
        clip_low=0.2,
        clip_high=0.28,
        kl_coef=kl_coef,
        max_ratio=max_ratio,
        loss_normalization=normalization,
    )
    rows = random_rows(seed, rows=12)
    expected_loss, expected_gradient, expected_metrics = reference(algorithm, rows)
    tokens = whole(rows)
    output = algorithm.loss(tokens)
    output.loss.backward()

    assert output.loss.item() == pytest.approx(expected_loss, rel=1e-6, abs=1e-9)
    torch.testing.assert_close(
        tokens.logprobs.grad,
        torch.tensor(expected_gradient, dtype=torch.float64),
        rtol=1e-6,
        atol=1e-9,
    )
    metrics = algorithm.finish({name: value.item() for name, value in output.metrics.items()})
    assert {name: metrics[name] for name in expected_metrics} == pytest.approx(
        expected_metrics, rel=1e-6
    )
    assert ("kl_reference" in metrics) == (kl_coef > 0)
    assert all(not value.requires_grad for value in output.metrics.values())


def test_float32_agrees_with_the_float64_reference() -> None:
    algorithm = GRPO(kl_coef=0.1)
    rows = random_rows(7, rows=20)
    assert algorithm.loss(whole(rows, torch.float32)).loss.item() == pytest.approx(
        reference(algorithm, rows)[0], abs=1e-6
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "has_gradient"),
    [
        (1.5, 1.0, False),
        (0.5, 1.0, True),
        (1.5, -1.0, True),
        (0.5, -1.0, False),
        (1.1, 1.0, True),
        (0.9, -1.0, True),
    ],
)
def test_the_clip_stops_only_steps_that_go_further_out(
    ratio: float, advantage: float, has_gradient: bool
) -> None:
    row = {
        "logprobs": [-1.0],
        "rollout": [-1.0 - math.log(ratio)],
        "ref": [-1.0],
        "advantage": advantage,
    }
    tokens = whole([row])
    output = GRPO().loss(tokens)
    output.loss.backward()
    assert tokens.logprobs.grad is not None
    assert (tokens.logprobs.grad.item() != 0) == has_gradient
    assert output.metrics["clip_fraction"].item() == (not has_gradient)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    cuts=st.lists(st.integers(0, 10), max_size=4),
    normalization=st.sampled_from(["token", "sequence"]),
)
def test_micro_batches_add_up_to_the_batch(seed: int, cuts: list[int], normalization: Any) -> None:
    algorithm = GRPO(kl_coef=0.05, loss_normalization=normalization)
    rows = random_rows(seed, rows=10)
    tokens = whole(rows)
    once = algorithm.loss(tokens)
    once.loss.backward()

    loss = 0.0
    gradients = []
    sums = dict.fromkeys(once.metrics, 0.0)
    edges = sorted({0, 10, *cuts})
    for start, end in pairwise(edges):
        part = pack(rows[start:end], tokens.total_rows, tokens.total_tokens)
        output = algorithm.loss(part)
        output.loss.backward()
        loss += output.loss.item()
        gradients.append(part.logprobs.grad)
        for name, value in output.metrics.items():
            sums[name] = (
                max(sums[name], value.item())
                if name.startswith("max_")
                else sums[name] + value.item()
            )

    assert loss == pytest.approx(once.loss.item(), rel=1e-9, abs=1e-12)
    torch.testing.assert_close(torch.cat(gradients), tokens.logprobs.grad)
    expected = algorithm.finish({name: value.item() for name, value in once.metrics.items()})
    assert algorithm.finish(sums) == pytest.approx(expected, rel=1e-9)


def test_advantages_have_mean_zero_and_unit_sample_std() -> None:
    rewards = torch.tensor([0.0, 1.0, 0.5, 0.25])
    mean = sum(rewards.tolist()) / 4
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards.tolist()) / 3)
    expected = [(r - mean) / (std + 1e-4) for r in rewards.tolist()]
    assert credit(GRPO(), rewards).tolist() == pytest.approx(expected, rel=1e-6)
    assert credit(GRPO(scale_rewards=False), rewards).tolist() == pytest.approx(
        [r - mean for r in rewards.tolist()]
    )


@pytest.mark.parametrize("rewards", [[0.7] * 8, [0.1], [-3.0, -3.0]])
def test_equal_rewards_teach_nothing(rewards: list[float]) -> None:
    for scale in (True, False):
        advantages = credit(GRPO(scale_rewards=scale), torch.tensor(rewards))
        assert advantages.dtype == torch.float32
        assert not advantages.any()
    rows = [row | {"advantage": 0.0} for row in random_rows(1)]
    tokens = whole(rows)
    GRPO().loss(tokens).loss.backward()
    assert tokens.logprobs.grad is not None
    assert not tokens.logprobs.grad.any()


def test_a_sample_of_the_current_policy_has_full_effective_sample_size() -> None:
    rows = [row | {"rollout": row["logprobs"]} for row in random_rows(3)]
    algorithm = GRPO()
    output = algorithm.loss(whole(rows))
    metrics = algorithm.finish({name: value.item() for name, value in output.metrics.items()})
    assert metrics["ess"] == pytest.approx(1.0)
    assert metrics["kl_behaviour"] == pytest.approx(0.0)
    assert metrics["ratio_mean"] == pytest.approx(1.0)


def test_the_reference_is_asked_for_only_with_kl() -> None:
    assert not GRPO().scores
    assert "ref_logprobs" not in GRPO().loss_reads
    assert GRPO(kl_coef=0.1).scores == {"ref_logprobs": "frozen model"}
    assert GRPO(kl_coef=0.1).loss_reads["ref_logprobs"] == "float32 ragged"


@pytest.mark.parametrize("rewards", [[0.0] * 4, [0.7] * 8])
def test_groups_with_equal_rewards_are_dropped_on_request(rewards: list[float]) -> None:
    assert GRPO(drop_equal=True).credit({"reward": torch.tensor(rewards)}) == Drop("equal rewards")
    assert not isinstance(
        GRPO(drop_equal=True).credit({"reward": torch.tensor([*rewards, 0.1])}), Drop
    )


def test_a_row_weight_scales_the_row() -> None:
    rows = random_rows(5, rows=4)
    plain = whole(rows)
    half = whole(rows)
    weight = torch.tensor([0.5, 1.0, 2.0, 0.0], dtype=torch.float64)
    weighted = dataclasses.replace(half, weight=weight[half.row])
    for algorithm in (GRPO(), GRPO(loss_normalization="sequence")):
        gradients = []
        for tokens in (plain, weighted):
            tokens.logprobs.grad = None
            algorithm.loss(tokens).loss.backward()
            gradients.append(tokens.logprobs.grad)
        torch.testing.assert_close(gradients[1], gradients[0] * weighted.weight)


def test_options_are_validated_all_at_once_by_name() -> None:
    assert build_algorithm("grpo", {"clip_high": 0.28}).clip_high == 0.28  # type: ignore[attr-defined]
    with pytest.raises(ValidationError) as error:
        build_algorithm("grpo", {"clip_low": 1.5, "kl": 0.1})
    assert {e["loc"] for e in error.value.errors()} == {("clip_low",), ("kl",)}
    with pytest.raises(ValueError, match=r'algorithm\.name = "pppo": is not known'):
        build_algorithm("pppo", {})
