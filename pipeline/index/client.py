"""The index's client: one typed method for each server-side function, each one atomic round trip.

    Index ─┬─ Claims        claims.py      admit, claim, commit, park, renew
           ├─ Training      training.py    optimizer steps, published versions
           ├─ Warehouses    warehouses.py  warehouses and the blocks in their arenas
           ├─ Prompts, Keys                external prompts, pass rates of prompts; values by key
           ├─ Events, Logs  events.py      append-only streams
           └─ Calls         calls.py       function calls and blocking waits, over a Link (link.py)

The index holds metadata only. Payloads lie in warehouses.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast

from pipeline.data.events import RunState, StateEvent
from pipeline.documents.flow import HEAD_ADDRESS, HeadAddress
from pipeline.index.address import redacted
from pipeline.index.calls import key_prefix
from pipeline.index.claims import Claim, Claims
from pipeline.index.errors import (
    BoundBroken,
    GateClosed,
    IndexRefused,
    IndexUnreachable,
    LeaseLost,
    NeverFits,
    TooManyDropped,
    WrittenTwice,
)
from pipeline.index.events import EVENTS_AT_ONCE, Events, Logs, stamped
from pipeline.index.keys import Keys
from pipeline.index.link import Link
from pipeline.index.prompts import ExternalPromptCalls, PassRateCalls
from pipeline.index.training import Training
from pipeline.index.warehouses import Warehouses
from pipeline.node import is_loopback, process_space

__all__ = [  # of other modules, for the packages above
    "EVENTS_AT_ONCE",
    "BoundBroken",
    "Claim",
    "GateClosed",
    "IndexRefused",
    "IndexUnreachable",
    "LeaseLost",
    "Link",
    "NeverFits",
    "TooManyDropped",
    "WrittenTwice",
    "redacted",
]

Takes = Literal["rows", "groups", "batch"]

MAX_STAGES = 16  # the index keeps the stages that have finished a row as bits of a 16-bit word
UNLIMITED = 2**40
# Environment variable with the index's URL. The URL may hold a password, and command lines are
# public.
INDEX_VARIABLE = "ASYNCDOCK_INDEX"


@dataclass(frozen=True)
class StageSpec:
    """A stage as the index knows it: the columns that it ``needs`` and ``makes``, as masks, and
    whether it ``takes`` rows, whole groups or train batches (P groups by the anchored window). A
    stage that ``releases`` is the last of its rows: its commit frees them. One that
    ``takes_turns_with`` an earlier stage, which takes groups, makes the columns of that one with
    it: it gets the rows that the other hands to it, and hands them back, until one of the two
    commits them."""

    name: str
    takes: Takes
    needs: int
    makes: int
    releases: bool = False
    takes_turns_with: str = ""


@dataclass(frozen=True)
class RunConfig:
    """The limits that the index enforces: P groups a step, slack S, window W, bound η
    (``pipeline.staleness`` derives S).

    ``reach``: a claim prefers rows that were made ready on its own node, and passes older ones on
    other nodes by at most so many groups. ``headstart``: rows that become ready on a node where
    their stage has workers are left to these for so many seconds. ``max_dropped``: how many groups
    may leave untrained for each that a step trains, -1 for any number. ``replay_versions``: for how
    many further steps a trained group may be trained again. The defaults are those of a
    flow without a trainer: the gate is always open.
    """

    stages: tuple[StageSpec, ...]
    groups_per_step: int = 1
    slack: int = UNLIMITED
    window: int = 1
    staleness: int = UNLIMITED
    reach: int = 64
    max_dropped: int = -1
    replay_versions: int = 0
    # enough for a woken worker to claim on a busy machine, little beside what a stage computes
    headstart: float = 0.1

    def __post_init__(self) -> None:
        for at, stage in enumerate(self.stages):
            partners = {other.name for other in self.stages[:at] if other.takes == "groups"}
            if stage.takes_turns_with and stage.takes_turns_with not in partners:
                raise ValueError(
                    f"stages: {stage.name!r} takes turns with {stage.takes_turns_with!r}, which is "
                    f"no earlier stage that takes groups; name one of {sorted(partners)}"
                )
        if len(self.stages) > MAX_STAGES:
            raise ValueError(
                f"stages: {len(self.stages)} are too many; join some, at most {MAX_STAGES} fit"
            )

    def packed(self) -> dict[str, Any]:
        """Return the configuration as the function library stores it."""
        stages: dict[str, dict[str, Any]] = {}
        producers = 1  # 0 is the admission
        for i, stage in enumerate(self.stages):
            if stage.takes_turns_with:
                first = stages[stage.takes_turns_with]
                stages[stage.name] = {**first, "name": stage.name}
                continue
            stages[stage.name] = {
                **asdict(stage),
                "origin": stage.name,
                "bit": 1 << i,
                "producer": producers if stage.makes else -1,
            }
            producers += bool(stage.makes)
        all_stages = [*stages.values()]
        for packed in all_stages:
            packed["reads"] = [0, *_producers_before(packed["needs"], all_stages)]
        row_fields = ["s", "f", "g", "turns", *(f"b{producer}" for producer in range(producers))]
        derived = {
            "producers": producers,
            "row_fields": row_fields,
            "headstart": int(self.headstart * 1000),
        }
        return {**asdict(self), "stages": all_stages, **derived}


def _producers_before(needs: int, stages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the producers that have written before a stage that ``needs`` these columns runs, so
    that it may fetch theirs."""
    makers = {stage["producer"]: stage for stage in stages if stage["producer"] > 0}
    producers: set[int] = set()
    while new_producers := {
        p for p, maker in makers.items() if maker["makes"] & needs and p not in producers
    }:
        producers |= new_producers
        for producer in new_producers:
            needs |= makers[producer]["needs"]
    return sorted(producers)


@dataclass(frozen=True)
class RunStatus:
    """Progress of a run.

    Groups below ``gate`` may be admitted, ``admitted`` were; ``remake`` are lost groups to admit
    again, ``filtered`` how many groups were dropped. ``published`` and ``trained`` are versions.
    ``gates`` has the gate of each version that was asked for. ``wait`` is the position of the topic
    `version`. ``planned``: groups that the steps up to the newest one that the bound allows train;
    ``dropped_before``: groups that had been dropped when the newest version was trained.
    """

    admitted: int
    gate: int
    filtered: int
    published: int
    trained: int
    remake: tuple[int, ...]
    gates: Mapping[int, int]
    wait: str
    planned: int
    dropped_before: int

    def droppable(self, most: int) -> int:
        """Return the number below which a group may be dropped now, where a step may drop ``most``
        groups. Groups that were dropped ahead of their step count in it. With η = 0 it does not
        depend on when the groups of a step are dropped."""
        return self.planned + min(self.dropped_before, self.trained * most) + most


@dataclass(frozen=True)
class StageQueue:
    """The rows (or groups) of a stage that are ``ready``, and its rows that are ``leased`` or
    ``parked``."""

    ready: int
    leased: int
    parked: int


@dataclass(frozen=True)
class SignOfLife:
    """The last sign of life of a worker: ``at``, in ms of the index's clock; the names of its
    ``stages``; the policy ``version`` that it has loaded; whether it is ``ready``, or still being
    built."""

    at: int
    stages: tuple[str, ...]
    version: int | None
    ready: bool


@dataclass(frozen=True)
class Missing:
    """The rows that training waits for at ``now``, in ms of the time by which leases end.

    The run has its state since ``state_age`` ms, and its policy version since ``version_age``
    (None: since its beginning).

    ``group``: the oldest open group that ``trainer``, the stage that takes batches, cannot claim
    (None: it could claim all). ``stage``: the first one that has ``rows`` of the group to process
    ("": the group waits for admission), of which ``parked`` are begun and free. ``holders``:
    (worker, ms when it claimed them) of the others. ``settled``: rows that any stage has processed
    or parked since the run began.
    """

    now: int
    state_age: int | None
    version_age: int | None
    settled: int
    trainer: str
    group: int | None
    stage: str
    rows: int
    parked: int
    holders: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class ResumePoint:
    """The start of a run that resumes at the trainer's version: its ``counters``, the groups to
    ``remake``, and as JSON the pass ``rates`` of its prompts ("": it samples uniformly)."""

    counters: Mapping[str, int]
    remake: Sequence[int]
    rates: str = ""


class Index(Claims, Training, Warehouses, ExternalPromptCalls, PassRateCalls, Keys, Events, Logs):
    """The index of one run.

    Its own methods are about the run as a whole: its state, its documents, its figures.
    """

    async def reach(self) -> tuple[str, str]:
        """Return the address of this machine on the way to the index, "" over a Unix socket; and
        the one by which other machines reach it, where the first is on this machine alone and the
        run's head, which is here too, knows it."""
        route = await self.own_address()
        if route and not is_loopback(route):
            return route, ""
        head = await HEAD_ADDRESS.get(self)
        is_here = head is not None and head.space == process_space()
        return route, head.address if head and is_here else ""

    async def put_own_address(self, address: str) -> None:
        """Record ``address`` as the one by which other machines reach this one, which has the run's
        head."""
        await HEAD_ADDRESS.put(self, HeadAddress(process_space(), address))

    async def init(
        self,
        config: RunConfig,
        counters: Mapping[str, int],
        remake: Sequence[int] = (),
        rates: str = "",
    ) -> bool:
        """Create the run's sample flow; False, and nothing changes, when it exists.

        A resumed run gives what the :class:`ResumePoint` of its checkpoint has.
        """
        await self.load()
        start = {
            "counters": dict(counters),
            "remake": list(remake),
            "rates": json.loads(rates or "false"),
        }
        return bool(await self.call("init", config=config.packed(), **start))

    async def config(self) -> dict[str, Any]:
        """Return the configuration that :meth:`init` was called with, packed."""
        return await self.call("config")  # type: ignore[no-any-return]

    async def transition(
        self, allowed: Iterable[str], to: str, reason: str = ""
    ) -> tuple[str, bool]:
        """Move the run's state to ``to`` when it is one of ``allowed``; returns the state then, and
        whether it changed. The `state` event is written in the same atomic step, so that readers
        get each change exactly once."""
        event = stamped(StateEvent(state=cast("RunState", to), reason=reason))
        reply = await self.call(
            "transition", **{"from": list(allowed), "to": to, "reason": reason, "event": event}
        )
        return reply["state"], reply["changed"]

    async def state(self) -> tuple[str, str, str]:
        """Return the run's state, its reason, and the position of the topic `state`."""
        return tuple(await self.call("state"))  # type: ignore[return-value]

    async def states(self, runs: Sequence[str]) -> list[tuple[str, str]]:
        """Return the state and reason of several runs of this server, in one round trip; empty
        strings for an unknown run."""
        reads = [("HMGET", key_prefix(run) + "state", "state", "reason") for run in runs]
        replies = await self._link.send_all(reads) if runs else []
        return [((state or b"").decode(), (reason or b"").decode()) for state, reason in replies]

    async def status(self, versions: Sequence[int] = ()) -> RunStatus:
        """Return where the run is, with the gates of ``versions``: the i-th may make tokens of
        groups below its gate. Without ``versions`` it can be called before :meth:`init`."""
        reply = await self.call("status", versions=list(versions))
        remake = tuple(int(group) for group in reply["remake"] or ())
        gates = dict(zip(versions, reply["gates"] or (), strict=True))
        admitted, gate, filtered, published, trained, planned, dropped = reply["counts"]
        return RunStatus(
            admitted,
            gate,
            filtered,
            published,
            trained,
            remake,
            gates,
            reply["wait"],
            planned,
            dropped,
        )

    async def set_slack(self, slack: int) -> None:
        """Let admission run ``slack`` steps ahead from now on, from 1 to the slack of the run's
        config. What was admitted stays."""
        await self.call("set_slack", slack=slack)

    async def progress(self) -> tuple[int, int]:
        """Return how many groups were admitted; and how many of them were trained, are held by the
        trainer, or could be picked by its next steps. Both without the filtered ones."""
        admitted, done = await self.call("progress")
        return int(admitted), int(done)

    async def queue_depth(self, stage: str) -> int:
        """Return how many rows (or groups) of a stage are ready to be claimed."""
        return int(await self.call("queue_depth", stage=stage))

    async def queue(self, stage: str) -> StageQueue:
        """Return how much of a stage's work is ready, leased and parked. Ends expired leases
        first."""
        return StageQueue(**await self.call("queue", stage=stage))

    async def stats(self) -> dict[str, Any]:
        """Return figures for people: queues, leases, warehouses.

        Code that needs one figure uses :meth:`status`.
        """
        return await self.call("stats")  # type: ignore[no-any-return]

    async def ledger(self) -> dict[str, int]:
        """Return the samples, tokens and turns generated, trained, filtered, made again and in
        flight, and the samples redelivered."""
        return await self.call("ledger")  # type: ignore[no-any-return]

    async def resume_point(self) -> ResumePoint:
        """Return what a checkpoint of this moment records of the flow.

        Groups that are admitted and not trained are made again.
        """
        reply = await self.call("resume_point")
        rates = reply["rates"]
        rates_record = (
            {**rates, "chosen": list(rates["chosen"]), "rates": list(rates["rates"])}
            if rates
            else None
        )
        return ResumePoint(
            reply["counters"],
            list(reply["remake"] or ()),
            json.dumps(rates_record) if rates_record else "",
        )

    async def beat(
        self, worker: str, stages: Sequence[str], version: int | None, *, ready: bool
    ) -> None:
        """Give a sign of life of ``worker``."""
        await self.call("beat", worker=worker, stages=list(stages), version=version, ready=ready)

    async def alive(self) -> dict[str, SignOfLife]:
        """Return the last sign of life of each worker that has given one and was not forgotten
        since."""
        signs = {}
        for name, (at, stages, version, ready) in (await self.call("alive") or {}).items():
            signs[name] = SignOfLife(
                at, tuple(stages or ()), None if version is False else version, ready
            )
        return signs

    async def waiting(self) -> Missing:
        """Return what training waits for now."""
        reply = await self.call("waiting")
        holders = tuple((worker, int(since)) for worker, since in reply["holders"] or ())
        group = None if reply["group"] is False else reply["group"]
        names = {name: reply[name] or "" for name in ("trainer", "stage")}
        ages = {
            name: None if reply[name] is False else reply[name]
            for name in ("state_age", "version_age")
        }
        return Missing(**reply | names | ages | {"group": group, "holders": holders})

    async def forget_worker(self, worker: str, *, ended: bool = True) -> None:
        """End the leases of the dead ``worker`` now, and free the blocks that it holds open.

        ``ended`` is False where its process may still run, as on another machine: the blocks stay
        then, as it may still write into them, until it closes them or a call with True.
        """
        await self.call("forget_worker", worker=worker, ended=ended)

    async def write_document(self, name: str, text: str, *, once: bool = False) -> None:
        """Write a small document of the run, for :class:`pipeline.documents.kinds.Document` alone;
        ``once``: unless it exists."""
        await self._redis.set(f"{self.prefix}doc:{name}", text, nx=once)

    async def read_document(self, name: str) -> str | None:
        """Return the text of a document; None when it does not exist."""
        text = await self._redis.get(f"{self.prefix}doc:{name}")
        return None if text is None else text.decode()

    async def remove_document(self, name: str) -> None:
        """Remove a document."""
        await self._redis.delete(f"{self.prefix}doc:{name}")

    async def rewind(
        self,
        config: RunConfig,
        counters: Mapping[str, int],
        remake: Sequence[int] = (),
        rates: str = "",
    ) -> None:
        """Start the sample flow again from a checkpoint.

        Events, documents and waiting external prompts stay.
        """
        await self.erase(keep=("events", "state", "doc:*", "feed", "feed:n"))
        await self.init(config, counters, remake, rates)

    async def retire(self) -> None:
        """Remove the samples of a run that has ended, and all keys of their flow.

        Events, state, documents and the ledger stay for readers. Can be repeated.
        """
        if await self._redis.exists(f"{self.prefix}config"):
            await self.call("retire")
        await self.erase(keep=("events", "state", "doc:*", "config", "n"))

    async def erase(self, keep: Sequence[str] = ()) -> None:
        """Remove every key of the run except ``keep`` (a name that ends in ``*``: all that begin
        so)."""
        kept_prefixes = tuple(name.removesuffix("*") for name in keep if name.endswith("*"))
        async for key in self._redis.scan_iter(
            match=self.prefix.replace("[", "\\[") + "*", count=1000
        ):
            name = key.decode().removeprefix(self.prefix)
            if name not in keep and not (kept_prefixes and name.startswith(kept_prefixes)):
                await self._redis.unlink(key)


def worker_name(stage: str, number: int) -> str:
    """Return a name for a worker's process that no earlier process of the same worker had, so that
    their leases are distinct."""
    return f"{stage}-{number}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
