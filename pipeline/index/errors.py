"""Errors of the index: each refusal of the server has a class of its own."""

from __future__ import annotations

from collections.abc import Mapping

from redis.exceptions import ResponseError

from pipeline.data.arena import StaleHandle
from pipeline.data.events import by_count
from pipeline.problems import Fatal


class IndexRefused(RuntimeError):
    """The index refused a call; the message names the rule that the call would have broken."""


class LeaseLost(IndexRefused):
    """The lease expired, or the row was committed before.

    Another worker may hold the row: drop what was computed.
    """


class BlockLost(LeaseLost):
    """The block was freed because its worker was declared dead. Write the rows again."""


class BoundBroken(Fatal, IndexRefused):
    """A sample older than the staleness bound reached the update. Pacing must make this
    impossible."""


class GateClosed(Fatal, IndexRefused):
    """A group was admitted past the gate."""


class WrittenTwice(Fatal, IndexRefused):
    """A column was written a second time, or a sample trained a second time."""


class FieldsChanged(IndexRefused):
    """The fields of a partition changed since the caller read them.

    Read them again and repeat the put.
    """


class TooManyDropped(Fatal, RuntimeError):
    """More groups left the run untrained since its last step than one step may lose: ``since`` of
    at most ``most``.

    ``reasons``: the groups dropped since the run's beginning, by reason.
    """

    def __init__(self, since: int, most: int, reasons: Mapping[str, int]) -> None:
        counts = ", ".join(f"{groups:,} {reason!r}" for reason, groups in by_count(reasons))
        super().__init__(
            f"{since:,} groups left the run untrained since its last step, and at most {most:,} "
            f"may; dropped so far, by reason: {counts}"
        )
        self.since = since
        self.most = most
        self.reasons = dict(reasons)


class NeverFits(Fatal, IndexRefused):
    """A block is larger than the warehouse can ever hold."""


class IndexUnwritable(IndexRefused):
    """The index's server cannot write its file, and takes no writes until it can."""


class WarehouseGone(IndexRefused):
    """The warehouse is leaving the run, or its node was lost."""


class IndexUnreachable(ConnectionError):
    """The index did not answer within the deadline, retries included."""


_CODES: dict[str, type[Exception]] = {
    "LEASE": LeaseLost,
    "LOST": BlockLost,
    "STALE": BoundBroken,
    "GATE": GateClosed,
    "TWICE": WrittenTwice,
    "FIELDS": FieldsChanged,
    "NOFIT": NeverFits,
    "NOHOUSE": WarehouseGone,
    "GONE": StaleHandle,
    "MISCONF": IndexUnwritable,  # Redis's own
}


def from_reply(error: ResponseError) -> Exception:
    """Return the exception for an error reply, which begins with a code of the function library."""
    code, _, text = str(error).partition(" ")
    return _CODES.get(code, IndexRefused)(text or code)
