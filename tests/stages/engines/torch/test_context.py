"""Tokens divided over context-parallel ranks: what the products of strategies do not show."""

from __future__ import annotations

from statistics import median
from typing import Any

import numpy as np
import pytest
import torch

from stages.engines.torch.parallel.sharded import Sharded
from stages.engines.torch.train import TorchTrainEngine
from stages.parallel.layout import Layout
from tests.ranks import of_product
from tests.stages.products import bytes_of_long_rows, of_context, replayed
from tests.stages.sharded import OPTIONS, model_of

both = pytest.mark.parametrize("method", ["ulysses", "ring"])


def gap(found: Any, expected: Any) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@both
def test_ranks_divide_tokens_with_the_same_bits_each_time_and_compute_them_again(
    method: str,
) -> None:
    found = of_product(
        {"cp": 2, "context_parallel": method}, of_context, "grouped", {"token_budget": 40}
    )
    for result in found:
        for name, gradient in result["first"].items():
            np.testing.assert_array_equal(result["second"][name], gradient, err_msg=name)
            assert gap(result["again"][name], gradient) < 1e-6, name
            assert gap(result["half"][name], gradient) < 0.2, name
    first, second = (result["fed"] for result in found)
    assert first == second
    assert max(first) > 30, "a micro-batch of 80 tokens, half of them on each rank"
    assert max(first) <= 40 + 2


@both
def test_four_ranks_hold_four_times_the_tokens_in_the_memory_of_one(method: str) -> None:
    [one] = of_product({"dp": 1}, bytes_of_long_rows, 1024, {})
    found = of_product({"cp": 4, "context_parallel": method}, bytes_of_long_rows, 4096, {})
    assert 0.9 * one < median(found) < 1.12 * one
    assert max(found) < 1.25 * one, "how long gloo holds what it sends depends on the other ranks"


@both
def test_choices_of_experts_are_divided_with_the_tokens(method: str) -> None:
    torch.set_num_threads(1)
    expected = replayed(None, {})
    for found in of_product({"cp": 2, "ep": 2, "context_parallel": method}, replayed, {}):
        for got, wanted in zip(found["logprobs"], expected["logprobs"], strict=True):
            assert got == pytest.approx(wanted, rel=1e-5, abs=1e-5)
        assert found["agreement"] == pytest.approx(
            expected["agreement"], abs=0.05
        )  # split groups compute prompts again
        assert 0.05 < found["agreement"] < 0.6
    for name, gradient in expected["gradients"].items():
        assert gap(found["gradients"][name], gradient) < 1e-5, name


def test_heads_that_ranks_cannot_share_are_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"cp: 4 ranks cannot share 6 heads evenly; use "
        r"context_parallel = 'ring'",
    ):
        TorchTrainEngine(
            model_of("llama"), parallel=Sharded(Layout.for_training(cp=4).coordinates(0)), **OPTIONS
        )
