"""What `--over` says, and what is refused before a sweep begins."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from orchestration.recipe.loading.load import read_recipe
from orchestration.recipe.problems import RecipeError
from orchestration.state.lock import RunError
from orchestration.sweep.checks import begin
from orchestration.sweep.record import SWEEP, Request, Sweep
from orchestration.sweep.settings import MOST_RUNS, Range, Values, grid, parse_over
from orchestration.sweep.stopping import StopBelow

TINY = Path(__file__).resolve().parents[3] / "recipes" / "tiny.toml"


def request(*over: str, **others: Any) -> Request:
    tables, _ = read_recipe(TINY)
    return Request(recipe=tables, begun_in=os.getcwd(), over=over, **others)


def problems(wrong: Request, folder: Path) -> list[str]:
    with pytest.raises(RecipeError) as raised:
        begin(wrong, folder)
    assert not folder.exists(), "a sweep that is refused leaves nothing"
    return [str(problem) for problem in raised.value.problems]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("train.learning_rate=1e-6,3e-6", [1e-6, 3e-6]),
        ("seed=0..4", [0, 1, 2, 3, 4]),
        ("seed=-1..1", [-1, 0, 1]),
        ("seed=7..7", [7]),
        ("algorithm.name=grpo, rloo", ["grpo", "rloo"]),
        ("prompts.chat=true,false", [True, False]),
        (
            'reward.functions=[{name="a"}],[{name="a"},{name="b"}]',
            [[{"name": "a"}], [{"name": "a"}, {"name": "b"}]],
        ),
        ("prompts.path=../a.jsonl,b.jsonl", ["../a.jsonl", "b.jsonl"]),
        ('model.revision="","main"', ["", "main"]),
    ],
)
def test_values_are_read_as_set_reads_them(text: str, values: list[Any]) -> None:
    [parsed] = parse_over([text], search=False)
    assert isinstance(parsed, Values)
    assert list(parsed.values) == values


def test_a_search_takes_ranges() -> None:
    parsed = parse_over(["a=1e-7..1e-5:log", "b=0..4", "c=0.5..1.0", "d=1,2"], search=True)
    assert parsed == [
        Range("a", 1e-7, 1e-5, log=True),
        Range("b", 0, 4),
        Range("c", 0.5, 1.0),
        Values("d", [1, 2]),
    ]
    assert [one.is_whole for one in parsed[:3] if isinstance(one, Range)] == [False, True, False]


@pytest.mark.parametrize(
    ("over", "wrong"),
    [
        (["seed"], '--over = "seed": is not KEY=VALUES'),
        (["seed=0,1", "seed=2"], '--over = "seed=2": is the second one of seed'),
        (["seed="], '--over = "seed=": has no values'),
        (["seed=1,,2"], '--over = "seed=1,,2": has an empty value'),
        (["seed=4..0"], '--over = "seed=4..0": is an empty range; write the lower end first'),
        (["seed=[1"], '--over = "seed=[1": has values that are no TOML'),
        (["train.learning_rate=1e-6,0.000001"], "has 1e-06 twice; give each value once"),
        (["train.learning_rate=3,3.0"], "has 3 twice"),
        (
            ["train.learning_rate=1e-6..1e-5"],
            "is a range to search in; list values, or add --search",
        ),
        (["seed=0..5000"], "has 5,001 values; use at most 1,000"),
    ],
)
def test_what_says_no_values_is_refused(tmp_path: Path, over: list[str], wrong: str) -> None:
    [problem] = problems(request(*over), tmp_path / "sweep")
    assert wrong in problem


def test_too_many_runs_are_refused_with_their_number(tmp_path: Path) -> None:
    [problem] = problems(
        request("seed=0..99", "train.steps=1,2,3,4,5,6,7,8,9,10,11"), tmp_path / "sweep"
    )
    assert "seed (100) × train.steps (11)" in problem
    assert f"makes 1,100 runs, and a sweep has at most {MOST_RUNS:,}" in problem


def test_every_recipe_is_checked_and_each_problem_has_its_settings(tmp_path: Path) -> None:
    wrong = request(
        "train.learning_rate=-1,1e-3", "seed=0..2", "nothing.here=1", "rollout.max_rows=0,128"
    )
    shown = problems(wrong, tmp_path / "sweep")
    assert len(shown) == 3
    assert any("is out of range [train.learning_rate=-1]; use" in one for one in shown)
    assert any("rollout.max_rows = 0" in one and "[rollout.max_rows=0]" in one for one in shown)
    assert any("is not a known key [every run]" in one for one in shown)


def test_options_that_do_not_go_together_are_refused_at_once(tmp_path: Path) -> None:
    wrong = request("seed=0,1", search="tpee", prune="mean", stop_below=["0.3"])
    shown = problems(wrong, tmp_path / "sweep")
    assert shown == [
        "--search = \"tpee\": is unknown; did you mean 'tpe'?",
        "--prune = \"mean\": is unknown; did you mean 'median'?",
        "--trials = 0: is the number of runs of a search; give both, or none, as --search tpe "
        "--trials 20; at most 1,000",
        '--stop-below = "0.3": is not VALUE@STEP; write for example --stop-below 0.2@50',
    ]
    [problem] = problems(request("seed=0,1", trials=3), tmp_path / "sweep")
    assert problem.startswith("--trials = 3: is the number of runs of a search")
    [problem] = problems(request(), tmp_path / "sweep")
    assert problem.startswith("--over: is missing")


def test_a_search_checks_the_ends_of_its_ranges(tmp_path: Path) -> None:
    wrong = request(
        "train.learning_rate=1e-3..1e-1", "rollout.max_rows=0..128", search="random", trials=2
    )
    [problem] = problems(wrong, tmp_path / "sweep")
    assert "rollout.max_rows = 0" in problem


def test_a_sweep_goes_on_with_what_it_was_asked_for(tmp_path: Path) -> None:
    asked = request("seed=0..2")
    first = begin(asked, tmp_path / "sweep")
    with pytest.raises(RunError, match="executes the sweep"):
        Sweep.open(tmp_path / "sweep")
    first.change(first.runs[1], "finished", value=0.5)
    first.close()
    with pytest.raises(RunError, match="was begun with another over; `asyncdock sweep"):
        begin(request("seed=0..3"), tmp_path / "sweep")
    again = begin(asked, tmp_path / "sweep")
    assert again.id == first.id
    assert [(run.state, run.value) for run in again.runs] == [
        ("waiting", None),
        ("finished", 0.5),
        ("waiting", None),
    ]
    again.close()


def test_a_folder_with_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match=r"holds 'notes.txt', and no sweep.json; give a new folder"):
        begin(request("seed=0..2"), tmp_path)
    assert not (tmp_path / SWEEP).exists()
    with pytest.raises(RunError, match=r"holds no sweep.json"):
        Sweep.open(tmp_path)


def test_a_bound_counts_once_at_its_step_or_the_next_value(tmp_path: Path) -> None:
    sweep = begin(request("seed=0..1"), tmp_path / "sweep")
    [run, _] = sweep.runs
    sweep.close()
    bound = StopBelow("reward_mean", 0.5, 10)
    assert bound.judge(run, 8, 9, 0.1) == ""
    assert bound.judge(run, 9, 10, 0.5) == ""
    assert bound.judge(run, 10, 11, 0.1) == ""
    assert bound.judge(run, 8, 12, 0.4) == "reward_mean 0.4 is below 0.5 at step 12"
    assert StopBelow("loss", 0.5, 10).judge(run, 9, 10, 0.6) == "loss 0.6 is above 0.5 at step 10"


def test_all_combinations_are_made_in_the_order_of_the_options() -> None:
    over = parse_over(["a=1,2", "b=x,y"], search=False)
    assert grid(over) == [
        {"a": 1, "b": "x"},
        {"a": 1, "b": "y"},
        {"a": 2, "b": "x"},
        {"a": 2, "b": "y"},
    ]
