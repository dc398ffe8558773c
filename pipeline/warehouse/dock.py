"""The dock: one run's index and warehouses as one thing to put samples into and take them out of.

    put / admit ─▶ … claim(stage) ─▶ fetch(claim, columns) ─▶ commit(claim, positions, columns) ─▶ …
                       ▲                                   ├▶ train(claim, version) ─▶ release(before=step)
                       └── begun(claim, columns) ◀─────────┴▶ park(claim, positions, columns so far)

TensorDict at the borders. Every wait has a deadline. The parts: :mod:`writer`, and
:mod:`directory`, which knows where the warehouses are and reads from them.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Collection, Coroutine, Sequence
from contextlib import asynccontextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tensordict import NonTensorStack, TensorDict

from pipeline.data.arena import StaleHandle, shared_memory_directory
from pipeline.data.blocks import missing_column
from pipeline.data.columns import ColumnError, Packed, Schema, in_order
from pipeline.documents.flow import ROOM, SCHEMA, SECRET
from pipeline.index.address import redacted
from pipeline.index.calls import Wait
from pipeline.index.claims import STATES, Claim, Nothing, pack_made, ranges
from pipeline.index.client import Index, RunConfig, StageSpec
from pipeline.warehouse.directory import OFFSET_BITS, WarehouseDirectory
from pipeline.warehouse.writer import SLAB, SOURCE_RESERVE, NoRoom, Rows, Writer

__all__ = ["SLAB", "Dock", "NoRoom", "Rows"]


class Dock:
    """One worker's access to a run's samples.

    ``warehouse`` names the one that this worker writes to; its arena lies in ``directory``.
    ``node`` says which warehouses can be mapped here: those that joined with the same name (None:
    those whose arenas are found at their paths). Others are reached over the wire with ``secret``,
    within ``wire_timeout`` seconds, inside TLS when ``tls`` gives the contexts of a server and of a
    client. ``lease`` and ``room_timeout`` are seconds, ``slab`` bytes (0: each write takes a block
    of its own).
    """

    def __init__(
        self,
        index: Index,
        schema: Schema,
        *,
        worker: str,
        directory: Path,
        warehouse: str = "local",
        node: str | None = None,
        secret: bytes = b"",
        tls: tuple[ssl.SSLContext, ssl.SSLContext] | None = None,
        lease: float = 60.0,
        room_timeout: float = 600.0,
        wire_timeout: float = 10.0,
        slab: int = SLAB,
    ) -> None:
        self.index = index
        self.schema = schema
        self.worker = worker
        self.lease = lease
        self.folder = directory
        self.warehouses = WarehouseDirectory(
            index,
            schema,
            name=warehouse,
            node=node,
            secret=secret,
            tls=tls,
            wire_timeout=wire_timeout,
        )
        self.writer = Writer(
            index, schema, self.warehouses, worker=worker, room_timeout=room_timeout, slab=slab
        )

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        url: str,
        run: str,
        schema: Schema,
        stages: Sequence[StageSpec],
        *,
        worker: str,
        arena: int,
        directory: Path | None = None,
        **options: Any,
    ) -> AsyncIterator[Dock]:
        """Open a flow without a trainer's gate: ``stages`` joined by their columns alone, the last
        of which releases the rows. The first worker creates it, the others join. ``arena`` is the
        warehouse's size in bytes."""
        index = Index(url, run)
        folder = directory or shared_memory_directory() / f"dock-{run}"
        dock = cls(index, schema, worker=worker, directory=folder, **options)
        try:
            await index.init(RunConfig(tuple(stages)), {})
            await dock.join(arena)
            yield dock
        finally:
            await dock.close()
            await index.close()

    @classmethod
    async def attach(cls, url: str, run: str, **options: Any) -> Dock:
        """Open an existing run to look at it, with the schema and the secret that its workers use;
        ``options`` as ``node`` and ``tls``. The caller closes its index too. Raises LookupError
        when the index has no such run."""
        index = Index(url, run, timeout=5.0)
        try:
            schema = await SCHEMA.get(index)
            secret = await SECRET.get(index)
            if schema is None:
                raise LookupError(
                    f"run: {run!r} is not in index {redacted(url)}; give the id of a run that is"
                )
        except BaseException:
            await index.close()
            raise
        options = {"secret": secret or b"", **options}
        return cls(index, schema, worker="onlooker", directory=Path(), **options)

    # ── warehouses ──

    async def join(self, nbytes: int) -> None:
        """Bring this node's warehouse into the run, with ``nbytes`` bytes; does nothing when it is
        there."""
        await self.warehouses.join(self.folder, nbytes)

    async def enter(self) -> None:
        """Find this node's warehouse, which another process has brought into the run.

        Raises WarehouseGone when it is not there.
        """
        await self.warehouses.enter()

    @property
    def home(self) -> int:
        """The number of the warehouse that this worker writes to; 0 before it is known."""
        home = self.warehouses.known_home
        return home.number if home else 0

    async def serve(
        self, host: str, port: int = 0, *, advertise: str | None = None
    ) -> tuple[str, int]:
        """Let other nodes reach this node's warehouse at ``host``, or at ``advertise`` where they
        know it by another name (default: see :func:`pipeline.node.announced`). Returns the address.
        One worker of a node does this, until it closes. Raises ValueError where other nodes cannot
        reach it."""
        return await self.warehouses.serve(host, port, advertise=advertise)

    async def drain(self) -> int:
        """Move all blocks of this node's warehouse to the others, and take it out of the run.

        Returns the bytes moved. Rows that are leased meanwhile are delivered again if their reader
        came too late.
        """
        home = await self.warehouses.home()
        moved = 0
        await self.writer.flush()
        while True:
            left = await self.index.leave_warehouse(home.number)
            await self.warehouses.enter()
            if not left.closed and not left.open:
                break
            pairs = []
            for block, offset, nbytes in left.closed:
                room = await self.writer.allocate(nbytes)
                await self.warehouses.copy(home, offset, nbytes, room.home, room.offset)
                pairs.append((block, room.block))
                moved += nbytes
            if pairs:
                await self.index.move_blocks(self.worker, home.number, pairs)
            else:
                # other workers still write there, and will stop
                await self.index.wait(ROOM, left.wait, 5.0)
        await self.index.lose_warehouse(home.number)
        return moved

    async def close(self) -> None:
        """Give back the blocks that this worker holds open, and its connections.

        The rows that it wrote stay.
        """
        if not self.index.closed:
            await self.writer.close()
        await self.warehouses.close()

    # ── samples come, and go from stage to stage ──

    async def admit(self, groups: Sequence[tuple[int, int]], prompts: Rows) -> int:
        """Let groups in: ``groups`` are (number, samples), ``prompts`` holds one row of columns per
        group, which all of its samples share. Returns the next group's number. Raises GateClosed
        past the gate."""
        entries: list[tuple[int | None, int, int]] = []
        for _, run in groupby(
            enumerate(groups), key=lambda item: (item[1][0] - item[0], item[1][1])
        ):
            members = [group for _, group in run]
            entries.append((members[0][0], len(members), members[0][1]))
        slots = np.repeat(np.arange(len(groups)), [samples for _, samples in groups])
        return await self.writer.store(
            lambda stored: self.index.admit(stored, entries), prompts, slots, reserve=SOURCE_RESERVE
        )

    def put(self, rows: Rows, *, samples: int = 1) -> Coroutine[Any, Any, int]:
        """Let B rows in, each ``samples`` of them one group, under the next free numbers; visible
        to claims when this returns. Returns the number after the last group's. Puts at the same
        time share calls of the index."""
        return self.writer.put(rows, samples)

    async def claim(
        self, stage: str, most: float, *, version: int | None = None, timeout: float = 0.0
    ) -> Claim | None:
        """Lease up to ``most`` rows (groups, for stages that take groups), waiting up to
        ``timeout`` seconds for some."""
        deadline = time.monotonic() + timeout
        outcome = await self.try_claim(stage, most, version=version)
        while not isinstance(outcome, Claim):
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return None
            outcome = await self.claim_after(
                outcome, stage, most, version=version, timeout=remaining
            )
        return outcome

    async def try_claim(
        self, stage: str, most: float, *, version: int | None = None, wait: Wait | None = None
    ) -> Claim | Nothing:
        """Lease up to ``most`` rows that are ready now, or when ``wait`` has ended."""
        return await self.index.claim(
            stage, self.worker, most, self.lease, version, self.home, patient=True, wait=wait
        )

    async def claim_after(
        self,
        nothing: Nothing,
        stage: str,
        most: float,
        *,
        version: int | None = None,
        timeout: float,
        early: asyncio.Future[None] | None = None,
    ) -> Claim | Nothing:
        """Claim as soon as a claim of ``stage`` that found ``nothing`` may find something, or after
        ``timeout`` seconds, or when ``early`` is done."""
        seconds = min(timeout, nothing.due or timeout)
        wait = Wait(nothing.topic, nothing.wait, seconds, early)
        return await self.try_claim(stage, most, version=version, wait=wait)

    async def commit(
        self,
        claim: Claim,
        positions: Sequence[int],
        rows: Rows | None,
        *,
        generated: Sequence[tuple[int, int]] | None = None,
        turns: Sequence[int] | None = None,
    ) -> None:
        """Write ``rows`` (the outputs of the claim's rows at ``positions``) and release their
        leases in one step.

        ``generated`` gives (oldest policy version, tokens) of each row when this stage makes the
        responses, and ``turns`` how many turns each has where they are trajectories. Raises
        LeaseLost, and writes nothing, when another worker holds any of the rows by now."""
        if not len(positions):
            return
        held, order = ranges(claim.row[np.asarray(positions)])
        made = pack_made(generated, order) if generated is not None else None
        turns_made = np.array(turns, "<u4")[order].tobytes() if turns is not None else None
        await self.writer.store(
            lambda stored: self.index.commit(
                stored, claim.stage, claim.token, held, made, claim.owner, turns_made
            ),
            rows,
            order,
        )

    async def park(
        self,
        claim: Claim,
        positions: Sequence[int],
        rows: Rows,
        *,
        generated: Sequence[tuple[int, int]],
        to: str = "",
    ) -> None:
        """Store unfinished rows of the claim at ``positions`` with what this stage has made of them
        so far: ``rows`` are columns that it produces, ``generated`` as in :meth:`commit`. They
        leave the claim and come first, one by one, in the stage's next claims, or in those of the
        stage ``to`` that takes turns with it; earlier progress of theirs is released. Raises
        LeaseLost as :meth:`commit` does."""
        if not len(positions):
            return
        held, order = ranges(claim.row[np.asarray(positions)])
        made = pack_made(generated, order)
        await self.writer.store_apart(
            lambda stored, **spare: self.index.park(
                stored, claim.stage, claim.token, held, made, claim.owner, to, **spare
            ),
            rows,
            order,
        )

    async def begun(
        self, claim: Claim, columns: Sequence[str]
    ) -> tuple[list[int], dict[str, Packed]]:
        """Which of the claim's rows were parked before, as positions [b], and the ``columns`` that
        they were parked with, of b rows each, valid as in :meth:`fetch`; none without such rows."""
        refs = claim.refs[await self.warehouses.producer(columns[0])]
        positions = np.flatnonzero(refs["block"]).tolist()
        if not positions:
            return [], {}
        return positions, await self.fetch_packed(claim.part(positions), columns)

    async def fetch(
        self,
        claim: Claim,
        columns: Sequence[str],
        *,
        ragged: Literal["jagged", "padded"] = "jagged",
        fill: float = 0,
    ) -> TensorDict:
        """The claimed rows' ``columns``, batch size [B], in the claim's order; views of shared
        memory where they lie side by side on this node, valid while the lease is held. Ragged
        columns come as jagged nested tensors [B, j], or ``padded`` with ``fill``; text as strings.
        Raises StaleHandle for released rows."""
        found = await self.fetch_packed(claim, columns)
        out = {
            name: found[name].value(self.schema[name], len(claim), ragged, fill) for name in columns
        }
        texts = {
            name: NonTensorStack(*value) for name, value in out.items() if isinstance(value, list)
        }
        return TensorDict(out | texts, batch_size=[len(claim)])

    async def fetch_packed(self, claim: Claim, columns: Sequence[str]) -> dict[str, Packed]:
        """Like :meth:`fetch`, each column as one packed buffer with its offsets, as packed training
        takes it."""
        producers: dict[int, list[str]] = {}
        for name in columns:
            self.schema.bit(name)  # raises for a column that is not in the schema
            producers.setdefault(await self.warehouses.producer(name), []).append(name)
        out: dict[str, Packed] = {}
        for producer, names in producers.items():
            refs = claim.refs[producer]
            if len(refs) < len(claim):
                raise ColumnError(
                    names[0],
                    f"stage {claim.stage!r} does not need what its maker makes, so it may come "
                    f"later than the rows",
                    "declare it as needed",
                )
            if not refs["block"].all():
                raise missing_column(names[0], int((refs["block"] == 0).argmax()))
            out |= await self.gather(refs, names)
        return out

    async def gather(self, refs: np.ndarray, names: list[str]) -> dict[str, Packed]:
        """The columns ``names`` of the rows that lie where ``refs`` say (REF [B], B > 0), in that
        order."""
        numbers = (refs["place"] >> OFFSET_BITS).astype(np.int64)
        if len(numbers) == 1 or (numbers == numbers[0]).all():
            return await self.warehouses.read(int(numbers[0]), refs, names)
        parts = []
        for number in np.unique(numbers).tolist():
            positions = np.flatnonzero(numbers == number)
            parts.append((positions, await self.warehouses.read(number, refs[positions], names)))
        return {
            name: in_order([(positions, part[name]) for positions, part in parts], len(refs))
            for name in names
        }

    async def inspect(self, group: int) -> list[dict[str, Any]]:
        """The rows of a group: ``row``, ``place``, ``state``, the stages that are ``done``,
        ``oldest_version``, ``tokens`` and the ``columns`` it has so far, ragged ones as lists; of a
        row that is parked also those that it was parked with. Empty when the group is not there."""
        found = await self.index.inspect(group)
        if found is None:
            return []
        claim, states = found
        config = await self.index.config()
        out = []
        for i, handle in enumerate(claim.rows):
            names = self.schema.names(int(states["columns"][i]))
            values: dict[Any, Any] = dict(await self.fetch(claim.part([i]), names))
            if STATES[states["state"][i]] == "live":
                values |= await self._parked(claim.part([i]), names)
            done = [
                stage["name"] for stage in config["stages"] if int(states["done"][i]) & stage["bit"]
            ]
            columns = {
                name: v if isinstance(v := column[0], str) else v.tolist()
                for name, column in values.items()
            }
            out.append(
                {
                    **handle._asdict(),
                    "state": STATES[states["state"][i]],
                    "done": done,
                    "columns": columns,
                }
            )
        return out

    async def _parked(self, claim: Claim, names: Collection[str]) -> dict[str, Any]:
        """Return the columns, beside ``names``, that the one row of ``claim`` was parked with; {}
        where it is parked again meanwhile."""
        parked = dict[str, Any]()
        for column in self.schema.columns:
            producer = await self.warehouses.producer(column.name)
            if column.name in names or not claim.refs[producer]["block"][0]:
                continue
            try:
                fetched = await self.fetch(claim, [column.name])
            except StaleHandle:
                return {}
            except ColumnError:  # it is not among them
                continue
            parked[column.name] = fetched[column.name]
        return parked
