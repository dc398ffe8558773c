"""The processes in which a server has its policies, one a run: they have the engines, and this one no torch.

request ──▶ session(source) ──▶ is its process running? ── no ──▶ start it; at the limit, end the one unused for longest
                 └──▶ HTTP on a Unix socket ──▶ api.policy.worker
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator

import aiohttp

from api.server.problems import HTTPProblem
from orchestration.policy.source import PoliciesBusy, PolicySource

START_SECONDS = 600.0  # to load a model
END_SECONDS = 10.0  # for a process to end, until it is killed
IDLE_SECONDS = 600.0  # without requests, until a process ends


class _Process:
    """A process that serves ``source``, from its start on."""

    def __init__(self, source: PolicySource) -> None:
        self.source, self.requests, self.used = source, 0, time.monotonic()
        self.folder = tempfile.mkdtemp(prefix="adk-")
        self.timer: asyncio.TimerHandle | None = None  # until it is looked whether it is idle
        self.started = asyncio.create_task(self._start())
        self._process: asyncio.subprocess.Process | None = None
        self._session: aiohttp.ClientSession | None = None

    @property
    def ended(self) -> bool:
        failed = self.started.done() and (self.started.cancelled() or self.started.exception() is not None)
        return failed or (self._process is not None and self._process.returncode is not None)

    async def _start(self) -> aiohttp.ClientSession:
        """Returns a session of the process, which is ready. Raises HTTPProblem."""
        path = os.path.join(self.folder, "policy")
        self._process = process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "api.policy.worker", path),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # so that Ctrl-C reaches the server alone
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(self.source.to_json().encode() + b"\n")
        async with asyncio.timeout(START_SECONDS):
            line = await process.stdout.readline()
        if not line:
            detail = f"The process of {self.source.name} ended while it started; the server's log has the reason."
            raise HTTPProblem(503, detail, kind="policy", headers={"Retry-After": "10"})
        timeout = aiohttp.ClientTimeout(total=None)
        connector = aiohttp.UnixConnector(path, limit=0)
        self._session = aiohttp.ClientSession("http://policy", connector=connector, timeout=timeout)
        return self._session

    async def end(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
        self.started.cancel()
        await asyncio.gather(self.started, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
        if (process := self._process) is not None:
            assert process.stdin is not None
            process.stdin.close()  # it ends with its standard input
            try:
                await asyncio.wait_for(process.wait(), END_SECONDS)
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


class PolicyProcesses:
    """At most ``most`` processes of policies, started when they are asked for."""

    def __init__(self, most: int) -> None:
        self._most, self._processes = most, dict[str, _Process]()
        self._ending = set[asyncio.Task[None]]()

    @contextlib.asynccontextmanager
    async def session(self, source: PolicySource) -> AsyncIterator[aiohttp.ClientSession]:
        """HTTP to the process of ``source``, which is running while this lasts. Raises HTTPProblem."""
        process = self._processes.get(source.name)
        if process is None or process.ended:
            process = self._begin(source)
        process.requests += 1
        try:
            yield await asyncio.shield(process.started)
        except aiohttp.ClientError as error:
            detail = f"The process of {source.name} ended ({type(error).__name__})."
            headers = {"Retry-After": "1"}
            raise HTTPProblem(503, detail, kind="policy", fix="try again", headers=headers) from error
        finally:
            process.requests, process.used = process.requests - 1, time.monotonic()
            if process.ended:
                self._end(process)
            elif process.timer is None:
                process.timer = asyncio.get_running_loop().call_later(IDLE_SECONDS, self._end_if_idle, process)

    def _begin(self, source: PolicySource) -> _Process:
        if ended := self._processes.get(source.name):
            self._end(ended)
        if len(self._processes) >= self._most:
            idle = [process for process in self._processes.values() if not process.requests]
            if not idle:
                names = ", ".join(self._processes) or "none"
                raise PoliciesBusy(f"the server serves as many policies as it may (--policies {self._most}): {names}")
            self._end(min(idle, key=lambda process: process.used))
        self._processes[source.name] = made = _Process(source)
        return made

    def _end_if_idle(self, process: _Process) -> None:
        left = IDLE_SECONDS if process.requests else process.used + IDLE_SECONDS - time.monotonic()
        if left <= 0:
            self._end(process)
        else:
            process.timer = asyncio.get_running_loop().call_later(left, self._end_if_idle, process)

    def _end(self, process: _Process) -> None:
        if self._processes.get(process.source.name) is process:
            del self._processes[process.source.name]
            task = asyncio.create_task(process.end())
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        for process in list(self._processes.values()):
            self._end(process)
        await asyncio.gather(*self._ending, return_exceptions=True)
