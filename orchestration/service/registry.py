"""The registry: the runs of a service, in the index that they all share.

    submit ─▶ waiting ── an agent takes it, oldest first ─▶ its runner holds a lease ─▶ ended ─▶ deleted
    ask    ─▶ the run's own state in the index, which its supervisor and its workers follow
    wait   ◀─ whatever changes in the list; blocking on the server, never polling

Each function of ``registry.lua`` is one atomic step. How an active run fares is read from the run's own keys, so there is no
copy of its state that could be wrong; a run whose runner has lost its lease is not shown as running.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

from orchestration.recipe.schema import Recipe
from pipeline.index.client import Index, Link

Ask = Literal["pause", "resume", "stop", "checkpoint"]

ENDED = ("finished", "stopped", "failed")
LIVE = ("starting", "running", "paused")
LEASE_SECONDS = 10.0  # for which a runner holds its run; renewed at a third of it
SETTLE_SECONDS = 10.0  # between the last state of a run and its entry in the list, at most
CHECKPOINT_ASKED = (
    "checkpoint:asked"  # a document of the run: the latest request, until `checkpoint:written` says the same
)
CHECKPOINT_WRITTEN = "checkpoint:written"
Page = tuple[list["RunRecord"], str]
_LIST = "@runs"  # no run's id begins with it
_TOPIC = "runs"
# What must hold before, and what the run's state becomes; a state that is already so is left.
_MOVES: dict[str, tuple[tuple[str, ...], str]] = {
    "pause": (("running",), "paused"),
    "resume": (("paused",), "running"),
    "stop": (LIVE, "stopping"),
}
_POSSIBLE = {
    "pause": "running",
    "resume": "paused",
    "stop": "created, starting, running or paused",
    "checkpoint": "running or paused",
    "delete": "finished, stopped or failed",
}


class UnknownRun(LookupError):
    """There is no such run."""


class WrongState(RuntimeError):
    """A run in ``state`` cannot do what was ``asked``."""

    def __init__(self, run: str, state: str, asked: str) -> None:
        super().__init__(f"run {run!r} is {state}; to {asked} it, it must be {_POSSIBLE[asked]}")
        self.state, self.asked = state, asked


class KeyReused(ValueError):
    """The idempotency key was used for something else."""


@dataclass(frozen=True)
class RunRecord:
    """What a service knows of a run. Times in Unix seconds; ``position`` 1 is the next to begin, None has begun;
    ``attempts`` counts the runners that it has had."""

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


@dataclass(frozen=True)
class Held:
    """An active run as its agent and its runner know it: ``token`` is the lease, ``left`` the seconds until it ends, or
    those since it has (negative), ``process`` who holds it ("" while the runner is starting)."""

    record: RunRecord
    token: str
    process: str
    left: float


class Registry:
    """The list of runs at ``url``. ``timeout``: seconds for one call, all retries included. ``link``: its connections, for
    further indexes of the same server."""

    def __init__(self, url: str, *, timeout: float = 30.0) -> None:
        self.url = url
        self.link = Link(url, timeout=timeout)
        self._index = Index(self.link, _LIST)
        self._loaded = False
        self._loading = asyncio.Lock()

    async def close(self) -> None:
        await self._index.close()
        await self.link.close()

    # ── for whoever uses the service ──

    async def submit(
        self, recipe: Recipe, *, owner: str = "", key: str = "", fingerprint: str = ""
    ) -> tuple[RunRecord, bool]:
        """Put a run at the end of the queue; True when this call made it. ``key`` makes a repeat harmless for a day: the
        same ``owner``'s run with the same ``fingerprint`` is returned. Raises :class:`KeyReused` for another one."""
        run = f"{recipe.name}-{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}"
        # A service's runs are all in its index, whose URL may hold a password and is nobody else's business.
        recipe = recipe.model_copy(update={"pipeline": recipe.pipeline.model_copy(update={"index": "embedded"})})
        reply = await self._call(
            "submit",
            run=run,
            name=recipe.name,
            owner=owner,
            recipe=recipe.to_json(),
            key=key,
            fingerprint=fingerprint,
        )
        if "reused" in reply:
            raise KeyReused(
                f"idempotency key {key!r} belongs to run {reply['reused']!r}, which was asked for otherwise; use another key"
            )
        if reply["made"]:
            await self._move(run, [""], "created")
        return await self.get(reply["run"]), reply["made"]

    async def get(self, run: str) -> RunRecord:
        """Raises :class:`UnknownRun`."""
        return (await self._shown([await self._kept(run)]))[0]

    async def list(self, *, state: str = "", name: str = "", owner: str = "", after: str = "", limit: int = 50) -> Page:
        """Runs, newest first, and the cursor of the next page ("": this was the last). ``name`` is a part of the name, in
        any case of letters; ``after`` a cursor. Raises ValueError for one that is none."""
        if after and not (after.isascii() and after.isdigit()):
            raise ValueError(f"after: {after!r} is not a cursor; give one that an earlier page ended with, or none")
        phase = "" if not state else "waiting" if state == "created" else "ended" if state in ENDED else "active"
        out: list[RunRecord] = []
        while len(out) < limit:
            reply = await self._call(
                "list",
                phase=phase,
                state=state if phase == "ended" else "",
                name=name,
                owner=owner,
                after=after,
                limit=limit - len(out),
            )
            after = reply["next"]
            found = await self._shown(list(reply["runs"] or ()))
            out += [record for record in found if state in ("", record.state)]
            if not after:
                break
        return out, after

    async def counts(self) -> dict[str, int]:
        """How many runs wait (`created`), and how many have ended in which state, in the whole list."""
        return {state: int(count) for state, count in (await self._call("counts")).items()}

    async def ask(self, run: str, what: Ask) -> RunRecord:
        """Ask a run to do something; asking again for what is already so is harmless. A run that waits is stopped at once,
        an active one as soon as its workers have put down what they hold. A checkpoint is written after the next optimizer
        step. Raises :class:`UnknownRun` and :class:`WrongState`."""
        record = await self.get(run)
        if what == "stop" and record.state == "created":
            reason = "stopped before it began"
            if await self._call("cancel", run=run, reason=reason):
                await self._move(run, ["", "created"], "stopped", reason)
                return await self.get(run)
            record = await self.get(run)  # an agent was faster
        if what == "checkpoint":
            if record.state not in ("running", "paused"):
                raise WrongState(run, record.state, what)
            async with self._of(run) as index:
                await index.put(CHECKPOINT_ASKED, uuid.uuid4().hex)
            return record
        allowed, to = _MOVES[what]
        if record.state not in (*allowed, to) and not (what == "stop" and record.state == "stopped"):
            raise WrongState(run, record.state, what)
        if record.state in allowed:
            begun = ("", "created") if what == "stop" else ()  # it is active, but its runner has not said so yet
            async with self._of(run) as index:
                state, changed = await index.transition([*begun, *allowed], to)
                if not changed and state != to:
                    raise WrongState(run, state, what)
            await self.touch()
        return await self.get(run)

    async def delete(self, run: str) -> None:
        """Forget a run that has ended, with all that the index has of it. Its folder is removed by the agent that has it.
        Raises :class:`UnknownRun` and :class:`WrongState`."""
        marker, patience = "", time.monotonic() + SETTLE_SECONDS
        while (said := await self._call("delete", run=run)) != "done":
            if said == "unknown":
                raise UnknownRun(_unknown(run))
            state = (await self.get(run)).state
            if state not in ENDED or time.monotonic() > patience:
                raise WrongState(run, state, "delete")
            marker = await self.wait(marker, 1.0)  # it has ended; its runner is about to say so here
        await self.erase(run)

    async def wait(self, after: str, timeout: float) -> str:
        """Block until anything in the list has changed since the marker ``after`` ("": the beginning), or ``timeout``
        seconds have passed. Returns the new marker."""
        return await self._index.woken(_TOPIC, after, timeout)

    async def touch(self) -> None:
        """Wake whoever waits for the list: a run's state has changed."""
        await self._call("touch")

    # ── for agents and runners ──

    async def take(self, agent: str, folders: str, token: str, lease: float) -> Held | None:
        """The run that has waited longest, now ``agent``'s for ``lease`` seconds under ``token``; its folder lies below
        ``folders``. None when none waits."""
        found = await self._call("take", agent=agent, folders=folders, token=token, lease=int(lease * 1000))
        return await self._held(found) if found else None

    async def retake(self, run: str, old: str, token: str, agent: str, lease: float) -> bool:
        """The lease ``old`` is followed by ``token``; False when ``old`` no longer holds the run."""
        return await self._call("retake", run=run, old=old, token=token, agent=agent, lease=int(lease * 1000))

    async def renew(self, run: str, token: str, process: str, lease: float = LEASE_SECONDS) -> bool:
        """Hold the run for another ``lease`` seconds; False when somebody else does."""
        return await self._call("renew", run=run, token=token, process=process, lease=int(lease * 1000))

    async def end(self, run: str, token: str, state: str, reason: str) -> bool:
        """The run has ended; False when ``token`` does not hold it."""
        return await self._call("end", run=run, token=token, state=state, reason=reason)

    async def active(self) -> Sequence[Held]:
        """Runs that an agent has taken and that have not ended."""
        return [await self._held(found) for found in await self._call("active") or ()]

    async def held(self, run: str) -> Held | None:
        """An active run; None when it is not, or not any more."""
        found = await self._call("get", run=run)
        return await self._held(found) if found and found["phase"] == "active" else None

    async def doomed(self) -> dict[str, str]:
        """Deleted runs whose folder may be there still, and where it is."""
        return dict(await self._call("doomed") or {})

    async def remove(self, run: str) -> None:
        """The folder of a deleted run is gone."""
        await self._call("remove", run=run)

    async def erase(self, run: str) -> None:
        """Remove all that the index has of a deleted run."""
        async with self._of(run) as index:
            await index.erase()

    # ── how ──

    async def _call(self, name: str, /, **arguments: Any) -> Any:
        if not self._loaded:
            async with self._loading:
                if not self._loaded:
                    await self._index.load()
                    await self._index.load(_library())
                    self._loaded = True
        return await self._index.call(f"runs_{name}", **arguments)

    def _of(self, run: str) -> _Opened:
        return _Opened(Index(self.link, run))

    async def _move(self, run: str, allowed: Sequence[str], state: str, reason: str = "") -> None:
        async with self._of(run) as index:
            await index.transition(allowed, state, reason)

    async def _kept(self, run: str) -> Mapping[str, Any]:
        found = await self._call("get", run=run)
        if not found:
            raise UnknownRun(_unknown(run))
        return found

    async def _held(self, found: Mapping[str, Any]) -> Held:
        record = (await self._shown([found]))[0]
        return Held(record, found["token"], found["process"], found["left"] / 1000)

    async def _shown(self, found: Sequence[Mapping[str, Any]]) -> Sequence[RunRecord]:
        """Records with the states that active runs have now."""
        active = [kept["id"] for kept in found if kept["phase"] == "active"]
        states = dict(zip(active, await self._index.states(active), strict=True))
        return [_record(kept, states.get(kept["id"])) for kept in found]


class _Opened:
    """``async with``: an index that is closed at the end."""

    def __init__(self, index: Index) -> None:
        self._index = index

    async def __aenter__(self) -> Index:
        return self._index

    async def __aexit__(self, *_: object) -> None:
        await self._index.close()


def _record(kept: Mapping[str, Any], now: tuple[str, str] | None) -> RunRecord:
    """``now``: state and reason in an active run's own keys."""
    if kept["phase"] == "waiting":
        state, reason = "created", ""
    elif kept["phase"] == "ended":
        state, reason = kept["state"], kept["reason"]
    else:
        state, reason = now or ("", "")
        if state in ("", "created"):
            state = "starting"
        silent = -kept["left"] / 1000
        if state == "running" and silent > 0:
            state = "starting"
            reason = f"its runner was last heard of {silent + LEASE_SECONDS:.0f} s ago; an agent has to take it over"
    return RunRecord(
        id=kept["id"],
        name=kept["name"],
        state=state,
        reason=reason,
        position=kept.get("position"),
        owner=kept["owner"],
        created=int(kept["created"]) / 1000,
        started=int(kept["started"]) / 1000 if "started" in kept else None,
        ended=int(kept["ended"]) / 1000 if "ended" in kept else None,
        agent=kept["agent"],
        attempts=int(kept["attempts"]),
        folder=kept["folder"],
        recipe=json.loads(kept["recipe"]),
    )


def _unknown(run: str) -> str:
    return f"run: {run!r} is not in this service; list its runs to see their ids"


@cache
def _library() -> str:
    return resources.files("orchestration.service").joinpath("registry.lua").read_text(encoding="utf-8")
