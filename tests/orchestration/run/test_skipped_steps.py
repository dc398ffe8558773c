"""Batches with a gradient that is not finite: skipped, reported, replayed.

The fault is a reward of 2e37 for one prompt: every number is finite until the gradient's norm
overflows float32.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from orchestration.recipe.models import tokenizer_of
from orchestration.recipe.schema import Recipe
from orchestration.recipe.sizes.planner import prompt_limits
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from stages.prompts.sources import load_prompts
from tests.orchestration import scores
from tests.orchestration.run.test_run import assert_equal, assert_nothing_left, synchronous, trained
from tests.orchestration.runs import TINY, complete, executing, recipe

SKIPPING: dict[str, Any] = {
    "reward__functions": [{"name": f"{scores.HERE}:overflowing"}],
    "algorithm__options": {"scale_rewards": False},
    "pipeline__staleness": 0,
    "launch__launcher": "process",
    "train__steps": 8,
}


def expected_skips(of: Recipe) -> list[int]:
    prompts = load_prompts(of.prompts, tokenizer_of(of), of.seed, limits=prompt_limits(of)).train
    per_step = of.train.groups_per_step
    return sorted(
        {
            g // per_step + 1
            for g in range(of.train.steps * per_step)
            if prompts.prompt(g).text == scores.BAD
        }
    )


SEVERAL: dict[str, Any] = {"scale_rewards": False, "epochs": 2, "mini_batches": 4}


@pytest.mark.parametrize(
    "options", [SKIPPING["algorithm__options"], SEVERAL], ids=["one step", "several"]
)
async def test_a_step_without_a_finite_gradient_is_skipped_and_skipped_again_by_a_replay(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    of = recipe(
        TINY,
        **{**SKIPPING, "algorithm__options": options},
        train__warmup_steps=8,
        checkpoint__every=8,
    )
    skips = expected_skips(of)
    assert 0 < len(skips) <= 2, "the test needs such a prompt, and other ones"
    _, weights = await synchronous(of)
    async with executing(Execution(RunFolder.create(of, tmp_path / "run"))) as (watched, work):
        await watched.until(lambda: len(watched.of("step")) >= skips[-1] or work.done())
        assert watched.run.supervisor is not None
        os.kill(watched.run.supervisor.pids()["update-0"], signal.SIGKILL)
        result = await work
    assert result.state == "finished", result.reason
    steps = watched.of("step")
    assert [step["step"] for step in steps if step.get("skipped")] == skips
    assert all("gradient norm is" in steps[number - 1]["skipped"] for number in skips)
    assert watched.of("ledger")[-1]["skipped_steps"] == len(skips)
    assert watched.of("ledger")[-1]["trained"] == 8 * 4 * 4
    assert_equal(trained(of, result), weights)
    rates = [step["learning_rate"] / 3e-3 * 8 for step in steps if not step.get("skipped")]
    taken = [step for step in range(1, 9) if step not in skips]
    assert all(
        rate == pytest.approx(version) or rate < version
        for rate, version in zip(rates, taken, strict=True)
    )
    files = sorted((tmp_path / "run" / "skipped").iterdir())
    assert [file.name for file in files] == [f"step-{step:08d}.jsonl" for step in skips]
    rows = [json.loads(line) for line in files[0].read_text().splitlines()]
    assert len(rows) == 16
    assert {row["reward"] > 1e30 for row in rows if row["prompt"] == scores.BAD} >= {True}
    for row in rows:
        assert len(row["rollout_logprobs"]) == len(row["response_ids"]) == row["tokens"]
        assert row["versions"] == [[skips[0] - 1, row["tokens"]]]
    assert_nothing_left(watched.run)


@pytest.mark.parametrize("placement", ["separate", "colocated"])
async def test_ranks_skip_the_same_step(tmp_path: Path, placement: str) -> None:
    """Of a batch in which the one group that overflows is not in the first mini-batch."""
    of = recipe(
        TINY,
        **{**SKIPPING, "algorithm__options": SEVERAL},
        train__dp=2,
        launch__placement=placement,
    )
    watched, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert result.state == "finished", result.reason
    skipped = [step for step in watched.of("step") if step.get("skipped")]
    assert [step["step"] for step in skipped] == expected_skips(of)
    assert any("before it in the batch are undone" in step["skipped"] for step in skipped)
    assert len(watched.of("step")) == 8


async def test_no_checkpoint_is_removed_before_a_step_is_taken(tmp_path: Path) -> None:
    """The weights of the newest ones may be what makes each batch fail."""
    poisoned = {
        "reward__functions": [{"name": f"{scores.HERE}:poisoned"}],
        "launch__launcher": "inline",
    }
    keys = {
        "train__steps": 4,
        "train__max_skipped_steps": 9,
        "checkpoint__every": 1,
        "checkpoint__keep": 1,
    }
    watched, result = await complete(
        Execution(RunFolder.create(recipe(TINY, **SKIPPING | poisoned | keys), tmp_path / "run"))
    )
    assert result.state == "finished", result.reason
    assert all(step["skipped"] for step in watched.of("step"))
    folder = tmp_path / "run" / "checkpoints"
    assert {"step-00000001", "step-00000004"} <= {path.name for path in folder.iterdir()}
    good = [f'reward.functions=[{{name="{scores.HERE}:early_letters"}}]', "train.steps=6"]
    watched, result = await complete(Execution(RunFolder.resume(tmp_path / "run", good)))
    assert result.state == "finished", result.reason
    assert [path.name for path in folder.glob("step-*")] == ["step-00000006"]


@pytest.mark.parametrize("most", [1, 3])
async def test_too_many_skipped_steps_in_a_row_fail_the_run_at_once_and_name_the_file(
    tmp_path: Path, most: int
) -> None:
    changes = SKIPPING | {
        "reward__functions": [{"name": f"{scores.HERE}:poisoned"}],
        "launch__launcher": "inline",
    }
    of = recipe(TINY, **changes, train__max_skipped_steps=most)
    watched, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    last = tmp_path / "run" / "skipped" / f"step-{most:08d}.jsonl"
    assert result.state == "failed"
    assert f"train.max_skipped_steps = {most}" in result.reason
    assert str(last) in result.reason
    assert last.is_file()
    assert len(watched.of("step")) == most - 1, (
        "the last one is not recorded: a resumed run meets it again"
    )
    assert not [event for event in watched.of("worker") if event["change"] == "restarted"]
