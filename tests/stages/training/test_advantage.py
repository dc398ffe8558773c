"""Credit of groups with truncated responses, and what the train engine makes of the mask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
from tensordict import TensorDict

from stages.algorithms.policy_gradient.grpo import GRPO
from stages.flow.catalogue import Truncated, catalogue
from stages.flow.declarations import Drop
from stages.flow.resolver import resolve
from stages.training.advantage import DROPPED, credits, spared
from tests.batches import make_batch
from tests.ranks import on_ranks
from tests.stages.algorithms.test_interface import Discounted, Observing
from tests.stages.engines.torch.test_train import engine_of, tiny_llama, weights_of
from tests.stages.sharded import masked_step, of_masked

TOKENS = (3, 1, 2, 5)
NO = False
YES = True


def credit(algorithm: Any, rewards: list[float], truncated: list[bool], how: Truncated) -> Any:
    rows = TensorDict(
        {"reward": torch.tensor(rewards), "truncated": torch.tensor(truncated)}, [len(rewards)]
    )
    rows["values"] = torch.nested.nested_tensor(
        [torch.zeros(n) for n in TOKENS], layout=torch.jagged
    )
    (members,), (result,) = credits(algorithm, rows, [7] * 4, TOKENS, how)
    assert members == [0, 1, 2, 3]
    return result


def mask_of(result: Mapping[str, Any]) -> list[list[bool]]:
    return [row.tolist() for row in result["loss_mask"]]


def test_a_masked_response_counts_in_the_credit_and_not_in_the_loss() -> None:
    result = credit(GRPO(), [1.0, 0.0, 0.0, 1.0], [NO, YES, NO, NO], "mask")
    assert torch.equal(
        result["advantage"],
        GRPO().credit({"reward": torch.tensor([1.0, 0.0, 0.0, 1.0])})["advantage"],
    )
    assert mask_of(result) == [[True] * 3, [False], [True] * 2, [True] * 5]


def test_a_dropped_response_counts_in_neither() -> None:
    result = credit(GRPO(), [1.0, 0.0, 0.0, 1.0], [NO, YES, NO, NO], "drop")
    three = GRPO().credit({"reward": torch.tensor([1.0, 0.0, 1.0])})["advantage"]
    assert result["advantage"].tolist() == [three[0], 0.0, three[1], three[2]]
    assert mask_of(result) == [[True] * 3, [False], [True] * 2, [True] * 5]


def test_ragged_credit_of_a_dropped_response_is_zero_at_its_tokens() -> None:
    result = credit(Discounted(), [1.0, 2.0, 3.0, 4.0], [NO, YES, NO, YES], "drop")
    assert [row.tolist() for row in result["returns"]] == [[1.0] * 3, [0.0], [3.0] * 2, [0.0] * 5]


TOO_FEW: list[tuple[Truncated, list[bool], bool]] = [
    ("mask", [YES, YES, YES, NO], False),
    ("mask", [YES] * 4, True),
    ("drop", [YES, YES, NO, NO], False),
    ("drop", [YES, YES, YES, NO], True),
    ("train", [YES] * 4, False),
]


@pytest.mark.parametrize(("how", "truncated", "dropped"), TOO_FEW)
def test_a_group_with_too_few_responses_left_is_dropped(
    how: Truncated, truncated: list[bool], dropped: bool
) -> None:
    result = credit(GRPO(), [1.0, 0.0, 0.0, 1.0], truncated, how)
    assert (result == Drop(DROPPED)) == dropped


def test_a_step_that_may_drop_no_more_trains_groups_with_zeros() -> None:
    equal = [1.0] * 4
    differing = [1.0, 0.0, 0.0, 1.0]
    results = [
        credit(GRPO(drop_equal=True), rewards, [NO] * 4, "mask")
        for rewards in (equal, differing, equal)
    ]
    # no token of it can be trained
    results.append(credit(GRPO(drop_equal=True), equal, [YES] * 4, "mask"))
    dropped, kept, late, hopeless = spared([7, 9, 8, 11], results, below=8)
    assert (dropped, kept, hopeless) == (Drop("equal rewards"), results[1], Drop(DROPPED))
    assert not isinstance(late, Drop)
    assert late["advantage"].tolist() == [0.0] * 4
    assert mask_of(late) == [[True] * n for n in TOKENS]


def test_a_loss_that_compares_whole_groups_gets_whole_groups() -> None:
    class Whole(GRPO):
        unit: ClassVar = "group"

    assert credit(Whole(), [1.0, 0.0, 0.0, 1.0], [NO, YES, NO, NO], "mask") == Drop(DROPPED)
    assert mask_of(credit(Whole(), [1.0, 0.0, 0.0, 1.0], [NO] * 4, "mask")) == [
        [True] * n for n in TOKENS
    ]


def test_the_mask_is_a_declared_column_also_without_credit() -> None:
    class Uncredited(Observing):
        @property
        def credit_makes(self) -> Mapping[str, str]:
            return {}

        @property
        def loss_reads(self) -> Mapping[str, str]:
            return {"rollout_logprobs": "float32 ragged", "truncated": "bool"}

    assert "advantage" not in resolve(Uncredited(), catalogue())
    flow = resolve(Uncredited(), catalogue(), "drop")
    assert flow["advantage"].makes == {"loss_mask": "bool ragged"}
    assert {"loss_mask", "truncated"} <= flow["update"].needs.keys()
    assert mask_of(credit(Uncredited(), [0.0] * 4, [NO, YES, YES, YES], "drop"))[:2] == [
        [True] * 3,
        [False],
    ]


@pytest.mark.parametrize("normalization", ["token", "sequence"])
def test_training_with_masked_rows_is_training_without_them(normalization: Any) -> None:
    """They are not computed either: fewer tokens are fed to the model."""
    weights = []
    fed = []
    for left_out in (False, True):
        batch = make_batch()
        keep = torch.arange(len(batch)) % 3 != 0
        if left_out:
            batch = batch[keep]
        else:
            rows = [
                torch.full((len(row),), bool(k))
                for row, k in zip(batch["response_ids"].unbind(), keep, strict=True)
            ]
            batch["loss_mask"] = torch.nested.nested_tensor(rows, layout=torch.jagged)
        engine = engine_of(tiny_llama())
        fed.append(engine.train_batch(batch, GRPO(loss_normalization=normalization))["fed_tokens"])
        weights.append(weights_of(engine))
    assert fed[0] == fed[1]
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name]), name


def test_a_rank_with_masked_rows_alone_takes_part() -> None:
    found = on_ranks(2, 1, masked_step)
    expected = dict(engine_of(tiny_llama()).train_batch(of_masked(None), GRPO()))
    for metrics in found:
        assert metrics.keys() == expected.keys()
        assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-4)
        assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
