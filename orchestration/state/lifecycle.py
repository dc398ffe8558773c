"""Requests to runs, which are found by their folders, and the end of a run of a service."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import structlog

from orchestration.history.events_file import METRICS, newest_events
from orchestration.state.lock import LOCK
from orchestration.state.paths import WHERE, shared_of
from orchestration.state.recording import record_rest
from orchestration.state.registry import Registry
from pipeline.data.events import LIVE
from pipeline.index.client import Index
from pipeline.locks import is_held

log = structlog.get_logger()
T = TypeVar("T")

ANSWER_SECONDS = 10.0  # for which a command waits for the index of a run in a folder
LEASE_VARIABLE = "ASYNCDOCK_LEASE"  # in a runner's environment: the token of its lease


class NoneAlive(LookupError):
    """No command executes the run in a folder; the message has the fix."""


async def ask_in_folder(folder: Path, ask: Callable[[Index], Awaitable[T]]) -> tuple[str, T]:
    """Return the id of the run that a command executes in ``folder``, and what ``ask`` returns with
    its index. Raises NoneAlive when no command does, and LookupError for a run of a service."""
    try:
        where = json.loads((folder / WHERE).read_text())
        if not where["hosted"] and not is_held(folder / LOCK):
            where = {}  # its command was killed
    except OSError:
        where = {}
    if not where:
        raise NoneAlive(f"run: none is alive in {folder}{await asyncio.to_thread(_ending, folder)}")
    if where["hosted"]:
        raise LookupError(f"run: {folder} is run {where['run']} of a service; give that id")
    async with Index(where["index"], where["run"], timeout=ANSWER_SECONDS) as index:
        return where["run"], await ask(index)


def _ending(folder: Path) -> str:
    """Return when and how the run in ``folder`` has ended, and what goes on with it, as a text."""
    resume = f"asyncdock resume {folder}"
    newest = newest_events(folder / METRICS, {"state"}).get("state")
    if newest is None:
        return f"; `{resume}` goes on with one that has ended"
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(newest.time))
    match newest.data["state"]:
        case "finished":
            return f": it finished at {at}; `{resume} --set train.steps=…` makes more steps"
        case "stopped" | "failed" as state:
            return f": it {state} at {at}; `{resume}` goes on with it"
        case _:
            return f": its command ended without it; `{resume}` goes on with it"


async def conclude(registry: Registry, run: str, token: str, state: str, reason: str) -> bool:
    """Record that a run has ended, in the state of its own keys or else in ``state`` for
    ``reason``, and remove its samples from the index and from shared memory. Does nothing and
    returns False when ``token`` does not hold it. Idempotent."""
    active = await registry.find_active(run)
    if active is None or active.token != token:
        return False
    async with Index(registry.link, run) as index:
        await index.transition(["", "created", *LIVE, "stopping"], state, reason)
        state, reason, _ = await index.state()
        folder = Path(active.record.folder) if active.record.folder else None
        if folder is not None and await asyncio.to_thread(folder.is_dir):
            try:
                await record_rest(index, folder / METRICS)
            except OSError as error:
                log.error("the run's events are in the index alone", run=run, error=str(error))
        await index.retire()
    if folder is not None:
        with contextlib.suppress(OSError):
            (folder / WHERE).unlink(missing_ok=True)  # a runner that was killed has not removed it
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(shared_of(folder), ignore_errors=True)
    return await registry.end(run, token, state, reason)
