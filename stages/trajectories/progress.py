"""A trajectory as the columns of its row: turns of the policy and observations between them.

    response_ids      observation  turn 1  observation  turn 2  observation
    loss_mask              0         1          0         1          0
    versions              -1         v          -1        v'         -1      run-length encoded
    rollout_logprobs       0        logprob     0       logprob      0
    turn_starts                     ^                    ^                   the present turn last
    branches                                                                 empty, unless its program goes back

While it goes on, the row is parked with these columns (but for the mask, which the versions say).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import chain, pairwise, takewhile
from typing import Any

import torch

from pipeline.index.client import Claim
from pipeline.warehouse.dock import Dock, Rows
from stages.branches import Branch, branches_of, shared_until
from stages.flow.catalogue import (
    BRANCHES,
    DROPPED_ENDING,
    MASK,
    OBSERVED,
    TIMES,
    TURN_REWARD,
    TURN_SECONDS,
    TURN_STARTS,
)

PARKED = (
    "response_ids",
    "rollout_logprobs",
    "versions",
    TURN_STARTS,
    TURN_REWARD,
    TURN_SECONDS,
    BRANCHES,
    "truncated",
)


class Ending(IntEnum):
    """Why a trajectory has ended."""

    DONE = 0  # its environment said so
    TURNS = 1  # environment.max_turns
    TOKENS = 2  # no further turn has room in environment.max_tokens
    TRUNCATED = 3  # a turn was cut at rollout.max_tokens
    TIMEOUT = 4  # environment.trajectory_timeout
    FAILED = 5  # its environment failed, and its reward is 0
    DROPPED = DROPPED_ENDING  # its environment failed, and its group is dropped


@dataclass
class Progress:
    """The tokens of a trajectory so far: ``token_ids``, and of each its logprob (0 of an
    observation). ``versions``: run-length encoded, OBSERVED of observations. ``turn_starts``: where
    each turn begins. ``turn_reward``: of each turn that was answered; NaN: none. ``turn_seconds``:
    the TIMES of each turn. ``branches``: the column. ``truncated``: the last turn was cut at its
    longest."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    turn_starts: list[int] = field(default_factory=list)
    turn_reward: list[float] = field(default_factory=list)
    turn_seconds: list[float] = field(default_factory=list, compare=False)
    branches: list[int] = field(default_factory=list)
    truncated: bool = False

    def observe(self, token_ids: Sequence[int], after: int | None = None) -> int:
        """Append an observation. ``after``: so many turns; where others have followed these, a
        branch begins with the first token that no path has. Return how many tokens are new."""
        if after is not None and after < len(self.turn_starts):
            token_ids = self._fork(token_ids, after)
        if token_ids:
            self.token_ids += token_ids
            self.logprobs += [0.0] * len(token_ids)
            self.versions.append((OBSERVED, len(token_ids)))
        return len(token_ids)

    def append(self, token_ids: Sequence[int], logprobs: Sequence[float], version: int) -> None:
        """Append tokens that the policy has generated."""
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.versions.append((version, len(token_ids)))

    def _fork(self, token_ids: Sequence[int], after: int) -> Sequence[int]:
        """Begin a branch with ``token_ids`` behind the turn before turn ``after``. Return those
        that are new: other paths may go on with the first ones."""
        tree = self.tree()
        fork = self.turn_starts[after - 1] + len(self.turns[after - 1]) if after else 0
        before = [*chain(*shared_until(tree, fork))] if fork else []
        wanted = [*(self.token_ids[place] for place in before), *token_ids]
        common = len(before)
        for branch in tree:
            path = branch.path()
            pairs = zip(wanted, path, strict=False)
            equal = takewhile(lambda pair: pair[0] == self.token_ids[pair[1]], pairs)
            equal_tokens = sum(1 for _ in equal)
            if equal_tokens > common:
                fork = path[equal_tokens - 1] + 1
                common = equal_tokens
        self.branches += (len(self.token_ids), fork)
        return wanted[common:]

    def drop_unused_branch(self) -> None:
        """Take the last branch away where the trajectory has ended before its first turn."""
        if not self.branches or self.turn_starts[-1] >= self.branches[-2]:
            return
        begin = self.branches[-2]
        if begin < len(self.token_ids):
            self.versions.pop()
        del self.token_ids[begin:], self.logprobs[begin:], self.branches[-2:]

    def tree(self) -> list[Branch]:
        """Return its branches."""
        return branches_of(self.branches, len(self.token_ids))

    def context(self, turn: int) -> list[int]:
        """Return the tokens that stand before a turn, as places in ``token_ids``."""
        start = self.turn_starts[turn]
        branch = [each for each in self.tree() if each.begin <= start][-1]
        return branch.path(start)

    def begin_turn(self, opening_seconds: float = 0.0) -> None:
        """``opening_seconds``: of the environment's opening before it."""
        self.turn_starts.append(len(self.token_ids))
        self.turn_seconds += (0.0, 0.0, opening_seconds)
        self.truncated = False

    def time_turn(self, away: float, environment: float) -> None:
        """Record the seconds of the last turn: what the engine has not used of the seconds ``away``,
        from its beginning to its answering, was waiting (NaN: not known), and the answer took
        ``environment``."""
        engine, _, opening = self.turn_seconds[-len(TIMES) :]
        self.turn_seconds[-2:] = away - engine, opening + environment

    @property
    def turns(self) -> list[list[int]]:
        """The tokens of each turn, without the observations after it."""
        mask = self.mask()
        return [
            [token for token, made in zip(self.token_ids[a:b], mask[a:b], strict=True) if made]
            for a, b in pairwise([*self.turn_starts, len(self.token_ids)])
        ]

    def mask(self) -> list[bool]:
        """Return for each token whether the policy has made it."""
        return [version != OBSERVED for version, count in self.versions for _ in range(count)]

    @property
    def generated(self) -> tuple[int, int]:
        """The oldest policy version of its tokens and how many the policy has made: -1 and 0 before
        the first one."""
        counts = dict[int, int]()  # generated tokens by version
        for version, count in self.versions:
            if version != OBSERVED:
                counts[version] = counts.get(version, 0) + count
        return min(counts, default=OBSERVED), sum(counts.values())


async def parked_progress(dock: Dock, claim: Claim) -> dict[int, Progress]:
    """Return the progress of those rows of ``claim`` that have some, by position."""
    positions, rows = await dock.begun(claim, PARKED)
    if not positions:
        return {}
    truncated = rows.pop("truncated").values.tolist()
    columns = {name: column.lists() for name, column in rows.items()}
    return {
        position: Progress(
            token_ids=columns["response_ids"][number],
            logprobs=columns["rollout_logprobs"][number],
            versions=_pairs(columns["versions"][number]),
            turn_starts=columns[TURN_STARTS][number],
            turn_reward=columns[TURN_REWARD][number],
            turn_seconds=columns[TURN_SECONDS][number],
            branches=columns[BRANCHES][number],
            truncated=truncated[number],
        )
        for number, position in enumerate(positions)
    }


def parked_columns(trajectories: Sequence[Progress]) -> dict[str, Any]:
    """Return the columns with which unfinished ``trajectories`` are parked."""
    return {
        "response_ids": [torch.tensor(each.token_ids, dtype=torch.int64) for each in trajectories],
        "rollout_logprobs": [torch.tensor(each.logprobs) for each in trajectories],
        "versions": [_flat(each.versions) for each in trajectories],
        TURN_STARTS: [torch.tensor(each.turn_starts, dtype=torch.int64) for each in trajectories],
        TURN_REWARD: [torch.tensor(each.turn_reward) for each in trajectories],
        TURN_SECONDS: [torch.tensor(each.turn_seconds) for each in trajectories],
        BRANCHES: [torch.tensor(each.branches, dtype=torch.int64) for each in trajectories],
        "truncated": torch.tensor([each.truncated for each in trajectories]),
    }


def ended_columns(
    trajectories: Sequence[Progress], rewards: Iterable[float], endings: Iterable[Ending]
) -> Rows:
    """Return all columns of ``trajectories`` that have ended. ``rewards``: NaN of one without."""
    for each in trajectories:
        each.drop_unused_branch()
    return {
        **parked_columns(trajectories),
        MASK: [torch.tensor(each.mask(), dtype=torch.bool) for each in trajectories],
        "environment_reward": torch.tensor([*rewards], dtype=torch.float32),
        "ending": torch.tensor([*endings], dtype=torch.uint8),
    }


def _pairs(flat: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(flat[::2], flat[1::2], strict=True))


def _flat(versions: Iterable[tuple[int, int]]) -> torch.Tensor:
    return torch.tensor([number for pair in versions for number in pair], dtype=torch.int64)
