"""Requests that are made to cost much: their senders get an answer, and other clients are not
slowed.

That no handler holds the event loop is seen by the watchdog of :func:`tests.api.serving.serving`.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import signal
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from api.server.http.problems import LONGEST_VALUE, shown, without_password
from api.server.service.operations import BODY_VALUES
from api.server.service.recipe_checks import Checks
from api.server.service.service import SERVICE, Service
from tests.api.served import Served
from tests.api.serving import Client, problem, serving
from tests.orchestration.runs import MOCK

# Seconds for an answer beside an attack; with a machine of one's own it is 0.25. That no request
# holds the others up is judged by the processor time of each turn of the loop, see watchdog.py.
PATIENCE = 60.0
ENDLESS = "tests.api.endless:reward"


@pytest.fixture
async def client(index_url: str, tmp_path: Path) -> AsyncGenerator[Client, None]:
    async with serving(index_url, tmp_path, rate=1e6, burst=10**6) as test_client:
        yield test_client


def recipe(**changes: Any) -> dict[str, Any]:
    data = copy.deepcopy(MOCK)
    for key, value in changes.items():
        section, _, name = key.partition("__")
        if name:
            data[section][name] = value
        else:
            data[section] = value
    return data


def named(names: int, length: int = 20) -> dict[str, Any]:
    return recipe(
        reward={"functions": [{"name": f"unknown{at}".ljust(length, "x")} for at in range(names)]}
    )


async def check(client: Client, data: dict[str, Any], **more: Any) -> Any:
    return await client.post("/v1/recipes/check", json={"recipe": data, **more})


@asynccontextmanager
async def undisturbed(client: Client) -> AsyncGenerator[None, None]:
    """Others ask all the time meanwhile; all of them are answered, soon."""
    seconds: list[float] = []
    over = False

    async def others(path: str) -> None:
        while not over:
            began = time.monotonic()
            assert (await client.get(path)).status == 200, path
            seconds.append(time.monotonic() - began)

    asking = [asyncio.create_task(others(path)) for path in ("/readyz", "/v1/runs", "/v1/recipes")]
    yield
    over = True
    await asyncio.gather(*asking)
    assert max(seconds) < PATIENCE


async def until(condition: Callable[[], Any], seconds: float = 20) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # of processes and threads


# --- long texts
# --------------------------------------------------------------------------------------------------


async def test_thousands_of_letters_in_a_path_by_eight_connections(client: Client) -> None:
    async def attack() -> None:
        for _ in range(25):
            await problem(await client.get("/dashboard/" + "a" * 8000), 400)

    async with undisturbed(client):
        await asyncio.gather(*(attack() for _ in range(8)))


async def test_a_name_of_900_kB_in_a_check(client: Client) -> None:
    async with undisturbed(client):
        refusal = await problem(await check(client, recipe(name="n" * 900_000)), 422)
    assert (refusal["field"], "900000 characters" in refusal["detail"]) == ("name", True)


async def test_a_long_value_of_every_key_that_a_request_has(client: Client) -> None:
    """The answer repeats a refused value, shortened: in each place a text of letters, and one of
    URLs without an end."""
    async with undisturbed(client):
        for text in (
            "a" * 900_000,
            "a://" * 225_000,
            "a://b" + "@" * 800_000,
            " " * 900_000,
            "1" + " " * 800_000 + "!",
        ):
            for body in (
                {"recipe_name": text},
                {"recipe": {}, text: 1},
                {"recipe": text},
                {"recipe": {text: 1}},
            ):
                assert (await client.post("/v1/recipes/check", json=body)).status in (404, 413, 422)
            for key in (
                "train.steps",
                "pipeline.arena",
                "rollout.engine",
                "prompts.template",
                "model.source",
                text,
            ):
                answer = await client.post(
                    "/v1/recipes/check", json={"recipe": MOCK, "overrides": {key: text}}
                )
                assert answer.status in (413, 422), key[:99]
                assert len(await answer.text()) < 5000


async def test_texts_up_to_the_bounds_take_no_longer(client: Client) -> None:
    """What is within the bounds reaches every pattern that a recipe meets."""
    async with undisturbed(client):
        for text in (
            "a" * 60_000,
            "1" + " " * 60_000 + "!",
            "a://" * 9_000,
            "{prompt}" + "{a}" * 20_000,
            "x." * 30_000,
        ):
            for key in (
                "pipeline.arena",
                "name",
                "prompts.template",
                "algorithm.name",
                "rollout.device",
                "prompts.task",
            ):
                async with asyncio.timeout(10):
                    await check(client, MOCK, overrides={key: text})


@pytest.mark.parametrize(
    "value",
    ["a" * 10**7, ["a" * 10**7], {"a": list(range(10**6))}, list(range(10**6)), "://" * 10**6],
)
def test_the_repeated_part_of_a_value_is_bounded(value: object) -> None:
    began = time.process_time()
    assert len(json.dumps(shown(value))) < 3 * LONGEST_VALUE
    assert time.process_time() - began < 0.5


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("redis://:hunter2@host", "redis://***@host"),
        (
            "see rediss://ada:hunter2@host/1 and http://host",
            "see rediss://***@host/1 and http://host",
        ),
        ("redis://:hun@ter2@host", "redis://***@host"),
        ("no://thing here @home", "no://thing here @home"),
    ],
)
def test_passwords_of_urls_are_taken_out(text: str, safe: str) -> None:
    assert without_password(text) == safe


def test_a_password_that_is_cut_is_taken_out_too() -> None:
    assert "hunter2" not in json.dumps(shown({"index": "redis://:" + "hunter2" * 10_000 + "@host"}))


async def test_logs_of_long_lines(client: Client) -> None:
    """What workers print may be a model's: megabytes of letters, and of beginnings of URLs."""
    service: Service = client.app[SERVICE]  # type: ignore[union-attr]
    view = await (await client.post("/v1/runs", json={"recipe": MOCK})).json()
    folder = service.folder(await service.registry.get(view["id"])) / "logs"
    folder.mkdir(parents=True)
    for worker, text in (
        ("a-0", "a" * 10**6),
        ("b-0", "a://" * 250_000),
        ("c-0", "see redis://:hunter2@host\n" * 20_000),
    ):
        (folder / f"{worker}.log").write_text(f"{text}\n")
    async with undisturbed(client):
        for query in ("lines=5000", "worker=a-0", "worker=b-0", "worker=c-0&lines=5000"):
            answer = await client.get(f"/v1/runs/{view['id']}/logs?{query}")
            assert answer.status == 200
            assert "hunter2" not in await answer.text()


async def test_a_page_of_the_largest_recipes(client: Client) -> None:
    """Each is as large as a recipe may be; the list brings them all."""
    body = {"recipe": {**MOCK, "description": "é" * 60_000}}
    for _ in range(12):
        assert (await client.post("/v1/runs", json=body)).status == 201
    async with undisturbed(client):
        answer = await client.get("/v1/runs?limit=200")
        assert len((await answer.json())["runs"]) >= 12


# --- many values
# --------------------------------------------------------------------------------------------------


async def test_six_checks_of_8000_unknown_rewards(client: Client) -> None:
    async with undisturbed(client):
        for refusal in await asyncio.gather(*(check(client, named(8000)) for _ in range(6))):
            assert "8000 entries" in (await problem(refusal, 422))["detail"]
    await idle(client)


async def test_as_many_rewards_as_a_recipe_may_have_are_looked_up_at_once(client: Client) -> None:
    async with undisturbed(client), asyncio.timeout(20):
        for answer in await asyncio.gather(*(check(client, named(64)) for _ in range(6))):
            assert len((await problem(answer, 422))["errors"]) == 64
    await idle(client)


async def idle(client: Client) -> None:
    """No check goes on, and no thread or process of one has anything to do."""
    checks = client.app[SERVICE].checks  # type: ignore[union-attr]
    assert not checks._calls
    pids = [checker.pid for checker in checks._free]

    def ticks() -> list[int]:
        return [
            sum(map(int, Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[11:13]))
            for pid in pids
        ]

    await until(
        lambda: all(
            "S" in Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[0] for pid in pids
        )
    )
    before = ticks()
    await asyncio.sleep(0.3)  # in which nothing may be done
    assert ticks() == before


MANY = [
    {f"k{at}": 1 for at in range(9_000)},
    {"recipe": {f"k{at}": 1 for at in range(9_000)}},
    {"recipe": MOCK, "overrides": {f"k{at}": 1 for at in range(9_000)}},
    {"recipe": MOCK, "overrides": {"rollout.stop": ["x"] * 90_000}},
    {"recipe": MOCK, "overrides": {"rollout.mock": {f"k{at}": 1 for at in range(5_000)}}},
    {"recipe": {**MOCK, "a": [[] for _ in range(9_900)]}},
    {"recipe": {**MOCK, **{f"{at:099}": 1 for at in range(500)}}},
    {"recipe": {**MOCK, "train": {f"steps{at}": 1 for at in range(4_000)}}},
]


async def test_many_keys_are_refused_with_a_short_answer(client: Client) -> None:
    async with undisturbed(client):
        for body in MANY:
            refusal = await problem(await client.post("/v1/recipes/check", json=body), 422)
            assert refusal["detail"]
            assert len(refusal["errors"]) <= 100


@pytest.mark.parametrize(
    "text",
    [
        "[" + "[]," * 300_000 + "[]]",
        "[" + "1," * 500_000 + "1]",
        "{" + '"a":1,' * 60_000 + '"b":1}',
    ],
)
async def test_json_of_too_many_values_is_not_read(client: Client, text: str) -> None:
    body = f'{{"recipe": {{"a": {text}}}}}'.encode()
    async with undisturbed(client):
        for _ in range(4):
            answer = await client.post(
                "/v1/recipes/check", data=body, headers={"Content-Type": "application/json"}
            )
            assert "are read" in (await problem(answer, 413))["detail"]
    assert len(body) < 2**20, f"and not because of its size: at most {BODY_VALUES} values"


async def test_thousands_of_query_keys(client: Client) -> None:
    """As many as fit into a request line: each was looked for among all."""
    for query in (
        "a&" * 4000,
        "&".join(f"k{at}=" for at in range(1200)),
        "names=" + "," * 8000,
        "names=&" * 1100,
    ):
        assert (await client.get(f"/v1/runs/nothing/metrics?{query}")).status in (400, 404)


# --- checks that do not end
# ---------------------------------------------------------------------------------------------


def own(client: Client) -> set[int]:
    """The processes of its checks that wait for the next one."""
    return {checker.pid for checker in client.app[SERVICE].checks._free}  # type: ignore[union-attr]


def alive(pids: set[int]) -> set[int]:
    return {pid for pid in pids if Path(f"/proc/{pid}").exists()}


@pytest.fixture
async def endless(
    index_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncGenerator[tuple[Client, Path], None]:
    """A server whose operator allows a reward whose import never ends, and the file that says that
    it has begun."""
    began = tmp_path / "began"
    monkeypatch.setenv("ASYNCDOCK_TEST_BEGAN", str(began))
    async with serving(index_url, tmp_path, allow_rewards={ENDLESS}) as client:
        service = client.app[SERVICE]  # type: ignore[union-attr]
        service.checks = checks = Checks()
        assert (await check(client, MOCK)).status == 200
        yield client, began
        checks.close()


async def test_a_check_that_does_not_end_is_given_up_with_its_process(
    endless: tuple[Client, Path],
) -> None:
    client, began = endless
    before, service = own(client), client.app[SERVICE]  # type: ignore[union-attr]
    service.settings = service.settings.model_copy(update={"handler_seconds": 2.0})
    answer = await check(client, recipe(reward={"functions": [{"name": ENDLESS}]}))
    assert (await problem(answer, 503))["type"] == "urn:asyncdock:timeout"
    assert began.exists()
    await until(lambda: not alive(before))
    service.settings = service.settings.model_copy(update={"handler_seconds": 60.0})
    assert (await check(client, MOCK)).status == 200, "the next one has a process of its own"


async def test_a_check_ends_with_its_client(endless: tuple[Client, Path]) -> None:
    client, began = endless
    before = own(client)
    asking = asyncio.create_task(check(client, recipe(reward={"functions": [{"name": ENDLESS}]})))
    await until(began.exists)
    asking.cancel()
    await until(lambda: not alive(before))
    assert (await check(client, MOCK)).status == 200


async def test_a_process_that_was_killed_while_it_waited_is_replaced(
    endless: tuple[Client, Path],
) -> None:
    client, _ = endless
    for pid in own(client):
        os.kill(pid, signal.SIGKILL)
    assert (await check(client, MOCK)).status == 200


def test_a_server_ends_while_checks_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began = tmp_path / "began"
    monkeypatch.setenv("ASYNCDOCK_TEST_BEGAN", str(began))
    served = Served(tmp_path / "service", "--runs", "0", "--allow-reward", ENDLESS)
    served.start()

    async def attack() -> None:
        import aiohttp

        body = {"recipe": recipe(reward={"functions": [{"name": ENDLESS}]})}
        async with aiohttp.ClientSession(headers=served.headers) as session:
            asking = [
                asyncio.create_task(session.post(f"{served.url}/v1/recipes/check", json=body))
                for _ in range(6)
            ]
            await until(began.exists, 60)
            assert await asyncio.to_thread(served.stop, signal.SIGTERM) == 0
            await asyncio.gather(*asking, return_exceptions=True)

    began_at = time.monotonic()
    asyncio.run(attack())
    served.end()
    assert time.monotonic() - began_at < 60
    for stat in Path("/proc").glob("[0-9]*/environ"):
        try:
            assert (
                str(began).encode() not in stat.read_bytes() or int(stat.parent.name) == os.getpid()
            )
        except OSError:
            continue
