"""The order in which a pipeline's ranks compute the micro-batches of a step: 1F1B, interleaved 1F1B
with several parts of the layers on each rank (arXiv 2104.04473), and ZBV (arXiv 2405.15362).
Arithmetic alone: each rank knows the orders of all.

    virtual stage s of pp · vpp is on rank s mod pp        warm-up: F F F …     then 1F1B: F B F B …     at last: B B B
    ZBV: s and 2 · pp - 1 - s are on rank s < pp           F … F, F B W …       F B W F B W …            B … B, B W …, W
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Literal, NamedTuple

Kind = Literal["auto", "zbv"]  # auto: 1F1B, interleaved where ranks have several virtual stages


class Action(NamedTuple):
    """The forward ("F") or backward ("B") pass of micro-batch ``number`` through virtual stage
    ``stage``. In ZBV the latter leaves gradients of matrices to "W"."""

    kind: str
    stage: int
    number: int

    @property
    def needs(self) -> Action:
        """The pass whose result comes from another stage; of "W", the pass before it."""
        if self.kind == "W":
            return self._replace(kind="B")
        return self._replace(stage=self.stage - 1 if self.kind == "F" else self.stage + 1)


def holder(stage: int, pp: int, kind: Kind) -> int:
    """The rank, of ``pp``, that has virtual stage ``stage``."""
    return min(stage, 2 * pp - 1 - stage) if kind == "zbv" else stage % pp


def filled(pp: int, vpp: int, micro_batches: int, kind: Kind = "auto") -> int:
    """Micro-batches with those that are idle: parts of a rank take turns by ``pp`` of them."""
    return micro_batches if vpp == 1 or kind == "zbv" else -(-micro_batches // pp) * pp


def orders(
    pp: int, vpp: int, micro_batches: int, *, backward: bool = True, kind: Kind = "auto"
) -> list[list[Action]]:
    """What each rank does, in order, for a number of micro-batches that :func:`filled` returns;
    without ``backward``, for any number.

    >>> ["".join(f"{a.kind}{a.number} " for a in order).strip() for order in orders(2, 1, 3)]
    ['F0 F1 B0 F2 B1 B2', 'F0 B0 F1 B1 F2 B2']
    """
    found = []
    for rank in range(pp):
        own = [(stage, number) for stage in range(pp * vpp) for number in range(micro_batches)]
        own = [one for one in own if holder(one[0], pp, kind) == rank]
        forward = [Action("F", *one) for one in sorted(own, key=lambda one: (one[1] // pp, one))]
        backwards = [
            Action("B", *one)
            for one in sorted(own, key=lambda one: (one[1] // pp, -one[0], one[1]))
        ]
        if backward and kind == "zbv":
            found.append(
                [
                    action
                    for action in _zbv(rank, pp, micro_batches)
                    if action.number < micro_batches
                ]
            )
            continue
        first = pp - 1 - rank if vpp == 1 else (vpp - 1) * pp + 2 * (pp - 1 - rank)
        first = min(first, len(forward))
        steady = [
            action for pair in zip(forward[first:], backwards, strict=False) for action in pair
        ]
        ending = backwards[len(forward) - first :]
        found.append([*forward[:first], *steady, *ending] if backward else forward)
    return found


def _zbv(rank: int, pp: int, micro_batches: int) -> Iterator[Action]:
    """What ``rank`` does in ZBV, for at least so many micro-batches as fill the pipeline."""
    count = max(2 * pp - 1, micro_batches)
    done = Counter[tuple[str, int]]()

    def some(passes: str, part: int) -> Iterator[Action]:
        for kind in passes:
            yield Action(kind, 2 * pp - 1 - rank if part else rank, done[kind, part])
            done[kind, part] += 1

    for _ in range(2 * (pp - rank) - 1):
        yield from some("F", 0)
    for _ in range(rank):
        yield from (*some("F", 1), *some("F", 0))
    for _ in range(pp - rank):
        yield from some("FBW", 1)
    while done["F", 1] < count:
        yield from some("FBW" if done["F", 0] < count else "BW", 0)
        yield from some("FBW", 1)
    for _ in range(rank):
        yield from (*some("B", 0), *some("B", 1))
    for _ in range(pp - rank):
        yield from some("BW", 0)
    for part in (1, 0):
        while done["W", part] < count:
            yield from some("W", part)
