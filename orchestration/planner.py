"""What follows from a recipe, computed without running it: flow, tokens, memory. ``asyncdock check`` prints it.

Memory figures are worst cases: every prompt and every response as long as the recipe lets it be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestration.recipe import Recipe

BLOCK_BYTES = 1024  # header, offsets, scalars and alignment of one written block; a sample lies in at most four
TEXT_BYTES = 8  # of a prompt's text and other columns, for each of its tokens
LONGEST_PROMPT = 2048  # assumed where the recipe sets no prompts.max_prompt_tokens
GATE_SHARE = 0.75  # prompts enter only while less than this share of the arena is taken


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
    prompt_bytes: int
    row_bytes: int
    arena_bytes: int
    tokens_per_step: int
    decode_rows: int
    """Responses that all rollout workers together decode at the same time."""


def plan(recipe: Recipe) -> Plan:
    """Derive the numbers of ``recipe``. Pure arithmetic: nothing is loaded."""
    flow, size = recipe.staleness_plan, recipe.algorithm.group_size
    # int64 ids, and the text it was made from; then int64 ids and float32 logprobs of rollout and of a reference.
    prompt_bytes = (8 + TEXT_BYTES) * (recipe.prompts.max_prompt_tokens or LONGEST_PROMPT) + BLOCK_BYTES
    row_bytes = (8 + 4 + 4) * recipe.rollout.max_tokens + 4 * BLOCK_BYTES
    rows_in_flight = flow.groups_in_flight * size
    rows_per_step = flow.groups_per_step * size
    rows_retained = recipe.checkpoint.every * rows_per_step
    alive = (rows_in_flight + rows_retained) * row_bytes + (rows_in_flight + rows_retained) // size * prompt_bytes
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
        prompt_bytes=prompt_bytes,
        row_bytes=row_bytes,
        arena_bytes=int(alive / GATE_SHARE),
        tokens_per_step=rows_per_step * recipe.rollout.max_tokens,
        decode_rows=recipe.rollout.workers * recipe.rollout.max_rows,
    )
