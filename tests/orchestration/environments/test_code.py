"""The documented environment that runs the policy's code, in the sandbox, and code that attacks."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from orchestration.environments.pool import EnvironmentPool
from orchestration.sandbox.sandbox import NAMESPACES, Sandbox, refusal
from stages.environments.interface import Reply, Trajectory, Turn
from tests.pages.page import ROOT, blocks

pytestmark = pytest.mark.skipif(bool(refusal(NAMESPACES)), reason=refusal(NAMESPACES))
LIMIT = 60.0


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The page's file, importable by the name that is returned."""
    (block,) = [each for each in blocks(ROOT / "docs" / "agents.md") if each.file == "my_code.py"]
    (tmp_path / "my_code.py").write_text(block.text)
    monkeypatch.syspath_prepend(tmp_path)
    return "my_code:Python"


async def answers(use: str, tmp_path: Path, answer: object, *texts: str) -> list[Reply]:
    """Return what each of ``texts`` is answered, each in a trajectory of its own, at one time."""
    pool = EnvironmentPool(
        use,
        {"seconds": 2},
        processes=1,
        concurrency=len(texts),
        memory=2 << 30,
        log=tmp_path / "environments.log",
        sandbox=Sandbox(),
    )

    async def answered(key: str, text: str) -> Reply:
        await pool.open(Trajectory(key, {"answer": answer}, 0), LIMIT)
        return await pool.step(key, Turn({"role": "assistant", "content": text}), LIMIT)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(answered(f"{number}", text)) for number, text in enumerate(texts)
            ]
        return [task.result() for task in tasks]
    finally:
        await pool.end()


async def test_code_has_the_reward_of_what_it_prints(module: str, tmp_path: Path) -> None:
    texts = ("40 + 2", "So:\n```python\nfor n in [42]:\n    print(n)\n```", "41", "4 +", "pass")
    value, program, wrong, unreadable, silent = await answers(module, tmp_path, 42, *texts)
    for right in (value, program):
        assert (right.reward, right.done, list(right.messages)) == (1.0, True, [])
    for reply, observed in ((wrong, "41"), (silent, "It prints nothing.")):
        assert (reply.reward, reply.done) == (0.0, False)
        assert [*reply.messages] == [{"role": "user", "content": observed}]
    assert "SyntaxError: invalid syntax" in unreadable.messages[0]["content"]


async def test_code_that_attacks_is_answered_as_any_other(module: str, tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.write_text("42")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        attacks = {
            f"print(open({str(private)!r}).read())": "No such file",
            f"import os; os.symlink({str(private)!r}, '/tmp/link'); open('/tmp/link')": "No such",
            f"import socket; socket.create_connection(('127.0.0.1', {port})); 42": "refused",
            "import os\nwhile True: os.fork()": "Resource temporarily unavailable",
            "import os; open(f'/proc/{os.getppid()}/mem', 'rb')": "Permission denied",
            "while True: print('x' * 2**20)": "x" * 1000,
            "b'x' * 2**32": "MemoryError",
            "while True: pass": "It prints nothing.",
        }
        replies = await answers(module, tmp_path, 42, *attacks)
    for reply, (attack, observed) in zip(replies, attacks.items(), strict=True):
        assert (reply.reward, reply.done) == (0.0, False), attack
        assert observed in reply.messages[0]["content"], attack
