"""The branches of a trajectory: where its program went back, and went on from there otherwise.

    prompt ─ 0 1 2 3 4 5 6 7          the row's tokens are numbered as they were made; what a token
                 ├─ 8 9 10 11         follows is its path: the prompt and, for 13, 0 1 2 8 9 12
                 │    └─ 12 13
                 └─ 14 15             column branches: 8 3  12 10  14 3

Importing this needs no torch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Branch:
    """The tokens ``begin:end`` of a row, after those of others that it shares, ``shared``."""

    begin: int
    end: int
    shared: tuple[range, ...] = ()

    @property
    def depth(self) -> int:
        """How many tokens it shares."""
        return sum(map(len, self.shared))

    def path(self, end: int | None = None) -> list[int]:
        """Return the tokens from the row's first one to ``end``, exclusive; None: of all."""
        return [*chain(*self.shared, range(self.begin, self.end if end is None else end))]

    def position(self, place: int) -> int:
        """Return which token of the path is the one at ``place`` of the path."""
        for part in (*self.shared, range(self.begin, self.end)):
            if place < len(part):
                return part[place]
            place -= len(part)
        raise IndexError(place)


def branches_of(column: Sequence[int], length: int) -> list[Branch]:
    """Return the branches of a row of ``length`` tokens, the first of them its trunk. ``column``:
    of each other one where it begins, and behind which token of another one it forks, counted from
    1 (0: behind the prompt).

    >>> branches_of([8, 3, 12, 10], 14)[2].path()
    [0, 1, 2, 8, 9, 12, 13]
    """
    begins = [0, *column[::2]]
    branches = list[Branch]()
    for begin, end, fork in zip(begins, [*begins[1:], length], [0, *column[1::2]], strict=True):
        shared = shared_until(branches, fork) if fork else ()
        branches.append(Branch(begin, end, shared))
    return branches


def shared_until(branches: Sequence[Branch], fork: int) -> tuple[range, ...]:
    """Return the path that ends with token ``fork`` - 1, as ranges."""
    parent = branches[bisect_left(branches, fork, key=lambda branch: branch.begin) - 1]
    return (*parent.shared, range(parent.begin, fork))


@dataclass(frozen=True, eq=False)
class Strand:
    """Tokens of a row that are packed side by side: a whole row, or one of its branches.

    ``ids`` int64 [n], the first ``fed`` of them fed and the last ``predicted`` predicted, which are
    those of ``row``, by its place in the piece, from number ``begin`` on. ``path``: the numbers of
    tokens that come before them, and are in other strands; empty for a strand that follows the
    prompt.
    """

    row: int
    ids: torch.Tensor
    fed: int
    predicted: int
    begin: int = 0
    path: Sequence[int] = ()


@dataclass(frozen=True)
class PackedBranch:
    """The fed ``tokens`` of a branch, and the keys that they see: ``path`` int64 [n], places among
    the packed tokens, their own last. ``positions`` int64, on the CPU: of the tokens, counted from
    the first key."""

    tokens: slice
    path: torch.Tensor
    positions: torch.Tensor


def versions_at(
    versions: Sequence[tuple[int, int]], places: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """Return the versions of the tokens at ``places``, of a row with ``versions``: both run-length
    encoded.

    >>> versions_at([(-1, 2), (4, 2)], [0, 2, 3])
    ((-1, 1), (4, 2))
    """
    of_tokens = [version for version, count in versions for _ in range(count)]
    runs = groupby(of_tokens[place] for place in places)
    return tuple((version, len([*same])) for version, same in runs)
