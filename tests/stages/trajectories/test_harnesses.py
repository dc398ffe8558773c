"""Agents that know nothing of us but two environment variables: what of their conversations is
trained. They are processes; the policy's turns are written by the tests."""

from __future__ import annotations

import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.compat.extras import is_installed
from pipeline.warehouse.dock import Dock
from stages.trajectories.stage import Environments
from tests.stages.environments.conversations import QWEN_APPENDS
from tests.stages.trajectories import programs
from tests.stages.trajectories.test_environments import answer, ended
from tests.stages.trajectories.test_programs import conversation, say, shown, stage_of
from tests.stages.trajectories.turns import admit, flow

HARNESSES = Path(__file__).with_name("harnesses")
LIMITS = {"max_tokens": 60_000, "step_seconds": 120.0}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 4711, "b": 1234}}\n</tool_call>'
CODE = "Let me see.\n<code>\nx = 4711 + 1234\nprint(x)\n</code>"
END = "<code>\nfinal_answer(x)\n</code>"
needs_smolagents = pytest.mark.skipif(
    not is_installed("smolagents"), reason="smolagents is not installed"
)


@pytest.fixture
async def dock(index_url: str, tmp_path: Path) -> AsyncIterator[Dock]:
    programs.seen.clear()
    async with flow(index_url, tmp_path) as dock:
        yield dock


async def played(
    dock: Dock, command: list[str], turns: list[str], **row: Any
) -> tuple[Environments, dict[str, Any]]:
    stage = await stage_of(dock, "harness", template=QWEN_APPENDS, limits=LIMITS)
    await admit(dock, {"prompt": "4711 + 1234?", "answer": "5945", "command": command, **row})
    for turn in turns:
        await answer(dock, stage)
        await say(dock, f"{turn}<|im_end|>")
    await answer(dock, stage)
    [ended_row] = await ended(dock)
    assert ended_row["environment_reward"] == 1.0, programs.seen
    await stage.trajectories.caller.end()
    return stage, ended_row


async def test_the_tool_loop_of_openais_client_is_trained_turn_by_turn(dock: Dock) -> None:
    command = [sys.executable, str(HARNESSES / "openai_loop.py")]
    stage, row = await played(dock, command, [CALL, "It is 5945"])
    assert shown(row)[1] == f"{CALL}<|im_end|>It is 5945<|im_end|>"
    assert "<tool_response>\n5945\n</tool_response>" in shown(row)[0]
    assert stage.trajectories.seen.branches == 0


@pytest.mark.skipif(not (shutil.which("curl") and shutil.which("jq")), reason="no curl, or no jq")
async def test_a_loop_of_curl_is_trained_turn_by_turn(dock: Dock) -> None:
    command = ["bash", str(HARNESSES / "loop.sh")]
    stage, row = await played(dock, command, ["I add", "5945"])
    assert shown(row)[0].startswith(conversation("4711 + 1234?", "I add", "more", "5945"))
    assert stage.trajectories.seen.branches == 0


@needs_smolagents
@pytest.mark.parametrize("options", [(), ("appending",)])
async def test_all_turns_of_an_agent_of_smolagents_are_trained(
    options: tuple[str, ...], dock: Dock
) -> None:
    command = [sys.executable, str(HARNESSES / "code_agent.py")]
    stage, row = await played(dock, command, [CODE, END], arguments=options)
    text, generated = shown(row)
    assert "Last output from code snippet" in text
    assert generated == f"{CODE}<|im_end|>{END}<|im_end|>"
    # Without the option it writes its calls into what the policy has said.
    assert stage.trajectories.seen.branches == (0 if options else 1)
