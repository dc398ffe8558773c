"""The decorator: what a handler is given, what is refused before it, and what the document has of
it."""

from __future__ import annotations

import asyncio
import json
import types
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, Literal

import pytest
from aiohttp import web
from pydantic import BaseModel, Field

from api.server.http.bodies import BINARY, read_body
from api.server.http.problems import HTTPProblem
from api.server.service.openapi import openapi_document
from api.server.service.operations import Reply, Strict, operation, operations_of
from api.server.service.service import Service
from tests.api.serving import Client, problem, serving


class ThingPath(Strict):
    thing: str = Field(pattern="^[a-z]+$")


class ThingQuery(Strict):
    most: int = Field(1, ge=1, le=9, alias="max")
    kinds: list[Literal["a", "b"]] = Field([])


class ThingHeaders(Strict):
    key: str = Field("", alias="Idempotency-Key", max_length=4)


class Part(Strict):
    size: int = Field(ge=0)


class ThingBody(Strict):
    part: Part
    note: str = ""


class Thing(BaseModel):
    thing: str
    received: dict[str, Any]


@operation("GET", "/things/{thing}", scope=None, summary="A thing", tag="things", errors=(404,))
async def get_thing(
    service: Service, path: ThingPath, query: ThingQuery, headers: ThingHeaders
) -> Thing:
    """More about it."""
    if path.thing == "absent":
        raise HTTPProblem(
            404,
            "No thing is called that.",
            kind="unknown-thing",
            field="path.thing",
            value=path.thing,
        )
    if path.thing == "bug":
        raise RuntimeError("the password is hunter2")
    if path.thing == "slow":
        await asyncio.Event().wait()
    return Thing(
        thing=path.thing, received={"max": query.most, "kinds": query.kinds, "key": headers.key}
    )


@operation(
    "POST",
    "/things",
    scope=None,
    summary="Make a thing",
    tag="things",
    status=201,
    also={200: "It was there"},
    sends={"Location": "Where it is"},
)
async def post_thing(service: Service, body: ThingBody) -> Reply[Thing]:
    return Reply(Thing(thing="new", received=body.model_dump()), 201, {"Location": "/things/new"})


@operation("DELETE", "/things/{thing}", scope="admin", summary="Forget a thing", tag="things")
async def delete_thing(service: Service, path: ThingPath) -> None: ...


@operation(
    "PUT",
    "/things/raw",
    scope=None,
    summary="Bytes",
    tag="things",
    consumes="application/octet-stream",
    body_limit=2000,
)
async def put_raw(service: Service, request: web.Request) -> Thing:
    body = await read_body(request, 2000, 20.0, media_type=BINARY)
    return Thing(thing="raw", received={"bytes": len(body)})


MODULE = types.ModuleType("things")
MODULE.__dict__.update(
    get_thing=get_thing, post_thing=post_thing, delete_thing=delete_thing, put_raw=put_raw
)


@pytest.fixture
async def client(index_url: str, tmp_path: Path) -> AsyncGenerator[Client, None]:
    limits = {"body_limit": 1000, "body_seconds": 0.5, "handler_seconds": 0.5}
    async with serving(index_url, tmp_path, modules=(MODULE,), **limits) as made:
        yield made


# --- what a handler is given
# --------------------------------------------------------------------------------------------


async def test_a_handler_is_given_what_it_names_as_its_models(client: Client) -> None:
    response = await client.get(
        "/things/ball?max=3&kinds=a&kinds=b", headers={"idempotency-key": "k1"}
    )
    assert response.status == 200
    assert await response.json() == {
        "thing": "ball",
        "received": {"max": 3, "kinds": ["a", "b"], "key": "k1"},
    }


async def test_a_reply_brings_its_own_status_and_headers(client: Client) -> None:
    response = await client.post("/things", json={"part": {"size": 1}})
    assert (response.status, response.headers["Location"]) == (201, "/things/new")


async def test_nothing_is_204(client: Client) -> None:
    response = await client.delete("/things/ball")
    assert (response.status, await response.read()) == (204, b"")


# --- what is refused
# --------------------------------------------------------------------------------------------------


async def test_all_that_is_wrong_is_told_at_once_with_field_value_and_fix(client: Client) -> None:
    response = await client.get(
        "/things/Ball1?max=77&min=2", headers={"Idempotency-Key": "a secret"}
    )
    details = await problem(response, 400)
    fields = {error["field"]: error for error in details["errors"]}
    assert set(fields) == {"path.thing", "query.max", "query.min", "header.Idempotency-Key"}
    assert (fields["query.max"]["value"], fields["query.max"]["fix"]) == (
        "77",
        "give less than or equal to 9",
    )
    assert (details["field"], details["value"]) == ("path.thing", "Ball1")
    assert "a secret" not in json.dumps(details)


async def test_a_query_key_given_twice_is_refused_unless_it_is_a_list(client: Client) -> None:
    details = await problem(await client.get("/things/ball?max=3&max=4"), 400)
    assert details["field"] == "query.max"


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        ('{"part": {"size": "1"}}', 422, "part.size"),  # a text is not a number
        ('{"part": {"size": 1, "colour": 2}}', 422, "part.colour"),
        ('{"note": "n"}', 422, "part"),
        ("[]", 422, "body"),
        ("{", 400, "body"),
        ("", 400, "body"),
        ('{"note": "\\ud800"}', 400, "body"),
        ('{"part": ' * 100_0 + "1" + "}" * 100_0, 413, "body"),
        ('{"part":' + "[" * 900, 400, "body"),
    ],
)
async def test_a_body_that_is_not_what_the_model_takes(
    client: Client, body: str, status: int, field: str
) -> None:
    headers = {"Content-Type": "application/json"}
    details = await problem(
        await client.post("/things", data=body.encode(), headers=headers), status
    )
    assert details["field"] == field


async def test_a_body_of_another_media_type_is_refused(client: Client) -> None:
    for headers in (
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/json", "Content-Encoding": "gzip"},
    ):
        details = await problem(
            await client.post("/things", data=b'{"part": {"size": 1}}', headers=headers), 415
        )
        assert "application/json" in details["fix"]


async def test_a_body_without_a_length_is_cut_off_at_the_limit(client: Client) -> None:
    async def endless() -> AsyncGenerator[bytes, None]:
        for _ in range(10_000):
            yield b" " * 100

    response = await client.post(
        "/things", data=endless(), headers={"Content-Type": "application/json"}
    )
    await problem(response, 413)


async def test_an_operation_may_have_a_limit_of_its_own(client: Client) -> None:
    headers = {"Content-Type": "application/octet-stream"}
    response = await client.put("/things/raw", data=b"x" * 1500, headers=headers)
    assert (await response.json())["received"] == {"bytes": 1500}
    await problem(await client.put("/things/raw", data=b"x" * 2001, headers=headers), 413)


async def test_a_body_that_trickles_is_given_up(client: Client) -> None:
    async def trickle() -> AsyncGenerator[bytes, None]:
        yield b"{"
        await asyncio.sleep(30)  # the attack itself
        yield b"}"

    async with asyncio.timeout(10):
        response = await client.post(
            "/things", data=trickle(), headers={"Content-Type": "application/json"}
        )
        await problem(response, 408)


async def test_a_handler_that_takes_too_long_is_given_up(client: Client) -> None:
    response = await client.get("/things/slow")
    await problem(response, 503)
    assert int(response.headers["Retry-After"]) > 0


async def test_a_bug_tells_the_client_nothing_of_itself(client: Client) -> None:
    details = await problem(await client.get("/things/bug"), 500)
    assert "hunter2" not in json.dumps(details)
    assert "RuntimeError" not in json.dumps(details)


async def test_paths_and_methods_that_are_not_there_are_problems_too(client: Client) -> None:
    assert (await problem(await client.get("/nothing"), 404))[
        "type"
    ] == "urn:asyncdock:no-such-path"
    response = await client.put("/things", json={})
    await problem(response, 405)
    assert response.headers["Allow"] == "POST"


# --- the document
# --------------------------------------------------------------------------------------------------


def test_the_document_says_what_the_signatures_say() -> None:
    api = openapi_document([MODULE], version="1")
    assert api["openapi"].startswith("3.1")
    got = api["paths"]["/things/{thing}"]["get"]
    assert {(p["name"], p["in"], p["required"]) for p in got["parameters"]} == {
        ("thing", "path", True),
        ("max", "query", False),
        ("kinds", "query", False),
        ("Idempotency-Key", "header", False),
    }
    assert got["description"] == "More about it."
    assert set(got["responses"]) == {"200", "400", "403", "404", "429", "503"}
    posted = api["paths"]["/things"]["post"]
    assert posted["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith(
        "/ThingBody"
    )
    assert {"200", "201", "408", "413", "415", "422"} <= set(posted["responses"])
    assert "Location" in posted["responses"]["201"]["headers"]
    deleted = api["paths"]["/things/{thing}"]["delete"]
    assert (deleted["security"], "204" in deleted["responses"]) == ([{"token": ["admin"]}], True)
    assert {"Thing", "ThingBody", "ProblemDetails"} <= set(api["components"]["schemas"])


async def test_the_server_serves_its_document_and_a_page_to_read_it(
    index_url: str, tmp_path: Path
) -> None:
    async with serving(index_url, tmp_path) as client:
        api = await (await client.get("/openapi.json")).json()
        assert {"/healthz", "/readyz", "/openapi.json"} <= set(api["paths"])
        page = await client.get("/docs")
        assert (page.status, page.content_type) == (200, "text/html")
        for name, kind in (("reference.js", "text/javascript"), ("reference.css", "text/css")):
            assert f"docs/{name}" in await page.text()
            assert (await client.get(f"/docs/{name}")).content_type == kind
        assert (await client.get("/docs/..%2fservice.py")).status == 400


def test_each_operation_of_a_module_is_found_once() -> None:
    MODULE.__dict__["again"] = get_thing
    assert [o.path for o in operations_of([MODULE])] == [
        "/things/{thing}",
        "/things",
        "/things/{thing}",
        "/things/raw",
    ]
