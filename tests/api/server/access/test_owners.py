"""A run belongs to the name of the token that submitted it: each test is what another one's token
tries."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from api.server.access.tokens import Scope, Tokens
from api.server.app import ROUTES
from api.server.service.operations import Operation, operations_of
from orchestration.recipe.loading.load import parse_recipe
from orchestration.state.registry import Registry
from tests.api.serving import Client, bearer, problem, serving
from tests.orchestration.runs import MOCK

PEOPLE: list[tuple[str, Scope]] = [
    ("ann", "run"),
    ("ann", "run"),
    ("bob", "run"),
    ("root", "admin"),
    ("eve", "read"),
]
# Of a run, with a scope beyond reading, and for everybody who has it.
FOR_ALL = {"get_published", "get_weights"}
BODIES: dict[str, Any] = {
    "scale_run": {"rollout": 1},
    "label_run": {"tags": ["good"]},
    "put_prompts": {"prompts": [{"prompt": "a="}]},
    "get_experience": {"stage": "rollout", "worker": "w", "count": 1},
    "weight_sync_notify": {"worker": "w", "version": 0},
}
OWNED = [o for o in operations_of(ROUTES) if o.owned]


@pytest.fixture
async def client(index_url: str, tmp_path: Path) -> AsyncGenerator[Client, None]:
    async with serving(index_url, tmp_path, no_token=False) as client:
        yield client


@pytest.fixture
async def people(index_url: str) -> list[dict[str, str]]:
    """Headers of two tokens of ann's, and of bob's, root's and eve's."""
    tokens = Tokens(index_url)
    made = [bearer((await tokens.create(*person))[1]) for person in PEOPLE]
    await tokens.close()
    return made


def test_whatever_changes_a_run_is_for_its_owner() -> None:
    """Also what will be added: everything below a run that takes more than reading."""
    of_runs = [
        o
        for o in operations_of(ROUTES)
        if o.path.startswith("/v1/runs/{run}") and o.scope != "read"
    ]
    assert {o.handler.__name__ for o in of_runs} - {o.handler.__name__ for o in OWNED} == FOR_ALL
    assert {o.handler.__name__ for o in OWNED} >= {
        "stop_run",
        "delete_run",
        "resume_run",
        "scale_run",
        "put_prompts",
    }
    assert {o.scope for o in OWNED} == {"run"}


@pytest.mark.parametrize("o", OWNED, ids=[o.handler.__name__ for o in OWNED])
async def test_a_token_of_another_name_changes_nothing(
    client: Client, people: list[dict[str, str]], o: Operation
) -> None:
    ann, again, bob, root, eve = people
    response = await client.post("/v1/runs", json={"recipe": MOCK}, headers=ann)
    run = (await response.json())["id"]
    path = (
        o.path.replace("{run}", run).replace("{token}", "0" * 32).replace("{version:[0-9]+}", "0")
    )
    body: dict[str, Any] = (
        {"json": BODIES[o.handler.__name__]} if o.handler.__name__ in BODIES else {}
    )
    refused = await problem(await client.request(o.method, path, headers=bob, **body), 403)
    assert (refused["type"], refused["field"], refused["value"]) == (
        "urn:asyncdock:owner",
        "path.run",
        run,
    )
    assert refused["detail"] == f"Run {run!r} belongs to 'ann'; the token that came is 'bob''s."
    assert refused["fix"] == "ask ann to do it, or use a token of scope admin"
    assert (await problem(await client.request(o.method, path, headers=eve, **body), 403))[
        "type"
    ].endswith("scope")
    view = await (await client.get(f"/v1/runs/{run}", headers=eve)).json()
    assert (view["state"], view["owner"]) == ("created", "ann")
    for allowed in (again, root):
        response = await client.request(o.method, path, headers=allowed, **body)
        assert response.status not in (401, 403, 500), await response.text()
    unknown = await client.request(o.method, path.replace(run, "no-such-run"), headers=bob, **body)
    assert (await problem(unknown, 404))["type"] == "urn:asyncdock:unknown-run"


async def test_a_run_without_an_owner_is_for_admin(
    client: Client, people: list[dict[str, str]], index_url: str
) -> None:
    """As versions before owners made them."""
    registry = Registry(index_url)
    record, _ = await registry.submit(parse_recipe(MOCK))
    await registry.close()
    _, _, bob, root, _ = people
    refused = await problem(await client.post(f"/v1/runs/{record.id}/stop", headers=bob), 403)
    assert refused["detail"] == f"Run {record.id!r} has no owner; the token that came is 'bob''s."
    assert refused["fix"] == "use a token of scope admin"
    assert (await client.post(f"/v1/runs/{record.id}/stop", headers=root)).status == 202


async def test_an_idempotency_key_of_another_owner_is_another_key(
    client: Client, people: list[dict[str, str]]
) -> None:
    ann, _, bob, _, _ = people
    key = {"Idempotency-Key": uuid.uuid4().hex}
    made = [
        await client.post("/v1/runs", json={"recipe": MOCK}, headers={**of, **key})
        for of in (ann, bob)
    ]
    first, second = [await response.json() for response in made]
    assert (first["owner"], second["owner"]) == ("ann", "bob")
    assert first["id"] != second["id"]


async def test_the_owner_is_in_the_list_and_can_be_asked_for(
    client: Client, people: list[dict[str, str]]
) -> None:
    ann, _, bob, _, eve = people
    name = f"of-{uuid.uuid4().hex[:8]}"
    for of in (ann, bob, bob):
        await client.post("/v1/runs", json={"recipe": {**MOCK, "name": name}}, headers=of)
    for owner, count in (("ann", 1), ("bob", 2), ("", 3)):
        query = {"owner": owner, "name": name}
        listed = (await (await client.get("/v1/runs", params=query, headers=eve)).json())["runs"]
        assert len(listed) == count
        assert {run["owner"] for run in listed} <= {"ann", "bob"}
