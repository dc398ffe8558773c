"""The benchmarks of staleness and of waste run, go on with their files, and print what they
measured."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.learning import rewards, staleness, trials, waste
from benchmarks.learning.trials import Trial, read_trials
from stages.tasks import tasks

SHORT = [
    "--set",
    "launch.launcher=inline",
    "--set",
    "train.steps=2",
    "--set",
    "train.warmup_steps=0",
]


def main(module: object, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark", *arguments])
    module.main()  # type: ignore[attr-defined]


def test_a_grid_goes_on_where_it_was_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "grid.json"
    part = [
        "tiny",
        "--rates",
        "3e-3",
        "--seeds",
        "0",
        "--json",
        str(file),
        "--set",
        "evaluate.every=0",
        *SHORT,
    ]
    main(staleness, monkeypatch, *part, "--staleness", "0", "--arms", "none")
    begun = file.read_text()
    main(staleness, monkeypatch, *part, "--staleness", "0", "--arms", "none", "auto")
    assert begun[:-2] in file.read_text(), "a run was repeated"
    none, auto = read_trials(file)
    assert (none.recipe, auto.recipe) == ("tiny/none/0.003/paced", "tiny/auto/0.003/paced")
    assert none.reward == auto.reward, "with a bound of 0 auto is none, bit for bit"
    main(
        staleness,
        monkeypatch,
        *part,
        "--staleness",
        "1",
        "--arms",
        "unweighted",
        "--admission",
        "eager",
        "paced",
    )
    eager, paced = read_trials(file)[2:]
    assert (eager.recipe, paced.recipe) == (
        "tiny/unweighted/0.003/eager",
        "tiny/unweighted/0.003/paced",
    )
    shown = capsys.readouterr().out
    assert "auto" in shown
    rows = [line for line in shown.splitlines() if line.startswith("│") and "eager" in line]
    assert len(rows) == 2, "of rewards, and of staleness"


def test_settings_are_run_at_once_and_not_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rates.json"
    rates = ["--over", "train.learning_rate=1e-3,3e-3"]
    begin = ["tiny", *rates, "--json", str(file), "--set", "evaluate.every=0", *SHORT]
    main(trials, monkeypatch, *begin, "--seeds", "0", "--at-once", "2")
    first = read_trials(file)
    assert {one.settings["train.learning_rate"] for one in first} == {1e-3, 3e-3}
    assert {(one.seed, one.staleness) for one in first} == {(0, 1)}, "the bound of the recipe"
    plot = tmp_path / "rates.png"
    main(trials, monkeypatch, *begin, "--seeds", "0", "1", "--resume", "--plot", str(plot))
    assert read_trials(file)[:2] == first, "runs were repeated"
    assert len(read_trials(file)) == 4
    assert plot.stat().st_size
    shown = capsys.readouterr().out.splitlines()
    means = [row for row in shown if "| mean |" in row]
    assert len(means) == 4, "two settings, shown twice"
    assert all("±" in row for row in means[-2:])


def test_what_is_noise_holds_nineteen_times_of_twenty() -> None:
    draw = np.random.default_rng(0)
    for seeds in (3, 10):
        inside = 0
        for _ in range(4000):
            limit = trials.noise(list(draw.normal(0.5, 0.1, 10)), seeds)
            first, second = draw.normal(0.5, 0.1, (2, seeds)).mean(axis=1)
            inside += abs(first - second) <= limit
        assert inside / 4000 == pytest.approx(0.95, abs=0.015)


def test_waste_reports_every_dropped_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "waste.json"
    main(
        waste,
        monkeypatch,
        "--arms",
        "difficulty, drop",
        "--seeds",
        "0",
        "--steps",
        "1",
        "--json",
        str(file),
    )
    [one] = read_trials(file)
    ledger = one.ledger
    assert ledger["filtered_tokens"] == sum(ledger["dropped_tokens"].values()) > 0
    assert f"{ledger['filtered_tokens']} equal rewards" in " ".join(capsys.readouterr().out.split())
    assert 0.2 < one.held_out[0] < 0.8, "the score is that of the prompts that can be learned"


def test_a_grid_cell_shows_collapse_and_when_it_was_learned() -> None:
    def of(reward: list[float]) -> Trial:
        return Trial(1, 0, reward, {}, 1.0, 1.0, 1)

    rising = [min(1.0, step / 20) for step in range(40)]
    assert staleness.cell([of(rising)], 0.9) == "1.000 (1.000) | 25"
    assert staleness.cell([of(rising[:30] + [0.0] * 10)], 0.9) == "0.000 (0.000)✗ | 25"


def test_a_score_must_be_reached_twice_in_a_row() -> None:
    def of(scores: list[float]) -> Trial:
        held_out = dict(zip(range(0, 50, 5), scores, strict=False))
        return Trial(
            1, 0, [0.0] * 50, held_out, 1.0, 1.0, 1, tokens=[100 * step for step in range(1, 51)]
        )

    assert waste.reached(of([0.1, 0.96, 0.5, 0.95, 1.0]), 0.95) == 1500
    assert waste.reached(of([0.1, 0.96, 0.5, 0.95]), 0.95) is None


def test_a_systematic_error_belongs_to_a_response() -> None:
    """The best and the worst responses are scored rightly; of those between, some are wrong, the
    same each time."""
    words = ["".join(letters) for letters in itertools.product("abc", repeat=4)]
    right = tasks.spelling(words, answer=["aaaa"] * len(words))
    scores = rewards.systematic(words, answer=["aaaa"] * len(words))
    assert scores == rewards.systematic(words, answer=["aaaa"] * len(words))
    wrong = [share for share, score in zip(right, scores, strict=True) if share != score]
    middle = sum(0 < share < 1 for share in right)
    assert 0 < min(wrong) <= max(wrong) < 1
    assert 0.2 < len(wrong) / middle < 0.5, "half, of which a third gets the right one by chance"
    assert {score for score in scores if 0 < score < 1} == set(rewards.MIDDLE)


def test_a_run_without_rewards_is_shown_by_its_evaluations() -> None:
    trained = Trial(1, 0, [], {0: 0.25, 30: 0.75}, 1.0, 1.0, 1, recipe="distill")
    shown = trials.table([trained, replace(trained, seed=1)], "distill", 5, None)
    columns = {str(column.header): list(column.cells) for column in shown.columns}
    assert [columns[name] for name in ("first", "lowest", "gain")] == [
        ["–", "–", ""],
        ["–", "–", "–"],
        ["–", "–", "–"],
    ]
    assert columns["last"] == ["–", "–", "–"]
    assert columns["after"][:2] == ["0.750", "0.750"]
    assert list(trials.noise_table([replace(trained, seed=n) for n in range(5)], 5).rows)
