"""Process of a server's policies: ``python -m api.policy.worker``.

ASYNCDOCK_POLICIES: options of Policies as JSON
standard input, a listening socket: the paths of api.policy.answers by POST, with bodies that the
server has checked; GET /metrics
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from contextlib import aclosing
from functools import partial
from typing import Any

from aiohttp import web

from api.policy.answers import ALL, AnyRequest, answer
from api.policy.latency import Latencies
from api.policy.process import OPTIONS_VARIABLE, OWNER
from api.server.http.problems import BEGAN, problems
from orchestration import logs
from orchestration.policy import text_worker as text_worker  # forked from this process
from orchestration.policy.served import Policies
from orchestration.processes.forkserver import ForkServer
from orchestration.streams import open_outputs


async def _answer(
    policies: Policies, latencies: Latencies, model: type[AnyRequest], request: web.Request
) -> web.StreamResponse:
    asked = model.model_validate_json(await request.read())
    async with aclosing(
        answer(policies, asked, request.headers.get(OWNER, ""), latencies)
    ) as parts:
        first = await anext(parts)
        response = web.StreamResponse(headers={"Content-Type": asked.media_type})
        request[BEGAN] = True
        await response.prepare(request)
        await response.write(first)
        async for part in parts:
            await response.write(part)
        await response.write_eof()
        return response


async def _serve(options: dict[str, Any], forks: ForkServer) -> None:
    policies = Policies(**options, forks=forks)
    latencies = Latencies()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    app = web.Application(middlewares=[problems], client_max_size=2**30)
    for path, model in ALL.items():
        app.router.add_post(path, partial(_answer, policies, latencies, model))

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=latencies.text())

    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    sharing = asyncio.create_task(policies.keep_share())
    try:
        await web.SockSite(runner, socket.socket(fileno=0)).start()
        await stop.wait()
    finally:
        sharing.cancel()
        await runner.cleanup()
        await policies.close()
        forks.close()


if __name__ == "__main__":
    open_outputs()
    logs.configure()
    # Before there are threads and engines: processes that read texts have all imports, and none of
    # the secrets.
    options = json.loads(os.environ.pop(OPTIONS_VARIABLE))
    asyncio.run(_serve(options, ForkServer.within()))
