"""The state of a group of workers: what it may become, and what the run can do without it.

    STARTING ──▶ WORKING ──▶ LEAVING ──▶ DONE      LEAVING: it is asked to leave the run
        │           ├─────────────────────▲        DONE: its work is done, or it has left
        └───────────┴──▶ ABSENT ──────────┘        ABSENT: the run goes on without it, for a while

An absent group goes on as it was before: the restart budget allows a restart, or a host has room.
It holds nothing, so that it does not leave: it is done at once. A leaving group goes on when it is
wanted again. Death and restart are no moves: a group works while its workers are restarted.

Without tasks, clocks and I/O: ``orchestration.supervise.supervisor`` acts on what stands here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from orchestration.recipe.worker_kinds import WorkerKind, kind_of
from orchestration.supervise.budget import RestartBudget

Worker = tuple[str, int]  # kind and number


class State(Enum):
    STARTING = "starting"  # some of its workers have not been ready yet
    WORKING = "working"  # all of them have been ready; those that die are restarted
    LEAVING = "leaving"  # it parks what it has, within `launch.stop_timeout`
    ABSENT = "absent"  # it waits for its restart budget or for a host
    DONE = "done"


MOVES = {
    State.STARTING: {State.WORKING, State.LEAVING, State.ABSENT, State.DONE},
    State.WORKING: {State.LEAVING, State.ABSENT, State.DONE},
    State.LEAVING: {State.STARTING, State.WORKING, State.DONE},
    State.ABSENT: {State.STARTING, State.WORKING, State.DONE},
    State.DONE: set[State](),
}


@dataclass(eq=False)
class WorkerGroup:
    """Workers that start and end together: the ranks of an engine, or one worker.

    >>> group = WorkerGroup([("update", 0), ("update", 1)], RestartBudget(1, window=60.0))
    >>> [group.ready(worker) or group.state.value for worker in ("update-0", "update-1")]
    ['starting', 'working']
    >>> group.move(State.ABSENT)
    >>> group.move(State.LEAVING)
    Traceback (most recent call last):
    ValueError: update-0 is absent and cannot be leaving
    >>> group.go_on()
    >>> group.state.value
    'working'
    """

    workers: list[Worker]
    budget: RestartBudget
    state: State = State.STARTING
    unready: set[str] = field(init=False)
    """The workers of which no process has been ready yet, as KIND-NUMBER."""
    names: dict[Worker, str] = field(default_factory=dict)
    """The present process of each worker."""
    fault: tuple[str, ...] | None = None
    """What failed the last time that a worker ended before its first work."""

    def __post_init__(self) -> None:
        self.unready = set(map(shown, self.workers))

    @property
    def first(self) -> Worker:
        """The worker that the group goes by."""
        return self.workers[0]

    @property
    def kind(self) -> WorkerKind:
        return kind_of(self.first[0])

    @property
    def is_present(self) -> bool:
        """Return whether it may leave or become absent."""
        return self.state in (State.STARTING, State.WORKING)

    def move(self, state: State) -> None:
        """Move to another state. Raises ValueError for a move that :data:`MOVES` does not have."""
        if state not in MOVES[self.state]:
            now = f"{shown(self.first)} is {self.state.value}"
            raise ValueError(f"{now} and cannot be {state.value}")
        self.state = state

    def go_on(self) -> None:
        """Move to what it was before it was absent or was asked to leave."""
        self.move(State.STARTING if self.unready else State.WORKING)

    def ready(self, worker: str) -> None:
        """Note that a process of ``worker``, which may be one of another group, is ready."""
        self.unready.discard(worker)
        if self.state is State.STARTING and not self.unready:
            self.move(State.WORKING)


def groups_of(workers: Iterable[Worker]) -> list[list[Worker]]:
    """Return the workers in groups that start and end together.

    >>> groups_of([("flow", 0), ("update", 0), ("update", 1), ("critic", 0)])
    [[('flow', 0)], [('update', 0), ('update', 1), ('critic', 0)]]
    """
    groups: dict[Worker, list[Worker]] = {}
    for kind, number in workers:
        rank_group = kind_of(kind).rank_group
        first = (rank_group, 0) if rank_group else (kind, number)
        groups.setdefault(first, []).append((kind, number))
    return list(groups.values())


def others_work(group: WorkerGroup, groups: Iterable[WorkerGroup]) -> bool:
    """Return whether the run goes on without ``group``, because others of its elastic kind work,
    leave, or have done all of it."""
    others = (other for other in groups if other is not group and other.kind is group.kind)
    return group.kind.elastic and any(other.state is not State.ABSENT for other in others)


def work_is_done(groups: Iterable[WorkerGroup]) -> bool:
    """Return whether the groups that end by themselves are done. Nobody waits for an absent one."""
    ended = (State.DONE, State.ABSENT)
    return all(group.state in ended for group in groups if group.kind.ends_by_itself)


def engines_of(groups: Iterable[WorkerGroup]) -> list[str]:
    """Return the rollout workers that must have the last version before the run ends."""
    return [
        shown(group.first)
        for group in groups
        if group.kind.elastic and group.state not in (State.ABSENT, State.LEAVING)
    ]


def missing(groups: Iterable[WorkerGroup]) -> list[str]:
    """Return the workers that have not been ready, and without which the run cannot train: of an
    elastic kind one that is ready is enough.

    >>> rollouts = [WorkerGroup([("rollout", n)], RestartBudget(1, window=60.0)) for n in (0, 1)]
    >>> missing(rollouts)
    ['rollout-0', 'rollout-1']
    >>> rollouts[1].ready("rollout-1")
    >>> missing(rollouts)
    []
    """
    groups = list(groups)
    begun = {group.kind for group in groups if group.kind.elastic and not group.unready}
    return sorted(worker for group in groups if group.kind not in begun for worker in group.unready)


def shown(worker: Worker) -> str:
    """Return KIND-NUMBER of ``worker``."""
    return f"{worker[0]}-{worker[1]}"
