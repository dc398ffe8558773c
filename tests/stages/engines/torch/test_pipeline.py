"""What holds with pipeline stages beside the products of
tests/stages/engines/torch/test_products.py."""

from __future__ import annotations

from collections import ChainMap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from stages.engines.torch.train import TorchTrainEngine
from stages.parallel.schedules import Action, filled, orders
from tests.ranks import of_product
from tests.stages.products import of_stages, replayed, swapped_stages
from tests.stages.sharded import (
    ENTROPY,
    OPTIONS,
    critic_steps,
    model_of,
    opened,
    value_steps,
    weights_of,
)

STAGES: dict[str, Any] = {"pp": 2, "vpp": 2}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def slots(ordered: list[list[Action]], *, backward: int = 2) -> tuple[int, int]:
    """The slots that ranks take for ``ordered`` together from first to last, when a pass takes one
    and a backward pass ``backward``, and those in which one of them is idle. Raises ValueError
    where ranks would wait for each other."""
    last = max(a.stage for order in ordered for a in order)
    at = [0] * len(ordered)
    free = [0] * len(ordered)
    done: dict[Action, int] = {}
    while any(at[rank] < len(order) for rank, order in enumerate(ordered)):
        before = len(done)
        for rank, order in enumerate(ordered):
            while at[rank] < len(order):
                action = order[at[rank]]
                if 0 <= action.needs.stage <= last and action.needs not in done:
                    break
                free[rank] = max(free[rank], done.get(action.needs, 0)) + (
                    backward if action.kind == "B" else 1
                )
                done[action] = free[rank]
                at[rank] += 1
        if len(done) == before:
            raise ValueError(
                f"ranks wait for each other after {before} of {sum(map(len, ordered))} passes"
            )
    work = max(sum(backward if a.kind == "B" else 1 for a in order) for order in ordered)
    return max(free), max(free) - work


@pytest.mark.parametrize(("pp", "vpp"), [(2, 1), (4, 1), (2, 2), (4, 2), (3, 3)])
def test_stages_idle_as_long_as_the_formula_says(pp: int, vpp: int) -> None:
    """(pp - 1) / (m · vpp) of the work of m micro-batches, whose number vpp rounds up to a multiple
    of pp."""
    for given in (1, 2, 5, 8):
        count = filled(pp, vpp, given)
        total, idle = slots(orders(pp, vpp, count))
        assert idle / (total - idle) == pytest.approx((pp - 1) / (count * vpp))
        forward = [action for order in orders(pp, vpp, given, backward=False) for action in order]
        assert sorted(forward) == sorted(
            {("F", stage, number) for stage in range(pp * vpp) for number in range(given)}
        )


def test_gradients_repeat_and_activations_are_computed_again_and_in_bfloat16(
    tmp_path: Path,
) -> None:
    """And what is written is what is published, by the names and in the shapes of one process."""
    model_of("biased-5").save_pretrained(tmp_path / "given")
    results = of_product(STAGES, of_stages, "biased-5", str(tmp_path))
    found = {
        name: ChainMap(*(result[name] for result in results))
        for name in results[0].keys() - {"published"}
    }
    for name, gradient in found["first"].items():
        np.testing.assert_array_equal(gradient, found["second"][name], err_msg=name)
        assert np.linalg.norm(found["again"][name] - gradient) < 1e-5 * np.linalg.norm(gradient), (
            name
        )
        assert np.linalg.norm(found["half"][name] - gradient) < 0.2 * np.linalg.norm(gradient), name
    for name, gradient in found["adapters"].items():
        assert "lora_B" not in name or np.abs(gradient).sum()
    assert len(found["adapters"]) == 5 * 2 * 7
    written = load_file(tmp_path / "written" / "model.safetensors")
    assert written.keys() == dict(model_of("biased-5").named_parameters()).keys()
    for result in results:
        assert result["published"].keys() == written.keys()
        for name, value in result["published"].items():
            np.testing.assert_array_equal(value, written[name].numpy(), err_msg=name)
    [read, other] = of_product({"pp": 2}, opened, str(tmp_path / "given"))
    for name, value in weights_of(TorchTrainEngine(model_of("biased-5"), **OPTIONS)).items():
        np.testing.assert_array_equal(read[name], value.numpy(), err_msg=name)
        np.testing.assert_array_equal(other[name], value.numpy(), err_msg=name)


def test_choices_of_experts_are_followed_by_each_stage() -> None:
    expected = replayed(None, {})
    found = of_product({"dp": 2, "pp": 2}, replayed, {})
    gradients = ChainMap(*(result["gradients"] for result in found))
    assert gradients.keys() == expected["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        assert np.linalg.norm(gradients[name] - gradient) < 1e-5 * np.linalg.norm(gradient), name
    for result in found:
        assert result["agreement"] == pytest.approx(expected["agreement"])


def test_values_and_a_critic_are_those_of_one_process(tmp_path: Path) -> None:
    warm_up = {"critic_warmup_steps": 1, "value_learning_rate": 3e-2}
    steps = [(value_steps, ("", {}, of_ppo)) for of_ppo in ({}, warm_up, ENTROPY)]
    for work, arguments in (*steps, (critic_steps, ("llama", str(tmp_path), {}))):
        expected: dict[str, Any] = work(None, *arguments)
        for result in of_product(
            {"dp": 2, "pp": 2} if work is value_steps else {"pp": 2}, work, *arguments
        ):
            for got, wanted in zip(result["metrics"], expected["metrics"], strict=True):
                assert {**got, "fed_tokens": 0} == pytest.approx(
                    {**wanted, "fed_tokens": 0}, rel=1e-4, abs=1e-6
                )
            for name, value in expected.get("weights", {}).items():
                assert np.linalg.norm(result["weights"][name] - value) < 1e-3 * np.linalg.norm(
                    value
                ), name
            for got, wanted in zip(
                result.get("values", ()), expected.get("values", ()), strict=True
            ):
                assert got == pytest.approx(wanted, rel=1e-3, abs=1e-5)


def test_stages_take_turns_with_a_rollout_layout() -> None:
    """Weights that stages hold, uneven and in two parts each, are the rollout's after a swap, and
    training goes on."""
    assert len(of_product({"dp": 2, **STAGES}, swapped_stages, "llama-5")) == 4
