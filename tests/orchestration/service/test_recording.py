"""The index removes the events of an ended run when its file and totals are complete, also after
kills."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil

from api.telemetry.history import History
from orchestration.history.events_file import METRICS, newest_id, read_metrics
from orchestration.history.totals import RunTotals
from orchestration.state.lock import lock_run
from orchestration.state.recording import give_up, recorded_totals
from orchestration.state.registry import RunRecord
from pipeline.data.events import Event, WorkerEvent, order
from pipeline.index.client import Index
from tests.orchestration.runs import MOCK, recipe
from tests.orchestration.service.test_agent import ENDLESS, INLINE, PROCESSES, die, running
from tests.orchestration.services import Service, told_once


def totals_of(events: list[Event]) -> RunTotals:
    totals = RunTotals()
    for event in events:
        totals.apply(event)
    return totals


async def workers_ended(service: Service, run: str) -> None:
    """Wait for the end of the worker processes of ``run``: the last of its events."""
    processes = totals_of(await service.events(run)).processes
    async with asyncio.timeout(60):
        for _, process in processes.values():
            # It is not a child of the test, so nothing announces its end.
            while psutil.pid_exists(process):  # noqa: ASYNC110
                await asyncio.sleep(0.1)


async def given_up(service: Service, record: RunRecord) -> list[Event]:
    """Have the index give up the events of the ended run; those that it had."""
    assert [run.id for run in await service.registry.whole(0.0, 100)] == [record.id]
    events = await service.events(record.id)
    path = Path(record.folder) / METRICS
    async with Index(service.registry.link, record.id) as index:
        assert await give_up(index, path)
        assert (await recorded_totals(index)).totals.wire() == totals_of(events).wire()
        assert await index.event_ends() == ("0", "0")
        assert order(await index.last_event_id()) >= order(newest_id(path))
        assert await give_up(index, path), "once more, after a kill"
        pages = [page async for page in History(lambda: index, path, detail=True).pages()]
        told_once([event for page in pages for event in page], events)
    await service.registry.looked_at(record.id, given_up=True)
    assert not await service.registry.whole(0.0, 100)
    return events


async def test_a_finished_run_is_in_its_file_and_goes_on_with_greater_ids(tmp_path: Path) -> None:
    async with running(tmp_path, PROCESSES, train__steps=6, checkpoint__every=2) as (service, run):
        record = await service.ended(run)
        before = await given_up(service, record)
        last = newest_id(Path(record.folder) / METRICS)
        again = recipe(PROCESSES, train__steps=9, checkpoint__every=2)
        await service.registry.reopen(record, again)
        record = await service.ended(run)
        after = await service.events(run)
        assert order(after[0].id) > order(last)
        told_once(service.metrics(record), [*before, *after])
        steps = [
            event.data["step"]
            for event in read_metrics(Path(record.folder) / METRICS)
            if event.kind == "step"
        ]
        assert steps == list(range(1, 10))
        async with Index(service.registry.link, run) as index:
            assert (await recorded_totals(index)).totals.wire() == totals_of(
                [*before, *after]
            ).wire()
            assert await give_up(index, Path(record.folder) / METRICS)


async def test_what_a_killed_runner_has_not_recorded_is_recorded_by_who_ends_the_run(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, PROCESSES, launch__max_restarts=0, **ENDLESS) as (service, run):
        _, process = await service.held(run)
        die(process)
        record = await service.ended(run)
        assert record.state == "failed"
        await workers_ended(service, run)
        await given_up(service, record)


async def test_what_a_worker_says_after_the_end_of_its_run_is_recorded(tmp_path: Path) -> None:
    async with running(tmp_path, INLINE) as (service, run):
        record = await service.ended(run)
        folder = Path(record.folder)
        async with Index(service.registry.link, run) as index:
            assert (await recorded_totals(index)).after == (await index.event_ends())[1]
            await index.emit(WorkerEvent(stage="update", worker="update-0", change="stopped"))
            with lock_run(folder):
                assert not await give_up(index, folder / METRICS), "another process executes it"
        late = (await given_up(service, record))[-1]
        assert late.data["change"] == "stopped"
        assert late.id in [event.id for event in service.metrics(record)]


async def test_a_runner_that_takes_over_counts_nothing_twice(tmp_path: Path) -> None:
    async with running(tmp_path, PROCESSES, train__steps=300) as (service, run):
        for count in (5, 10):
            _, process = await service.held(run)
            die(process)
            await service.steps(run, count)
        await service.registry.ask(run, "stop")
        await given_up(service, await service.ended(run))


async def test_events_that_a_file_lacks_stay(tmp_path: Path) -> None:
    async with running(tmp_path, INLINE) as (service, run):
        record = await service.ended(run)
        events = await service.events(run)
        path = Path(record.folder) / METRICS
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        assert order(newest_id(path)) < order(events[-1].id)
        async with Index(service.registry.link, run) as index:
            assert not await give_up(index, path)
            path.unlink()
            assert not await give_up(index, path), "its folder is on another machine"
        assert await service.events(run) == events
        await service.registry.looked_at(run, given_up=False)
        assert not await service.registry.whole(60.0, 100), "it is looked at later"
        assert await service.registry.whole(0.0, 100)
        path.write_bytes(whole)


async def test_deleted_runs_and_those_that_never_began_are_not_listed(tmp_path: Path) -> None:
    async with running(tmp_path, INLINE, **ENDLESS) as (service, run):
        waits = await service.submit(recipe(MOCK))
        await service.registry.ask(waits, "stop")
        await service.registry.ask(run, "stop")
        await service.ended(run)
        assert [record.id for record in await service.registry.whole(0.0, 100)] == [run]
        await service.registry.delete(run)
        assert not await service.registry.whole(0.0, 100)
