"""What a stage makes of rows of its claim, and how each kind of it is committed.

Written   columns of rows that are finished here            commit: the next stages may claim them
Parked    columns of unfinished responses                   commit: this stage may claim them again, or its partner
Dropped   groups that leave the run untrained               commit: the ledger counts why
Trained   the rows of a whole claim, in an optimizer step   commit: they are consumed, with the step's event
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from pipeline.data.events import EventData
from pipeline.index.client import Claim

if TYPE_CHECKING:  # these import torch
    from pipeline.warehouse.dock import Dock, Rows


@dataclass(frozen=True)
class Output(ABC):
    """What became of the rows at ``positions`` of a claim. ``tokens`` is the number to report."""

    positions: Sequence[int]
    tokens: int = field(default=0, kw_only=True)

    ends_lease: ClassVar[bool] = False
    """Whether the claim's lease ends with this output: it is renewed no more, and the rows are held
    until the stage has done what follows."""

    finished: ClassVar[bool] = True
    """Whether the rows count as those that the stage has finished."""

    @abstractmethod
    async def commit(self, dock: Dock, claim: Claim) -> None:
        """Write it, and tell the index. Raises LeaseLost."""


@dataclass(frozen=True, kw_only=True)
class Written(Output):
    """``rows`` are the columns to write (None: none). ``generated`` gives (oldest policy version,
    tokens) of each row where the stage makes responses, and ``turns`` how many turns each has where
    they are trajectories. ``amounts``: what the stage has done beside, by name, which the next
    step reports."""

    rows: Rows | None = None
    generated: Sequence[tuple[int, int]] | None = None
    turns: Sequence[int] | None = None
    amounts: Mapping[str, float] = field(default_factory=dict)

    async def commit(self, dock: Dock, claim: Claim) -> None:
        if self.amounts:  # before the rows, which may end the step at once
            await dock.index.add_amounts(self.amounts)
        if self.positions:
            await dock.commit(
                claim, self.positions, self.rows, generated=self.generated, turns=self.turns
            )


@dataclass(frozen=True, kw_only=True)
class Parked(Output):
    """Unfinished responses: the rows can be claimed again to continue them, from the stage ``to``
    where two take turns. ``generated`` as of :class:`Written`; (-1, 0) of a row without a token."""

    rows: Rows
    generated: Sequence[tuple[int, int]]
    to: str = ""

    finished = False

    async def commit(self, dock: Dock, claim: Claim) -> None:
        await dock.park(claim, self.positions, self.rows, generated=self.generated, to=self.to)


@dataclass(frozen=True, kw_only=True)
class Dropped(Output):
    """The groups of the rows leave the run untrained, for ``reason``."""

    reason: str

    finished = False

    async def commit(self, dock: Dock, claim: Claim) -> None:
        groups = sorted(set(claim.group[list(self.positions)].tolist()))
        await dock.index.drop_groups(claim, groups, self.reason)


@dataclass(frozen=True, kw_only=True)
class Trained(Output):
    """All rows of the claim were trained in an optimizer step at ``version``; ``event`` becomes its
    `step` event atomically. ``reported``: the amounts of stages that it has. ``replayed``: the
    groups of earlier steps that were trained with them, ascending."""

    version: int
    event: EventData | None
    reported: Mapping[str, float] = field(default_factory=dict)
    replayed: Sequence[int] = ()

    ends_lease = True

    async def commit(self, dock: Dock, claim: Claim) -> None:
        await dock.index.train(claim, self.version, self.event, self.reported, self.replayed)
