"""Programs that a policy writes, in the sandbox that a run gives them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orchestration.rewards import needs
from orchestration.rewards.functions import reward_pool, reward_set
from orchestration.sandbox.sandbox import NAMESPACES, Available, refusal
from stages.rewards.registry import RewardError
from tests.orchestration.runs import MOCK, recipe

TESTS = ["assert right() == 1", "assert right() > 0"]
FUNCTIONS = [{"name": "python_tests", "options": {"seconds": 30.0, "tests": TESTS}}]


async def shares(programs: list[str], folder: Path) -> list[float]:
    chosen = recipe(MOCK, reward__functions=FUNCTIONS, reward__processes=1)
    pool = reward_pool(chosen, folder / "rewards.log")
    rewards = reward_set(chosen, pool)
    try:
        await rewards.open()
        rows = len(programs)
        fields = [{}] * rows
        scores = await rewards.score(["q"] * rows, programs, [[1]] * rows, fields)
    finally:
        await rewards.close()
    return [float(score) for score in scores.total]


@pytest.mark.skipif(bool(refusal(NAMESPACES)), reason=refusal(NAMESPACES))
async def test_a_program_reaches_nothing_of_the_machine(tmp_path: Path) -> None:
    secret, written = tmp_path / "secret.txt", tmp_path / "written.txt"
    secret.write_text("1")
    os.environ["ASYNCDOCK_A_PASSWORD"] = "1"
    try:
        got = await shares(
            [
                "def right(): return 1",
                f"def right(): return int(open({str(secret)!r}).read())",
                f"def right(): return 1\nopen({str(written)!r}, 'w').write('x')",
                "import os\ndef right(): return int(os.environ['ASYNCDOCK_A_PASSWORD'])",
                "import socket\ndef right(): return 1\nsocket.create_connection(('127.0.0.1', 1))",
            ],
            tmp_path,
        )
    finally:
        del os.environ["ASYNCDOCK_A_PASSWORD"]
    assert got == [1, 0, 0, 0, 0]
    assert not written.exists()


@pytest.mark.parametrize("landlock", ["", "not there"])
async def test_without_namespaces_no_program_is_run(
    landlock: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(needs, "available", lambda: Available("refused by this test", landlock))
    with pytest.raises(RewardError, match=r"python_tests.*namespaces are refused"):
        await shares(["def right(): return 1"], tmp_path)
