"""The HTTP server of sessions: each key reaches its session alone.

POST /v1/chat/completions   OpenAI
POST /v1/responses          OpenAI
POST /v1/messages           Anthropic
POST /inference/v1/generate vLLM's, of token ids
GET  /v1/models             the one model
POST /v1/reward, /v1/end    of a program outside of the run
POST /v1/sessions           with the server's own key: the next trajectory for such a program
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from stages.environments.interface import EnvironmentFailed, Request, Turn
from stages.environments.programs import anthropic, chat, generate, responses
from stages.environments.programs.exchange import Exchange, SessionEnded
from stages.environments.programs.messages import (
    RequestRefused,
    anthropic_error,
    demands_call,
    openai_error,
)
from stages.environments.programs.outside import Offer, Offers

LOOPBACK = "127.0.0.1"
BODY_BYTES = 8 << 20
IGNORED = "AsyncDock-Ignored"  # header of an answer: the field of its request that did nothing
NO_SESSION = "the key is of no session that is open here"
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


FORMS = {
    "/v1/chat/completions": Form(chat.read, chat.answer, chat.events, openai_error),
    "/v1/responses": Form(responses.read, responses.answer, responses.events, openai_error),
    "/v1/messages": Form(anthropic.read, anthropic.answer, anthropic.events, anthropic_error),
    "/inference/v1/generate": Form(generate.read, generate.answer, generate.events, openai_error),
}


class Endpoint:
    """The server, which starts with the first session, on a free port of ``host``, announced as
    ``advertised``. ``key``: with which programs outside ask for trajectories; "": none can.
    ``patience``: seconds in which such a program has to ask the policy first."""

    def __init__(
        self, host: str = LOOPBACK, advertised: str = "", key: str = "", patience: float = 60.0
    ) -> None:
        self.offers = Offers()
        self._patience = patience
        self._host = host
        self._advertised = advertised
        self._key = key
        self._by_key: dict[str, Exchange] = {}
        self._runner: web.AppRunner | None = None
        self._starting = asyncio.Lock()

    async def open(self, exchange: Exchange) -> str:
        """Let requests with the key of ``exchange`` in. Returns the URL that ends with ``/v1``.
        Raises EnvironmentFailed."""
        self._by_key[exchange.key] = exchange
        return await self.begin()

    async def begin(self) -> str:
        """Start the server, where it is not. Returns the URL that ends with ``/v1``. Raises
        EnvironmentFailed."""
        async with self._starting:
            if self._runner is None:
                try:
                    self._runner = await self._start()
                except OSError as error:
                    raise EnvironmentFailed(f"{NO_LOOPBACK} ({error})") from error
        host, port = self._runner.addresses[0][:2]
        name = self._advertised or host
        return f"http://{f'[{name}]' if ':' in name else name}:{port}/v1"

    async def _start(self) -> web.AppRunner:
        application = web.Application(client_max_size=BODY_BYTES)
        for path, form in FORMS.items():
            application.router.add_post(path, self._handler(form))
        application.router.add_get("/v1/models", self._models)
        application.router.add_post("/v1/reward", self._reward)
        application.router.add_post("/v1/end", self._end)
        application.router.add_post("/v1/sessions", self._take)
        runner = web.AppRunner(
            application,
            access_log=None,
            shutdown_timeout=1.0,
            handler_cancellation=True,  # a request ends when its client disconnects
        )
        await runner.setup()
        await web.TCPSite(runner, self._host, 0).start()
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
                return _json(401, form.error("authentication_error", NO_SESSION))
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
            ignored = {IGNORED: "tool_choice"} if demands_call(body.get("tool_choice")) else {}
            if not body.get("stream"):
                return _json(200, form.answer(body, turn), ignored)
            headers = {"Content-Type": "text/event-stream", **ignored}
            response = web.StreamResponse(headers=headers)
            await response.prepare(http)
            for event in form.events(body, turn):
                await response.write(event.encode())
            return response

        return handle

    async def _reward(self, http: web.Request) -> web.Response:
        """Set the reward of a trajectory."""
        offer = self.offers.of(_key_of(http))
        if offer is None:
            return _json(401, openai_error("authentication_error", NO_SESSION))
        try:
            reward: Any = _object(await http.read()).get("reward")
            is_number = isinstance(reward, int | float) and not isinstance(reward, bool)
            if not is_number or not math.isfinite(reward):
                raise RequestRefused("reward", "give a finite number")
        except RequestRefused as refused:
            return _json(400, openai_error("invalid_request_error", str(refused)))
        offer.session.reward = float(reward)
        return _json(200, {"reward": offer.session.reward})

    async def _end(self, http: web.Request) -> web.Response:
        """End a trajectory."""
        offer = self.offers.of(_key_of(http))
        if offer is None:
            return _json(401, openai_error("authentication_error", NO_SESSION))
        if not offer.ended.done():
            offer.ended.set_result(None)
        return _json(200, {"reward": offer.session.reward})

    async def _take(self, http: web.Request) -> web.Response:
        """Give the next trajectory, or null where none came within ``wait`` seconds."""
        if not self._key or not secrets.compare_digest(_key_of(http).encode(), self._key.encode()):
            return _json(401, openai_error("authentication_error", "give the server's key"))
        try:
            wait = _object(await http.read()).get("wait")
        except RequestRefused as refused:
            return _json(400, openai_error("invalid_request_error", str(refused)))
        offer = await self.offers.take(float(wait or 0.0))
        if offer is None:
            return _json(200, {"session": None})
        session = offer.session
        asyncio.get_running_loop().call_later(self._patience, self._fail_if_silent, offer)
        fields = {"base_url": session.base_url, "api_key": session.api_key, "seed": session.seed}
        return _json(200, {"session": {**fields, "row": dict(offer.row)}})

    def _fail_if_silent(self, offer: Offer) -> None:
        """Fail a trajectory whose program has asked nothing since it was taken."""
        exchange = self._by_key.get(offer.session.api_key)
        if exchange is not None and not exchange.was_asked and not offer.ended.done():
            reason = f"its program asked nothing for {self._patience:g} s after it was taken"
            offer.ended.set_exception(TimeoutError(reason))

    async def _models(self, http: web.Request) -> web.Response:
        if self._exchange(http) is None:
            return _json(401, openai_error("authentication_error", "give the session's key"))
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "asyncdock"}
        return _json(200, {"object": "list", "data": [model]})

    def _exchange(self, http: web.Request) -> Exchange | None:
        return self._by_key.get(_key_of(http))


def _key_of(http: web.Request) -> str:
    bearer = http.headers.get("Authorization", "").removeprefix("Bearer ")
    return http.headers.get("x-api-key", bearer)


def _object(data: bytes) -> dict[str, Any]:
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise RequestRefused("body", "give a JSON object")
    return body


def _json(
    status: int, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> web.Response:
    return web.json_response(body, status=status, headers=headers)
