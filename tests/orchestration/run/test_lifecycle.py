"""A run's folder has one run at a time, a stop loses no step, and what no restart mends is tried
once."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from orchestration.checkpoints import checkpoint
from orchestration.history.events_file import METRICS, MetricsFile, read_metrics
from orchestration.recipe.loading.load import parse_recipe
from orchestration.recipe.problems import RecipeError
from orchestration.recipe.schema import Recipe
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from orchestration.state.live import live_index
from orchestration.state.lock import LOCK, RunError, RunLocked, lock_run
from orchestration.state.paths import WHERE
from orchestration.workers.engines import rollout_engine, train_engine
from pipeline.data.events import Event, LedgerEvent
from pipeline.index.embedded import EmbeddedIndex
from stages.engines.torch.rollout import TorchRolloutEngine
from stages.samples.reading import newest
from stages.samples.sample_log import SampleLog
from tests.orchestration.runs import MOCK, TINY, complete, executing, recipe
from tests.orchestration.services import serving

STEPS = {"train__steps": 500, "checkpoint__every": 100, "pipeline__arena": "256MiB"}


def contents(folder: Path) -> dict[str, int]:
    return {
        str(path.relative_to(folder)): path.stat().st_mtime_ns
        for path in folder.iterdir()
        if path.is_file()
    }


# ── one run in a folder ──


async def test_a_live_run_is_neither_resumed_nor_replaced_and_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "run"
    async with executing(Execution(RunFolder.create(recipe(MOCK, train__steps=30), out))) as (
        watched,
        work,
    ):
        await watched.until(lambda: len(watched.of("step")) >= 2)
        before = contents(out)
        for second in (RunFolder.resume, partial(RunFolder.create, recipe(MOCK))):
            with pytest.raises(
                RunLocked,
                match=rf"is executed by process {os.getpid()} \(.*\) "
                rf"since \d{{4}}-",
            ):
                second(out)
        assert contents(out) == before
        result = await work
    assert result.state == "finished", result.reason
    assert not [event for event in watched.of("worker") if event["change"] == "restarted"]
    with pytest.raises(RunError, match="nothing to resume"):
        Execution(RunFolder.resume(out))
    with pytest.raises(RunError, match="is not empty"):
        Execution(RunFolder.create(recipe(MOCK), out))


def test_the_lock_of_a_killed_process_is_free_and_its_number_is_not_believed(
    tmp_path: Path,
) -> None:
    pid = os.fork()
    if pid == 0:
        lock_run(tmp_path)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert (tmp_path / LOCK).read_text() == f"{pid}\n"
    lock = lock_run(tmp_path)
    (tmp_path / LOCK).write_text(f"{pid}\n")
    with pytest.raises(RunLocked, match=f"is executed by process {os.getpid()} .*; stop it first"):
        lock_run(tmp_path)
    lock.close()
    lock.close()
    assert RunFolder.create(recipe(MOCK), tmp_path).begins == 0, (
        "a folder with nothing but a lock file is empty"
    )


@contextmanager
def observed(folder: Path) -> Iterator[None]:
    """Four threads look, each every millisecond, whether the run in ``folder`` goes on."""
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.001):
            live_index(folder)

    with ThreadPoolExecutor(4) as pool:
        looking = [pool.submit(look) for _ in range(4)]
        try:
            yield
        finally:
            ended.set()
    for one in looking:
        one.result()


def test_those_who_look_whether_a_run_goes_on_disturb_neither_it_nor_one_another(
    tmp_path: Path,
) -> None:
    """As several pages of a dashboard and a plot do, each second, while the run is resumed."""
    where = {"index": "redis://127.0.0.1:1", "run": "tiny-1", "hosted": ""}
    (tmp_path / WHERE).write_text(json.dumps(where))
    assert live_index(tmp_path) is None
    assert not (tmp_path / LOCK).exists(), "who looks makes no file"
    lock_run(tmp_path).close()
    with ThreadPoolExecutor(4) as pool:
        assert not any(pool.map(live_index, [tmp_path] * 2000))
    with observed(tmp_path):
        for _ in range(300):
            lock_run(tmp_path).close()
    with lock_run(tmp_path):
        assert live_index(tmp_path) == where
    assert live_index(tmp_path) is None


async def test_a_service_s_live_run_is_not_resumed_here_even_between_two_runners(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as service:
        run = await service.submit(recipe(MOCK, launch__launcher="inline", **STEPS))
        async with service.working():
            await service.steps(run, 1)
            folder = Path((await service.registry.get(run)).folder)
            _, process = await service.held(run)
            with pytest.raises(RunLocked, match=f"is executed by process {process.pid}"):
                Execution(RunFolder.resume(folder))
        # as a machine that is shut down does: the next agent takes the run over
        process.end(signal.SIGTERM)
        await process.wait()
        assert json.loads((folder / WHERE).read_text())["hosted"]
        with pytest.raises(RunLocked, match=f"run {run} of a service.*asyncdock runs stop {run}"):
            Execution(RunFolder.resume(folder))
        async with service.working():
            made = len([event for event in await service.events(run) if event.kind == "step"])
            await service.steps(run, made + 1)
            await service.until(run, lambda record: record.state == "running")
            await service.registry.ask(run, "stop")
            record = await service.ended(run)
        assert record.state == "stopped"
        steps = [event.data["step"] for event in await service.events(run) if event.kind == "step"]
    saved = checkpoint.latest(folder / "checkpoints")
    assert saved is not None, "a stop over REST writes one too"
    assert saved.version == len(steps)


# ── its index may die at any moment ──


@pytest.mark.parametrize(
    "moment", ["before anything is in it", "twice in a row", "while its restart is reported"]
)
async def test_the_index_may_be_killed_before_the_supervisor_is_there(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once: the run does not wait for a call's deadline."""
    run = Execution(RunFolder.create(recipe(MOCK, train__steps=3), tmp_path / "run"))
    prepare = run._prepare
    killed = list[int]()

    def kill() -> None:
        assert run.index.server is not None
        assert run.index.server.pid is not None
        killed.append(run.index.server.pid)
        os.kill(run.index.server.pid, signal.SIGKILL)

    async def prepared() -> None:
        kill()
        await prepare()
        if moment != "before anything is in it":
            kill()

    monkeypatch.setattr(run, "_prepare", prepared)
    if moment == "while its restart is reported":
        emit = run._emit_restart

        async def killing(reason: str) -> None:
            if len(killed) == 2:
                kill()
            await emit(reason)

        monkeypatch.setattr(run, "_emit_restart", killing)
    watched, result = await complete(run)
    assert result.state == "finished", result.reason
    assert [step["step"] for step in watched.of("step")] == [1, 2, 3]
    assert len(killed) == {"before anything is in it": 1, "twice in a row": 2}.get(moment, 3)
    restarts = [event for event in watched.of("worker") if event["worker"] == "index-0"]
    assert restarts
    assert all("ended by signal 9" in event["reason"] for event in restarts)


def test_an_index_that_is_killed_while_it_starts_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = EmbeddedIndex(tmp_path / "data")
    answers = server._answers
    asked = iter([False])  # on a busy machine it may answer at the first look
    monkeypatch.setattr(server, "_answers", lambda: next(asked, True) and answers())
    starting = server.starting()
    next(starting)
    first = server.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    for pause in starting:
        time.sleep(pause)
    assert server.alive()
    assert server.pid != first
    server.stop()


async def test_an_index_that_dies_too_often_fails_the_run_in_words(tmp_path: Path) -> None:
    run = Execution(
        RunFolder.create(recipe(MOCK, launch__max_restarts=1, **STEPS), tmp_path / "run")
    )
    async with executing(run) as (watched, work):
        for deaths in (1, 2):
            await watched.until(
                lambda: (
                    run.index.server is not None
                    and run.index.server.alive()
                    and bool(watched.of("step"))
                )
            )
            assert run.index.server is not None
            assert run.index.server.pid is not None
            os.kill(run.index.server.pid, signal.SIGKILL)
            if deaths == 1:
                await watched.until(
                    lambda: any(event["worker"] == "index-0" for event in watched.of("worker"))
                )
        result = await work
    assert result.state == "failed"
    assert (
        "the embedded index ended by signal 9 and launch.max_restarts = 1 is used up"
        in result.reason
    )
    assert "valkey.log" in result.reason


# ── a stop loses nothing ──


async def test_a_stopped_run_has_a_checkpoint_of_its_last_step_and_no_step_twice(
    tmp_path: Path,
) -> None:
    """With real engines and processes, two ranks: all of them write it."""
    out = tmp_path / "run"
    of = recipe(
        TINY,
        train__steps=40,
        checkpoint__every=30,
        launch__launcher="process",
        train__dp=2,
        train__threads=1,
    )
    async with executing(Execution(RunFolder.create(of, out))) as (watched, work):
        await watched.until(lambda: len(watched.of("step")) >= 2)
        watched.stop.set()
        result = await work
    done = len(watched.of("step"))
    assert (result.state, result.checkpoint is not None) == ("stopped", True)
    assert result.checkpoint is not None
    assert result.checkpoint.version == done < 30
    assert watched.of("checkpoint")[-1]["version"] == done


async def test_stopping_a_run_that_starts_does_not_wait_for_it(tmp_path: Path) -> None:
    """Its workers hold nothing yet."""
    run = Execution(RunFolder.create(recipe(TINY, launch__launcher="process"), tmp_path / "run"))
    async with executing(run) as (watched, work):
        await watched.until(
            lambda: any(event["change"] == "started" for event in watched.of("worker"))
        )
        watched.stop.set()
        async with asyncio.timeout(20):
            result = await work
    assert (result.state, result.checkpoint) == ("stopped", None)
    assert not watched.of("step")


def test_a_resumed_run_s_metrics_tell_each_step_once(tmp_path: Path) -> None:
    """What was made after the checkpoint is removed: it is made again."""

    def event(kind: str, number: int, **data: Any) -> Event:
        return Event(f"{number}-0", float(number), kind, data)

    with MetricsFile(tmp_path / METRICS) as file:
        for step in range(5):
            file.event(event("step", 2 * step + 1, step=step + 1, version=step + 1))
            file.event(event("sync", 2 * step + 2, worker="update-0", version=step + 1, bytes=8))
            if step == 2:
                file.event(Event("6-1", 6.5, "checkpoint", {"version": 3}))
        file.event(event("state", 11, state="stopped"))
    with (tmp_path / METRICS).open("ab") as cut_short:
        cut_short.write(b'{"id": "12-0", "ki')
    with MetricsFile(tmp_path / METRICS) as file:
        file.rewind(3)
        assert file.last == "11-0"
        file.event(event("step", 13, step=4, version=4))
    kept = list(read_metrics(tmp_path / METRICS))
    assert [found.data["step"] for found in kept if found.kind == "step"] == [1, 2, 3, 4]
    synced = [found.data for found in kept if found.kind == "sync"]
    assert [found["version"] for found in synced] == [1, 3], (
        "those of a minute are one, up to a checkpoint"
    )
    assert sum(found["bytes"] for found in synced) == 3 * 8
    assert [found.kind for found in kept].count("state") == 1
    rewound = {"stage": "runner", "worker": "runner-0", "change": "rewound", "version": 2}
    with MetricsFile(tmp_path / METRICS) as file:
        file.event(event("worker", 14, **rewound))
        file.event(event("step", 15, step=3, version=3))
    kept = list(read_metrics(tmp_path / METRICS))
    assert [found.data["step"] for found in kept if found.kind == "step"] == [1, 2, 3]
    assert [found.id for found in kept if found.kind == "step"][-1] == "15-0"


def test_ledgers_turns_and_forecasts_of_removed_steps_go_with_them(tmp_path: Path) -> None:
    counts = {name: 0 for name in ("generated", "trained", "filtered", "remade", "in_flight")}
    rest = {"redelivered": 0, **counts, **{f"{name}_tokens": 0 for name in counts}}
    forecast = {"step_seconds": 1.0, "bound": 1, "before": 1}
    with MetricsFile(tmp_path / METRICS) as file:
        file.event(Event("1-0", 1.0, "ledger", rest))  # of an older program
        for version in range(5):
            at = 10 * version + 2
            time = 1000.0 * (version + 1)
            file.event(
                Event(
                    f"{at}-0",
                    time,
                    "forecast",
                    {"step": version + 1, "version": version, **forecast},
                )
            )
            file.event(Event(f"{at + 1}-0", time, "ledger", {**rest, "version": version}))
            turn = {"worker": "update-0", "phase": "training", "version": version}
            file.event(Event(f"{at + 2}-0", time, "turn", turn))
        file.rewind(2)
    stays = list(read_metrics(tmp_path / METRICS))
    ledgers = [event.decoded() for event in stays if event.kind == "ledger"]
    assert [ledger.version for ledger in ledgers if isinstance(ledger, LedgerEvent)] == [
        None,
        0,
        1,
        2,
    ]
    assert [event.data["version"] for event in stays if event.kind == "turn"] == [0, 1, 2]
    assert [event.data["step"] for event in stays if event.kind == "forecast"] == [1, 2, 3]


async def test_each_ledger_of_a_run_says_of_which_version_it_is(tmp_path: Path) -> None:
    watched, _ = await complete(Execution(RunFolder.create(recipe(MOCK), tmp_path / "run")))
    versions = [ledger["version"] for ledger in watched.of("ledger")]
    assert versions == sorted(versions)
    assert set(versions) == set(range(1, 7))


async def test_checkpoints_leave_no_progress_bar_in_the_logs(tmp_path: Path) -> None:
    changes = {"launch__launcher": "process", "train__steps": 2, "checkpoint__every": 1}
    watched, result = await complete(
        Execution(RunFolder.create(recipe(TINY, **changes), tmp_path / "run"))
    )
    assert (result.state, len(watched.of("checkpoint"))) == ("finished", 2)
    logs = {path.name: path.read_text() for path in (tmp_path / "run" / "logs").iterdir()}
    assert "update-0.log" in logs
    assert {name: text for name, text in logs.items() if "%|" in text or "\r" in text} == {}


def test_samples_of_steps_that_are_made_again_stand_once(tmp_path: Path) -> None:
    book = SampleLog(tmp_path, 1 << 20)
    for step in range(1, 6):
        book.add([{"step": step, "group": step, "place": 0, "response": "old"}])
    book.rewind(3)
    book.add([{"step": 4, "group": 4, "place": 0, "response": "new"}])
    assert [(sample["step"], sample["response"]) for sample in newest(tmp_path)] == [
        (4, "new"),
        (3, "old"),
        (2, "old"),
        (1, "old"),
    ]


# ── what no restart mends ──


TORCH = {"engine": "torch"}
TWICE = "failed twice before its first work, for the same reason"


def refuses(recipe: Any, *, version: int, weights: Path | None) -> Any:
    raise ValueError("this engine cannot run that model")


def breaks(recipe: Any, *, version: int, weights: Path | None) -> Any:
    raise RuntimeError("the engine's core has ended")


def loses_descriptors(recipe: Any, *, version: int, weights: Path | None) -> Any:
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 1, hard))
    return [open("/dev/null") for _ in range(64)]


@pytest.mark.parametrize(
    ("engine", "attempts", "reason"),
    [
        ("refuses", 1, "rollout-0: ValueError: this engine cannot run that model"),
        ("breaks", 2, f"rollout-0 {TWICE}: RuntimeError: the engine's core has ended"),
        ("loses_descriptors", 1, "rollout-0: OSError: [Errno 24] Too many open files"),
    ],
)
async def test_what_no_restart_mends_fails_the_run_at_once(
    engine: str, attempts: int, reason: str, tmp_path: Path
) -> None:
    launcher = "process" if engine == "loses_descriptors" else "inline"
    of = recipe(TINY, rollout__engine=f"{__name__}:{engine}", launch__launcher=launcher)
    watched, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert result.state == "failed"
    assert result.reason.startswith(reason)
    started = [event for event in watched.of("worker") if event["change"] == "started"]
    assert [event["worker"] for event in started].count("rollout-0") == attempts


def decodes_nothing(recipe: Recipe, error: Exception, weights: Path | None) -> TorchRolloutEngine:
    """A real engine whose model raises ``error`` in the thread that computes, at its first
    token."""
    engine = rollout_engine(
        recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update=TORCH)}), version=0
    )
    assert isinstance(engine, TorchRolloutEngine)

    def decode(tokens: Any) -> Any:
        raise error

    engine._decoder.decode = decode  # type: ignore[method-assign]
    return engine


def knows_no_decoder(recipe: Any, *, version: int, weights: Path | None) -> Any:
    return decodes_nothing(recipe, KeyError("decoder"), weights)


def has_other_shapes(recipe: Any, *, version: int, weights: Path | None) -> Any:
    return decodes_nothing(
        recipe, RuntimeError("the size of tensor a (4) must match that of b (5)"), weights
    )


def trains_nothing(recipe: Any, *, ranks: Any, meeting: Any) -> Any:
    engine = train_engine(
        recipe.model_copy(update={"train": recipe.train.model_copy(update=TORCH)})
    )

    def train_batch(batch: Any, algorithm: Any) -> Any:
        raise TypeError("forward() got an unexpected keyword argument 's_aux'")

    engine.train_batch = train_batch  # type: ignore[method-assign]
    return engine


@pytest.mark.parametrize(
    ("side", "engine", "attempts", "reason"),
    [
        (
            "rollout",
            "knows_no_decoder",
            1,
            "rollout-0: EngineFailed: the rollout engine failed: KeyError('decoder')",
        ),
        (
            "rollout",
            "has_other_shapes",
            2,
            f"rollout-0 {TWICE}: EngineFailed: the rollout engine failed: RuntimeError(",
        ),
        (
            "train",
            "trains_nothing",
            1,
            "update-0: TypeError: forward() got an unexpected keyword argument 's_aux'",
        ),
    ],
)
async def test_a_model_that_an_engine_cannot_compute_fails_the_run_at_its_first_work(
    side: str, engine: str, attempts: int, reason: str, tmp_path: Path
) -> None:
    of = recipe(TINY, **{f"{side}__engine": f"{__name__}:{engine}"})
    watched, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert result.state == "failed"
    assert result.reason.startswith(reason), result.reason
    worker = reason.partition(" ")[0].rstrip(":")
    started = [event for event in watched.of("worker") if event["change"] == "started"]
    assert [event["worker"] for event in started].count(worker) == attempts


async def test_the_same_error_after_a_step_is_one_that_a_restart_may_mend(tmp_path: Path) -> None:
    """An engine that fails once in the middle: its rows are delivered again, and the run ends as it
    should."""
    FAILURES.clear()
    of = recipe(TINY, train__engine=f"{__name__}:fails_once")
    watched, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert result.state == "finished", result.reason
    died = [event["reason"] for event in watched.of("worker") if event["change"] == "died"]
    assert died == ["TypeError: only this once"]


FAILURES: list[int] = []


def fails_once(recipe: Any, *, ranks: Any, meeting: Any) -> Any:
    engine = train_engine(
        recipe.model_copy(update={"train": recipe.train.model_copy(update=TORCH)})
    )
    train = engine.train_batch
    calls = itertools.count()

    def train_batch(batch: Any, algorithm: Any) -> Any:
        if next(calls) == 2 and not FAILURES:
            FAILURES.append(1)
            raise TypeError("only this once")
        return train(batch, algorithm)

    engine.train_batch = train_batch  # type: ignore[method-assign]
    return engine


async def test_a_model_that_no_engine_runs_ends_the_run_at_the_first_attempt(
    tmp_path: Path,
) -> None:
    """A checkpoint as a new user makes one.

    `asyncdock check` refuses it; here the recipe is not checked with its files.
    """
    from transformers import BloomConfig, BloomForCausalLM

    from stages.model.load import tiny_tokenizer

    model = BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4))
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    data = {**TINY, "model": {"source": str(tmp_path / "model")}}
    with pytest.raises(
        RecipeError,
        match=r"cannot be run by rollout\.engine = 'torch' "
        r"\(.*BloomForCausalLM",
    ):
        parse_recipe(data)
    watched, result = await complete(
        Execution(RunFolder.create(parse_recipe(data, files=False), tmp_path / "run"))
    )
    assert result.state == "failed"
    assert "BloomForCausalLM" in result.reason
    assert "max_restarts" not in result.reason
    started = [event["worker"] for event in watched.of("worker") if event["change"] == "started"]
    assert len(started) == len(set(started)), "no worker was started again"
