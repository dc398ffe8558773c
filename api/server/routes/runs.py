"""Routes about runs: submit, list, pause, resume, stop, checkpoint, scale, delete; stages,
checkpoints and logs of a run.

submit ──▶ the registry's queue ──▶ an agent, in another process, executes the run and follows pause, resume, …
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from aiohttp import web

from api.schemas.comparison import LabelsBody
from api.schemas.runs import (
    AlarmView,
    CheckpointsView,
    CheckpointView,
    Gate,
    Host,
    LogsQuery,
    RecipeSubmission,
    Resumption,
    RunPage,
    RunPath,
    RunsQuery,
    RunView,
    ScaledRun,
    Scaling,
    Stage,
    StagesView,
    StageWorker,
    SubmitHeaders,
    WaitingView,
    Warehouse,
    WhatIf,
    WhatIfView,
)
from api.server.http.problems import HTTPProblem, without_password
from api.server.routes.recipes import asked_apart, checked, question
from api.server.service.operations import Reply, operation
from api.server.service.run_status import RunStatus
from api.server.service.service import PRINCIPAL, Service
from api.server.service.starts import begin_fork, fork_of, start_of
from orchestration.checkpoints import checkpoint, recorded
from orchestration.recipe.flow import device_count
from orchestration.recipe.problems import suggest
from orchestration.recipe.schema import Recipe
from orchestration.state.documents import CHECKPOINT_REPORTED, RUN_FLOW
from orchestration.state.labels import Labels, NotLabels
from orchestration.state.paths import store_url
from orchestration.state.registry import RunRecord
from orchestration.supervise.scale import overrides_of, request_scale
from orchestration.supervise.waiting import waiting_chain
from pipeline.data.events import ENDED
from pipeline.index.claims import DROPPED
from pipeline.index.client import IndexRefused

TAIL_BYTES = 2**20  # of each log that are read, from its end
AT_ONCE = 16  # concurrent requests to the index for one page
RUN = "/v1/runs/{run}"


@operation(
    "POST",
    "/v1/runs",
    scope="run",
    summary="The run was made, and waits for its turn",
    tag="runs",
    status=201,
    also={200: "The run that the same Idempotency-Key made before"},
    errors=(404,),
    sends={"Location": "Where the run is."},
)
async def submit_run(
    service: Service,
    request: web.Request,
    headers: SubmitHeaders,
    body: RecipeSubmission,
    raw: bytes,
) -> Reply[RunView]:
    """Submits a run.

    It begins when fewer than the server's limit are active; until then `position` says how many are
    before it. A repeat under the same `Idempotency-Key` within a day makes no second one.
    """
    if service.settings.runs_of != "service":
        fix = "submit it to a service that `asyncdock serve` has started"
        raise HTTPProblem(403, "This server executes no runs.", kind="no-runs", fix=fix)
    async with fork_of(service, body) as fork:
        accepted = await checked(service, request, **question(raw, fork), plan=False)
        # the first one imports algorithms
        recipe = await asyncio.to_thread(Recipe.from_json, accepted["recipe"])
        await _refuse_full_queue(service)
        content = json.dumps(body.model_dump(exclude_unset=True), sort_keys=True).encode()
        fingerprint = hashlib.sha256(content).hexdigest()
        owner = request[PRINCIPAL].name
        submit = functools.partial(
            service.registry.submit, owner=owner, key=headers.key, fingerprint=fingerprint
        )
        record, is_new = await (begin_fork(fork, recipe, submit) if fork else submit(recipe))
    return Reply(
        await _view(service, record), 201 if is_new else 200, {"Location": f"/v1/runs/{record.id}"}
    )


@operation("GET", "/v1/runs", scope="read", summary="Runs, newest first", tag="runs")
async def list_runs(service: Service, query: RunsQuery) -> RunPage:
    records, after = await service.registry.list(**query.model_dump())
    limit = asyncio.Semaphore(AT_ONCE)

    async def view(record: RunRecord) -> RunView:
        async with limit:
            return await _view(service, record)

    return RunPage(runs=await asyncio.gather(*map(view, records)), next=after)


@operation("GET", RUN, scope="read", summary="A run", tag="runs", errors=(404,))
async def get_run(service: Service, path: RunPath) -> RunView:
    return await _view(service, await service.registry.get(path.run))


# What a run is asked to do: answered 202, with the run as it is then.
_asking: dict[str, Any] = {
    "scope": "run",
    "owned": True,
    "tag": "runs",
    "status": 202,
    "errors": (404, 409),
}


@operation("POST", f"{RUN}/pause", summary="It pauses", **_asking)
async def pause_run(service: Service, path: RunPath) -> RunView:
    """Nothing new is begun; what is being worked on ends. Harmless when it is paused already."""
    return await _view(service, await service.registry.ask(path.run, "pause"))


@operation("POST", f"{RUN}/resume", summary="It goes on", body_optional=True, **_asking)
async def resume_run(
    service: Service, request: web.Request, path: RunPath, body: Resumption
) -> RunView:
    """A paused run goes on at once.

    One that has ended waits in the queue again, and goes on from its newest checkpoint: with the
    `overrides`, which change its recipe for good, and a finished one with more `train.steps`. What
    may not change says why. Harmless when it is running, or waits, with this recipe already.
    """
    record = await service.registry.get(path.run)
    if record.state not in ENDED and body.start_version is not None:
        raise HTTPProblem(
            409,
            f"run {record.id!r} is {record.state}; start_version is accepted after the run has "
            f"ended",
            kind="wrong-state",
            field="start_version",
            value=body.start_version,
            fix="stop it first",
        )
    if record.state not in ENDED and not body.overrides:
        return await _view(service, await service.registry.ask(path.run, "resume"))
    recipe = await _changed(service, request, record, body.overrides)
    if record.state not in ENDED:
        if recipe != Recipe.recorded(record.recipe):
            detail = f"run {record.id!r} is {record.state}; its recipe can change when it has ended"
            fix = "stop it first; it goes on from its last step"
            raise HTTPProblem(
                409, detail, kind="wrong-state", field="overrides", value=body.overrides, fix=fix
            )
        return await _view(service, await service.registry.ask(path.run, "resume"))
    folder = service.folder(record)
    url = store_url(recipe, folder)
    start = await asyncio.to_thread(start_of, folder, url, body.start_version)
    steps = recipe.train.steps
    finished = record.state == "finished"
    if start is not None and (done := start.nothing_left(steps, finished=finished)):
        detail = f"run {record.id!r} {done}"
        fix = "for more, override train.steps"
        raise HTTPProblem(
            409, detail, kind="nothing-left", field="train.steps", value=steps, fix=fix
        )
    await _refuse_full_queue(service)
    if body.start_version is not None:
        await asyncio.to_thread(recorded.set_newer_aside, folder, url, body.start_version)
        await CHECKPOINT_REPORTED.put(service.index(record.id), body.start_version)
    return await _view(service, await service.registry.reopen(record, recipe))


async def _changed(
    service: Service, request: web.Request, record: RunRecord, overrides: Mapping[str, Any]
) -> Recipe:
    """Return the recipe of a run with ``overrides``, checked as that of a run that goes on."""
    folder = str(service.folder(record))
    checked_recipe = await checked(
        service, request, plan=False, recipe=record.recipe, overrides=overrides, folder=folder
    )
    return Recipe.from_json(checked_recipe["recipe"])


@operation("POST", f"{RUN}/stop", summary="It stops", **_asking)
async def stop_run(service: Service, path: RunPath) -> RunView:
    """One that waits never begins; one that runs ends its workers cleanly.

    Harmless when it is stopping or stopped.
    """
    return await _view(service, await service.registry.ask(path.run, "stop"))


@operation(
    "POST", f"{RUN}/checkpoint", summary="It writes a checkpoint after its next step", **_asking
)
async def checkpoint_run(service: Service, path: RunPath) -> RunView:
    """GET /v1/runs/{run}/checkpoints has it once it is whole."""
    return await _view(service, await service.registry.ask(path.run, "checkpoint"))


@operation(
    "POST", f"{RUN}/scale", summary="It is asked for another number of rollout workers", **_asking
)
async def scale_run(
    service: Service, request: web.Request, path: RunPath, body: Scaling
) -> ScaledRun:
    """New ones are started beside the others; the last ones park what they hold, and leave.

    Its `worker` events show it. A number that the recipe or this service does not allow is refused.
    A run that is resumed begins with its recipe's.
    """
    record = await service.registry.get(path.run)
    overrides = overrides_of(Recipe.recorded(record.recipe), body.rollout)
    await _changed(service, request, record, overrides)
    _, before = await request_scale(service.index(record.id), body.rollout)
    return ScaledRun(**vars(await _view(service, record)), rollouts_before=before)


@operation(
    "POST",
    f"{RUN}/what-if",
    scope="read",
    summary="What it would do",
    tag="runs",
    errors=(404, 409),
)
async def what_if_of_run(
    service: Service, request: web.Request, path: RunPath, body: WhatIf
) -> WhatIfView:
    """Simulates the run with its own measured costs, as it is and with other keys.

    Nothing of the run changes.
    """
    folder = service.folder(await service.registry.get(path.run))
    overrides = [f"{name}={json.dumps(value)}" for name, value in body.overrides.items()]
    return WhatIfView(
        **await asked_apart(service, request, {"what_if": str(folder), "overrides": overrides})
    )


@operation(
    "PATCH",
    RUN,
    scope="run",
    owned=True,
    summary="Its notes and tags",
    tag="runs",
    errors=(404,),
)
async def label_run(service: Service, path: RunPath, body: LabelsBody) -> RunView:
    record = await service.registry.get(path.run)
    tags = record.labels.tags if body.tags is None else body.tags
    notes = record.labels.notes if body.notes is None else body.notes
    try:
        labels = Labels(tuple(tags), notes)
    except NotLabels as error:
        raise HTTPProblem(422, str(error), kind="labels", field=error.field) from None
    return await _view(service, await service.registry.label(path.run, labels))


@operation(
    "DELETE",
    RUN,
    scope="run",
    owned=True,
    summary="The run and its data are gone",
    tag="runs",
    errors=(404, 409),
)
async def delete_run(service: Service, path: RunPath) -> None:
    """Only a run that has ended."""
    await service.registry.delete(path.run)
    await service.forget(path.run)


@operation(
    "GET", f"{RUN}/stages", scope="read", summary="The pipeline now", tag="runs", errors=(404,)
)
async def get_stages(service: Service, path: RunPath) -> StagesView:
    index = service.index((await service.registry.get(path.run)).id)
    try:
        stats, config, ledger, flow = await asyncio.gather(
            index.stats(), index.config(), index.ledger_event(), RUN_FLOW.get(index)
        )
    except IndexRefused:  # the run has not started
        gate = Gate(admitted=0, allowed=0, open=0)
        nothing: dict[str, dict[str, int]] = {key: {} for key in (*DROPPED, "ledger", "epochs")}
        return StagesView(
            stages=[],
            warehouses=[],
            hosts=[],
            published=0,
            trained=0,
            gate=gate,
            flow={},
            alarms=[],
            **nothing,
        )
    counts = dataclasses.asdict(ledger)
    del counts["version"]  # it is `trained` beside it
    dropped = {name: counts.pop(name) for name in DROPPED}
    status = await service.run_statuses.of(index)
    return StagesView(
        stages=[
            Stage(
                name=stage["name"],
                takes=stage["takes"],
                ready=int(stats["stages"][stage["name"]]["ready"]),
                leased=int(stats["stages"][stage["name"]]["leased"]),
                workers=list(_workers(status, stage["name"])),
            )
            for stage in config["stages"]
        ],
        ledger=counts,
        **dropped,
        warehouses=[
            Warehouse(name=name, **house)
            for name, house in sorted((stats["warehouses"] or {}).items())
        ],
        hosts=list(_hosts(status)),
        published=stats["published"],
        trained=stats["trained"],
        flow=flow or {},
        alarms=[
            AlarmView(time=time, **dataclasses.asdict(alarm))
            for time, alarm in status.totals.alarms
        ],
        gate=Gate(admitted=stats["admitted"], allowed=stats["gate"], open=stats["open"]),
        epochs=status.totals.epochs,
        trajectories=status.totals.trajectories,
    )


@operation(
    "GET",
    f"{RUN}/waiting",
    scope="read",
    summary="What it waits for now",
    tag="runs",
    errors=(404,),
)
async def get_waiting(service: Service, path: RunPath) -> WaitingView:
    """The chain of waiting: what training waits for, down to a worker and its last sign of life. Of
    a run that has ended: how, and what its rewards show."""
    record = await service.registry.get(path.run)
    if record.state in ENDED:
        from api.terminal.findings import findings_of

        findings = await asyncio.to_thread(
            lambda: findings_of(service.folder(record), Recipe.recorded(record.recipe))
        )
        return WaitingView(
            chain=[],
            state=record.state,
            reason=record.reason,
            ended=record.ended,
            findings=findings,
        )
    try:
        return WaitingView(chain=await waiting_chain(service.index(record.id)))
    except (IndexRefused, LookupError):  # the run has not started
        return WaitingView(chain=[])


@operation(
    "GET", f"{RUN}/checkpoints", scope="read", summary="Its checkpoints", tag="runs", errors=(404,)
)
async def get_checkpoints(service: Service, path: RunPath) -> CheckpointsView:
    folder = service.folder(await service.registry.get(path.run)) / "checkpoints"

    def read() -> list[CheckpointView]:
        return [view for usable in checkpoint.usable(folder) if (view := _checkpoint(usable))]

    return CheckpointsView(checkpoints=await asyncio.to_thread(read))


@operation(
    "GET",
    f"{RUN}/logs",
    scope="read",
    summary="The end of its logs",
    tag="runs",
    errors=(404,),
    produces="text/plain",
)
async def get_logs(service: Service, path: RunPath, query: LogsQuery) -> str:
    """Lines of JSON, one a line, oldest first: of one worker, or of all of them by their times."""
    folder = service.folder(await service.registry.get(path.run)) / "logs"

    def read() -> str | None:
        lines = _tail(folder, query.worker, query.lines)
        return None if lines is None else "".join(map(without_password, lines))

    text = await asyncio.to_thread(read)
    if text is None:
        workers = [*_log_files(folder)]
        fix = suggest(query.worker, workers) if workers else "wait until it has one"
        detail = "No worker of this run has a log by that name."
        raise HTTPProblem(
            404, detail, kind="unknown-worker", field="query.worker", value=query.worker, fix=fix
        )
    return text


async def _refuse_full_queue(service: Service) -> None:
    waiting = (await service.registry.counts())["created"]
    if waiting >= service.settings.max_waiting:
        detail = f"There are {waiting} runs in the queue, as many as it takes."
        raise HTTPProblem(
            429,
            detail,
            kind="queue-full",
            fix="submit it again later",
            headers={"Retry-After": "60"},
        )


async def _view(service: Service, record: RunRecord) -> RunView:
    facts = dict(vars(record))
    step = facts.pop("step")
    labels = facts.pop("labels")
    if step is None and record.state != "created":
        step = await service.run_statuses.step(service.index(record.id), record)
    return RunView(
        **facts,
        tags=[*labels.tags],
        notes=labels.notes,
        steps=int(record.recipe["train"]["steps"]),
        steps_done=step.step if step else 0,
        reward=step.reward_mean if step else None,
        devices=_devices(json.dumps(record.recipe)),
    )


@functools.lru_cache(1024)
def _devices(recipe: str) -> int:
    return device_count(Recipe.from_json(recipe.encode()))


def _workers(status: RunStatus, stage: str) -> Iterator[StageWorker]:
    for name, worker in sorted(status.totals.workers.items()):
        if worker.latest.stage == stage:
            process = status.process(name)
            state, pid = status.totals.processes.get(process, ("", 0))
            node, host = status.totals.nodes.get(process, ("", ""))
            yield StageWorker(
                **vars(worker.latest),
                time=worker.time,
                recent=worker.recent,
                process=process,
                state=state,
                pid=pid,
                node=node,
                host=host,
            )


def _hosts(status: RunStatus) -> Iterator[Host]:
    nodes = status.totals.nodes
    processes = status.totals.processes
    for name in sorted(name for name, (_, host) in nodes.items() if host == name):
        workers = sorted(worker for worker, (_, host) in nodes.items() if host == name != worker)
        yield Host(name=name, node=nodes[name][0], state=processes[name][0], workers=workers)


def _checkpoint(usable: checkpoint.Checkpoint) -> CheckpointView | None:
    """Return the view of a checkpoint; None when it is removed while it is read, as a run keeps
    only the newest ones."""
    try:
        size = sum(file.stat().st_size for file in usable.path.rglob("*") if file.is_file())
        time = usable.path.stat().st_mtime
    except FileNotFoundError:
        return None
    return CheckpointView(version=usable.version, path=str(usable.path), time=time, bytes=size)


def _log_files(folder: Path) -> dict[str, Path]:
    """Return the logs by worker, without links, which could lead to any file."""
    return {
        path.stem: path for path in folder.glob("*.log") if path.is_file() and not path.is_symlink()
    }


def _tail(folder: Path, worker: str, lines: int) -> list[str] | None:
    """Return the last lines of one worker's log, or of all logs by time; None when ``worker`` has
    no log."""
    files = _log_files(folder)
    if worker:
        return _last_lines(files[worker], lines) if worker in files else None
    timed_lines: list[tuple[str, str]] = []
    for path in files.values():
        time = ""
        for line in _last_lines(path, lines):
            time = _time(line) or time
            timed_lines.append((time, line))
    return [line for _, line in sorted(timed_lines, key=lambda timed: timed[0])][-lines:]


def _last_lines(path: Path, lines: int) -> list[str]:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - TAIL_BYTES))
        tail = file.read(TAIL_BYTES).decode("utf-8", "replace").splitlines(keepends=True)
    complete_lines = tail if size <= TAIL_BYTES else tail[1:]
    return [line if line.endswith("\n") else line + "\n" for line in complete_lines[-lines:]]


def _time(line: str) -> str:
    """Return the ISO timestamp of a JSON log line; "" for another line."""
    try:
        entry = json.loads(line)
    except ValueError:
        return ""
    return str(entry.get("timestamp", "")) if isinstance(entry, dict) else ""
