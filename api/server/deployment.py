"""A policy as a deployment of Ray Serve, with Serve's autoscaling: the handler, with tokens, limits
and problems as the REST server has them.

    Serve's proxy ──▶ a replica: rate of its client, token, body ──▶ respond, on engines of the replica's own
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pydantic

from api.policy.answers import ALL, answer
from api.schemas.completions import ModelsView, ModelView
from api.server.access.authorization import allowed
from api.server.access.limits import Rates, client_of
from api.server.access.settings import Settings
from api.server.access.tokens import Scope, Tokens
from api.server.http.bodies import JSON, refuse_many_values, too_large
from api.server.http.problems import (
    ANTHROPIC_PATHS,
    OPENAI_PATHS,
    HTTPProblem,
    errors_of,
    invalid_request,
    problem_of,
)
from api.server.service.operations import BODY_VALUES
from orchestration.policy.served import Policies
from pipeline.compat.extras import extra

with extra("ray"):
    from ray import serve
    from starlette.requests import Request
    from starlette.responses import Response, StreamingResponse


@serve.deployment
class PolicyDeployment:
    """One replica, which serves the policy of ``run``.

    ``settings``: those of a server as JSON. Of them it takes the index, the limits, and whether
    tokens are needed.
    """

    def __init__(self, run: str, settings: str) -> None:
        self._run = run
        self._settings = Settings.model_validate_json(settings)
        self._policies = Policies(self._settings.index, run=run, checkpoints={})
        self._tokens = Tokens(self._settings.index)
        self._rates = Rates(self._settings.rate, self._settings.burst)

    async def __call__(self, request: Request) -> Response:
        try:
            return await self._answer(request)
        except Exception as error:
            path = request.url.path
            known = path if path.startswith(ANTHROPIC_PATHS) else OPENAI_PATHS[0]
            problem = problem_of(error).response(known)
            return Response(problem.body, problem.status, dict(problem.headers))

    async def _answer(self, request: Request) -> Response:
        path = request.url.path
        client = client_of(request.client.host if request.client else "")
        if wait := self._rates.wait(client, time.monotonic()):
            raise HTTPProblem(
                429, "Too many requests.", kind="rate", headers={"Retry-After": str(int(wait) + 1)}
            )
        model = ALL.get(path) if request.method == "POST" else None
        if model is None and (request.method, path) != ("GET", "/v1/models"):
            raise HTTPProblem(404, "There is nothing at this path.", kind="no-such-path")
        scope: Scope = "run" if model else "read"
        token = await allowed(
            self._tokens.find, request.headers, scope, needed=self._settings.tokens_needed
        )
        if model is None:
            models = ModelsView(data=[ModelView(id=self._run, created=0, owned_by="asyncdock")])
            return Response(models.model_dump_json(), media_type=JSON)
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > self._settings.body_limit:
                raise too_large(self._settings.body_limit)
        refuse_many_values(bytes(body), BODY_VALUES)
        try:
            asked = model.model_validate_json(bytes(body), strict=True)
        except pydantic.ValidationError as error:
            raise invalid_request(422, errors_of(error)) from None
        parts = answer(self._policies, asked, token.id)
        return StreamingResponse(
            _with_first(await anext(parts), parts), media_type=asked.media_type
        )


async def _with_first(
    first: bytes, rest: AsyncGenerator[bytes, None]
) -> AsyncGenerator[bytes, None]:
    async with aclosing(rest):
        yield first
        async for part in rest:
            yield part
