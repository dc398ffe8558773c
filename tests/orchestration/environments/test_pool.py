"""Environments with real faults, in real processes: each harms its own trajectories alone."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from orchestration.environments import pool as pools
from orchestration.environments.pool import EnvironmentPool
from orchestration.processes.handles import Process
from orchestration.processes.user_process import LOG_BYTES
from orchestration.sandbox import user_code
from orchestration.sandbox.sandbox import LANDLOCK, NAMESPACES, Available, Sandbox, refusal
from stages.environments.interface import EnvironmentFailed, Reply, Trajectory, Turn, TurnTokens
from stages.user_code import CodeUnusable

FAULTY = "tests.orchestration.environments.faulty:Faulty"
EXAMPLES = "tests.stages.environments.examples"
LIMIT = 60.0  # seconds of a call, where it is not the subject
MEMORY = 2 << 30


@asynccontextmanager
async def pool_of(
    tmp_path: Path,
    use: str | Mapping[str, str] = FAULTY,
    given: Mapping[str, Any] | None = None,
    **options: Any,
) -> AsyncGenerator[EnvironmentPool, None]:
    arguments = {"processes": 1, "concurrency": 4, "memory": MEMORY, "log": tmp_path / "env.log"}
    pool = EnvironmentPool(use, given or {}, **{**arguments, **options})
    try:
        yield pool
    finally:
        await pool.end()


async def opened(pool: EnvironmentPool, *keys: str, **row: Any) -> list[int]:
    """Open trajectories, and return the numbers of their processes."""
    replies = [await pool.open(Trajectory(key, row, 7), LIMIT) for key in keys]
    return [int(reply.messages[0]["content"].removeprefix("process ")) for reply in replies]


def calling(name: str, **arguments: Any) -> Turn:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return Turn({"role": "assistant", "content": "", "tool_calls": [call]})


async def does(
    pool: EnvironmentPool, key: str, what: str, timeout: float = LIMIT, **arguments: Any
) -> str:
    """Return the answer of a tool that does ``what``."""
    reply = await pool.step(key, calling("does", what=what, **arguments), timeout)
    return str(reply.messages[0]["content"])


async def counts(pool: EnvironmentPool, key: str) -> str:
    reply = await pool.step(key, calling("count_up"), LIMIT)
    return str(reply.messages[0]["content"])


async def until(condition: Callable[[], bool], timeout: float = 120) -> None:
    async with asyncio.timeout(timeout):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_trajectory_stays_in_its_process_and_the_least_loaded_one_takes_the_next(
    tmp_path: Path,
) -> None:
    async with pool_of(tmp_path, processes=2, concurrency=2) as pool:
        assert pool.places == 4
        first, second, third, fourth = await opened(pool, "a", "b", "c", "d")
        assert first != second
        assert {third, fourth} == {first, second}
        assert os.getpid() not in (first, second)
        assert [await counts(pool, key) for key in "abcda"] == ["1", "1", "1", "1", "2"]
        with pytest.raises(EnvironmentFailed, match="all 4 places"):
            await pool.open(Trajectory("e", {}, 7), 0.01)
        await pool.close("b")
        assert await opened(pool, "e") == [second]
        ending = Turn({"role": "assistant", "content": "done"})
        assert await pool.step("a", ending, LIMIT) == Reply([], 2.0, done=True)
        assert await pool.finish("c", LIMIT) == Reply([], 1.0, done=True)
        assert not pool.knows("b")
        with pytest.raises(KeyError):
            await counts(pool, "b")


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("hang", "Faulty.does took more than 1 s"),
        ("spin", "Faulty.does took more than 1 s"),
        ("exit", "Faulty.does raised SystemExit"),
        ("devour", "Faulty.does raised MemoryError"),
    ],
)
async def test_a_fault_costs_its_trajectory_alone(what: str, reason: str, tmp_path: Path) -> None:
    async with pool_of(tmp_path) as pool:
        await opened(pool, "good", "bad")
        with pytest.raises(EnvironmentFailed, match=reason) as failed:
            await does(pool, "bad", what, 1.0 if "took" in reason else LIMIT)
        assert "faulty.py, line " in failed.value.place
        assert not pool.knows("bad")
        assert await counts(pool, "good") == "1"
        await opened(pool, "bad")
        assert await counts(pool, "bad") == "1"


async def test_an_async_method_that_hangs_costs_its_trajectory_alone(tmp_path: Path) -> None:
    async with pool_of(tmp_path) as pool:
        before = await opened(pool, "good", "bad")
        with pytest.raises(EnvironmentFailed, match="does_async took more than 1 s"):
            await pool.step("bad", calling("does_async", what="hang"), 1.0)
        assert await counts(pool, "good") == "1"
        assert await opened(pool, "bad") == before[:1]


async def test_a_process_with_a_method_that_hangs_ends_after_its_last_trajectory(
    tmp_path: Path,
) -> None:
    async with pool_of(tmp_path) as pool:
        number, _ = await opened(pool, "good", "bad")
        hanging = Process.of(number)
        with pytest.raises(EnvironmentFailed):
            await does(pool, "bad", "hang", 1.0)
        assert await opened(pool, "next") != [number]
        assert hanging.alive()
        await pool.close("good")
        await until(lambda: not hanging.alive())
        assert pool.knows("next")


@pytest.mark.parametrize(
    ("tool", "what", "reason"),
    [
        ("does_async", "spin", "took more than 1 s, and blocked the event loop"),
        ("does_async", "refuse", "took more than 1 s, and blocked the event loop"),
        ("does", "hold the interpreter", "took more than 1 s, and blocked the event loop"),
        ("does", "end", "ended its process: it exited with code 4"),
        ("does", "kill", "ended its process: killed by SIGKILL"),
        ("does", "crash", "ended its process: killed by SIGSEGV"),
    ],
)
async def test_a_process_that_is_lost_costs_its_trajectories_and_another_one_is_started(
    tool: str, what: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "GRACE_SECONDS", 0.5)
    async with pool_of(tmp_path, processes=2, concurrency=2) as pool:
        lost, other, again = await opened(pool, "bad", "good", "with it")
        assert lost == again
        timeout = 1.0 if "took" in reason else LIMIT
        with pytest.raises(EnvironmentFailed, match=reason):
            await pool.step("bad", calling(tool, what=what), timeout)
        await until(lambda: not pool.knows("with it"))
        with pytest.raises(KeyError):
            await counts(pool, "with it")
        assert await counts(pool, "good") == "1"
        assert lost not in await opened(pool, "bad", "with it", "third")
        assert Process.of(other).alive()
        await until(lambda: not Process.of(lost).alive())


async def test_calls_that_run_when_their_process_dies_fail(tmp_path: Path) -> None:
    async with pool_of(tmp_path) as pool:
        number, _ = await opened(pool, "a", "b")
        hanging = asyncio.create_task(does(pool, "a", "hang"))
        await counts(pool, "b")
        os.kill(number, signal.SIGKILL)
        with pytest.raises(EnvironmentFailed, match="killed by SIGKILL"):
            await hanging
        await until(lambda: not pool.knows("b"))
        assert await opened(pool, "a", "b", "c", "d") != [number] * 4


async def test_a_process_that_is_full_takes_no_further_trajectory(tmp_path: Path) -> None:
    async with pool_of(tmp_path, memory=512 << 20) as pool:
        number, _ = await opened(pool, "good", "bad")
        with pytest.raises(EnvironmentFailed, match="raised MemoryError"):
            await does(pool, "bad", "hoard")
        assert pool.knows("good")
        assert await opened(pool, "next") != [number]
        assert await counts(pool, "next") == "1"


@pytest.mark.parametrize("tool", ["does", "does_async"])
async def test_a_child_that_a_method_forks_answers_nothing(tool: str, tmp_path: Path) -> None:
    async with pool_of(tmp_path) as pool:
        (number,) = await opened(pool, "t")
        for _ in range(3):
            await pool.step("t", calling(tool, what="fork"), LIMIT)
        assert await counts(pool, "t") == "1"
        children = psutil.Process(number).children()
        await until(lambda: all(child.status() == "zombie" for child in children))


async def test_what_environments_print_is_in_a_file_of_bounded_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pools, "LOG_BYTES", 3_000_000)
    async with pool_of(tmp_path) as pool:
        await opened(pool, "t")
        sizes = []
        for _ in range(8):  # a megabyte each
            await does(pool, "t", "print")
            sizes.append((tmp_path / "env.log").stat().st_size)
    assert 1_000_000 <= max(sizes) <= 4_100_000
    assert "printed by an environment" not in "".join(capfd.readouterr())
    assert "to the other stream" in (tmp_path / "env.log").read_text()


async def test_floods_are_cut(tmp_path: Path) -> None:
    """Ten gigabytes that a tool prints, and 200 MB that it returns."""
    async with pool_of(tmp_path) as pool:
        await opened(pool, "t")
        assert "File too large" in await does(pool, "t", "flood")
        assert (tmp_path / "env.log").stat().st_size <= LOG_BYTES
        answer = await does(pool, "t", "return a flood")
        assert len(answer) < 70_000
        assert answer.endswith(f"[cut: it has {200 << 20} characters]")
        assert await counts(pool, "t") == "1"


async def test_a_process_that_sends_what_is_no_reply_is_not_believed(tmp_path: Path) -> None:
    async with pool_of(tmp_path) as pool:
        await opened(pool, "t")
        with pytest.raises(EnvironmentFailed, match="what is no reply"):
            await does(pool, "t", "lie")
        assert not pool.knows("t")


async def test_what_reset_does_costs_the_trajectory_alone(tmp_path: Path) -> None:
    async with pool_of(tmp_path) as pool:
        await opened(pool, "good")
        for what, reason in (("raise", "reset raised ValueError"), ("hang", "reset took more")):
            with pytest.raises(EnvironmentFailed, match=reason) as failed:
                await pool.open(Trajectory("bad", {"does": what}, 7), 1.0)
            assert "faulty.py, line " in failed.value.place
            assert not pool.knows("bad")
        assert await counts(pool, "good") == "1"


async def test_a_call_that_is_cancelled_closes_its_trajectory(tmp_path: Path) -> None:
    async with pool_of(tmp_path, concurrency=1) as pool:
        await opened(pool, "t")
        started = tmp_path / "started"
        call = asyncio.create_task(does(pool, "t", "start and hang", file=str(started)))
        await until(started.exists)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert not pool.knows("t")
        await opened(pool, "next")


async def test_declarations_come_from_a_process(tmp_path: Path) -> None:
    async with pool_of(
        tmp_path,
        {"sums": f"{EXAMPLES}:Calculator", "guess": f"{EXAMPLES}:Guess"},
        {"guess": {"most": 3}},
    ) as pool:
        declared = await pool.declare()
        names = [tool["function"]["name"] for tool in declared["sums"].tools]
        assert names == ["add", "divide", "multiply"]
        assert declared["guess"].replayable
        reply = await pool.open(Trajectory("t", {}, 7, "guess"), LIMIT)
        assert reply.messages[0]["content"] == "Guess a number below 3."
        with pytest.raises(EnvironmentFailed, match=r"none of the run's, \['guess', 'sums'\]"):
            await pool.open(Trajectory("x", {}, 7), LIMIT)


@pytest.mark.parametrize(
    ("use", "options", "reason"),
    [
        ("no.such.module:Class", {}, "cannot be imported"),
        (f"{EXAMPLES}:NoReset", {}, "has no method reset"),
        (FAULTY, {"size": 1}, "unexpected keyword argument 'size'"),
        ("ends_on_import:Class", {}, "importing it ended its process: it exited with code 9"),
    ],
)
async def test_what_is_no_environment_is_told(
    use: str,
    options: dict[str, Any],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "ends_on_import.py").write_text("import os\nos._exit(9)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    async with pool_of(tmp_path, use, options) as pool:
        with pytest.raises(CodeUnusable, match=reason) as refused:
            await pool.declare()
        assert refused.value.problems[0].key == "environment.use"
        with pytest.raises(EnvironmentFailed):
            await pool.open(Trajectory("t", {}, 7), LIMIT)
        assert not pool.knows("t")


async def test_environments_are_closed_at_the_end(tmp_path: Path) -> None:
    use = FAULTY.replace("Faulty", "Told")
    async with pool_of(tmp_path, use, {"file": str(tmp_path / "told")}) as pool:
        for key in "abc":
            await pool.open(Trajectory(key, {}, 7), LIMIT)
        await pool.close("a")
        await until((tmp_path / "told").exists)
    assert (tmp_path / "told").read_text() == "closed\n" * 3


async def test_a_pool_that_is_ended_leaves_no_process_behind(tmp_path: Path) -> None:
    async with pool_of(tmp_path) as pool:
        await opened(pool, "t")
        await does(pool, "t", "start", file=str(tmp_path / "pids"))
        processes = [Process.of(int(pid)) for pid in (tmp_path / "pids").read_text().split()]
        assert all(process.alive() for process in processes)
    await until(lambda: not any(process.alive() for process in processes))


WORKER = f"""
import asyncio, sys
from pathlib import Path
from orchestration.environments.pool import EnvironmentPool
from stages.environments.interface import Trajectory
folder = Path(sys.argv[1])
async def main():
    pool = EnvironmentPool("{FAULTY}", {{}}, processes=1, concurrency=1, memory=0, log=folder / "log")
    await pool.open(Trajectory("t", {{"does": "start and hang", "file": str(folder / "pids")}}, 7), 600.0)
asyncio.run(main())
"""


async def test_a_program_asks_with_token_ids_and_gets_those_of_its_turn(tmp_path: Path) -> None:
    async with pool_of(tmp_path, "tests.stages.trajectories.programs:asks_once") as pool:
        reply = await pool.open(Trajectory("t", {"token_ids": [5, 6]}, 7), LIMIT)
        assert reply.request is not None
        assert (list(reply.request.prompt_ids), reply.request.wants_tokens) == ([5, 6], True)
        tokens = TurnTokens(2, 1, [5, 6], [9], [-0.25], [3])
        last = await pool.step(
            "t", Turn({"role": "assistant", "content": "x"}, tokens=tokens), LIMIT
        )
        assert (last.reward, last.done) == (12.0, True)


async def test_no_process_stays_behind_when_the_worker_is_killed(tmp_path: Path) -> None:
    """kill -9, while a method hangs that has started a process itself."""
    worker = await asyncio.create_subprocess_exec(sys.executable, "-c", WORKER, str(tmp_path))
    await until((tmp_path / "pids").exists)
    processes = [Process.of(int(pid)) for pid in (tmp_path / "pids").read_text().split()]
    assert len(processes) == 2
    assert all(process.alive() for process in processes)
    worker.send_signal(signal.SIGKILL)
    await worker.wait()
    await until(lambda: not any(process.alive() for process in processes))


async def test_trajectories_begin_again_when_the_fork_server_is_killed(tmp_path: Path) -> None:
    async with pool_of(tmp_path) as pool:
        (before,) = await opened(pool, "t")
        os.kill(psutil.Process(before).ppid(), signal.SIGKILL)
        await until(lambda: not pool.knows("t"))
        assert await opened(pool, "t") != [before]


@pytest.mark.parametrize("mechanism", [NAMESPACES, LANDLOCK])
async def test_a_sandbox_keeps_files_secrets_and_processes_of_others(
    mechanism: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason := refusal(mechanism):
        pytest.skip(reason)
    given = Available("refused by this test" if mechanism == LANDLOCK else "", "")
    monkeypatch.setattr(user_code, "available", lambda: given)
    monkeypatch.setenv("ASYNCDOCK_TOKEN", "secret")
    (tmp_path / "private").write_text("private")
    (tmp_path / "public").write_text("public")
    sandbox = Sandbox(read=(str(tmp_path / "public"),))
    async with pool_of(tmp_path, sandbox=sandbox) as pool:
        assert [tool["function"]["name"] for tool in (await pool.declare())[""].tools] == [
            "count_up",
            "does",
            "does_async",
        ]
        await opened(pool, "t")
        assert await does(pool, "t", "read", file=str(tmp_path / "public")) == "public"
        for what, name in (
            ("read", str(tmp_path / "private")),
            ("read", f"/proc/{os.getpid()}/environ"),
            ("write", "/usr/bin/new"),
        ):
            assert "error" in await does(pool, "t", what, file=name)
        await does(pool, "t", "write", file=str(tmp_path / "private"))
        assert "secret" not in await does(pool, "t", "read", file="/proc/self/environ")
        assert await counts(pool, "t") == "1"
    assert (tmp_path / "private").read_text() == "private"


async def test_each_trajectory_in_a_sandbox_may_have_files_and_a_process(tmp_path: Path) -> None:
    if reason := refusal(NAMESPACES):
        pytest.skip(reason)
    keys = [f"{number}" for number in range(120)]
    async with pool_of(tmp_path, sandbox=Sandbox(), concurrency=len(keys)) as pool:
        await opened(pool, *keys, does="occupy")
        assert all(pool.knows(key) for key in keys)


async def test_a_machine_without_a_sandbox_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_code, "available", lambda: Available("of policy", "of age"))
    async with pool_of(tmp_path, sandbox=Sandbox()) as pool:
        with pytest.raises(CodeUnusable, match=r"no sandbox: namespaces are refused \(of policy\)"):
            await pool.declare()
