"""What a service promises of its runs, with real runners, workers, agents and index servers, each
of them killed."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import uuid
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from orchestration.checkpoints import checkpoint
from orchestration.processes.handles import Process
from orchestration.recipe.schema import Recipe
from orchestration.service import agent as agents
from orchestration.service.agent import Agent, AgentError
from orchestration.state.documents import SCALE
from orchestration.state.paths import WHERE, shared_of
from orchestration.state.registry import RunRecord, WrongState
from pipeline.data.events import Event
from pipeline.index.client import Index
from tests.compose.sandbox import missing
from tests.orchestration.run.test_run import assert_equal, synchronous, weights_of
from tests.orchestration.runs import MOCK, TINY, forks, recipe
from tests.orchestration.services import Service, serving, shared_memory, told_once

INLINE: dict[str, Any] = {
    **MOCK,
    "launch": {**MOCK["launch"], "launcher": "inline", "max_restarts": 3},
}
PROCESSES: dict[str, Any] = {
    **MOCK,
    "launch": {**MOCK["launch"], "launcher": "process", "max_restarts": 3},
}
ENDLESS = {"train__steps": 5000}


def of(events: list[Event], kind: str) -> list[dict[str, Any]]:
    return [event.data for event in events if event.kind == kind]


def assert_whole(recipe: Recipe, events: list[Event]) -> None:
    """Every step was reported once, and every sample was trained once."""
    steps = recipe.train.steps
    rows = recipe.train.groups_per_step * recipe.algorithm.group_size
    reported = of(events, "step")
    assert [step["step"] for step in reported] == list(range(1, steps + 1))
    groups = sorted(group for step in reported for group in step["groups"])
    assert groups == list(range(steps * recipe.train.groups_per_step)), (
        "a group was trained twice, or never"
    )
    ledger = of(events, "ledger")[-1]
    assert ledger["trained"] == steps * rows
    assert ledger["generated"] == ledger["trained"] + ledger["filtered"] + ledger["in_flight"]


async def assert_finished(
    service: Service, run: str, recipe: Recipe, attempts: int = 1
) -> RunRecord:
    record = await service.ended(run)
    assert (record.state, record.reason, record.attempts) == ("finished", "", attempts)
    events = await service.events(run)
    assert_whole(recipe, events)
    assert events[-1].data == {"state": "finished", "reason": ""}
    told_once(service.metrics(record), events)
    return record


def die(process: Process) -> None:
    os.kill(process.pid, signal.SIGKILL)


@asynccontextmanager
async def running(
    tmp_path: Path, base: dict[str, Any] = INLINE, steps: int = 2, **changes: Any
) -> AsyncGenerator[tuple[Service, str], None]:
    """A service with an agent, and a run of it that has made some steps."""
    async with serving(tmp_path) as service, service.working():
        run = await service.submit(recipe(base, **changes))
        await service.steps(run, steps)
        yield service, run


async def test_runs_wait_for_room_and_begin_in_their_order(tmp_path: Path) -> None:
    of_all = recipe(INLINE)
    async with running(tmp_path, steps=1, **ENDLESS) as (service, first):
        waiting = [await service.submit(of_all) for _ in range(2)]
        positions = [(await service.registry.get(run)).position for run in waiting]
        assert positions == [1, 2]
        await service.registry.ask(first, "stop")
        stopped = await service.ended(first)
        assert (stopped.state, stopped.reason) == ("stopped", "stopped by request")
        records = [await assert_finished(service, run, of_all) for run in waiting]
        assert records[0].started is not None
        assert records[1].started is not None
        assert records[0].ended is not None
        assert records[0].ended <= records[1].started, "there is room for one"

        # What an ended run leaves: its folder, and what readers ask the index for.
        record = records[0]
        index = Index(service.url, waiting[0])
        assert (await index.ledger())["trained"] == of_all.train.steps * 16
        assert sorted(os.listdir(record.folder)) == [
            "checkpoints",
            "detail.jsonl",
            "logs",
            "metrics.jsonl",
            "recipe.json",
            "run.lock",
            "samples",
        ]
        await service.registry.delete(record.id)
        marker = ""
        async with asyncio.timeout(30):
            while await service.registry.doomed():
                marker = await service.registry.wait(marker, 0.5)
        assert record.id not in os.listdir(tmp_path / "runs")
        assert await index.past_events() == []
        await index.close()
    assert shared_memory(tmp_path) == []


async def test_workers_and_runners_are_killed_and_nothing_is_lost(tmp_path: Path) -> None:
    mock = recipe(PROCESSES, train__steps=30, checkpoint__every=4)
    async with serving(tmp_path) as service, service.working():
        run = await service.submit(mock)
        is_rollout = ("rollout-0", "started")
        started = await service.wait_for_event(
            run, "worker", lambda data: (data["worker"], data["change"]) == is_rollout
        )
        await service.steps(run, 2)
        os.kill(started.data["pid"], signal.SIGKILL)
        await service.wait_for_event(run, "worker", lambda data: data["change"] == "restarted")
        await service.steps(run, 6)
        _, process = await service.held(run)
        die(process)
        await service.wait_for_event(run, "worker", lambda data: data["change"] == "taken over")
        assert (await service.registry.get(run)).state != "running", "no runner has it yet"
        await assert_finished(service, run, mock, attempts=2)
        events = await service.events(run)
        assert [state["state"] for state in of(events, "state")] == [
            "created",
            "starting",
            "running",
            "starting",
            "running",
            "stopping",
            "finished",
        ]
        reasons = [
            worker["reason"] for worker in of(events, "worker") if worker["change"] == "taken over"
        ]
        assert reasons == ["its runner was ended by signal 9"]


async def test_after_a_runner_was_killed_the_weights_are_those_of_a_run_that_was_left_alone(
    tmp_path: Path,
) -> None:
    tiny = recipe(TINY, pipeline__staleness=0, train__steps=8, checkpoint__every=3)
    expected, weights = await synchronous(tiny)
    async with running(
        tmp_path, TINY, 5, pipeline__staleness=0, train__steps=8, checkpoint__every=3
    ) as (service, run):
        _, process = await service.held(run)
        die(process)
        record = await assert_finished(service, run, tiny, attempts=2)
        reported = of(await service.events(run), "step")
        assert [(step["reward_mean"], step["loss"]) for step in reported] == expected
        newest = checkpoint.latest(Path(record.folder) / "checkpoints")
        assert newest is not None
        assert newest.version == 8
        assert_equal(weights_of(tiny, newest), weights)


async def test_a_run_whose_runners_die_too_often_fails_with_the_reason(tmp_path: Path) -> None:
    async with running(tmp_path, launch__max_restarts=0, **ENDLESS) as (service, run):
        _, process = await service.held(run)
        die(process)
        record = await service.ended(run)
        assert record.state == "failed"
        assert record.reason == (
            "its runner died and launch.max_restarts = 0 is used up: its runner was ended by "
            "signal 9"
        )
        assert of(await service.events(run), "state")[-1] == {
            "state": "failed",
            "reason": record.reason,
        }
        assert WHERE not in os.listdir(record.folder), "it held the index's URL"
        assert shared_memory(tmp_path) == []


async def test_a_run_that_cannot_start_fails_with_its_reason(tmp_path: Path) -> None:
    wrong = recipe(INLINE, reward__functions=[{"name": "tests.orchestration.scores:boom"}])
    async with serving(tmp_path) as service, service.working():
        run = await service.submit(wrong)
        record = await service.ended(run)
        assert record.state == "failed"
        assert "the reward's own mistake" in record.reason


async def test_a_run_without_a_folder_fails_and_one_of_another_machine_is_left_alone(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as service:
        elsewhere = await service.submit(recipe(INLINE))
        assert await service.registry.take("elsewhere-0", "/elsewhere", uuid.uuid4().hex, -10_000)
        run = await service.submit(recipe(INLINE))
        (tmp_path / "runs").mkdir()
        (tmp_path / "runs" / run).write_text("in the way")
        async with service.working():
            record = await service.ended(run)
        assert record.state == "failed"
        assert "its runner cannot be started" in record.reason
        (tmp_path / "runs" / run).unlink()
        assert (await service.registry.get(elsewhere)).attempts == 1


async def test_runs_live_through_the_death_of_their_agent_and_of_the_index(tmp_path: Path) -> None:
    """An agent that is killed, one that is asked to end, and the service's own Valkey, killed under
    both."""
    async with serving(tmp_path) as service:
        run = await service.submit(recipe(INLINE, **ENDLESS))
        killed = service.start_agent()
        await service.steps(run, 2)
        _, process = await service.held(run)
        killed.kill()
        killed.wait()
        at = of(await service.events(run), "step")[-1]["step"]
        await service.steps(run, at + 3)
        assert (await service.registry.get(run)).state == "running", "it is: its runner lives"

        told_to_end = service.start_agent()
        await service.agent_works()
        # waits: the run that is found takes the only place
        second = await service.submit(recipe(INLINE))
        index = service.index_process()
        die(index)
        await index.wait()
        await service.steps(run, of(await service.events(run), "step")[-1]["step"] + 3)
        assert service.index_process() != index, "the agent has started another one"
        assert (await service.registry.get(second)).position == 1
        told_to_end.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(told_to_end.wait, 30) == 0
        assert process.alive()

        async with service.working():
            await service.registry.ask(run, "stop")
            record = await service.ended(run)
            assert (record.state, record.attempts) == ("stopped", 1)
            await process.wait()
            await assert_finished(service, second, recipe(INLINE))


async def test_a_paused_run_stays_so_when_its_runner_is_killed_and_writes_a_checkpoint_when_asked(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, checkpoint__every=300, pipeline__arena="64MiB", **ENDLESS) as (
        service,
        run,
    ):
        assert (await service.registry.ask(run, "pause")).state == "paused"
        _, process = await service.held(run)
        die(process)
        await service.wait_for_event(run, "worker", lambda data: data["change"] == "taken over")
        taken = await service.until(run, lambda record: record.attempts == 2, never=("running",))
        assert taken.state == "paused"
        ready = [
            e.id
            for e in await service.events(run)
            if e.kind == "worker" and e.data["change"] == "taken over"
        ][-1]
        index = Index(service.url, run)
        async with asyncio.timeout(60):  # all workers are there, and none of them works
            waiting = {"flow-0", "rollout-0", "update-0"}
            while waiting:
                for event in await index.events(ready):
                    ready = event.id
                    if event.kind == "worker" and event.data["change"] == "ready":
                        waiting.discard(event.data["worker"])
        await index.close()
        assert (await service.registry.get(run)).state == "paused"
        await service.registry.ask(run, "checkpoint")
        assert (await service.registry.ask(run, "resume")).state == "running"
        reported = await service.wait_for_event(run, "checkpoint", lambda data: data["requested"])
        assert Path(reported.data["path"]).name == f"step-{reported.data['version']:08d}"
        assert (
            checkpoint.open_checkpoint(Path(reported.data["path"])).version
            == reported.data["version"]
        )
        assert len(of(await service.events(run), "checkpoint")) == 1, "once is enough"


async def test_a_run_whose_shared_memory_is_gone_goes_on_from_its_checkpoint(
    tmp_path: Path,
) -> None:
    """As after a restart of the machine."""
    mock = recipe(INLINE, train__steps=12, checkpoint__every=3)
    async with serving(tmp_path) as service:
        run = await service.submit(mock)
        async with service.working():
            await service.wait_for_event(run, "checkpoint", lambda data: data["version"] >= 3)
            _, process = await service.held(run)
        die(process)
        await process.wait()
        (left,) = shared_memory(tmp_path)
        shutil.rmtree(left)
        saved = checkpoint.latest(tmp_path / "runs" / run / "checkpoints")
        assert saved is not None
        async with service.working():
            record = await service.ended(run)
        assert (record.state, record.reason) == ("finished", "")
        events = await service.events(run)
        rewound = next(e for e in events if e.kind == "worker" and e.data["change"] == "rewound")
        assert f"from the checkpoint of version {saved.version}" in rewound.data["reason"]
        again = [e.data["step"] for e in events if e.kind == "step" and e.id > rewound.id]
        assert again == list(range(saved.version + 1, 13))
        assert of(events, "ledger")[-1]["trained"] == 12 * 16


async def test_a_run_whose_checkpoints_are_away_fails_and_loses_nothing(tmp_path: Path) -> None:
    """After a restart of the machine, with a disk that is not mounted.

    It goes on when that is there again.
    """
    folder = tmp_path / "elsewhere"
    async with serving(tmp_path) as service:
        run = await service.submit(recipe(INLINE, checkpoint__every=3, **ENDLESS))
        async with service.working():
            await service.wait_for_event(run, "checkpoint", lambda data: data["version"] >= 3)
            _, process = await service.held(run)
        die(process)
        await process.wait()
        (left,) = shared_memory(tmp_path)
        shutil.rmtree(left)
        checkpoints = tmp_path / "runs" / run / "checkpoints"
        checkpoints.rename(folder)
        before = [event.id for event in await service.events(run)]
        async with service.working():
            record = await service.ended(run)
            assert record.state == "failed"
            assert "CheckpointMissing: checkpoint: the run's newest is of version" in record.reason
            assert "has none below" in record.reason
            events = await service.events(run)
            assert [event.id for event in events][: len(before)] == before
            assert not [
                event
                for event in events
                if event.kind == "worker" and event.data["change"] == "rewound"
            ]
            folder.rename(checkpoints)
            newest = checkpoint.latest(checkpoints)
            assert newest is not None
            await service.registry.reopen(
                record, recipe(INLINE, train__steps=newest.version + 2, checkpoint__every=3)
            )
            record = await service.ended(run)
        assert (record.state, record.reason) == ("finished", "")


async def test_memory_of_a_run_that_the_list_does_not_know_stays_while_its_folder_is_here(
    tmp_path: Path,
) -> None:
    """As when the service's index is on a disk that is not mounted, and an empty one is served in
    its place."""
    async with serving(tmp_path) as service:
        known = tmp_path / "runs" / "known-by-another-list"
        unknown = tmp_path / "runs" / "deleted"
        known.mkdir(parents=True)
        left = [shared_of(known), shared_of(unknown)]
        for each in left:
            each.mkdir()
        async with service.working():
            await service.ended(await service.submit(recipe(INLINE, train__steps=1)))
        assert [each.exists() for each in left] == [True, False]
        left[0].rmdir()


async def test_a_stopped_run_goes_on_with_other_keys_and_no_step_is_lost_or_doubled(
    tmp_path: Path,
) -> None:
    changes = {"train__steps": 10, "checkpoint__every": 100, "evaluate__every": 3}
    async with running(tmp_path, steps=2, **changes) as (service, run):
        await service.registry.ask(run, "stop")
        stopped = await service.ended(run)
        made = checkpoint.latest(tmp_path / "runs" / run / "checkpoints")
        assert made is not None
        longer = recipe(INLINE, **{**changes, "train__steps": made.version + 4})
        async with Index(service.registry.link, run) as index:
            await SCALE.put(index, 3)  # as if it had been scaled before it ended
            again = await service.registry.reopen(stopped, longer)
            assert await SCALE.get(index) is None, "it begins with rollout.workers"
        assert (again.ended, again.attempts) == (None, 0)
        assert stopped.ended is not None
        assert stopped.started is not None
        assert again.former_seconds == pytest.approx(stopped.ended - stopped.started)
        with pytest.raises(WrongState):  # it was resumed since
            await service.registry.reopen(stopped, longer)
        record = await service.ended(run)
        assert (record.state, record.reason, record.attempts) == ("finished", "", 1)
        events = await service.events(run)
        told_once(service.metrics(record), events)
        assert_whole(longer.model_copy(update={"name": record.name}), events)
        assert sorted({e["version"] for e in of(events, "evaluation")}) == [
            e["version"] for e in of(events, "evaluation")
        ], "each version once"
        assert (await service.registry.counts())["finished"] == 1
        with pytest.raises(
            WrongState, match="is finished; to resume it, it must be paused, or have ended"
        ):
            await service.registry.ask(run, "resume")


async def test_a_run_that_ended_before_it_was_recorded_is_resumed_once_it_is_and_by_the_agent_that_has_its_folder(
    tmp_path: Path,
) -> None:
    async with running(tmp_path / "here", steps=1, **ENDLESS) as (service, run):
        await service.registry.ask(run, "stop")
        record = await service.until(run, lambda record: record.state == "stopped")
        other = await service.submit(recipe(INLINE))
        again = await service.registry.reopen(record, recipe(INLINE, train__steps=5001))
        assert again.state in ("created", "starting", "running")
        await service.ended(other)
        await service.steps(run, 2)
        await service.registry.ask(run, "stop")
        record = await service.ended(run)
    # Only an agent of this folder takes it, though others look first.
    async with serving(tmp_path / "list") as service:
        run = await service.submit(recipe(INLINE))
        taken = await service.registry.take("a", "/folders/of-a", "t1", 60)
        assert taken is not None
        assert await service.registry.end(run, "t1", "stopped", "")
        await service.registry.reopen(await service.registry.get(run), recipe(INLINE))
        assert await service.registry.reopened() == {run: f"/folders/of-a/{run}"}
        assert await service.registry.take("b", "/folders/of-a", "t2", 60) is None, (
            "another machine, the same path"
        )
        again = await service.registry.take("a", "/folders/of-a", "t3", 60, [run])
        assert again is not None
        assert again.record.folder == f"/folders/of-a/{run}"


async def test_a_runner_that_hangs_is_ended_by_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has lost its lease is followed by another; one that does not stop is ended for
    good."""
    monkeypatch.setattr(agents, "SILENT_SECONDS", 0.5)
    monkeypatch.setattr(agents, "LOOK_SECONDS", 0.5)
    monkeypatch.setattr(agents, "GRACE_SECONDS", 0.5)
    async with running(tmp_path, launch__stop_timeout=0.5, **ENDLESS) as (service, run):
        _, hung = await service.held(run)
        hung.end(signal.SIGSTOP)
        await service.lapse(run)
        silent = await service.until(run, lambda record: record.state != "running")
        assert silent.state == "starting", "a run that no process executes is not shown as running"
        await hung.wait()
        await service.until(run, lambda record: record.state == "running")
        _, second = await service.held(run)
        assert second != hung
        second.end(signal.SIGSTOP)
        assert (await service.registry.ask(run, "stop")).state == "stopping"
        record = await service.ended(run)
        assert record.state == "stopped"
        assert not second.alive()


async def test_two_agents_on_one_index_share_its_runs(index_url: str, tmp_path: Path) -> None:
    mock = recipe(INLINE)
    async with serving(tmp_path, index_url) as service:
        runs = [await service.submit(mock) for _ in range(2)]
        with_both = [Agent(index_url, tmp_path / name, 1, forks=forks()) for name in ("a", "b")]
        stop = asyncio.Event()
        tasks = [asyncio.create_task(agent.run(stop)) for agent in with_both]
        for run in runs:
            await service.until(run, lambda record: record.position is None)
        with pytest.raises(AgentError, match="another agent works in"):
            await Agent(index_url, tmp_path / "a", 1).run(stop)
        records = [await assert_finished(service, run, mock) for run in runs]
        stop.set()
        await asyncio.gather(*tasks)
    assert {record.agent for record in records} == {agent.name for agent in with_both}


@pytest.mark.skipif(bool(missing()), reason=missing())
async def test_an_agent_takes_no_run_of_another_machine_with_the_same_name_and_folder(
    index_url: str, tmp_path: Path
) -> None:
    """Both machines have the same host name, and the service's data at the same path: only the
    first one has the run."""
    apart = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    apart += ["sh", "-c", f'mount -t tmpfs none {tmp_path} && exec "$0" "$@"']
    async with serving(tmp_path, index_url) as service, service.working() as here:
        run = await service.submit(recipe(INLINE, **ENDLESS))
        await service.steps(run, 2)
        there = service.start_agent(prefix=apart)
        other = await service.submit(recipe(INLINE))  # waits for room, which the second machine has
        taken = await service.until(other, lambda record: record.agent != "")
        await service.ended(other)
        assert taken.agent.rpartition("-")[0] == here.name.rpartition("-")[0], "the host name"
        assert taken.agent != here.name
        assert (await service.registry.get(run)).attempts == 1
        await service.registry.ask(run, "stop")
        record = await service.ended(run)
        # It goes on where its checkpoint is, though the other machine is free.
        await service.registry.reopen(record, recipe(INLINE, **ENDLESS))
        again = await service.until(run, lambda record: record.agent != "")
        assert again.agent == here.name
        await service.registry.ask(run, "stop")
        await service.ended(run)
        there.kill()
