"""What a reader of a run's events relies on: all of them, once, in order, from wherever it asks;
and that another reader which does not read disturbs no other."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, ClientTimeout, web
from hypothesis import given
from hypothesis import strategies as st

from api.telemetry import fanout as stream
from api.telemetry import history as events
from api.telemetry.fanout import NOW, Batch, Ending, EventReader, Fanout, Fanouts
from api.telemetry.history import History, id_at
from orchestration.history.events_file import MetricsFile
from orchestration.history.lines import event_json
from orchestration.history.segments import EventLog
from orchestration.state.registry import RunRecord
from pipeline.data.events import Event, Kind, StateEvent, order
from pipeline.index.client import Index
from pipeline.index.embedded import EmbeddedIndex
from tests.any_event import AnyEvent

RUN = RunRecord("run", "run", "running", "", None, "", 0.0, 0.0, None, "", 1, "", {})


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with EmbeddedIndex(tmp_path_factory.mktemp("index")) as server:
        yield server.url


@dataclass
class Site:
    """A run's index and file, the fanouts, and a server with the one path of their readers."""

    index: Index
    file: Path
    over: Ending | None = None
    delays: list[float] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    most: int = stream.MOST_UNSENT
    base: str = ""

    def __post_init__(self) -> None:
        self.fanouts = Fanouts(
            lambda run: Fanout(
                History(lambda: self.index, self.file), self.ended, observe_delay=self.delays.append
            )
        )

    async def ended(self) -> Ending | None:
        return self.over

    async def emit(self, number: int, kind: Kind = "step", size: int = 0) -> None:
        await self.index.emit(AnyEvent(kind=kind, data={"number": number, "padding": "x" * size}))

    async def finish(self) -> None:
        await self.index.emit(StateEvent(state="finished", reason=""))

    async def handle(self, request: web.Request) -> web.StreamResponse:
        kinds = request.query.get("kinds")
        reader = EventReader(
            request, frozenset(kinds.split(",")) if kinds else None, most=self.most
        )
        await reader.open()
        async with self.fanouts.listening(RUN, reader) as fanout:
            try:
                await fanout.join(
                    reader, request.headers.get("Last-Event-ID", request.query.get("after", "0"))
                )
                if why := await reader.closed:
                    self.dropped.append(why)
            except ConnectionError:
                pass
        return reader.response


@pytest.fixture
async def site(url: str, tmp_path: Path) -> AsyncIterator[Site]:
    index = Index(url, uuid.uuid4().hex[:8])
    made = Site(index, tmp_path / "metrics.jsonl")
    app = web.Application()
    app.router.add_get("/", made.handle)
    runner = web.AppRunner(app, shutdown_timeout=1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.base = f"http://127.0.0.1:{runner.addresses[0][1]}/"
    yield made
    made.fanouts.close()
    await runner.cleanup()
    await index.erase()
    await index.close()


@dataclass(frozen=True)
class Told:
    id: str
    kind: str
    data: dict[str, Any]


async def read(lines: Any) -> AsyncGenerator[Told, None]:
    """Server-sent events, comments and empty ones left out."""
    fields: dict[str, str] = {}
    async for raw in lines:
        line = raw.decode().rstrip("\n")
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        else:
            if "data" in fields:
                yield Told(fields.get("id", ""), fields["event"], json.loads(fields["data"]))
            fields = {}


@asynccontextmanager
async def reading(
    site: Site, *, after: str = "0", kinds: str = ""
) -> AsyncGenerator[AsyncGenerator[Told, None], None]:
    query = {"kinds": kinds} if kinds else {}
    async with (
        ClientSession(timeout=ClientTimeout(total=30)) as session,
        session.get(site.base, headers={"Last-Event-ID": after}, params=query) as response,
    ):
        assert response.content_type == "text/event-stream"
        yield read(response.content)


async def until(condition: Callable[[], bool], seconds: float = 10) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)  # the condition is of the server's tasks


async def numbers(site: Site, **options: Any) -> list[int]:
    """The numbers of all events up to the end."""
    found = []
    async with reading(site, **options) as events:
        async for event in events:
            if event.kind == "end":
                assert event.data["state"] == "finished"
                return found
            if "number" in event.data:
                found.append(event.data["number"])
    raise AssertionError(f"the stream ended without an end after {found[-3:]}")


# ── all of them, once, in order ──


async def test_readers_that_come_at_any_time_get_every_event_once(site: Site) -> None:
    """Twelve readers join while events come as fast as the index takes them: from the beginning,
    each at another moment."""
    count = 3000
    readers = []

    async def emit() -> None:
        for first in range(0, count, 20):
            await asyncio.gather(*(site.emit(number) for number in range(first, first + 20)))
        await site.finish()

    emitting = asyncio.create_task(emit())
    for wait in range(12):
        readers.append(asyncio.create_task(numbers(site)))
        await asyncio.sleep(0.01 * wait)
    await emitting
    first, *others = await asyncio.gather(*readers)
    assert sorted(first) == list(range(count))
    assert all(found == first for found in others), "not all in the same order"


async def test_a_reader_goes_on_where_it_was_cut_off(site: Site) -> None:
    for number in range(30):
        await site.emit(number)
    async with reading(site) as events:
        before = [await anext(events) for _ in range(11)]
    await site.emit(30)
    await site.finish()
    assert await numbers(site, after=before[-1].id) == list(range(11, 31))
    assert before[0].data["time"] == pytest.approx(time.time(), abs=60)


async def test_from_now_on_sends_no_past_events(site: Site) -> None:
    await site.emit(1)
    async with reading(site, after=NOW) as events:
        await until(
            lambda: bool(site.fanouts._fanouts and next(iter(site.fanouts._fanouts.values()))._live)
        )
        await site.emit(2)
        assert (await anext(events)).data["number"] == 2


async def test_kinds_are_filtered_and_the_end_is_sent_to_all(site: Site) -> None:
    for number in range(6):
        await site.emit(number, "stage" if number % 2 else "step")
    everything = asyncio.create_task(numbers(site))
    some = asyncio.create_task(numbers(site, kinds="stage,sync"))
    await until(lambda: len(site.fanouts._listeners) == 2)
    for number in range(6, 10):
        await site.emit(number, "stage" if number % 2 else "step")
    await site.finish()
    assert await everything == list(range(10))
    assert await some == [1, 3, 5, 7, 9]


async def test_one_reader_of_the_index_whatever_the_number_of_listeners(site: Site) -> None:
    waits = 0
    wait = History.wait

    async def counted(self: History, after: str, seconds: float) -> list[Event]:
        nonlocal waits
        waits += 1
        return await wait(self, after, seconds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(History, "wait", counted)
        readers = [asyncio.create_task(numbers(site)) for _ in range(20)]
        await until(lambda: len(site.fanouts._listeners) == 20)
        for number in range(5):
            await site.emit(number)
        await site.finish()
        assert await asyncio.gather(*readers) == [list(range(5))] * 20
    assert waits <= 8
    await until(lambda: not site.fanouts._fanouts)
    assert site.delays
    assert max(site.delays) < 5


async def test_what_the_index_has_let_go_of_comes_from_the_file(site: Site) -> None:
    with MetricsFile(site.file) as file:
        for number in range(1200):
            await site.emit(number)
        async for page in History(lambda: site.index, site.file).pages():
            for event in page:
                file.event(event)
    await site.index._redis.xtrim(f"{site.index.prefix}events", maxlen=50, approximate=False)
    for number in range(1200, 1210):
        await site.emit(number)
    await site.finish()
    assert await numbers(site) == list(range(1210))


async def test_an_ended_run_is_read_from_its_folder_alone(site: Site) -> None:
    with MetricsFile(site.file) as file:
        for number in range(700):
            file.event(Event(f"{number + 1}-0", float(number), "step", {"number": number}))
    site.over = Ending("finished", "", 0.0)
    assert await numbers(site) == list(range(700))
    assert await numbers(site, after="650-0") == list(range(650, 700))


async def test_a_run_that_ends_without_saying_so_ends_for_its_readers(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its runner was killed for good, and the registry says that it failed."""
    monkeypatch.setattr(stream, "HEARTBEAT_SECONDS", 0.2)
    await site.emit(0)
    reader = asyncio.create_task(numbers(site))
    await until(lambda: bool(site.fanouts._listeners))
    site.over = Ending("finished", "", time.time())
    assert await reader == [0]


# ── heartbeats, slow ones, ends ──


async def test_a_quiet_stream_has_heartbeats_with_the_place_to_go_on_from(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "HEARTBEAT_SECONDS", 0.1)
    await site.emit(0, "ledger")
    async with (
        ClientSession(timeout=ClientTimeout(total=10)) as session,
        session.get(site.base, params={"kinds": "step"}) as response,
    ):
        newest = (await site.index.event_ends())[1]
        beats = 0
        async for line in response.content:
            beats += line.startswith(b": heartbeat")
            if line.startswith(b"id: "):
                assert line.decode().strip() == f"id: {newest}", "an event of another kind was sent"
                assert beats
                return


async def test_a_reader_that_does_not_read_is_dropped_and_slows_no_other(site: Site) -> None:
    site.most = 64 << 10
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", int(site.base.rsplit(":")[-1].strip("/")), limit=1024
    )
    # and never reads: the transport stops at its limit
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    await until(lambda: len(site.fanouts._listeners) == 1)
    count = 0
    async with reading(site) as events, asyncio.timeout(60):
        # an event that waited for the other reader would never come: it is dropped by later ones
        while not site.dropped:
            await asyncio.gather(*(site.emit(count + i, size=4000) for i in range(8)))
            assert sorted([(await anext(events)).data["number"] for _ in range(8)]) == list(
                range(count, count + 8)
            )
            count += 8
        await site.finish()
        assert [(await anext(events)).kind for _ in range(2)] == ["state", "end"]
    assert site.dropped == ["slow"]
    rest = b""
    while part := await reader.read(1 << 20):  # it reads again: the last event gives the reason
        rest = (rest + part)[-4096:]
    assert b"event: dropped" in rest
    assert b"too slow" in rest
    writer.close()


async def test_a_server_that_goes_down_says_so(site: Site) -> None:
    async with reading(site) as events:
        await until(lambda: bool(site.fanouts._listeners))
        await site.emit(0)
        assert (await anext(events)).data["number"] == 0
        site.fanouts.close()
        last = await anext(events)
        assert (last.kind, last.data["reason"]) == (
            "dropped",
            "the server goes down; connect again",
        )


async def test_a_deleted_run_drops_its_readers(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "HEARTBEAT_SECONDS", 0.1)

    async def gone() -> Ending | None:
        raise LookupError("no such run")

    await site.emit(0)
    async with reading(site) as events:
        await anext(events)
        monkeypatch.setattr(next(iter(site.fanouts._fanouts.values())), "_read_ending", gone)
        last = await anext(events)
        assert (last.kind, last.data["reason"]) == ("dropped", "the run was deleted")


def test_numbers_that_json_does_not_know_become_null() -> None:
    text = (
        Batch([Event("1-0", 1.0, "step", {"loss": float("nan"), "list": [float("inf"), 1.5]})])
        .payload()
        .decode()
    )
    assert json.loads(text.split("data: ")[1]) == {"time": 1.0, "loss": None, "list": [None, 1.5]}


# ── the file ──


@given(
    gaps=st.lists(st.integers(0, 3), min_size=0, max_size=400),
    asked=st.integers(-1, 900),
    count=st.integers(1, 50),
    torn=st.sets(st.integers(0, 399), max_size=5),
)
def test_any_place_in_the_file_is_found(
    tmp_path_factory: pytest.TempPathFactory,
    gaps: list[int],
    asked: int,
    count: int,
    torn: set[int],
) -> None:
    path = tmp_path_factory.getbasetemp() / "events.jsonl"
    at = 0
    kept = []
    lines = []
    for i, gap in enumerate(gaps):
        at += gap
        event = Event(f"{at}-{i}", 0.5, "step", {"padding": "y" * (i % 60)})
        lines.append(event_json(event))
        if i in torn:  # a kill cut it, and the next line follows on the same one
            lines[-1] = lines[-1][: len(lines[-1]) // 2]
        else:
            lines[-1] += "\n"
            if i - 1 not in torn:
                kept.append(event)
    path.write_text("".join(lines))
    found = EventLog(path).after(f"{max(asked, 0)}-0", count)
    expected = [event for event in kept if order(event.id) > (max(asked, 0), 0)][:count]
    assert [event.id for event in found] == [event.id for event in expected]


def test_a_time_is_an_id() -> None:
    assert order("999-5") <= order(id_at(1.0)) < order("1000-0")
    assert order(events.BEGINNING) < order("0-1")
