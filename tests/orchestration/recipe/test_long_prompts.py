"""A prompt that is too long for the model ends no run: it is skipped, counted and listed, and
nothing else changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from api.telemetry.progress import Progress
from api.terminal.report import summarize
from benchmarks.runs.synchronous import synchronous_run
from orchestration.recipe.loading.load import parse_recipe
from orchestration.recipe.problems import RecipeError
from orchestration.recipe.schema import Recipe
from orchestration.recipe.sizes.planner import prompt_limits
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from stages.prompts.too_long import TOO_LONG_FILE
from tests.orchestration.run.test_run import assert_equal, synchronous, trained
from tests.orchestration.runs import TINY, Watched, complete, executing, recipe


def prompts_file(folder: Path, long: int | None = 43) -> str:
    """51 prompts, of which the one on line ``long`` + 1 is longer than the model's context of 512
    tokens."""
    letters = "abcdefgh"
    rows = [
        {"prompt": f"{letters[i % 8]}{letters[i // 8]}=", "answer": letters[i % 8] * 4}
        for i in range(50)
    ]
    if long is not None:
        rows.insert(long, {"prompt": "a" * 600, "answer": "aaaa"})
    path = folder / ("long.jsonl" if long is not None else "short.jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def overwrite(of: Recipe, content: bytes) -> None:
    Path(str(of.prompts.path)).write_bytes(content)


def of_file(path: str, **changes: Any) -> Recipe:
    changed = {"pipeline__staleness": 0, "train__steps": 13, "checkpoint__every": 5, **changes}
    return recipe({**TINY, "prompts": {"source": "jsonl", "path": path}}, **changed)


def summary_of(watched: Watched) -> dict[str, Any]:
    progress = Progress("long", 13, 0)
    for event in watched.events:
        progress.apply(event)
    return summarize(progress, checkpoint=None)


async def test_one_prompt_too_long_is_skipped_and_the_rest_is_the_run_without_it(
    tmp_path: Path,
) -> None:
    """The 44th of 51, in a run of 52 groups: the weights are bit for bit those of the file without
    that line; so are those of a run that was stopped and resumed."""
    expected, weights = await synchronous(of_file(prompts_file(tmp_path, long=None)))
    of = of_file(prompts_file(tmp_path))
    assert prompt_limits(of).tokens == 508
    watched, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert (result.state, result.reason) == ("finished", "")
    assert [(step["reward_mean"], step["loss"]) for step in watched.of("step")] == expected
    assert_equal(trained(of, result), weights)
    [event] = [prompt for prompt in watched.of("prompt") if prompt["change"] == "too long"]
    assert (event["change"], event["skipped"], event.get("cut", 0)) == ("too long", 1, 0)
    assert str(tmp_path / "run" / TOO_LONG_FILE) in event["reason"]
    [listed] = [
        json.loads(line) for line in (tmp_path / "run" / TOO_LONG_FILE).read_text().splitlines()
    ]
    assert listed == {
        "where": f"{of.prompts.path}, line 44",
        "length": "600 tokens",
        "done": "skipped",
    }
    assert summary_of(watched)["prompts_skipped"] == 1
    assert not [worker for worker in watched.of("worker") if worker["change"] == "died"]

    async with executing(Execution(RunFolder.create(of, tmp_path / "stopped"))) as (stopped, work):
        await stopped.until(lambda: len(stopped.of("step")) >= 6)
        stopped.stop.set()
        assert (await work).state == "stopped"
    _, again = await complete(Execution(RunFolder.resume(tmp_path / "stopped")))
    assert again.state == "finished", again.reason
    assert_equal(trained(of, again), weights)


async def test_a_run_that_fails_for_a_long_prompt_says_where_dies_once_and_resumes_with_skip(
    tmp_path: Path,
) -> None:
    of = of_file(prompts_file(tmp_path), prompts__too_long="fail", train__steps=2)
    watched, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert result.state == "failed"
    assert (
        f"{of.prompts.path}, line 44 has 600 tokens, where a prompt may have 508 tokens"
        in result.reason
    )
    assert "the model's context of 512 less rollout.max_tokens = 4" in result.reason
    assert not [worker for worker in watched.of("worker") if worker["change"] == "restarted"]
    _, result = await complete(
        Execution(RunFolder.resume(tmp_path / "run", ["prompts.too_long=skip"]))
    )
    assert result.state == "finished", result.reason


async def test_a_long_prompt_that_is_cut_is_trained_on(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "a" * 600, "answer": "aaaa"}) + "\n")
    of = of_file(str(path), prompts__too_long="cut", train__steps=1, checkpoint__every=1)
    steps = [step async for step in synchronous_run(of)]
    assert {len(row) for row in steps[0].batch["prompt_ids"].unbind()} == {508}


async def test_prompts_that_are_all_too_long_fail_the_run_at_once(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text((json.dumps({"prompt": "a" * 600, "answer": "a"}) + "\n") * 3)
    watched, result = await complete(
        Execution(RunFolder.create(of_file(str(path)), tmp_path / "run"))
    )
    assert result.state == "failed"
    assert f"all 3 prompts of {path} are too long: none has at most 508 tokens" in result.reason
    assert not [worker for worker in watched.of("worker") if worker["change"] == "restarted"]


@pytest.mark.parametrize(
    "content",
    [b'{"prompt": "\\ud800"}\n', b'{"prompt": "\xe9"}\n', '{"prompt": "a"}'.encode("utf-16")],
)
async def test_a_file_that_breaks_after_the_check_fails_the_run_without_a_restart(
    content: bytes, tmp_path: Path
) -> None:
    of = of_file(prompts_file(tmp_path, long=None), train__steps=2)
    overwrite(of, content)
    watched, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert result.state == "failed"
    assert str(of.prompts.path) in result.reason
    assert not [worker for worker in watched.of("worker") if worker["change"] == "restarted"]


def test_a_limit_is_what_the_keys_and_the_model_and_the_arena_leave(tmp_path: Path) -> None:
    def limit(**changes: Any) -> int | None:
        return prompt_limits(of_file(prompts_file(tmp_path), **changes)).tokens

    assert limit(prompts__max_prompt_tokens=7) == 7
    assert limit(prompts__max_prompt_tokens=510) == 508
    mock = {**TINY, "model": {"source": "mock"}, "prompts": {"source": "builtin", "task": "repeat"}}
    mock |= {
        "rollout": {"engine": "mock", "max_tokens": 4},
        "train": {"engine": "mock", "steps": 6},
    }
    small, large = (
        prompt_limits(recipe(mock, pipeline__arena=size)) for size in ("16MiB", "64MiB")
    )
    assert small.tokens is not None
    assert large.tokens is not None
    assert 2048 < small.tokens < large.tokens
    assert "pipeline.arena" in large.why
    with pytest.raises(
        RecipeError,
        match=r"rollout.max_tokens = 512: leaves no room for a prompt in the model's "
        r"context",
    ):
        limit(rollout__max_tokens=512, train__token_budget=9000)
    data = json.loads(of_file(prompts_file(tmp_path)).to_json())
    assert parse_recipe(data).prompts.too_long == "skip"
