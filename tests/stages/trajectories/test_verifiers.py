"""Tasksets of verifiers, unmodified: which rows they make, and which are refused; the policy's turns
are written by the tests.

VERIFIERS: the source of verifiers, whose own tasksets are played too. ``test_verifiers_apart.py``
runs this file in an environment with verifiers.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.compat.extras import is_installed
from pipeline.warehouse.dock import Dock
from stages.environments.classes import environments
from stages.user_code import CodeUnusable
from tests.stages.environments.conversations import QWEN_APPENDS
from tests.stages.trajectories import programs
from tests.stages.trajectories.test_environments import answer, ended
from tests.stages.trajectories.test_programs import conversation, say, shown, stage_of
from tests.stages.trajectories.turns import admit, flow

OWN = Path(__file__).parents[1] / "environments" / "tasksets"
SOURCE = Path(os.environ.get("VERIFIERS", "/nonexistent")) / "tests" / "v1" / "fixtures"
LIMITS = {"max_tokens": 60_000, "step_seconds": 120.0}

pytestmark = pytest.mark.skipif(
    not (is_installed("verifiers") and SOURCE.is_dir()),
    reason="test_verifiers_apart.py runs it with verifiers and its source",
)


@pytest.fixture
async def dock(
    index_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Dock]:
    folders = [str(OWN), str(SOURCE)]
    for folder in folders:
        monkeypatch.syspath_prepend(folder)
    # servers of tools are processes of their own
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("HOME", str(tmp_path))
    programs.seen.clear()
    async with flow(index_url, tmp_path) as dock:
        yield dock


def called(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


async def played(dock: Dock, taskset: str, task: int, turns: list[str]) -> dict[str, Any]:
    stage = await stage_of(dock, f"verifiers:{taskset}", template=QWEN_APPENDS, limits=LIMITS)
    await admit(dock, {"prompt": "", "task": task})
    for turn in turns:
        await answer(dock, stage)
        await say(dock, f"{turn}<|im_end|>")
    await answer(dock, stage)
    [row] = await ended(dock)
    assert shown(row)[1] == "".join(f"{turn}<|im_end|>" for turn in turns)
    assert stage.trajectories.seen.branches == 0
    await stage.trajectories.caller.end()
    return row


@pytest.mark.parametrize(
    ("taskset", "task", "turns", "reward"),
    [
        ("sums", 1, [called("sums_add", '{"a": 4711, "b": 1234}'), "It is 5945."], 1.25),
        ("sums", 0, ["It is 8, or 9, or something else that is near it."], 0.0),
        ("sums", 0, [called("nothing", "{}"), called("sums_add", '{"a": 1}'), "7"], 1.25),
        ("twice", 0, ["Yes.", "No."], 1.0),
        ("twice", 0, ["Yes.", "Yes."], 0.0),
    ],
)
async def test_a_taskset_is_played_with_its_tools_user_and_rewards(
    dock: Dock, taskset: str, task: int, turns: list[str], reward: float
) -> None:
    row = await played(dock, taskset, task, turns)
    assert row["environment_reward"] == reward


BUMP = called("counter_bump", "{}")


@pytest.mark.parametrize(
    ("taskset", "turns", "reward"),
    [
        ("echo_v1", ["Hello, World!"], 1.0),
        ("echo_v1", ["Goodbye."], 0.0),
        ("echo_tool_v1", [called("echo_back", '{"message": "hello world"}'), "Done."], 1.0),
        ("echo_tool_v1", ["hello world [ok-7f3]"], 0.0),
        ("counter_tool_v1", [BUMP, BUMP, "<answer>done</answer>"], 1.0),
        ("counter_tool_v1", [BUMP, "<answer>done</answer>"], 0.0),
        ("echo_user_sim_v1", ["Hello world!", "What?"], 0.5),
        ("echo_user_sim_v1", ["Hello world!", "Goodbye world!"], 1.0),
    ],
)
async def test_tasksets_of_verifiers_are_played_as_they_are(
    dock: Dock, taskset: str, turns: list[str], reward: float
) -> None:
    row = await played(dock, taskset, 0, turns)
    assert row["environment_reward"] == reward


async def test_what_a_tool_returns_is_an_observation(dock: Dock) -> None:
    turns = [called("sums_add", '{"a": 4711, "b": 1234}'), "Done."]
    row = await played(dock, "sums", 1, turns)
    assert "<tool_response>\n5945\n</tool_response>" in shown(row)[0]
    assert shown(row)[0].startswith("<|im_start|>system\nAdd.\n\n# Tools")


@pytest.mark.parametrize(
    ("taskset", "reason"),
    [
        ("pair", r"'pair' has the agents \['white', 'black'\], and one is trained"),
        ("boxed", "the tasks of 'boxed' need a container"),
        ("nothing_of_this_name", "taskset 'nothing_of_this_name' not found"),
        ("duet_v1", r"the agents \['a', 'b'\]"),
    ],
)
async def test_a_taskset_that_cannot_be_trained_is_refused_by_its_name(
    dock: Dock, taskset: str, reason: str
) -> None:
    with pytest.raises(CodeUnusable, match=reason) as refused:
        environments(f"verifiers:{taskset}", {})
    assert f"verifiers:{taskset}" in str(refused.value)


async def test_an_agent_with_a_client_of_its_own_is_not_the_policy(dock: Dock) -> None:
    black = {"model": "judge", "client": {"type": "eval", "base_url": "http://127.0.0.1:9/v1"}}
    environments("verifiers:pair", {"env": {"black": black}})
    with pytest.raises(CodeUnusable, match="cannot be made"):
        environments("verifiers:pair", {"env": {"black": {"colour": 1}}})
    with pytest.raises(CodeUnusable, match="surprise"):
        environments("verifiers:sums", {"surprise": 1})


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({}, "the row has task = None"),
        ({"task": 2}, "the taskset has 2 tasks, and no 2"),
        ({"task": -1}, "the row has task = -1"),
    ],
)
async def test_a_row_that_names_no_task_costs_its_trajectory(
    dock: Dock, row: dict[str, Any], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = await stage_of(dock, "verifiers:sums", template=QWEN_APPENDS, limits=LIMITS)
    await admit(dock, {"prompt": "", **row})
    await answer(dock, stage)
    [ended_row] = await ended(dock)
    assert reason in capsys.readouterr().out
    assert ended_row["environment_reward"] != ended_row["environment_reward"]


async def test_what_its_train_client_asks_with_gets_tokens(dock: Dock) -> None:
    stage = await stage_of(dock, "train_client")
    await admit(dock, {"prompt": "Hi"})
    for turn in ("One.", "Two."):
        await answer(dock, stage)
        await say(dock, f"{turn}<|im_end|>")
    await answer(dock, stage)
    [row] = await ended(dock)
    assert shown(row) == (
        conversation("Hi", "One.", "more", "Two."),
        "One.<|im_end|>Two.<|im_end|>",
    )
    assert programs.seen == ["One.", "Two."]
    assert stage.trajectories.seen.branches == 0
