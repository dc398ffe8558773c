"""The process in which a server holds its policies. It has the engines; the server needs no torch.

request ──▶ post ──▶ is there a process? ── no ──▶ start it; it ends after ten minutes without requests
              └──▶ HTTP on a Unix socket, which it gets as its standard input ──▶ api.policy.worker
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp

from api.server.http.problems import HTTPProblem
from orchestration.processes.forkserver import Launch
from orchestration.processes.handles import Process
from orchestration.processes.starter import spawn

OPTIONS_VARIABLE = "ASYNCDOCK_POLICIES"  # no command line: a URL may have a password
OWNER = "AsyncDock-Owner"  # header: the id of the client's token
MOST_STARTING = 4096  # requests that wait for its start
END_SECONDS = 10.0  # for it to end, until it is killed
METRICS_SECONDS = 2.0  # for its metrics
IDLE_SECONDS = 600.0  # without requests, until it ends
LOOK_SECONDS = 30.0  # between checks whether it is idle


class PolicyProcess:
    """The process of a server's policies, started when one is asked for.

    ``log``: file of its output; ``options``: of :class:`orchestration.policy.served.Policies`.
    """

    def __init__(self, log: Path, options: Mapping[str, Any]) -> None:
        path = os.pathsep.join(path for path in sys.path if path)
        env = {**os.environ, "PYTHONPATH": path, OPTIONS_VARIABLE: json.dumps(options)}
        self._launch = Launch("api.policy.worker:main", [], env, os.getcwd(), str(log), "policies")
        self._requests = 0
        self._used = 0.0
        # of the process; None: the next request starts one
        self._session: aiohttp.ClientSession | None = None
        self._running = set[asyncio.Task[None]]()

    @contextlib.asynccontextmanager
    async def post(
        self, path: str, body: bytes, owner: str
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield the process's answer to a request of the token with the id ``owner``. Raises
        HTTPProblem."""
        self._session = session = self._session or self._begin()
        self._requests += 1
        try:
            async with session.post(path, data=body, headers={OWNER: owner}) as answer:
                yield answer
        except aiohttp.ClientError as error:
            detail = (
                f"The process of the policies ended ({type(error).__name__}); "
                f"{self._launch.log} has the reason."
            )
            raise HTTPProblem(
                503, detail, kind="policy", fix="try again", headers={"Retry-After": "1"}
            ) from error
        finally:
            self._requests = self._requests - 1
            self._used = time.monotonic()

    async def metrics(self) -> bytes:
        """Return the process's metrics for Prometheus: none where there is no process, or it does
        not answer."""
        if self._session is None:
            return b""
        try:
            timeout = aiohttp.ClientTimeout(total=METRICS_SECONDS)
            async with self._session.get("/metrics", timeout=timeout) as answer:
                return await answer.read() if answer.status == 200 else b""
        except (aiohttp.ClientError, TimeoutError):
            return b""

    def _begin(self) -> aiohttp.ClientSession:
        folder = tempfile.TemporaryDirectory(prefix="adk-")
        path = os.path.join(folder.name, "policies")
        # requests wait in it while the process starts
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(path)
            listening.listen(MOST_STARTING)
            process = spawn(self._launch, listening.fileno())
        connector = aiohttp.UnixConnector(path, limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        session = aiohttp.ClientSession("http://policies", connector=connector, timeout=timeout)
        task = asyncio.create_task(self._keep(process, session, folder))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return session

    async def _keep(
        self,
        process: Process,
        session: aiohttp.ClientSession,
        folder: tempfile.TemporaryDirectory[str],
    ) -> None:
        """Wait until ``process`` ends or is idle, and end it."""
        ended = asyncio.create_task(process.wait())
        try:
            while self._requests or time.monotonic() - self._used < IDLE_SECONDS:
                if (await asyncio.wait([ended], timeout=LOOK_SECONDS))[0]:
                    break
        finally:
            self._session = None
            await session.close()
            process.end(signal.SIGTERM)
            if not (await asyncio.wait([ended], timeout=END_SECONDS))[0]:
                process.end()
                await ended
            folder.cleanup()

    async def close(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
