"""Process of one served policy: ``python -m api.policy.worker SOCKET``.

standard input: the policy's source as a line of JSON, and then nothing; it ends with it
standard output: {"ready": true}, or {"problem": …} and the end
SOCKET: POST /v1/completions and /v1/chat/completions, with bodies that the server has checked
"""

from __future__ import annotations

import asyncio
import os
import sys
import traceback
from contextlib import aclosing
from functools import partial
from typing import Any

from aiohttp import web
from pydantic import TypeAdapter

from api.policy.handler import PolicyHandler, Request
from api.schemas.completions import ChatRequest, CompletionRequest
from api.server.problems import BEGAN, problems
from orchestration import logs
from orchestration.policy.served import Policies
from orchestration.policy.source import PolicySource
from stages.engines.protocols import EngineClosed, EngineFailed


async def respond(policies: Policies, model: type[Request], request: web.Request) -> web.StreamResponse:
    """Answer a request: at once, or as a stream where it asks for one."""
    asked: Request = TypeAdapter(model).validate_json(await request.read())
    async with policies.use(asked.model) as policy:
        handler = PolicyHandler(policy)
        if not asked.stream:
            return web.json_response(await handler.answer(asked))
        async with aclosing(handler.events(asked)) as events:
            first = await anext(events)
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
            request[BEGAN] = True
            await response.prepare(request)
            await response.write(first)
            async for event in events:
                await response.write(event)
            await response.write_eof()
            return response


async def _serve(source: PolicySource, path: str) -> None:
    policies, failed = Policies(source), asyncio.Event()

    @web.middleware
    async def noticed(request: web.Request, handler: Any) -> web.StreamResponse:
        try:
            return await handler(request)  # type: ignore[no-any-return]
        except (EngineClosed, EngineFailed):
            failed.set()
            raise

    app = web.Application(middlewares=[problems, noticed], client_max_size=2**30)
    for name, model in (("completions", CompletionRequest), ("chat/completions", ChatRequest)):
        app.router.add_post(f"/v1/{name}", partial(respond, policies, model))
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.UnixSite(runner, path).start()
        os.write(ANSWERS, b"ready\n")
        gone = asyncio.create_task(asyncio.to_thread(sys.stdin.buffer.read))
        await asyncio.wait([gone, asyncio.create_task(failed.wait())], return_when=asyncio.FIRST_COMPLETED)
    finally:
        await runner.cleanup()
        await policies.close()


def main() -> None:
    logs.configure()
    asyncio.run(_serve(PolicySource.from_json(sys.stdin.buffer.readline()), sys.argv[1]))


if __name__ == "__main__":
    ANSWERS = os.dup(1)
    os.dup2(2, 1)  # code that a recipe names may print, which must not mix with answers
    code = 1
    try:
        main()
        code = 0
    except BaseException:
        traceback.print_exc()
    os._exit(code)  # the thread that reads standard input may still wait
