"""The kinds of workers, one row each: how many a recipe needs, what builds one, and how the
supervisor treats it.

    recipe ─▶ workers_of ─▶ supervisor: launches each (kind, number) ─▶ worker: Job.build ─▶ work ─▶ finish ─▶ close

A further kind is one row of ``KINDS`` and one file in ``orchestration/workers``. This file
imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestration.recipe.flow import needs_reference

if TYPE_CHECKING:
    from orchestration.recipe.schema import Recipe


@dataclass(frozen=True)
class WorkerKind:
    """One kind of worker.

    ``job``: its :class:`~orchestration.workers.job.Job`, as "module:class". ``numbers``: the
    workers of this kind that a recipe needs. ``rank_group``: name of the group of workers that
    train together; when one dies, all of them are started again ("": each worker is alone).
    ``ends_by_itself``: the run is finished when all workers of such kinds have ended. ``writes``:
    they write columns into an arena. ``elastic``: the run goes on with fewer of them, while one is
    left. ``computes``: they have an engine; on a cluster they are placed on nodes, and the others
    stay on the head.
    """

    name: str
    job: str
    numbers: Callable[[Recipe], range]
    rank_group: str = ""
    ends_by_itself: bool = False
    writes: bool = True
    computes: bool = False
    elastic: bool = False

    @property
    def module(self) -> str:
        """The module of ``job``."""
        return self.job.partition(":")[0]


_BUILDERS = "orchestration.workers"
_ALL = (
    # gate, advantage, and the first reward worker
    WorkerKind("flow", f"{_BUILDERS}.flow:FlowJob", lambda recipe: range(1)),
    # training and generation in turns on one device; replaces `rollout` and `update`
    WorkerKind(
        "colocated",
        f"{_BUILDERS}.colocated:ColocatedJob",
        lambda recipe: range(recipe.train.ranks if recipe.colocated else 0),
        rank_group="update",
        ends_by_itself=True,
        computes=True,
    ),
    # rollout and evaluation, one engine each
    WorkerKind(
        "rollout",
        f"{_BUILDERS}.rollout:RolloutJob",
        lambda recipe: range(
            0 if recipe.colocated or not recipe.runs_stage("rollout") else recipe.rollout.workers
        ),
        ends_by_itself=True,
        computes=True,
        elastic=True,
    ),
    # answers the policy's turns
    WorkerKind(
        "environment",
        f"{_BUILDERS}.environment:EnvironmentJob",
        lambda recipe: range(int(recipe.has_environment)),
    ),
    # reward workers beside that of `flow`
    WorkerKind(
        "reward", f"{_BUILDERS}.one_stage:RewardJob", lambda recipe: range(1, recipe.reward.workers)
    ),
    # logprobs of the frozen reference policy
    WorkerKind(
        "reference",
        f"{_BUILDERS}.one_stage:ReferenceJob",
        lambda recipe: range(int(needs_reference(recipe))),
        computes=True,
    ),
    # one rank of the train engine each; rank 0 has the update stage
    WorkerKind(
        "update",
        f"{_BUILDERS}.update:UpdateJob",
        lambda recipe: range(0 if recipe.colocated else recipe.train.ranks),
        rank_group="update",
        ends_by_itself=True,
        writes=False,
        computes=True,
    ),
    # one rank of a critic of its own each: values of samples, and their training beside the policy
    WorkerKind(
        "critic",
        f"{_BUILDERS}.critic:CriticJob",
        lambda recipe: range(recipe.critic.ranks if recipe.trains_critic else 0),
        rank_group="update",
        computes=True,
    ),
    # a stage that the recipe names; its workers go by the stage's name
    WorkerKind(
        "stage",
        f"{_BUILDERS}.one_stage:StageJob",
        lambda recipe: range(sum(s.workers for s in recipe.stages)),
    ),
)
KINDS = {kind.name: kind for kind in _ALL}


def kind_of(name: str) -> WorkerKind:
    """Return the kind of the workers called ``name``: a name that is no kind is that of a recipe's
    stage."""
    return KINDS.get(name, KINDS["stage"])


def workers_of(recipe: Recipe) -> list[tuple[str, int]]:
    """Return the workers that ``recipe`` needs, as (kind, number): none for stages that other
    programs run."""
    from orchestration.recipe.flow import declarations_of

    builtin_kinds = [kind for kind in _ALL if kind.name not in (*recipe.external.stages, "stage")]
    stages = [
        (declared.name, number)
        for declared in declarations_of(recipe)
        for number in range(declared.workers)
    ]
    return [
        *((kind.name, number) for kind in builtin_kinds for number in kind.numbers(recipe)),
        *stages,
    ]


def remote_workers(recipe: Recipe) -> set[tuple[str, int]]:
    """Return those of the workers that hosts start: all with an engine on a cluster, otherwise the
    last rollout workers."""
    if recipe.launch.on_cluster:
        return {worker for worker in workers_of(recipe) if kind_of(worker[0]).computes}
    last = recipe.rollout.workers
    remote = recipe.launch.remote_rollouts
    return {("rollout", number) for number in range(last - remote, last)}
