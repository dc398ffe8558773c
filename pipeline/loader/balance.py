"""A split of rows into parts of nearly equal tokens."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def balanced(lengths: Sequence[int], parts: int, *, equal: bool = True) -> list[list[int]]:
    """Split positions 0 … n-1 into ``parts`` lists with nearly equal sums of ``lengths`` (largest
    differencing, Karmarkar and Karp 1982); never further apart than a greedy split. ``equal``: the
    lists' counts differ by one at most.

    >>> balanced([9, 7, 6, 5, 4, 1], 2)
    [[0, 2, 5], [1, 3, 4]]
    """
    if parts < 1:
        raise ValueError(f"parts: {parts} cannot hold anything; give at least 1")
    best_method = min(
        (_differencing, _greedy), key=lambda method: _spread(lengths, method(lengths, parts, equal))
    )
    return [sorted(part) for part in best_method(lengths, parts, equal)]


def _spread(lengths: Sequence[int], split: Sequence[Sequence[int]]) -> int:
    sums = [sum(lengths[i] for i in part) for part in split]
    return max(sums) - min(sums)


def _differencing(lengths: Sequence[int], parts: int, equal: bool) -> list[list[int]]:
    """Begin with one way of filling all parts for each item (or for each ``parts`` items of near
    lengths, when the counts shall be equal), and join the two ways of the widest spreads, the
    heaviest part of one with the lightest of the other, until one is left."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    rounds = (
        [order[i : i + parts] for i in range(0, len(order), parts)]
        if equal
        else [[i] for i in order]
    )
    ways = []
    for number, items in enumerate(rounds):
        way = [(lengths[i], [i]) for i in items] + [(0, [])] * (parts - len(items))
        ways.append((way[-1][0] - way[0][0], number, way))
    heapq.heapify(ways)
    number = len(ways)
    while len(ways) > 1:
        (_, _, widest), (_, _, next_widest) = heapq.heappop(ways), heapq.heappop(ways)
        way = [(a + b, x + y) for (a, x), (b, y) in zip(widest, reversed(next_widest), strict=True)]
        way.sort(key=lambda part: -part[0])
        heapq.heappush(ways, (way[-1][0] - way[0][0], number, way))
        number += 1
    return [part for _, part in ways[0][2]] if ways else [[] for _ in range(parts)]


def _greedy(lengths: Sequence[int], parts: int, equal: bool) -> list[list[int]]:
    """Give the longest first, each to the lightest part that may have one more."""
    out: list[list[int]] = [[] for _ in range(parts)]
    # with equal counts `more` of the parts have one item more
    fewest, more = divmod(len(lengths), parts)
    heap = [(0, part) for part in range(parts)]
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        total, part = heapq.heappop(heap)
        while equal and len(out[part]) >= fewest + (more > 0):  # it is full, for good
            total, part = heapq.heappop(heap)
        more -= len(out[part]) == fewest
        out[part].append(i)
        heapq.heappush(heap, (total + lengths[i], part))
    return out
