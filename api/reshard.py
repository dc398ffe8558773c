"""``asyncdock plan reshard``: what an allgather-swap between two layouts would move and take, from arithmetic alone.

recipe ──▶ the model's config ──▶ parameters ─┐
--train, --rollout ──▶ layouts ───────────────┴▶ plan ──▶ bytes of each phase and rank; the naive way beside them
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from orchestration.recipe import Recipe, format_size, parse_size

SHOWN_RANKS = 16
SMALLEST_BUCKET = 1024
UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))
TRAINING_STATE = "train: weights, gradients, and AdamW's two moments in float32"


class PlanRefused(ValueError):
    """Input that no plan can be made from: the message names the field, the value and the fix."""


def reshard_report(
    recipe: Recipe, train: str, rollout: str, *, bucket: str = "4MiB", ranks_per_node: int | None = None
) -> dict[str, Any]:
    """What the plan for ``recipe``'s model says, in bytes. Raises :class:`PlanRefused`."""
    if recipe.model.source == "mock":
        raise PlanRefused("model.source: 'mock' has no parameters to lay out; use 'tiny', 'smollm2' or a checkpoint")
    if ranks_per_node is not None and ranks_per_node < 1:
        raise PlanRefused(f"--ranks-per-node: {ranks_per_node} is no number of ranks; use a whole number >= 1")
    bucket_bytes = _bucket_bytes(bucket)
    import torch

    from stages.models import ModelNotFound, load_config
    from stages.resharding.layout import LayoutError, model_state, parse_layout, place
    from stages.resharding.plan import (
        adamw_bytes,
        memory,
        plan_reshard,
        redundant_eq3,
        redundant_general,
        redundant_if_naive,
    )

    try:
        source, target = parse_layout(train, "train"), parse_layout(rollout, "rollout")
    except LayoutError as error:
        raise PlanRefused(f"--{str(error).replace('.', ' ', 1)}") from None
    if source.world != target.world:
        raise PlanRefused(
            f"--rollout: {rollout!r} has {target.world} ranks where --train {train!r} has {source.world}; they take "
            "turns on the same ranks, so make the products of dp, tp and pp equal"
        )
    try:
        model = model_state(load_config(recipe.model.source), getattr(torch, recipe.model.dtype))
        plan = plan_reshard(
            place(model, source),
            place(model, target, names="vllm"),
            bucket_bytes=bucket_bytes,
            ranks_per_node=ranks_per_node,
        )
    except LayoutError as error:
        raise PlanRefused(f"layout of {recipe.model.source}: {error}") from None
    except (ModelNotFound, ValueError, OSError, AttributeError) as error:
        raise PlanRefused(f"model.source: {recipe.model.source!r} cannot be planned: {error}") from None
    return {
        "model": recipe.model.source,
        "dtype": recipe.model.dtype,
        "bytes": model.nbytes,
        "expert_bytes": model.expert_bytes,
        "train": str(source),
        "rollout": str(target),
        "ranks": plan.world,
        "bucket_bytes": plan.bucket_bytes,
        "rounds": len(plan.rounds),
        "sent": plan.sent,
        "received": plan.received,
        "kept": plan.kept,
        "phases": [
            {
                "phase": one.phase.value,
                "moved": one.received,
                "host": one.host,
                "temporary": one.temporary,
                "live": one.live,
                "after": one.after,
            }
            for one in memory(plan, adamw_bytes(plan.source))
        ],
        "naive": {
            "redundant": redundant_if_naive(plan),
            "general": redundant_general(model, source, target),
            "eq3": redundant_eq3(model, source, target),
        },
    }


def _bucket_bytes(text: str) -> int:
    try:
        size = parse_size(int(text) if text.isdecimal() else text)
    except ValueError as error:
        raise PlanRefused(f"--bucket: {text!r} is {error}") from None
    if not isinstance(size, int) or size < SMALLEST_BUCKET:
        raise PlanRefused(f"--bucket: {text!r} is less than {SMALLEST_BUCKET} bytes; use for example 4MiB")
    return size


def reshard_view(report: Mapping[str, Any]) -> RenderableType:
    """What the command prints."""
    experts = f", {format_size(report['expert_bytes'])} of it experts" if report["expert_bytes"] else ""
    bucket = format_size(report["bucket_bytes"])
    head = (
        f"{report['model']} in {report['dtype']}: {format_size(report['bytes'])}{experts}\n"
        f"train   {report['train']}\nrollout {report['rollout']}\n"
        f"{report['ranks']} ranks, {report['rounds']} rounds, buckets of {bucket}, two in flight"
    )
    largest = max(max(one["live"]) for one in report["phases"])
    unit, name = next(one for one in UNITS if largest >= one[0] or one[0] == 1)

    def figure(nbytes: float) -> str:
        return f"{nbytes / unit:,.2f}" if nbytes else "-"

    phases = _table(f"most of any rank, {name}", "received", "to/from host", "temporary", "live", "after")
    for one in report["phases"]:
        phases.add_row(
            one["phase"], *(figure(max(one[key])) for key in ("moved", "host", "temporary", "live", "after"))
        )
    live = {one["phase"]: one["live"] for one in report["phases"]}
    shown = [phase for phase in live if not phase.startswith("offload")]
    ranks = _table(f"rank, {name}", "sends", "receives", "keeps", *(f"live: {shown[0]}", *shown[1:]))
    for rank in range(min(report["ranks"], SHOWN_RANKS)):
        columns = (report["sent"], report["received"], report["kept"], *(live[phase] for phase in shown))
        ranks.add_row(str(rank), *(figure(column[rank]) for column in columns))
    more = report["ranks"] - SHOWN_RANKS
    naive, counted = report["naive"], report["naive"]["redundant"]
    redundant = _table(f"naive: gather, slice, keep both, {name}", "redundant, all ranks", "most of any")
    redundant.add_row("counted", figure(sum(counted)), figure(max(counted)))
    redundant.add_row("N·(TW/UTP + EW·(1/UEP − 1/GEP))", figure(naive["general"]), "")
    redundant.add_row("MindSpeed RL, Eq. 3", figure(naive["eq3"]), "")
    told = f"and {more} ranks more, see --json" if more > 0 else TRAINING_STATE
    return Group(head, "", phases, "", ranks, told, "", redundant)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, show_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=True)
    return table
