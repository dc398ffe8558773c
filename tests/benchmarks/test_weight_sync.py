"""The weight sync benchmark still runs, and its figures are those of the plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.training.weight_sync import ARMS, config, least_seconds, main
from stages.parallel.layout import Layout
from stages.parallel.placement import model_state, place
from stages.resharding.plan import Phase, adamw_bytes, memory, plan_reshard


def test_the_smoke_run_counts_what_the_plan_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["--smoke", "--train", "tp=2", "--rollout", "dp=2", "--json", str(tmp_path / "sync.json")])
    result = json.loads((tmp_path / "sync.json").read_text())
    state = model_state(config("tiny"))
    train = place(state, Layout(tp=2))
    plan = plan_reshard(
        train, place(state, Layout(dp_replicate=2), names="vllm"), bucket_bytes=2**16
    )
    figures = {one.phase.value: one for one in memory(plan, adamw_bytes(train))}

    gathers = ["gather", "gather: bare all-to-alls", "gather: one copy"]
    rows = [one["phase"] for one in result["phases"]]
    assert rows == ["offload state", *gathers, "offload weights", "bring back"]
    for one in result["phases"]:
        assert one["ratio"] > 0
        assert one["rate"] == pytest.approx(one["nbytes"] / one["seconds"])
    sizes = {one["phase"]: one["nbytes"] for one in result["phases"]}
    assert [sizes[name] for name in gathers] == [state.nbytes] * 3
    assert sizes["offload state"] + sizes["offload weights"] == sizes["bring back"]

    arms = {one["arm"]: one for one in result["arms"]}
    assert tuple(arms) == ARMS
    trained = max(figures["train"].live)
    for arm in ("swap", "swap, prefetch"):
        assert arms[arm]["released"] == trained
        assert arms[arm]["generating"] == max(figures["generate"].live)
        assert arms[arm]["peak"] == max(max(one.live) for one in figures.values())
        assert 0 < arms[arm]["temporary"] == max(plan.temporary) <= 2 * result["bucket_bytes"]
    assert arms["naive"]["released"] == 0
    assert arms["naive"]["generating"] == trained + state.nbytes
    assert arms["naive"]["peak"] > arms["swap"]["peak"]
    assert all(one["exposed"] > 0 for one in arms.values())
    assert arms["swap, prefetch"]["hidden"] == pytest.approx(
        arms["swap"]["exposed"] - arms["swap, prefetch"]["exposed"]
    )
    assert result["goals"]["temporary of two buckets or less"]
    assert "gather at 0.7 of its floor or more" in result["goals"]

    lines = capsys.readouterr().out.splitlines()
    assert result["exchange"] == "shared memory"
    assert lines[0].endswith("buckets of 64 KiB, exchanged by shared memory")
    assert [
        line.split("  ")[0].strip() for line in lines if line.startswith(("naive", "swap"))
    ] == list(ARMS)


def test_what_crosses_is_copied_twice_in_the_gathers_floor() -> None:
    """Of 100 bytes that arrive the rank has 40 itself, and it sends 50: at 10 bytes a second 4 + 5
    + 6 seconds of copies."""
    nbytes = {
        Phase.OFFLOAD_STATE: 80,
        Phase.GATHER: 100,
        Phase.OFFLOAD_WEIGHTS: 40,
        "bring back": 120,
    }
    result = {"bytes": nbytes, "kept": 40, "copied": 40 + 50 + 60}
    one = {"rates": {"to host": 20.0, "back": 10.0}, "raw gather": 30.0}
    copies = {"offload state": 4.0, "offload weights": 2.0, "bring back": 12.0}
    gathers = {"gather: bare all-to-alls": 34.0, "gather: one copy": 10.0}
    for device, floor in (("cpu", 15.0), ("cuda", 34.0)):
        found = {row: seconds for row, (_, seconds) in least_seconds(result, one, device).items()}
        assert found == {**copies, **gathers, "gather": floor}
