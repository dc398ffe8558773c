"""Runs with responses that are cut at rollout.max_tokens: trained, masked, dropped; read by credit
and loss."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from orchestration.recipe.problems import RecipeError
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from stages.algorithms import LossOutput, TokenBatch
from stages.algorithms.policy_gradient.grpo import GRPO
from stages.flow import UserStage
from stages.flow.declarations import Columns
from tests.orchestration.run.test_flow import assert_filled
from tests.orchestration.run.test_run import (
    assert_each_sample_once,
    assert_equal,
    assert_nothing_left,
    synchronous,
    trained,
)
from tests.orchestration.runs import MOCK, TINY, complete, recipe

HERE = "tests.orchestration.run.test_truncated"
ENDS = {
    "rollout__stop": list("abcdefghijklm"),
    "algorithm__group_size": 16,
}  # about half of the rows end before the limit


class Punished(GRPO):
    """Reads ``truncated`` in credit and in loss."""

    @property
    def credit_reads(self) -> Columns:
        return {**super().credit_reads, "truncated": "bool"}

    @property
    def loss_reads(self) -> Columns:
        return {**super().loss_reads, "truncated": "bool"}

    def credit(self, group: Mapping[str, Any]) -> Any:
        return super().credit({"reward": group["reward"] - group["truncated"].float()})

    def loss(self, tokens: TokenBatch) -> LossOutput:
        out = super().loss(tokens)
        share = tokens["truncated"].float().sum() / tokens.total_tokens
        return LossOutput(out.loss, {**out.metrics, "truncated_tokens": share})


class Masker(UserStage):
    """Masks the first token."""

    needs = ("response_ids",)
    makes: ClassVar = {"loss_mask": "bool ragged"}

    def process(self, rows: Any) -> dict[str, Any]:
        return {"loss_mask": [torch.arange(len(row)) > 0 for row in rows["response_ids"]]}


async def test_masked_and_dropped_responses_train_as_in_the_plain_loop(tmp_path: Path) -> None:
    found = {}
    for how in ("train", "mask", "drop"):
        of = recipe(TINY, pipeline__staleness=0, train__steps=3, rollout__truncated=how, **ENDS)
        expected, weights = await synchronous(of)
        watched, result = await complete(Execution(RunFolder.create(of, tmp_path / how)))
        assert result.state == "finished", result.reason
        assert [(step["reward_mean"], step["loss"]) for step in watched.of("step")] == expected
        assert all(0 < step["truncated"] < 1 for step in watched.of("step"))
        # no group was dropped: the plain loop would decode others together
        assert_each_sample_once(of, watched)
        assert_equal(found.setdefault(how, trained(of, result)), weights)
        assert_nothing_left(watched.run)
    for one, other in (("train", "mask"), ("mask", "drop")):
        assert any(not torch.equal(value, found[other][name]) for name, value in found[one].items())


@pytest.mark.parametrize("how", ["mask", "drop"])
async def test_groups_with_too_few_responses_left_are_replaced(how: str, tmp_path: Path) -> None:
    # of about 40 in 100 responses longer than the limit
    lengths = {"time_scale": 0.02, "median_tokens": 20.0}
    limits: dict[str, Any] = {"rollout__max_tokens": 24, "rollout__truncated": how}
    limits |= {"rollout__mock": lengths}
    of = recipe(MOCK, pipeline__staleness=2, algorithm__group_size=2, **limits)
    watched, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert result.state == "finished", result.reason
    assert assert_filled(of, watched) > 0
    assert set(watched.of("ledger")[-1]["dropped"]) == {"truncated"}
    shares = [step["truncated"] for step in watched.of("step")]
    # of two, none may be missing in a comparison
    assert max(shares) < 1 if how == "mask" else set(shares) == {0.0}
    assert_nothing_left(watched.run)


class AnotherMasker(Masker):
    """Makes the same column."""


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("how", ["train", "mask"])
async def test_credit_and_loss_of_an_algorithm_read_truncated(
    how: str, masked: bool, tmp_path: Path
) -> None:
    """Also where another stage says which tokens are trained."""
    of = recipe(
        {**TINY, "stages": [{"use": f"{HERE}:Masker"}] * masked},
        algorithm__name=f"{HERE}:Punished",
        rollout__truncated=how,
        train__steps=3,
        **ENDS,
    )
    watched, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert result.state == "finished", result.reason
    for step in watched.of("step"):
        assert (step["truncated_tokens"] > 0) == (how == "train")
        assert step["truncated"] > 0


def test_a_second_maker_of_the_mask_is_refused() -> None:
    stages = [{"use": f"{HERE}:{name}"} for name in ("Masker", "AnotherMasker")]
    with pytest.raises(RecipeError, match=r"'loss_mask'.*made by more than one stage"):
        recipe({**TINY, "stages": stages}, rollout__truncated="mask")
