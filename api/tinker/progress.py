"""Operations of a token's models as the dashboard shows them: what is there, and how each has trained."""

from __future__ import annotations

from dataclasses import asdict

from aiohttp import web

from api.server.service.service import Service
from api.tinker.calls import caller, tinker_operation
from api.tinker.schemas import Answer, ModelPath, PageQuery, StepsQuery


@tinker_operation("GET", "/tinker/models", summary="Models of this token, as they are now")
async def list_models(service: Service, request: web.Request, query: PageQuery) -> Answer:
    """Those that were called last come first."""
    calls, owner = caller(request)
    models = sorted(await calls.models(owner), key=lambda each: each.last_request, reverse=True)
    chosen = models[query.offset : query.offset + query.limit]
    return Answer(models=[asdict(model) for model in chosen], total=len(models))


@tinker_operation("GET", "/tinker/models/{model}/steps", summary="How a model has trained")
async def list_steps(
    service: Service, request: web.Request, path: ModelPath, query: StepsQuery
) -> Answer:
    """Steps after number ``after``, and the model. Of long runs older steps are thinned."""
    calls, owner = caller(request)
    model = await calls.model(owner, path.model)
    return Answer(model=asdict(model), steps=await calls.steps(owner, path.model, query.after))
