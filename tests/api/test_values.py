"""Unusual values: each is refused or has its literal meaning, and none causes an error of the
server."""

from __future__ import annotations

import asyncio
import json
import time
import types
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientTimeout

from api.external.session import ExternalSession
from api.server.app import ROUTES
from api.server.service import external_sessions as sessions_module
from api.server.service.external_sessions import ExternalSessions
from api.server.service.operations import operations_of
from tests.api.serving import Client, problem, serving
from tests.orchestration.runs import MOCK

HUGE = "9" * 400
VALUES = ("٣", "²", HUGE, "1e400", "1e-300", "nan", "-1", "%00", "%ed%a0%80", "%ff%fe", "a" * 3000)


@pytest.fixture
async def client(index_url: str, tmp_path: Path) -> AsyncGenerator[Client, None]:
    async with serving(index_url, tmp_path, rate=1e6, burst=10**6) as test_client:
        yield test_client


@pytest.fixture
async def run(client: Client) -> str:
    answer = await client.post("/v1/runs", json={"recipe": MOCK})
    return str((await answer.json())["id"])


async def status(client: Client, method: str, path: str, **options: Any) -> int:
    """Of the answer, whatever its body: a stream does not end."""
    async with client.request(method, path, timeout=ClientTimeout(total=30), **options) as answer:
        return answer.status


# --- the attacks
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arena",
    [HUGE, "9" * 5000, HUGE + "TiB", "1e999", "٣MiB", "1" + " " * 9000 + "!", "9" * 17 + "TiB"],
)
async def test_an_arena_that_is_no_size(client: Client, arena: str) -> None:
    answer = await client.post(
        "/v1/recipes/check", json={"recipe": MOCK, "overrides": {"pipeline.arena": arena}}
    )
    assert (await problem(answer, 422))["field"] == "pipeline.arena"


@pytest.mark.parametrize("every", ["1e-300", "5e-324", "0", "0.0009", "1e-3"])
async def test_points_of_next_to_no_time_are_the_events_themselves(
    client: Client, run: str, every: str
) -> None:
    answer = await client.get(f"/v1/runs/{run}/metrics?every={every}")
    assert (answer.status, (await answer.json())["every"]) == (
        200,
        1e-3 if every == "1e-3" else 0.0,
    )


@pytest.mark.parametrize("after", ["٣", "1-٣", "१", HUGE, "1-" + HUGE, "²", "-", "1-", "$$", "１"])
async def test_an_event_id_that_is_none(client: Client, run: str, after: str) -> None:
    path = f"/v1/runs/{run}/metrics/stream"
    await problem(await client.get(path, headers={"Last-Event-ID": after}), 400)
    await problem(await client.get(path, params={"last_event_id": after}), 400)


async def test_no_value_of_any_parameter_is_the_servers_mistake(client: Client, run: str) -> None:
    """Each query parameter and header of each operation, and each part of each path, with each of
    the values."""
    num_requests = 0
    for operation in operations_of(ROUTES):
        path = operation.path
        for part in (
            "{name:(?!check$|schema$)[^/]+}",
            "{version:[0-9]+}",
            "{token}",
            "{file:.+}",
            "{run}",
        ):
            value = {"{run}": run, "{file:.+}": "index.html"}.get(part, "1")
            path = path.replace(part, value)
        body = {"json": {}} if ("body" in operation.parts or operation.consumes) else {}
        for value in VALUES:
            if operation.method != "GET":
                assert (
                    await status(
                        client, operation.method, path.replace(run, value) + "?a=b", **body
                    )
                    < 500
                ), path
                continue
            assert await status(client, "GET", path.replace("/1", f"/{value}")) < 500, (path, value)
            for name, info in (
                operation.parts["query"].model_fields if "query" in operation.parts else {}
            ).items():
                num_requests += 1
                answer_status = await status(client, "GET", f"{path}?{info.alias or name}={value}")
                assert answer_status < 500, (path, name, value)
    assert num_requests > 200


@pytest.mark.parametrize(
    "head",
    [
        b"Last-Event-ID: \xff\xfe",
        b"Last-Event-ID: \xed\xa0\x80",
        b"Authorization: Bearer \xff",
        b"Authorization: \xd9\xa3 \xd9\xa3",
        b"Content-Type: \xff/\xff",
        b"Content-Type: text/plain; charset=\xff",
        b"Content-Encoding: \xed\xa0\x80",
        b"Idempotency-Key: \xff",
        b"Origin: \xff://\xff",
        b"Accept: \xff",
        b"If-None-Match: \xff",
        b"If-Modified-Since: \xff",
        b"Range: bytes=\xd9\xa3-",
        b"Range: bytes=" + b"9" * 5000 + b"-",
        b"Range: bytes=-" + b"9" * 400,
        b"Range: bytes=5-1",
        b"Cookie: \xff=\xff",
        b"X-Forwarded-For: \xff",
        b"Sec-Fetch-Site: \xff",
    ],
)
async def test_bytes_in_headers_that_are_no_text(client: Client, run: str, head: bytes) -> None:
    for line, body in (
        (f"GET /v1/runs/{run}/metrics/stream", b""),
        ("GET /dashboard/app.js", b""),
        ("POST /v1/runs", b"{}"),
        ("POST /v1/recipes/check", b"{}"),
        (f"PUT /v1/runs/{run}/weights/0", b"x"),
    ):
        reader, writer = await asyncio.open_connection(client.host, client.port)
        kind = b"" if head.startswith(b"Content-Type") else b"Content-Type: application/json\r\n"
        length = f"Content-Length: {len(body)}\r\n".encode() if body else b""
        writer.write(
            f"{line} HTTP/1.1\r\nHost: localhost\r\n".encode()
            + kind
            + length
            + head
            + b"\r\n\r\n"
            + body
        )
        async with asyncio.timeout(20):
            answer = await reader.readline()
        assert answer.startswith((b"HTTP/1.1 2", b"HTTP/1.1 3", b"HTTP/1.1 4")), (
            line,
            head,
            answer,
        )
        writer.close()


@pytest.mark.parametrize(
    "host",
    [
        "[::1",
        "\xff",
        "[",
        "localhost:٣",
        "localhost:99999999",
        "a b",
        "localhost:" + "9" * 5000,
        "@",
    ],
)
async def test_a_host_that_is_none(client: Client, host: str) -> None:
    reader, writer = await asyncio.open_connection(client.host, client.port)
    writer.write(b"GET /healthz HTTP/1.1\r\nHost: " + host.encode() + b"\r\n\r\n")
    async with asyncio.timeout(20):
        answer = await reader.readline()
    assert answer.startswith((b"HTTP/1.1 2", b"HTTP/1.1 4")), answer
    writer.close()


@pytest.mark.parametrize(
    "text",
    [
        '{"recipe": {"name": "\\ud800"}}',
        '{"recipe": {"\\udfff": 1}}',
        '{"recipe_name": "\\ud800"}',
        '{"recipe": {"seed": ' + "9" * 5000 + "}}",
        '{"recipe": {"seed": 1e400}}',
        '{"recipe": {"seed": NaN}}',
        '{"recipe": {"seed": -0.0}}',
        '{"recipe": {}, "overrides": {"reward.functions.٣": 1}}',
        '{"recipe": {"reward": {"functions": []}}, "overrides": '
        '{"reward.functions.' + "9" * 150 + '": 1}}',
        '{"recipe": {}, "overrides": {"": 1, ".": 1, "..": 1, "\\u0000": 1, "a.\\u202e": 1}}',
        '{"recipe": ' + '{"a":' * 150 + "1" + "}" * 150 + "}",
        '{"recipe": ' + "[" * 9000 + "]" * 9000 + "}",
        "\ufeff{}",
        '"\ud83d"'.encode("utf-16", "surrogatepass").decode("latin-1"),
    ],
)
async def test_json_that_no_recipe_is_made_of(client: Client, text: str) -> None:
    for path in ("/v1/recipes/check", "/v1/runs"):
        headers = {"Content-Type": "application/json"}
        assert await status(client, "POST", path, data=text.encode(), headers=headers) in (
            400,
            413,
            422,
        )


# --- unused connections
# -------------------------------------------------------------------------------------------------


class Kept:
    """In the place of the interface to a run: closing it takes a while, in which others have their
    turn."""

    closed = 0

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.closed += 1


class Known:
    async def get(self, run: str) -> Any:
        return types.SimpleNamespace(recipe={}, state="finished")


async def test_two_requests_may_close_idle_sessions_at_once(tmp_path: Path) -> None:
    sessions = ExternalSessions(tmp_path, Known())  # type: ignore[arg-type]
    run_sessions = {run: ExternalSession(Kept(), tmp_path) for run in ("a", "b", "c", "used")}  # type: ignore[arg-type]
    sessions._runs = dict(run_sessions)
    async with sessions.run("used"):
        for session in run_sessions.values():
            session.used = time.monotonic() - sessions_module.IDLE_SECONDS - 1
        await asyncio.gather(*(sessions._close_idle() for _ in range(3)))
    assert {run: session.external.closed for run, session in run_sessions.items()} == {
        "a": 1,
        "b": 1,
        "c": 1,
        "used": 0,
    }  # type: ignore[attr-defined]
    assert set(sessions._runs) == {"used"}, "a session that a request is about stays open"
    assert not run_sessions["used"].users


def test_a_sample_whose_text_is_no_text_is_shown() -> None:
    from api.schemas.samples import SampleView

    required = {
        "group": 0,
        "place": 0,
        "step": 0,
        "prompt": "a\ud800",
        "response": "b",
        "reward": 0.0,
        "rewards": {},
    }
    defaults = {"advantage": None, "tokens": 1, "versions": [], "staleness": 0, "truncated": False}
    assert (
        json.loads(SampleView.model_validate({**required, **defaults}).model_dump_json())["prompt"]
        == "a?"
    )
