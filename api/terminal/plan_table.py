"""The plan of a recipe as a table."""

from __future__ import annotations

from rich.table import Table

from api.terminal.screen import pairs_table
from orchestration.recipe.devices import assign, on_this_node, shown
from orchestration.recipe.schema import Recipe
from orchestration.recipe.sizes.planner import Plan, prompt_limits
from orchestration.units import format_size

TOO_LONG = {
    "skip": "longer ones are skipped",
    "cut": "longer ones are cut",
    "fail": "a longer one fails the run",
}


def _trained(recipe: Recipe, plan: Plan) -> str:
    return f", frozen, with adapters of {plan.trained_parameters:,}" if recipe.adapters else ""


def plan_table(recipe: Recipe, plan: Plan) -> Table:
    """Return the plan of a recipe as a table, for ``asyncdock check``."""
    rows = [
        ("staleness bound", f"η = {plan.bound}; the oldest that can occur is {plan.max_age}"),
        (
            "window",
            f"{plan.window} groups" + (", strictly in admission order" if plan.window == 1 else ""),
        ),
        (
            "slack",
            f"S = {plan.slack} steps" + (", the synchronous order" if plan.slack == 0 else ""),
        ),
        (
            "one step",
            f"{plan.groups_per_step} groups, {plan.rows_per_step} samples, ≤ "
            f"{plan.tokens_per_step:,} new tokens",
        ),
        ("in flight", f"≤ {plan.groups_in_flight} groups, {plan.rows_in_flight} samples"),
        ("decoding", f"≤ {plan.decode_rows} samples at once"),
        ("kept for replay", f"≤ {plan.rows_retained} samples, until the next checkpoint"),
        (
            "prompts",
            f"≤ {plan.prompt_tokens:,} tokens: {prompt_limits(recipe).why}; "
            f"{TOO_LONG[recipe.prompts.too_long]}",
        ),
        (
            "arena",
            f"{format_size(recipe.pipeline.arena)}, of which ≤ "
            f"{format_size(plan.arena_bytes)} are needed",
        ),
    ]
    if recipe.launch.launcher == "process" and (devices := assign(recipe, on_this_node())):
        rows.append(("devices", shown(devices.items())))
    if plan.parameters:
        rows += [
            (
                "model",
                f"{plan.parameters:,} weights in {recipe.model.dtype}" + _trained(recipe, plan),
            ),
            (
                "training",
                f"{format_size(plan.train_bytes)} for weights, gradients and optimizer"
                + (f" on each of {plan.train_ranks} ranks" if plan.train_ranks > 1 else ""),
            ),
            ("rollout", f"{format_size(plan.rollout_bytes)} for weights, KV caches on top"),
            (
                "checkpoints",
                f"{format_size(plan.copy_bytes)} of host memory for each rank's copy, to write "
                f"beside training",
            ),
            ("weight sync", f"{format_size(plan.slot_bytes)} of shared memory"),
        ]
        if (turns := plan.turns) is not None:
            held = [
                f"{format_size(turns.training)} to train",
                f"or {format_size(turns.generating)} and ≤ {format_size(turns.caches)} of KV "
                f"caches to generate",
                f"{format_size(turns.between)} in between, {format_size(turns.buckets)} of it "
                f"buckets",
                f"{format_size(turns.host)} of host memory meanwhile",
            ]
            rows[-1] = ("each device", ", ".join(held))
        for side, parts in plan.memory.items():
            each = ", ".join(f"{part} {format_size(size)}" for part, size in parts.items() if size)
            rows.append(
                (f"memory, {side}", f"{format_size(sum(parts.values()))} at its peak: {each}")
            )
        if plan.reference_bytes:
            rows.append(("reference", format_size(plan.reference_bytes)))
    rows += [("by the bound", plan.picked)] if plan.picked else []
    rows += [("notice", notice) for notice in plan.notices]
    return pairs_table(*rows, title=f"{recipe.name}: sound", title_justify="left")
