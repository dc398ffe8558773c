"""What follows from a recipe, computed without running it: flow, tokens, memory. ``asyncdock check`` prints it.

Memory figures are worst cases: every prompt and every response as long as the recipe lets it be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestration.recipe import Recipe

ALIGNMENT = 64  # the arena begins each cell at a multiple of this many bytes
SCALAR_CELLS = 8  # group, place, seed, reward, advantage, versions, ... : one aligned cell each


@dataclass(frozen=True)
class Plan:
    """The derived numbers of a recipe. Sizes are bytes, ages are policy versions."""

    bound: int
    window: int
    slack: int
    max_age: int
    groups_per_step: int
    groups_in_flight: int
    rows_in_flight: int
    rows_per_step: int
    rows_retained: int
    """Rows of trained steps that no checkpoint covers yet; a restarted trainer replays them."""
    row_bytes: int
    arena_bytes: int
    tokens_per_step: int
    decode_rows: int
    """Responses that all rollout workers together decode at the same time."""


def plan(recipe: Recipe) -> Plan:
    """Derive the numbers of ``recipe``. Pure arithmetic: nothing is loaded."""
    flow, size = recipe.staleness_plan, recipe.algorithm.group_size
    row_bytes = _row_bytes(recipe.prompts.max_prompt_tokens, recipe.rollout.max_tokens)
    rows_in_flight = flow.groups_in_flight * size
    rows_per_step = flow.groups_per_step * size
    rows_retained = recipe.checkpoint.every * rows_per_step
    return Plan(
        bound=flow.bound,
        window=flow.window,
        slack=flow.slack,
        max_age=flow.max_age,
        groups_per_step=flow.groups_per_step,
        groups_in_flight=flow.groups_in_flight,
        rows_in_flight=rows_in_flight,
        rows_per_step=rows_per_step,
        rows_retained=rows_retained,
        row_bytes=row_bytes,
        arena_bytes=(rows_in_flight + rows_retained) * row_bytes,
        tokens_per_step=rows_per_step * recipe.rollout.max_tokens,
        decode_rows=recipe.rollout.workers * recipe.rollout.max_rows,
    )


def _row_bytes(prompt_tokens: int, response_tokens: int) -> int:
    """Arena bytes of the longest sample: int64 prompt and response ids, float32 logprobs of rollout and reference."""
    cells = [8 * prompt_tokens, 8 * response_tokens, 4 * response_tokens, 4 * response_tokens]
    return sum(-(-cell // ALIGNMENT) * ALIGNMENT for cell in cells) + SCALAR_CELLS * ALIGNMENT
