"""``asyncdock plan reshard``: computes what an allgather-swap between two layouts moves and how
much memory it takes.

recipe ──▶ the model's config ──▶ parameters ────────────┐
recipe's layouts, or --train and --rollout ──▶ layouts ──┴▶ plan ──▶ bytes per phase and rank, compared with a naive swap
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from api.cli.common.output import table
from orchestration.recipe.checks.relations import experts_divide, heads_divide
from orchestration.recipe.field_problems import missing_parallelism
from orchestration.recipe.schema import Recipe
from orchestration.recipe.sizes.planner import (
    held_bytes,
    reshard_plan,
    rollout_layout,
    trained_state,
)
from orchestration.units import format_size, parse_size

if TYPE_CHECKING:
    from stages.parallel.layout import Layout, Side

MOST_RANKS = 16  # that are printed
SMALLEST_BUCKET = 1024
UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))
TRAINING_STATE = "train: weights and AdamW's moments, as between two steps (within: gradients too)"


class PlanRefused(ValueError):
    """The input does not allow a plan; the message names the field, the value and the fix."""


def reshard_report(
    recipe: Recipe,
    train: str = "",
    rollout: str = "",
    *,
    bucket: str = "",
    ranks_per_node: int | None = None,
) -> dict[str, Any]:
    """Return the plan for ``recipe``'s model, in bytes.

    Layouts and bucket are the recipe's where they are "". Raises :class:`PlanRefused`.
    """
    if recipe.model.source == "mock":
        raise PlanRefused(
            "model.source: 'mock' has no parameters to lay out; use 'tiny', "
            "'smollm2' or a checkpoint"
        )
    if ranks_per_node is not None and ranks_per_node < 1:
        raise PlanRefused(
            f"--ranks-per-node: {ranks_per_node} is no number of ranks; use a whole number >= 1"
        )
    bucket_bytes = _bucket_bytes(bucket) if bucket else recipe.sync.bucket

    from stages.model.load import ModelNotFound
    from stages.parallel.layout import LayoutError
    from stages.resharding.plan import memory, redundant_if_naive

    source = _layout(train, "train") if train else recipe.train.layout
    target = _layout(rollout, "rollout") if rollout else rollout_layout(recipe, source.world)
    if source.world != target.world:
        raise PlanRefused(
            f"--rollout: {rollout or str(target)!r} has {target.world} ranks where --train "
            f"{train or str(source)!r} has {source.world}; they take turns on the same ranks, so "
            f"make the products of dp, tp and pp equal"
        )
    try:
        model = trained_state(recipe)
        plan = reshard_plan(
            recipe,
            "vllm",
            model=model,
            train=source,
            rollout=target,
            bucket_bytes=bucket_bytes,
            ranks_per_node=ranks_per_node,
        )
        notes = [*_cannot_train(recipe, source)]
    except LayoutError as error:
        raise PlanRefused(f"layout of {recipe.model.source}: {error}") from None
    except (ModelNotFound, ValueError, OSError, AttributeError) as error:
        raise PlanRefused(
            f"model.source: {recipe.model.source!r} cannot be planned: {error}"
        ) from None
    if not rollout and not recipe.colocated:
        notes.append(
            "launch.placement = 'separate': the engines of this recipe have other devices; planned "
            "as if they took turns"
        )
    return {
        "model": recipe.model.source,
        "dtype": recipe.trained_dtype,
        "rollout_dtype": recipe.model.dtype,
        "bytes": model.nbytes,
        "expert_bytes": model.expert_bytes,
        "train": str(source),
        "rollout": str(target),
        "notes": notes,
        "ranks": plan.world,
        "bucket_bytes": plan.bucket_bytes,
        "rounds": len(plan.rounds),
        "sent": plan.sent,
        "received": plan.received,
        "kept": plan.kept,
        "phases": [
            {"phase": usage.phase.value, "moved": usage.received}
            | {part: getattr(usage, part) for part in ("host", "temporary", "live", "after")}
            for usage in memory(plan, held_bytes(recipe, plan.source))
        ],
        "naive": {"redundant": redundant_if_naive(plan)},
    }


def _cannot_train(recipe: Recipe, layout: Layout) -> Iterator[str]:
    """Yield why the train engine cannot run ``layout``, in the words of the recipe's check where it
    covers the case."""
    if beyond := layout.beyond_train_engine:
        for part in beyond:
            key = f"train.{part.partition('=')[0]}"
            yield f"the train engine does not run this layout: {part}: {missing_parallelism(key)}"
        return
    train = recipe.train.model_copy(update=layout.recipe_keys)
    laid_out = recipe.model_copy(update={"train": train})
    problems = [str(problem) for problem in (*heads_divide(laid_out), *experts_divide(laid_out))]
    if not problems and train.cuts_matrices:
        import torch
        from transformers import AutoModelForCausalLM

        from stages.engines.torch.parallel.tensor import cuts
        from stages.model.load import load_config

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                load_config(recipe.model.source), trust_remote_code=False
            )
        try:
            cuts(model, len(layout.group("tp", 0)))
        except ValueError as error:
            problems = [str(error)]
    for text in problems:
        yield f"the train engine does not run this layout: {text}"


def _layout(text: str, side: Side) -> Layout:
    """Return the layout of the option ``--train`` or ``--rollout``. Raises PlanRefused."""
    from stages.parallel.layout import LayoutError, parse_layout

    try:
        return parse_layout(text, side)
    except LayoutError as error:
        raise PlanRefused(f"--{side} {error}") from None


def _bucket_bytes(text: str) -> int:
    try:
        size = parse_size(text)
    except ValueError as error:
        raise PlanRefused(f"--bucket: {text!r} {error}") from None
    if not isinstance(size, int) or size < SMALLEST_BUCKET:
        raise PlanRefused(
            f"--bucket: {text!r} is less than {SMALLEST_BUCKET} bytes; use for example 4MiB"
        )
    return size


def reshard_view(report: Mapping[str, Any]) -> RenderableType:
    """Return what the command prints."""
    experts = (
        (f", {format_size(report['expert_bytes'])} of it experts") if report["expert_bytes"] else ""
    )
    bucket = format_size(report["bucket_bytes"])
    generated = (
        (f", generating in {report['rollout_dtype']}")
        if report["rollout_dtype"] != report["dtype"]
        else ""
    )
    head = Text(
        f"{report['model']} in {report['dtype']}: "
        f"{format_size(report['bytes'])}{experts}{generated}\ntrain   {report['train']}\nrollout "
        f"{report['rollout']}\n{report['ranks']} ranks, {report['rounds']} rounds, buckets of "
        f"{bucket}, two in flight"
    )
    notes = [Text(f"! {note}") for note in report["notes"]]
    largest = max(max(phase["live"]) for phase in report["phases"])
    unit, name = next(unit for unit in UNITS if largest >= unit[0] or unit[0] == 1)

    def figure(nbytes: float) -> str:
        return f"{nbytes / unit:,.2f}" if nbytes else "-"

    def figures(name: str, *columns: str) -> Table:
        return table(name, *columns, right=columns)

    phases = figures(
        f"most of any rank, {name}", "received", "to/from host", "temporary", "live", "after"
    )
    for phase in report["phases"]:
        keys = ("moved", "host", "temporary", "live", "after")
        phases.add_row(phase["phase"], *(figure(max(phase[key])) for key in keys))
    live = {phase["phase"]: phase["live"] for phase in report["phases"]}
    shown = [phase for phase in live if not phase.startswith("offload")]
    ranks = figures(
        f"rank, {name}", "sends", "receives", "keeps", *(f"live: {shown[0]}", *shown[1:])
    )
    for rank in range(min(report["ranks"], MOST_RANKS)):
        columns = (
            report["sent"],
            report["received"],
            report["kept"],
            *(live[phase] for phase in shown),
        )
        ranks.add_row(str(rank), *(figure(column[rank]) for column in columns))
    num_hidden_ranks = report["ranks"] - MOST_RANKS
    redundant_bytes = report["naive"]["redundant"]
    redundant = figures(
        f"naive: gather, slice, keep both, {name}", "redundant, all ranks", "most of any"
    )
    redundant.add_row("counted", figure(sum(redundant_bytes)), figure(max(redundant_bytes)))
    below = (
        f"and {num_hidden_ranks} ranks more, see --json" if num_hidden_ranks > 0 else TRAINING_STATE
    )
    return Group(head, *notes, "", phases, "", ranks, below, "", redundant)
