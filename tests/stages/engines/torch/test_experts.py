"""Experts on several ranks: what the products of strategies do not show."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stages.parallel.layout import Layout
from tests.ranks import of_product
from tests.stages.products import figure_three, of_experts
from tests.stages.sharded import model_of

EP2 = {"dp": 2, "tp": 2, "ep": 2}


def test_experts_are_read_computed_again_and_counted_with_the_same_bits_each_time(
    tmp_path: Path,
) -> None:
    model_of("experts", seed=5).save_pretrained(tmp_path)
    for found in of_product(EP2, of_experts, str(tmp_path)):
        assert found["differing"] == []
        for name, gradient in found["first"].items():
            np.testing.assert_array_equal(found["second"][name], gradient, err_msg=name)
            np.testing.assert_allclose(
                found["again"][name], gradient, rtol=1e-4, atol=1e-6, err_msg=name
            )
        for name, weight in found["first weights"].items():
            np.testing.assert_array_equal(found["second weights"][name], weight, err_msg=name)
        for name in ("first", "again"):
            fed, counts, most = found[f"{name} load"]
            loads = np.array(counts, dtype=float)
            assert loads.shape == (2, 8)
            # each token goes to two experts, and none is dropped
            np.testing.assert_array_equal(loads.sum(1), 2 * fed)
            assert most == pytest.approx((loads.max(1) / loads.mean(1)).max())


def test_figure_three_of_the_paper_trains_and_generates_on_the_same_ranks() -> None:
    """EP2 · TP2 · DP2 in training, EP4 · DP4 in generation."""
    received = of_product(EP2, figure_three, Layout(dp_replicate=4, ep=4))
    assert all(nbytes > 0 for nbytes in received)
