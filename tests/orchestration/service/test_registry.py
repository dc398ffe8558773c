"""What users of a service and its agents rely on from the list of runs, on the embedded Valkey and
on Redis."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from orchestration.recipe.schema import Recipe
from orchestration.state.documents import CHECKPOINT_ASKED, RUN_FLOW
from orchestration.state.labels import Labels
from orchestration.state.registry import (
    LIST_CALLS,
    KeyReused,
    Registry,
    RunRecord,
    UnknownRun,
    WrongState,
)
from pipeline.documents.flow import ROOM
from pipeline.index.client import Index, RunConfig
from pipeline.index.embedded import EmbeddedIndex
from tests.orchestration.runs import MOCK, recipe

BUDGET = {"most": 1000, "window": 3600}


@pytest.fixture
async def registry(index_url: str) -> AsyncIterator[Registry]:
    """An index that only this test uses."""
    registry = Registry(index_url)
    yield registry
    for held in await registry.active():
        await registry.end(held.record.id, held.token, "stopped", "")
    records, _ = await registry.list(limit=1000)
    for record in records:
        if record.state == "created":
            await registry.ask(record.id, "stop")
        await registry.delete(record.id)
    for run in await registry.doomed():
        await registry.remove(run)
    await registry.close()


def of(name: str = "mock-test") -> Recipe:
    return recipe(MOCK).model_copy(update={"name": name})


async def submit(registry: Registry, name: str = "mock-test", owner: str = "") -> RunRecord:
    record, made = await registry.submit(of(name), owner=owner)
    assert made
    return record


async def begin(registry: Registry, token: str = "t1", lease: float = 30.0) -> RunRecord:
    """Take the next run and have it running, as an agent and its runner do."""
    held = await registry.take("agent", "/data/runs", token, lease)
    assert held is not None
    index = Index(registry.url, held.record.id)
    await index.transition(["created"], "running")
    await index.close()
    return await registry.get(held.record.id)


async def test_runs_begin_in_the_order_in_which_they_came(registry: Registry) -> None:
    records = [await submit(registry, name) for name in ("a", "b", "c")]
    assert [record.state for record in records] == ["created"] * 3
    assert [record.position for record in records] == [1, 2, 3]
    first = await registry.take("agent", "/data/runs", "t1", 30)
    assert first is not None
    assert (first.record.id, first.record.state, first.record.attempts) == (
        records[0].id,
        "starting",
        1,
    )
    assert first.record.folder == f"/data/runs/{records[0].id}"
    assert first.record.started is not None
    assert [(await registry.get(record.id)).position for record in records] == [None, 1, 2]
    assert Recipe.model_validate(first.record.recipe) == of("a")


async def test_the_list_is_newest_first_in_pages_and_filtered(registry: Registry) -> None:
    records = [
        await submit(registry, f"run-{number}", owner="ann" if number % 2 else "bob")
        for number in range(5)
    ]
    pages = []
    after = ""
    while True:
        page, after = await registry.list(limit=2, after=after)
        pages.append([record.id for record in page])
        if not after:
            break
    newest = [record.id for record in reversed(records)]
    assert pages == [newest[:2], newest[2:4], newest[4:]]
    assert [r.id for r in (await registry.list(owner="ann"))[0]] == [newest[1], newest[3]]
    assert [r.id for r in (await registry.list(name="RUN-3"))[0]] == [newest[1]]
    running = await begin(registry)
    await registry.ask(records[1].id, "stop")
    assert [r.id for r in (await registry.list(state="running"))[0]] == [running.id]
    assert [r.id for r in (await registry.list(state="stopped"))[0]] == [records[1].id]
    assert [r.id for r in (await registry.list(state="created"))[0]] == newest[:3]
    with pytest.raises(ValueError, match="'x' is not a cursor"):
        await registry.list(after="x")


async def test_a_page_is_full_however_rare_what_is_looked_for(registry: Registry) -> None:
    wanted = await submit(registry, "needle")
    for number in range(12):
        await submit(registry, f"hay-{number}")
    found, after = await registry.list(name="needle", limit=1)
    assert ([record.id for record in found], after) == ([wanted.id], "")


@contextlib.asynccontextmanager
async def filled(registry: Registry, count: int) -> AsyncIterator[None]:
    """Have so many ended runs of ann's in the list, in the place of its keys."""
    redis = registry._index._redis
    prefix = registry._index.prefix
    last = int(await redis.get(f"{prefix}number") or 0)
    runs = {f"r{number}": number for number in range(last + 1, last + count + 1)}
    same = {"owner": "ann", "phase": "ended", "state": "finished", "recipe": "{}"}
    same |= dict.fromkeys(("reason", "key", "agent", "folder", "process", "token"), "")
    same |= dict.fromkeys(("created", "started", "ended", "attempts"), "1")
    pipe = redis.pipeline(transaction=False)
    for run in runs:
        await pipe.hset(f"{prefix}run:{run}", mapping={"name": f"hay-{run}", **same})
    await pipe.zadd(f"{prefix}order", runs)
    await pipe.set(f"{prefix}number", last + count)
    await pipe.execute()
    yield
    await redis.unlink(*(f"{prefix}run:{run}" for run in runs))
    await redis.zrem(f"{prefix}order", *runs)


async def counting(registry: Registry) -> list[str]:
    """The names of the index's functions that are called from now on."""
    calls = list[str]()
    call = registry._call

    async def counted(name: str, /, **arguments: Any) -> Any:
        calls.append(name)
        return await call(name, **arguments)

    registry._call = counted  # type: ignore[method-assign]
    return calls


@pytest.mark.parametrize("wanted", [{"name": "NEEDLE"}, {"owner": "bob"}, {"state": "stopped"}])
async def test_a_search_takes_a_bounded_part_of_many_runs_for_each_page(
    registry: Registry, wanted: dict[str, str]
) -> None:
    oldest = await submit(registry, "needle", owner="bob")
    await begin(registry)
    await registry.end(oldest.id, "t1", "stopped", "")
    async with filled(registry, 6000):
        calls = await counting(registry)
        assert await registry.list(name="none of all", limit=1) != ([], "")
        assert calls == ["list"] * LIST_CALLS
        page, after = await registry.list(**wanted)
        assert (page, bool(after)) == ([], True), "it may hold none, and not be the last"
        page, after = await registry.list(**wanted, after=after)
        assert ([record.id for record in page], after) == ([oldest.id], "")


async def test_what_waits_or_is_active_is_found_at_once_among_many_runs(registry: Registry) -> None:
    records = [await submit(registry, name) for name in ("a", "b", "c", "d")]
    await begin(registry)
    async with filled(registry, 3000):
        newest = await submit(registry, "e")
        calls = await counting(registry)
        created = [newest.id, *(record.id for record in reversed(records[1:]))]
        for limit in (1, 2, 10):
            seen, after, calls[:] = list[str](), "", []
            while not seen or after:
                page, after = await registry.list(state="created", limit=limit, after=after)
                seen += [record.id for record in page]
            assert seen == created
            assert len(calls) == -(-len(created) // limit)
        assert [r.id for r in (await registry.list(state="running"))[0]] == [records[0].id]
        assert [r.id for r in (await registry.list(state="created", name="B"))[0]] == [
            records[1].id
        ]
        calls.clear()
        assert await registry.list(state="paused") == ([], "")
        assert len((await registry.list(limit=200))[0]) == 200
        assert calls == ["list", "list"]


async def test_an_idempotency_key_makes_a_repeat_harmless(registry: Registry) -> None:
    first, made = await registry.submit(of(), owner="ann", key="k", fingerprint="f")
    again, made_again = await registry.submit(of(), owner="ann", key="k", fingerprint="f")
    assert (made, made_again, again.id) == (True, False, first.id)
    with pytest.raises(KeyReused, match=f"belongs to run '{first.id}'"):
        await registry.submit(of(), owner="ann", key="k", fingerprint="other")
    _, made = await registry.submit(of(), owner="bob", key="k", fingerprint="f")
    assert made, "the key of another owner is another key"
    together = await asyncio.gather(
        *(registry.submit(of(), key="same", fingerprint="f") for _ in range(8))
    )
    assert len({record.id for record, _ in together}) == 1
    assert sum(made for _, made in together) == 1


async def test_two_agents_never_get_the_same_run(registry: Registry) -> None:
    for _ in range(6):
        await submit(registry)
    other = Registry(registry.url)
    try:
        taken = await asyncio.gather(
            *(
                who.take(f"agent-{n % 2}", "/r", f"t{n}", 30)
                for n, who in enumerate([registry, other] * 4)
            )
        )
    finally:
        await other.close()
    ids = [held.record.id for held in taken if held]
    assert len(ids) == len(set(ids)) == 6
    assert taken.count(None) == 2


async def test_a_lease_that_was_followed_by_another_can_do_nothing(registry: Registry) -> None:
    await submit(registry)
    run = (await begin(registry, "old")).id
    assert await registry.renew(run, "old", "1:2")
    assert await registry.retake(run, "old", "new", "agent-2", 30, **BUDGET) == "taken"
    assert await registry.retake(run, "old", "third", "agent-3", 30, **BUDGET) == "lost"
    assert not await registry.renew(run, "old", "1:2")
    assert not await registry.end(run, "old", "failed", "")
    record = await registry.get(run)
    assert (record.state, record.agent, record.attempts) == ("running", "agent-2", 2)
    assert await registry.end(run, "new", "finished", "")
    record = await registry.get(run)
    assert (record.state, record.position) == ("finished", None)
    assert record.ended is not None


async def test_deaths_of_runners_count_for_a_while(registry: Registry) -> None:
    """Of a run of weeks: each death is far from the others."""
    await submit(registry)
    run = (await begin(registry, "t0")).id
    for n in range(3):
        assert (
            await registry.retake(run, f"t{n}", f"t{n + 1}", "a", 30, most=2, window=0.2) == "taken"
        )
        await asyncio.sleep(0.12)
    assert await registry.retake(run, "t3", "t4", "a", 30, most=2, window=60) == "used up"
    assert (await registry.get(run)).attempts == 4
    assert await registry.renew(run, "t3", "1:2"), "who asked has it still, and ends it"


async def test_a_run_whose_runner_is_silent_is_not_shown_as_running(registry: Registry) -> None:
    await submit(registry)
    run = (await begin(registry)).id
    assert (await registry.get(run)).state == "running"
    await registry.renew(run, "t1", "1:2", lease=-1)
    record = await registry.get(run)
    assert record.state == "starting"
    assert "an agent has to take it over" in record.reason
    assert [r.id for r in (await registry.list(state="starting"))[0]] == [run]
    assert (await registry.list(state="running"))[0] == []


async def test_what_a_run_is_asked_reaches_its_own_state(registry: Registry) -> None:
    await submit(registry)
    with pytest.raises(WrongState, match="is created; to pause it, it must be running") as refused:
        await registry.ask((await registry.list())[0][0].id, "pause")
    assert (refused.value.state, refused.value.asked) == ("created", "pause")
    run = (await begin(registry)).id
    index = Index(registry.url, run)
    for _ in range(2):
        assert (await registry.ask(run, "pause")).state == "paused"
    for _ in range(2):
        assert (await registry.ask(run, "resume")).state == "running"
    await registry.ask(run, "checkpoint")
    assert await CHECKPOINT_ASKED.get(index)
    for _ in range(2):
        assert (await registry.ask(run, "stop")).state == "stopping"
    with pytest.raises(WrongState):
        await registry.ask(run, "checkpoint")
    reported = [event.data["state"] for event in await index.events() if event.kind == "state"]
    assert reported == ["created", "running", "paused", "running", "stopping"], "each change once"
    await index.transition(["stopping"], "stopped")
    await index.close()
    assert await registry.end(run, "t1", "stopped", "stopped by request")
    assert (await registry.ask(run, "stop")).reason == "stopped by request"
    with pytest.raises(WrongState):
        await registry.ask(run, "resume")
    with pytest.raises(WrongState, match=r"must be running; it ended at \d{4}-.* UTC$"):
        await registry.ask(run, "pause")
    with pytest.raises(UnknownRun, match="'unknown' is not in this service"):
        await registry.ask("unknown", "pause")


async def test_a_run_that_waits_is_stopped_at_once_and_its_readers_are_told(
    registry: Registry,
) -> None:
    first = await submit(registry)
    second = await submit(registry)
    stopped = await registry.ask(first.id, "stop")
    assert (stopped.state, stopped.reason, stopped.started) == (
        "stopped",
        "stopped before it began",
        None,
    )
    assert (await registry.get(second.id)).position == 1
    index = Index(registry.url, first.id)
    assert [event.data["state"] for event in await index.events() if event.kind == "state"] == [
        "created",
        "stopped",
    ]
    await index.close()
    held = await registry.take("agent", "/r", "t", 30)
    assert held is not None
    assert held.record.id == second.id


async def test_a_run_can_be_stopped_between_being_taken_and_beginning(registry: Registry) -> None:
    await submit(registry)
    held = await registry.take("agent", "/r", "t", 30)
    assert held is not None
    assert (await registry.ask(held.record.id, "stop")).state == "stopping"


async def test_whoever_waits_for_the_list_is_woken_by_each_change(registry: Registry) -> None:
    marker = await registry.wait("", 0.01)
    assert await registry.wait(marker, 0.01) == marker
    waiting = asyncio.create_task(registry.wait(marker, 30))
    record = await submit(registry)
    changed = await asyncio.wait_for(waiting, 10)
    assert changed != marker
    marker = await registry.wait(changed, 0.01)
    waiting = asyncio.create_task(registry.wait(marker, 30))
    await registry.ask(record.id, "stop")
    assert await asyncio.wait_for(waiting, 10) != marker


async def test_a_deleted_run_leaves_nothing_but_its_folder_to_be_buried(registry: Registry) -> None:
    await registry.submit(of(), key="k", fingerprint="f")
    run = (await begin(registry)).id
    with pytest.raises(
        WrongState, match="is running; to delete it, it must be finished, stopped or failed"
    ):
        await registry.delete(run)
    index = Index(registry.url, run)
    await RUN_FLOW.put(index, {"stages": []})
    await registry.end(run, "t1", "finished", "")
    await registry.delete(run)
    assert await RUN_FLOW.get(index) is None
    assert await index.past_events() == []
    await index.close()
    with pytest.raises(UnknownRun):
        await registry.get(run)
    assert (await registry.list())[0] == []
    assert await registry.doomed() == {run: f"/data/runs/{run}"}
    await registry.remove(run)
    assert await registry.doomed() == {}
    _, made = await registry.submit(of(), key="k", fingerprint="f")
    assert made, "its key is free again"


async def test_what_an_ended_run_leaves_in_the_index_is_what_readers_need(index: Index) -> None:
    await index.init(RunConfig(()), {"generated": 8, "trained_rows": 6, "generated_tokens": 80})
    await RUN_FLOW.put(index, {"stages": []})
    await index.wake(ROOM)
    await index.transition([""], "finished")
    before = await index.ledger()
    for _ in range(2):
        await index.retire()
        assert await index.ledger() == before
        assert (await index.state())[0] == "finished"
        assert [event.kind for event in await index.events()] == ["state"]
        assert await RUN_FLOW.get(index) == {"stages": []}
    assert await index.woken(ROOM, "", 0.01) == "", "what only workers need is gone"


async def test_no_run_gets_the_id_of_another_one(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    endings = iter(["abcd", "abcd", "abcd", "0123"])
    monkeypatch.setattr(uuid, "uuid4", lambda: uuid.UUID(next(endings) + 28 * "0"))
    monkeypatch.setattr(time, "strftime", lambda _: "20261127-120137")
    first, _ = await registry.submit(of(), owner="a")
    second, made = await registry.submit(of(), owner="b")
    assert (first.id[-4:], second.id[-4:], made) == ("abcd", "0123", True)
    assert (await registry.get(first.id)).owner == "a"
    assert (await registry.get(second.id)).position == 2


async def test_what_was_submitted_survives_the_death_of_the_index(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="adk-") as home, EmbeddedIndex(Path(home)) as server:
        # a busy machine takes long to start the server again
        registry = Registry(server.url, timeout=90)
        record, _ = await registry.submit(of(), key="k", fingerprint="f")
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        taking = asyncio.create_task(registry.take("agent", "/r", "t", 30))
        await asyncio.to_thread(server.stop)
        await asyncio.to_thread(server.start)
        held = await asyncio.wait_for(taking, 100)
        assert held is not None
        assert held.record.id == record.id
        again, made = await registry.submit(of(), key="k", fingerprint="f")
        assert (again.id, made) == (record.id, False)
        await registry.close()


class Model(RuleBasedStateMachine):
    """The list against a plain model of it: who waits in which order, who is held by which token,
    who has ended."""

    url = ""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.registry = self.runner.run(self._open())
        self.waiting: list[str] = []
        self.active: dict[str, str] = {}
        self.ended: list[str] = []
        self.tokens = 0

    async def _open(self) -> Registry:
        registry = Registry(self.url)
        await registry.touch()
        return registry

    def teardown(self) -> None:
        for run, token in self.active.items():
            self.runner.run(self.registry.end(run, token, "stopped", ""))
        for run in self.waiting:
            self.runner.run(self.registry.ask(run, "stop"))
        for run in [*self.waiting, *self.active, *self.ended]:
            self.runner.run(self.registry.delete(run))
            self.runner.run(self.registry.remove(run))
        self.runner.run(self.registry.close())
        self.runner.close()

    def token(self) -> str:
        self.tokens += 1
        return f"t{self.tokens}"

    @rule()
    def submit(self) -> None:
        record, made = self.runner.run(self.registry.submit(of()))
        assert made
        self.waiting.append(record.id)
        assert record.position == len(self.waiting)

    @rule()
    def take(self) -> None:
        token = self.token()
        held = self.runner.run(self.registry.take("agent", "/r", token, 30))
        assert (held.record.id if held else None) == (self.waiting.pop(0) if self.waiting else None)
        if held:
            self.active[held.record.id] = token

    @precondition(lambda self: self.active)
    @rule(data=st.data(), right=st.booleans())
    def retake(self, data: st.DataObject, right: bool) -> None:
        run = data.draw(st.sampled_from(list(self.active)))
        token = self.token()
        old = self.active[run] if right else "wrong"
        found = self.runner.run(self.registry.retake(run, old, token, "agent", 30, **BUDGET))
        assert found == ("taken" if right else "lost")
        if right:
            self.active[run] = token

    @precondition(lambda self: self.active)
    @rule(data=st.data(), right=st.booleans())
    def end(self, data: st.DataObject, right: bool) -> None:
        run = data.draw(st.sampled_from(list(self.active)))
        token = self.active[run] if right else "wrong"
        assert self.runner.run(self.registry.end(run, token, "finished", "")) == right
        if right:
            del self.active[run]
            self.ended.append(run)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        run = data.draw(st.sampled_from(self.waiting))
        assert self.runner.run(self.registry.ask(run, "stop")).state == "stopped"
        self.waiting.remove(run)
        self.ended.append(run)

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        run = data.draw(st.sampled_from(self.ended))
        self.runner.run(self.registry.delete(run))
        self.runner.run(self.registry.remove(run))
        self.ended.remove(run)

    @invariant()
    def it_says_what_is_so(self) -> None:
        records, after = self.runner.run(self.registry.list(limit=1000))
        assert after == ""
        assert sorted(record.id for record in records) == sorted(
            [*self.waiting, *self.active, *self.ended]
        )
        queue = sorted(
            (record for record in records if record.position),
            key=lambda record: record.position or 0,
        )
        assert [record.id for record in queue] == self.waiting
        assert {
            h.record.id: h.token for h in self.runner.run(self.registry.active())
        } == self.active


def test_it_keeps_to_its_model_whatever_happens(index_url: str) -> None:
    machine = type("At", (Model,), {"url": index_url})
    quick = settings(
        max_examples=8,
        stateful_step_count=20,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    machine.TestCase.settings = quick  # type: ignore[attr-defined]
    machine.TestCase().runTest()  # type: ignore[attr-defined]


async def test_everything_is_read_again_when_something_has_changed(registry: Registry) -> None:
    first = await submit(registry, "first")
    assert [record.id for record in await registry.everything()] == [first.id]
    second = await submit(registry, "second")
    records = await registry.everything()
    assert [record.id for record in records] == [second.id, first.id]
    assert [record.id for record in await registry.everything()] == [second.id, first.id]
    running = await begin(registry)
    assert running.id == first.id
    states = {record.id: record.state for record in await registry.everything()}
    assert states == {first.id: "running", second.id: "created"}
    await registry.label(second.id, Labels(("good",), "a note"))
    assert (await registry.everything())[0].labels == Labels(("good",), "a note")
    with pytest.raises(UnknownRun):
        await registry.label("nobody", Labels())
