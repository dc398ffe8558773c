"""Which split of devices and which staleness: every choice that fits is simulated, and the rest is ranked.

    devices ──▶ rollout workers × ranks of training (× reference) ──┐
    staleness 0 … 8 ────────────────────────────────────────────────┴▶ check ─▶ memory ─▶ simulate ─▶ rank, Pareto

Training on n times the ranks takes 1/n of the time of its tokens, which is right while communication is hidden: compare with
`benchmarks/parallel.py` for a model and links. An engine decodes as fast as the one that was measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from orchestration.recipe.load import compare_recipe
from orchestration.recipe.planner import memory_of
from orchestration.recipe.problems import RecipeError
from orchestration.recipe.schema import Recipe
from orchestration.simulation.costs import Costs, LengthsOf
from orchestration.simulation.forecast import Forecast, forecast, setup_of

BOUNDS = (0, 1, 2, 3, 4, 8)
SAMPLES = 1_000_000  # that a search simulates, at most: some seconds
FEWEST_STEPS, MOST_STEPS = 8, 40


@dataclass(frozen=True)
class Choice:
    """A split of devices. ``changes``: keys of the recipe, as with ``--set``. ``pareto``: no other choice has both more
    tokens/s and a lower mean staleness. ``refused``: why it cannot run; its forecast is None then."""

    changes: tuple[str, ...]
    devices: int
    forecast: Forecast | None
    refused: str = ""
    pareto: bool = False


def scaled(costs: Costs, ranks: int, measured_ranks: int) -> Costs:
    """``costs`` with training on ``ranks`` ranks in place of ``measured_ranks``."""
    return replace(costs, token_seconds=costs.token_seconds * measured_ranks / ranks)


def devices_of(recipe: Recipe) -> int:
    """Devices of ``recipe``: an engine each."""
    if recipe.colocated:
        return recipe.train.ranks
    return recipe.rollout.workers + recipe.train.ranks + (1 if recipe.reference_is_here else 0)


def search(
    recipe: Recipe,
    costs: Costs,
    lengths: LengthsOf,
    *,
    devices: int,
    bounds: Sequence[int] = BOUNDS,
    device_memory: int = 0,
) -> list[Choice]:
    """Simulate the splits of ``devices`` devices at each of ``bounds``; the fastest first, those that cannot run last.
    ``device_memory``: bytes of a device, 0: not looked at. Raises ValueError where the devices are too few."""
    others = devices - (1 if recipe.reference_is_here else 0)
    if others < 2:
        raise ValueError(
            f"--devices: {devices} is too few; rollout, training and a reference of its own take a device each, here "
            f"{devices - others + 2}"
        )
    wanted = list(_changes(recipe, others, bounds))
    rows = recipe.train.groups_per_step * recipe.algorithm.group_size
    steps = min(MOST_STEPS, max(FEWEST_STEPS, SAMPLES // (len(wanted) * rows)))
    found = [_tried(recipe, changes, costs, lengths, steps, device_memory) for changes in wanted]
    runs = sorted((choice for choice in found if choice.forecast), key=_speed, reverse=True)
    freshest, marked = float("inf"), []
    for choice in runs:
        assert choice.forecast is not None
        best = choice.forecast.staleness_mean < freshest
        freshest = min(freshest, choice.forecast.staleness_mean)
        marked.append(replace(choice, pareto=best))
    return marked + [choice for choice in found if choice.forecast is None]


def _speed(choice: Choice) -> float:
    return choice.forecast.tokens_per_second if choice.forecast else 0.0


def _changes(recipe: Recipe, devices: int, bounds: Sequence[int]) -> Iterator[tuple[str, ...]]:
    each = recipe.train.ranks // recipe.train.dp  # devices of one replica of the trainer
    for ranks in range(1, (devices - 1) // each + 1):
        workers = devices - ranks * each
        for bound in bounds:
            yield f"rollout.workers={workers}", f"train.dp={ranks}", f"pipeline.staleness={bound}"


def _tried(
    recipe: Recipe, changes: tuple[str, ...], costs: Costs, lengths: LengthsOf, steps: int, device_memory: int
) -> Choice:
    try:
        changed = compare_recipe(recipe, changes)
    except RecipeError as error:
        return Choice(changes, 0, None, refused="; ".join(map(str, error.problems)))
    devices = devices_of(changed)
    if device_memory:
        for engine, parts in memory_of(changed).items():
            if sum(parts.values()) > device_memory:
                why = f"{engine}: {sum(parts.values())} bytes of a device's {device_memory}"
                return Choice(changes, devices, None, refused=why)
    costs = scaled(costs, changed.train.ranks, recipe.train.ranks)
    return Choice(changes, devices, forecast(setup_of(changed, steps=steps), costs, lengths))
