"""What users read off a comparison, counted again by plain Python from the runs' files."""

from __future__ import annotations

import json
import math
import shutil
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestration.comparison.compare import Comparison, compare
from orchestration.comparison.curves import Curve, band, t_quantile
from orchestration.comparison.keys import differing, flattened
from orchestration.comparison.results import RunResult, read_run
from orchestration.comparison.view import as_curves, as_tables
from orchestration.history.events_file import MetricsFile
from orchestration.state.labels import Labels, write_labels
from pipeline.data.events import Event
from tests.orchestration.compared import STEPS, compared_runs
from tests.orchestration.runs import MOCK, recipe

# Of Student's t distribution, as tables have them: 97.5 %.
QUANTILES = {1: 12.706, 2: 4.303, 5: 2.571, 10: 2.228, 11: 2.201, 15: 2.131, 29: 2.045, 120: 1.980}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return compared_runs(tmp_path_factory.mktemp("compared"))


@pytest.fixture
def comparison(folders: list[Path]) -> Comparison:
    return compare([read_run(folder) for folder in folders])


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["data"] for line in lines if line["kind"] == kind]


def test_results_equal_those_counted_again(folders: list[Path], comparison: Comparison) -> None:
    tables = as_tables(comparison)
    ends = []
    for folder, run in zip(folders, tables["runs"], strict=True):
        steps = events(folder, "step")
        rewards = [step["reward_mean"] for step in steps]
        last = rewards[-round(0.1 * len(rewards)) :]
        ends.append(statistics.fmean(last))
        result = run["results"]["reward_mean"]
        assert result["end"] == pytest.approx(ends[-1])
        assert result["best"] == max(rewards)
        held_out = [answer["reward_mean"] for answer in events(folder, "evaluation")]
        assert run["results"]["evaluation.reward_mean"] == {
            "end": held_out[-1],
            "best": max(held_out),
        }
        assert (run["steps"], run["tokens"]) == (STEPS, steps[-1]["tokens_trained"])
        assert run["hours"] == pytest.approx(sum(step["seconds"] for step in steps) / 3600)
        assert (run["id"], run["state"]) == (folder.name, "finished")
    first, second = tables["settings"]
    assert (first["runs"], second["runs"]) == (["a", "b"], ["c"])
    mean = statistics.fmean(ends[:2])
    half = 12.7062 * statistics.stdev(ends[:2]) / math.sqrt(2)
    end = first["results"]["reward_mean"]["end"]
    assert (end["mean"], end["half"], end["count"]) == pytest.approx((mean, half, 2))
    assert second["results"]["reward_mean"]["end"]["half"] is None


def test_settings_are_told_by_the_keys_that_differ(comparison: Comparison) -> None:
    """Names, seeds and places are none; a default that only one recipe states is no difference."""
    assert comparison.keys == ["train.learning_rate"]
    first, second = comparison.settings
    default = recipe(MOCK).train.learning_rate
    assert (first.keys, second.keys) == (
        {"train.learning_rate": default},
        {"train.learning_rate": 1e-4},
    )
    assert comparison.places == [0, 0, 1]


def test_a_stage_that_only_some_runs_have_is_one_key(comparison: Comparison) -> None:
    """Of its keys those are listed by which the runs that have it differ."""
    base = dict(comparison.runs[0].recipe)

    def run(**keys: Any) -> RunResult:
        return replace(comparison.runs[0], recipe=base | keys)

    def stage(place: int, use: str, **options: Any) -> dict[str, Any]:
        return {f"stages.{place}.{key}": value for key, value in ({"use": use} | options).items()}

    judge = stage(0, "pkg.mine:Judge", workers=1, timeout=600.0, word="please")
    runs = [run(), run(**judge)]
    assert (keys := compare(runs).keys) == ["stages.pkg.mine:Judge"]
    assert [setting.keys[keys[0]] for setting in compare(runs).settings] == ["–", "yes"]
    other = judge | {"stages.0.word": "thanks"}
    behind = {f"stages.1{key.removeprefix('stages.0')}": value for key, value in judge.items()}
    behind |= stage(0, "Filter", workers=1)
    assert compare([*runs, run(**other)]).keys == [*keys, "stages.pkg.mine:Judge.word"]
    assert compare([runs[1], run(**behind)]).keys == ["stages.Filter"]
    section = {"extra.learning_rate": 1e-5, "extra.workers": 1}
    assert compare([run(extra=None), run(**section)]).keys == ["extra"]
    assert compare([run(options=[]), run(options=["a"])]).keys == ["options"]


def test_a_recorded_recipe_has_the_defaults_that_it_lacks(folders: list[Path]) -> None:
    tables = json.loads((folders[0] / "recipe.json").read_text())
    whole = flattened(tables)
    del tables["train"]["weight_decay"]
    assert flattened(tables) == whole
    assert differing([tables, tables]) == []
    other = tables | {"seed": 7, "rollout": tables["rollout"] | {"temperature": 0.5}}
    assert differing([tables, other]) == ["rollout.temperature", "seed"]


@pytest.mark.parametrize("by", ["step", "tokens", "hours"])
def test_curves_have_each_step_once(folders: list[Path], comparison: Comparison, by: Any) -> None:
    curves = as_curves(comparison, "loss", by, 200, fold=False)
    for folder, curve in zip(folders, curves, strict=True):
        steps = events(folder, "step")
        seconds = np.cumsum([step["seconds"] for step in steps]) / 3600
        places = {
            "step": [step["version"] for step in steps],
            "tokens": [step["tokens_trained"] for step in steps],
            "hours": seconds.tolist(),
        }
        assert curve["x"] == pytest.approx(places[by], rel=1e-5)
        assert curve["y"] == pytest.approx([step["loss"] for step in steps], rel=1e-5)
        assert curve["half"] is None


def test_a_band_is_the_mean_of_its_runs_at_each_step(
    folders: list[Path], comparison: Comparison
) -> None:
    band_of_two, single = as_curves(comparison, "loss", "step", 200, fold=True)
    first, second = ([step["loss"] for step in events(folder, "step")] for folder in folders[:2])
    pairs = [*zip(first, second, strict=True)]
    assert band_of_two["x"] == [*range(1, STEPS + 1)]
    assert band_of_two["y"] == pytest.approx([statistics.fmean(pair) for pair in pairs], rel=1e-5)
    halves = [12.7062 * statistics.stdev(pair) / math.sqrt(2) for pair in pairs]
    assert band_of_two["half"] == pytest.approx(halves, rel=1e-4, abs=1e-9)
    assert single["half"] is None


@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=5),
    by=st.sampled_from(["step", "hours"]),
    points=st.integers(2, 40),
)
def test_curves_stay_small_and_between_their_runs(lengths: list[int], by: Any, points: int) -> None:
    curves = [Curve(np.arange(1.0, n + 1), np.arange(1.0, n + 1) * 2) for n in lengths]
    for curve in curves:
        small = curve.reduced(points)
        assert len(small.x) <= points
        assert small.y == pytest.approx(small.x * 2)
        if len(curve.x):
            weights = np.diff(np.linspace(0, len(curve.x), len(small.x) + 1).astype(int))
            assert np.average(small.y, weights=weights) == pytest.approx(curve.y.mean())
    folded = band(curves, by, points)
    assert len(folded.x) <= points
    assert folded.y == pytest.approx(folded.x * 2)


@pytest.mark.parametrize(("degrees", "quantile"), QUANTILES.items())
def test_intervals_are_those_of_students_t(degrees: int, quantile: float) -> None:
    assert t_quantile(degrees) == pytest.approx(quantile, abs=6e-4)


def test_parts_that_are_closed_are_read_too(folders: list[Path], tmp_path: Path) -> None:
    """And a step that was made again counts as it was made last."""
    shutil.copytree(folders[0], tmp_path / "run")
    before = read_run(folders[0])
    path = tmp_path / "run" / "metrics.jsonl"
    with MetricsFile(path, segment_bytes=1) as file:
        milliseconds = int(file.last.partition("-")[0]) + 1
        again = {"step": STEPS, "version": STEPS, "loss": 77.0, "rows": 1, "groups": []}
        file.event(Event(f"{milliseconds}-0", milliseconds / 1000, "step", again))
    assert (path.parent / "metrics").is_dir()
    after = read_run(path.parent)
    assert after.steps["loss"].tolist() == [*before.steps["loss"][:-1].tolist(), 77.0]
    assert after.evaluations["reward_mean"].tolist() == before.evaluations["reward_mean"].tolist()


def test_what_people_wrote_is_with_a_run(folders: list[Path], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(folders[0], folder)
    write_labels(folder, Labels(("slow", "good"), "a note"))
    assert read_run(folder).labels == Labels(("good", "slow"), "a note")
    (folder / "labels.json").write_text("{")
    assert read_run(folder).labels == Labels()


def test_an_unknown_metric_is_refused_with_the_nearest_that_there_is(
    comparison: Comparison,
) -> None:
    with pytest.raises(ValueError, match="'rewad_mean': no run has it; did you mean 'reward_mean'"):
        compare(comparison.runs, ["rewad_mean"])


def test_a_run_without_a_step_has_no_results(folders: list[Path], tmp_path: Path) -> None:
    shutil.copy(folders[0] / "recipe.json", tmp_path)
    result = read_run(tmp_path)
    assert result.state == "failed"
    tables = as_tables(compare([result]))
    assert tables["runs"][0]["results"] == {"reward_mean": {"end": None, "best": None}}
    assert tables["settings"][0]["steps"]["mean"] == 0
    assert as_curves(compare([result]), "reward_mean", "hours", 10, fold=True) == [
        {"x": [], "y": [], "half": None}
    ]
