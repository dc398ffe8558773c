"""What each optimizer step trains on, and what comes of it, is the same on every layout of
ranks."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from stages.algorithms.policy_gradient.grpo import GRPO
from stages.engines.torch.train import TorchTrainEngine
from tests.batches import make_batch, stack, unstack
from tests.ranks import of_product
from tests.stages.products import name_of
from tests.stages.sharded import OPTIONS, batch_of_case, drawn_case, model_of, optimizer_steps

SEEDS = [0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 13, 17]
CLIPPED: dict[str, Any] = {"grad_clip": 0.5}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def cases_for(dp: int) -> list[dict[str, Any]]:
    """Those with a row, or a whole group, for each of ``dp`` replicas."""
    cases = [drawn_case(seed) for seed in SEEDS]
    return [
        case
        for case in cases
        if len(case["groups"] if case["kind"] == "dpo" else batch_of_case(case)) >= dp
    ]


@cache
def alone(dp: int) -> list[dict[str, Any]]:
    return optimizer_steps(None, cases_for(dp), "", CLIPPED)


def test_the_drawn_cases_are_of_every_kind() -> None:
    cases = cases_for(1)
    assert {case["kind"] for case in cases} == {"grpo", "dpo", "ppo"}
    assert {case["epochs"] for case in cases} == {1, 2}
    assert {case["mini_batches"] for case in cases} >= {1, 2, 3, 4}
    assert any(
        all(map(all, case["masked"])) is False and any(map(any, case["masked"])) for case in cases
    )
    assert any(len(case["groups"]) < case["mini_batches"] for case in cases)


@pytest.mark.parametrize(
    ("chosen", "how"),
    [
        ({"dp": 2}, "dealt"),
        ({"dp": 2}, "lopsided"),
        ({"dp": 3}, "dealt"),
        ({"tp": 2}, "dealt"),
        ({"dp": 2, "tp": 2}, "dealt"),
        ({"dp": 2, "pp": 2}, "dealt"),
        ({"dp": 2, "cp": 2}, "dealt"),
    ],
    ids=lambda value: name_of(value) if isinstance(value, dict) else value,
)
def test_each_optimizer_step_is_that_of_one_process(chosen: dict[str, int], how: str) -> None:
    """However rows are dealt: also where a replica has no row of a mini-batch."""
    dp = chosen.get("dp", 1)
    cases = [case for case in cases_for(dp) if how == "dealt" or case["kind"] != "dpo"]
    wanted = [
        result for case, result in zip(cases_for(dp), alone(dp), strict=True) if case in cases
    ]
    every = of_product({**chosen, "context_parallel": "ring"}, optimizer_steps, cases, how, CLIPPED)
    for case, expected, *found in zip(cases, wanted, *every, strict=True):
        for result in found:
            assert result["norms"] == pytest.approx(expected["norms"], rel=1e-5), case
            # A prompt is computed once for each part of its group, which ranks and micro-batches
            # decide.
            got, own = (of["metrics"] | {"fed_tokens": 0} for of in (result, expected))
            assert got == pytest.approx(own, rel=1e-4, abs=1e-7), case
            for name, value in result["weights"].items():  # a step moves a weight by up to 1e-2
                np.testing.assert_allclose(
                    value, expected["weights"][name], rtol=0, atol=1e-4, err_msg=name
                )


def steps_of(rows: list[dict[str, torch.Tensor]], **options: Any) -> tuple[int, dict[str, float]]:
    """Optimizer steps that an engine has made of a batch of ``rows``, and the metrics."""
    engine = TorchTrainEngine(model_of("llama"), **OPTIONS)
    metrics = engine.train_batch(stack(rows), GRPO(**options))
    return engine.step, dict(metrics)


def masked(rows: list[dict[str, torch.Tensor]], out: set[int]) -> list[dict[str, torch.Tensor]]:
    return [
        {**row, "loss_mask": torch.full(row["response_ids"].shape, at not in out)}
        for at, row in enumerate(rows)
    ]


def test_fewer_rows_than_mini_batches_make_as_many_steps_as_there_are_rows() -> None:
    rows = unstack(make_batch([(3, (4, 5)), (2, (6,))]))
    assert steps_of(rows, mini_batches=5)[0] == 3
    assert steps_of(rows, mini_batches=5, epochs=2)[0] == 6
    taken, metrics = steps_of(masked(rows, {0, 2}), mini_batches=2)
    assert taken == 1
    assert metrics == steps_of(rows[1:2], mini_batches=1)[1], (
        "a masked row is as one that is not there"
    )


def test_a_batch_with_no_token_to_train_on_is_skipped() -> None:
    engine = TorchTrainEngine(model_of("llama"), **{**OPTIONS, "warmup_steps": 4})
    rows = unstack(make_batch())
    before = {name: value.clone() for name, value in engine.weights()}
    with pytest.raises(FloatingPointError, match="loss_mask leaves no token of the batch"):
        engine.train_batch(stack(masked(rows, set(range(len(rows))))), GRPO())
    assert all(torch.equal(value, before[name]) for name, value in engine.weights())
    assert engine.train_batch(stack(rows), GRPO())["learning_rate"] == pytest.approx(
        OPTIONS["learning_rate"] / 2
    )
