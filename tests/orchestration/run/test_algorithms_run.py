"""Algorithms whose flow differs from that of the recipes of the package, each in a real run: their
columns are made, their steps are taken, and what they report is there."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from tests.orchestration.runs import TINY, complete, recipe

BY_LETTER = [{"name": "tests.orchestration.scores:letter_by_letter"}]
TWO = [{"name": "spelling"}, {"name": "exact_number", "weight": 0.5}]


@pytest.mark.parametrize(
    ("name", "options", "functions", "reported"),
    [
        ("gdpo", {"kl_reward": 0.01}, TWO, {"ess"}),
        ("m2po", {}, TWO[:1], {"ess"}),
        (
            "grpo",
            {"deviation_of": "batch", "entropy_coef": 0.01, "off_policy_mask": 0.1},
            TWO[:1],
            {"off_policy_fraction"},
        ),
        (
            "shuffle_r1",
            {"mini_batches": 2, "entropy_target": 1.0, "high_entropy_share": 0.2},
            TWO[:1],
            {"entropy_coef", "entropy_coef_level", "high_entropy_fraction"},
        ),
        ("process_grpo", {"normalize": "returns"}, BY_LETTER, {"ess"}),
        ("ppo", {"reward_level": "token"}, BY_LETTER, {"explained_variance"}),
        ("best_of_n", {"best": 2}, TWO[:1], {"entropy"}),
        ("simpo", {}, TWO[:1], {"preference_accuracy"}),
        ("kto", {"good_from": 0.2}, TWO[:1], {"kl_reference", "good_share"}),
        ("trajectory_balance", {}, TWO[:1], {"log_partition", "reference_log_ratio"}),
    ],
)
async def test_a_run_takes_its_steps(
    name: str, options: dict[str, Any], functions: Any, reported: set[str], tmp_path: Path
) -> None:
    chosen = recipe(
        TINY,
        algorithm__name=name,
        algorithm__options=options,
        reward__functions=functions,
        train__steps=3,
        train__groups_per_step=8,
    )
    watched, result = await complete(Execution(RunFolder.create(chosen, tmp_path / "run")))
    assert result.state == "finished"
    steps = watched.of("step")
    assert len(steps) == 3
    assert reported <= steps[-1].keys()
    assert all(math.isfinite(step["loss"]) for step in steps)
    assert any(step["grad_norm"] > 0 for step in steps)
