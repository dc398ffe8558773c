"""Who may ask: each test mounts the attack that the rule is there against."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import secrets
import types
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio as redis
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel
from typer.testing import CliRunner
from yarl import URL

from api.cli.common.exit_codes import BAD_INPUT
from api.cli.main import app
from api.server.access import limits
from api.server.access.limits import Rates, client_of
from api.server.access.settings import Settings
from api.server.access.tokens import KEY, SCOPES, Scope, TokenRevoked, Tokens
from api.server.app import build_app, listen
from api.server.service.operations import operation
from api.server.service.service import Service
from orchestration.state.registry import Registry
from pipeline.index.client import IndexUnreachable
from tests.api.serving import bearer, serving


class Done(BaseModel):
    by: str


@operation("GET", "/look", scope="read", summary="Look", tag="t")
async def look(service: Service) -> Done:
    return Done(by="")


@operation("POST", "/act", scope="run", summary="Act", tag="t")
async def act(service: Service) -> Done:
    return Done(by="")


@operation("DELETE", "/all", scope="admin", summary="Delete", tag="t")
async def delete_all(service: Service) -> Done:
    return Done(by="")


MODULE = types.ModuleType("acts")
MODULE.__dict__.update(look=look, act=act, delete_all=delete_all)
CALLS = {"read": ("GET", "/look"), "run": ("POST", "/act"), "admin": ("DELETE", "/all")}


# --- tokens
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", SCOPES)
async def test_a_token_opens_what_its_scope_says_and_no_more(
    index_url: str, tmp_path: Path, scope: Scope
) -> None:
    tokens = Tokens(index_url)
    _, text = await tokens.create("someone", scope)
    await tokens.close()
    async with serving(index_url, tmp_path, modules=(MODULE,), no_token=False) as client:
        for needed, (method, path) in CALLS.items():
            response = await client.request(method, path, headers=bearer(text))
            assert response.status == (200 if SCOPES.index(needed) <= SCOPES.index(scope) else 403)


async def test_without_a_valid_token_nothing_is_done(index_url: str, tmp_path: Path) -> None:
    tokens = Tokens(index_url)
    token, text = await tokens.create("someone", "admin")
    expired = (await tokens.create("gone", "admin", seconds=1e-6))[1]
    revoked_token, revoked = await tokens.create("revoked", "admin")
    assert await tokens.revoke(revoked_token.id)
    assert not await tokens.revoke(revoked_token.id)
    await tokens.close()
    forged = f"adock_{token.id}_{'A' * 43}"
    attempts = [
        "",
        "Bearer",
        f"Bearer {forged}",
        f"Bearer {expired}",
        f"Bearer {revoked}",
        f"Basic {text}",
    ]
    attempts += [f"Bearer {text[:-1]}", f"Bearer {text}x", "Bearer adock_*_" + "A" * 43]
    async with serving(index_url, tmp_path, modules=(MODULE,), no_token=False) as client:
        for attempt in attempts:
            response = await client.post(
                "/act", headers={"Authorization": attempt} if attempt else {}
            )
            assert response.status == 401, attempt
            assert response.headers["WWW-Authenticate"].startswith("Bearer")
            assert text[20:] not in await response.text()
            assert forged not in await response.text()
        assert (await client.post("/act", headers=bearer(text))).status == 200
        assert (await client.get("/healthz")).status == 200  # what is open stays open


async def test_a_wrong_token_is_refused_where_none_is_needed(
    index_url: str, tmp_path: Path
) -> None:
    async with serving(index_url, tmp_path, modules=(MODULE,)) as client:
        assert (await client.post("/act")).status == 200
        assert (await client.post("/act", headers=bearer("wrong"))).status == 401


@pytest.mark.parametrize(
    ("settings", "needed"),
    [
        ({}, True),
        ({"no_token": True}, False),
        ({"host": "127.9.9.9", "no_token": True}, False),
        ({"host": "::1", "no_token": True}, False),
        ({"host": "0.0.0.0"}, True),
        ({"hosts": ("dock.example.org",)}, True),
    ],
)
def test_a_token_is_needed_unless_the_operator_wants_none(
    settings: dict[str, Any], needed: bool
) -> None:
    assert Settings(data=Path(), **settings).tokens_needed is needed


@pytest.mark.parametrize(
    "settings",
    [
        {"host": "0.0.0.0"},
        {"host": "::"},
        {"host": "10.0.0.7"},
        {"host": "127.0.0.1.example.org"},
        {"hosts": ("dock.example.org",)},
    ],
)
def test_a_server_that_others_can_reach_never_goes_without(settings: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError,
        match=r"no_token: .*runs code as its user; leave --no-token "
        r"out",
    ):
        Settings(data=Path(), no_token=True, **settings)


async def test_the_index_holds_nothing_that_a_token_could_be_made_of(index_url: str) -> None:
    tokens = Tokens(index_url)
    raw = redis.from_url(index_url)
    token, text = await tokens.create("at rest", "run")
    kept = await raw.hget(KEY, token.id)
    secret = text.rpartition(f"{token.id}_")[2]
    assert len(secret) == 43  # 256 bits
    assert secret.encode() not in kept
    assert token in await tokens.list()
    assert secret not in repr(await tokens.list())
    stolen = json.loads(kept)["sha256"]
    assert await tokens.find(f"adock_{token.id}_{stolen[:43]}") is None
    await tokens.close()
    await raw.aclose()


async def test_a_token_that_was_made_elsewhere_opens_what_it_is_adopted_for(index_url: str) -> None:
    tokens = Tokens(index_url)
    text = f"adock_{secrets.token_hex(6)}_{secrets.token_urlsafe(32)}"
    assert await tokens.find(text) is None
    for _ in range(2):
        adopted = await tokens.adopt(text, "deployment", "read")
    assert await tokens.find(text) == adopted
    assert [token.name for token in await tokens.list()].count("deployment") == 1
    assert await tokens.find(text[:-1] + ("A" if text[-1] != "A" else "B")) is None
    for wrong in ("", "opensesame", text[:-1], f"{text}x"):
        with pytest.raises(ValueError, match="is not one"):
            await tokens.adopt(wrong, "deployment", "read")
    await tokens.revoke(adopted.id)
    with pytest.raises(TokenRevoked, match=adopted.id):
        await tokens.adopt(text, "deployment", "read")
    assert await tokens.find(text) is None
    await tokens.close()


def test_a_deployment_adopts_its_token_each_time_it_begins_until_it_is_revoked(
    index_url: str, tmp_path: Path
) -> None:
    """The command that the compose stack runs before its API, with the exit code that lets the API
    begin or not."""
    file = tmp_path / "token"
    identity = secrets.token_hex(6)
    text = f"adock_{identity}_{secrets.token_urlsafe(32)}"

    def token(*arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["token", *arguments, "--index", index_url])
        assert text[-43:] not in done.output
        return done.exit_code, done.stdout + done.stderr

    def known() -> list[str]:
        return [
            each["name"]
            for each in json.loads(token("list", "--json")[1])
            if each["id"] == identity
        ]

    adopt = ("adopt", "stack", "--scope", "admin", "--file", str(file))
    assert token(*adopt)[0] == BAD_INPUT  # no such file
    file.touch(mode=0o644)
    assert f"can be read by others (mode 644); run `chmod 600 {file}`" in token(*adopt)[1]
    file.chmod(0o600)
    file.write_text("opensesame\n")
    code, output = token(*adopt)
    assert (code, "opensesame" in output, "is not one; it is adock_" in output) == (
        BAD_INPUT,
        False,
        True,
    )
    file.write_text(f"{text}\n")
    for _ in range(2):
        assert token(*adopt) == (0, f"id {identity}, scope admin\n")
        assert known() == ["stack"]
    assert token("revoke", identity)[0] == 0
    code, output = token(*adopt)
    assert (
        code,
        f"{identity} was revoked" in output,
        f"make another one, and put it into {file}" in output,
    ) == (
        1,
        True,
        True,
    )
    assert known() == []


@pytest.mark.parametrize(
    "wrong", [{"name": ""}, {"name": "a\nb"}, {"scope": "root"}, {"seconds": 0.0}]
)
async def test_a_token_is_made_of_sound_things(index_url: str, wrong: dict[str, Any]) -> None:
    tokens = Tokens(index_url)
    with pytest.raises(ValueError, match=next(iter(wrong)).replace("seconds", "expires")):
        await tokens.create(**{"name": "n", "scope": "run", **wrong})
    await tokens.close()


async def test_an_index_that_is_not_there_is_said_without_its_password(tmp_path: Path) -> None:
    url = "redis://user:opensesame@127.0.0.1:9"
    tokens = Tokens(url)
    with pytest.raises(IndexUnreachable) as raised:
        await tokens.list()
    assert "opensesame" not in str(raised.value)
    await tokens.close()
    async with serving(url, tmp_path) as client:
        response = await client.get("/readyz")
        assert (response.status, "Retry-After" in response.headers) == (503, True)
        assert "opensesame" not in await response.text()
        assert (await client.get("/healthz")).status == 200


# --- from where
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "[", "10.0.0.1"]
)
async def test_a_page_that_rebinds_its_name_to_loopback_is_refused(
    index_url: str, tmp_path: Path, host: str
) -> None:
    async with serving(index_url, tmp_path, modules=(MODULE,)) as client:
        for path in ("/look", "/healthz", "/"):
            assert (await client.get(path, headers={"Host": host})).status in (400, 403)
        assert (await client.get("/look", headers={"Host": "localhost"})).status == 200


async def test_a_request_that_another_site_sends_is_refused(index_url: str, tmp_path: Path) -> None:
    async with serving(index_url, tmp_path, modules=(MODULE,)) as client:
        own = f"http://{client.host}:{client.port}"
        for origin in (
            "https://evil.example",
            "null",
            f"http://{client.host}:{(client.port or 0) - 1}",
            "",
            "http://[",
        ):
            assert (await client.post("/act", headers={"Origin": origin})).status == 403, origin
        assert (await client.post("/act", headers={"Sec-Fetch-Site": "cross-site"})).status == 403
        assert (await client.get("/look", headers={"Sec-Fetch-Site": "same-site"})).status == 403
        assert (
            await client.post("/act", headers={"Origin": own, "Sec-Fetch-Site": "same-origin"})
        ).status == 200
        followed = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
        assert (await client.get("/healthz", headers=followed)).status == 200
        assert (await client.post("/act", headers=followed)).status == 403


async def test_no_other_site_is_let_in_by_cors(index_url: str, tmp_path: Path) -> None:
    async with serving(index_url, tmp_path, modules=(MODULE,)) as client:
        asked = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
        response = await client.options("/act", headers=asked)
        assert response.status in (403, 405)
        assert not [name for name in response.headers if name.lower().startswith("access-control")]


async def test_every_answer_keeps_browsers_strict(index_url: str, tmp_path: Path) -> None:
    async with serving(index_url, tmp_path, modules=(MODULE,)) as client:
        for path in ("/docs", "/openapi.json", "/look", "/nothing"):
            headers = (await client.get(path)).headers
            assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
            assert "default-src 'self'" in headers["Content-Security-Policy"]
            assert "unsafe" not in headers["Content-Security-Policy"]
            assert (headers["X-Content-Type-Options"], headers["Referrer-Policy"]) == (
                "nosniff",
                "no-referrer",
            )
            assert "Server" not in headers


# --- how much
# --------------------------------------------------------------------------------------------------


async def test_too_many_requests_are_put_off(index_url: str, tmp_path: Path) -> None:
    async with serving(index_url, tmp_path, modules=(MODULE,), rate=0.5, burst=3) as client:
        answers = [await client.get("/look") for _ in range(5)]
        assert [answer.status for answer in answers] == [200] * 3 + [429] * 2
        assert answers[-1].headers["Retry-After"] == "2"


async def test_a_client_that_never_ends_its_headers_is_cut_off(
    index_url: str, tmp_path: Path
) -> None:
    settings = Settings(data=tmp_path, port=0, idle_seconds=0.3)
    registry = Registry(index_url)
    runner, url = await listen(build_app(settings, registry), settings)
    reader, writer = await asyncio.open_connection("127.0.0.1", URL(url).port)
    writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
    async with asyncio.timeout(10):
        assert await reader.read() == b""
    writer.close()
    await runner.cleanup()
    await registry.close()


async def test_a_request_that_is_no_http_is_not_logged_with_its_token(
    index_url: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    settings = Settings(data=tmp_path, port=0)
    registry = Registry(index_url)
    runner, url = await listen(build_app(settings, registry), settings)
    for header in (
        b"Authorization: Bearer hunter2\x00",
        b"Authorization Bearer hunter2",
        b"X: hunter2" + b"a" * 10_000,
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", URL(url).port)
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n" + header + b"\r\n\r\n")
        assert b" 400 " in await reader.readline()
        writer.close()
    await runner.cleanup()
    await registry.close()
    assert "hunter2" not in caplog.text
    assert "hunter2" not in "".join(capfd.readouterr())


@given(
    rate=st.floats(0.1, 100),
    burst=st.integers(1, 20),
    gaps=st.lists(st.floats(0, 5), min_size=1, max_size=60),
)
def test_no_client_gets_more_than_its_rate_and_who_waits_as_told_gets_through(
    rate: float, burst: int, gaps: list[float]
) -> None:
    rates = Rates(rate, burst)
    now = 0.0
    passed = 0
    for gap in gaps:
        now += gap
        wait = rates.wait("a", now)
        passed += wait == 0
        assert passed <= burst + rate * now + 1e-6
        if wait:
            now += wait + 1e-6
            assert rates.wait("a", now) == 0
            passed += 1
    assert rates.wait("b", now) == 0  # another client is not made to wait


def test_the_rates_of_many_clients_take_bounded_room() -> None:
    rates = Rates(1.0, 1)
    for client in range(30_000):
        rates.wait(str(client), 0.0)
    assert len(rates._buckets) <= 10_000


def test_a_full_table_of_rates_forgets_who_was_silent_for_longest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A crowd of addresses gives no client more than its rate: the one that asks now stays
    known."""
    monkeypatch.setattr(limits, "CLIENTS", 2)
    rates = Rates(1.0, 1)
    assert [rates.wait(client, 0.0) for client in ("a", "b", "a", "c")] == [0.0, 0.0, 1.0, 0.0]
    assert [rates.wait(client, 0.0) for client in ("c", "a")] == [1.0, 1.0]
    assert rates.wait("b", 0.0) == 0.0, "it was silent for longest"


@given(
    network=st.integers(0, 2**64 - 1),
    hosts=st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)),
)
def test_all_addresses_of_one_ipv6_network_are_one_client(
    network: int, hosts: tuple[int, int]
) -> None:
    """A customer gets 2**64 of them, and would have as many rates."""
    network |= 0x2000 << 48  # public addresses
    first, second = [str(ipaddress.IPv6Address(network << 64 | host)) for host in hosts]
    assert client_of(first) == client_of(second)
    assert client_of(str(ipaddress.IPv6Address((network ^ 1) << 64 | hosts[0]))) != client_of(first)


@pytest.mark.parametrize(
    ("address", "client"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("::ffff:10.0.0.7", "10.0.0.7"),
        ("2001:db8::1:2", "2001:db8::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_the_client_of_an_address(address: str, client: str) -> None:
    assert client_of(address) == client
