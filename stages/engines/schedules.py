"""The order in which a pipeline's ranks compute the micro-batches of a step: 1F1B, and interleaved 1F1B with several parts
of the layers on each rank (arXiv 2104.04473). Arithmetic alone: each rank knows the orders of all.

    virtual stage s of pp · vpp is on rank s mod pp        warm-up: F F F …     then 1F1B: F B F B …     at last: B B B
"""

from __future__ import annotations

from typing import NamedTuple


class Action(NamedTuple):
    """The forward ("F") or backward ("B") pass of micro-batch ``number`` through virtual stage ``stage``."""

    kind: str
    stage: int
    number: int

    @property
    def needs(self) -> Action:
        """The pass whose result comes from another stage."""
        return self._replace(stage=self.stage - 1 if self.kind == "F" else self.stage + 1)


def filled(pp: int, vpp: int, micro_batches: int) -> int:
    """Micro-batches with those that are idle: parts of a rank take turns by ``pp`` of them."""
    return micro_batches if vpp == 1 else -(-micro_batches // pp) * pp


def orders(pp: int, vpp: int, micro_batches: int, *, backward: bool = True) -> list[list[Action]]:
    """What each rank does, in order, for a number of micro-batches that :func:`filled` returns; without ``backward``, for
    any number.

    >>> ["".join(f"{a.kind}{a.number} " for a in order).strip() for order in orders(2, 1, 3)]
    ['F0 F1 B0 F2 B1 B2', 'F0 B0 F1 B1 F2 B2']
    """
    found = []
    for rank in range(pp):
        own = [(stage, number) for stage in range(rank, pp * vpp, pp) for number in range(micro_batches)]
        forward = [Action("F", *one) for one in sorted(own, key=lambda one: (one[1] // pp, one))]
        backwards = [Action("B", *one) for one in sorted(own, key=lambda one: (one[1] // pp, -one[0], one[1]))]
        first = pp - 1 - rank if vpp == 1 else (vpp - 1) * pp + 2 * (pp - 1 - rank)
        first = min(first, len(forward))
        steady = [action for pair in zip(forward[first:], backwards, strict=False) for action in pair]
        ending = backwards[len(forward) - first :]
        found.append([*forward[:first], *steady, *ending] if backward else forward)
    return found


def slots(ordered: list[list[Action]], *, backward: int = 2) -> tuple[int, int]:
    """The slots that ranks take for ``ordered`` together from first to last, when a forward pass takes one and a backward
    pass ``backward``, and those in which one of them is idle. Raises ValueError where ranks would wait for each other."""
    last, at, free = max(a.stage for order in ordered for a in order), [0] * len(ordered), [0] * len(ordered)
    done: dict[Action, int] = {}
    while any(at[rank] < len(order) for rank, order in enumerate(ordered)):
        before = len(done)
        for rank, order in enumerate(ordered):
            while at[rank] < len(order):
                action = order[at[rank]]
                if 0 <= action.needs.stage <= last and action.needs not in done:
                    break
                free[rank] = max(free[rank], done.get(action.needs, 0)) + (1 if action.kind == "F" else backward)
                done[action] = free[rank]
                at[rank] += 1
        if len(done) == before:
            raise ValueError(f"ranks wait for each other after {before} of {sum(map(len, ordered))} passes")
    work = max(sum(1 if a.kind == "F" else backward for a in order) for order in ordered)
    return max(free), max(free) - work
