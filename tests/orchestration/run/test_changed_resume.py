"""A run goes on with other keys: each takes effect from the checkpoint's step on, and what may not
change says why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestration.recipe.loading.load import change_recipe, fixed_keys
from orchestration.recipe.problems import RecipeError
from orchestration.run.execution import Execution, RunResult
from orchestration.run.folder import RunFolder
from orchestration.state.lock import RunError
from stages.engines.torch.optimizers.rates import learning_rate_at
from tests.orchestration.run.test_run import assert_equal, synchronous, trained, weights_of
from tests.orchestration.runs import MOCK, TINY, Watched, complete, recipe


async def resumed(folder: Path, *changes: str) -> tuple[Watched, RunResult]:
    watched, result = await complete(Execution(RunFolder.resume(folder, changes)))
    assert result.state == "finished", result.reason
    return watched, result


async def test_a_finished_run_goes_on_with_more_steps_as_if_they_had_been_asked_at_first(
    tmp_path: Path,
) -> None:
    of = recipe(TINY, pipeline__staleness=0, train__steps=4)
    await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    with pytest.raises(RunError, match=r"has made 4 of 4 steps: there is nothing to resume"):
        Execution(RunFolder.resume(tmp_path / "run"))
    with pytest.raises(RunError, match=r"has made 4 of 3 steps"):
        Execution(RunFolder.resume(tmp_path / "run", ["train.steps=3"]))
    assert Execution(RunFolder.resume(tmp_path / "run", ["train.steps=7"])).recipe.train.steps == 7
    watched, result = await resumed(tmp_path / "run")  # what was set is kept
    assert [step["step"] for step in watched.of("step")] == [5, 6, 7]
    whole = recipe(TINY, pipeline__staleness=0, train__steps=7)
    _, at_once = await complete(Execution(RunFolder.create(whole, tmp_path / "whole")))
    assert_equal(trained(whole, result), trained(whole, at_once))


async def test_another_learning_rate_and_schedule_hold_from_the_next_step_on(
    tmp_path: Path,
) -> None:
    of = recipe(TINY, pipeline__staleness=0, train__steps=3)
    _, first = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert first.checkpoint is not None
    before = weights_of(of, first.checkpoint)
    changes = [
        "train.steps=6",
        "train.learning_rate=1e-5",
        "train.schedule=cosine",
        "train.weight_decay=0.1",
    ]
    watched, result = await resumed(tmp_path / "run", *changes)
    expected = [
        learning_rate_at(step, peak=1e-5, total_steps=6, warmup_steps=0, schedule="cosine")
        for step in range(3, 6)
    ]
    # Each is scaled by the share of the four groups whose rewards differ.
    shares = [
        4 * step["learning_rate"] / rate
        for step, rate in zip(watched.of("step"), expected, strict=True)
    ]
    assert shares == pytest.approx([round(share) for share in shares])
    assert 0 < sum(shares) <= 12
    after = trained(recipe(TINY, train__steps=6), result)
    # AdamW moves a weight by little more than the learning rate; at the former 3e-3 it would be a
    # hundred times as far.
    moved = max(float((after[name] - before[name]).abs().max()) for name in before)
    assert 0 < moved < 3 * sum(expected) * 1.5


async def test_the_learning_rate_goes_on_by_versions_with_other_numbers_of_optimizer_steps(
    tmp_path: Path,
) -> None:
    options = {"scale_learning_rate": False}
    of = recipe(
        TINY,
        algorithm__options=options,
        pipeline__staleness=0,
        train__steps=3,
        train__schedule="linear",
    )
    await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    several = "algorithm.options={scale_learning_rate=false, epochs=2, mini_batches=3}"
    watched, _ = await resumed(tmp_path / "run", "train.steps=5", several)
    assert [step["learning_rate"] for step in watched.of("step")] == pytest.approx(
        [3e-3 * 2 / 5, 3e-3 * 1 / 5]
    )


async def test_the_cadence_of_evaluations_and_checkpoints_and_how_far_ahead_it_runs_may_change(
    tmp_path: Path,
) -> None:
    of = recipe(TINY, train__steps=4, checkpoint__every=4, pipeline__staleness=2)
    await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    changes = [
        "train.steps=8",
        "evaluate.every=2",
        "evaluate.prompts=4",
        "checkpoint.every=1",
        "checkpoint.keep=3",
    ]
    changes += [
        "rollout.temperature=0.9",
        "rollout.max_tokens=3",
        "algorithm.group_size=8",
        "pipeline.staleness=0",
    ]
    watched, _ = await resumed(tmp_path / "run", *changes)
    assert {evaluation["version"] for evaluation in watched.of("evaluation")} >= {6, 8}
    written = [saved["version"] for saved in watched.of("checkpoint")]
    assert written[-1] == 8
    assert 1 < len(written) == len(set(written) & {5, 6, 7, 8}), (
        "one that is due while another is written may be left out"
    )
    assert len(list((tmp_path / "run" / "checkpoints").glob("step-*"))) == min(3, 1 + len(written))
    assert {step["staleness_max"] for step in watched.of("step")} == {0}, (
        "what was in flight is made again"
    )
    assert {step["rows"] for step in watched.of("step")} == {4 * 8}
    ledger = watched.of("ledger")[-1]
    assert ledger["trained"] == 4 * 4 * 4 + 4 * 4 * 8
    assert ledger["generated"] == sum(ledger[part] for part in ("trained", "filtered", "in_flight"))


async def test_a_bound_that_is_lowered_while_groups_are_ahead_is_kept(tmp_path: Path) -> None:
    """Stopped with groups of three steps in flight, and resumed with η = 0: each is made by the
    version that trains it."""
    from tests.orchestration.runs import executing

    of = recipe(MOCK, pipeline__staleness=3, train__steps=12, checkpoint__every=2)
    async with executing(Execution(RunFolder.create(of, tmp_path / "run"))) as (watched, work):
        await watched.until(lambda: len(watched.of("step")) >= 4)
        watched.stop.set()
        assert (await work).state == "stopped"
    made = watched.of("step")
    watched, _ = await resumed(tmp_path / "run", "pipeline.staleness=0", "pipeline.window=1")
    assert {step["staleness_max"] for step in watched.of("step")} == {0}
    groups = [group for step in [*made, *watched.of("step")] for group in step["groups"]]
    assert sorted(groups) == list(range(12 * 4)), "each group once"


async def test_a_run_goes_on_in_another_index_over_the_network_and_back(
    index_url: str, tmp_path: Path
) -> None:
    """As on a cluster: weights and samples are served to other nodes.

    The weights are those of a run left alone.
    """
    of = recipe(TINY, pipeline__staleness=0, train__steps=1)
    await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    there = [f"pipeline.index={index_url}", "pipeline.serve=127.0.0.1", "sync.transport=network"]
    for steps, changes in (
        (2, there),
        (3, ["pipeline.index=embedded", "sync.transport=shared_memory"]),
    ):
        watched, result = await resumed(tmp_path / "run", f"train.steps={steps}", *changes)
        assert [step["step"] for step in watched.of("step")] == [steps]
    whole = recipe(TINY, pipeline__staleness=0, train__steps=3)
    _, weights = await synchronous(whole)
    assert_equal(trained(whole, result), weights)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ("name=other", "name"),
        ("seed=1", "seed"),
        ("model.dtype=bfloat16", "model.dtype"),
        ("prompts.held_out=0.5", "prompts.held_out"),
        ("train={steps=9,groups_per_step=2}", "train.groups_per_step"),
        ("train.precision=mixed", "train.precision"),
        ("external.stages=['reward']", "external.stages"),
    ],
)
def test_what_may_not_change_says_why(change: str, key: str) -> None:
    with pytest.raises(RecipeError) as refused:
        change_recipe(recipe(TINY), [change])
    found = {problem.key: problem.wrong for problem in refused.value.problems}
    reason = next(
        reason for fixed, reason in fixed_keys().items() if f"{key}.".startswith(f"{fixed}.")
    )
    assert found[key] == f"cannot change in a resumed run: {reason}"


def test_the_page_has_each_fixed_key_and_its_reason() -> None:
    page = (Path(__file__).parents[3] / "docs" / "runs.md").read_text(encoding="utf-8")
    for key, reason in fixed_keys().items():
        assert f"| {reason} |" in page, key


def test_a_fixed_key_may_be_set_to_what_it_is() -> None:
    assert change_recipe(recipe(TINY), ["seed=0", "train.steps=9"]).train.steps == 9


def test_a_change_is_checked_as_a_recipe_is() -> None:
    with pytest.raises(
        RecipeError,
        match=r"train\.warmup_steps = 20: is more than train\.steps = "
        r"6",
    ):
        change_recipe(recipe(TINY), ["train.warmup_steps=20"])
    with pytest.raises(RecipeError, match=r"train\.stepz"):
        change_recipe(recipe(TINY), ["train.stepz=20"])


@pytest.mark.parametrize(
    "change",
    [
        "pipeline.index=redis://there",
        "pipeline.serve=127.0.0.1",
        "sync.transport=network",
        "reward.workers=2",
        "description=x",
    ],
)
def test_where_it_runs_may_change(change: str) -> None:
    key, _, value = change.partition("=")
    data: Any = change_recipe(recipe(TINY), [change])
    for part in key.split("."):
        data = getattr(data, part)
    assert str(data) == value
