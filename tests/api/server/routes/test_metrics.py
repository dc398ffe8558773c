"""What people and programs read of a run over HTTP: its stream, its history, its trace, and
Prometheus's page."""

from __future__ import annotations

import asyncio
import itertools
import json
import tempfile
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientResponse
from prometheus_client.parser import text_string_to_metric_families

from api.server.service import service as services
from api.server.service.service import SERVICE
from api.telemetry import prometheus
from orchestration.history.events_file import METRICS, MetricsFile
from orchestration.recipe.flow import flow_of
from orchestration.recipe.loading.load import parse_recipe
from orchestration.state.documents import TOTALS
from orchestration.state.recording import record_rest
from orchestration.state.registry import Registry, RunRecord
from pipeline.data.events import Event, Kind
from pipeline.index.client import Index
from pipeline.index.embedded import EmbeddedIndex
from stages.samples.row import prompt_id
from stages.samples.sample_log import FOLDER, SampleLog
from tests.any_event import AnyEvent
from tests.api.serving import Client, bearer, problem, serving
from tests.orchestration.runs import MOCK

STAGE = {
    "busy": 1.0,
    "waiting_input": 2.0,
    "waiting_room": 0.5,
    "other": 0.5,
    "wall": 4.0,
    "parked": 0,
}


def stage(
    worker: str, *, wall: float = 4.0, rows: int = 8, depth: int = 3, **more: Any
) -> dict[str, Any]:
    times = {
        name: STAGE[name] * wall / 4 for name in ("busy", "waiting_input", "waiting_room", "other")
    }
    counts = {"rows": rows, "tokens": 10 * rows, "parked": 0, "queue_depth": depth, "in_flight": 2}
    named = {"stage": worker.partition("-")[0], "worker": worker}
    return {**named, **times, "wall": wall, **counts, **more}


def step(number: int, **changes: Any) -> dict[str, Any]:
    tokens = {
        "tokens_generated": 100 * number + 150,
        "tokens_trained": 100 * number + 100,
        "tokens_filtered": 7,
    }
    staleness = {"staleness_mean": 0.5, "staleness_p95": 1.0, "staleness_max": 1.0}
    numbers = {
        "loss": -0.25,
        "kl_behaviour": 0.01,
        "reward_mean": 0.1 * number,
        "reward_std": 0.2,
        "seconds": 1.5,
    }
    return {
        "step": number + 1,
        "version": number + 1,
        "rows": 32,
        "groups": [1, 2],
        **tokens,
        **staleness,
        **numbers,
        **changes,
    }


class EventfulRun:
    """A run without workers: the test emits its events."""

    def __init__(self, record: RunRecord, index: Index, registry: Registry) -> None:
        self.record = record
        self.index = index
        self.registry = registry
        self.path = f"/v1/runs/{record.id}"

    async def emit(self, kind: Kind, data: dict[str, Any]) -> None:
        await self.index.emit(AnyEvent(kind=kind, data=data))

    async def begin(self) -> None:
        held = await self.registry.take("agent", "/nowhere", "token", 60.0)
        assert held is not None
        assert held.record.id == self.record.id
        await self.registry.renew(self.record.id, "token", "process", 60.0)
        await self.index.transition(["", "created"], "running")

    async def init(self) -> None:
        """Put the flow of the run's recipe into the index."""
        recipe = parse_recipe(MOCK)
        counters = {"published": 0, "trained": 0, "admitted": 0}
        await self.index.init(flow_of(recipe).config(recipe.staleness_plan), counters)

    async def finish(self) -> None:
        await self.index.transition(["running"], "finished")
        await self.registry.end(self.record.id, "token", "finished", "")


@pytest.fixture(scope="module")
def index_url() -> Iterator[str]:
    """An index of its own: no run of other tests waits there before ours."""
    with tempfile.TemporaryDirectory(prefix="adk-") as home, EmbeddedIndex(Path(home)) as server:
        yield server.url


@pytest.fixture
async def client(index_url: str, tmp_path: Path) -> AsyncGenerator[Client, None]:
    async with serving(index_url, tmp_path) as made:
        yield made


Begin = Callable[[], Awaitable[EventfulRun]]


@pytest.fixture
async def begin(index_url: str) -> AsyncGenerator[Begin, None]:
    """Begins a run that ends with the test."""
    registry = Registry(index_url)
    runs = list[EventfulRun]()

    async def begun() -> EventfulRun:
        name = f"events-{uuid.uuid4().hex[:6]}"
        record, _ = await registry.submit(parse_recipe({**MOCK, "name": name}))
        runs.append(EventfulRun(record, Index(index_url, record.id), registry))
        await runs[-1].begin()
        return runs[-1]

    yield begun
    for run in runs:
        if (await registry.get(run.record.id)).state == "running":
            await run.finish()
        await registry.delete(run.record.id)
        await run.index.close()
    await registry.close()


@pytest.fixture
async def run(begin: Begin) -> EventfulRun:
    return await begin()


async def events(response: ClientResponse) -> list[tuple[str, str, dict[str, Any]]]:
    """(id, kind, data) of all events of a stream up to its end."""
    found = []
    for block in (await response.text()).split("\n\n"):
        fields = dict(line.partition(": ")[::2] for line in block.splitlines() if line)
        if "data" in fields:
            found.append((fields.get("id", ""), fields["event"], json.loads(fields["data"])))
    return found


# ── the stream ──


async def test_a_run_is_streamed_to_its_end_and_from_any_event_on(
    client: Client, run: EventfulRun
) -> None:
    async def whole() -> list[tuple[str, str, dict[str, Any]]]:
        async with client.get(f"{run.path}/metrics/stream") as response:
            assert response.status == 200
            assert response.content_type == "text/event-stream"
            return await events(response)

    reading = asyncio.create_task(whole())
    for number in range(5):
        await run.emit("step", step(number))
    await run.finish()
    answer = await asyncio.wait_for(reading, 20)
    assert [kind for _, kind, _ in answer if kind != "state"] == [*["step"] * 5, "end"]
    assert [data["state"] for _, kind, data in answer if kind == "state"][-2:] == [
        "running",
        "finished",
    ]
    assert answer[-1][2] == {"state": "finished", "reason": ""}
    assert [data["step"] for _, kind, data in answer if kind == "step"] == list(range(1, 6))
    at = next(i for i, (_, kind, data) in enumerate(answer) if kind == "step" and data["step"] == 2)
    async with client.get(
        f"{run.path}/metrics/stream", headers={"Last-Event-ID": answer[at][0]}
    ) as response:
        assert await events(response) == answer[at + 1 :]
    query = {"last_event_id": answer[at][0], "kinds": "step"}
    async with client.get(f"{run.path}/metrics/stream", params=query) as response:
        assert await events(response) == [*answer[at + 1 : at + 4], answer[-1]]


async def test_a_stream_is_refused_before_it_begins(client: Client, run: EventfulRun) -> None:
    await problem(await client.get("/v1/runs/unknown/metrics/stream"), 404)
    wrong = await problem(
        await client.get(f"{run.path}/metrics/stream", headers={"Last-Event-ID": "17; DROP"}), 400
    )
    assert wrong["field"] == "header.Last-Event-ID"
    await problem(await client.get(f"{run.path}/metrics/stream", params={"kinds": "Step"}), 400)
    await problem(await client.get(f"{run.path}/metrics/stream", params={"kind": "step"}), 400)


async def test_streams_and_metrics_need_a_token_where_one_is_needed(
    index_url: str, tmp_path: Path, run: EventfulRun
) -> None:
    async with serving(index_url, tmp_path, no_token=False) as client:
        for path in (
            "/metrics",
            *(f"{run.path}/{what}" for what in ("metrics", "metrics/stream", "trace")),
        ):
            await problem(await client.get(path), 401)
            await problem(await client.get(path, headers=bearer("made-up")), 401)


# ── history ──


async def test_history_is_columns_by_series(client: Client, run: EventfulRun) -> None:
    for number in range(3):
        await run.emit("step", step(number, loss=float("nan") if number == 1 else 0.5))
        await run.emit("stage", stage("reward-0", wall=4.0 * (number + 1)))
    await run.emit(
        "sync", {"worker": "update-0", "version": 1, "bytes": 10, "publish_seconds": 0.1}
    )
    answer = await (await client.get(f"{run.path}/metrics")).json()
    assert answer["every"] == 0
    assert set(answer["series"]) == {"step", "stage/reward-0", "sync/update-0"}
    assert answer["series"]["step"]["step"] == [1, 2, 3]
    assert answer["series"]["step"]["loss"] == [0.5, None, 0.5]
    assert "groups" not in answer["series"]["step"]
    assert answer["series"]["stage/reward-0"]["wall"] == [4, 8, 12]
    assert all(len(values) == 3 for values in answer["series"]["step"].values())
    some = await (
        await client.get(f"{run.path}/metrics", params={"names": "step.reward_mean,sync"})
    ).json()
    assert set(some["series"]) == {"step", "sync/update-0"}
    assert set(some["series"]["step"]) == {"time", "reward_mean"}


async def test_history_of_a_time_and_by_the_hour(
    client: Client, run: EventfulRun, tmp_path: Path
) -> None:
    """From the run's file, as the index has nothing of it."""
    await run.index._redis.delete(f"{run.index.prefix}events")
    start = 3600.0 * 400_000
    key = f"{run.registry._index.prefix}run:{run.record.id}"
    await run.registry._index._redis.hset(key, "folder", str(tmp_path))
    with MetricsFile(tmp_path / METRICS) as file:
        for number in range(240):
            time = start + 60 * number
            file.event(Event(f"{int(time * 1000)}-0", time, "step", step(number)))
    query = {"from": start + 3600, "to": start + 3 * 3600 - 1, "every": 3600}
    answer = await (await client.get(f"{run.path}/metrics", params=query)).json()
    numbers = answer["series"]["step"]
    assert (answer["from"], answer["to"], answer["every"]) == (query["from"], query["to"], 3600)
    assert numbers["time"] == [start + 3600, start + 7200]
    assert numbers["step"] == [120, 180]  # the last of it
    assert numbers["rows"] == [32 * 60] * 2  # of all together
    assert numbers["reward_mean"] == pytest.approx([0.1 * (60 + 119) / 2, 0.1 * (120 + 179) / 2])
    chosen = await (
        await client.get(f"{run.path}/metrics", params={"from": start, "to": start + 86400})
    ).json()
    assert chosen["every"] == 120


async def test_when_the_index_has_given_the_events_up_every_answer_is_as_before(
    client: Client, run: EventfulRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = f"{run.registry._index.prefix}run:{run.record.id}"
    await run.registry._index._redis.hset(key, "folder", str(tmp_path))
    await run.init()
    for number in range(5):
        await run.emit("step", step(number, reward_mean=number / 4))
        await run.emit("stage", stage("rollout-0", wall=4.0 * (number + 1)))
    await run.emit(
        "worker",
        {"stage": "rollout", "worker": "rollout-0", "change": "restarted", "reason": "", "pid": 7},
    )
    await run.finish()
    await record_rest(run.index, tmp_path / METRICS)

    async def answers() -> dict[str, Any]:
        query = {"names": "step", "every": 0}
        found = {
            name: await (await client.get(f"{run.path}{name}")).json() for name in ("", "/stages")
        }
        found["history"] = (await (await client.get(f"{run.path}/metrics", params=query)).json())[
            "series"
        ]
        async with client.get(
            f"{run.path}/metrics/stream", params={"kinds": "step,state,worker"}
        ) as response:
            stream = await events(response)
        found["stream"] = [
            (at, kind, {**data, "time": round(data.get("time", 0.0), 3)})
            for at, kind, data in stream
        ]
        return found

    before = await answers()
    app_service = client.app[SERVICE]
    monkeypatch.setattr(services, "GIVEN_UP_SECONDS", 0.0)
    giving_up = asyncio.create_task(app_service.give_up_events())
    async with asyncio.timeout(20):
        while await run.index.past_events():  # noqa: ASYNC110  (no event reports it)
            await asyncio.sleep(0.05)
    giving_up.cancel()
    app_service.run_statuses.forget(run.record.id)  # as a server that was started again
    assert await answers() == before
    assert [data["step"] for _, kind, data in before["stream"] if kind == "step"] == list(
        range(1, 6)
    )


async def test_what_a_worker_did_lately_goes_on_over_its_restart(
    client: Client, run: EventfulRun
) -> None:
    """It reports its own from 0 on after it; what is long past does not count."""
    await run.init()
    for wall in (2.0, 8.0, 12.0, 16.0, 4.0):
        await run.emit("stage", stage("rollout-0", wall=wall, rows=int(2 * wall)))
    view = await (await client.get(f"{run.path}/stages")).json()
    (worker,) = next(each for each in view["stages"] if each["name"] == "rollout")["workers"]
    assert worker["wall"] == 4.0, "of its process"
    assert worker["recent"] == {
        "wall": 12.0,  # 8 to 16 s of the one before, and 4 s of this one
        "busy": 3.0,
        "waiting_input": 6.0,
        "waiting_room": 1.5,
        "other": 1.5,
        "rows": 24,
        "tokens": 240,
    }
    assert worker["time"] == (await run.index.past_events())[-1].time


async def test_a_run_with_damaged_totals_keeps_its_events_and_no_other_run_waits_for_it(
    client: Client, begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = await begin()
    sound = await begin()
    for run in (damaged, sound):
        (tmp_path / run.record.id).mkdir()
        key = f"{run.registry._index.prefix}run:{run.record.id}"
        await run.registry._index._redis.hset(key, "folder", str(tmp_path / run.record.id))
        await run.finish()
        await record_rest(run.index, tmp_path / run.record.id / METRICS)
    await damaged.index.write_document(TOTALS.key, "{")
    monkeypatch.setattr(services, "GIVEN_UP_SECONDS", 0.0)
    giving_up = asyncio.create_task(client.app[SERVICE].give_up_events())
    async with asyncio.timeout(20):
        while await sound.index.past_events():  # noqa: ASYNC110  (no event reports it)
            await asyncio.sleep(0.05)
    giving_up.cancel()
    assert await damaged.index.past_events()


async def test_what_cannot_be_answered_says_what_to_ask_instead(
    client: Client, run: EventfulRun
) -> None:
    backwards = await problem(
        await client.get(f"{run.path}/metrics", params={"from": 9, "to": 3}), 422
    )
    assert backwards["field"] == "query.to"
    assert (await problem(await client.get(f"{run.path}/metrics", params={"every": -1}), 400))[
        "field"
    ] == "query.every"
    await problem(await client.get(f"{run.path}/metrics", params={"from": "yesterday"}), 400)
    await problem(await client.get("/v1/runs/unknown/metrics"), 404)


# ── samples ──


async def test_samples_are_found_by_step_reward_and_staleness(
    client: Client, run: EventfulRun, tmp_path: Path
) -> None:
    key = f"{run.registry._index.prefix}run:{run.record.id}"
    await run.registry._index._redis.hset(key, "folder", str(tmp_path))
    book = SampleLog(tmp_path / FOLDER, 1 << 20)
    for number in range(1, 4):
        texts = {
            "prompt": "2 + 2?",
            "response": "4",
            "rewards": {"arithmetic": 1.0, "brevity": None},
            "tokens": 2,
        }
        rest = {
            "advantage": -0.5,
            "versions": [[0, 2]],
            "staleness": number - 1,
            "truncated": False,
        }
        places = [
            {"step": number, "group": number, "place": place, "reward": place / 4}
            for place in range(4)
        ]
        book.add([place | texts | rest for place in places])

    async def found(**query: Any) -> list[tuple[int, int]]:
        answer = await (await client.get(f"{run.path}/samples", params=query)).json()
        assert answer["next"] == ""
        return [(sample["step"], sample["place"]) for sample in answer["samples"]]

    assert await found() == [(number, place) for number in (3, 2, 1) for place in range(4)]
    assert await found(step=2) == [(2, place) for place in range(4)]
    assert await found(reward_min=0.6, staleness_min=1) == [(3, 3), (2, 3)]
    assert await found(reward_max=0.1, step=1) == [(1, 0)]
    first = await (await client.get(f"{run.path}/samples", params={"limit": 5})).json()
    assert first["samples"][0] == {
        **{
            "step": 3,
            "group": 3,
            "place": 0,
            "prompt": "2 + 2?",
            "response": "4",
            "reward": 0.0,
            "advantage": -0.5,
        },
        **{
            "rewards": {"arithmetic": 1.0, "brevity": None},
            "tokens": 2,
            "versions": [[0, 2]],
            "segments": [],
            "ending": "",
            "staleness": 2,
        },
        **{"truncated": False, "failed": [], "masked": [], "columns": {}, "fields": {}},
        "prompt_id": prompt_id("2 + 2?"),
    }
    assert (first["looked"], first["steps"]) == (5, [2, 3])
    assert await found(after=first["next"]) == [
        (2, 1),
        (2, 2),
        (2, 3),
        *((1, place) for place in range(4)),
    ]
    assert (await problem(await client.get(f"{run.path}/samples", params={"after": "x:y"}), 400))[
        "fix"
    ]
    without = {
        "step": 4,
        "group": 4,
        "place": 0,
        "reward": None,
        "failed": ["arithmetic"],
    }  # as in a run without rewards
    book.add([without | texts | rest])
    assert await found(step=4) == [(4, 0)]
    assert await found(step=4, reward_min=-9) == await found(step=4, reward_max=9) == []
    assert await found(failed="true") == [(4, 0)]
    assert len(await found(failed="false", step=3)) == 4
    ranked = await (await client.get(f"{run.path}/samples", params={"best": 1, "worst": 2})).json()
    order = [(sample["step"], sample["place"]) for sample in ranked["samples"]]
    assert order == [(3, 3), (3, 0), (2, 0)], "the highest first; of equals the newest"
    assert (ranked["looked"], ranked["steps"], ranked["next"]) == (13, [1, 4], "")


async def test_samples_are_found_by_text_group_prompt_and_conditions_on_any_column(
    client: Client, run: EventfulRun, tmp_path: Path
) -> None:
    key = f"{run.registry._index.prefix}run:{run.record.id}"
    await run.registry._index._redis.hset(key, "folder", str(tmp_path))
    book = SampleLog(tmp_path / FOLDER, 1 << 20)
    for step in range(3):
        group = [
            {
                **{
                    "step": step + 1,
                    "group": 10 + step,
                    "place": place,
                    "prompt": f"({step % 2}+.*",
                },
                **{"response": "Stra\u00dfe (a|b)*" if place else "no", "reward": 0.5, "tokens": 3},
                **{
                    "rewards": {"exact": place / 2},
                    "columns": {"judged": "well" if place else "ill"},
                },
                **{"advantage": 0.0, "versions": [[step, 3], [-1, 2 * place]], "staleness": 0},
                "truncated": bool(place),
            }
            for place in range(2)
        ]
        book.add([group[0] | {"fields": {"source": "algebra", "level": step}}, group[1]])

    async def found(**query: Any) -> list[tuple[int, int]]:
        answer = await (await client.get(f"{run.path}/samples", params=query)).json()
        return [(sample["step"], sample["place"]) for sample in answer["samples"]]

    longer = [(3, 1), (2, 1), (1, 1)]
    assert await found(group=11) == [(2, 0), (2, 1)]
    assert await found(prompt_id=prompt_id("(0+.*"), truncated="false") == [(3, 0), (1, 0)]
    assert await found(grep="(A|B)*") == await found(grep="strasse") == longer
    assert await found(grep="(A|B)*", case="true") == []
    assert await found(grep="(1+") == [(2, 0), (2, 1)]
    assert await found(where="length>4,exact>=0.5") == longer
    assert await found(where="judged != WELL, level = 2") == [(3, 0)]
    assert await found(where="source=algebra,level<1,truncated=true") == [(1, 1)]
    unknown = await problem(
        await client.get(f"{run.path}/samples", params={"where": "exakt>0"}), 400
    )
    assert unknown["detail"] == "No sample has a column 'exakt'."
    assert unknown["fix"] == "did you mean 'exact'?"
    answer = await client.get(f"{run.path}/samples", params={"where": "zzz>0"})
    fix = (await problem(answer, 400))["fix"]
    assert {"'exact'", "'judged'", "'length'", "'level'"} <= {
        *fix.removeprefix("use one of: ").split(", ")
    }
    answer = await client.get(f"{run.path}/samples", params={"columns": "length, lenght"})
    assert (await problem(answer, 400))["detail"] == "No sample has a column 'lenght'."
    for where in (
        "length",
        "length>",
        "a=b=c",
        ">3",
        " >3",
        "length>3;",
        "judged<well",
        "a>-",
        "a= ",
    ):
        answer = await client.get(f"{run.path}/samples", params={"where": where})
        assert "is no condition; write a column" in json.dumps(await problem(answer, 400))


async def test_a_search_leaves_the_server_free_for_others(
    client: Client, run: EventfulRun, tmp_path: Path
) -> None:
    """Two thousand steps whose texts would keep a regular expression busy for ever."""
    key = f"{run.registry._index.prefix}run:{run.record.id}"
    await run.registry._index._redis.hset(key, "folder", str(tmp_path))
    book = SampleLog(tmp_path / FOLDER, 1 << 28)
    numbers: dict[str, Any] = {"place": 0, "reward": 0.5, "rewards": {}, "advantage": 0.0}
    numbers |= {"tokens": 1, "versions": [[0, 1]], "staleness": 0, "truncated": False}
    for step in range(2000):
        book.add(
            [{"step": step, "group": step, "prompt": "a" * 9000, "response": "a" * 9000, **numbers}]
        )
    looks = []

    async def look() -> None:
        while True:
            assert (await client.get("/healthz")).status == 200
            looks.append(1)

    looking = asyncio.create_task(look())
    query = {"grep": "(a+)+$", "worst": 5}
    answer = await (await client.get(f"{run.path}/samples", params=query)).json()
    looking.cancel()
    assert answer["samples"] == []
    assert answer["looked"] == 2000
    assert len(looks) > 10
    first = await (await client.get(f"{run.path}/samples", params={"grep": "(a+)+$"})).json()
    assert first["next"]
    assert first["looked"] < 600


# ── trace ──


async def test_a_trace_is_what_perfetto_documents(client: Client, run: EventfulRun) -> None:
    now = time.time() - 3
    overlapping = [
        {"name": "rollout", "start": now + at, "seconds": 0.5, "rows": 8, "version": 1}
        for at in (0, 0.25, 1)
    ]
    await run.emit(
        "span", {"stage": "rollout", "worker": "rollout-0", "spans": overlapping, "left_out": 0}
    )
    train = {"name": "train", "start": now, "seconds": 0.3, "version": 2}
    await run.emit(
        "span", {"stage": "update", "worker": "update-0", "spans": [train], "left_out": 4}
    )
    await run.emit("stage", stage("rollout-0", depth=5))
    await run.emit("step", step(2, reward_mean=float("nan")))
    await run.emit(
        "worker",
        {"stage": "reward", "worker": "reward-0", "change": "died", "pid": 1, "reason": "killed"},
    )
    response = await client.get(f"{run.path}/trace", params={"from": now - 5, "to": now + 5})
    assert response.headers["Content-Disposition"].startswith("attachment")
    trace = await response.json()
    assert trace["displayTimeUnit"] == "ms"
    check_trace(trace["traceEvents"])
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [event["name"] for event in slices] == ["rollout"] * 3 + ["train"]
    tracks = [event["tid"] for event in slices[:3]]
    assert tracks[0] != tracks[1], "overlapping slices share a track"
    assert tracks[2] == tracks[0]
    assert slices[0]["args"] == {"rows": 8, "version": 1}
    assert slices[0]["ts"] == pytest.approx(now * 1e6, abs=1)
    assert slices[0]["dur"] == 500_000
    names = {
        (e["pid"], e["args"]["name"]) for e in trace["traceEvents"] if e["name"] == "process_name"
    }
    assert {name for _, name in names} == {"run", "rollout-0", "update-0", "reward-0"}
    counters = {(e["name"], *e["args"].items()) for e in trace["traceEvents"] if e["ph"] == "C"}
    assert ("queue depth", ("waiting", 5)) in counters
    assert ("staleness", ("mean", 0.5), ("max", 1.0)) in counters
    assert {e["name"] for e in trace["traceEvents"] if e["ph"] == "i"} == {
        "created",
        "running",
        "died",
    }
    only = await (
        await client.get(f"{run.path}/trace", params={"from": now + 0.9, "to": now + 2})
    ).json()
    assert len([event for event in only["traceEvents"] if event["ph"] == "X"]) == 1


def check_trace(found: list[dict[str, Any]]) -> None:
    """The rules of the trace event format and of Perfetto for what is used of it."""
    named: set[tuple[int, int]] = set()
    lanes: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in found:
        assert event["ph"] in "XCiM"
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["args"], dict)
        if event["ph"] != "M":
            assert isinstance(event["ts"], int)
            assert (event["pid"], 0) in named, "a process without a name"
        if event["ph"] == "M":
            assert event["name"] in (
                "process_name",
                "process_sort_index",
                "thread_name",
                "thread_sort_index",
            )
            named |= {(event["pid"], event["tid"])} if event["name"].endswith("_name") else set()
        elif event["ph"] == "X":
            assert event["dur"] >= 0
            assert (event["pid"], event["tid"]) in named, "a track without a name"
            lanes.setdefault((event["pid"], event["tid"]), []).append(
                (event["ts"], event["ts"] + event["dur"])
            )
        elif event["ph"] == "C":
            assert event["args"]
            assert all(isinstance(value, int | float) for value in event["args"].values())
        elif event["ph"] == "i":
            assert event["s"] in "gpt"
    for lane in lanes.values():
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(sorted(lane))), (
            "slices of a track overlap"
        )


# ── Prometheus ──


LABELS = [
    "run",
    "name",
    "stage",
    "worker",
    "what",
    "source",
    "stat",
    "part",
    "method",
    "route",
    "status",
    "reason",
    "state",
    "le",
]


async def scraped(client: Client) -> dict[tuple[str, ...], float]:
    """Samples by name and label values in the order of LABELS, read by Prometheus's own parser."""
    response = await client.get("/metrics")
    text = await response.text()
    assert response.status == 200, text
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            key = (
                sample.name,
                *(sample.labels[label] for label in LABELS if label in sample.labels),
            )
            assert sample.labels.keys() <= set(LABELS)
            assert key not in found, f"{key} appears twice"
            found[key] = sample.value
    return found


async def test_prometheus_reads_what_active_runs_do(client: Client, run: EventfulRun) -> None:
    name = run.record.id
    await run.emit("step", step(6))
    await run.emit("stage", stage("rollout-0", rows=8))
    trajectories = {"open": 3, "turns": 7, "branches": 1, "ended_done": 2, "calls": 4}
    trajectories |= {"observed_tokens": 9, "environment_seconds": 1.5}
    await run.emit("stage", stage("environment-0", trajectories=trajectories))
    counts = {name: 0 for name in ("generated", "trained", "filtered", "remade", "in_flight")}
    counts |= {f"{name}_tokens": 0 for name in counts} | {"redelivered": 0, "skipped_steps": 2}
    await run.emit(
        "prompt", {"change": "epoch", "reason": "epoch 2 of prompts", "epochs": {"prompts": 2}}
    )
    await run.emit(
        "ledger",
        {**counts, "dropped": {"equal rewards": 3}, "dropped_tokens": {"equal rewards": 1200}},
    )
    await run.emit(
        "sync",
        {"worker": "update-0", "version": 1, "bytes": 64, "publish_seconds": 0.5, **hidden(0, 0)},
    )
    await run.emit(
        "sync",
        {
            "worker": "rollout-0",
            "version": 1,
            "bytes": 64,
            "publish_seconds": 0.0,
            **hidden(0.1, 2),
        },
    )
    found = await scraped(client)
    assert found["asyncdock_runs", "running"] >= 1
    assert found["asyncdock_run_info", name, run.record.name, "running"] == 1
    assert found["asyncdock_run_steps_total", name] == 7
    assert found["asyncdock_run_steps_planned", name] == 6
    assert found["asyncdock_run_reward_mean", name] == pytest.approx(0.6)
    assert found["asyncdock_run_kl", name] == 0.01
    assert found["asyncdock_run_staleness_versions", name, "max"] == 1
    assert found["asyncdock_run_staleness_versions", name, "bound"] == 1
    assert found["asyncdock_run_tokens_total", name, "generated"] == 750
    assert found["asyncdock_run_dropped_groups_total", name, "equal rewards"] == 3
    assert found["asyncdock_run_dropped_tokens_total", name, "equal rewards"] == 1200
    assert found["asyncdock_run_prompt_epoch", name, "prompts"] == 2
    assert found["asyncdock_run_skipped_steps_total", name] == 2
    shares = [
        found["asyncdock_stage_seconds_total", name, "rollout", "rollout-0", state]
        for state in ("busy", "other")
    ]
    assert shares == [1.0, 0.5]
    assert found["asyncdock_stage_queue_depth", name, "rollout"] == 3
    assert found["asyncdock_sync_seconds_total", name, "exposed"] == pytest.approx(0.1)
    assert found["asyncdock_sync_seconds_total", name, "publish"] == 0.5
    assert found["asyncdock_sync_bytes_total", name] == 64
    assert found["asyncdock_run_trajectories_open", name] == 3
    assert found["asyncdock_run_trajectories_total", name, "done"] == 2
    assert found["asyncdock_run_turns_total", name, "answered"] == 7
    assert found["asyncdock_run_turns_total", name, "branches"] == 1
    assert found["asyncdock_run_tool_calls_total", name, "made"] == 4
    assert found["asyncdock_run_turn_tokens_total", name, "observed"] == 9
    assert found["asyncdock_run_turn_seconds_total", name, "environment"] == 1.5
    # What comes later is added as it comes; a worker that was killed counts on in its next life.
    await run.emit("worker", {"stage": "rollout", "worker": "rollout-0", "change": "restarted"})
    await run.emit("stage", stage("rollout-0", wall=1.0, rows=5))

    async def grown() -> dict[tuple[str, ...], float]:
        rows = ("asyncdock_stage_rows_total", name, "rollout", "rollout-0")
        while (found := await scraped(client))[rows] != 13:  # noqa: ASYNC110
            await asyncio.sleep(0.02)  # the condition is of the server's tasks
        return found

    found = await asyncio.wait_for(grown(), 10)
    assert found["asyncdock_run_restarts_total", name] == 1
    assert found["asyncdock_stage_seconds_total", name, "rollout", "rollout-0", "busy"] == 1.25
    assert found["asyncdock_event_delay_seconds_count",] > 0
    await run.finish()

    async def over() -> dict[tuple[str, ...], float]:
        ended = ("asyncdock_run_info", name, run.record.name, "finished")
        while ended not in (found := await scraped(client)):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        return found

    found = await asyncio.wait_for(over(), 10)
    assert found["asyncdock_run_steps_total", name] == 7, "its last numbers are gone with its end"
    assert found["asyncdock_runs", "finished"] >= 1


async def test_runs_that_have_ended_leave_prometheus_s_page(
    client: Client, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many that end at once the newest stay for a few scrapes; a run that goes on stays."""
    monkeypatch.setattr(prometheus, "MOST_ENDED", 3)
    runs = [await begin() for _ in range(6)]
    names = {run.record.id: run.record.name for run in runs}
    for run in runs:
        await run.emit("step", step(6))
    assert {
        key[1] for key in await scraped(client) if key[0] == "asyncdock_run_steps_total"
    } >= names.keys()
    for run in runs[1:]:
        await run.finish()
    pages = dict.fromkeys(names, 0)
    async with asyncio.timeout(30):
        exposed = set(names)
        while exposed != {runs[0].record.id}:
            found = await scraped(client)
            exposed = {run for run in names if ("asyncdock_run_steps_total", run) in found}
            infos = {
                run: ("asyncdock_run_info", run, name, "finished") for run, name in names.items()
            }
            ended = [run for run, info in infos.items() if info in found]
            assert len(ended) <= 3
            for run in ended:
                pages[run] += 1
    assert max(pages.values()) == prometheus.KEPT_SCRAPES, pages


def hidden(exposed: float, hidden: float) -> dict[str, float]:
    return {"exposed_seconds": exposed, "hidden_seconds": hidden}


async def test_prometheus_reads_what_the_server_does(client: Client, run: EventfulRun) -> None:
    await client.get("/healthz")
    await client.get("/v1/runs/unknown/metrics")
    await client.get("/no/such/path-" + uuid.uuid4().hex)
    async with client.get(f"{run.path}/metrics/stream"):
        found = await scraped(client)
    assert found["asyncdock_http_requests_total", "GET", "/healthz", "200"] == 1
    assert found["asyncdock_http_requests_total", "GET", "/v1/runs/{run}/metrics", "404"] == 1
    assert found["asyncdock_http_requests_total", "GET", "none", "404"] == 1, (
        "a label holds a made-up path"
    )
    assert found["asyncdock_http_request_duration_seconds_count", "GET", "/healthz"] == 1
    assert found["asyncdock_stream_readers",] == 1
    assert found["asyncdock_stream_readers_dropped_total", "slow"] == 0
