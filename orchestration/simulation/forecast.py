"""What a run of a recipe will do, by simulation: throughput, share of each stage, staleness, and
time to its end."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from orchestration.recipe.devices import threads_of
from orchestration.recipe.flow import needs_reference
from orchestration.recipe.schema import Recipe
from orchestration.simulation.costs import Costs, LengthsOf
from orchestration.simulation.simulator import Setup, Simulator, Step

# Left out at either end, at most a quarter of the steps each: the pipeline fills in the first ones,
# and drains in the last.
SETTLED_STEPS = 5
BETWEEN = "between steps"


@dataclass(frozen=True)
class Forecast:
    """Between the first and last steps of a simulated run.

    Shares of that time: ``generation``, the part of the replicas' decoding capacity that the
    trained tokens needed; ``training`` and ``waiting``, in which the trainer trained, and waited
    for samples; ``between``, in which it did what is done between two steps. ``decoding``: share of
    the whole run in which a replica had responses to decode. Staleness of samples, in versions.
    ``seconds``: of the whole run.
    """

    tokens_per_second: float
    step_seconds: float
    generation: float
    decoding: float
    training: float
    waiting: float
    staleness_mean: float
    staleness_p95: int
    staleness_max: int
    seconds: float
    between: float = 0.0

    @property
    def busiest(self) -> str:
        """What limits the throughput: generation, training, or what is done between two steps,
        where the trainer neither trains nor waits for samples."""
        if self.between > max(self.generation, self.training, self.waiting):
            return BETWEEN
        return "generation" if self.generation > self.training else "training"


def setup_of(recipe: Recipe, *, steps: int = 0) -> Setup:
    """The workers and limits of ``recipe``, for ``steps`` optimizer steps (0: the recipe's)."""
    plan = recipe.staleness_plan
    size = recipe.algorithm.group_size
    replicas = recipe.replicas
    alone = replicas == 1 and not recipe.launch.autoscale.max
    overlap = recipe.pipeline.staleness > 0
    ranks = recipe.train.ranks + (recipe.critic.ranks if recipe.trains_critic else 0)
    return Setup(
        plan,
        group_size=size,
        steps=steps or recipe.train.steps,
        replicas=replicas,
        max_rows=recipe.rollout.max_rows,
        most_rows=max(recipe.rollout.max_rows, recipe.rows_per_step if alone else 0),
        first_groups=-(-plan.groups_per_step // replicas),
        budget=recipe.rollout.budget,
        cut=recipe.rollout.on_update == "cut",
        at_once=recipe.swaps_at_once if overlap else 0,
        colocated=recipe.colocated,
        references=1 if needs_reference(recipe) else 0,
        paced=recipe.is_paced,
        replica_threads=threads_of(recipe, recipe.rollout.threads),
        trainer_threads=ranks * threads_of(recipe, recipe.train.threads),
        seed=recipe.seed,
    )


def forecast(setup: Setup, costs: Costs, lengths: LengthsOf) -> Forecast:
    """Simulate a run. Raises RuntimeError where it would stand still."""
    simulator = Simulator(setup, costs, lengths)
    steps = simulator.run()
    return summary(steps, setup, costs, sum(replica.busy for replica in simulator.replicas))


def margin_of(steps: int) -> int:
    """Steps at either end of a run of ``steps`` that are left out."""
    return min(SETTLED_STEPS, steps // 4)


def summary(steps: list[Step], setup: Setup, costs: Costs, busy: float) -> Forecast:
    """What the simulated ``steps`` came to. ``busy``: seconds in which replicas decoded, added
    up."""
    margin = margin_of(len(steps))
    between = steps[margin : len(steps) - margin + 1] if margin else steps
    began = steps[margin - 1].at if margin else 0.0
    seconds = between[-1].at - began
    tokens = sum(step.tokens for step in between)
    capacity = setup.replicas * max(
        rows * costs.rate(rows) for rows in range(1, setup.max_rows + 1)
    )
    stale = sum((Counter(step.staleness) for step in between), Counter[int]())
    rows = sum(stale.values())
    passed = 0
    p95 = 0
    for p95 in sorted(stale):
        passed += stale[p95]
        if passed >= 0.95 * rows:
            break
    return Forecast(
        tokens_per_second=tokens / seconds,
        step_seconds=seconds / len(between),
        generation=tokens / capacity / seconds,
        decoding=busy / setup.replicas / steps[-1].at,
        training=sum(step.train_seconds for step in between) / seconds,
        waiting=sum(step.waited for step in between) / seconds,
        staleness_mean=sum(age * count for age, count in stale.items()) / rows,
        staleness_p95=p95,
        staleness_max=max(max(step.staleness) for step in steps),
        seconds=steps[-1].at,
        between=len(between) * costs.between_steps / seconds,
    )
