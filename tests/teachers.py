"""A small OpenAI-compatible server that computes with the tiny model, in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from aiohttp import web

from stages.model.load import load_model


@dataclass
class TinyTeacher:
    """``way``: which of the two ways it gives logprobs of a prompt by, or "none". ``busy``:
    requests that are answered with 503 first. ``shift``: by how much its tokens differ from those
    of the tiny model. ``key``: that it wants. ``most``: tokens of a place that it gives."""

    source: str = "tiny"
    way: str = "prompt_logprobs"
    busy: int = 0
    shift: int = 0
    key: str = ""
    most: int = 20
    delay: float = 0.0
    url: str = ""
    asked: list[int] = field(default_factory=list)  # prompts of each request that was answered
    at_once: int = 0
    most_at_once: int = 0

    def __post_init__(self) -> None:
        self.model, self.tokenizer = load_model(self.source, dtype=torch.float32, seed=0)

    @torch.no_grad()
    def logprobs(self, ids: list[int]) -> list[float]:
        """Of each token but the first."""
        logprobs = self.model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        return [float(row[token]) for row, token in zip(logprobs, ids[1:], strict=True)]

    @torch.no_grad()
    def top(self, ids: list[int], k: int) -> list[list[tuple[float, int]]]:
        """At each place but the first the ``k`` most probable tokens, after their logprobs."""
        values, tokens = self.model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1).topk(k)
        pairs = zip(values.tolist(), tokens.tolist(), strict=True)
        return [list(zip(*of_place, strict=True)) for of_place in pairs]

    async def _refuses(self, request: web.Request) -> web.Response | None:
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "no such key"}, status=401)
        return None

    async def models(self, request: web.Request) -> web.Response:
        return await self._refuses(request) or web.json_response({"data": [{"id": "tiny-teacher"}]})

    async def tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        ids = self.tokenizer(body["prompt"], add_special_tokens=False)["input_ids"]
        return web.json_response({"tokens": [token + self.shift for token in ids]})

    async def completions(self, request: web.Request) -> web.Response:
        if refused := await self._refuses(request):
            return refused
        if self.busy:
            self.busy -= 1
            return web.Response(status=503, text="try again")
        body = await request.json()
        assert body["model"] == "tiny-teacher"
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(self.delay)
        choices = [self._choice(at, ids, body) for at, ids in enumerate(body["prompt"])]
        self.at_once -= 1
        self.asked.append(len(body["prompt"]))
        return web.json_response({"choices": choices[::-1]})

    def _choice(self, at: int, ids: list[int], body: dict[str, Any]) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": at, "text": "", "logprobs": None}
        values = self.logprobs(ids)
        if self.way == "prompt_logprobs" and "prompt_logprobs" in body:
            texts = [self.tokenizer.decode([token]) for token in ids]
            entries = zip(ids[1:], values, texts[1:], strict=True)
            choice["prompt_logprobs"] = [
                None,
                *({str(t): {"logprob": v, "decoded_token": s}} for t, v, s in entries),
            ]
            tops = self.top(ids, min(self.most, body["prompt_logprobs"]))
            for entry, top in zip(choice["prompt_logprobs"][1:], tops, strict=True):
                entry |= {str(token): {"logprob": value} for value, token in top}
        if self.way == "echo" and body.get("echo"):
            texts = [self.tokenizer.decode([token + self.shift]) for token in ids]
            choice["logprobs"] = {"token_logprobs": [None, *values], "tokens": texts}
        return choice


@contextmanager
def serving(teacher: TinyTeacher) -> Iterator[TinyTeacher]:
    """Serve ``teacher`` on a free port of loopback; it has the URL."""
    loop = asyncio.new_event_loop()
    ready = threading.Event()

    async def start() -> web.AppRunner:
        app = web.Application()
        app.router.add_get("/v1/models", teacher.models)
        app.router.add_post("/v1/completions", teacher.completions)
        if teacher.way == "prompt_logprobs":
            app.router.add_post("/tokenize", teacher.tokenize)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        teacher.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        ready.set()
        return runner

    def run() -> None:
        asyncio.set_event_loop(loop)
        runner = loop.run_until_complete(start())
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(20)
    try:
        yield teacher
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20)
        loop.close()
