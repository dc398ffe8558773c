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
    code, out, _ = plan("run", "mock", "--json", "--price", "2")
    found = json.loads(out)
    assert code == 0
    assert found["busiest"] == "generation"
    assert (
        found["one_more_replica"]["tokens_per_second"]
        > 1.1 * found["forecast"]["tokens_per_second"]
    )
    assert found["price"] == pytest.approx(
        2 * found["devices"] * found["forecast"]["seconds"] / 3600
    )
    assert found["costs"]["sources"]["row_rate"] == "the mock engines' options"
    _, failing, _ = plan("run", "mock", "--failures", "1000", "--json")
    assert (
        json.loads(failing)["forecast"]["tokens_per_second"]
        < found["forecast"]["tokens_per_second"]
    )
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


def test_a_tiny_model_on_a_fast_device_is_limited_by_what_is_between_its_steps() -> None:
    """By hand: of a step of 0.2 s and next to nothing else, nearly all is the 0.2 s that are
    assumed."""
    fast = ("run", "tiny", "--hardware", "flops=400e12,bandwidth=3e12", "--response-tokens", "4")
    code, out, _ = plan(*fast, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["busiest"] == "between steps"
    assert found["costs"]["between_steps"] == 0.2
    assert found["forecast"]["step_seconds"] == pytest.approx(0.2, rel=0.1)
    assert found["forecast"]["between"] == pytest.approx(0.2 / found["forecast"]["step_seconds"])
    _, text, _ = plan(*fast)
    words = " ".join(text.split())
    assert "between steps: 0.2 s of claims, commits and publishing for each step" in words
    assert "as assumed" in words
    slow = plan(
        "run", "tiny", "--hardware", "flops=4e8,bandwidth=3e12", "--response-tokens", "4", "--json"
    )
    assert json.loads(slow[1])["busiest"] == "training"


def test_a_search_ranks_the_splits_and_writes_the_best(tmp_path: Path) -> None:
    best = tmp_path / "best.json"
    code, out, _ = plan("run", "mock", "--search", "--devices", "5", "--write", str(best), "--json")
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
    chosen = json.loads(best.read_text())
    assert chosen["rollout"]["workers"] == 4
    assert plan("run", str(best))[0] == 0
    _, text, _ = plan("run", "mock", "--search", "--devices", "5")
    assert "choices cannot run; the first: rollout.workers=3 train.dp=2" in text
    assert "staleness\n" in text
    auto = ("--set", "pipeline.staleness=auto", "--search", "--devices", "3")
    code, out, _ = plan("run", "mock", *auto, "--write", str(best), "--json")
    assert code == 0
    assert json.loads(best.read_text())["pipeline"]["staleness_min"] == 0
    assert len([one for one in json.loads(out)["choices"] if one["forecast"]]) == len(BOUNDS), (
        "a bound for each choice"
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "tiny"], "asyncdock plan profile RECIPE --out DIR"),
        (["run", "tiny", "--costs", "/nowhere"], "holds no recipe.json; give the folder of a run"),
        (["run", "tiny", "--hardware", "flops=1e12"], "bandwidth must be given, above 0"),
        (
            ["run", "tiny", "--hardware", "flop=1e12"],
            "'flop' is not known; write NAME=NUMBER of flops, bandwidth",
        ),
        (["run", "tiny", "--hardware", "flops=fast"], "flops = 'fast' is no number"),
        (
            ["run", "mock", "--hardware", "flops=1e12,bandwidth=1e12"],
            "the sizes of 'mock' are not known",
        ),
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


def test_costs_that_are_derived_from_the_model_and_the_devices() -> None:
    """Twice the operations a second: training takes half the time.

    Splits may have more ranks than this machine has cores.
    """
    steps = []
    for flops in ("10e9", "20e9"):
        _, out, _ = plan(
            "run",
            "quickstart",
            "--hardware",
            f"flops={flops},bandwidth=1e9",
            "--response-tokens",
            "20",
            "--json",
        )
        steps.append(json.loads(out)["costs"]["token_seconds"])
    assert steps[0] == pytest.approx(2 * steps[1])
    _, out, _ = plan(
        "run",
        "quickstart",
        "--hardware",
        "flops=1e12,bandwidth=1e12",
        "--search",
        "--devices",
        "8",
        "--json",
    )
    runs = [set(one["changes"]) for one in json.loads(out)["choices"] if one["forecast"]]
    assert any({"rollout.workers=4", "train.dp=4"} <= one for one in runs)


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
