"""Which split of devices and which staleness: every choice that fits is simulated, and the rest is
ranked. And what a run would do with other keys.

    devices ──▶ rollout workers × ranks of training (× reference) ──┐
    staleness 0 … 8 ────────────────────────────────────────────────┴▶ check ─▶ memory ─▶ simulate ─▶ rank, Pareto

Training on n times the ranks takes 1/n of the time of its tokens, which is right while
communication is hidden, and an engine decodes as fast as the one that was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from orchestration.recipe.flow import computes_reference, device_count
from orchestration.recipe.loading.load import compare_recipe
from orchestration.recipe.problems import RecipeError
from orchestration.recipe.schema import Recipe
from orchestration.recipe.sizes.planner import arena_bytes, memory_of
from orchestration.simulation.costs import Costs, DrawnLengths, LengthsOf
from orchestration.simulation.forecast import Forecast, forecast, setup_of
from orchestration.simulation.recorded import recipe_of, recorded_costs
from pipeline.problems import Problem

SIMULATED = (  # keys of a recipe whose effect is simulated
    *(
        "pipeline.staleness",
        "pipeline.window",
        "pipeline.admission",
        "train.groups_per_step",
        "algorithm.group_size",
    ),
    *(
        "rollout.workers",
        "rollout.max_rows",
        "rollout.budget",
        "rollout.on_update",
        "train.dp",
        "train.tp",
    ),
    "sync.at_once",
)
# the bound is a number, also where the recipe leaves it to the run
FIXED = ("pipeline.staleness_min=0",)
BOUNDS = (0, 1, 2, 3, 4, 8)
SAMPLES = 1_000_000  # that a search simulates, at most: some seconds
ROOM = 1 << 40  # bytes of an arena that has room for any run
FEWEST_STEPS = 8
MOST_STEPS = 40
# What a what-if simulates at most: some seconds on one core, and less than a gigabyte.
MOST_REPLICAS = 1000
MOST_ROWS = 1 << 16
MOST_OF_A_GROUP = 4096
MOST_OF_A_STEP = SAMPLES // (10 * FEWEST_STEPS)  # samples


@dataclass(frozen=True)
class Choice:
    """A split of devices.

    ``changes``: keys of the recipe, as with ``--set``. ``pareto``: no other choice has both more
    tokens/s and a lower mean staleness. ``refused``: why it cannot run; its forecast is None then.
    """

    changes: tuple[str, ...]
    devices: int
    forecast: Forecast | None
    refused: str = ""
    pareto: bool = False


CostsOf = Callable[[Recipe], Costs]


def scaled(costs: Costs, ranks: int) -> CostsOf:
    """``costs`` measured with training on ``ranks`` ranks, for recipes with other numbers of
    them."""
    return lambda recipe: replace(
        costs, token_seconds=costs.token_seconds * ranks / recipe.train.ranks
    )


def costs_of_run(folder: Path) -> tuple[CostsOf, DrawnLengths]:
    """Costs and lengths measured in the run in ``folder``, for its recipe with other keys.

    Raises NotMeasured.
    """
    costs, lengths = recorded_costs(folder)
    return scaled(costs, recipe_of(folder).train.ranks), lengths


def what_if(folder: Path, overrides: Sequence[str]) -> tuple[Forecast, Forecast]:
    """By the costs of the run in ``folder``: a forecast of it as it is, and one with ``overrides``
    (``KEY=VALUE``, of :data:`SIMULATED`). Raises NotMeasured and RecipeError."""
    recipe = recipe_of(folder)
    changes = [
        (key.strip(), value)
        for key, _, value in (override.partition("=") for override in overrides)
    ]
    fix = f"use some of {', '.join(SIMULATED)}"
    if other := [
        Problem(key, value, "is not simulated", fix)
        for key, value in changes
        if key not in SIMULATED
    ]:
        raise RecipeError(recipe.name, other)
    fixed = FIXED if "pipeline.staleness" in dict(changes) else ()
    changed = compare_recipe(recipe, (*overrides, *fixed))
    if larger := [*_larger(changed)]:
        raise RecipeError(recipe.name, larger)
    costs, lengths = costs_of_run(folder)

    def forecast_of(each: Recipe) -> Forecast:
        steps = min(MOST_STEPS, max(FEWEST_STEPS, SAMPLES // (10 * each.rows_per_step)))
        return forecast(
            setup_of(each, steps=steps), costs(each), lengths.of_groups(each.algorithm.group_size)
        )

    return forecast_of(recipe), forecast_of(changed)


def _larger(recipe: Recipe) -> Iterator[Problem]:
    """What of ``recipe`` is more than a what-if simulates."""
    too_many = "is more than is simulated"
    replicas = "train.dp" if recipe.colocated else "rollout.workers"
    for key, value, most in (
        (replicas, recipe.replicas, MOST_REPLICAS),
        ("rollout.max_rows", recipe.rollout.max_rows, MOST_ROWS),
        ("algorithm.group_size", recipe.algorithm.group_size, MOST_OF_A_GROUP),
    ):
        if value > most:
            yield Problem(key, value, too_many, f"give at most {most}")
    groups = recipe.train.groups_per_step
    size = recipe.algorithm.group_size
    if groups * size > MOST_OF_A_STEP:
        fix = (
            f"give at most {MOST_OF_A_STEP} samples a step: {max(1, MOST_OF_A_STEP // size)} "
            f"groups of {size}"
        )
        yield Problem("train.groups_per_step", groups, too_many, fix)


def search(
    recipe: Recipe,
    costs: CostsOf,
    lengths: LengthsOf,
    *,
    devices: int,
    device_memory: int = 0,
) -> list[Choice]:
    """Simulate the splits of ``devices`` devices at each of :data:`BOUNDS`; the fastest first,
    those that cannot run last. ``device_memory``: bytes of a device, 0: not looked at. Raises
    ValueError where the devices are too few."""
    others = devices - (1 if computes_reference(recipe) else 0)
    if others < 2:
        raise ValueError(
            f"--devices: {devices} is too few; rollout, training and a reference of its own take a "
            f"device each, here {devices - others + 2}"
        )
    wanted = list(_changes(recipe, others))
    samples = SAMPLES // (len(wanted) * recipe.rows_per_step)
    steps = min(MOST_STEPS, max(FEWEST_STEPS, samples))
    choices = [_tried(recipe, changes, costs, lengths, steps, device_memory) for changes in wanted]
    runs = sorted((choice for choice in choices if choice.forecast), key=_speed, reverse=True)
    freshest = float("inf")
    marked = []
    for choice in runs:
        assert choice.forecast is not None
        best = choice.forecast.staleness_mean < freshest
        freshest = min(freshest, choice.forecast.staleness_mean)
        marked.append(replace(choice, pareto=best))
    return marked + [choice for choice in choices if choice.forecast is None]


def _speed(choice: Choice) -> float:
    return choice.forecast.tokens_per_second if choice.forecast else 0.0


def _changes(recipe: Recipe, devices: int) -> Iterator[tuple[str, ...]]:
    bounded = [
        (f"pipeline.staleness={bound}", *(FIXED if recipe.pipeline.staleness_min else ()))
        for bound in BOUNDS
    ]
    each = recipe.train.model_copy(update={"dp": 1}).ranks
    for ranks in range(1, devices):
        rollouts = devices - ranks * each
        if rollouts > 0:
            split = f"rollout.workers={rollouts}", f"train.dp={ranks}"
            yield from ((*split, *bound) for bound in bounded)
    if not recipe.colocated and devices % each == 0:
        together = "launch.placement=colocated", "rollout.workers=1", f"train.dp={devices // each}"
        yield from ((*together, *bound) for bound in bounded)


def _tried(
    recipe: Recipe,
    changes: tuple[str, ...],
    costs: CostsOf,
    lengths: LengthsOf,
    steps: int,
    device_memory: int,
) -> Choice:
    try:
        needed = arena_bytes(compare_recipe(recipe, (*changes, f"pipeline.arena={ROOM}")))
        if needed > recipe.pipeline.arena:
            changes = (*changes, f"pipeline.arena={needed}")
        changed = compare_recipe(recipe, changes)
    except RecipeError as error:
        return Choice(changes, 0, None, refused="; ".join(map(str, error.problems)))
    devices = device_count(changed)
    if device_memory:
        for engine, parts in memory_of(changed).items():
            if sum(parts.values()) > device_memory:
                why = f"{engine}: {sum(parts.values())} bytes of a device's {device_memory}"
                return Choice(changes, devices, None, refused=why)
    setup = setup_of(changed, steps=steps)
    return Choice(changes, devices, forecast(setup, costs(changed), lengths))
