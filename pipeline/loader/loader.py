"""Train batches as a torch dataset: batches stream from a stage while others still fill it.

    stage ─ claim ▶ Batch ─▶ consumer ─ asks for the next one ▶ commit (the rows leave the stage) ─▶ claim …
                      │
                      └ several readers of one claim (ranks of a replica; replicas in lockstep): the first of them claims
                        and writes the claim to a log in the index, where the others read it; the last to finish commits

    beside it, in a thread of each process: its leases are renewed at a third of their length

Readers agree through the index; torch.distributed is not needed. A reader that dies renews no
leases, and its rows are delivered again when the lease expires. The stream ends when no row came
for ``idle`` seconds, or at once when the run has ended (state finished, stopped or failed) and
neither a stage before this one nor another reader holds any row.
"""

from __future__ import annotations

import asyncio
import atexit
import copy
import os
import ssl
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import structlog
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from pipeline.compat.loop_thread import LoopThread
from pipeline.data.columns import Packed, Ragged, Schema
from pipeline.documents.flow import BATCHES, STATE, WAREHOUSES
from pipeline.documents.kinds import Log
from pipeline.index.claims import Claim, Stored, ranges
from pipeline.index.client import Index, worker_name
from pipeline.index.errors import IndexRefused, IndexUnreachable, WarehouseGone
from pipeline.loader.balance import balanced
from pipeline.warehouse.dock import Dock

log = structlog.get_logger()

ENDED = ("finished", "stopped", "failed")


@dataclass(frozen=True, eq=False)
class Batch:
    """B rows of a stage, held under a lease until they are committed.

    ``batch[name]`` gives a dense column as a tensor [B, *shape], a ragged one in the stream's
    layout (:class:`Packed`, a jagged nested tensor [B, j], or padded [B, longest]), text as a list
    of B strings; ``columns`` has them all packed. ``row`` and ``group`` are int64 and uint32 [B].
    ``number`` counts this reader's batches from 0.
    """

    number: int
    stage: str
    token: str
    row: np.ndarray
    group: np.ndarray
    columns: dict[str, Packed]
    schema: Schema
    ragged: Ragged
    fill: float
    # all rows of the claim, as ranges; more than `row` where several readers share it
    held: list[int]
    log: Log[dict[str, Any]] | None  # of the readers that share it; None when there is one reader

    def __len__(self) -> int:
        return len(self.row)

    def __getitem__(self, name: str) -> Any:
        return self.columns[name].value(self.schema[name], len(self), self.ragged, self.fill)

    def select(self, positions: Sequence[int]) -> Batch:
        """Return a copy of the rows at ``positions``: a micro-batch.

        Commit the whole batch, not its parts.
        """
        at = np.asarray(positions, np.int64)
        columns = {name: packed.select(at, len(self)) for name, packed in self.columns.items()}
        return replace(self, row=self.row[at], group=self.group[at], columns=columns)


class SampleStream(IterableDataset[Batch]):
    """The batches of ``stage`` in ``run``, with its ``columns``.

    Each row comes exactly once over all readers, and again when the reader that had it died before
    the commit.

    ``batch_size`` counts rows (groups, for a stage that takes groups; a train batch has the run's
    own size). A batch that does not fill within ``idle`` seconds comes smaller, or not at all with
    ``drop_last``: its rows stay in the stage.

    Readers: ``replicas`` data-parallel replicas of ``ranks`` ranks each; ranks of one replica get
    the same rows in the same order. ``lockstep`` replicas take the same number of batches: one
    claim for all of them is split into equal parts, by tokens when ``balance_tokens`` names ragged
    columns to count. Without lockstep each replica claims for itself. Readers wait ``timeout``
    seconds for each other. They must start together: a restarted job takes another ``session``.

    ``commit="next"``: a batch is committed when the next one is asked for (leaving the loop early
    leaves the last one uncommitted). ``commit="explicit"``: by :meth:`commit` alone. In the process
    that claimed it a batch is a view of shared memory, valid until its commit. DataLoader workers
    copy it once, into memory of its own, as it goes to another process; they run ahead of their
    consumer, so give them a :class:`SampleLoader`, or commit explicitly.

    Rows that lie on other nodes than ``node`` (None: that of this process) come over the wire with
    ``secret``, inside TLS when ``tls_authority`` (PEM) says what the nodes' certificates are
    checked against.

    >>> stream = SampleStream(url, run, schema, "train", ["ids", "reward"], batch_size=64)  # doctest: +SKIP
    >>> for batch in SampleLoader(stream, num_workers=2):  # doctest: +SKIP
    ...     step(batch["ids"], batch["reward"])
    """

    def __init__(
        self,
        url: str,
        run: str,
        schema: Schema,
        stage: str,
        columns: Sequence[str],
        *,
        batch_size: int,
        replica: int = 0,
        replicas: int = 1,
        rank: int = 0,
        ranks: int = 1,
        lockstep: bool = True,
        balance_tokens: str | Sequence[str] | None = None,
        ragged: Ragged = "jagged",
        fill: float = 0,
        commit: Literal["next", "explicit"] = "next",
        drop_last: bool = False,
        idle: float = 60.0,
        timeout: float = 600.0,
        lease: float = 60.0,
        session: str = "0",
        node: str | None = None,
        secret: bytes = b"",
        tls_authority: str = "",
    ) -> None:
        balance = (
            (balance_tokens,) if isinstance(balance_tokens, str) else tuple(balance_tokens or ())
        )
        schema.mask(columns)  # a clear error for a column that is not there
        for name in balance:
            if schema[name].shape is not None:
                raise ValueError(
                    f"balance_tokens: column {name!r} has one length in all rows; "
                    f"name a ragged column"
                )
        if not (0 <= replica < replicas and 0 <= rank < ranks):
            raise ValueError(
                f"replica {replica} of {replicas}, rank {rank} of {ranks}: count from 0, and stay "
                f"below the number"
            )
        if batch_size < 1 or (lockstep and batch_size < replicas):
            raise ValueError(
                f"batch_size: {batch_size} leaves some of {replicas} replicas without "
                f"rows; give more"
            )
        self.url = url
        self.run = run
        self.schema = schema
        self.stage = stage
        self.columns = tuple(columns)
        self.batch_size = batch_size
        self.replica = replica
        self.replicas = replicas
        self.rank = rank
        self.ranks = ranks
        self.lockstep = lockstep
        self.balance = balance
        self.ragged = ragged
        self.fill = fill
        self.drop_last = drop_last
        self.commits = commit
        self.idle = idle
        self.timeout = timeout
        self.lease = lease
        self.session = session
        self.node = node
        self.secret = secret
        self.tls_authority = tls_authority
        self.readers = ranks * (replicas if lockstep else 1)  # of one claim
        self.first = rank == 0 and (replica == 0 or not lockstep)  # of them: it claims
        # this reader, whatever its processes
        self.family = f"{stage}-loader-{uuid.uuid4().hex[:8]}"
        self.iteration = 0
        # By process: a forked one inherits its parent's and must leave it alone, the garbage
        # collector included.
        self._links: dict[int, _Link] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_links": {}}

    def _link(self) -> _Link:
        if os.getpid() not in self._links:
            self._links[os.getpid()] = _Link(self)
        return self._links[os.getpid()]

    def __iter__(self) -> Iterator[Batch]:
        self.iteration += 1
        worker = get_worker_info()
        if worker is not None and self.commits == "next":
            raise RuntimeError(
                "commit='next' in a DataLoader worker would commit batches before they are used, "
                "since workers run ahead: use SampleLoader(stream, num_workers=...), or "
                "commit='explicit' and stream.commit(batch)"
            )
        return self._batches(
            _Reading(
                self, self._link(), worker.id if worker else 0, worker.num_workers if worker else 1
            )
        )

    def _batches(self, reading: _Reading) -> Iterator[Batch]:
        try:
            while (batch := reading.link.call(reading.next())) is not None:
                yield batch if get_worker_info() is None else _detached(batch)
                if self.commits == "next":
                    self.commit(batch)
        finally:
            if self.commits == "next" and self.readers == 1:
                self.close()

    def commit(self, batch: Batch) -> None:
        """Commit ``batch``.

        Its rows leave the stage when all readers that share it have committed it. Any process of
        the reader may call this. Raises LeaseLost when the lease expired; the rows are delivered
        again.
        """
        self._link().call(self._link().commit(batch))

    def close(self) -> None:
        """End this process's connection; its uncommitted rows are delivered again at once.

        Called at the end of the process, and at the end of an iteration of a single reader with
        ``commit="next"``.
        """
        link = self._links.pop(os.getpid(), None)
        if link is not None:
            link.close()


class SampleLoader(DataLoader[Batch]):
    """A DataLoader over ``stream`` that commits each batch when the next one is asked for, whatever
    its workers have fetched ahead. ``options`` are DataLoader's own."""

    dataset: SampleStream

    def __init__(self, stream: SampleStream, *, num_workers: int = 0, **options: Any) -> None:
        self.commits = stream.commits
        stream = copy.copy(stream)
        stream.commits = "explicit"
        stream._links = {}
        # Workers stay until the iteration ends: they renew the leases of what they have sent here.
        super().__init__(
            stream,
            batch_size=None,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            **options,
        )

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        batches = super().__iter__()
        if self.num_workers:
            self.dataset.iteration += 1  # the workers count their copies of it
        try:
            for batch in batches:
                yield batch
                if self.commits == "next":
                    self.dataset.commit(batch)
        finally:
            self._iterator = None
            if self.commits == "next" and self.dataset.readers == 1:
                self.dataset.close()

    def commit(self, batch: Batch) -> None:
        """Commit for a stream with ``commit="explicit"``; see :meth:`SampleStream.commit`."""
        self.dataset.commit(batch)

    def close(self) -> None:
        """Close; see :meth:`SampleStream.close`."""
        self.dataset.close()


class _Link(LoopThread):
    """A process's connection.

    Its event loop runs in a thread, so that leases are renewed while the consumer computes.
    """

    def __init__(self, stream: SampleStream) -> None:
        self.stream = stream
        self.worker = worker_name(stream.family, 0)
        self.held: set[str] = set()  # tokens
        self._parent = os.getppid() if get_worker_info() else None
        super().__init__(self.worker)
        self.index = Index(stream.url, stream.run)
        self._dock: Dock | None = None
        # the run's, and how this one takes its rows, once there is a dock
        self.stages: list[dict[str, Any]] = []
        self.takes = ""
        self._renewing = asyncio.run_coroutine_threadsafe(self._renew(), self._loop)
        atexit.register(self.close)

    async def dock(self) -> Dock:
        """Return the dock of this process.

        Waits for a warehouse, so that readers may start before writers.
        """
        if self._dock is None:
            stream = self.stream
            if not await self.index.wait(WAREHOUSES, "0-0", stream.timeout):
                raise WarehouseGone(
                    f"run {stream.run!r} had no warehouse for {stream.timeout:.0f} s; open the "
                    f"flow first (Dock.open)"
                )
            self.stages = (await self.index.config())["stages"]
            self.takes = _checked(stream, self.stages)["takes"]
            warehouses = sorted(
                await self.index.warehouses(), key=lambda w: (w.leaving, not w.is_near(stream.node))
            )
            names = [warehouse.name for warehouse in warehouses]
            tls = (
                ssl.create_default_context(cafile=stream.tls_authority)
                if stream.tls_authority
                else None
            )
            dock = Dock(
                self.index,
                stream.schema,
                worker=self.worker,
                directory=Path(),  # arenas that others have made are found through the index
                warehouse=names[0] if names else "",
                node=stream.node,
                secret=stream.secret,
                tls=(tls, tls) if tls else None,  # a reader serves no warehouse
            )
            await dock.warehouses.enter()
            self._dock = dock
        return self._dock

    async def commit(self, batch: Batch) -> None:
        if batch.log is None or await self._last(batch, batch.log):
            await self.index.commit(Stored(self.worker, 0), batch.stage, batch.token, batch.held)
        if batch.log is None or not self.stream.first:  # the first reader renews until all are done
            self.held.discard(batch.token)

    async def _last(self, batch: Batch, log: Log[dict[str, Any]]) -> bool:
        """Sign that this reader has committed ``batch``; returns whether all have."""
        reader = f"{self.stream.replica}/{self.stream.rank}"
        if await log.sign(self.index, batch.number, reader) < self.stream.readers:
            return False
        await log.trim(self.index, batch.number)
        return True

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self.stream.lease / 3)
            if self._parent is not None and os.getppid() != self._parent:
                return  # the consumer of this worker is dead: let the leases expire
            if self.held:
                held = set(self.held)
                try:
                    self.held -= held - await self.index.renew(
                        self.stream.stage, sorted(held), self.stream.lease
                    )
                except (
                    IndexUnreachable,
                    IndexRefused,
                ) as lost:  # the consumer's next call raises it too
                    log.warning("leases not renewed", stage=self.stream.stage, reason=str(lost))

    def close(self) -> None:
        atexit.unregister(self.close)
        if sys.is_finalizing():  # its thread has ended
            return

        async def end() -> None:
            with suppress(IndexUnreachable, IndexRefused):
                if self.held:
                    await self.index.forget_worker(self.worker)
            if self._dock is not None:
                await self._dock.close()
            await self.index.close()

        self._renewing.cancel()
        self.call(end())
        self.stop()


def _checked(stream: SampleStream, stages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the stage of ``stream``. Raises ValueError when a loader cannot take batches from
    it."""
    stage = next((stage for stage in stages if stage["name"] == stream.stage), None)
    if stage is None:
        raise ValueError(
            f"stage {stream.stage!r} is not declared; run {stream.run!r} has "
            f"{[s['name'] for s in stages]}"
        )
    if stage["makes"]:
        columns = stream.schema.names(stage["makes"])
        raise ValueError(
            f"stage {stream.stage!r} makes {columns}, which a loader cannot write; use "
            f"Dock.claim and commit"
        )
    if stage["takes"] == "batch" and not stage["releases"] and stream.commits == "next":
        raise ValueError(
            f"stage {stream.stage!r} ends in Index.train, not in a commit; give commit='explicit' "
            f"and call it for each batch"
        )
    return stage


class _Reading:
    """One iteration over a stream, in one process.

    Batches are numbered, and every reader counts the same.
    """

    def __init__(self, stream: SampleStream, link: _Link, worker: int, workers: int) -> None:
        self.stream = stream
        self.link = link
        self.number = 0
        self.workers = workers
        self.log = BATCHES.at(
            stage=stream.stage,
            session=stream.session,
            iteration=stream.iteration,
            share="all" if stream.lockstep else stream.replica,
            reader=worker,
        )

    async def next(self) -> Batch | None:
        stream = self.stream
        dock = await self.link.dock()
        if stream.readers == 1:
            claim = await self._claim(dock)
            positions = None
        elif stream.first:
            claim = await self._claim(dock)
            parts = await self._deal(dock, claim) if claim is not None else []
            entry = {"workers": self.workers, "parts": parts, "claim": claim and claim.record()}
            await self.log.append(self.link.index, self.number, entry)
            positions = parts[stream.replica] if parts else None
        else:
            claim, positions = await self._read()
        if claim is None:
            return None
        part = claim if positions is None else claim.part(positions)
        self.link.held.add(claim.token)
        if len(part):
            columns = await dock.fetch_packed(part, stream.columns)
        else:  # a last batch that is smaller than the number of replicas leaves some without rows
            columns = {name: stream.schema[name].empty() for name in stream.columns}
        batch = Batch(
            number=self.number,
            stage=stream.stage,
            token=claim.token,
            row=part.row,
            group=part.group,
            columns=columns,
            schema=stream.schema,
            ragged=stream.ragged,
            fill=stream.fill,
            held=ranges(claim.row)[0],
            log=self.log if stream.readers > 1 else None,
        )
        self.number += 1
        return batch

    async def _claim(self, dock: Dock) -> Claim | None:
        """Return the next batch's rows: as many as it shall have, or what there is once waiting is
        over; None at the end."""
        stream = self.stream
        index = self.link.index
        over = False
        least = 1 if self.link.takes == "batch" else stream.batch_size
        deadline = time.monotonic() + stream.idle
        while True:
            outcome = await index.claim(
                stream.stage,
                dock.worker,
                stream.batch_size,
                stream.lease,
                home=dock.home,
                least=least,
            )
            if isinstance(outcome, Claim) or over:
                return outcome if isinstance(outcome, Claim) else None
            state, _, position = await index.state()
            remaining = deadline - time.monotonic()
            over = remaining <= 0 or (state in ENDED and await self._drained())
            if not over:
                await index.wait_any(
                    {outcome.topic: outcome.wait, STATE: position},
                    min(remaining, outcome.due or remaining),
                )
            elif not stream.drop_last:
                least = 1

    async def _drained(self) -> bool:
        """Return whether no row can come any more: neither from a stage before this one, nor from
        another reader that may die. Rows that this reader's own processes hold do not count: their
        consumer may be waiting for this iteration's end."""
        stages = {stage["name"]: stage for stage in self.link.stages}
        before = {self.stream.stage}
        while (
            more := {
                name
                for name, stage in stages.items()
                if any(stage["makes"] & stages[known]["needs"] for known in before)
            }
            - before
        ):
            before |= more
        stats = await self.link.index.stats()
        others = [
            lease["worker"]
            for lease in stats["leases"] or ()
            if lease["stage"] == self.stream.stage
        ]
        return all(worker.startswith(self.stream.family) for worker in others) and not any(
            stats["stages"][name]["ready"] or stats["stages"][name]["leased"]
            for name in before - {self.stream.stage}
        )

    async def _deal(self, dock: Dock, claim: Claim) -> list[list[int]]:
        """Return the claim's positions for each replica that shares it."""
        replicas = self.stream.replicas if self.stream.lockstep else 1
        if replicas == 1:
            return []
        if not self.stream.balance:
            return [part.tolist() for part in np.array_split(np.arange(len(claim)), replicas)]
        packed = await dock.fetch_packed(claim, self.stream.balance)
        lengths = sum(column.lengths() for column in packed.values())
        return balanced(lengths.tolist(), replicas)  # type: ignore[union-attr]

    async def _read(self) -> tuple[Claim | None, list[int] | None]:
        stream = self.stream
        entry = await self.log.read(self.link.index, self.number, stream.timeout)
        if entry is None:
            raise TimeoutError(
                f"batch {self.number} of stage {stream.stage!r}: the first reader of session "
                f"{stream.session!r} has not claimed it within {stream.timeout:.0f} s; is it "
                f"alive, and in the same session?"
            )
        if entry["workers"] != self.workers:
            raise ValueError(
                f"num_workers: {self.workers} here and {entry['workers']} at the first reader; "
                f"readers that share their "
                "batches have as many workers as each other"
            )
        if entry["claim"] is None:
            return None, None
        claim = Claim(stream.stage, entry["claim"]["token"], entry["claim"])
        return claim, entry["parts"][stream.replica] if entry["parts"] else None


def _detached(batch: Batch) -> Batch:
    """Return ``batch`` for another process: columns that view a larger block are copied, so that
    torch does not send the block."""
    columns = {}
    for name, packed in batch.columns.items():
        whole = packed.values.untyped_storage().nbytes() == packed.values.nbytes
        offsets = packed.offsets.clone() if packed.offsets is not None else None
        columns[name] = Packed(packed.values if whole else packed.values.clone(), offsets)
    return replace(batch, columns=columns)
