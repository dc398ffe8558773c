"""The overlap benchmark measures what it is given, and still runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.runs.overlap import (
    Trained,
    Workload,
    all_stops,
    longest_gap,
    main,
    measured,
    without,
)
from orchestration.processes.forkserver import ForkServer
from tests.forked import fork_server, listen


@pytest.mark.parametrize("balance", [0.5, 1.0, 2.0])
def test_a_run_whose_busiest_stage_never_waits_reaches_exactly_its_bound(balance: float) -> None:
    workload = Workload(balance=balance, steps=8, margin=2)
    now = 100.0
    steps = []
    for step in range(8):
        tokens = 20_000 + 500 * step
        busiest = max(workload.generation_seconds(tokens), workload.training_seconds(1, tokens))
        # what is slow while the pipeline fills and drains is left out
        now += busiest if 2 <= step < 7 else 99.0
        steps.append(Trained(step, tokens, now, step % 3))
    arm = measured(workload, "ideal", 2, steps)
    assert (arm.first, arm.last, arm.staleness_max) == (1, 6, 2)
    assert arm.tokens == sum(step.tokens for step in steps[2:7])
    assert arm.tokens_per_second == pytest.approx(arm.tokens / (steps[6].at - steps[1].at))
    if balance != 1.0:  # else which stage is the busiest changes with the step's tokens
        assert arm.of_bound == pytest.approx(1.0)
    shares = (arm.generation_share, arm.training_share)
    assert arm.of_bound == max(shares) <= 1 + 1e-9
    assert shares.index(max(shares)) == (0 if balance < 1 else 1) or balance == 1.0


@pytest.mark.parametrize("balance", [0.5, 1.0, 2.0])
def test_an_average_step_takes_each_stage_what_the_workload_says(balance: float) -> None:
    workload = Workload(step_seconds=4.0, balance=balance)
    tokens = round(workload.mean_tokens * workload.groups * workload.group_size)
    generation = workload.generation_seconds(tokens)
    training = workload.training_seconds(1, tokens)
    assert max(generation, training) == pytest.approx(4.0, rel=1e-3)
    assert training / generation == pytest.approx(balance, rel=1e-3)


def test_the_smoke_run_compares_the_orders_of_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["--smoke", "--json", str(tmp_path / "overlap.json")])
    result = json.loads((tmp_path / "overlap.json").read_text())
    assert [(arm["name"], arm["bound"]) for arm in result["arms"]] == [
        ("synchronous", None),
        ("η = 0", 0),
        ("η = 2", 2),
    ]
    for arm in result["arms"]:
        assert arm["staleness_max"] <= (arm["bound"] or 0)
        assert 0 < arm["of_bound"] == max(arm["generation_share"], arm["training_share"])
        assert arm["tokens_per_second"] == pytest.approx(arm["tokens"] / arm["seconds"])
        assert (arm["first"], arm["last"]) == (1, result["workload"]["steps"])
    assert len({arm["tokens"] for arm in result["arms"]}) == 1, (
        "the same groups have the same lengths in every arm"
    )
    lines = capsys.readouterr().out.splitlines()
    assert [line[:18].strip() for line in lines[-3:]] == ["synchronous", "η = 0", "η = 2"]
    assert lines[-3].split()[-1] == "1.00", "speed-up is relative to the synchronous order"


def test_replicas_that_swap_one_after_the_other_never_all_stop(tmp_path: Path) -> None:
    arguments = ["--smoke", "--replicas", "2", "--swap-share", "0.3", "--bounds", "2"]
    main([*arguments, "--json", str(tmp_path / "overlap.json")])
    arms = {arm["name"]: arm for arm in json.loads((tmp_path / "overlap.json").read_text())["arms"]}
    assert arms["η = 2, together"]["all_stop_share"] > 0
    assert arms["η = 2, rolling"]["all_stop_share"] < arms["η = 2, together"]["all_stop_share"]


def test_torch_replicas_in_processes_swap_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listen()
    monkeypatch.setattr(ForkServer, "start", fork_server)
    main(
        [
            "--smoke",
            "--engine",
            "torch",
            "--replicas",
            "2",
            "--json",
            str(tmp_path / "overlap.json"),
        ]
    )
    result = json.loads((tmp_path / "overlap.json").read_text())
    together, rolling = result["runs"]
    assert (together["rolling"], rolling["rolling"]) == (False, True)
    assert rolling["at_once"] == 1, "by the workers' own clocks never two in their swaps"
    assert rolling["all_stop_share"] == rolling["longest_stop"] == 0
    for run in result["runs"]:
        assert 2 <= run["swaps"] <= 2 * result["workload"]["steps"], (
            "each replica has taken the last version"
        )
        assert run["tokens_per_second"] > 0 < run["exposed_seconds"]
        assert run["staleness_max"] <= run["bound"] == 2


def test_all_stop_only_while_every_replica_is_stopped() -> None:
    stops = [(1.0, 3.0), (2.0, 4.0), (6.0, 9.0), (8.5, 12.0)]
    assert all_stops(2, stops, 0.0, 20.0) == [1.0, 0.5]
    assert all_stops(2, stops, 2.5, 8.75) == [0.5, 0.25]
    assert all_stops(3, stops, 0.0, 20.0) == []


def test_the_longest_gap_is_where_no_token_was_made() -> None:
    made = [*without([(0.0, 4.0), (5.0, 9.0)], [(1.0, 2.0), (3.5, 5.5)]), (1.25, 3.0)]
    assert sorted(made) == [(0.0, 1.0), (1.25, 3.0), (2.0, 3.5), (5.5, 9.0)]
    assert longest_gap(made, 0.0, 8.0) == 2.0
    assert longest_gap(made, 0.0, 12.0) == 3.0, "after the last one"
    assert longest_gap(made, -4.0, 8.0) == 4.0, "before the first one"
    assert longest_gap(made, 2.0, 3.0) == 0.0
