"""What a person sees of trajectories: all of their tokens, while they go on and afterwards; and
figures that are those of the rows."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from api.cli.main import app
from api.telemetry.progress import Progress
from api.telemetry.trajectories import summarize_trajectories
from api.terminal.report import summarize
from stages.flow.catalogue import OBSERVED, TIMES
from tests.orchestration.run.test_trajectories import GAMES, GUESS, environments_of, run_of
from tests.orchestration.runs import complete, executing, recipe


async def asyncdock(*arguments: object) -> str:
    result = await asyncio.to_thread(CliRunner().invoke, app, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    return result.stdout


async def inspected(run: Path, group: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(
        await asyncdock("dock", "inspect", run, "--group", group, "--json")
    )
    return rows


def exported(run: Path, form: str) -> list[dict[str, Any]]:
    out = run / f"{form}.jsonl"
    result = CliRunner().invoke(
        app, ["dock", "export", str(run), "--out", str(out), "--format", form]
    )
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in out.read_text().splitlines()]


def assert_shown_as_it_is(row: dict[str, Any]) -> None:
    """The segments of a row are its tokens, its mask and its versions."""
    columns, segments = row["columns"], row["segments"]
    versions = columns["versions"]
    pairs = list(zip(versions[::2], versions[1::2], strict=True))
    mask = [version != OBSERVED for version, tokens in pairs for _ in range(tokens)]
    assert columns.get("loss_mask", mask) == mask
    assert len(columns["response_ids"]) == len(mask)
    shown = [segment["generated"] for segment in segments for _ in range(segment["tokens"])]
    assert shown == mask
    pieces = [(v, n) for segment in segments for v, n, _ in segment.get("pieces", ())]
    assert pieces == [pair for pair in pairs if pair[0] != OBSERVED]


async def test_a_trajectory_is_shown_while_it_goes_on(tmp_path: Path) -> None:
    go_on = tmp_path / "go-on"
    run = tmp_path / "run"
    of = recipe(
        GUESS,
        launch__launcher="inline",
        environment__use="tests.orchestration.run.held:Held",
        environment__options={"file": str(go_on)},
    )
    async with executing(run_of(of, run)) as (watched, work):
        await watched.until(lambda: any(e["parked"] for e in watched.of("stage")))
        rows = await inspected(run, 0)
        view = await asyncdock("dock", "inspect", run, "--group", 0)
        assert {row["state"] for row in rows} == {"live"}
        assert any(row["segments"] for row in rows), "the turn that waits for its answer"
        for row in rows:
            assert_shown_as_it_is(row)
            for turn in row["segments"]:
                assert turn["generated"]
                assert turn["reward"] is None
                assert turn["seconds"]["engine"] > 0
        assert "turn 1" in view
        go_on.touch()
        await watched.until(lambda: bool(watched.of("step")))
        ended = [row for group in range(4) for row in await inspected(run, group)]
        for row in ended:
            assert_shown_as_it_is(row)
        result = await work
    assert result.state == "finished", result.reason


async def test_figures_and_exports_are_those_of_the_rows(tmp_path: Path) -> None:
    run = tmp_path / "run"
    of = recipe(GUESS, launch__launcher="inline")
    async with executing(run_of(of, run)) as (watched, work):
        result = await work
    assert result.state == "finished", result.reason
    lines = exported(run, "tokens")
    assert len(lines) == 6 * 4 * 4
    turns = [segment for line in lines for segment in line["segments"] if segment["generated"]]
    observed = [
        segment for line in lines for segment in line["segments"] if "pieces" not in segment
    ]
    progress = Progress(of.name, of.train.steps, of.pipeline.staleness)
    for event in watched.events:
        progress.apply(event)
    counts = progress.trajectories
    of_rollout = {"computed_again_tokens": counts["computed_again_tokens"]}
    assert counts == {**environments_of(watched), **of_rollout}
    assert counts["turns"] == len(turns) > len(lines)
    assert counts["generated_tokens"] == sum(turn["tokens"] for turn in turns)
    assert counts["observed_tokens"] == sum(segment["tokens"] for segment in observed) > 0
    for name in TIMES:
        of_rows = sum(turn["seconds"][name] for turn in turns)
        assert counts[f"{name}_seconds"] == pytest.approx(of_rows, abs=1e-3)
        assert of_rows > 0
    summary = summarize_trajectories(counts)
    assert summary["endings"] == Counter(line["ending"] for line in lines)
    assert summary["turns_mean"] == len(turns) / len(lines)
    assert summarize(progress, checkpoint=None)["trajectories"] == summary
    for line in lines:
        assert len(line["completion_ids"]) == len(line["logprobs"]) == len(line["loss_mask"])
        assert line["reward"] == sum(s["reward"] for s in line["segments"] if s["generated"])

    for line, trace in zip(lines, exported(run, "openenv"), strict=True):
        ids = line["prompt_ids"] + line["completion_ids"]
        trained = set[int]()
        for turn in trace["turns"]:
            begin = len(turn["prompt_token_ids"])
            all_ids = turn["prompt_token_ids"] + turn["completion_token_ids"]
            assert all_ids == ids[: len(all_ids)]
            assert len(turn["loss_mask"]) == len(all_ids)
            trained |= {at for at, mask in enumerate(turn["loss_mask"]) if mask}
            logprobs = line["logprobs"][begin - len(line["prompt_ids"]) :]
            assert turn["per_token_logps"] == logprobs[: len(turn["completion_token_ids"])]
        mask = [at for at, made in enumerate(line["loss_mask"], len(line["prompt_ids"])) if made]
        assert sorted(trained) == mask


@pytest.mark.parametrize(
    ("game", "metrics"),
    [
        ("Slow", set()),
        ("Same", {"equal_groups"}),
        ("Failing", {"equal_groups", "failed_environments"}),
    ],
)
async def test_environments_of_which_nothing_is_learned_are_alarms(
    game: str, metrics: set[str], tmp_path: Path
) -> None:
    of = recipe(
        GUESS,
        launch__launcher="inline",
        pipeline__staleness=0,
        environment__use=f"{GAMES}:{game}",
        environment__on_error="zero",
        train__steps=9,
    )
    watched, result = await complete(run_of(of, tmp_path / "run"))
    assert result.state == "finished", result.reason
    assert {alarm["metric"] for alarm in watched.of("alarm")} == metrics
