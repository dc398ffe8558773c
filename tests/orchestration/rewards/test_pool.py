"""Reward functions with real faults, in real processes: each harms its own samples alone."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from orchestration.processes.handles import Process
from orchestration.rewards import pool as pools
from orchestration.rewards.pool import RewardPool
from stages.rewards import stage
from stages.rewards.calls import CallFailed
from stages.rewards.registry import RewardError
from stages.rewards.stage import ErrorPolicy, RewardScores, RewardSet

FAULTY = "tests.orchestration.rewards.faulty"
TEXTS = ["good", "bad", *["good"] * 14]
LIMIT = 20.0  # seconds of a call, where it is not the subject


@asynccontextmanager
async def pool_of(*names: str, tmp_path: Path, **options: Any) -> AsyncGenerator[RewardPool, None]:
    full = [name if ":" in name else f"{FAULTY}:{name}" for name in names]
    pool = RewardPool(
        full, **{"processes": 2, "memory": 0, "log": tmp_path / "logs" / "rewards.log", **options}
    )
    try:
        yield pool
    finally:
        await pool.close()


async def score(
    pool: RewardPool, texts: list[str], policy: ErrorPolicy, **fields: Any
) -> RewardScores:
    (name,) = pool._names
    rewards = RewardSet([(name, 1.0)], policy=policy, pool=pool)
    return await rewards.score(["q"] * len(texts), texts, [[1]] * len(texts), [fields] * len(texts))


def rows(*texts: str, **columns: Any) -> dict[str, list[Any]]:
    return {
        "prompts": ["q"] * len(texts),
        "completions": [*texts],
        "completion_ids": [[1]] * len(texts),
        **columns,
    }


async def until(condition: Callable[[], bool], timeout: float = 120) -> None:
    async with asyncio.timeout(timeout):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("hangs", "took more than 2 s for 1 rows"),
        ("exits", "raised SystemExit(3)"),
        ("ends", "ended its process: it exited with code 4"),
        ("crashes", "ended its process: killed by SIGSEGV"),
        ("devours", "raised MemoryError()"),
        ("raises_the_unprintable", "raised an Unprintable that cannot be shown"),
        ("ignores_signals", "took more than 2 s for 1 rows"),
        ("closes_all", "ended its process: it exited with code 1"),
        ("async_hangs", "took more than 2 s for 1 rows"),
        ("async_blocks", "took more than 2 s for 1 rows"),
        ("async_ends", "ended its process: it exited with code 5"),
    ],
)
async def test_a_fault_costs_its_own_row_alone(
    name: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "BACKOFF_SECONDS", 0.0)
    monkeypatch.setattr(pools, "GRACE_SECONDS", 0.5)
    policy = ErrorPolicy(timeout=2.0, retries=0)
    async with pool_of(name, tmp_path=tmp_path, memory=2 << 30) as pool:
        scores = await score(pool, TEXTS, policy)
        assert scores.failed[:, 0].tolist() == [text == "bad" for text in TEXTS]
        assert scores.total.tolist() == [float(text != "bad") for text in TEXTS]
        with pytest.raises(CallFailed) as failed:
            await pool.call(f"{FAULTY}:{name}", rows("bad"), 2.0, alone=True)
        assert str(failed.value) == reason
        assert await pool.call(f"{FAULTY}:{name}", rows("good"), LIMIT) == [1.0]


@pytest.mark.parametrize("name", ["forks", "moves"])
async def test_what_a_function_does_to_its_process_harms_no_call(name: str, tmp_path: Path) -> None:
    async with pool_of(name, tmp_path=tmp_path, processes=1) as pool:
        for _ in range(5):
            scores = await score(pool, TEXTS, ErrorPolicy(timeout=LIMIT, retries=0))
            assert scores.total.tolist() == [1.0] * len(TEXTS)
            assert not scores.failed.any()
        children = [
            child
            for process in pool._running
            for child in psutil.Process(process._child.pid).children()
        ]
        await until(
            lambda: not any(child.is_running() and child.status() != "zombie" for child in children)
        )


async def test_a_process_that_leaks_is_replaced_and_no_sample_is_lost(tmp_path: Path) -> None:
    async with pool_of("leaks", tmp_path=tmp_path, processes=1, memory=512 << 20) as pool:
        policy = ErrorPolicy(retries=1, max_error_share=0.0)
        children = set()
        for _ in range(40):  # 1.25 GiB in all
            assert (await score(pool, ["good"], policy)).total.tolist() == [1.0]
            children |= {process._child.pid for process in pool._running}
        assert len(children) >= 3


async def test_what_a_function_prints_goes_to_a_file_of_bounded_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pools, "LOG_BYTES", 3_000_000)
    async with pool_of("prints", tmp_path=tmp_path, processes=1) as pool:
        sizes = []
        for _ in range(8):  # a megabyte each
            assert (await score(pool, ["good"], ErrorPolicy())).total.tolist() == [1.0]
            sizes.append(pool._log.stat().st_size)
    assert 1_000_000 <= max(sizes) <= 4_100_000
    assert "printed by a reward" not in "".join(capfd.readouterr())
    assert "and to the other stream" in pool._log.read_text()


async def test_a_function_has_the_main_thread_and_no_running_loop(tmp_path: Path) -> None:
    async with pool_of("alarms", tmp_path=tmp_path) as pool:
        assert await pool.call(f"{FAULTY}:alarms", rows("a"), LIMIT) == [0.5]
    async with pool_of("runs_a_loop", tmp_path=tmp_path) as pool:
        assert await pool.call(f"{FAULTY}:runs_a_loop", rows("a", "bcd"), LIMIT) == [1.0, 3.0]


async def test_calls_are_divided_over_processes_which_are_kept(tmp_path: Path) -> None:
    async with pool_of("process_id", tmp_path=tmp_path, processes=3) as pool:
        first = await score(pool, ["good"] * 64, ErrorPolicy())
        again = await score(pool, ["good"] * 64, ErrorPolicy())
        assert 1 < len(set(first.total.tolist()) | set(again.total.tolist())) <= 3
        assert os.getpid() not in first.total.tolist()


async def test_async_calls_run_at_the_same_time_in_one_process(tmp_path: Path) -> None:
    async with pool_of("meets", tmp_path=tmp_path, processes=1) as pool:
        name = f"{FAULTY}:meets"
        meeting = rows("a") | {"prompts": ["40"]}
        found = await asyncio.gather(*(pool.call(name, meeting, LIMIT) for _ in range(40)))
        assert len({score for (score,) in found}) == 1


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no.such.module:f", "cannot be imported"),
        ("math:pi", "not a function"),
        ("builtins:max", "no signature|signature"),
        ("ends_on_import:f", "importing them ended its process: it exited with code 9"),
    ],
)
async def test_what_cannot_be_called_at_all_is_reported_at_the_start(
    name: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ends_on_import.py").write_text("import os\nos._exit(9)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    async with pool_of(name, tmp_path=tmp_path) as pool:
        with pytest.raises(RewardError, match=reason):
            await pool.open()


async def test_a_pool_that_is_closed_leaves_no_process_behind(tmp_path: Path) -> None:
    async with pool_of("starts_a_process", tmp_path=tmp_path) as pool:
        (pid,) = await pool.call(f"{FAULTY}:starts_a_process", rows("a"), LIMIT)
        left = [
            Process.of(int(pid or 0)),
            *(Process.of(process._child.pid) for process in pool._running),
        ]
        assert len(left) == 2
        assert all(process.alive() for process in left)
    await until(lambda: not any(process.alive() for process in left))


WORKER = f"""
import asyncio, sys
from pathlib import Path
from orchestration.rewards.pool import RewardPool
pool = RewardPool(["{FAULTY}:starts_one_and_hangs"], processes=1, memory=0, log=Path(sys.argv[1]) / "log")
rows = {{"prompts": ["q"], "completions": ["a"], "completion_ids": [[1]], "file": [sys.argv[1] + "/pids"]}}
asyncio.run(pool.call("{FAULTY}:starts_one_and_hangs", rows, 600.0))
"""


async def test_no_process_stays_behind_when_the_worker_is_killed(tmp_path: Path) -> None:
    """kill -9, while a function hangs that has started a process itself."""
    worker = await asyncio.create_subprocess_exec(sys.executable, "-c", WORKER, str(tmp_path))
    await until((tmp_path / "pids").exists)
    left = [Process.of(int(pid)) for pid in (tmp_path / "pids").read_text().split()]
    assert len(left) == 2
    assert all(process.alive() for process in left)
    worker.send_signal(signal.SIGKILL)
    await worker.wait()
    await until(lambda: not any(process.alive() for process in left))


async def test_calls_go_on_when_the_fork_server_is_killed(tmp_path: Path) -> None:
    async with pool_of("process_id", tmp_path=tmp_path, processes=1) as pool:
        (before,) = await pool.call(f"{FAULTY}:process_id", rows("a"), LIMIT)
        assert pool._starter is not None
        assert pool._starter._server is not None
        os.kill(pool._starter._server.pid, signal.SIGKILL)
        await until(lambda: all(process.ended for process in pool._running))
        assert (await pool.call(f"{FAULTY}:process_id", rows("a"), LIMIT)) != [before]


async def test_a_wrong_number_of_scores_fails_all_rows_and_no_row_is_called_alone(
    tmp_path: Path,
) -> None:
    short = ("ranks_too_few", "ranks_too_few_async", "ranks_with_a_nan")
    async with pool_of(*short, tmp_path=tmp_path, processes=1) as pool:
        names = pool._names
        rewards = RewardSet([(name, 1.0) for name in names], pool=pool, batched=names)
        scores = await rewards.score(["p"] * 4, ["a", "bbb", "cc", "dddd"], [[1]] * 4, [{}] * 4)
    assert scores.scores[:, :2].isinf().all()
    assert scores.scores[:, 2].tolist() == [0.25, 0.75, math.inf, 1.0]
    assert [*rewards.misfits] == [*names[:2]]
