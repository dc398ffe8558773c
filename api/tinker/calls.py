"""What all operations of Tinker's API use: the service of training calls, and the owner of a request."""

from __future__ import annotations

import asyncio
import functools
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pydantic
from aiohttp import web

from api.server.http.problems import errors_of, invalid_request
from api.server.service.operations import operation
from api.server.service.service import PRINCIPAL
from api.tinker.schemas import Answer
from orchestration.calls.interface import Acknowledged, Kind
from stages.calls.interface import CallRefused

if TYPE_CHECKING:
    from orchestration.calls.service import Service

DECODING = 2  # bodies of data that are read at once: each may take some times its size
tinker_operation = functools.partial(operation, scope="run", tag="tinker", hidden=True)


@dataclass(frozen=True)
class Shared:
    """What the operations of one application share."""

    calls: Service
    decoding: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(DECODING))
    archives: OrderedDict[str, tuple[str, float]] = field(default_factory=OrderedDict)
    """File and end of validity, by what is in the address."""


SHARED = web.AppKey("tinker", Shared)


def caller(request: web.Request) -> tuple[Service, str]:
    """Return the service of training calls, and the owner of ``request``: the id of its token."""
    return request.app[SHARED].calls, request[PRINCIPAL].id


def acknowledged(call: Acknowledged) -> Answer:
    """Return the answer to a call that is recorded."""
    fields: dict[str, Any] = {"request_id": call.request_id}
    if call.model_id:
        fields["model_id"] = call.model_id
    if call.sequence_ids:
        fields["sample_sequence_ids"] = list(call.sequence_ids)
    return Answer(**fields)


async def in_order(
    request: web.Request,
    model_id: str,
    seq_id: int,
    kind: Kind,
    send: Callable[[], Awaitable[Acknowledged]],
) -> Answer:
    """Return the answer to a call of a model.

    What is refused fails in its place, as a result: an error here would leave its number open, and
    later calls would wait for it.
    """
    try:
        call = await send()
    except (CallRefused, pydantic.ValidationError) as error:
        calls, owner = caller(request)
        call = await calls.refuse(owner, model_id, seq_id, kind, _in_words(error))
    return acknowledged(call)


def _in_words(error: CallRefused | pydantic.ValidationError) -> str:
    if isinstance(error, CallRefused):
        return str(error)
    details = invalid_request(422, errors_of(error)).details
    value = f" = {details.value}" if details.value is not None else ""
    return f"{details.field}{value}: {details.detail}; {details.fix}"
