"""Products of parallel strategies on real ranks against one process: each parameter's gradient,
three steps, checkpoints."""

from __future__ import annotations

from collections import ChainMap
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stages.engines.torch.train import TorchTrainEngine
from stages.parallel.layout import Layout
from stages.parallel.options import fits_ulysses
from tests.batches import make_batch
from tests.ranks import of_product
from tests.stages.products import after_steps, first_step, name_of, of_tokens
from tests.stages.sharded import (
    OPTIONS,
    SIZES,
    gradients_of_step,
    model_of,
    positions,
    resumed,
    saved,
)
from tests.stages.sharded import algorithm as grpo

# kind of model (see tests/stages/sharded.py), strategies, and options of the engine
RING = {"context_parallel": "ring"}  # for any number of heads
INTERLEAVED = {"pp": 2, "vpp": 2}
PRODUCTS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("qwen3", {"dp": 4, "dp_replicate": 2}, {}),
    ("biased", {"dp": 2, "dp_replicate": 2, "tp": 2}, {}),
    ("llama", {"dp": 4, "dp_replicate": 2, "tp": 2}, {}),
    ("experts", {"dp": 2, "ep": 2}, {}),
    ("experts", {"dp": 4, "ep": 4}, {}),
    ("moe", {"dp": 2, "tp": 2, "ep": 2}, {}),
    ("experts", {"dp": 2, "tp": 2, "ep": 4}, {}),
    ("moe", {"dp": 1, "tp": 2}, {}),
    ("experts", {"dp": 4, "dp_replicate": 2, "ep": 2}, {}),
    ("qwen3", {"cp": 2}, {}),
    ("qwen3", {"cp": 2, **RING}, {}),
    ("grouped", {"cp": 4}, {}),
    ("grouped", {"cp": 4, **RING}, {}),
    ("grouped", {"dp": 2, "cp": 2}, {}),
    ("biased", {"tp": 2, "cp": 2, **RING}, {}),
    ("grouped", {"dp": 2, "tp": 2, "cp": 2}, {}),
    ("llama", {"dp": 2, "tp": 2, "cp": 2, **RING}, {}),
    ("grouped", {"dp": 2, "dp_replicate": 2, "cp": 2, **RING}, {}),
    ("sinks", {"cp": 2}, {}),
    ("sinks", {"cp": 2, **RING}, {}),
    ("experts", {"cp": 2, "ep": 2}, {}),
    ("moe", {"dp": 2, "cp": 2, "ep": 2, **RING}, {}),
    ("qwen3-5", {"pp": 2}, {}),
    ("biased-4", {"pp": 4}, {}),
    ("llama-4", {"dp": 2, "pp": 2}, {}),
    ("qwen3-5", {"dp": 2, "tp": 2, "pp": 2}, {}),
    ("biased-6", {"dp": 2, **INTERLEAVED}, {}),
    ("llama-6", {"pp": 2, "vpp": 3}, {}),
    ("qwen3-5", {"tp": 2, **INTERLEAVED}, {}),
    ("grouped-4", {"cp": 2, "pp": 2}, {}),
    ("experts", {"tp": 2, "pp": 2, "ep": 2}, {}),
    ("moe", {"dp": 2, "pp": 2, "ep": 2}, {}),
    ("experts-4", {"dp": 2, "ep": 2, **INTERLEAVED}, {}),
    ("llama-8", {**INTERLEAVED, "pp": 4}, {}),
]
# A checkpoint of one product, resumed at the next: of models with experts, and of others.
OF_EXPERTS = [product for product in PRODUCTS if product[0] in ("experts", "moe")]
OF_STAGES = [
    product
    for product in PRODUCTS
    if "-" in product[0] and product[0] not in ("experts-4", "llama-8")
]
OTHERS = [product for product in PRODUCTS if "-" not in product[0] and product not in OF_EXPERTS]


def fitting(kind: str, product: dict[str, Any]) -> dict[str, Any]:
    """Return ``product``, with a ring where the heads of ``kind`` cannot be divided."""
    heads = 8 if kind.startswith("grouped") else SIZES["num_attention_heads"]
    tp, cp = product.get("tp", 1), product.get("cp", 1)
    return product if cp == 1 or fits_ulysses(heads, tp, cp) else {**product, **RING}


PAIRS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("experts-4", {"dp": 2, "ep": 2, "pp": 2}, {"dp": 2, "ep": 2, **INTERLEAVED}),
    ("qwen3-5", {"dp": 2}, {"pp": 2}),
    ("llama-4", INTERLEAVED, {"dp": 2}),
    *(
        (kind, first, fitting(kind, then))
        for some in (OTHERS, OF_STAGES, OF_EXPERTS)
        for (kind, first, _), (_, then, _) in pairwise(some)
        if first != then
    ),
]
each = pytest.mark.parametrize(
    ("kind", "chosen", "options"),
    PRODUCTS,
    ids=[f"{kind}-{name_of(*of)}" for kind, *of in PRODUCTS],
)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@cache
def alone(kind: str) -> dict[str, Any]:
    engine = TorchTrainEngine(model_of(kind), **OPTIONS)
    logprobs = [row.tolist() for row in engine.logprobs(make_batch()).unbind()]
    gradients, metrics = gradients_of_step(engine, make_batch(), grpo())
    return {
        "metrics": metrics,
        "logprobs": logprobs,
        "gradients": gradients,
        "steps": after_steps(None, kind, {}),
    }


@each
def test_gradients_and_three_steps_are_those_of_one_process(
    kind: str, chosen: dict[str, Any], options: dict[str, Any]
) -> None:
    """Gradients within 1e-5 in float32; weights after three steps within 1e-4 in float64, where
    rounding grows less."""
    expected = alone(kind)
    found = of_product(chosen, first_step, kind, options)
    shares = positions(chosen.get("dp", 1))
    for rank, result in enumerate(found):
        got = dict(result["metrics"])
        wanted = dict(expected["metrics"])
        # a split group's prompt is computed again
        assert got.pop("fed_tokens") >= wanted.pop("fed_tokens")
        assert got.pop("max_expert_load", 1.0) == pytest.approx(
            wanted.pop("max_expert_load", 1.0), rel=0.2
        )
        assert got == pytest.approx(wanted, rel=1e-5, abs=1e-7)
        assert result["metrics"] == found[0]["metrics"], "every rank returns the same"
        for at, row in zip(
            shares[Layout.for_training(**chosen).coordinates(rank).replica],
            result["logprobs"],
            strict=True,
        ):
            assert row == pytest.approx(expected["logprobs"][at], rel=1e-5, abs=1e-5)
    gradients = ChainMap(*(result["gradients"] for result in found))  # a pipeline stage has its own
    assert gradients.keys() == expected["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        gap = np.linalg.norm(gradients[name] - gradient.numpy()) / float(gradient.norm())
        assert gap < 1e-5, f"{name}: relative error {gap}"
    for name, value in found[0]["steps"].items():
        gap = np.linalg.norm(value - expected["steps"][name]) / np.linalg.norm(
            expected["steps"][name]
        )
        assert gap < 1e-4, f"{name}: relative error {gap} after three steps"


@pytest.mark.parametrize(("kind", "tp"), [("qwen3", 2), ("moe", 4)])
def test_tensor_parallel_ranks_divide_the_tokens_between_blocks(kind: str, tp: int) -> None:
    """Each norm of a rank sees its part alone, also of tokens that do not divide; activations that
    are computed again give the same bits."""
    found = of_product({"tp": tp}, of_tokens, kind)
    fed = found[0]["fed"]
    assert any(tokens % tp for tokens in fed)
    for rank, result in enumerate(found):
        parts = (torch.arange(tokens).chunk(tp)[rank:] for tokens in fed)
        own = [len(part[0]) if part else 0 for part in parts]
        assert result["norms"] == [tokens for tokens in own for _ in range(4)], (
            "two norms of each of two layers"
        )
        for name, gradient in result["first"].items():
            np.testing.assert_array_equal(result["again"][name], gradient, err_msg=name)
            gap = np.linalg.norm(
                gradient - alone(kind)["gradients"][name].numpy()
            ) / np.linalg.norm(gradient)
            assert gap < 1e-5, f"{name}: relative error {gap}"


@pytest.mark.parametrize(
    ("kind", "first", "then"),
    PAIRS,
    ids=[f"{kind}-{name_of(first)}-{name_of(then)}" for kind, first, then in PAIRS],
)
def test_a_checkpoint_of_one_product_resumes_at_another_bit_for_bit(
    kind: str, first: dict[str, Any], then: dict[str, Any], tmp_path: Path
) -> None:
    before = ChainMap(*of_product(first, saved, kind, str(tmp_path), {}))
    found = ChainMap(*(state for state, _ in of_product(then, resumed, kind, str(tmp_path), {})))
    assert any(
        np.abs(value).max() > 0 for name, value in before.items() if name.startswith("exp_avg/")
    )
    assert found.keys() == before.keys()
    for name, value in before.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
