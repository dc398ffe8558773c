"""Whole runs whose rewards fail."""

from __future__ import annotations

import collections
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from orchestration.recipe.loading.load import load_recipe
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from stages.samples.reading import newest
from stages.samples.sample_log import FOLDER
from tests.orchestration.rewards.faulty import ATTACKS, HARMED, attack_of, early_share
from tests.orchestration.run.test_flow import assert_filled
from tests.orchestration.run.test_run import (
    assert_each_sample_once,
    assert_equal,
    assert_nothing_left,
    synchronous,
    trained,
)
from tests.orchestration.runs import TINY, complete, executing, recipe

FAULTY = "tests.orchestration.rewards.faulty"
ONE_IN_TEN: dict[str, Any] = {
    "reward__functions": [{"name": f"{FAULTY}:one_in_ten"}],
    "reward__retries": 0,
    "algorithm__group_size": 2,
}
DROPPED = f"reward {FAULTY}:one_in_ten failed"


async def test_a_run_finishes_with_a_reward_that_fails_one_time_in_ten_and_counts_it(
    tmp_path: Path,
) -> None:
    """The recipe `tiny` itself, whose flow worker is killed in the middle."""
    changes = [
        f"reward.functions=[{{name='{FAULTY}:one_in_ten'}}]",
        "reward.retries=0",
        "reward.max_error_share=0.5",
    ]
    of = load_recipe("recipes/tiny.toml", [*changes, "train.steps=20", "algorithm.group_size=4"])
    async with executing(Execution(RunFolder.create(of, tmp_path / "run"))) as (watched, work):
        await watched.until(lambda: len(watched.of("step")) > 3)
        assert watched.run.supervisor is not None
        os.kill(watched.run.supervisor.pids()["flow-0"], signal.SIGKILL)
        result = await work
    assert result.state == "finished", result.reason
    assert assert_filled(of, watched) > 0
    assert set(watched.of("ledger")[-1]["dropped"]) == {DROPPED}
    assert_nothing_left(watched.run)


async def test_all_attacks_together_harm_their_own_samples_alone_and_the_run_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "seen").mkdir()
    monkeypatch.setenv("FAULTY_SEEN", str(tmp_path / "seen"))
    policy = {"timeout": 0.6, "retries": 1, "on_error": "zero", "memory": "384MiB", "processes": 2}
    changes = {f"reward__{name}": value for name, value in policy.items()}
    functions = [{"name": f"{FAULTY}:all_attacks"}]
    of = recipe(
        TINY, reward__functions=functions, **changes, train__steps=24, train__learning_rate=1e-2
    )
    watched, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert result.state == "finished", result.reason
    assert_each_sample_once(of, watched)
    samples = [*newest(tmp_path / "run" / FOLDER)]
    assert len(samples) == 24 * 4 * 4
    made = collections.Counter(attack_of(sample["response"]) for sample in samples)
    assert made.keys() >= set(ATTACKS.values()), made
    for sample in samples:
        text = sample["response"]
        attack = attack_of(sample["response"])
        expected = 0.0 if attack in HARMED else early_share(text)
        if attack != "leaks" or sample["reward"]:  # it may meet two full processes in turn
            assert sample["reward"] == pytest.approx(expected), (text, attack)
    assert list((tmp_path / "seen").iterdir())
    means = [step["reward_mean"] for step in watched.of("step")]
    assert sum(means[-6:]) > sum(means[:6]) + 6 * 0.1, means
    assert_nothing_left(watched.run)


async def test_what_is_dropped_is_counted_by_reason_to_the_last_token_and_over_a_resume(
    tmp_path: Path,
) -> None:
    of = recipe(
        TINY, **ONE_IN_TEN, reward__max_error_share=1.0, train__steps=12, checkpoint__every=100
    )
    async with executing(Execution(RunFolder.create(of, tmp_path / "run"))) as (watched, work):
        await watched.until(lambda: any(ledger.get("dropped") for ledger in watched.of("ledger")))
        watched.stop.set()
        await work
    (before,) = watched.of("ledger")[-1]["dropped"].values()
    again, result = await complete(Execution(RunFolder.resume(tmp_path / "run")))
    assert result.state == "finished", result.reason
    for ledger in [*watched.of("ledger"), *again.of("ledger")]:
        assert sum(ledger.get("dropped_tokens", {}).values()) == ledger["filtered_tokens"]
        assert 2 * sum(ledger.get("dropped", {}).values()) == ledger["filtered"]
    ends = again.of("ledger")
    assert before <= ends[0]["dropped"][DROPPED] <= ends[-1]["dropped"][DROPPED]


async def test_with_no_staleness_the_run_is_the_plain_loop_also_where_rewards_fail(
    tmp_path: Path,
) -> None:
    of = recipe(TINY, **ONE_IN_TEN, pipeline__staleness=0, train__steps=10)
    expected, weights = await synchronous(of)
    watched, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert result.state == "finished", result.reason
    assert watched.of("ledger")[-1]["dropped"].keys() == {DROPPED}
    assert [(step["reward_mean"], step["loss"]) for step in watched.of("step")] == expected
    assert_equal(trained(of, result), weights)


@pytest.mark.parametrize("on_error", ["zero", "fail"])
async def test_a_failure_costs_what_the_recipe_says(on_error: str, tmp_path: Path) -> None:
    of = recipe(TINY, **ONE_IN_TEN, reward__on_error=on_error)
    watched, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    if on_error == "fail":
        assert result.state == "failed"
        assert (
            f"reward '{FAULTY}:one_in_ten' raised ConnectionError('the judge is busy') at prompt"
            in result.reason
        )
        assert "faulty.py, line " in result.reason
    else:
        assert result.state == "finished", result.reason
        assert watched.of("ledger")[-1].get("dropped", {}) == {}
        samples = [*newest(tmp_path / "run" / FOLDER)]
        for step in watched.of("step"):
            members = [sample for sample in samples if sample["step"] == step["step"]]
            scored = [sample["reward"] for sample in members if "failed" not in sample]
            assert step.get("reward_failed", 0) == len(members) - len(scored)
            assert step["reward_mean"] == pytest.approx(sum(scored) / len(scored))
        assert any("failed" in sample for sample in samples)
