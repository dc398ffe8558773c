"""A train batch is atomic: all of its optimizer steps are made, or none.

What is left is compared bit for bit with the state before, and what follows with an engine that
never saw the batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from stages.adapters.options import AdapterOptions
from stages.algorithms import AlgorithmError, NamedAlgorithm
from stages.algorithms.policy_gradient.grpo import GRPO
from stages.algorithms.policy_gradient.ppo import PPO
from stages.engines.torch.critic import TorchCriticEngine
from stages.engines.torch.optimizers.weights import Undo, all_finite
from stages.engines.torch.train import TorchTrainEngine
from tests.batches import make_batch
from tests.ranks import of_product
from tests.stages.products import name_of
from tests.stages.sharded import OPTIONS, batch_with_rewards, model_of, skipped_on_ranks, spoiled

SCHEDULED: dict[str, Any] = {**OPTIONS, "warmup_steps": 8, "weight_decay": 0.1}
SEVERAL: dict[str, Any] = {"epochs": 2, "mini_batches": 2}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def plain(**options: Any) -> TorchTrainEngine:
    return TorchTrainEngine(model_of("llama"), **{**SCHEDULED, **options})


ENGINES: dict[str, tuple[Callable[[], Any], Any]] = {
    "float32": (plain, GRPO(**SEVERAL)),
    "master weights": (lambda: plain(compute=torch.bfloat16), GRPO(**SEVERAL)),
    "bfloat16": (
        lambda: TorchTrainEngine(model_of("biased", dtype=torch.bfloat16), **SCHEDULED),
        GRPO(**SEVERAL),
    ),
    "adapters": (lambda: plain(adapters=AdapterOptions(rank=2, alpha=4)), GRPO(**SEVERAL)),
    "value head": (lambda: plain(value_head=True), PPO(**SEVERAL)),
    "critic": (
        lambda: TorchCriticEngine(model_of("llama"), **SCHEDULED),
        PPO(critic="own", value_epochs=3, mini_batches=2).critic_algorithm(),
    ),
}


def batch_for(engine: Any, seed: int) -> TensorDict:
    batch = batch_with_rewards(seed)
    if isinstance(engine, TorchCriticEngine):
        batch["values"] = engine.values(batch)
    return batch


def flat(value: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {name: value}
    return {
        key: each for part, of in value.items() for key, each in flat(of, f"{name}/{part}").items()
    }


def assert_same(state: dict[str, Any], expected: dict[str, Any]) -> None:
    got = flat(state)
    wanted = flat(expected)
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert (
            torch.equal(got[name], value) if isinstance(value, torch.Tensor) else got[name] == value
        ), name


@pytest.mark.parametrize("at", [2, 4])
@pytest.mark.parametrize("kind", ENGINES)
def test_a_batch_leaves_nothing_where_a_later_optimizer_step_is_not_finite(
    kind: str, at: int
) -> None:
    make, algorithm = ENGINES[kind]
    engine = make()
    twin = make()
    engine.train_batch(batch_for(engine, 0), algorithm)
    before = copy.deepcopy(engine.state_dict())
    published = {name: value.clone() for name, value in engine.weights()}
    with (
        spoiled(engine, at),
        pytest.raises(FloatingPointError, match=f"the {at - 1} before it in the batch are undone"),
    ):
        engine.train_batch(batch_for(engine, 1), algorithm)
    assert_same(engine.state_dict(), before | {"version": 2})
    assert all(torch.equal(value, published[name]) for name, value in engine.weights())
    twin.load_state_dict(before | {"version": 2})
    metrics = engine.train_batch(batch_for(engine, 2), algorithm)
    assert metrics == twin.train_batch(batch_for(twin, 2), algorithm)
    assert metrics["learning_rate"] == pytest.approx(OPTIONS["learning_rate"] * 3 / 8), (
        "of the third version"
    )
    assert_same(engine.state_dict(), twin.state_dict())


def test_a_value_that_is_no_number_in_the_second_mini_batch_leaves_the_first_out() -> None:
    engine = plain(token_budget=12)
    before = copy.deepcopy(engine.state_dict())
    batch = make_batch()
    batch["advantage"][-1] = float("nan")
    with pytest.raises(FloatingPointError, match="gradient norm is nan at step 0"):
        engine.train_batch(batch, GRPO(mini_batches=2))
    assert_same(engine.state_dict(), before | {"version": 1})


@pytest.mark.parametrize(
    "options", [{}, {"compute": torch.bfloat16}, {"weight_decay": 1e41, "learning_rate": 0.1}]
)
@pytest.mark.parametrize("epochs", [1, 3])
def test_weights_that_would_overflow_are_taken_back(options: dict[str, Any], epochs: int) -> None:
    engine = plain(**{"learning_rate": 1e39, "warmup_steps": 0, **options})
    before = copy.deepcopy(engine.state_dict())
    with pytest.raises(FloatingPointError, match="lower learning_rate"):
        engine.train_batch(make_batch(), GRPO(epochs=epochs))
    assert_same(engine.state_dict(), before | {"version": 1})
    assert all(bool(value.isfinite().all()) for _, value in engine.weights())


class Forgetful(GRPO):
    """Fails in the second optimizer step, which is of other rows than the first."""

    def loss(self, tokens: Any) -> Any:
        if tokens.total_groups == 3:
            raise ZeroDivisionError("the algorithm's own mistake")
        return super().loss(tokens)


def test_any_other_error_leaves_nothing_too_and_the_batch_counts_as_not_seen() -> None:
    engine = plain()
    before = copy.deepcopy(engine.state_dict())
    with pytest.raises(AlgorithmError, match="the algorithm's own mistake"):
        engine.train_batch(make_batch(), NamedAlgorithm("forgetful", Forgetful(mini_batches=2)))
    assert_same(engine.state_dict(), before)


def test_one_optimizer_step_costs_no_copy_and_several_cost_one_that_is_reused() -> None:
    engine = plain()
    engine.train_batch(make_batch(), GRPO())
    assert engine._undo._memory.numel() == 0
    engine.train_batch(make_batch(), GRPO(epochs=2))
    memory = engine._undo._memory
    state = 3 * sum(weight.nbytes for _, weight in engine.weights())
    assert state <= memory.numel() < 1.25 * state, (
        "tensors of this model are small, and begin at multiples of 512 bytes"
    )
    engine.train_batch(make_batch(), GRPO(epochs=3))
    assert engine._undo._memory.data_ptr() == memory.data_ptr()
    engine.close()
    assert engine._undo._memory.numel() == 0


def test_a_batch_that_was_trained_can_be_taken_back_where_the_engine_is_to_keep_it() -> None:
    """A critic of its own has skipped it."""
    engine = plain(undoable=True)
    engine.train_batch(make_batch(), GRPO())
    before = copy.deepcopy(engine.state_dict())
    engine.train_batch(make_batch(seed=1), GRPO())
    engine.undo()
    assert_same(engine.state_dict(), before | {"version": 2})
    engine.undo()
    assert_same(engine.state_dict(), before | {"version": 2})
    forgetful = plain()
    forgetful.train_batch(make_batch(), GRPO())
    with pytest.raises(RuntimeError, match="undoable = True"):
        forgetful.undo()


@pytest.mark.parametrize("where", ["rows", "gradient", "loss"])
@pytest.mark.parametrize("chosen", [{"dp": 2}, {"tp": 2}, {"dp": 2, "pp": 2}], ids=name_of)
def test_what_shows_on_one_rank_alone_is_undone_on_all(chosen: dict[str, int], where: str) -> None:
    """``rows`` of one replica, in its second mini-batch; a gradient, or the sum of losses, that is
    wrong in the memory of one rank alone."""
    found = of_product(chosen, skipped_on_ranks, where)
    for result in found:
        assert "no step was taken and the 1 before it in the batch are undone" in result["error"]
        assert result["step"] == 4
        assert result["version"] == 2
        assert result["differs"] == []
        assert result["learning_rate"] == pytest.approx(OPTIONS["learning_rate"] * 3 / 8)
        assert result["next"] == found[0]["next"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_value_that_is_not_finite_is_found_among_many(dtype: torch.dtype) -> None:
    tensors = [
        torch.randn(3, 5, dtype=dtype),
        torch.empty(0, dtype=dtype),
        torch.randn(7, dtype=dtype),
    ]
    assert all_finite(tensors)
    assert all_finite([])
    for value in (float("nan"), float("inf"), float("-inf")):
        for at in (0, 3, 6):
            spoilt = tensors[2].clone()
            spoilt[at] = value
            assert not all_finite([*tensors, spoilt])


def test_what_is_put_back_has_the_same_bits_whatever_its_form() -> None:
    tensors = [
        torch.randn(3, 2).t(),
        torch.tensor(3.0),
        torch.randn(5, dtype=torch.bfloat16),
        torch.empty(0, 4),
    ]
    before = [tensor.clone() for tensor in tensors]
    undo = Undo(torch.device("cpu"))
    undo.keep(tensors)
    for tensor in tensors:
        tensor.fill_(9.0)
    undo.put_back()
    assert all(torch.equal(tensor, value) for tensor, value in zip(tensors, before, strict=True))
    assert not undo.is_kept
