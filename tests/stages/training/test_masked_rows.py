"""Rows that are masked count nowhere: not in a mean over rows, not in the share of rows that teach
something."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from tensordict import TensorDict

from stages.algorithms.policy_gradient.grpo import GRPO
from tests.batches import make_batch
from tests.stages.engines.torch.test_train import (
    assert_same_gradients,
    engine_of,
    gradients_of_step,
    tiny_llama,
)


class WholeGroups(GRPO):
    """GRPO that compares the rows of a group in its loss, so that no micro-batch cuts it."""

    unit: ClassVar[Any] = "group"


def masked(batch: TensorDict, rows: torch.Tensor) -> TensorDict:
    """``batch`` with a mask that leaves out ``rows``, bool [B]."""
    out = batch.copy()
    mask = [
        torch.full((len(row),), not left_out)
        for row, left_out in zip(batch["response_ids"], rows, strict=True)
    ]
    out["loss_mask"] = torch.nested.nested_tensor(mask, layout=torch.jagged)
    return out


@pytest.mark.parametrize("algorithm", [GRPO, WholeGroups])
@pytest.mark.parametrize("normalization", ["token", "sequence", "constant"])
def test_a_step_with_masked_rows_is_the_step_without_them(
    algorithm: type[GRPO], normalization: Any
) -> None:
    batch = make_batch()
    left_out = torch.arange(len(batch)) % 4 == 1
    loss = algorithm(loss_normalization=normalization, response_tokens=8, scale_learning_rate=False)
    found, metrics = gradients_of_step(engine_of(tiny_llama()), masked(batch, left_out), loss)
    expected, without = gradients_of_step(engine_of(tiny_llama()), batch[~left_out], loss)
    assert_same_gradients(found, expected)
    assert metrics["loss"] == pytest.approx(without["loss"], rel=1e-4)


@pytest.mark.parametrize(
    ("advantages", "left_out", "share"),
    [
        ([1.0, -1.0, 0.0, 0.0, 0.0, 0.0, 0.5, -0.5], [], 4 / 8),
        ([1.0, -1.0, 0.0, 0.0, 0.0, 0.0, 0.5, -0.5], [4, 5], 4 / 6),
        ([1.0, -1.0, 0.0, 0.0, 0.0, 0.0, 0.5, -0.5], [0, 4, 5], 3 / 5),
    ],
)
def test_the_learning_rate_is_scaled_by_the_share_of_the_trained_rows(
    advantages: list[float], left_out: list[int], share: float
) -> None:
    batch = make_batch([(3, (2, 5, 1, 4)), (5, (3, 3, 2, 6))])
    batch["advantage"] = torch.tensor(advantages)
    rows = torch.zeros(len(batch), dtype=torch.bool)
    rows[left_out] = True
    metrics = engine_of(tiny_llama(), learning_rate=1e-2).train_batch(
        masked(batch, rows), GRPO(scale_learning_rate=True)
    )
    assert metrics["learning_rate"] == pytest.approx(1e-2 * share)
