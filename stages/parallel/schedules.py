"""The order in which a pipeline's ranks compute the micro-batches of a step: 1F1B, or interleaved
1F1B with several parts of the layers on each rank (arXiv 2104.04473). Arithmetic alone: each rank
knows the orders of all.

    virtual stage s of pp · vpp is on rank s mod pp        warm-up: F F F …     then 1F1B: F B F B …     at last: B B B
"""

from __future__ import annotations

from typing import NamedTuple


class Action(NamedTuple):
    """The forward ("F") or backward ("B") pass of micro-batch ``number`` through virtual stage
    ``stage``."""

    kind: str
    stage: int
    number: int

    @property
    def needs(self) -> Action:
        """The pass whose result comes from another stage."""
        return self._replace(stage=self.stage - 1 if self.kind == "F" else self.stage + 1)


def holder(stage: int, pp: int) -> int:
    """The rank, of ``pp``, that has virtual stage ``stage``."""
    return stage % pp


def filled(pp: int, vpp: int, micro_batches: int) -> int:
    """Micro-batches with those that are idle: parts of a rank take turns by ``pp`` of them."""
    return micro_batches if vpp == 1 else -(-micro_batches // pp) * pp


def orders(pp: int, vpp: int, micro_batches: int, *, backward: bool = True) -> list[list[Action]]:
    """What each rank does, in order, for a number of micro-batches that :func:`filled` returns;
    without ``backward``, for any number.

    >>> ["".join(f"{a.kind}{a.number} " for a in order).strip() for order in orders(2, 1, 3)]
    ['F0 F1 B0 F2 B1 B2', 'F0 B0 F1 B1 F2 B2']
    """
    found = []
    for rank in range(pp):
        own = [(stage, number) for stage in range(pp * vpp) for number in range(micro_batches)]
        own = [one for one in own if holder(one[0], pp) == rank]
        forward = [Action("F", *one) for one in sorted(own, key=lambda one: (one[1] // pp, one))]
        backwards = [
            Action("B", *one)
            for one in sorted(own, key=lambda one: (one[1] // pp, -one[0], one[1]))
        ]
        first = pp - 1 - rank if vpp == 1 else (vpp - 1) * pp + 2 * (pp - 1 - rank)
        first = min(first, len(forward))
        steady = [
            action for pair in zip(forward[first:], backwards, strict=False) for action in pair
        ]
        ending = backwards[len(forward) - first :]
        found.append([*forward[:first], *steady, *ending] if backward else forward)
    return found
