"""One client of a service does not stop another one: what strangers send is computed in processes
with limits, in turns.

Each test is the attack itself, bounded in number and time. What others get meanwhile is judged by
order and by the processor time of the event loop's turns, not by seconds of a busy machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from transformers import PreTrainedTokenizerFast

from api.policy.handler import respond
from api.schemas.completions import REQUESTS
from api.server.service.service import SERVICE
from orchestration.policy import texts
from orchestration.policy.rows import Rows, spare_of
from orchestration.processes.confined import Turns, TurnsFull
from tests.api.policy.answers import (
    CHAT,
    COMPLETIONS,
    Client,
    byte_model,
    byte_tokenizer,
    checkpoint,
)
from tests.api.served import Served
from tests.api.serving import bearer, problem, serving
from tests.api.test_attacks import alive, until
from tests.api.watchdog import _REQUEST, Watchdog
from tests.orchestration.runs import MOCK

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
BOMB = "{{ 'x' * 10 ** 11 }}"
# a token of so many characters: its context of 256 tokens may take a prompt of 900 kB
LONGEST = "Ġ" * 4000


def tokenizer(template: str = "") -> PreTrainedTokenizerFast:
    tiny_tokenizer = byte_tokenizer()
    tiny_tokenizer.add_tokens([LONGEST])
    if template:
        tiny_tokenizer.chat_template = template
    return tiny_tokenizer


@contextlib.contextmanager
def unheld(limit: float = 1.0) -> Iterator[None]:
    """No turn of the loop may take more than ``limit`` seconds of the processor meanwhile: what
    held it took five."""
    watchdog = Watchdog()
    marker = _REQUEST.set("a prompt")
    with watchdog.watching():
        yield
    _REQUEST.reset(marker)
    held = [float(hold.split()[-2]) / 1000 for hold in watchdog.holds]
    assert max(held, default=0.0) < limit, watchdog.holds


# ── texts of a policy ──


async def test_a_prompt_of_900_kB_does_not_hold_the_loop(tmp_path: Path) -> None:
    with checkpoint(tmp_path, byte_model(0), tokenizer()) as client:
        await client.whole(COMPLETIONS, prompt="ab", max_tokens=1)
        with unheld():
            long = asyncio.create_task(client.problem(COMPLETIONS, prompt="ab" * 450_000))
            for _ in range(3):
                await client.whole(COMPLETIONS, prompt="ab", max_tokens=2)
            refused = (await long).details
        assert (refused.status, refused.field) == (400, "prompt")
        assert "900000" in refused.detail


async def test_a_prompt_of_too_many_characters_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts.Texts, "read", None)
    with checkpoint(tmp_path, byte_model(0), byte_tokenizer()) as client:
        refused = (await client.problem(COMPLETIONS, prompt="ab" * 450_000)).details
        assert (refused.field, refused.value) == ("prompt", 900_000)
        assert refused.fix is not None
        assert "give at most 1280: the context has 256 tokens" in refused.fix
        chat = await client.problem(CHAT, messages=[{"role": "user", "content": "ab" * 450_000}])
        assert (chat.details.field, chat.details.value) == ("messages", 900_000)


async def test_an_endless_template_is_ended_with_its_client_and_delays_no_other(
    tmp_path: Path,
) -> None:
    with checkpoint(tmp_path, byte_model(0), tokenizer(ENDLESS)) as client:
        confined = client.policies._texts._confined
        asked = client.body(CHAT, {"messages": [{"role": "user", "content": "a"}]})
        endless = asyncio.create_task(asked)
        await until(lambda: any(call.worker for call in confined._calls), 60)
        (pid,) = [call.worker.pid for call in confined._calls if call.worker]
        with unheld():
            await client.whole(COMPLETIONS, prompt="ab", max_tokens=2)
            question = {
                "recipe": (await opened(client)).to_json(),
                "texts": ["ab" * 5000],
                "most": None,
            }
            ((first, *_),) = await client.policies._texts.read(question, "another token")
        assert isinstance(first, int)
        endless.cancel()
        await until(lambda: not alive({pid}))


async def opened(client: Client) -> Any:
    async with client.policies.use(client.model) as policy:
        return policy.recipe


@pytest.mark.parametrize(("template", "says"), [(ENDLESS, "more than 2 s"), (BOMB, "")])
async def test_a_template_without_end_or_measure_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str, says: str
) -> None:
    with checkpoint(tmp_path, byte_model(0), tokenizer()) as client:
        # the process has begun
        await client.whole(CHAT, messages=[{"role": "user", "content": "a"}], max_tokens=1)
    (tmp_path / "other").mkdir()
    monkeypatch.setattr(texts, "SECONDS", 2.0 if template is ENDLESS else 30.0)
    with checkpoint(tmp_path / "other", byte_model(0), tokenizer(template)) as client:
        refused = (await client.problem(CHAT, messages=[{"role": "user", "content": "a"}])).details
        assert (refused.status, refused.field) == (400, "messages")
        assert says in refused.detail


@pytest.mark.parametrize(
    ("path", "request_", "field"),
    [
        (COMPLETIONS, {"prompt": "a", "n": 128, "max_tokens": 250, "logprobs": 20}, "logprobs"),
        (CHAT, {"n": 128, "max_tokens": 250, "logprobs": True, "top_logprobs": 20}, "top_logprobs"),
        (COMPLETIONS, {"prompt": ["a"] * 129}, "n"),
    ],
)
async def test_an_answer_that_is_too_large_is_refused(
    tmp_path: Path, path: str, request_: dict[str, Any], field: str
) -> None:
    if path == CHAT:
        request_ = {"messages": [{"role": "user", "content": "a"}], **request_}
    with checkpoint(tmp_path, byte_model(0), tokenizer()) as client:
        refused = (await client.problem(path, **request_)).details
        assert (refused.status, refused.field) == (400, field)
        assert "at most" in str(refused.fix)


# ── turns ──


async def test_turns_go_round_the_owners_and_each_has_one() -> None:
    turns = Turns(2, waiting=100)
    order = list[str]()
    running = set[str]()
    most = 0

    async def ask(owner: str) -> None:
        nonlocal most
        await turns.take(owner)
        assert owner not in running
        running.add(owner)
        most = max(most, len(running))
        order.append(owner)
        await asyncio.sleep(0.001)
        running.discard(owner)
        turns.give_back(owner)

    await asyncio.gather(*(ask("a") for _ in range(20)), *(ask("b") for _ in range(3)), ask("c"))
    assert most == 2
    assert order.index("c") <= 4, "it waits for one turn of each of the others"
    assert len(order) == 24


async def test_a_turn_that_is_given_up_is_the_next_ones() -> None:
    turns = Turns(1, waiting=2)
    await turns.take("a")
    waiting = [asyncio.create_task(turns.take(owner)) for owner in ("b", "c", "c")]
    await asyncio.sleep(0)
    with pytest.raises(TurnsFull, match="2 requests of this token wait"):
        await turns.take("c")
    waiting[0].cancel()
    await asyncio.wait([waiting[0]])
    turns.give_back("a")
    await waiting[1]
    turns.give_back("c")
    await waiting[2]


# ── checks ──


@pytest.fixture
async def service(
    index_url: str, tmp_path: Path
) -> AsyncGenerator[tuple[Any, dict[str, str], dict[str, str]], None]:
    """A server with two tokens of scope `read`, and a root for models and templates."""
    from api.server.service.recipe_checks import Checks

    (tmp_path / "root").mkdir()
    async with serving(index_url, tmp_path, no_token=False, roots=(tmp_path / "root",)) as client:
        state = client.app[SERVICE]  # type: ignore[union-attr]
        state.checks = checks = Checks()
        tokens = [await state.tokens.create(name, "read") for name in ("ada", "eve")]
        yield client, *(bearer(secret) for _, secret in tokens)
        checks.close()


def templated(folder: Path, name: str, template: str) -> dict[str, Any]:
    path = folder / "root" / f"{name}.jinja"
    path.write_text(template)
    return {"recipe": {**MOCK, "prompts": {**MOCK["prompts"], "chat_template": str(path)}}}


async def test_one_tokens_endless_checks_leave_the_others_theirs(
    service: Any, tmp_path: Path
) -> None:
    client, ada, eve = service
    checks = client.app[SERVICE].checks
    endless = templated(tmp_path, "endless", ENDLESS)
    asking = [
        asyncio.create_task(client.post("/v1/recipes/check", json=endless, headers=eve))
        for _ in range(6)
    ]
    await until(lambda: any(call.worker for call in checks._calls), 60)
    for _ in range(3):
        assert (
            await client.post("/v1/recipes/check", json={"recipe": MOCK}, headers=ada)
        ).status == 200
    assert len(checks._calls) == 1, "one of its checks is under way"
    (call,) = checks._calls
    pid = call.worker.pid
    for task in asking:
        task.cancel()
    await until(lambda: not alive({pid}))
    assert (
        await client.post("/v1/recipes/check", json={"recipe": MOCK}, headers=eve)
    ).status == 200


async def test_a_check_takes_no_more_memory_than_it_may(service: Any, tmp_path: Path) -> None:
    client, _, eve = service
    checks = client.app[SERVICE].checks
    most = 0
    bomb = templated(
        tmp_path,
        "bomb",
        "{% set ns = namespace(x=['x' * 10**6]) %}{% for a in range(40) %}"
        "{% set ns.x = ns.x + ns.x %}{% set y = ns.x | join %}{% endfor %}",
    )
    asking = asyncio.create_task(client.post("/v1/recipes/check", json=bomb, headers=eve))
    while not asking.done():
        for call in list(checks._calls):
            with contextlib.suppress(psutil.Error, AttributeError):
                most = max(most, psutil.Process(call.worker.pid).memory_info().rss)
        await asyncio.sleep(0.02)
    assert (await problem(await asking, 422))["errors"]
    assert most < 3 << 30


# ── rows of an engine ──


def test_a_row_of_another_token_starts_at_once_and_one_token_alone_has_all_rows() -> None:
    rows = Rows(8, spare_of(8))
    with rows.claim("eve", 16) as first, rows.claim("eve", 16) as second:
        assert (first.running, second.running) == (8, 1), "a request without rows has a spare one"
        with rows.claim("ada", 1) as other:
            assert (other.running, rows.running) == (1, 10), "and another token has the last one"
            first.end()
            assert (first.running, second.running) == (7, 1), "eight of the engine's rows are taken"
        for _ in range(30):
            (first if first.running >= second.running else second).end()
            assert rows.running >= min(8, first.waiting + second.waiting), (
                "none is idle while any waits"
            )
    assert (rows.running, rows._of, rows._claims) == (0, {}, {})


def test_free_rows_go_to_the_token_with_the_fewest_then_to_its_request_with_the_fewest() -> None:
    rows = Rows(6)
    with contextlib.ExitStack() as stack:
        eve = [stack.enter_context(rows.claim("eve", 20)) for _ in range(4)]
        ada = [stack.enter_context(rows.claim("ada", 2)) for _ in range(2)]
        assert [claim.running for claim in (*eve, *ada)] == [6, 0, 0, 0, 0, 0]
        for _ in range(3):
            eve[0].end()
        assert [claim.running for claim in (*eve, *ada)] == [3, 0, 0, 0, 2, 1]
        eve[0].end()
        assert [claim.running for claim in (*eve, *ada)] == [2, 1, 0, 0, 2, 1], (
            "both tokens have three"
        )
        ada[0].end(2)
        assert sum(claim.running for claim in ada) == 2
        assert [claim.running for claim in eve] == [2, 1, 1, 0]


async def test_eight_tokens_beside_four_streams_take_about_as_many_steps(tmp_path: Path) -> None:
    """Steps of the engine are counted by the tokens of one row that decodes all the time."""
    with checkpoint(tmp_path, byte_model(0, flat=0.0), tokenizer()) as client:

        async def ask(owner: str, counts: dict[int, int], **asked: Any) -> None:
            body = {"model": client.model, "prompt": "ab", "stream": True, **asked}
            request = REQUESTS[COMPLETIONS].model_validate_json(json.dumps(body))
            async for part in respond(client.policies, request, owner):
                for choice in (
                    json.loads(part.removeprefix(b"data: "))["choices"]
                    if b"choices" in part
                    else ()
                ):
                    counts[choice["index"]] = counts.get(choice["index"], 0) + sum(
                        n for _, n in choice["versions"]
                    )

        await ask("ada", {}, max_tokens=1)
        most = (await opened(client)).rollout.max_rows
        streams: list[dict[int, int]] = [{} for _ in range(4)]
        asking = [
            asyncio.create_task(ask("eve", counts, max_tokens=240, n=most // 2))
            for counts in streams
        ]
        await until(lambda: max(streams[0].values(), default=0) > 3, 60)
        before = dict(streams[0])
        await ask("ada", other := {}, max_tokens=8, temperature=0)
        steps = max(count - before.get(place, 0) for place, count in streams[0].items())
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        assert sum(other.values()) <= 8
        assert steps <= 4 * 8, "and not those of whole responses"


# ── a real server: what-if, streams, its end ──


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    server = Served(tmp_path_factory.mktemp("tenants") / "data", "--runs", "0")
    server.start()
    yield server
    if server.process is not None and server.process.poll() is None:
        server.end()


async def run_of(served: Served, session: aiohttp.ClientSession, megabytes: int = 0) -> str:
    """A run that waits, with a recipe in its folder, and so many events of the past."""
    async with session.post(f"{served.url}/v1/runs", json={"recipe": MOCK}) as response:
        run = await response.json()
    folder = served.data / "runs" / run["id"]
    folder.mkdir(parents=True)
    async with session.post(f"{served.url}/v1/recipes/check", json={"recipe": MOCK}) as response:
        (folder / "recipe.json").write_text(json.dumps((await response.json())["recipe"]))
    numbers = ", ".join(f'"number{at}": 0.5' for at in range(40))
    with (folder / "metrics.jsonl").open("w") as file:
        for at in range(megabytes * 1400):
            file.write(
                f'{{"id": "{1000 + at}-0", "time": 1.0, "kind": "ledger", "data": {{{numbers}}}}}\n'
            )
    return str(run["id"])


def checkers(served: Served) -> list[psutil.Process]:
    assert served.process is not None
    children = psutil.Process(served.process.pid).children()
    return [child for child in children if "api.server.service.check_worker" in child.cmdline()]


def busy(served: Served) -> set[int]:
    return {child.pid for child in checkers(served) if child.cpu_percent(0.2) > 5}


async def test_a_what_if_has_bounds_and_ends_with_its_client(served: Served) -> None:
    async with aiohttp.ClientSession(headers=served.headers) as session:
        run = await run_of(served, session, 60)
        url = f"{served.url}/v1/runs/{run}/what-if"
        async with session.post(url, json={"overrides": {"rollout.workers": 10_000}}) as response:
            refused = await response.json(content_type=None)
            assert (response.status, refused["field"], refused["value"]) == (
                422,
                "rollout.workers",
                10_000,
            )
            assert refused["fix"] == "give at most 1000"
        asking = [asyncio.create_task(session.post(url, json={"overrides": {}})) for _ in range(12)]
        await until(lambda: bool(busy(served)), 60)
        computing = busy(served)
        assert len(computing) <= 1, "one of one token at a time"
        for path in ("/healthz", "/v1/runs", "/v1/recipes"):
            async with session.get(
                served.url + path, timeout=aiohttp.ClientTimeout(60)
            ) as response:
                assert response.status == 200
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await until(lambda: not alive(computing), 60)
        await until(lambda: not busy(served), 60)


async def test_unread_streams_hold_little_memory_and_are_all_ended(served: Served) -> None:
    assert served.process is not None
    server = psutil.Process(served.process.pid)
    async with aiohttp.ClientSession(headers=served.headers) as session:
        run = await run_of(served, session, 4)
        before = server.memory_info().rss
        descriptors = server.num_fds()
        sockets = []
        for _ in range(300):
            _, writer = await asyncio.open_connection("127.0.0.1", served.port, limit=1024)
            writer.transport.pause_reading()
            head = f"GET /v1/runs/{run}/metrics/stream HTTP/1.1\r\nHost: localhost\r\n"
            writer.write(f"{head}Authorization: Bearer {served.token}\r\n\r\n".encode())
            sockets.append(writer)
        await until(lambda: server.num_fds() >= descriptors + 300, 60)
        most = 0
        for _ in range(10):
            async with session.get(f"{served.url}/v1/runs") as response:
                assert response.status == 200
            most = max(most, server.memory_info().rss - before)
            await asyncio.sleep(0.3)
        assert most < 60 << 20
        for writer in sockets:
            writer.transport.abort()

        async def readers() -> float:
            async with session.get(f"{served.url}/metrics") as response:
                (line,) = [
                    row
                    for row in (await response.text()).splitlines()
                    if row.startswith("asyncdock_stream_readers ")
                ]
                return float(line.split()[1])

        async with asyncio.timeout(90):
            while await readers():  # noqa: ASYNC110
                await asyncio.sleep(0.5)


async def test_a_server_ends_while_a_what_if_computes(served: Served) -> None:
    async with aiohttp.ClientSession(headers=served.headers) as session:
        run = await run_of(served, session, 60)
        url = f"{served.url}/v1/runs/{run}/what-if"
        asking = [asyncio.create_task(session.post(url, json={"overrides": {}})) for _ in range(12)]
        await until(lambda: bool(busy(served)), 60)
        pids = {child.pid for child in checkers(served)}
        began = time.monotonic()
        assert await asyncio.to_thread(served.stop, signal.SIGTERM) == 0
        assert time.monotonic() - began < 20
        assert not alive(pids)
        await asyncio.gather(*asking, return_exceptions=True)
    served.start()
