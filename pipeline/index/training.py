"""Calls of training and of the weights: optimizer steps, published versions, and turns to swap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from pipeline.data.events import EventData
from pipeline.index.calls import Calls
from pipeline.index.claims import Claim, ranges
from pipeline.index.events import stamped


@dataclass(frozen=True)
class PublishedWeights:
    """The newest published version.

    ``record`` says how engines get its weights, empty when nothing was written for them; ``wait``
    is the position of the topic `version`.
    """

    version: int
    record: Mapping[str, Any]
    wait: str


@dataclass(frozen=True)
class SwapTurn:
    """Answer whether a worker may swap its weights now.

    When not: ``wait`` is the position of the topic `swap`, and ``due`` the seconds until another
    worker's turn expires.
    """

    granted: bool
    wait: str = ""
    due: float = 0.0


class Training(Calls):
    """Calls of the trainer and of the rollout engines about versions."""

    async def add_amounts(self, amounts: Mapping[str, float]) -> None:
        """Add to what stages have done, by name: the next step reports it."""
        await self.call("add_amounts", amounts=dict(amounts))

    async def amounts(self) -> dict[str, float]:
        """Return the amounts that no step has reported yet, by name."""
        return dict(await self.call("amounts"))

    async def train(
        self,
        claim: Claim,
        version: int,
        event: EventData | None = None,
        reported: Mapping[str, float] = MappingProxyType({}),
        replayed: Sequence[int] = (),
    ) -> int:
        """Record that an optimizer step was made of the claim's rows at ``version``; returns the
        trainer's new version, which is the step's number. ``event`` becomes a `step` event in the
        same atomic step, so that readers get each step exactly once. ``reported``: those of
        :meth:`amounts` that the event has. ``replayed``: the groups of earlier steps that it was made
        of too, ascending."""
        rows, _ = ranges(claim.row)
        lease = {"stage": claim.stage, "token": claim.token, "owner": claim.owner}
        skipped = bool(getattr(event, "skipped", ""))
        return int(
            await self.call(
                "train",
                **lease,
                version=version,
                rows=rows,
                event=event and stamped(event),
                skipped=skipped,
                reported=dict(reported),
                replayed=_group_ranges(replayed),
            )
        )

    async def replay(self, version: int) -> Claim:
        """Return the rows of the step that was made at ``version``, those of earlier steps last, as a
        claim without lease.

        Raises StaleHandle where they are released.
        """
        return Claim("", "", await self._call_raw("replay", version=version))

    async def replayable(self) -> list[int]:
        """Return the groups of earlier steps that the next step may train again, oldest step
        first."""
        edges = np.array(await self.call("replayable") or (), np.int64).reshape(-1, 2).tolist()
        return [group for first, last in edges for group in range(first, last + 1)]

    async def trained_rows(self, groups: Sequence[int]) -> Claim:
        """Return the rows of ``groups`` of earlier steps, ascending, as a claim without lease.

        Raises StaleHandle where they are released.
        """
        return Claim("", "", await self._call_raw("trained_rows", groups=_group_ranges(groups)))

    async def release_steps(self, before: int) -> int:
        """Release the rows of the steps that were made below version ``before``, which a checkpoint
        covers, but for those that a later step may train again; returns how many groups they
        were."""
        return int(await self.call("release_steps", before=before))

    async def publish_weights(self, version: int, record: Mapping[str, Any]) -> None:
        """Record that the weights of ``version`` are in host memory; this opens the gate further
        and wakes generation."""
        await self.call("publish_weights", version=version, record=dict(record))

    async def published_weights(self) -> PublishedWeights:
        """Return the newest published version and its record.

        To read the version alone, use :meth:`Index.status`.
        """
        reply = await self.call("published_weights")
        return PublishedWeights(reply["version"], reply["record"] or {}, reply["wait"])

    async def weights_record(self, version: int) -> dict[str, Any] | None:
        """Return the record of one of the two newest published versions; None for any other."""
        return await self.call("weights_record", version=version) or None

    async def take_swap_turn(self, worker: str, *, most: int, lease: float) -> SwapTurn:
        """Ask for one of the ``most`` turns to swap weights at the same time, for ``lease``
        seconds. A worker that has one keeps it for another lease."""
        reply = await self.call("take_swap_turn", worker=worker, most=most, lease=int(lease * 1000))
        return (
            SwapTurn(True)
            if reply["granted"]
            else SwapTurn(False, reply["wait"], reply["due"] / 1000)
        )

    async def end_swap_turn(self, worker: str) -> None:
        """Give the worker's turn to the next one."""
        await self.call("end_swap_turn", worker=worker)


def _group_ranges(groups: Sequence[int]) -> list[int]:
    return ranges(np.array(groups, np.int64))[0] if groups else []
