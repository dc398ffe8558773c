"""Completions that are programs, scored by functions that evaluate them, in real sandboxes."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from orchestration.processes.environment import of_user_code
from orchestration.rewards import needs
from orchestration.rewards.functions import reward_pool
from orchestration.rewards.pool import PoolOfEach, RewardPool
from orchestration.sandbox.sandbox import LANDLOCK, NAMESPACES, Available, Sandbox, refusal
from stages.rewards.calls import CallFailed
from stages.rewards.registry import RewardError
from stages.tasks.gym_answers import EVALUATES
from tests.orchestration.runs import MOCK, recipe

EVALUATING = "tests.orchestration.rewards.evaluating"
LIMIT = 30.0
MEMORY = 2 << 30


@pytest.fixture(params=[NAMESPACES, LANDLOCK])
def mechanism(request: pytest.FixtureRequest) -> str:
    if reason := refusal(request.param):
        pytest.skip(reason)
    return str(request.param)


@asynccontextmanager
async def pool_of(
    name: str, tmp_path: Path, sandbox: Sandbox | None, **options: Any
) -> AsyncGenerator[RewardPool, None]:
    log = tmp_path / "logs" / "rewards.log"
    pool = RewardPool([name], processes=1, memory=MEMORY, log=log, sandbox=sandbox, **options)
    try:
        yield pool
    finally:
        await pool.close()


def forced(monkeypatch: pytest.MonkeyPatch, mechanism: str) -> None:
    """Let the machine give ``mechanism`` alone."""
    given = Available("refused by this test" if mechanism == LANDLOCK else "", "")
    monkeypatch.setattr(needs, "available", lambda: given)


async def score(
    pool: RewardPool, name: str, text: str, row: dict[str, Any] | None = None
) -> float | str:
    """The score of a completion, or why it has none."""
    columns = {column: [value] for column, value in (row or {}).items()}
    try:
        (found,) = await pool.call(
            name,
            {"prompts": ["q"], "completions": [text], "completion_ids": [[1]], **columns},
            LIMIT,
        )
    except CallFailed as failed:
        return str(failed)
    assert isinstance(found, float)
    return found


def gym_row(task: str) -> dict[str, Any]:
    gym = pytest.importorskip("reasoning_gym")
    entry = gym.create_dataset(task, size=1, seed=3)[0]
    return {name: entry[name] for name in ("question", "answer", "metadata")}


@pytest.mark.parametrize("name", [f"{EVALUATING}:gym_as_it_is", "reasoning_gym"])
async def test_a_completion_that_is_a_command_runs_none(
    name: str, mechanism: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each task that evaluates, by the library's scorer, and by ours, which does not."""
    forced(monkeypatch, mechanism)
    (tmp_path / "open").mkdir(mode=0o777)
    marker = tmp_path / "open" / "marker"
    async with pool_of(name, tmp_path, Sandbox(memory=MEMORY)) as pool:
        for task in EVALUATES:
            row = gym_row(task)
            for text in (
                f"__import__('os').system('touch {marker}')",
                f"[open('{marker}', 'w').write('here')]",
                f"[__import__('os').kill({os.getpid()}, 9)]",
            ):
                found = await score(pool, name, text, row)
                assert isinstance(found, str) or found <= 0.1, (task, text, found)
            assert await score(pool, name, str(row["answer"]), row) == 1.0, task
    assert not marker.exists()


async def test_what_is_evaluated_gets_nothing_and_the_next_row_its_score(
    mechanism: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forced(monkeypatch, mechanism)
    name = f"{EVALUATING}:evaluated"
    secret = tmp_path / "id_rsa"
    secret.write_text("7")
    os_ = "__import__('os')"
    here = os.getpid()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        port = server.getsockname()[1]
        attacks = [
            f"open('{secret}').read()",
            f"__import__('socket').create_connection(('127.0.0.1', {port}), 2) and 1",
            f"len(open('/proc/{here}/environ').read())",
            f"{os_}.kill({here}, 0) or 1",
            f"{os_}.kill({os_}.getppid(), 9) or {os_}.abort()",
            f"{os_}.kill(-1, 9) or {os_}.abort()",
            f"len([{os_}.fork() for _ in range(10000)])",
            "open('filled', 'wb').write(bytes(10**9))",
            "len(bytearray(100 << 30))",
            f"{os_}._exit(0)",
            f"{os_}.closerange(0, 1000)",
        ]
        async with pool_of(name, tmp_path, Sandbox(memory=MEMORY)) as pool:
            assert await score(pool, name, "0.5") == 0.5
            for attack in attacks:
                assert isinstance(await score(pool, name, attack), str), attack
                assert await score(pool, name, "0.25") == 0.25, attack
        with pytest.raises(TimeoutError):
            server.accept()


async def test_what_a_function_asks_for_it_gets(
    mechanism: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forced(monkeypatch, mechanism)
    words = tmp_path / "words"
    words.mkdir()
    (words / "list.txt").write_text("one")
    (tmp_path / "other.txt").write_text("two")
    name = f"{EVALUATING}:evaluated"
    with socket.create_server(("127.0.0.1", 0)) as server:
        ask = (
            f"__import__('socket').create_connection(('127.0.0.1', {server.getsockname()[1]}), "
            f"5) and 1"
        )
        bounds = Sandbox(memory=MEMORY, read=(str(words),), network=True)
        async with pool_of(name, tmp_path, bounds) as pool:
            assert await score(pool, name, f"len(open('{words}/list.txt').read())") == 3.0
            assert isinstance(
                await score(pool, name, f"len(open('{tmp_path}/other.txt').read())"), str
            )
            assert isinstance(
                await score(pool, name, f"open('{words}/list.txt', 'a').write('x')"), str
            )
            assert await score(pool, name, ask) == 1.0


@pytest.mark.parametrize("sandboxed", [True, False])
async def test_our_secrets_are_in_no_environment(
    sandboxed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor in what the process was started with, and in a service no variable that is not named."""
    secrets = {
        "ASYNCDOCK_INDEX": "index-secret",
        "ASYNCDOCK_TOKEN": "token-secret",
        "ASYNCDOCK_HOST_TOKEN": "host-secret",
    }
    for variable, value in {
        **secrets,
        "AWS_SECRET_ACCESS_KEY": "store-secret",
        "MY_JUDGE_KEY": "judge-key",
    }.items():
        monkeypatch.setenv(variable, value)
    name = f"{EVALUATING}:environment"
    sandbox = Sandbox(memory=MEMORY) if sandboxed and not refusal(NAMESPACES) else None
    async with pool_of(name, tmp_path, sandbox) as pool:
        assert [await score(pool, name, value) for value in (*secrets, *secrets.values())] == [
            0.0
        ] * 6
        assert await score(pool, name, "store-secret") == 1.0  # a local run's own
    listed = of_user_code(os.environ, ["MY_JUDGE_KEY"])
    async with pool_of(name, tmp_path, sandbox, environment=listed) as pool:
        assert [
            await score(pool, name, value) for value in (*secrets.values(), "store-secret")
        ] == [0.0] * 4
        assert await score(pool, name, "judge-key") == 1.0
        assert await score(pool, name, "PATH") == 1.0


async def test_a_machine_without_a_sandbox_runs_installed_functions_and_refuses_a_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(needs, "available", lambda: Available("refused here", "not there"))
    async with pool_of(f"{EVALUATING}:evaluated", tmp_path, Sandbox()) as pool:
        with pytest.raises(
            RewardError,
            match=r"no sandbox: namespaces are refused \(refused "
            r"here\)",
        ):
            await pool.open()
    pytest.importorskip("reasoning_gym")
    async with pool_of("reasoning_gym", tmp_path, Sandbox()) as pool:
        row = gym_row("n_queens")
        assert await score(pool, "reasoning_gym", str(row["answer"]), row) == 1.0


async def test_functions_of_different_needs_are_in_different_pools(tmp_path: Path) -> None:
    functions = [
        {"name": f"{EVALUATING}:evaluated", "sandbox": True},
        {"name": f"{EVALUATING}:environment"},
        {"name": "spelling"},
    ]
    pool = reward_pool(
        recipe(MOCK, reward__functions=functions, reward__processes=1), tmp_path / "logs" / "r.log"
    )
    assert isinstance(pool, PoolOfEach)
    try:
        rows = {
            "prompts": ["q"],
            "completions": ["__import__('os').path.exists('/home')"],
            "completion_ids": [[1]],
        }
        if not refusal(NAMESPACES):
            assert await pool.call(f"{EVALUATING}:evaluated", rows, LIMIT) == [0.0]
        assert await pool.call(
            f"{EVALUATING}:environment", {**rows, "completions": ["PATH"]}, LIMIT
        ) == [1.0]
    finally:
        await pool.close()
