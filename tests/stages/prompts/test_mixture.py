"""Several sources of prompts: shares by weight, epochs of their own, the same prompt for a number
whenever it is asked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.server.access.settings import Settings
from api.server.access.submission_policy import accept
from orchestration.checkpoints import checkpoint
from orchestration.history.events_file import METRICS, read_metrics
from orchestration.recipe.problems import RecipeError
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from stages.model.load import Tokenizer, load_tokenizer
from stages.prompts.rows.options import PromptLimits, PromptOptions
from stages.prompts.sources import LARGEST_BLOCK, load_prompts, places_of
from stages.samples.reading import newest
from stages.samples.sample_log import FOLDER
from tests.forked import ROOT, asyncdock
from tests.orchestration.run.test_run import assert_equal, synchronous, trained
from tests.orchestration.runs import TINY, complete, recipe

LETTERS = "abcdefgh"


@pytest.fixture(scope="module")
def plain() -> Tokenizer:
    return load_tokenizer("tiny")


def table(folder: Path, name: str, count: int, long: int | None = None) -> dict[str, Any]:
    """A source of ``count`` rows; that on line ``long`` + 1 has 600 characters."""
    rows = [{"prompt": f"{name} {i}=", "answer": LETTERS[i % 8] * 4} for i in range(count)]
    if long is not None:
        rows[long]["prompt"] = "a" * 600
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"source": "jsonl", "path": str(path)}


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=12))
@settings(deadline=None)
def test_a_block_has_each_source_and_its_share(weights: list[float]) -> None:
    places = places_of(weights)
    assert min(places) >= 1
    assert sum(places) <= LARGEST_BLOCK
    for count, weight in zip(places, weights, strict=True):
        assert (
            abs(count / sum(places) - weight / sum(weights)) <= (1 + len(weights)) / LARGEST_BLOCK
        )


@pytest.mark.parametrize(
    ("weights", "places"), [([3, 1], [3, 1]), ([0.2, 0.3], [2, 3]), ([5.0], [1]), ([2, 2], [1, 1])]
)
def test_simple_weights_are_exact(weights: list[float], places: list[int]) -> None:
    assert places_of(weights) == places


def test_each_source_goes_through_its_own_epochs(tmp_path: Path, plain: Tokenizer) -> None:
    few = table(tmp_path, "few", 5)
    many = table(tmp_path, "many", 30)
    options = PromptOptions(sources=[{**few, "weight": 1.0}, {**many, "weight": 3.0}])
    source = load_prompts(options, plain, seed=1).train
    asked = [str(source.prompt(number).given) for number in range(80)]
    assert all(
        Counter(text.split()[0] for text in asked[at : at + 4]) == {"few": 1, "many": 3}
        for at in range(0, 80, 4)
    )
    of_few, of_many = (
        [text for text in asked if text.startswith(name)] for name in ("few", "many")
    )
    epochs = [of_few[at : at + 5] for at in range(0, 20, 5)]
    assert all(len(set(epoch)) == 5 for epoch in epochs), "each row once in an epoch"
    assert len({tuple(epoch) for epoch in epochs}) > 1, "shuffled anew"
    assert len(set(of_many[:30])) == len(set(of_many[30:])) == 30
    for number in range(80):
        so_far = Counter(text.split()[0] for text in asked[: number + 1])
        expected = {
            f"prompts.sources.{i}": -(-so_far[name] // n)
            for i, (name, n) in enumerate([("few", 5), ("many", 30)])
        }
        assert source.epochs(number) == {key: epoch for key, epoch in expected.items() if epoch}
    again = load_prompts(options, plain, seed=1).train
    assert [str(again.prompt(number).given) for number in reversed(range(80))] == asked[::-1]
    other = load_prompts(options, plain, seed=2).train
    assert [str(other.prompt(number).given) for number in range(80)] != asked


def test_a_table_may_keep_its_order(tmp_path: Path, plain: Tokenizer) -> None:
    source = load_prompts(
        PromptOptions(**table(tmp_path, "rows", 3), shuffle=False), plain, seed=1
    ).train
    assert [source.prompt(number).given for number in range(4)] == [
        "rows 0=",
        "rows 1=",
        "rows 2=",
        "rows 0=",
    ]


def test_a_text_of_two_sources_is_on_one_side(tmp_path: Path, plain: Tokenizer) -> None:
    rows = table(tmp_path, "rows", 40)
    options = PromptOptions(
        sources=[rows, rows, {"source": "builtin", "task": "repeat"}], held_out=0.3
    )
    split = load_prompts(options, plain, seed=0)
    assert split.held_out is not None
    train, held_out = (
        {side.prompt(n).text for n in range(200)} for side in (split.train, split.held_out)
    )
    assert not train & held_out
    assert sum(text.startswith("rows") for text in train | held_out) == 40


def test_prompts_too_long_are_counted_over_all_sources_and_listed(
    tmp_path: Path, plain: Tokenizer
) -> None:
    sources = [
        table(tmp_path, "one", 6, long=2),
        table(tmp_path, "two", 6, long=5),
        {"source": "builtin", "task": "repeat"},
    ]
    listed = tmp_path / "too-long.jsonl"
    for _ in range(2):  # the second is a restarted worker
        split = load_prompts(
            PromptOptions(sources=sources), plain, 0, limits=PromptLimits(16), listed=listed
        )
        assert all(len(split.train.prompt(number).ids) <= 16 for number in range(60))
        assert split.train.too_long.skipped == 2
        where = [json.loads(line)["where"] for line in listed.read_text().splitlines()]
        assert where == [f"{tmp_path / 'one.jsonl'}, line 3", f"{tmp_path / 'two.jsonl'}, line 6"]


def test_what_is_wrong_with_a_source_is_named_by_its_key(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"question": "a"}\n')
    sources = [
        table(tmp_path, "good", 3),
        {"source": "jsonl", "path": str(tmp_path / "bad.jsonl")},
        {**table(tmp_path, "good", 3), "template": "{prompt} {unit}"},
        {"source": "builtin", "task": "repeat", "config": {"length": 0}},
        {"source": "reasoning_gym", "task": "chain_sun"},
    ]
    with pytest.raises(RecipeError) as refused:
        recipe({**TINY, "prompts": {"sources": sources, "max_prompt_tokens": 16, "held_out": 0.1}})
    assert {problem.key for problem in refused.value.problems} >= {
        "prompts.sources.1.path",
        "prompts.sources.4.task",
        "prompts.sources.3.config.length",
        "prompts.sources.2.template",
    }


def test_a_request_reads_no_source_outside_of_the_roots(tmp_path: Path) -> None:
    data = {
        **TINY,
        "prompts": {
            "sources": [table(tmp_path, "rows", 3)],
            "max_prompt_tokens": 16,
            "held_out": 0.1,
        },
    }
    with pytest.raises(
        RecipeError,
        match=r"prompts\.sources\.0\.path .* outside of what this "
        r"server reads",
    ):
        accept(Settings(data=tmp_path), data, {})
    assert accept(Settings(data=tmp_path, roots=[tmp_path]), data, {}).prompts.sources[0].path
    code = {"sources": [{"source": "datasets", "path": "os:getcwd"}]}
    with pytest.raises(
        RecipeError,
        match=r"prompts\.sources\.0\.path .* is code that this server "
        r"does not run",
    ):
        accept(Settings(data=tmp_path), {**TINY, "prompts": code}, {})


async def test_a_killed_run_goes_on_with_the_prompts_of_one_that_was_never_killed(
    tmp_path: Path,
) -> None:
    """kill -9 of the whole run in its second epoch, between two checkpoints: the prompts of all
    groups, and the weights, are those of an uninterrupted run."""
    sources = [
        {**table(tmp_path, "few", 5), "weight": 1.0},
        {**table(tmp_path, "many", 9, long=4), "weight": 2.0},
    ]
    prompts = {"sources": sources}
    of = recipe(
        {**TINY, "prompts": prompts},
        pipeline__staleness=0,
        train__steps=12,
        checkpoint__every=4,
        launch__max_restarts=0,
    )
    _, weights = await synchronous(of)
    (tmp_path / "own.json").write_text(of.to_json())
    out = tmp_path / "run"
    kill_after(6, tmp_path / "own.json", out)
    resumed = Execution(RunFolder.resume(out))
    assert resumed.folder.start is not None
    assert resumed.folder.start.version in (4, 8)
    watched, result = await complete(resumed)
    assert result.state == "finished", result.reason
    assert_equal(trained(of, result), weights)
    expected = load_prompts(
        of.prompts, load_tokenizer("tiny"), of.seed, limits=PromptLimits(508)
    ).train
    samples = [*newest(out / FOLDER)]
    groups = {sample["group"]: sample["prompt"] for sample in samples}
    assert sorted(groups) == list(range(12 * 4))
    assert groups == {number: expected.prompt(number).given for number in groups}
    counted = [prompt["epochs"] for prompt in watched.of("prompt") if prompt["change"] == "epoch"]
    assert counted[-1] == expected.epochs(12 * 4 - 1), "the counter goes on where it was"


def kill_after(steps: int, own: Path, out: Path) -> None:
    """Run the recipe ``own`` by its command, which is killed once it has made ``steps`` and written
    a checkpoint."""
    command = [*asyncdock(), "run", str(own), "--plain", "--out", str(out)]
    process = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 200
        while steps_in(out) < steps or checkpoint.latest(out / "checkpoints") is None:
            assert process.poll() is None, "it has ended before it was killed"
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()


def steps_in(out: Path) -> int:
    return (
        sum(event.kind == "step" for event in read_metrics(out / METRICS))
        if (out / METRICS).exists()
        else 0
    )
