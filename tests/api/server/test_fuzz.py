"""schemathesis against a real server, all checks, with a small count; ``benchmarks/robustness/api_fuzz.py``
has the large one."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from benchmarks.robustness.api_fuzz import FUZZED, QUICK, Found, Served, fuzz
from tests.api.watchdog import HELD


@pytest.mark.timeout(700)
def test_the_api_keeps_to_its_document_whatever_it_is_sent() -> None:
    found = Found()
    served = Served(*FUZZED, module="tests.api.watched")
    with served as (url, token):
        fuzz(url, token, found, seed=1, examples=1, seconds=600.0, settings=QUICK)
    assert not found.failures, "\n".join(found.reports)
    assert not (held := [line for line in served.log.splitlines() if HELD in line]), held
    assert found.operations == 50, "each one but the stream, which does not end"
    assert found.requests > 1000


async def test_an_api_that_does_not_keep_to_its_document_is_found_out() -> None:
    count = {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]}
    answers = {"200": {"description": "ok", "content": {"application/json": {"schema": count}}}}
    number = [{"name": "of", "in": "query", "required": True, "schema": {"type": "integer"}}]
    wrong = {
        "breaks": "Server error",
        "lies": "Response violates schema",
        "takes-all": "Schema-violating request accepted",
    }
    document = {
        "openapi": "3.1.0",
        "info": {"title": "Wrong on purpose", "version": "1"},
        "paths": {
            f"/{name}": {"get": {"parameters": number, "responses": answers}} for name in wrong
        },
    }

    async def openapi(request: web.Request) -> web.Response:
        return web.json_response(document)

    async def answer(request: web.Request) -> web.Response:
        output = {"count": "none" if request.path == "/lies" else 1}
        return web.json_response(output, status=500 if request.path == "/breaks" else 200)

    app = web.Application()
    app.add_routes([web.get("/openapi.json", openapi), web.get("/{any}", answer)])
    found = Found()
    async with TestServer(app) as server:
        url = str(server.make_url("")).rstrip("/")
        await asyncio.to_thread(fuzz, url, "none", found, seed=1, examples=1, seconds=120.0)
    assert found.operations == 3
    assert set(wrong.values()) <= set(found.failures), found.failures
