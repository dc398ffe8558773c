"""A judge behind HTTP, as users write one, and the server that it asks.

Importing this needs no torch.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web


async def judge(completions: list[str], url: list[str]) -> list[float]:
    """Asks the server about all rows of the call at once.

    One answer that is not 200 fails the call.
    """
    async with aiohttp.ClientSession(raise_for_status=True) as session:

        async def ask(text: str) -> float:
            async with session.post(url[0], data=text) as answer:
                return float(await answer.text())

        return list(await asyncio.gather(*(ask(text) for text in completions)))


class JudgeServer:
    """Answers each text with its length.

    The texts ``failing`` get as many errors first. Each wave of requests is held until ``meet`` of
    them are there, or all that a wave can have: ``waves`` has their numbers.
    """

    def __init__(self, failing: dict[str, int], waves: Sequence[int]) -> None:
        self.failing = Counter(failing)
        self.waves = list(waves)
        self.requests = Counter[str]()
        self.now = self.most = self._seen = 0
        self._wave = asyncio.Event()

    async def answer(self, request: web.Request) -> web.Response:
        text = await request.text()
        self.requests[text] += 1
        self.now += 1
        self.most = max(self.most, self.now)
        await self._meet()
        self.now -= 1
        if self.failing[text] > 0:
            self.failing[text] -= 1
            return web.Response(status=503)
        return web.Response(text=str(len(text)))

    async def _meet(self) -> None:
        """Return when all requests of the present wave are there at the same time."""
        if not self.waves:
            return
        wave = self._wave
        self._seen = self._seen + 1
        if self._seen == self.waves[0]:
            self._seen = 0
            self._wave = asyncio.Event()
            del self.waves[0]
            wave.set()
        await wave.wait()


@asynccontextmanager
async def serving(server: JudgeServer) -> AsyncGenerator[str, None]:
    """The URL of ``server``."""
    app = web.Application()
    app.router.add_post("/", server.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}/"
    finally:
        await runner.cleanup()
