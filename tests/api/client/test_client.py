"""The client: every fault of a network or a service is either mended unseen, or one of its own
exceptions."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import json
import random
import ssl
import subprocess
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from api.client import ApiProblem, Client, ServiceError, SyncClient, Unreachable, transport
from api.client import client as client_module
from api.client.errors import NotAllowed, NotAsyncDock, NotFound, WrongInput, WrongState
from api.client.transport import Message, SseParser
from tests.api.faulty import RUN, Event, Service, Stream, busy, lost, problem, run_view
from tests.servers import self_signed

SCRIPT = [
    Event(f"{1000 + at // 3}-{at % 3}", "step", {"time": 1.5 + at, "step": at, "text": "é\n: ü"})
    for at in range(12)
]


@pytest.fixture
async def service(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Service]:
    monkeypatch.setattr(transport, "FIRST_WAIT", 0.001)
    async with asyncio.timeout(60), Service(SCRIPT) as service:
        yield service


@pytest.fixture
async def client(service: Service) -> AsyncIterator[Client]:
    async with Client(service.url, patience=10) as client:
        yield client


# --- retries
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault", [lost, busy(503), busy(429), busy(503, "0")], ids=["lost", "503", "429", "after"]
)
async def test_what_passes_is_tried_again(service: Service, client: Client, fault: Any) -> None:
    failures: list[ServiceError] = []
    client.on_retry = lambda failure, seconds: failures.append(failure)
    service.faults.extend([fault, fault, None])
    assert (await client.run(RUN)).reward == 0.5
    assert len(service.requests) == 3
    # aiohttp itself reopens a kept connection, once
    assert len(failures) in ((1, 2) if fault is lost else (2,))


async def test_retry_after_is_the_least_wait(service: Service, client: Client) -> None:
    service.faults.append(busy(429, "2"))
    waits: list[float] = []
    client.patience = 1.0
    client.on_retry = lambda failure, seconds: waits.append(seconds)
    # it may not wait for so long, so it does not begin to
    with pytest.raises(ApiProblem) as refused:
        await client.run(RUN)
    assert refused.value.status == 429
    assert not waits
    client.patience = 10.0
    # no whole number, as the header must have: our own wait counts
    service.faults.append(busy(503, "0.2"))
    service.faults.append(busy(503, "1"))
    await client.run(RUN)
    assert waits[0] < 0.1
    assert waits[1] == 1.0


async def test_patience_ends(service: Service, client: Client) -> None:
    service.faults.extend([lost] * 1000)
    client.patience = 0.2
    with pytest.raises(Unreachable, match=service.url):
        await client.run(RUN)
    assert len(service.requests) > 1


async def test_without_patience_there_is_one_attempt(service: Service, client: Client) -> None:
    service.faults.append(lost)
    client.patience = 0
    with pytest.raises(Unreachable):
        await client.pause(RUN)
    assert len(service.requests) == 1


async def test_a_slow_answer_is_given_up(service: Service) -> None:
    silent = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    async with Client(f"http://127.0.0.1:{port}", timeout=0.1, patience=0) as client:
        with pytest.raises(Unreachable, match=r"no answer within 0.1 s"):
            await client.run(RUN)
    silent.close()


async def test_a_submission_whose_answer_is_lost_starts_one_run(
    service: Service, client: Client
) -> None:
    service.late.extend([lost, lost, None])
    run = await client.submit("mock", {"train.steps": 5})
    assert len(service.requests) == 3
    assert [one["id"] for one in service.runs] == [run.id, RUN]
    assert service.bodies == [{"recipe_name": "mock", "overrides": {"train.steps": 5}}] * 3
    again = await client.submit("mock", key="mine")
    assert (await client.submit("mock", key="mine")).id == again.id
    # by itself each is a new one
    assert len({(await client.submit({"name": "x"})).id for _ in range(3)}) == 3


async def test_a_deletion_whose_answer_is_lost_is_done(service: Service, client: Client) -> None:
    service.late.append(lost)
    await client.delete(RUN)
    assert service.runs == []
    with pytest.raises(NotFound):
        await client.delete(RUN)


# --- problems
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, WrongInput),
        (422, WrongInput),
        (401, NotAllowed),
        (403, NotAllowed),
        (404, NotFound),
        (409, WrongState),
    ],
)
async def test_a_refusal_is_not_repeated_and_has_a_type(
    service: Service, client: Client, status: int, kind: type[ApiProblem]
) -> None:
    more = {
        "field": "train.steps",
        "value": 0,
        "fix": "use a value >= 1",
        "type": "urn:asyncdock:recipe",
    }
    service.faults.append(lambda request: problem(status, "is out of range", **more))
    with pytest.raises(kind) as refused:
        await client.submit("mock")
    found = refused.value
    assert (found.status, found.title, found.detail, found.type) == (
        status,
        "Refused",
        "is out of range",
        more["type"],
    )
    assert (found.field, found.value, found.fix) == ("train.steps", 0, "use a value >= 1")
    assert str(found) == "train.steps = 0: is out of range; use a value >= 1"
    assert len(service.requests) == 1


async def test_all_problems_of_a_request_are_reported(service: Service, client: Client) -> None:
    wrong = [
        {"field": "train.steps", "value": 0, "wrong": "is out of range", "fix": "use a value >= 1"},
        {"field": "modle", "wrong": "is not known", "fix": "did you mean 'model'?"},
    ]
    service.faults.append(lambda request: problem(422, "2 problems", errors=wrong))
    with pytest.raises(WrongInput) as refused:
        await client.check("mock")
    assert refused.value.errors == wrong
    assert "train.steps = 0: is out of range; use a value >= 1" in str(refused.value)
    assert "modle: is not known; did you mean 'model'?" in str(refused.value)


async def test_a_foreign_http_server_is_recognized(service: Service, client: Client) -> None:
    page = "<html>It works!</html>"
    service.faults.extend(
        [
            lambda request: web.Response(text=page, content_type="text/html"),
            lambda request: web.json_response({"some": "thing"}),
            lambda request: web.Response(
                status=302, headers={"Location": "https://login.example/"}
            ),
        ]
    )
    for _ in range(3):
        with pytest.raises(NotAsyncDock, match=r"address"):
            await client.run(RUN)
    service.faults.append(
        lambda request: web.Response(status=404, text=page, content_type="text/html")
    )
    with pytest.raises(NotFound, match=r"It works!.*address"):
        await client.run(RUN)
    service.faults.append(lambda request: web.Response(text=page, content_type="text/html"))
    with pytest.raises(NotAsyncDock, match="text/html"):
        await anext(client.events(RUN))


async def test_a_server_without_http_is_recognized() -> None:
    async def shout(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"-ERR unknown command\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(shout, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, Client(f"http://127.0.0.1:{port}", patience=5) as client:
        with pytest.raises(NotAsyncDock, match="does not answer as a web server"):
            await client.run(RUN)


async def test_tls_that_is_not_trusted_is_refused_at_once(tmp_path: Path) -> None:
    self_signed(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    server = await asyncio.start_server(
        lambda reader, writer: writer.close(), "127.0.0.1", 0, ssl=context
    )
    port = server.sockets[0].getsockname()[1]
    async with (
        server,
        asyncio.timeout(10),
        Client(f"https://localhost:{port}", "secret", patience=60) as client,
    ):
        with pytest.raises(Unreachable, match="certificate is not trusted"):
            await client.run(RUN)


async def test_https_to_a_plain_server_names_http(service: Service) -> None:
    async with (
        asyncio.timeout(10),
        Client(service.url.replace("http", "https"), patience=60) as client,
    ):
        with pytest.raises(Unreachable, match="write http://"):
            await client.run(RUN)


async def test_a_token_goes_to_the_service_and_nowhere_else(service: Service) -> None:
    service.token = "adock_1_secret"
    async with Client(service.url, service.token) as client:
        assert (await client.run(RUN)).id == RUN
        assert service.token not in repr(client) + repr(vars(client).get("server"))
        service.faults.append(
            lambda request: web.Response(
                status=307, headers={"Location": service.url + "/elsewhere"}
            )
        )
        with pytest.raises(NotAsyncDock):
            await client.run(RUN)
        assert [request.path for request in service.requests] == [f"/v1/runs/{RUN}"] * 2
    async with Client(service.url, "wrong") as client:
        with pytest.raises(NotAllowed) as refused:
            await client.run(RUN)
        assert "wrong" not in str(refused.value)


@pytest.mark.parametrize(
    "server",
    [
        "",
        "localhost",
        "127.0.0.1:8765",
        "ftp://x",
        "http://",
        "http://x:port",
        "http://a:b@x",
        "http://x/?q",
    ],
)
def test_what_is_no_address_is_refused(server: str) -> None:
    with pytest.raises(ValueError, match=r"^server"):
        Client(server)


@pytest.mark.parametrize("token", ["", "two words", "line\n", "ünïcode"])
def test_what_is_no_token_is_refused_without_repeating_it(token: str) -> None:
    with pytest.raises(ValueError, match=r"^token: is empty") as refused:
        Client("http://x", token)
    assert not token or token not in str(refused.value)


@pytest.mark.parametrize("run", ["", ".", ".."])
async def test_a_run_without_a_name_is_refused(client: Client, run: str) -> None:
    with pytest.raises(ValueError, match="names nothing"):
        await client.run(run)


async def test_a_name_stays_one_part_of_the_path(service: Service, client: Client) -> None:
    with pytest.raises(NotFound):
        await client.run("a/../b?c#d")
    assert service.requests[-1].raw_path == "/v1/runs/a%2F..%2Fb%3Fc%23d"


# --- pages
# --------------------------------------------------------------------------------------------------


async def test_pages_are_read_as_they_are_needed(
    service: Service, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "PAGE", 10)
    service.runs = [
        run_view(f"r-{at}", state="failed" if at % 2 else "running") for at in range(35)
    ]
    assert [run.id async for run in client.runs()] == [f"r-{at}" for at in range(35)]
    assert len(service.requests) == 4
    assert len([run async for run in client.runs(limit=12)]) == 12
    assert [run.id async for run in client.runs(state="failed", limit=2)] == ["r-1", "r-3"]
    service.requests.clear()
    async with contextlib.aclosing(client.runs()) as runs:
        async for _ in runs:
            break
    assert len(service.requests) == 1


# --- parsing
# --------------------------------------------------------------------------------------------------

LINES = st.text(
    st.characters(blacklist_characters="\r\n", blacklist_categories=("Cs",)), max_size=8
)


@given(
    st.lists(
        st.tuples(
            st.integers(1, 99),
            st.sampled_from(["step", "stage"]),
            st.lists(LINES, min_size=1, max_size=3),
        )
    ),
    st.sampled_from(["\n", "\r\n", "\r"]),
    st.integers(0, 2**32),
)
def test_events_are_the_same_wherever_the_bytes_are_cut(
    events: list[tuple[int, str, list[str]]], end: str, seed: int
) -> None:
    text = "".join(
        "".join(
            f"{line}{end}"
            for line in [
                f"id: {number}-0",
                f"event: {kind}",
                *(f"data: {part}" for part in data),
                "",
            ]
        )
        for number, kind, data in events
    )
    raw = (text + f": comment{end}").encode()
    parser = SseParser()
    found = []
    draw = random.Random(seed)
    cuts = sorted({0, len(raw), *(draw.randrange(len(raw) + 1) for _ in range(draw.randrange(30)))})
    for a, b in itertools.pairwise(cuts):
        found += parser.feed(raw[a:b])
    assert found == [Message(f"{number}-0", kind, "\n".join(data)) for number, kind, data in events]


def test_half_an_event_is_none() -> None:
    assert list(SseParser().feed(b"id: 1-0\nevent: step\ndata: {}\n")) == []


# --- streams
# --------------------------------------------------------------------------------------------------

streams = st.builds(
    Stream,
    events=st.integers(0, 4),
    again=st.integers(0, 5),
    half=st.integers(0, 90),
    before=st.sampled_from([b"", b": heartbeat\n\n"]),
    end=st.sampled_from([b"", b'event: dropped\ndata: {"reason": "too slow"}\n\n']),
)
faults = st.sampled_from([lost, busy(503, "0"), busy(429)])


@given(
    st.lists(streams, max_size=6),
    st.lists(st.one_of(st.none(), faults), max_size=6),
    st.integers(0, len(SCRIPT)),
)
@hypothesis_settings(max_examples=60, deadline=None)
def test_no_event_is_lost_and_none_comes_twice(
    plans: list[Stream], broken: list[Any], begin: int
) -> None:
    """Under any behaviour of the connections: half an event, repeated events, dropped, refused."""

    async def read() -> list[int]:
        async with asyncio.timeout(30), Service(SCRIPT) as service, Client(service.url) as client:
            service.streams = deque(plans)
            service.faults = deque(broken)
            after = SCRIPT[begin - 1].id if begin else ""
            return [event.data["step"] async for event in client.events(RUN, after=after)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport, "FIRST_WAIT", 0.0005)
        assert asyncio.run(read()) == list(range(begin, len(SCRIPT)))


async def test_an_event_is_as_it_was_emitted(service: Service, client: Client) -> None:
    first = await anext(client.events(RUN))
    assert (first.id, first.time, first.kind, first.data) == (
        "1000-0",
        1.5,
        "step",
        {"step": 0, "text": "é\n: ü"},
    )


async def test_a_heartbeat_moves_the_place_where_a_stream_goes_on(
    service: Service, client: Client
) -> None:
    service.streams.append(Stream(events=1, end=b": heartbeat\nid: 1002-1\n\n"))
    seen = [event.id async for event in client.events(RUN, kinds=("step", "state"))]
    assert service.requests[0].query["kinds"] == "step,state"
    assert service.requests[1].headers["Last-Event-ID"] == "1002-1"
    assert seen[1] == SCRIPT[8].id


async def test_a_silent_stream_is_opened_again(
    service: Service, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "SILENCE", 0.2)
    service.hold = asyncio.Event()
    failures: list[str] = []

    def again(failure: ServiceError, seconds: float) -> None:
        failures.append(str(failure))
        assert service.hold is not None
        service.hold.set()

    client.on_retry = again
    assert len([event async for event in client.events(RUN)]) == len(SCRIPT)
    assert len(failures) == 1


async def test_a_stream_that_stays_away_ends_the_wait(service: Service, client: Client) -> None:
    service.streams.append(Stream(events=2))
    service.faults.append(None)
    service.faults.extend([lost] * 1000)
    client.patience = 0.2
    events = client.events(RUN)
    assert [(await anext(events)).data["step"] for _ in range(2)] == [0, 1]
    with pytest.raises(Unreachable):
        await anext(events)


async def test_a_run_deleted_while_it_is_watched_is_reported(
    service: Service, client: Client
) -> None:
    service.streams.append(Stream(events=2))
    events = client.events(RUN)
    assert [(await anext(events)).data["step"] for _ in range(2)] == [0, 1]
    service.runs.clear()
    with pytest.raises(NotFound):
        await anext(events)


async def test_leaving_the_loop_ends_the_connection(service: Service, client: Client) -> None:
    service.hold = asyncio.Event()
    async with contextlib.aclosing(client.events(RUN)) as events:
        async for _ in events:
            break
    async with asyncio.timeout(5):
        await service.left.wait()


async def test_waiting_ends_with_the_run(service: Service, client: Client) -> None:
    service.ended = "failed"
    assert (await client.wait_until_ended(RUN)).state == "failed"
    assert (await client.wait_until_ended(RUN)).state == "failed"  # over already


async def test_waiting_has_a_deadline(service: Service, client: Client) -> None:
    service.hold = asyncio.Event()
    with pytest.raises(TimeoutError):
        await client.wait_until_ended(RUN, timeout=0.2)


# --- without asyncio
# --------------------------------------------------------------------------------------------------


def test_both_clients_have_the_same_methods_and_arguments() -> None:
    def methods(kind: type) -> dict[str, list[tuple[str, Any, Any]]]:
        return {
            name: [
                (p.name, p.default, p.annotation)
                for p in inspect.signature(method).parameters.values()
            ]
            for name, method in inspect.getmembers(kind)
            if inspect.isfunction(method) and (not name.startswith("_") or name == "__init__")
        }

    transport = {"send", "send_json", "stream", "not_understood"}
    assert methods(SyncClient) == {
        name: made for name, made in methods(Client).items() if name not in transport
    }


async def test_plain_calls_work_where_a_loop_runs(service: Service) -> None:
    """As in a notebook, whose cells run inside a loop that must not be blocked by our own
    waiting."""

    def cell() -> tuple[str, list[str], list[int], str]:
        with SyncClient(service.url) as client:
            runs = [run.id for run in client.runs()]
            steps = [event.data["step"] for event in client.events(RUN)]
            return client.submit("mock").id, runs, steps, client.wait_until_ended(RUN).state

    service.streams.append(Stream(events=5))
    run, runs, steps, state = await asyncio.to_thread(cell)
    assert (runs, steps, state) == ([RUN], list(range(len(SCRIPT))), "finished")
    assert run == "scripted-0"


async def test_plain_calls_raise_what_the_others_raise_and_leave_no_thread(
    service: Service,
) -> None:
    def cell() -> None:
        client = SyncClient(service.url)
        with client, pytest.raises(NotFound):
            client.run("none")
        events = client.events
        with pytest.raises(RuntimeError, match="closed"):
            client.run(RUN)
        with pytest.raises(RuntimeError, match="closed"):
            next(events(RUN))
        client.close()

    await asyncio.to_thread(cell)
    assert not [thread for thread in threading.enumerate() if thread.name == "asyncdock-client"]


async def test_an_iterator_that_is_left_ends_its_connection(service: Service) -> None:
    service.hold = asyncio.Event()

    def cell() -> None:
        with SyncClient(service.url) as client:
            events = client.events(RUN)
            next(events)
            events.close()

    await asyncio.to_thread(cell)
    async with asyncio.timeout(5):
        await service.left.wait()


def test_in_a_loop_of_its_callers_it_can_be_called_directly() -> None:
    """A notebook's cell: a loop runs in this thread, and the call blocks it, as any call does."""
    code = """
import asyncio
from api.client import SyncClient, Unreachable
async def cell():
    with SyncClient("http://127.0.0.1:9", patience=0) as client:
        try:
            client.run("x")
        except Unreachable as error:
            print("raised:", error.server)
asyncio.run(cell())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "raised: http://127.0.0.1:9\n", done.stderr


def test_the_client_needs_no_torch() -> None:
    heavy = ("torch", "transformers", "redis")
    code = (
        f"from api.client import Client; import sys; print([name for name in {heavy} if name "
        f"in "
        f"sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert json.loads(done.stdout.replace("'", '"')) == []
