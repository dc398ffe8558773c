"""The figures of each reward function, counted again from the samples of a real run with a function
that learns, one that fails, and one that is slow and constant."""

from __future__ import annotations

import asyncio
import collections
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from api.cli.main import app
from api.telemetry.progress import Progress
from api.telemetry.prometheus import FAMILIES, RunListener
from api.telemetry.trackers import Points
from api.terminal.live import LiveView
from api.terminal.plain import plain_line
from api.terminal.report import functions_text, summary_table, write_report
from api.terminal.reward_notes import reward_notes
from benchmarks.runs.executed import executed
from orchestration.history.totals import RunTotals
from orchestration.recipe.schema import Recipe
from pipeline.data.events import Event
from stages.samples.reading import newest
from stages.samples.sample_log import FOLDER, Sample
from tests.orchestration.rewards import counted
from tests.orchestration.runs import TINY, recipe

MODULE = counted.__name__
WEIGHTS = {"spelling": 1.0, f"{MODULE}:judge": 0.5, f"{MODULE}:constant": 0.25}
SPELLING, JUDGE, CONSTANT = WEIGHTS
CALLS = ("responses", "lost", "calls", "failed", "again", "seconds")


@dataclass
class Scored:
    """A run, its samples by step, and the calls that its functions wrote down: name, result,
    seconds."""

    recipe: Recipe
    folder: Path
    events: list[Event]
    samples: dict[int, list[Sample]]
    calls: list[list[str]]

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [dict(event.data) for event in self.events if event.kind == "step"]

    def called(self, function: str, result: str = "") -> list[float]:
        """The seconds of the calls of ``function`` with ``result``."""
        name = function.partition(":")[2]
        return [float(s) for called, r, s in self.calls if called == name and result in ("", r)]


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Scored:
    folder = tmp_path_factory.mktemp("scored")
    of = recipe(
        TINY,
        reward__functions=[{"name": name, "weight": weight} for name, weight in WEIGHTS.items()],
        reward__on_error="zero",
        reward__retries=1,
        reward__max_error_share=1.0,
        pipeline__staleness=0,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(counted.FILE, str(folder / "calls"))
        events = asyncio.run(executed(of, folder / "run"))
    samples = collections.defaultdict(list)
    for sample in newest(folder / "run" / FOLDER):
        samples[sample["step"]].append(sample)
    calls = [line.split() for line in (folder / "calls").read_text().splitlines()]
    return Scored(of, folder / "run", events, samples, calls)


def scores_of(samples: list[Sample], function: str) -> np.ndarray:
    """float64: the scores that ``function`` gave."""
    return np.array(
        [s["rewards"][function] for s in samples if function not in s.get("failed", ())]
    )


def parts_of(samples: list[Sample]) -> np.ndarray:
    """float64 [rows with a reward, K]: weighted scores less their mean in each group."""
    groups = collections.defaultdict(list)
    for sample in samples:
        if "failed" not in sample:
            groups[sample["group"]].append([sample["rewards"][n] * w for n, w in WEIGHTS.items()])
    return np.concatenate([np.array(g) - np.mean(g, axis=0) for g in groups.values()])


def test_mean_and_deviation_of_each_step_are_those_of_its_samples(scored: Scored) -> None:
    assert len(scored.steps) == 6
    for step in scored.steps:
        assert list(step["rewards"]) == list(WEIGHTS)
        for name, figures in step["rewards"].items():
            scores = scores_of(scored.samples[step["step"]], name)
            assert figures["mean"] == pytest.approx(scores.mean(), rel=1e-12)
            assert figures["std"] == pytest.approx(scores.std(), rel=1e-9, abs=1e-12)
    assert step["rewards"][CONSTANT]["mean"] == counted.SCORE


def test_shares_and_correlations_are_those_within_groups(scored: Scored) -> None:
    for step in scored.steps:
        parts = parts_of(scored.samples[step["step"]])
        reward = parts.sum(axis=1)
        for column, name in enumerate(WEIGHTS):
            figures = step["rewards"][name]
            part = parts[:, column]
            assert figures["share"] == pytest.approx(part @ reward / (reward @ reward), abs=1e-9)
            rest = reward - part
            if (norms := np.linalg.norm(part) * np.linalg.norm(rest)) > 1e-9:
                assert figures["correlation"] == pytest.approx(part @ rest / norms, abs=1e-9)
        assert step["rewards"][CONSTANT]["share"] == 0
        assert step["rewards"][CONSTANT]["correlation"] is None
        assert sum(each["share"] for each in step["rewards"].values()) == pytest.approx(1)


def test_calls_are_those_that_the_functions_were_asked(scored: Scored) -> None:
    for step in scored.steps:
        failed = sum(JUDGE in s.get("failed", ()) for s in scored.samples[step["step"]])
        assert step["rewards"][JUDGE]["lost"] == failed == step.get("reward_failed", 0)
    for name in (JUDGE, CONSTANT):
        sums = {what: sum(step["rewards"][name][what] for step in scored.steps) for what in CALLS}
        assert sums["calls"] == len(scored.called(name))
        assert sums["failed"] == len(scored.called(name, "failed"))
        assert sums["responses"] == sum(len(members) for members in scored.samples.values())
        of_call = (sums["seconds"] - sum(scored.called(name))) / sums["calls"]
        assert -1e-5 <= of_call < 3e-3, "what a call waits is none of its seconds"
    lost = sum("failed" in sample for members in scored.samples.values() for sample in members)
    rows = sum(len(members) for members in scored.samples.values())
    again = len(scored.called(JUDGE)) - rows
    assert lost > 0
    assert again > lost, "some were scored at the second call"
    assert sum(step["rewards"][JUDGE]["again"] for step in scored.steps) == again


def test_groups_without_a_difference_and_lengths_by_reward(scored: Scored) -> None:
    for step in scored.steps:
        groups = collections.defaultdict(list)
        for sample in scored.samples[step["step"]]:
            if "failed" not in sample:
                groups[sample["group"]].append((sample["reward"], sample["tokens"]))
        equal = [len({reward for reward, _ in members}) == 1 for members in groups.values()]
        assert step["equal_groups"] == pytest.approx(np.mean(equal), abs=1e-12)
        sides: dict[str, list[int]] = {"above": [], "below": []}
        for members in groups.values():
            rewards = np.array([reward for reward, _ in members])
            for reward, tokens in members:
                if len(set(rewards)) > 1 and reward != rewards.mean():
                    sides["above" if reward > rewards.mean() else "below"].append(tokens)
        for side, lengths in sides.items():
            assert step[f"response_length_{side}"] == pytest.approx(np.mean(lengths))


def test_summary_and_terminal_have_them_and_say_what_stands_out(scored: Scored) -> None:
    report = write_report(scored.folder, scored.recipe, checkpoint=None)
    summary = json.loads((scored.folder / "summary.json").read_text())
    figures = summary["rewards"][JUDGE]
    responses = [sample for members in scored.samples.values() for sample in members]
    lost = sum(JUDGE in sample.get("failed", ()) for sample in responses)
    unscored = f"could not score {lost} of {len(responses)} responses ({lost / len(responses):.0%})"
    assert summary["reward_failed"] == figures["lost"] == lost
    means = [step["rewards"][JUDGE]["mean"] for step in scored.steps]
    assert figures["first_steps"] == pytest.approx(np.mean(means[:3]), rel=1e-5)
    assert figures["last_steps"] == pytest.approx(np.mean(means[-3:]), rel=1e-5)
    assert figures["calls"] == len(scored.called(JUDGE))
    assert summary["last_step"]["grad_norm"] > 0
    assert any(
        note.startswith(f"{CONSTANT} scores all responses with 0.25 in the last 3 steps")
        for note in report.notes
    )
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(summary_table(summary))
    progress = Progress("run", 6, 0)
    for event in scored.events:
        progress.apply(event)
    console.print(LiveView(progress, console).render())
    text = console.export_text()
    assert " ".join(text.split()).count(unscored) == 2, "of the summary, and of the live view"
    assert f"({lost} failed)" in text, "beside the reward"
    last = scored.steps[-1]["rewards"]
    assert f"reward {JUDGE}: {last[JUDGE]['mean']:.3f} ±{last[JUDGE]['std']:.2f}" in text
    line = plain_line(progress, [event for event in scored.events if event.kind == "step"][-1])
    assert f" (spelling {last[SPELLING]['mean']:.3f}, {JUDGE} " in line


def test_a_function_fails_often_by_its_responses_and_not_by_its_calls() -> None:
    figures = {"last_steps": 0.5, "std": 0.5, "share": None, "correlation": None, "again": 337}
    figures |= {"calls": 682, "failed": 497}
    (note,) = reward_notes({"judge": {**figures, "responses": 1696, "lost": 160}}, 5)
    assert "judge could not score 160 of 1,696 responses (9%), called again 337 times:" in note
    assert not reward_notes({"judge": {**figures, "responses": 1696, "lost": 80}}, 5)
    text = functions_text({"judge": {**figures, "first_steps": 0.0, "responses": 0, "lost": 80}})
    assert text == "judge 0.000 → 0.500  (could not score 80 responses)", "of an older file"


def test_prometheus_has_the_newest_scores_and_the_sums_of_calls(scored: Scored) -> None:
    listener = RunListener.__new__(RunListener)
    listener.run = "r"
    listener.totals = RunTotals()
    listener.catch_up(scored.events[:10])
    listener.totals = RunTotals.of(
        json.loads(json.dumps(listener.totals.wire()))
    )  # after a restart
    listener.catch_up(scored.events[10:])
    families = {family.name: family for family in FAMILIES}

    def values(name: str) -> dict[tuple[str, str], float]:
        return {
            (s.labels["function"], s.labels.get("stat") or s.labels.get("what", "")): s.value
            for s in families[name].collect([listener]).samples
        }

    last = scored.steps[-1]["rewards"]
    of_scores = values("run_reward_function")
    assert of_scores[JUDGE, "mean"] == last[JUDGE]["mean"]
    assert of_scores[SPELLING, "share"] == last[SPELLING]["share"]
    assert (CONSTANT, "correlation") not in of_scores
    assert values("run_reward_calls")[JUDGE, "calls"] == len(scored.called(JUDGE))
    assert values("run_reward_calls")[JUDGE, "failed"] == len(scored.called(JUDGE, "failed"))
    for what in ("responses", "lost"):
        total = sum(step["rewards"][JUDGE][what] for step in scored.steps)
        assert values("run_reward_calls")[JUDGE, what] == total
    assert values("run_reward_seconds")[CONSTANT, ""] >= sum(scored.called(CONSTANT)) - 1e-3


def test_tensorboard_has_them_under_trls_names(scored: Scored) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = CliRunner().invoke(app, ["track", str(scored.folder), "--to", "tensorboard"])
    assert result.exit_code == 0, result.output
    shown = EventAccumulator(str(scored.folder / "tensorboard"))
    shown.Reload()
    for name, of_step in {
        "train/rewards/judge/mean": lambda step: step["rewards"][JUDGE]["mean"],
        "train/rewards/judge/std": lambda step: step["rewards"][JUDGE]["std"],
        "train/rewards/spelling/mean": lambda step: step["rewards"][SPELLING]["mean"],
        "train/reward": lambda step: step["reward_mean"],
        "train/reward_std": lambda step: step["reward_std"],
        "train/frac_reward_zero_std": lambda step: step["equal_groups"],
        "train/completions/mean_length": lambda step: step["response_length_mean"],
    }.items():
        values = [one.value for one in shown.Scalars(name)]
        assert values == pytest.approx([of_step(step) for step in scored.steps], rel=1e-5), name


def test_functions_of_one_name_keep_their_modules_in_trackers() -> None:
    figures = {"mean": 0.5}
    data = {"step": 3, "rewards": {"a:score": figures, "b:score": figures}}
    (point,) = Points().of(Event("1-0", 1.0, "step", data))
    assert point.numbers.keys() == {"train/rewards/a:score/mean", "train/rewards/b:score/mean"}
