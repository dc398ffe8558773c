"""The registry: the list of a service's runs, in the index that they share.

    submit ─▶ waiting ── an agent takes the oldest ─▶ its runner holds a lease ─▶ ended ─▶ deleted
                 ▲                                                                └ reopen: it goes on from its checkpoint
                 └───────────────────────────────────────────────────────────────┘
    ask    ─▶ the run's own state in the index, which its supervisor and its workers follow
    wait   ◀─ any change of the list; blocks on the server

Each function of ``registry.lua`` is atomic. The state of an active run is read from the run's own
keys; the list has no copy of it. A run without a valid lease is not shown as running.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from orchestration.recipe.schema import Recipe
from orchestration.state.documents import CHECKPOINT_ASKED, SCALE
from orchestration.state.labels import Labels
from pipeline.data.events import ENDED, LIVE, StepEvent
from pipeline.documents.kinds import Topic
from pipeline.index.calls import library
from pipeline.index.client import Index, Link

Ask = Literal["pause", "resume", "stop", "checkpoint", "scale"]

LEASE_SECONDS = 10.0  # for which a runner holds its run; renewed after a third of it
SETTLE_SECONDS = 10.0  # between the last state of a run and its entry in the list, at most
LIST_CALLS = 20  # of the index for one page of the list: 250 runs are looked at in each
MOST_RUNS = 5000  # that are listed at once
Page = tuple[list["RunRecord"], str]
_LIST = "@runs"  # in keys, in place of a run's id, which cannot begin with @
_TOPIC = Topic("runs")
# request → states in which it is allowed, and the state that follows
_MOVES: dict[str, tuple[tuple[str, ...], str]] = {
    "pause": (("running",), "paused"),
    "resume": (("paused",), "running"),
    "stop": (("created", *LIVE), "stopping"),
    "checkpoint": (("running", "paused"), ""),
    "scale": (LIVE, ""),
    "delete": (ENDED, ""),
}


def new_id(name: str) -> str:
    """Return an id for a run of this ``name``."""
    return f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}"


class UnknownRun(LookupError):
    """The registry has no run with the id ``run``."""

    def __init__(self, run: str) -> None:
        super().__init__(f"run: {run!r} is not in this service; list its runs to see their ids")


class WrongState(RuntimeError):
    """A run cannot do what was ``asked`` in its present ``state``."""

    def __init__(self, run: str, state: str, asked: str, ended: float | None = None) -> None:
        *others, last = _MOVES[asked][0]
        states = f"{', '.join(others)} or {last}" if others else last
        if asked == "resume":
            states += ", or have ended"
        at = time.strftime("; it ended at %Y-%m-%d %H:%M:%S UTC", time.gmtime(ended or 0.0))
        super().__init__(
            f"run {run!r} is {state}; to {asked} it, it must be {states}{at if ended else ''}"
        )
        self.state = state
        self.asked = asked


async def ask_active(index: Index, what: Ask) -> str:
    """Ask the active run of ``index`` for ``what``, whoever executes it.

    Returns its state then. Raises WrongState.
    """
    allowed, to = _MOVES[what]
    if what == "checkpoint":
        state = (await index.state())[0]
        changed = False
        if state in allowed:
            await CHECKPOINT_ASKED.put(index, uuid.uuid4().hex)
            return state
    else:
        not_begun = ("",) if what == "stop" else ()  # an active run without a state yet
        state, changed = await index.transition([*not_begun, *allowed], to)
    if not changed and state != to:
        raise WrongState(index.run, state, what)
    return state


class ReadOnly(RuntimeError):
    """The run is shown by a server that changes none; the message has the fix."""

    def __init__(self, run: str, asked: str) -> None:
        super().__init__(
            f"run {run!r} is only shown here; to {asked} it, use the command line, or the service "
            f"that executes it"
        )


class KeyReused(ValueError):
    """The idempotency key was used for another request."""


@dataclass(frozen=True)
class RunRecord:
    """A run in the list.

    Times in Unix seconds. ``started``: when it began, or was resumed last; it had run
    ``former_seconds`` before. ``position`` in the queue from 1, None when it has begun;
    ``attempts``: number of its runners so far.
    """

    id: str
    name: str
    state: str
    reason: str
    position: int | None
    owner: str
    created: float
    started: float | None
    ended: float | None
    agent: str
    attempts: int
    folder: str
    recipe: dict[str, Any]
    former_seconds: float = 0.0
    step: StepEvent | None = None
    """The newest, where it is not read from the index."""
    labels: Labels = field(default_factory=Labels)


@dataclass(frozen=True)
class ActiveRun:
    """A run that an agent has taken.

    ``token``: its lease; ``left``: seconds until the lease ends, negative when it has; ``process``:
    its runner, "" while that starts.
    """

    record: RunRecord
    token: str
    process: str
    left: float


class Registry:
    """The list of runs at ``url``.

    ``timeout``: seconds for one call with its retries. ``link``: its connections, which other
    indexes of the same server may share.
    """

    def __init__(self, url: str, *, timeout: float = 30.0) -> None:
        self.url = url
        self.link = Link(url, timeout=timeout)
        self._index = Index(self.link, _LIST)
        self._loaded = False
        self._loading = asyncio.Lock()
        self._reading = asyncio.Lock()
        self._everything = dict[str, RunRecord]()
        self._marker = ""  # of the list when it was read

    async def close(self) -> None:
        await self._index.close()
        await self.link.close()

    def index(self, run: str) -> Index:
        """Return the index of ``run``. It has no connections of its own, and need not be closed."""
        return Index(self.link, run)

    # ── for users of the service ──

    async def submit(
        self,
        recipe: Recipe,
        *,
        owner: str = "",
        key: str = "",
        fingerprint: str = "",
        folder: Path | None = None,
    ) -> tuple[RunRecord, bool]:
        """Append a run to the queue.

        ``folder``: that of the run, named by its :func:`new_id`, where files of it are there
        already. Returns the run, and whether this call created it: for a day, the same ``key`` and
        ``owner`` return the first run. Raises :class:`KeyReused` when its ``fingerprint`` was
        another one.
        """
        # All runs are in the index of the service. Its URL may contain a password, so no recipe
        # shows it.
        recipe = recipe.model_copy(
            update={"pipeline": recipe.pipeline.model_copy(update={"index": "embedded"})}
        )
        known = {"name": recipe.name, "owner": owner, "recipe": recipe.to_json()}
        known |= {"key": key, "fingerprint": fingerprint, "folder": str(folder or "")}
        reply: dict[str, Any] = {"taken": True}
        while "taken" in reply:
            run = folder.name if folder else new_id(recipe.name)
            reply = await self._call("submit", run=run, **known)
            if folder and "taken" in reply:
                raise FileExistsError(folder)
        if "reused" in reply:
            raise KeyReused(
                f"idempotency key {key!r} belongs to run {reply['reused']!r} of another request; "
                f"use another key"
            )
        if reply["made"]:
            await self._move(run, [""], "created")
        return await self.get(reply["run"]), reply["made"]

    async def get(self, run: str) -> RunRecord:
        """Return the record of ``run``. Raises :class:`UnknownRun`."""
        if not (entry := await self._call("get", run=run)):
            raise UnknownRun(run)
        return (await self._records([entry]))[0]

    async def list(
        self, *, state: str = "", name: str = "", owner: str = "", after: str = "", limit: int = 50
    ) -> Page:
        """Return runs, newest first, and the cursor of the next page ("": there is none).

        ``name``: part of the name, in any case; ``after``: a cursor. Looks at some thousand runs at
        most: a page may hold fewer than ``limit``, or none, and not be the last one. Raises
        ValueError for an invalid cursor.
        """
        if after and not (after.isascii() and after.isdigit()):
            raise ValueError(
                f"after: {after!r} is not a cursor; give one that an earlier page "
                f"ended with, or none"
            )
        phase = (
            ""
            if not state
            else "waiting"
            if state == "created"
            else "ended"
            if state in ENDED
            else "active"
        )
        wanted = {
            "phase": phase,
            "state": state if phase == "ended" else "",
            "name": name,
            "owner": owner,
        }
        out: list[RunRecord] = []
        for _ in range(LIST_CALLS):
            reply = await self._call("list", **wanted, after=after, limit=limit - len(out))
            after = reply["next"]
            records = await self._records(list(reply["runs"] or ()))
            out += [record for record in records if state in ("", record.state)]
            if not after or len(out) >= limit:
                break
        return out, after

    async def everything(self) -> Sequence[RunRecord]:
        """Return the newest :data:`MOST_RUNS` runs, newest first. Those that have ended are read
        again only when the list has changed."""
        async with self._reading:
            marker = await self.wait(self._marker, 0)
            if marker != self._marker or not self._everything:
                everything: list[RunRecord] = []
                after = ""
                while len(everything) < MOST_RUNS:
                    page, after = await self.list(after=after, limit=250)
                    everything += page
                    if not after:
                        break
                self._everything = {record.id: record for record in everything[:MOST_RUNS]}
                self._marker = marker
            else:
                active = {run.record.id: run.record for run in await self.active()}
                self._everything.update(
                    {run: active[run] for run in self._everything.keys() & active.keys()}
                )
            return [*self._everything.values()]

    async def label(self, run: str, labels: Labels) -> RunRecord:
        """Give ``run`` these notes and tags. Raises :class:`UnknownRun`."""
        if not await self._call("label", run=run, labels=labels.to_json()):
            raise UnknownRun(run)
        return await self.get(run)

    async def counts(self) -> dict[str, int]:
        """Return the number of waiting runs (``created``), and of ended runs by state."""
        return {state: int(count) for state, count in (await self._call("counts")).items()}

    async def ask(self, run: str, what: Ask) -> RunRecord:
        """Pause, resume, stop a run or request a checkpoint; idempotent.

        A waiting run stops at once, an active one when its workers have released their rows; a
        checkpoint is written after the next optimizer step. An ended run is resumed by
        :meth:`reopen`. Raises :class:`UnknownRun` and :class:`WrongState`.
        """
        record = await self.get(run)
        if what == "stop" and record.state == "created":
            reason = "stopped before it began"
            if await self._call("cancel", run=run, reason=reason):
                await self._move(run, ["", "created"], "stopped", reason)
                return await self.get(run)
            record = await self.get(run)  # an agent was faster
        allowed, to = _MOVES[what]
        if what == "resume" and record.state in ("created", "starting"):
            return record  # it will run
        if record.state not in (*allowed, to) and not (
            what == "stop" and record.state == "stopped"
        ):
            raise WrongState(run, record.state, what, record.ended)
        if record.state not in allowed:
            return record
        async with Index(self.link, run) as index:
            await ask_active(index, what)
        await self.touch()
        return await self.get(run)

    async def reopen(self, record: RunRecord, recipe: Recipe) -> RunRecord:
        """Put the ended run ``record`` into the queue again, to go on with ``recipe`` from its
        newest checkpoint, on the agent that has its folder. Raises :class:`UnknownRun`, and
        :class:`WrongState` when it has changed since ``record`` was read."""
        run = record.id
        marker = ""
        patience = time.monotonic() + SETTLE_SECONDS
        while record.state in ENDED and record.ended is None and time.monotonic() < patience:
            marker = await self.wait(marker, 1.0)  # it has ended; its runner is about to record it
            record = await self.get(run)
        if record.ended is not None and (await self.get(run)).ended == record.ended:
            await self._move(run, ENDED, "created")  # before an agent can take it
            async with Index(self.link, run) as index:
                await SCALE.remove(index)  # it begins with rollout.workers
            ended = round(record.ended * 1000)
            if await self._call("reopen", run=run, ended=ended, recipe=recipe.to_json()):
                return await self.get(run)
        raise WrongState(run, (await self.get(run)).state, "resume")

    async def delete(self, run: str) -> None:
        """Delete an ended run from the list and the index; the agent that has its folder removes
        the folder. Raises :class:`UnknownRun` and :class:`WrongState`."""
        marker = ""
        patience = time.monotonic() + SETTLE_SECONDS
        while (answer := await self._call("delete", run=run)) != "done":
            if answer == "unknown":
                raise UnknownRun(run)
            state = (await self.get(run)).state
            if state not in ENDED or time.monotonic() > patience:
                raise WrongState(run, state, "delete")
            marker = await self.wait(marker, 1.0)  # it has ended; its runner is about to record it
        await self.erase(run)

    async def wait(self, after: str, timeout: float) -> str:
        """Wait until the list has changed since the marker ``after`` ("": the beginning), at most
        ``timeout`` seconds. Returns the new marker."""
        return await self._index.woken(_TOPIC, after, timeout)

    async def whole(self, ago: float, most: int) -> Sequence[RunRecord]:
        """Return up to ``most`` runs that ended ``ago`` seconds ago or earlier, with all events in
        the index still."""
        return await self._records(
            list(await self._call("whole", ago=int(ago * 1000), most=most) or ())
        )

    async def looked_at(self, run: str, *, given_up: bool) -> None:
        """Leave ``run`` out of :meth:`whole`: for good when its events were ``given_up``, or for a
        while."""
        await self._call("looked_at", run=run, given_up=given_up)

    async def tick(self) -> None:
        """Have time pass for leases: a longer gap than 2.5 s between two calls does not count."""
        await self._call("tick")

    async def touch(self) -> None:
        """Wake the callers of :meth:`wait`: a run's state has changed."""
        await self._call("touch")

    # ── for agents and runners ──

    async def reopened(self) -> dict[str, str]:
        """Return the waiting runs that have run before, and their folders."""
        return dict(await self._call("reopened") or {})

    async def take(
        self, agent: str, folders: str, token: str, lease: float, here: Sequence[str] = ()
    ) -> ActiveRun | None:
        """Take the run that has waited longest for ``agent``, for ``lease`` seconds under
        ``token``, with a folder below ``folders``; of reopened runs, which go on from the
        checkpoints in their folders, only those that are ``here``. Returns None when none waits."""
        arguments = {"agent": agent, "folders": folders, "token": token, "here": list(here)}
        entry = await self._call("take", **arguments, lease=int(lease * 1000))
        return await self._active(entry) if entry else None

    async def retake(
        self, run: str, old: str, token: str, agent: str, lease: float, *, most: int, window: float
    ) -> Literal["taken", "lost", "used up"]:
        """Replace the lease ``old`` by ``token``, as its runner died.

        "lost": ``old`` no longer holds the run. "used up": more than ``most`` runners have died
        within ``window`` seconds, this one among them.
        """
        arguments = {"run": run, "old": old, "token": token, "agent": agent, "most": most}
        outcome: Literal["taken", "lost", "used up"] = await self._call(
            "retake", **arguments, lease=int(lease * 1000), window=int(window * 1000)
        )
        return outcome

    async def renew(self, run: str, token: str, process: str, lease: float = LEASE_SECONDS) -> bool:
        """Hold the run for another ``lease`` seconds. Returns False when another lease holds it."""
        return await self._call(
            "renew", run=run, token=token, process=process, lease=int(lease * 1000)
        )

    async def end(self, run: str, token: str, state: str, reason: str) -> bool:
        """Record that the run has ended. Returns False when ``token`` does not hold it."""
        return await self._call("end", run=run, token=token, state=state, reason=reason)

    async def active(self) -> Sequence[ActiveRun]:
        """Return the runs that agents have taken and that have not ended."""
        return [await self._active(entry) for entry in await self._call("active") or ()]

    async def find_active(self, run: str) -> ActiveRun | None:
        """Return an active run; None when it is not active."""
        entry = await self._call("get", run=run)
        return await self._active(entry) if entry and entry["phase"] == "active" else None

    async def doomed(self) -> dict[str, str]:
        """Return deleted runs and their folders, which may still exist."""
        return dict(await self._call("doomed") or {})

    async def remove(self, run: str) -> None:
        """Record that the folder of a deleted run is removed."""
        await self._call("remove", run=run)

    async def erase(self, run: str) -> None:
        """Remove the keys of a deleted run from the index."""
        async with Index(self.link, run) as index:
            await index.erase()

    async def _call(self, name: str, /, **arguments: Any) -> Any:
        if not self._loaded:
            async with self._loading:
                if not self._loaded:
                    await self._index.load()
                    functions = (resources.files(__package__) / "registry.lua").read_text(
                        encoding="utf-8"
                    )
                    await self._index.load(library("asyncdock_runs", functions))
                    self._loaded = True
        return await self._index.call(f"runs_{name}", **arguments)

    async def _move(self, run: str, allowed: Sequence[str], state: str, reason: str = "") -> None:
        async with Index(self.link, run) as index:
            await index.transition(allowed, state, reason)

    async def _active(self, found: Mapping[str, Any]) -> ActiveRun:
        record = (await self._records([found]))[0]
        return ActiveRun(record, found["token"], found["process"], found["left"] / 1000)

    async def _records(self, found: Sequence[Mapping[str, Any]]) -> Sequence[RunRecord]:
        """Return entries of the list as records, with the present states of active runs."""
        active = [entry["id"] for entry in found if entry["phase"] == "active"]
        states = dict(zip(active, await self._index.states(active), strict=True))
        return [_record(entry, states.get(entry["id"])) for entry in found]


def _record(kept: Mapping[str, Any], now: tuple[str, str] | None) -> RunRecord:
    """Return an entry of the list as a record.

    ``now``: state and reason in an active run's own keys.
    """
    if kept["phase"] == "waiting":
        state = "created"
        reason = ""
    elif kept["phase"] == "ended":
        state = kept["state"]
        reason = kept["reason"]
    else:
        state, reason = now or ("", "")
        if state in ("", "created"):
            state = "starting"
        silent = -kept["left"] / 1000
        if state == "running" and silent > 0:
            state = "starting"
            since = silent + LEASE_SECONDS
            reason = (
                f"its runner last renewed its lease {since:.0f} s ago; an agent has to take it over"
            )
    known: dict[str, Any] = {
        name: kept[name] for name in ("id", "name", "owner", "agent", "folder")
    }
    known |= {
        name: int(kept[name]) / 1000 if name in kept else None
        for name in ("created", "started", "ended")
    }
    known["former_seconds"] = int(kept.get("former", 0)) / 1000
    known |= {"position": kept.get("position"), "attempts": int(kept["attempts"])}
    known |= {"labels": Labels.from_json(kept.get("labels", "{}"))}
    return RunRecord(**known, state=state, reason=reason, recipe=json.loads(kept["recipe"]))
