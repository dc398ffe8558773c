"""``asyncdock plan run`` and ``plan profile``: forecasts, the best split of devices, and errors
that say what to write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from api.cli import main as cli
from orchestration.simulation.search import BOUNDS

runner = CliRunner()


def plan(*arguments: str) -> tuple[int, str, str]:
    result = runner.invoke(cli.app, ["plan", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_a_forecast_names_the_limit_and_what_one_more_worker_brings() -> None:
    code, out, _ = plan("run", "mock", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["busiest"] == "generation"
    assert (
        found["one_more_replica"]["tokens_per_second"]
        > 1.1 * found["forecast"]["tokens_per_second"]
    )
    assert found["costs"]["sources"]["row_rate"] == "the mock engines' options"
    _, text, _ = plan("run", "mock", "--set", "pipeline.staleness=4")
    for part in (
        "tokens/s trained",
        "generation: the rollout workers are busy",
        "(bound 4)",
        "one more",
        "version of pipeline.staleness",
        "costs:",
    ):
        assert part in text


def test_fast_engines_are_limited_by_what_is_between_steps() -> None:
    """By hand: of a step of 0.05 s and next to nothing else, nearly all is the 0.05 s that were
    measured."""
    fast = (
        *("run", "mock", "--set", "rollout.mock.time_scale=1e-6"),
        *("--set", "train.mock.time_scale=1e-6"),
    )
    code, out, _ = plan(*fast, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["busiest"] == "between steps"
    assert found["costs"]["between_steps"] == 0.05
    assert found["forecast"]["step_seconds"] == pytest.approx(0.05, rel=0.1)
    assert found["forecast"]["between"] == pytest.approx(0.05 / found["forecast"]["step_seconds"])
    _, text, _ = plan(*fast)
    words = " ".join(text.split())
    assert "between steps: 0.05 s of claims, commits and publishing for each step" in words
    assert "measured with the mock engines" in words


def test_a_search_ranks_the_splits() -> None:
    code, out, _ = plan("run", "mock", "--search", "--devices", "5", "--json")
    choices = json.loads(out)["choices"]
    runs = [choice for choice in choices if choice["forecast"]]
    assert code == 0
    assert [one["forecast"]["tokens_per_second"] for one in runs] == sorted(
        (one["forecast"]["tokens_per_second"] for one in runs), reverse=True
    )
    fastest = runs[0]["changes"]
    assert "rollout.workers=4" in fastest
    assert runs[0]["pareto"]
    assert all("train.dp" in one["refused"] for one in choices if not one["forecast"]), (
        "the mock trainer has one rank"
    )
    _, text, _ = plan("run", "mock", "--search", "--devices", "5")
    assert "choices cannot run; the first: rollout.workers=3 train.dp=2" in text
    assert "staleness\n" in text
    auto = ("--set", "pipeline.staleness=auto", "--search", "--devices", "3")
    code, out, _ = plan("run", "mock", *auto, "--json")
    assert code == 0
    assert "pipeline.staleness_min=0" in json.loads(out)["choices"][0]["changes"]
    assert len([one for one in json.loads(out)["choices"] if one["forecast"]]) == len(BOUNDS), (
        "a bound for each choice"
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "tiny"], "asyncdock plan profile RECIPE --out DIR"),
        (["run", "tiny", "--costs", "/nowhere"], "run: /nowhere does not exist; give an id"),
        (["run", "mock", "--devices", "4"], "are for --search; add it"),
        (["run", "mock", "--search", "--devices", "1"], "--devices: 1 is too few"),
        (
            ["run", "mock", "--search", "--devices", "3", "--device-memory", "many"],
            "--device-memory: ",
        ),
    ],
)
def test_what_is_wrong_is_named(arguments: list[str], says: str) -> None:
    code, _, error = plan(*arguments)
    assert code == 2
    assert says in error


def test_a_profile_is_what_a_forecast_is_made_from(tmp_path: Path) -> None:
    code, _, error = plan("profile", "tiny", "--out", str(tmp_path / "run"), "--plain")
    assert code == 0, error
    code, out, _ = plan("run", "tiny", "--costs", str(tmp_path / "run"), "--json", "--steps", "12")
    found = json.loads(out)
    assert code == 0
    assert found["forecast"]["tokens_per_second"] > 0
    assert found["costs"]["sources"]["row_rate"] == "measured in run"
    assert found["costs"]["prefill_seconds"] + found["costs"]["prefill_token_seconds"] > 0, (
        "its engine was measured alone"
    )
    assert not (tmp_path / "run" / "smaller" / "engine.json").exists(), "it is measured once"
    assert (tmp_path / "run" / "smaller" / "metrics.jsonl").exists(), "a run with smaller steps"
    _, out, _ = plan(
        "run", "tiny", "--costs", str(tmp_path / "run"), "--json", "--set", "train.dp=2"
    )
    assert json.loads(out)["costs"]["token_seconds"] == pytest.approx(
        found["costs"]["token_seconds"] / 2
    ), "two ranks"
    code, out, _ = plan("what-if", str(tmp_path / "run"), "--set", "pipeline.staleness=0", "--json")
    assert code == 0
    assert json.loads(out)["changed"]["staleness_max"] == 0
