"""The dock: one run's index and warehouses as one thing to put samples into and take them out of.

    admit(groups) ─▶ … claim(stage) ─▶ fetch(claim, columns) ─▶ commit(claim, positions, columns) ─▶ …
                                                             └▶ train(claim, step) ─▶ release(before=step)

TensorDict at the borders. Every wait has a deadline.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from tensordict import TensorDict, TensorDictBase

from pipeline.columns import BlockView, Schema, gather, pack
from pipeline.index import Claim, Index, Nothing
from pipeline.warehouse import Arena

Rows = Mapping[str, Any] | TensorDictBase


class NoRoom(TimeoutError):
    """The warehouse stayed full until the deadline."""


class Dock:
    """One worker's access to a run's samples. ``directory`` holds the arenas of this node's warehouses."""

    def __init__(
        self,
        index: Index,
        schema: Schema,
        *,
        worker: str,
        directory: Path,
        warehouse: str = "local",
        lease: float = 60.0,
        room_timeout: float = 600.0,
    ) -> None:
        self.index, self.schema, self.worker = index, schema, worker
        self.lease, self.room_timeout = lease, room_timeout
        self._directory, self._warehouse = directory, warehouse
        self._arenas: dict[str, Arena] = {}
        # What a wait for room runs in; a controller accounts its time with it.
        self.on_room: Callable[[], AbstractContextManager[None]] = nullcontext

    async def join(self, nbytes: int) -> None:
        """Bring this node's warehouse into the run, with ``nbytes`` bytes."""
        self._arenas[self._warehouse] = Arena.create(self._directory / f"arena-{self._warehouse}", nbytes)
        await self.index.call("join", warehouse=self._warehouse, bytes=nbytes)

    def _arena(self, warehouse: str) -> Arena:
        if warehouse not in self._arenas:
            self._arenas[warehouse] = Arena(self._directory / f"arena-{warehouse}")
        return self._arenas[warehouse]

    async def _write(self, rows: Rows, reserve: float = 0.0) -> tuple[int, int]:
        """Write ``rows`` as one block; waits while the warehouse is full. Returns the block and its columns' mask."""
        packed = pack(self.schema, rows)
        arena, started = self._arena(self._warehouse), time.monotonic()
        while True:
            reply = await self.index.call(
                "allocate",
                warehouse=self._warehouse,
                worker=self.worker,
                bytes=packed.nbytes,
                reserve=int(reserve * arena.nbytes),
            )
            if "block" in reply:
                break
            left = started + self.room_timeout - time.monotonic()
            if left <= 0:
                raise NoRoom(
                    f"warehouse {self._warehouse!r} stayed full for {self.room_timeout:.0f} s: {packed.nbytes} bytes found "
                    "no room; give pipeline.arena more, or let checkpoints release rows sooner"
                )
            with self.on_room():
                await self.index.wait(f"room:{self._warehouse}", reply["wait"], min(left, 5.0))
        try:
            packed.write_into(arena.slice(reply["offset"], packed.nbytes), reply["block"])
        except BaseException:
            await asyncio.shield(self.index.call("give_up", worker=self.worker, blocks=[reply["block"]]))
            raise
        return reply["block"], packed.mask

    async def admit(self, groups: Sequence[tuple[int, int]], prompts: Rows) -> int:
        """Let groups in: ``groups`` are (number, samples), ``prompts`` holds one row of columns per group, which all of
        its samples share. Returns the next group's number. Raises GateClosed past the gate."""
        block, mask = await self._write(prompts, reserve=0.25)
        entries = [(number, samples, slot) for slot, (number, samples) in enumerate(groups)]
        try:
            return int(await self.index.call("admit", worker=self.worker, block=block, mask=mask, groups=entries))
        except Exception:
            await self.index.call("give_up", worker=self.worker, blocks=[block])
            raise

    async def claim(self, stage: str, most: int, *, version: int | None = None, timeout: float = 0.0) -> Claim | None:
        """Lease up to ``most`` rows (groups, for stages that take groups), waiting up to ``timeout`` seconds for some."""
        deadline = time.monotonic() + timeout
        while True:
            found = await self.try_claim(stage, most, version=version)
            if isinstance(found, Claim):
                return found
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            await self.wait(stage, found, left)

    async def try_claim(self, stage: str, most: int, *, version: int | None = None) -> Claim | Nothing:
        return await self.index.claim(stage, self.worker, most, self.lease, version)

    async def wait(self, stage: str, nothing: Nothing, timeout: float) -> bool:
        """Wait until a claim of ``stage`` that found ``nothing`` may find something."""
        return await self.index.wait(stage, nothing.wait, min(timeout, nothing.due or timeout))

    def fetch(self, claim: Claim, columns: Sequence[str]) -> TensorDict:
        """The claimed rows' ``columns``, batch size [B], in the claim's order; views of shared memory where they lie
        side by side. They are valid while the lease is held. Raises StaleHandle for released rows."""
        views = {
            block: BlockView(self.schema, self._arena(p.warehouse).slice(p.offset, p.nbytes), block)
            for block, p in claim.places.items()
        }
        return gather(self.schema, columns, [[(views[b], slot) for b, slot in row.blocks] for row in claim.rows])

    async def commit(
        self,
        claim: Claim,
        positions: Sequence[int],
        rows: Rows | None,
        *,
        generated: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        """Write ``rows`` (the outputs of the claim's rows at ``positions``) and release their leases in one step.

        ``generated`` gives (oldest policy version, tokens) of each row when this stage makes the responses. Raises
        LeaseLost, and writes nothing, when any of the rows is held by somebody else by now.
        """
        block, mask = await self._write(rows) if rows is not None else (0, 0)
        items: list[tuple[int, ...]] = []
        for slot, position in enumerate(positions):
            handle = claim.rows[position]
            made = generated[slot] if generated is not None else ()
            items.append((handle.row, handle.generation, slot, *made))
        try:
            await self.index.call(
                "commit", stage=claim.stage, worker=self.worker, token=claim.token, block=block, mask=mask, rows=items
            )
        except Exception:
            if block:
                await self.index.call("give_up", worker=self.worker, blocks=[block])
            raise
