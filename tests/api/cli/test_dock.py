"""What a person sees of a run's samples: status and inspect, on a live run and when there is
none."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
from pathlib import Path

import torch
from rich.console import Console
from typer.testing import CliRunner

from api.cli.dock import group_view, status_view
from api.cli.main import app
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from orchestration.state.paths import WHERE
from pipeline.data.columns import Column, Schema
from pipeline.index.client import Index, StageSpec
from pipeline.warehouse.dock import Dock
from tests.orchestration.runs import MOCK, executing, recipe

SCHEMA = Schema(
    [
        Column.ragged("ids", torch.int64),
        Column.text("answer"),
        Column.scalar("score", torch.float32),
    ]
)
STAGES = (StageSpec("score", "rows", SCHEMA.mask(["ids"]), SCHEMA.mask(["score"])),)


def text_of(view: object, width: int = 140) -> str:
    out = io.StringIO()
    Console(width=width, file=out).print(view)
    return out.getvalue()


async def test_what_lies_where_is_shown(index: Index, tmp_path: Path) -> None:
    async with Dock.open(
        index.url, index.run, SCHEMA, STAGES, worker="w", arena=1 << 20, directory=tmp_path
    ) as dock:
        await dock.put(
            {"ids": [torch.arange(100), torch.tensor([1, 2])], "answer": ["yes", "no"]}, samples=2
        )
        await dock.put({"ids": [torch.tensor([3])], "answer": ["maybe"]})
        claim = await dock.claim("score", 1)
        assert claim is not None
        stats = await dock.index.stats()
        now = stats["leases"][0]["since"] + 1.5
        status = {
            "run": "r",
            "now": now,
            "stats": stats,
            "ledger": dataclasses.asdict(await dock.index.ledger_event()),
        }
        shown = text_of(status_view(status))
        assert "score  rows   2 rows  1 rows" in shown
        assert "1.5 s  58.5 s" in shown
        assert "32 KiB  1 MiB  3%" in shown
        assert shown.startswith("r: 2 groups admitted, 2 still there\n")
        assert "ledger" not in shown, "a flow without a trainer has none"
        ledger = {**status["ledger"], "generated_turns": 7, "in_flight_turns": 7}
        assert "samples  tokens  turns" in text_of(status_view({**status, "ledger": ledger}))
        await dock.commit(claim, [0], {"score": torch.tensor([0.5])})
        onlooker = await Dock.attach(index.url, index.run)
        rows = await onlooker.inspect(0)
        assert await onlooker.inspect(7) == []
        await onlooker.index.close()
    assert [row["columns"] for row in rows] == [
        {"ids": list(range(100)), "answer": "yes", "score": 0.5},
        {"ids": [1, 2], "answer": "no"},
    ]
    assert [row["done"] for row in rows] == [["score"], []]
    shown = text_of(group_view(rows))
    assert "group 0: 2 samples" in shown
    assert "22, 23, … 100 in all]" in shown


def test_a_trajectory_has_the_width_of_the_terminal_for_its_texts() -> None:
    call = {"name": "add", "arguments": {"a": 1, "b": 2}}
    turn = {
        "generated": True,
        "tokens": 41,
        "text": "x" * 70,
        "reward": 0.5,
        "pieces": [(3, 40, "x" * 69), (4, 1, "x")],
        "calls": [call],
        "seconds": {"engine": 1.25, "waiting": None, "environment": 0.0042},
    }
    observed = {"generated": False, "tokens": 1, "text": "[3]", "reward": None}
    branch = {**turn, "calls": [], "branch": 1, "shares": 9}
    row = {
        "row": 0,
        "group": 0,
        "samples": 1,
        "state": "live",
        "tokens": 82,
        "done": [],
        "columns": {},
    }
    row |= {"oldest_version": 3, "segments": [turn, observed, branch]}
    lines = [line.rstrip() for line in text_of(group_view([row]), 80).splitlines()]
    facts = "41 tokens by v3 v4, reward 0.5, engine 1.25 s, waiting –, environment 4.2 ms"
    at = next(at for at, line in enumerate(lines) if line.startswith("turn 1"))
    assert " ".join(lines[at : at + 2]).startswith(f"turn 1: {facts}")
    assert f"    {'x' * 70}" in lines
    assert '    call add({"a": 1, "b": 2})' in lines
    assert lines[lines.index("observed: 1 token") + 1] == "    [3]"
    assert "branch 1: goes on behind 9 tokens of the response" in lines


async def test_a_live_run_is_looked_into_by_its_folder(tmp_path: Path) -> None:
    run = Execution(RunFolder.create(recipe(MOCK, train__steps=5000), tmp_path / "run"))
    async with executing(run) as (watched, _):
        await watched.until(lambda: len(watched.of("step")) >= 1)
        assert (tmp_path / "run" / WHERE).stat().st_mode & 0o777 == 0o600
        result = await asyncio.to_thread(
            CliRunner().invoke, app, ["dock", "status", str(tmp_path / "run"), "--json"]
        )
        assert result.exit_code == 0, result.output
        assert next(iter(json.loads(result.stdout)["stats"]["stages"])) == "rollout"
        group = json.loads(result.stdout)["stats"]["admitted"] - 1
        result = await asyncio.to_thread(
            CliRunner().invoke,
            app,
            ["dock", "inspect", str(tmp_path / "run"), "--group", str(group), "--json"],
        )
        assert json.loads(result.stdout)[0]["group"] == group
        watched.stop.set()
    assert not (tmp_path / "run" / WHERE).exists()
    run = tmp_path / "run"
    result = await asyncio.to_thread(
        CliRunner().invoke, app, ["dock", "status", str(run), "--json"]
    )
    ended = json.loads(result.stdout)
    trained = len(watched.of("step"))
    assert (ended["stats"]["trained"], ended["ledger"]["trained"]) == (trained, trained * 16)
    assert list(ended["stats"]["stages"]) == ["rollout", "reward", "advantage", "update"]
    result = await asyncio.to_thread(
        CliRunner().invoke, app, ["dock", "inspect", str(run), "--group", "3"]
    )
    assert result.exit_code == 0, result.output
    assert result.stdout.count("trained in step 1, oldest version 0") == 4, "each row of the group"
    assert "\nresponse " in result.stdout
    result = await asyncio.to_thread(
        CliRunner().invoke, app, ["dock", "inspect", str(run), "--group", "10000"]
    )
    assert (result.exit_code, "group: 10000 is not there" in result.stderr) == (2, True)


def test_without_a_run_the_fix_is_named(tmp_path: Path) -> None:
    for arguments, needle in (
        (["dock", "status", str(tmp_path)], "is not the folder of a run"),
        (
            ["dock", "export", str(tmp_path), "--out", str(tmp_path / "x.jsonl")],
            "has no recipe.json; give an id",
        ),
        (
            ["dock", "status"],
            "give a run's folder or id, or both --index URL and --run ID",
        ),
        (
            ["dock", "status", "--index", "redis://:word@127.0.0.1:1", "--run", "x"],
            "no answer for 5 s",
        ),
    ):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 2
        assert needle in result.stderr
        assert "word" not in result.stderr
    assert not list(tmp_path.iterdir())
