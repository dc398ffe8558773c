"""A policy as a deployment of Ray Serve, with Serve's autoscaling: the handler, with tokens, limits and problems as the REST
server has them.

    Serve's proxy ──▶ a replica: rate of its client, token, body ──▶ PolicyHandler on engines of the replica's own
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

import pydantic
from pydantic_core import to_json
from ray import serve
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from api.policy.handler import PolicyHandler
from api.schemas.completions import ChatRequest, CompletionRequest, ModelsView, ModelView
from api.server.access.limits import Rates, client_of
from api.server.access.tokens import Tokens
from api.server.bodies import JSON, refuse_many_values, too_large
from api.server.operations import BODY_VALUES
from api.server.problems import HTTPProblem, errors_of, invalid_request, problem_of
from api.server.service import Settings, allowed
from orchestration.policy.served import Policies
from orchestration.policy.source import PolicySource

BODIES: dict[str, type[CompletionRequest] | type[ChatRequest]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
}


@serve.deployment
class PolicyDeployment:
    """One replica. ``source``: a PolicySource as JSON, whose index has the tokens. ``settings``: as JSON; of those of a
    server, the limits, and whether tokens are needed."""

    def __init__(self, source: str, settings: str) -> None:
        self._settings = Settings.model_validate_json(settings)
        self._policies = Policies(PolicySource.from_json(source))
        self._tokens = Tokens(self._policies.source.index)
        self._rates = Rates(self._settings.rate, self._settings.burst)

    async def __call__(self, request: Request) -> Response:
        try:
            return await self._answer(request)
        except Exception as error:
            return _response(problem_of(error))

    async def _answer(self, request: Request) -> Response:
        path, client = request.url.path, client_of(request.client.host if request.client else "")
        if wait := self._rates.wait(client, time.monotonic()):
            raise HTTPProblem(429, "Too many requests.", kind="rate", headers={"Retry-After": str(int(wait) + 1)})
        model = BODIES.get(path) if request.method == "POST" else None
        if model is None and (request.method, path) != ("GET", "/v1/models"):
            raise HTTPProblem(404, "There is nothing at this path.", kind="no-such-path")
        needed, scope = self._settings.tokens_needed, "read" if model is None else "run"
        await allowed(self._tokens, request.headers, scope, needed=needed)  # type: ignore[arg-type]
        if model is None:
            named = ModelView(id=self._policies.source.name, created=0, owned_by="asyncdock")
            return Response(ModelsView(data=[named]).model_dump_json(), media_type=JSON)
        asked = await self._body(request, model)
        if not asked.stream:
            async with self._policies.use(asked.model) as policy:
                return Response(to_json(await PolicyHandler(policy).answer(asked)), media_type=JSON)
        events = self._events(asked)
        return StreamingResponse(_with_first(await anext(events), events), media_type="text/event-stream")

    async def _body(self, request: Request, model: type[CompletionRequest] | type[ChatRequest]) -> Any:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > self._settings.body_limit:
                raise too_large(self._settings.body_limit)
        refuse_many_values(bytes(body), BODY_VALUES)
        try:
            return model.model_validate_json(bytes(body), strict=True)
        except pydantic.ValidationError as error:
            raise invalid_request(422, errors_of(error)) from None

    async def _events(self, asked: CompletionRequest | ChatRequest) -> AsyncGenerator[bytes, None]:
        async with self._policies.use(asked.model) as policy, aclosing(PolicyHandler(policy).events(asked)) as events:
            async for event in events:
                yield event


async def _with_first(first: bytes, rest: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(rest):
        yield first
        async for event in rest:
            yield event


def _response(problem: HTTPProblem) -> Response:
    answer = problem.response()
    return Response(answer.body, answer.status, dict(answer.headers))


def deploy(
    source: PolicySource, settings: Settings, scale: Mapping[str, Any], actor: Mapping[str, Any], address: str
) -> None:
    """Deploy ``source`` on the Ray cluster at ``address``, or again with other settings. ``scale``: Serve's
    autoscaling_config; ``actor``: its ray_actor_options."""
    import ray

    ray.init(address, ignore_reinit_error=True, log_to_driver=False)
    serve.start(http_options={"host": settings.host, "port": settings.port})
    made = PolicyDeployment.options(  # type: ignore[attr-defined]
        autoscaling_config=dict(scale), ray_actor_options=dict(actor), max_ongoing_requests=settings.max_waiting
    )
    serve.run(made.bind(source.to_json(), settings.model_dump_json()), name=source.name, route_prefix="/")


def undeploy(name: str, address: str) -> None:
    """Remove the deployment ``name`` from the Ray cluster at ``address``."""
    import ray

    ray.init(address, ignore_reinit_error=True, log_to_driver=False)
    serve.delete(name)
