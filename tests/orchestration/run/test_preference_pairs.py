"""Preference data made by the product: a run's samples become pairs, and DPO learns from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer

from api.cli.results.pairs import pairs_command
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from stages.samples.preference_pairs import PairsError, export_pairs, pair_of
from stages.samples.sample_log import FOLDER, SampleLog
from tests.orchestration.runs import TINY, complete, recipe


def sample(place: int, reward: float | None, response: str = "", **more: Any) -> dict[str, Any]:
    own = {
        "group": 3,
        "place": place,
        "reward": reward,
        "prompt": "user: a",
        "response": response or f"r{place}",
    }
    return {"step": 0, **own, **more}


def run_folder(
    folder: Path, groups: list[list[float | None]], keep: int = 1 << 20, size: int = 2
) -> Path:
    folder.mkdir()
    (folder / "recipe.json").write_text(
        json.dumps({"pipeline": {"keep_samples": keep}, "algorithm": {"group_size": size}})
    )
    book = SampleLog(folder / FOLDER, keep)
    for step, rewards in enumerate(groups):
        book.add(
            [sample(place, reward, group=step, step=step) for place, reward in enumerate(rewards)]
        )
    return folder


def test_the_best_and_the_worst_of_a_group_are_its_pair() -> None:
    given = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    row = {"given": given, "fields": {"answer": "r1", "chosen": "of the data"}}
    group = [
        sample(0, 0.5, **row),
        sample(1, 1.0),
        sample(2, None),
        sample(3, float("nan")),
        sample(4, 0.25),
    ]
    assert pair_of(group) == {
        "answer": "r1",
        "prompt": given,
        "chosen": "r1",
        "rejected": "r4",
        "score_chosen": 1.0,
        "score_rejected": 0.25,
        "chosen_truncated": False,
        "rejected_truncated": False,
    }
    assert pair_of(group, 0.75) is not None, "the margin is the least difference"
    assert pair_of(group, 0.76) is None
    assert pair_of([sample(0, 1.0), sample(1, 1.0)]) is None
    assert pair_of([sample(0, 1.0, "same"), sample(1, 0.0, "same")]) is None
    assert pair_of([sample(0, None)]) is None
    failed = {**sample(1, 0.0), "failed": ["judge"]}
    assert pair_of([sample(0, 1.0), failed]) is None, "a failed reward says nothing of the response"


def test_responses_with_observations_are_no_pair(tmp_path: Path) -> None:
    """A text would teach the policy to say what its environment says."""
    turns = [{"generated": True, "tokens": 2, "text": "a", "reward": None}]
    observing = [*turns, {"generated": False, "tokens": 3, "text": "b", "reward": None}]
    assert pair_of([sample(0, 1.0, segments=turns), sample(1, 0.0, segments=turns)]) is not None
    group = [sample(0, 1.0, segments=turns), sample(1, 0.0, segments=observing)]
    assert pair_of(group) is None
    run = run_folder(tmp_path / "run", [])
    SampleLog(run / FOLDER, 1 << 20).add(group)
    with pytest.raises(PairsError, match=r"1 of 1 groups .* an environment's observations"):
        export_pairs(run, tmp_path / "pairs.jsonl")


@pytest.mark.parametrize(
    "how", [{"truncated": True, "ended": False}, {"truncated": False, "ended": False}]
)
def test_a_response_without_a_sampled_end_is_marked_or_left_out(
    how: dict[str, bool], tmp_path: Path
) -> None:
    run = run_folder(tmp_path / "run", [], size=3)
    ended = {"truncated": False, "ended": True}
    members = [sample(0, 1.0, **ended), sample(1, 0.0, **how), sample(2, 0.5, **ended)]
    SampleLog(run / FOLDER, 1 << 20).add(members)
    export_pairs(run, tmp_path / "all.jsonl")
    pair = json.loads((tmp_path / "all.jsonl").read_text())
    assert (pair["rejected"], pair["chosen_truncated"], pair["rejected_truncated"]) == (
        "r1",
        False,
        True,
    )
    export_pairs(run, tmp_path / "whole.jsonl", cut=False)
    assert json.loads((tmp_path / "whole.jsonl").read_text())["rejected"] == "r2"


def test_what_makes_no_pairs_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused = {
        r"not the folder of a run": tmp_path,
        r"pipeline\.keep_samples = 0": run_folder(tmp_path / "none", [], keep=0),
        r"has trained no step yet": run_folder(tmp_path / "young", []),
        r"in none of 2 groups .* lower "
        r"--margin": run_folder(tmp_path / "equal", [[0.5, 0.5], [0.0, 0.2]]),
        r"algorithm\.group_size = 1": run_folder(tmp_path / "single", [[0.5]], size=1),
    }
    for message, folder in refused.items():
        with pytest.raises(PairsError, match=message):
            export_pairs(folder, tmp_path / "pairs.jsonl", 0.3)
    with pytest.raises(PairsError, match=r"ends in \.jsonl or \.parquet"):
        export_pairs(tmp_path / "equal", tmp_path / "pairs.csv")
    assert not list(tmp_path.glob("*pairs*"))
    with pytest.raises(typer.Exit) as ended:
        pairs_command(str(tmp_path), tmp_path / "pairs.jsonl")
    assert ended.value.exit_code == 2
    assert "error: run: " in capsys.readouterr().err


async def test_a_run_makes_the_pairs_that_another_run_learns_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = recipe(TINY, train__steps=10, train__groups_per_step=32, algorithm__group_size=8)
    await complete(Execution(RunFolder.create(first, tmp_path / "first")))
    lines = tmp_path / "pairs.jsonl"
    table = tmp_path / "pairs.parquet"
    capsys.readouterr()
    pairs_command(str(tmp_path / "first"), lines, 0.25)
    pairs = [json.loads(line) for line in lines.open()]
    assert f"{len(pairs)} pairs of 320 groups" in capsys.readouterr().out
    assert len(pairs) > 100
    for pair in pairs:
        assert pair["answer"] == pair["prompt"][0] * 4, "the row's other columns"
        assert pair["score_chosen"] >= pair["score_rejected"] + 0.25
    assert export_pairs(tmp_path / "first", table, 0.25) == (len(pairs), 320)

    # The pairs are of prompts that the first run has not held out: a larger share of them is held
    # out here.
    data = {
        **TINY,
        "prompts": {
            "source": "parquet",
            "path": str(table),
            "max_prompt_tokens": 16,
            "held_out": 0.3,
        },
    }
    second = recipe(
        data,
        prompts__responses=["chosen", "rejected"],
        algorithm__name="dpo",
        algorithm__group_size=2,
        train__steps=20,
        train__groups_per_step=32,
        evaluate__every=20,
        evaluate__prompts=8,
    )
    watched, result = await complete(Execution(RunFolder.create(second, tmp_path / "second")))
    assert result.state == "finished", result.reason
    steps = watched.of("step")
    assert steps[0]["preference_accuracy"] == 0.0, "policy and reference are the same"
    assert steps[-1]["preference_accuracy"] > 0.9
    held_out = {event["version"]: event["reward_mean"] for event in watched.of("evaluation")}
    assert held_out[20] > held_out[0] + 0.2
