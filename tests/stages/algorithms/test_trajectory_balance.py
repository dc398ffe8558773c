"""Trajectory balance against the paper's formulas in plain float64 Python."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.algorithms import TokenBatch, build_algorithm
from stages.algorithms.policy_gradient.trajectory_balance import TrajectoryBalance

Row = dict[str, Any]  # now, ref: a float a token; group; reward
BETA = 0.3


def random_rows(seed: int, groups: int, size: int) -> list[Row]:
    """Rows of all groups; some have no trained token."""
    rng = random.Random(seed)
    return [
        {
            "now": [rng.uniform(-4, -0.1) for _ in range(length)],
            "ref": [rng.uniform(-4, -0.1) for _ in range(length)],
            "group": group,
            "reward": rng.uniform(-1, 1),
        }
        for group in range(groups)
        for length in (rng.randint(0, 5) for _ in range(size))
    ]


def pack(rows: list[Row], total_rows: int) -> TokenBatch:
    counts = torch.tensor([len(row["now"]) for row in rows])
    row = torch.repeat_interleave(torch.arange(len(rows)), counts)
    now, ref = (
        torch.tensor([x for each in rows for x in each[name]], dtype=torch.float64)
        for name in ("now", "ref")
    )
    target = torch.tensor([each["reward"] / BETA for each in rows], dtype=torch.float64)
    numbers = sorted({each["group"] for each in rows})
    return TokenBatch(
        logprobs=now.requires_grad_(),
        columns={"ref_logprobs": ref, "log_target": target[row]},
        row=row,
        row_tokens=counts,
        total_tokens=int(counts.sum()),
        total_rows=total_rows,
        rows={"log_target": target},
        group=torch.tensor([numbers.index(each["group"]) for each in rows]),
    )


def reference(rows: list[Row]) -> tuple[float, list[float]]:
    """The loss over all rows with trained tokens, and its derivative by each token's logprob."""
    trained = [row for row in rows if row["now"]]
    loss = 0.0
    gradient = []
    for row in trained:
        group = [other for other in trained if other["group"] == row["group"]]
        log_z = sum(
            sum(other["ref"]) - sum(other["now"]) + other["reward"] / BETA for other in group
        ) / len(group)
        residual = log_z + sum(row["now"]) - sum(row["ref"]) - row["reward"] / BETA
        loss += residual**2 / len(trained)
        gradient += [2 * residual / len(trained)] * len(row["now"])
    return loss, gradient


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**16), groups=st.integers(1, 4), size=st.integers(2, 5))
def test_loss_and_gradient_are_those_of_the_formula_however_groups_are_packed(
    seed: int, groups: int, size: int
) -> None:
    rows = random_rows(seed, groups, size)
    total = sum(bool(row["now"]) for row in rows)
    if not total:
        return
    expected, expected_gradient = reference(rows)
    algorithm = TrajectoryBalance(beta=BETA)
    loss = 0.0
    gradient: list[float] = []
    for part in ([row for row in rows if row["group"] == group] for group in range(groups)):
        tokens = pack(part, total)
        if not len(tokens.logprobs):
            continue
        output = algorithm.loss(tokens)
        output.loss.backward()
        assert tokens.logprobs.grad is not None
        loss += output.loss.item()
        gradient += tokens.logprobs.grad.tolist()
    assert loss == pytest.approx(expected)
    assert gradient == pytest.approx(expected_gradient)
    assert algorithm.loss(pack(rows, total)).loss.item() == pytest.approx(expected)


def test_it_rests_at_the_reference_times_the_exponential_of_the_reward() -> None:
    rows = random_rows(3, groups=2, size=4)
    for row in rows:
        row["now"] = row["now"] or [-1.0]
        row["ref"] = list(row["now"])
        row["now"][0] += row["reward"] / BETA - (1.7, -0.4)[row["group"]]
    tokens = pack(rows, len(rows))
    output = TrajectoryBalance(beta=BETA).loss(tokens)
    output.loss.backward()
    assert tokens.logprobs.grad is not None
    assert tokens.logprobs.grad.tolist() == pytest.approx([0.0] * len(tokens.logprobs), abs=1e-12)
    assert output.metrics["log_partition"].item() == pytest.approx((1.7 - 0.4) / 2)


def test_credit_is_the_reward_over_beta() -> None:
    algorithm = build_algorithm("trajectory_balance", {"beta": 0.5})
    made = algorithm.credit({"reward": torch.tensor([0.0, 1.0, -2.0])})
    assert made["log_target"].tolist() == [0.0, 2.0, -4.0]
