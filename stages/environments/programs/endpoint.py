"""The HTTP server of sessions, on a free port of loopback: each key reaches its session alone.

POST /v1/chat/completions   OpenAI
POST /v1/responses          OpenAI
POST /v1/messages           Anthropic
GET  /v1/models             the one model
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from stages.environments.interface import EnvironmentFailed, Request, Turn
from stages.environments.programs import anthropic, chat, responses
from stages.environments.programs.exchange import Exchange, SessionEnded
from stages.environments.programs.messages import RequestRefused

BODY_BYTES = 8 << 20
NO_LOOPBACK = (
    "a program needs 127.0.0.1, which this sandbox does not have; set environment.network = true"
)


@dataclass(frozen=True)
class Form:
    """One form of requests and answers."""

    read: Callable[[Mapping[str, Any]], Request]
    answer: Callable[[Mapping[str, Any], Turn], dict[str, Any]]
    events: Callable[[Mapping[str, Any], Turn], Iterator[str]]
    error: Callable[[str, str], dict[str, Any]]


def openai_error(kind: str, message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def anthropic_error(kind: str, message: str) -> dict[str, Any]:
    return {"type": "error", "error": {"type": kind, "message": message}}


FORMS = {
    "/v1/chat/completions": Form(chat.read, chat.answer, chat.events, openai_error),
    "/v1/responses": Form(responses.read, responses.answer, responses.events, openai_error),
    "/v1/messages": Form(anthropic.read, anthropic.answer, anthropic.events, anthropic_error),
}


class Endpoint:
    """The server, which starts with the first session."""

    def __init__(self) -> None:
        self._by_key: dict[str, Exchange] = {}
        self._runner: web.AppRunner | None = None
        self._starting = asyncio.Lock()

    async def open(self, exchange: Exchange) -> str:
        """Let requests with the key of ``exchange`` in. Returns the URL that ends with ``/v1``.
        Raises EnvironmentFailed."""
        self._by_key[exchange.key] = exchange
        async with self._starting:
            if self._runner is None:
                try:
                    self._runner = await self._start()
                except OSError as error:
                    raise EnvironmentFailed(f"{NO_LOOPBACK} ({error})") from error
        host, port = self._runner.addresses[0][:2]
        return f"http://{host}:{port}/v1"

    async def _start(self) -> web.AppRunner:
        application = web.Application(client_max_size=BODY_BYTES)
        for path, form in FORMS.items():
            application.router.add_post(path, self._handler(form))
        application.router.add_get("/v1/models", self._models)
        runner = web.AppRunner(
            application,
            access_log=None,
            shutdown_timeout=1.0,
            handler_cancellation=True,  # nobody waits for the turn any more
        )
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner

    def close(self, exchange: Exchange) -> None:
        self._by_key.pop(exchange.key, None)

    async def end(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def _handler(self, form: Form) -> Callable[[web.Request], Any]:
        async def handle(http: web.Request) -> web.StreamResponse:
            exchange = self._exchange(http)
            if exchange is None:
                message = "the key is of no session that is open here"
                return _json(401, form.error("authentication_error", message))
            try:
                body = _object(await http.read())
                turn = await exchange.ask(form.read(body))
            except RequestRefused as refused:
                return _json(400, form.error("invalid_request_error", str(refused)))
            except web.HTTPRequestEntityTooLarge:
                message = f"a request has at most {BODY_BYTES} bytes"
                return _json(413, form.error("invalid_request_error", message))
            except SessionEnded as ended:
                return _json(410, form.error("invalid_request_error", str(ended)))
            if not body.get("stream"):
                return _json(200, form.answer(body, turn))
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(http)
            for event in form.events(body, turn):
                await response.write(event.encode())
            return response

        return handle

    async def _models(self, http: web.Request) -> web.Response:
        if self._exchange(http) is None:
            return _json(401, openai_error("authentication_error", "give the session's key"))
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "asyncdock"}
        return _json(200, {"object": "list", "data": [model]})

    def _exchange(self, http: web.Request) -> Exchange | None:
        bearer = http.headers.get("Authorization", "").removeprefix("Bearer ")
        return self._by_key.get(http.headers.get("x-api-key", bearer))


def _object(data: bytes) -> dict[str, Any]:
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise RequestRefused("body", "give a JSON object")
    return body


def _json(status: int, body: Mapping[str, Any]) -> web.Response:
    return web.json_response(body, status=status)
