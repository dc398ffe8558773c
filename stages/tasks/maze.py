"""A maze of several turns for the model ``tiny``: it learns the way to the exit from every cell.

    prompt  turn 1  where it is  turn 2  where it is  turn 3
    g:      n       d            e       e            n         the exit: 3 moves, the fewest: reward 1

The maze of a seed is the same in all rows: a tree of passages in a square of cells a, b, c, …, whose
exit is as near to the farthest cell as any could be. Only the first cell differs. The optimum is 1.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any

from pydantic import Field

CELLS = "abcdefghijklmnopqrstuvwxyz"
MOVES = {"n": (-1, 0), "e": (0, 1), "s": (1, 0), "w": (0, -1)}  # rows down, columns to the right

Maze = Mapping[str, Mapping[str, str]]
"""Of each cell the cell that each open direction leads to."""


def maze(
    number: int,
    seed: int,
    *,
    difficulty: Annotated[
        int, Field(ge=2, le=5, description="`maze`: cells along a side of the square.")
    ] = 3,
) -> dict[str, Any]:
    """Make a row with a maze, its exit, a cell to begin in, and the fewest moves to the exit.

    The farthest cell is 2 moves from the exit with ``difficulty`` = 2, and at most 4, 8 and 12 with
    3, 4 and 5.
    """
    cells = passages(seed, difficulty)
    ways = {cell: distances(cells, cell) for cell in cells}
    goal = min(cells, key=lambda cell: max(ways[cell].values()))
    start = random.Random(f"maze:{seed}:{number}").choice([cell for cell in cells if cell != goal])
    return {
        "prompt": f"{start}:",
        "cells": {cell: dict(open_to) for cell, open_to in cells.items()},
        "start": start,
        "goal": goal,
        "fewest": ways[goal][start],
    }


@cache
def passages(seed: int, side: int) -> Maze:
    """Return the maze of a seed: each cell is reached from each other by one way (depth first)."""
    draw = random.Random(f"maze:{seed}:{side}")
    cells: dict[str, dict[str, str]] = {cell: {} for cell in CELLS[: side * side]}
    way = [draw.choice(list(cells))]
    visited = {*way}
    while way:
        row, column = divmod(CELLS.index(way[-1]), side)
        fresh = [
            (name, back, cell)
            for (name, (down, right)), back in zip(MOVES.items(), "swne", strict=True)
            if 0 <= row + down < side and 0 <= column + right < side
            if (cell := CELLS[(row + down) * side + column + right]) not in visited
        ]
        if not fresh:
            way.pop()
            continue
        name, back, cell = draw.choice(fresh)
        cells[way[-1]][name] = cell
        cells[cell][back] = way[-1]
        visited.add(cell)
        way.append(cell)
    return cells


def distances(cells: Maze, start: str) -> dict[str, int]:
    """Return the fewest moves from ``start`` to each cell."""
    moves = {start: 0}
    waiting = deque([start])
    while waiting:
        cell = waiting.popleft()
        for other in cells[cell].values():
            if other not in moves:
                moves[other] = moves[cell] + 1
                waiting.append(other)
    return moves


class MazeWalk:
    """The environment: takes a turn's last direction, and says which cell that leads to; into a
    wall, and without a direction, it is the same cell. The reward at the exit is the share of the
    fewest moves in those that were taken."""

    replayable = True
    gives_reward = True

    def reset(self, cells: Maze, start: str, goal: str, fewest: int) -> None:
        self._cells = cells
        self._cell = start
        self._goal = goal
        self._fewest = fewest
        self._moves = 0

    def step(self, text: str) -> tuple[str | None, float, bool]:
        """Return the cell, the reward, and whether it is the exit."""
        self._moves += 1
        directions = [character for character in text if character in MOVES]
        if directions:
            self._cell = self._cells[self._cell].get(directions[-1], self._cell)
        if self._cell == self._goal:
            return None, self._fewest / self._moves, True
        return self._cell, 0.0, False
