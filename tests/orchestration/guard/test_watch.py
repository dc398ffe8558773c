"""The guard in runs: alarms as events, and what becomes of the run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from benchmarks.robustness import faults
from orchestration.event_feed import EventFeed
from orchestration.guard import past
from orchestration.guard.guard import Guard, GuardOptions
from orchestration.history.events_file import METRICS, MetricsFile, read_metrics
from orchestration.recipe.problems import RecipeError
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from orchestration.state.documents import JUDGED
from orchestration.supervise.watch import GuardFailed, GuardWatch
from orchestration.words import words
from orchestration.workers import rollout as builder
from pipeline.data.events import AlarmEvent, Event, StepEvent, WorkerEvent
from pipeline.index.client import Index
from tests.orchestration.guard.test_guard import step
from tests.orchestration.runs import MOCK, TINY, complete, executing, recipe

SAME = "tests.orchestration.guard.test_watch:same"
EQUAL = {
    "train__steps": 10,
    "reward__functions": [{"name": SAME}],
    "reward__processes": 0,
    "checkpoint__every": 100,
}


def same(completions: list[str], **_: Any) -> list[float]:
    return [0.5] * len(completions)


async def test_by_default_an_alarm_is_an_event_and_the_run_goes_on(tmp_path: Path) -> None:
    watched, result = await complete(
        Execution(RunFolder.create(recipe(MOCK, **EQUAL), tmp_path / "run"))
    )
    assert result.state == "finished"
    (alarm,) = watched.of("alarm")
    assert (alarm["metric"], alarm["step"], alarm["value"]) == ("equal_groups", 8, 1.0)
    assert "reward functions" in alarm["look"]


async def test_a_metric_that_is_off_raises_none(tmp_path: Path) -> None:
    watched, _ = await complete(
        Execution(
            RunFolder.create(recipe(MOCK, **EQUAL, guard__off=["equal_groups"]), tmp_path / "run")
        )
    )
    assert watched.of("alarm") == []
    with pytest.raises(
        RecipeError,
        match=r"guard\.off .*'entropi', which is not judged; use some "
        r"of: probe, ",
    ):
        recipe(MOCK, guard__off=["entropi"])


async def test_an_alarm_may_pause_the_run(tmp_path: Path) -> None:
    changes = {**EQUAL, "train__steps": 200, "guard__on_alarm": "pause"}
    async with executing(
        Execution(RunFolder.create(recipe(MOCK, **changes), tmp_path / "run"))
    ) as (watched, work):
        await watched.until(
            lambda: any(state["state"] == "paused" for state in watched.of("state"))
        )
        (paused,) = (state for state in watched.of("state") if state["state"] == "paused")
        assert paused["reason"].startswith(
            "guard: step 8: share of groups with equal rewards: rewards are equal in all groups of the first 8"
        )
        await watched.move("paused", "running")
        made = len(watched.of("step"))
        await watched.until(lambda: len(watched.of("step")) > made + 4)
        assert len(watched.of("alarm")) == 1, "it lasts"
        watched.stop.set()
        assert (await work).state == "stopped"


async def test_an_alarm_may_fail_the_run_at_the_first_attempt(tmp_path: Path) -> None:
    of = recipe(MOCK, **{**EQUAL, "guard__on_alarm": "fail"})
    watched, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert result.state == "failed"
    assert result.reason.startswith("guard: step 8: share of groups with equal rewards: ")
    assert "Look at what the reward functions return" in result.reason
    assert not [
        worker for worker in watched.of("worker") if worker["change"] in ("died", "restarted")
    ]


async def test_the_alarm_of_the_last_step_counts(tmp_path: Path) -> None:
    of = recipe(MOCK, **{**EQUAL, "guard__on_alarm": "fail", "train__steps": 8})
    _, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert (result.state, result.reason[:14]) == ("failed", "guard: step 8:")


def watch(index: Index, on_alarm: Any = "warn", folder: Path | None = None) -> GuardWatch:
    return GuardWatch(index, Guard(GuardOptions(gap_limit=2e-4)), on_alarm, folder)


async def alarms_in(index: Index) -> list[tuple[str, int]]:
    events = await index.past_events(count=5000)
    return [(event.data["metric"], event.data["step"]) for event in events if event.kind == "alarm"]


async def test_a_supervisor_that_follows_another_repeats_no_alarm_and_forgets_no_window(
    index: Index,
) -> None:
    for number in range(12):
        await index.emit(step(number, kl_reference=9.0 if number == 11 else 0.2))
    first = watch(index)
    await first.begin()
    assert await alarms_in(index) == [("kl_reference", 12)]
    # The next one is killed between the alarm and the note of how far it has judged.
    await index.emit(step(12, distinct_responses=1 / 64, kl_reference=0.2))
    await index.emit(
        AlarmEvent(metric="distinct_responses", step=13, version=13, value=0.0, reason="", look="")
    )
    for _ in range(2):
        await watch(index).begin()
    await index.emit(step(13, kl_reference=9.0))
    await index.emit(step(14, kl_reference=0.2, gap_mean_0=0.01))
    last = watch(index)
    await last.begin()
    found = await alarms_in(index)
    assert found == [
        ("kl_reference", 12),
        ("distinct_responses", 13),
        ("kl_reference", 14),  # step 13 was usual in between
        ("gap_mean_0", 15),
    ]


async def test_what_is_constant_by_construction_is_said_and_not_judged(index: Index) -> None:
    for number in range(20):
        await index.emit(step(number, clip_fraction=0.7 if number > 12 else 0.0))
    why = "is 0 by construction: the ratio is 1"
    constant = GuardWatch(index, Guard(GuardOptions(constants={"clip_fraction": why})), "fail")
    with capture_logs() as logs:
        await constant.begin()
    assert [(line["event"], line["metric"], line["reason"]) for line in logs] == [
        ("not judged", "clip_fraction", why)
    ]
    assert await alarms_in(index) == []


async def test_an_alarm_of_a_worker_acts_as_the_guards_own(index: Index) -> None:
    failing = watch(index, "fail")
    await failing.begin()
    alarm = AlarmEvent(
        metric="probe",
        step=3,
        version=3,
        value=0.1,
        reason="it differs",
        look="there",
        worker="rollout-0",
    )
    async with EventFeed.reading(index) as feed:
        running = asyncio.create_task(feed.feed(failing.take, failing.after))
        await index.emit(alarm)
        with pytest.raises(GuardFailed, match=r"guard: step 3: it differs\. there"):
            await asyncio.wait_for(running, 10)
    await watch(index, "fail").begin()  # a successor does not fail of it again


def recorded(path: Path, steps: Iterable[StepEvent], first_id: int = 1) -> Path:
    """A file of events with ``steps``, each with an id of its number behind ``first_id``."""
    with MetricsFile(path) as file:
        for number, data in enumerate(steps, start=first_id):
            file.event(Event(f"{number}-0", float(number), "step", data.wire()))
            noise = {"worker": "rollout-0", "stage": "rollout", "wall": float(number)}
            file.event(Event(f"{number}-1", float(number), "stage", noise))
    return path


def windows(guard: Guard) -> dict[str, list[float]]:
    return {name: list(window.values) for name, window in guard._windows.items()}


def about(guard: Guard) -> dict[str, Any]:
    """Its windows, but for the rounding of a file."""
    return {name: pytest.approx(values, rel=1e-5) for name, values in windows(guard).items()}


def after(steps: Iterable[StepEvent]) -> Guard:
    """A guard that has judged ``steps`` itself."""
    guard = Guard(GuardOptions(gap_limit=2e-4))
    for data in steps:
        guard.observe(data)
    return guard


async def test_a_resumed_run_goes_on_with_the_windows_of_its_steps(
    index: Index, tmp_path: Path
) -> None:
    """Its index is a new one: what was before is in its file alone, of which only the end is
    read."""
    sizes = list[int]()
    events = list[Event]()
    steps = [step(number, kl_reference=9.0 if number < 5000 else 0.2) for number in range(6000)]
    recorded(tmp_path / METRICS, steps)
    await index.emit(WorkerEvent(stage="rollout", worker="rollout-0", change="started"))

    def read(path: Path, last_bytes: int) -> Iterator[Event]:
        sizes.append(last_bytes)
        for event in read_metrics(path, last_bytes):
            events.append(event)
            yield event

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(past, "read_metrics", read)
        resumed = watch(index, "fail", tmp_path)
        await resumed.begin()
    assert sizes == [past.READ_BYTES[0]]
    assert sum(event.kind == "step" for event in events) < 5000
    assert windows(resumed.guard) == about(after(steps))
    assert await alarms_in(index) == []
    await index.emit(step(6000, kl_reference=9.0))
    with pytest.raises(GuardFailed, match=f"guard: step 6001: {words('kl_reference')}"):
        await resumed.catch_up()


async def test_a_run_that_another_runner_takes_over_keeps_its_windows(
    index: Index, tmp_path: Path
) -> None:
    """Its index has forgotten the older events, and its file lags behind."""
    steps = [step(number) for number in range(60)]
    file = recorded(tmp_path / METRICS, steps[:50])
    (tmp_path / "same").mkdir()
    for data in steps[30:]:
        await index.emit(data)
    events = await index.past_events(count=100)
    # as it is written: with the ids of the index
    with MetricsFile(tmp_path / "same" / METRICS) as same:
        for event in read_metrics(file):
            if event.kind == "step" and event.data["step"] <= 30:
                same.event(event)
        for event in events[:20]:
            same.event(event)
    await JUDGED.put(index, events[25].id)
    taken_over = watch(index, "warn", tmp_path / "same")
    await taken_over.begin()
    assert windows(taken_over.guard) == about(after(steps))
    assert await JUDGED.get(index) == events[-1].id


@pytest.mark.parametrize("in_file", ["removed steps", "none of them", "nothing"])
async def test_a_run_that_was_rewound_forgets_the_steps_that_it_makes_again(
    index: Index, tmp_path: Path, in_file: str
) -> None:
    steps = [step(number, kl_reference=0.2 if number < 20 else 9.0) for number in range(30)]
    for data in steps:
        await index.emit(data)
    first = watch(index)
    await first.begin()
    (alarm,) = await alarms_in(index)
    assert alarm == ("kl_reference", 21)
    await index.emit(
        WorkerEvent(stage="runner", worker="runner-0", change="rewound", version=20, reason="lost")
    )
    with MetricsFile(tmp_path / METRICS) as file:
        for event in await index.past_events(count=100):
            if in_file == "none of them" or event.kind != "worker":
                file.event(event)
    rewound = watch(index, "warn", None if in_file == "nothing" else tmp_path)
    await rewound.begin()
    assert windows(rewound.guard) == about(after(steps[:20]))
    await index.emit(step(20, kl_reference=9.0))
    await rewound.catch_up()
    assert await alarms_in(index) == [alarm, alarm], "it is unusual again"


async def test_a_file_of_any_origin_starts_no_alarm_and_ends_no_run(
    index: Index, tmp_path: Path
) -> None:
    lines = [
        '{"id": "1-0", "time": 1, "kind": "step", "data": {"step": 7}}',
        "torn",
        '{"id": 3}',
        "",
    ]
    (tmp_path / METRICS).write_text("\n".join(lines))
    strange = watch(index, "fail", tmp_path)
    await strange.begin()
    assert windows(strange.guard) == {}
    await watch(index, "fail", tmp_path / "missing").begin()


async def test_a_task_that_is_solved_raises_no_alarm_after_a_resume(tmp_path: Path) -> None:
    SCORED.clear()
    changes = {
        **EQUAL,
        "reward__functions": [
            {"name": "tests.orchestration.guard.test_watch:more_and_more_solved"}
        ],
        "guard__on_alarm": "pause",
        "checkpoint__every": 4,
    }
    of = recipe(MOCK, **{**changes, "train__steps": 24})
    watched, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert (result.state, watched.of("alarm")) == ("finished", [])
    assert [step["equal_groups"] for step in watched.of("step")][-8:] == [1.0] * 8
    with MetricsFile(tmp_path / "run" / METRICS) as file:
        for event in watched.events:
            file.event(event)
    resumed = Execution(RunFolder.resume(tmp_path / "run", ["train.steps=40"]))
    resumed.last_event = file.last
    async with asyncio.timeout(120):
        watched, result = await complete(resumed)
    assert (result.state, watched.of("alarm")) == ("finished", [])
    assert [step["step"] for step in watched.of("step")] == list(range(25, 41))


SCORED = list[int]()  # rows that were scored, by call


def more_and_more_solved(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """Every second prompt is solved at first, and later all of them."""
    SCORED.append(len(prompts))
    is_early = sum(SCORED) < 12 * 4 * 4
    return [
        0.5 + (hash(completion) % 7 - 3) / 100 if is_early and hash(prompt) % 2 else 0.5
        for prompt, completion in zip(prompts, completions, strict=True)
    ]


FAULTS = "benchmarks.robustness.faults:engine"


async def injected(tmp_path: Path, fault: str) -> tuple[list[dict[str, Any]], Any]:
    """The alarms of a run with the fault from version 3 on, and how it ended."""
    options = {"fault": fault, "since": 3}
    of = recipe(TINY, rollout__engine=FAULTS, rollout__options=options, launch__max_restarts=0)
    watched, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    return watched.of("alarm"), result


@pytest.mark.parametrize(
    ("fault", "look"),
    [
        ("undelivered", "The engine computes bit for bit what it computed with the weights before"),
        (
            "stale tensor",
            "Part of the weights is not the version's: one stale or misplaced tensor is enough",
        ),
        (
            "temperature",
            "asked for temperature 1 the engine's logprobs differ, asked for 0.769 "
            "they are the trainer's",
        ),
    ],
)
async def test_a_refused_probe_is_one_alarm_that_says_what_is_wrong(
    tmp_path: Path, fault: str, look: str
) -> None:
    alarms, result = await injected(tmp_path, fault)
    alarm = alarms[0]
    assert (alarm["metric"], alarm["worker"]) == ("probe", "rollout-0")
    assert alarm["step"] in (3, 4), "an engine may skip a version"
    assert alarm["value"] > alarm["limit"]
    assert look in alarm["look"]
    assert sum(one["metric"] == "probe" and one["step"] == alarm["step"] for one in alarms) == 1, (
        "of three attempts"
    )
    assert result.state == "failed"


async def test_an_adapter_that_was_not_delivered_is_an_alarm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = builder.rollout_engine

    def spoilt(*arguments: Any, **options: Any) -> Any:
        engine = make(*arguments, **options)
        faults.spoil(engine, "undelivered", 3)
        return engine

    monkeypatch.setattr(builder, "rollout_engine", spoilt)
    letters = [{"name": "tests.orchestration.scores:early_letters"}]  # so that there is an update
    of = recipe(
        TINY,
        model__lora={"rank": 4},
        reward__functions=letters,
        reward__processes=0,
        launch__max_restarts=0,
    )
    watched, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert result.state == "failed"
    assert watched.of("alarm")[0]["metric"] == "probe"
    assert "tensors or an adapter that it does not load" in watched.of("alarm")[0]["look"]


async def test_an_engine_with_another_vocabulary_never_starts(tmp_path: Path) -> None:
    alarms, result = await injected(tmp_path, "tokenizer")
    assert [(alarm["metric"], alarm["step"]) for alarm in alarms] == [("tokenizer", 0)]
    assert result.state == "failed"
    assert "the rollout engine has another vocabulary" in result.reason
    assert "which tokenizer the engine loads" in result.reason


async def test_a_cache_that_is_kept_where_it_should_be_rebuilt_is_found_in_its_first_step(
    tmp_path: Path,
) -> None:
    changes = {
        "rollout__max_tokens": 64,
        "rollout__on_update": "cut",
        "train__steps": 8,
        "reward__processes": 0,
    }
    # so that weights move
    changes |= {"reward__functions": [{"name": "tests.orchestration.scores:early_letters"}]}
    for fault, found in (("cache", {"gap_mean_resumed"}), ("", set())):
        options = {"fault": fault, "since": 0}
        of = recipe(TINY, rollout__engine=FAULTS, rollout__options=options, **changes)
        watched, result = await complete(Execution(RunFolder.create(of, tmp_path / f"run{fault}")))
        assert result.state == "finished"
        assert {alarm["metric"] for alarm in watched.of("alarm")} == found
        affected = [step["step"] for step in watched.of("step") if "gap_mean_resumed" in step]
        assert affected, "responses are cut by swaps"
        assert [alarm["step"] for alarm in watched.of("alarm")][:1] == affected[: len(found)]


async def test_a_run_that_drops_every_group_says_so_once(tmp_path: Path) -> None:
    drop = {"algorithm__options": {"drop_equal": True}, "algorithm__max_refill": 16}
    of = recipe(MOCK, **{**EQUAL, **drop, "guard__on_alarm": "fail"})
    watched, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert watched.of("step") == []
    (alarm,) = watched.of("alarm")
    assert (alarm["metric"], alarm["step"], alarm["value"]) == ("dropped_groups", 1, 64.0)
    assert (
        "64 groups in a row taught nothing, the last one because of: equal rewards" in result.reason
    )
