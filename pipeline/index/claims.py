"""Claims: leases on rows of a stage, and the calls that take, renew, commit and end them."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from pipeline.data.events import LedgerEvent
from pipeline.documents.kinds import Topic
from pipeline.index.calls import Calls, Wait
from pipeline.index.errors import TooManyDropped
from pipeline.index.warehouses import Block

# Where a row's columns of one producer lie: `slot` of the packed rows that begin at `place` & 2**48
# - 1 of the arena of warehouse `place` >> 48, as part of `block`. Block 0: not written yet.
REF = np.dtype([("block", "<u4"), ("slot", "<u4"), ("place", "<u8")])
_FIXED = np.dtype([("group", "<u4"), ("place", "<u2"), ("samples", "<u2")])
_MADE = np.dtype([("oldest", "<i4"), ("tokens", "<u4")])
_STATE = np.dtype([("columns", "<u4"), ("done", "<u2"), ("state", "u1"), ("unused", "u1")])
REASON_CHARACTERS = 80
STATES = ("not there", "live", "generated", "trained")
DROPPED = ("dropped", "dropped_tokens")  # fields of the ledger's event: groups and tokens by reason


class Stored(NamedTuple):
    """Columns that a worker wrote into a block, for the call that adds them to rows.

    ``refs`` are the rows' places (REF [B] as bytes), ``mask`` the columns as bits, ``home`` the
    warehouse's number. With ``close`` the worker writes no more to the block. Block 0: no columns.
    """

    worker: str
    home: int
    block: int = 0
    mask: int = 0
    close: bool = False
    refs: bytes = b""


class Handle(NamedTuple):
    """One claimed row.

    ``row`` is its global index, which is never used again, so it serves as the handle's generation
    number: a handle to a released row raises an error instead of returning another sample's data.
    """

    row: int
    group: int
    place: int
    samples: int  # in its group
    oldest_version: int  # -1 before it is generated
    tokens: int


class Claim:
    """A lease on rows of a stage, as parallel arrays [B]: ``row``, ``group``, ``place``,
    ``oldest_version``, ``tokens``, and ``refs``, one array for each producer, which says where its
    columns lie. ``token`` is the fencing token: a commit under a lost lease is refused, and so is
    any call for it by another ``owner``. ``rest``: Nothing where these rows were the last ones that
    any claim could get."""

    rest: Nothing | None = None

    def __init__(self, stage: str, token: str, reply: Mapping[str, Any], owner: str = "") -> None:
        self.stage = stage
        self.token = token
        self.owner = owner
        edges = np.array(reply["rows"] or (), np.int64).reshape(-1, 2)
        self.row = (
            np.concatenate([np.arange(a, b + 1) for a, b in edges])
            if len(edges)
            else np.zeros(0, np.int64)
        )
        self._fixed = np.frombuffer(reply["fixed"], _FIXED)
        self._made = np.frombuffer(reply["made"], _MADE)
        self.refs = [np.frombuffer(refs, REF) for refs in reply["refs"]]
        self.rest = Nothing.of(reply) if "wait" in reply else None

    def __len__(self) -> int:
        return len(self.row)

    @property
    def group(self) -> np.ndarray:
        return self._fixed["group"]

    @property
    def place(self) -> np.ndarray:
        return self._fixed["place"]

    @property
    def oldest_version(self) -> np.ndarray:
        return self._made["oldest"]

    @property
    def tokens(self) -> np.ndarray:
        return self._made["tokens"]

    def record(self) -> dict[str, Any]:
        """Return the claim as plain values, from which another process can build it again."""
        arrays = {
            "fixed": self._fixed.tobytes(),
            "made": self._made.tobytes(),
            "refs": [r.tobytes() for r in self.refs],
        }
        return {"token": self.token, "rows": _in_order(self.row), **arrays}

    def joined(self, other: Claim) -> Claim:
        """Return the rows of this claim, then those of ``other``, under this one's token."""
        joined = self.part(range(len(self)))
        joined.row = np.concatenate([self.row, other.row])
        joined._fixed = np.concatenate([self._fixed, other._fixed])
        joined._made = np.concatenate([self._made, other._made])
        joined.refs = [
            np.concatenate(both) if len(both[0]) else both[0]
            for both in zip(self.refs, other.refs, strict=True)
        ]
        return joined

    def part(self, positions: Sequence[int]) -> Claim:
        """Return the rows at ``positions`` under the same token."""
        at = np.asarray(positions, np.int64)
        part = Claim.__new__(Claim)
        part.stage = self.stage
        part.token = self.token
        part.owner = self.owner
        part.row = self.row[at]
        part._fixed = self._fixed[at]
        part._made = self._made[at]
        part.refs = [refs[at] if len(refs) else refs for refs in self.refs]
        return part

    @cached_property
    def rows(self) -> tuple[Handle, ...]:
        """The rows one by one."""
        columns = (
            self.row,
            *(self._fixed[n] for n in _FIXED.names or ()),
            *(self._made[n] for n in _MADE.names or ()),
        )
        return tuple(map(Handle._make, zip(*(column.tolist() for column in columns), strict=True)))


@dataclass(frozen=True)
class Nothing:
    """There was nothing to claim.

    ``wait`` is the position of ``topic`` at that moment; ``due`` seconds later a claim may find
    something without a wake-up, because a lease expires or another node's headstart ends.
    """

    wait: str
    due: float | None
    topic: Topic

    @classmethod
    def of(cls, reply: Mapping[str, Any]) -> Nothing:
        due = reply["due"] / 1000 if reply["due"] else None
        return cls(reply["wait"].decode(), due, Topic(reply["topic"].decode()))


class Claims(Calls):
    """Calls of the stages: claim rows, renew leases, write columns, hand rows back."""

    async def admit(self, stored: Stored, groups: Sequence[tuple[int | None, int, int]]) -> int:
        """Admit groups with their ``stored`` columns.

        Each entry of ``groups``: (number of the first group, None for the next one; how many
        groups; samples of each). Returns the number after the last group. Raises GateClosed.
        """
        return int(await self.call("admit", **stored._asdict(), groups=list(groups)))

    async def claim(
        self,
        stage: str,
        worker: str,
        most: float,
        lease: float,
        version: int | None = None,
        home: int = 0,
        least: int = 1,
        patient: bool = False,
        owner: str = "",
        wait: Wait | None = None,
    ) -> Claim | Nothing:
        """Lease up to ``most`` ready rows (or groups) for ``lease`` seconds, those on warehouse
        ``home`` first. A parked row counts as its share of a group.

        Returns Nothing while fewer than ``least`` are ready. ``version`` is the policy version of a
        generating stage, which limits the groups that it may take. A ``patient`` claim leaves rows
        that just became ready on another node to that node's workers (``RunConfig.headstart``).
        ``owner`` binds the lease: only calls that name the same owner can renew, end or commit it
        ("": the run's own workers). ``wait``: the server claims when that has ended."""
        # made here, so that a repeated request needs no reply to know it
        token = secrets.token_hex(16)
        limits = {
            "most": most,
            "least": least,
            "lease": int(lease * 1000),
            "version": version,
            "patient": patient,
        }
        lessee = {"worker": worker, "home": home, "token": token, "owner": owner}
        waits = wait is not None
        reply = await self._call_raw("claim", wait, stage=stage, waits=waits, **lessee, **limits)
        return Claim(stage, token, reply, owner) if "rows" in reply else Nothing.of(reply)

    async def lease(self, token: str, owner: str = "") -> tuple[Claim, int] | None:
        """Return the claim that ``token`` was given for, and how many of its rows are left; None
        when the lease has ended or belongs to another ``owner``."""
        reply = await self._call_raw("lease", token=token, owner=owner)
        return (
            (Claim(reply["stage"].decode(), token, reply, owner), reply["left"]) if reply else None
        )

    async def renew(
        self, stage: str, tokens: Sequence[str], lease: float, owner: str = ""
    ) -> set[str]:
        """Extend leases of ``stage`` and ``owner`` to ``lease`` seconds from now.

        Returns the tokens that still hold.
        """
        held = await self.call(
            "renew", stage=stage, tokens=list(tokens), lease=int(lease * 1000), owner=owner
        )
        return set(held or ())

    async def commit(
        self,
        stored: Stored,
        stage: str,
        token: str,
        rows: Sequence[int],
        made: bytes | None = None,
        owner: str = "",
        turns: bytes | None = None,
    ) -> None:
        """Add ``stored`` columns to ``rows`` (ascending ranges, see :func:`ranges`) and end their
        lease, in one step.

        ``made``: (oldest version, tokens) of each row, packed by :func:`pack_made`, from a stage
        that generates; ``turns``: as many of each as it has, uint32 [B] as bytes, where the rows
        are trajectories. Raises LeaseLost, and writes nothing, when the token no longer holds one of
        the rows."""
        lease = {"stage": stage, "token": token, "owner": owner}
        output = {"rows": rows, "made": made, "turns": turns}
        await self.call("commit", **stored._asdict(), **lease, **output)

    async def park(
        self,
        stored: Stored,
        stage: str,
        token: str,
        rows: Sequence[int],
        made: bytes,
        owner: str = "",
        to: str = "",
        spare: int = 0,
        reserve: int = 0,
    ) -> Block | None:
        """Store unfinished rows with their ``stored`` columns, so that any worker of the stage can
        continue them; or of the stage ``to``, which takes turns with it. Arguments as in
        :meth:`commit`. Returns a block of ``spare`` bytes for the worker's next write, as
        :meth:`Warehouses.allocate` does, where there is room for it."""
        lease = {"stage": stage, "token": token, "owner": owner, "to": to}
        room = {"spare": spare, "reserve": reserve}
        reply = await self.call("park", **stored._asdict(), **lease, **room, rows=rows, made=made)
        return Block(reply["block"], reply["offset"]) if reply else None

    async def hand_back(self, claim: Claim) -> None:
        """End the claim's lease and make its remaining rows ready at once.

        Does nothing when the lease has ended.
        """
        await self.call("hand_back", stage=claim.stage, token=claim.token, owner=claim.owner)

    async def drop_groups(
        self, claim: Claim, groups: Sequence[int], reason: str = "dropped"
    ) -> None:
        """Remove whole groups, held by ``claim``, without training them.

        The ledger counts them as filtered, and under the first REASON_CHARACTERS of ``reason``.
        Raises TooManyDropped, with the groups removed, when more have left since the last step than
        the run's config allows.
        """
        lease = {"stage": claim.stage, "token": claim.token, "owner": claim.owner}
        reply = await self.call(
            "drop_groups", **lease, groups=list(groups), reason=reason[:REASON_CHARACTERS]
        )
        since = int(reply[0])
        most = int(reply[1])
        if 0 <= most < since:
            raise TooManyDropped(since, most, (await self.ledger_event()).dropped)

    async def ledger_event(self) -> LedgerEvent:
        """Return the ledger of this moment as an event, with what was dropped by reason."""
        ledger = await self.call("ledger_event")
        return LedgerEvent.of({**ledger, **{name: dict(ledger[name] or {}) for name in DROPPED}})

    async def spare_groups(self, groups: Sequence[int]) -> None:
        """Record that these groups will be trained though they teach nothing, because their step
        may drop no more. The ledger counts them when they are trained. Can be repeated."""
        await self.call("spare_groups", groups=list(groups))

    async def inspect(self, group: int) -> tuple[Claim, np.ndarray] | None:
        """Return the rows of a group as a claim without lease, and their states; None when the
        group is not in the run."""
        reply = await self._call_raw("inspect", group=group)
        return (Claim("", "", reply), np.frombuffer(reply["states"], _STATE)) if reply else None


def pack_made(made: Sequence[tuple[int, int]], order: np.ndarray) -> bytes:
    """Return (oldest version, tokens) of each row, as the index stores them, in ``order``."""
    return np.array(list(made), _MADE)[order].tobytes()


def ranges(rows: np.ndarray) -> tuple[list[int], np.ndarray]:
    """Row numbers [B] as ascending ranges (first, last, first, last, …), and the order that sorts
    them so."""
    # as claims give them
    if len(rows) == 1 or (rows[-1] - rows[0] == len(rows) - 1 and (np.diff(rows) == 1).all()):
        return [int(rows[0]), int(rows[-1])], np.arange(len(rows))
    order = np.argsort(rows, kind="stable")
    return _in_order(rows[order]), order


def _in_order(rows: np.ndarray) -> list[int]:
    """Row numbers as ranges of neighbours, in the order given."""
    breaks = np.flatnonzero(np.diff(rows) != 1)
    firsts = rows[np.concatenate([[0], breaks + 1])]
    lasts = rows[np.concatenate([breaks, [len(rows) - 1]])]
    return np.stack([firsts, lasts], 1).reshape(-1).tolist()
