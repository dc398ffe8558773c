"""The pool of processes that call reward functions, so that what a function does harms its own
samples alone.

    RewardSet ─ call ─▶ a free process ◀── forked by a light fork server; one that hangs, dies or is full is replaced
                └ async ─▶ one process for all async functions, whose calls run at the same time

JSON over a socket pair: functions travel by their names. The processes end with this one, also when
it is killed.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from orchestration.processes.environment import of_user_code
from orchestration.processes.forkserver import Launch
from orchestration.processes.starter import FORKSERVER, Starter
from orchestration.processes.user_process import (
    LOG_BYTES,
    ProcessEnded,
    UserProcess,
    bound_log,
)
from orchestration.recipe.sections.rewards import RewardFunction, RewardSection
from orchestration.rewards.needs import ENTRY, found_sandbox, preload_of, sandbox_of
from orchestration.rewards.process import Setup
from orchestration.sandbox.sandbox import Sandbox
from orchestration.sandbox.user_code import import_path
from stages.rewards.calls import (
    Arguments,
    Caller,
    CallFailed,
    Scores,
    Stopwatch,
    selected,
    too_slow,
)
from stages.rewards.registry import RewardError

START_SECONDS = 120.0  # to import the functions
# in which the process of async functions reports that a call took too long, before it is ended
GRACE_SECONDS = 5.0
# by function: its arguments (None: all), whether it is async
Takes = dict[str, tuple[list[str] | None, bool]]


def pools(functions: Sequence[RewardFunction], section: RewardSection, log: Path) -> Caller:
    """Return the pool of ``functions``, or several where they need different sandboxes.

    ``section``: of their recipe; ``log``: gets what they print.
    """
    by_sandbox: dict[Sandbox | None, list[str]] = {}
    for function in functions:
        by_sandbox.setdefault(sandbox_of(function, section.memory), []).append(function.name)
    environment = of_user_code(os.environ, section.environment)
    by_name: dict[str, Caller] = {}
    pool: Caller | None = None
    for number, (sandbox, names) in enumerate(by_sandbox.items()):
        own_log = log.with_suffix(f".{number}{log.suffix}") if number else log
        pool = RewardPool(
            names,
            processes=section.processes,
            memory=section.memory,
            log=own_log,
            sandbox=sandbox,
            environment=environment,
        )
        by_name |= dict.fromkeys(names, pool)
    return PoolOfEach(by_name) if len(by_sandbox) > 1 or pool is None else pool


class RewardPool(Caller):
    """Calls the functions ``names`` in ``processes`` processes, which are started as they are
    needed, and in one more where functions are async.

    ``memory``: bytes of data that each may hold, 0 for no limit. ``log`` gets what functions print.
    ``sandbox``: that each enters. ``environment``: that they see (default: this process's, without
    our own variables).
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        processes: int,
        memory: int,
        log: Path,
        sandbox: Sandbox | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.parallel = processes
        self._names = tuple(names)
        self._memory = memory
        self._log = log
        self._sandbox = sandbox
        self._environment = environment
        self._starter: Starter | None = None
        self._takes: Takes = {}
        self._free: list[_RewardProcess] = []
        self._running: set[_RewardProcess] = set()
        self._slots = asyncio.Semaphore(processes)
        self._opening = asyncio.Lock()
        self._concurrent: _RewardProcess | None = None

    async def open(self) -> None:
        async with self._opening:
            if self._takes:
                return
            self._log.parent.mkdir(parents=True, exist_ok=True)
            if self._environment is None:
                self._environment = of_user_code(os.environ, None)
            preload = preload_of(self._names)
            self._starter = Starter(FORKSERVER, preload=preload, environment=self._environment)
            if self._sandbox is not None:
                self._sandbox = await asyncio.to_thread(found_sandbox, self._names, self._sandbox)
            process = await self._start()
            self._free.append(process)
            self._takes = process.takes

    async def is_async(self, name: str) -> bool:
        await self.open()
        return self._takes[name][1]

    async def call(
        self,
        name: str,
        arguments: Arguments,
        timeout: float,
        *,
        alone: bool = False,
        watch: Stopwatch | None = None,
    ) -> Scores:
        await self.open()
        wants, is_async = self._takes[name]
        request = {
            "name": name,
            "arguments": selected(arguments, wants),
            "rows": len(arguments["completions"]),
        }
        answer = await (self._call_shared if is_async and not alone else self._call_alone)(
            request, timeout, watch or Stopwatch()
        )
        bound_log(self._log, LOG_BYTES)
        if "error" in answer:
            raise CallFailed(answer["error"], answer["place"], misfit=answer["misfit"])
        scores: Scores = answer["scores"]
        return scores

    async def close(self) -> None:
        for process in list(self._running):
            await self._end(process)
        if self._starter is not None:
            self._starter.close()
            self._starter = None

    async def _call_alone(
        self, request: dict[str, Any], timeout: float, watch: Stopwatch
    ) -> dict[str, Any]:
        async with self._slots:
            while self._free and self._free[-1].ended:
                await self._end(self._free.pop())
            process = self._free.pop() if self._free else await self._start()
            deadline = asyncio.timeout(timeout)
            answer = None
            try:
                async with deadline:
                    answer = await process.call(request, timeout, watch)
            except TimeoutError:
                raise too_slow(timeout, request["rows"]) from None
            finally:
                if answer is None or answer.get("last"):
                    await self._end(process)
                else:
                    self._free.append(process)
        return answer

    async def _call_shared(
        self, request: dict[str, Any], timeout: float, watch: Stopwatch
    ) -> dict[str, Any]:
        async with self._opening:
            process = self._concurrent
            if process is None or process.ended:
                process = self._concurrent = await self._start(concurrent=True)
        deadline = asyncio.timeout(timeout + GRACE_SECONDS)
        try:
            async with deadline:
                answer = await process.call(request, timeout, watch)
        except (
            TimeoutError
        ):  # a call blocks the event loop of the process: this one, or another one
            await self._end(process)
            raise CallFailed(str(too_slow(timeout, request["rows"])), shared=True) from None
        except CallFailed:
            await self._end(process)
            raise
        if answer.get("last"):
            await self._end(process)
        return answer

    async def _start(self, *, concurrent: bool = False) -> _RewardProcess:
        """Start a process that has imported the functions. Raises RewardError when it cannot."""
        assert self._starter is not None, "close() was called"
        sandbox = None if self._sandbox is None else asdict(self._sandbox)
        setup = Setup(self._names, import_path(self._names), self._memory, concurrent, sandbox)
        where = (dict(self._environment or {}), os.getcwd(), str(self._log), "asyncdock rewards")
        launch = Launch(ENTRY + ":main", [setup.to_json()], *where)
        process = await _RewardProcess.start(self._starter, launch)
        self._running.add(process)
        try:
            first = await process.greet(START_SECONDS)
        except ProcessEnded as error:
            self._running.discard(process)
            raise RewardError(
                f"rewards {list(self._names)}: importing them {error}; see {self._log}"
            ) from None
        if "refused" in first:
            await self._end(process)
            raise RewardError(first["refused"])
        process.takes = first["takes"]
        return process

    async def _end(self, process: _RewardProcess) -> None:
        self._running.discard(process)
        if process is self._concurrent:
            self._concurrent = None
        await process.end()


class PoolOfEach(Caller):
    """Calls each function by the pool that ``pools`` has for it."""

    def __init__(self, pools: Mapping[str, Caller]) -> None:
        self._pools = pools
        self.parallel = max(pool.parallel for pool in pools.values())

    async def open(self) -> None:
        for pool in {*self._pools.values()}:
            await pool.open()

    async def is_async(self, name: str) -> bool:
        return await self._pools[name].is_async(name)

    async def call(
        self,
        name: str,
        arguments: Arguments,
        timeout: float,
        *,
        alone: bool = False,
        watch: Stopwatch | None = None,
    ) -> Scores:
        return await self._pools[name].call(name, arguments, timeout, alone=alone, watch=watch)

    async def close(self) -> None:
        for pool in {*self._pools.values()}:
            await pool.close()


class _RewardProcess(UserProcess):
    """One process, and what its functions take."""

    takes: Takes

    async def call(
        self, request: dict[str, Any], timeout: float, watch: Stopwatch
    ) -> dict[str, Any]:
        """Send ``request``, and return its answer. ``watch`` gets the seconds of the function: those
        in the answer, or without an answer the time since the request, at most ``timeout``. Raises
        CallFailed when the process ends before."""
        began = time.monotonic()
        seconds: float | None = None
        try:
            answer, _ = await self.ask({"timeout": timeout, **request})
            seconds = answer["seconds"]
        except ProcessEnded as ended:
            raise CallFailed(str(ended), shared=ended.shared) from None
        finally:
            watch.add(min(timeout, time.monotonic() - began) if seconds is None else seconds)
        return answer
