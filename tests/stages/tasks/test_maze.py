"""The maze: a tree of passages, an environment that walks it, and the best that any policy gets."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pytest

from stages.tasks.maze import MazeWalk, maze, passages

Row = dict[str, Any]


def relaxed(cells: Mapping[str, Mapping[str, str]], goal: str) -> dict[str, int]:
    """The fewest moves from each cell to ``goal``, by Bellman and Ford."""
    moves = {cell: 0 if cell == goal else 10**6 for cell in cells}
    for _ in cells:
        for cell, open_to in cells.items():
            moves[cell] = min([moves[cell], *(1 + moves[other] for other in open_to.values())])
    return moves


def walk(row: Row, policy: Mapping[str, str], turns: int) -> float:
    """The reward of a policy that has a direction for each cell."""
    environment = MazeWalk()
    environment.reset(row["cells"], row["start"], row["goal"], row["fewest"])
    cell = row["start"]
    for _ in range(turns):
        cell, reward, done = environment.step(policy[cell])
        if done:
            return reward
        assert reward == 0
    return 0.0


@pytest.mark.parametrize("side", [2, 3, 4, 5])
@pytest.mark.parametrize("seed", range(4))
def test_the_passages_are_a_tree_and_the_exit_is_its_middle(side: int, seed: int) -> None:
    cells = passages(seed, side)
    assert len(cells) == side**2
    assert sum(map(len, cells.values())) == 2 * (side**2 - 1), "a tree has an edge less than nodes"
    back = {"n": "s", "s": "n", "e": "w", "w": "e"}
    for cell, open_to in cells.items():
        for name, other in open_to.items():
            assert cells[other][back[name]] == cell
            steps = {"n": -side, "s": side, "e": 1, "w": -1}
            assert ord(other) - ord(cell) == steps[name]
    farthest = {cell: max(relaxed(cells, cell).values()) for cell in cells}
    rows = [maze(number, seed, difficulty=side) for number in range(60)]
    assert {farthest[row["goal"]] for row in rows} == {min(farthest.values())}
    for row in rows:
        assert row["fewest"] == relaxed(cells, row["goal"])[row["start"]] > 0
        assert row["prompt"] == f"{row['start']}:"
    assert len({row["start"] for row in rows}) > 1


@pytest.mark.parametrize("seed", range(3))
def test_one_policy_alone_has_the_optimum(seed: int) -> None:
    """Of all ways to choose a direction for each cell, in a maze of four."""
    rows = list(
        {row["start"]: row for row in (maze(n, seed, difficulty=2) for n in range(40))}.values()
    )
    cells = sorted(rows[0]["cells"])
    assert len(rows) == 3
    policies = (
        dict(zip(cells, directions, strict=True))
        for directions in itertools.product("nesw", repeat=4)
    )
    values = {
        "".join(policy[cell] for cell in cells if cell != rows[0]["goal"]): sum(
            walk(row, policy, 4) for row in rows
        )
        / 3
        for policy in policies
    }
    assert sorted(values.values())[-2] < max(values.values()) == 1.0


def test_detours_cost_and_walls_hold() -> None:
    row = next(row for row in (maze(n, 0) for n in range(99)) if row["fewest"] == 2)
    environment = MazeWalk()
    environment.reset(row["cells"], row["start"], row["goal"], row["fewest"])
    closed = next(name for name in "nesw" if name not in row["cells"][row["start"]])
    assert environment.step(closed) == (row["start"], 0.0, False)
    assert environment.step("?") == (row["start"], 0.0, False)
    distance = relaxed(row["cells"], row["goal"])
    cell = row["start"]
    for left in (1, 0):
        name, cell = next(
            (name, other) for name, other in row["cells"][cell].items() if distance[other] == left
        )
        reply = environment.step(name)
    assert reply == (None, 0.5, True), "two moves of four"
