"""Calls of the warehouses: register them, allocate blocks in their arenas, and take them out of the
run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipeline.index.calls import Calls
from pipeline.node import is_here


@dataclass(frozen=True)
class WarehouseRecord:
    """A warehouse of the run.

    ``port`` is 0 while it serves no other nodes; nothing new is placed on a ``leaving`` one.
    """

    number: int
    name: str
    node: str
    path: Path
    nbytes: int
    host: str
    port: int
    leaving: bool

    def is_near(self, node: str | None) -> bool:
        """Return whether its arena can be mapped by processes of ``node`` (None: by this process,
        as the arena's folder is found at its path)."""
        return self.node == node if node else is_here(self.node, self.path.parent)


@dataclass(frozen=True)
class Block:
    """A block that a worker may write: its number, and its first byte in the warehouse's arena."""

    number: int
    offset: int


@dataclass(frozen=True)
class Full:
    """The warehouse has no room now. ``wait`` is the position of the topic `room` at that
    moment."""

    wait: str


@dataclass(frozen=True)
class BlocksLeft:
    """Blocks on a leaving warehouse: ``closed`` ones (number, offset, bytes) to move away, how many
    are still ``open`` for writes, and the position of the topic `room`."""

    closed: Sequence[tuple[int, int, int]]
    open: int
    wait: str


@dataclass(frozen=True)
class Lost:
    """Counts of the groups, and of their rows, that are made again because their warehouse was
    lost."""

    groups: int
    rows: int


class Warehouses(Calls):
    """Calls about warehouses and the blocks in their arenas."""

    async def join_warehouse(self, name: str, node: str, path: Path, nbytes: int) -> None:
        """Register a warehouse with all of its bytes free. Repeating it changes nothing."""
        await self.call("join_warehouse", warehouse=name, node=node, path=str(path), bytes=nbytes)

    async def announce_warehouse(self, number: int, host: str, port: int) -> None:
        """Record the address at which other nodes reach a warehouse.

        Repeated every few seconds as a heartbeat.
        """
        await self.call("announce_warehouse", warehouse=number, host=host, port=port)

    async def warehouses(self) -> list[WarehouseRecord]:
        """Return the warehouses of the run."""
        records = await self.call("warehouses") or {}
        return [
            WarehouseRecord(
                int(number),
                record["name"],
                record["node"],
                Path(record["path"]),
                record["bytes"],
                record["host"],
                record["port"],
                record["leaving"],
            )
            for number, record in records.items()
        ]

    async def allocate(
        self,
        warehouse: int,
        worker: str,
        nbytes: int,
        *,
        reserve: int = 0,
        close: Sequence[int] = (),
    ) -> Block | Full:
        """Allocate a block of ``nbytes``, which ``worker`` then holds open, and close the blocks
        ``close`` before.

        ``reserve`` bytes of the warehouse stay free for later stages, so that a source cannot take
        the room that its samples need to be finished. Raises NeverFits for a block that can never
        fit, WarehouseGone."""
        reply = await self.call(
            "allocate",
            warehouse=warehouse,
            worker=worker,
            bytes=nbytes,
            reserve=reserve,
            close=list(close),
        )
        return Block(reply["block"], reply["offset"]) if "block" in reply else Full(reply["wait"])

    async def close_blocks(self, worker: str, blocks: Sequence[int]) -> None:
        """Close ``blocks``, to which ``worker`` writes no more: their bytes are free as soon as no
        row points to them."""
        await self.call("close_blocks", worker=worker, blocks=list(blocks))

    async def leave_warehouse(self, number: int) -> BlocksLeft:
        """Place nothing new on a warehouse, and return the blocks that must be moved before
        :meth:`lose_warehouse`."""
        reply = await self.call("leave_warehouse", warehouse=number)
        return BlocksLeft(
            [tuple(block) for block in reply["closed"] or ()], reply["open"], reply["wait"]
        )

    async def move_blocks(
        self, worker: str, warehouse: int, pairs: Sequence[tuple[int, int]]
    ) -> None:
        """Point the rows of blocks on ``warehouse`` to their copies: ``pairs`` are (old block, new
        block), the new ones held open by ``worker``. A block that was freed in the meantime is
        skipped."""
        await self.call("move_blocks", worker=worker, **{"from": warehouse}, blocks=list(pairs))

    async def lose_warehouse(self, number: int) -> Lost:
        """Remove a warehouse with its bytes.

        Groups that had columns there are admitted again under the same numbers.
        """
        return Lost(**await self.call("lose_warehouse", warehouse=number))

    async def suspect_warehouse(self, number: int, silent: float) -> Lost | float | Literal["gone"]:
        """Remove a warehouse that has sent no heartbeat for ``silent`` seconds.

        Returns the seconds since its last one when they are fewer, and "gone" when another worker
        has removed it.
        """
        reply = await self.call("suspect_warehouse", warehouse=number, silent=int(silent * 1000))
        return (
            reply["alive"] / 1000
            if "alive" in reply
            else "gone"
            if "gone" in reply
            else Lost(**reply)
        )
