"""Check of a recipe against the memory of this machine: what cannot fit is refused, with the largest part and a fix."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from orchestration.recipe.checks.memory_parts import Engine
from orchestration.recipe.checks.registry import Environment, machine_check, problem
from orchestration.recipe.planner import memory_of, prompt_limits
from orchestration.recipe.problems import Problem
from orchestration.recipe.schema import Recipe
from orchestration.recipe.values import format_size

CGROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")

SMALL = 512 * 2**20  # bytes that every machine has; for more, torch is imported and asked for devices


@machine_check("model", "train", "rollout", "algorithm.group_size", "prompts.max_prompt_tokens", "launch", "external")
def memory_has_room(recipe: Recipe, environment: Environment) -> Iterator[Problem]:
    """Live tensors of all torch engines on the CPU together, or of each on its accelerator, against what there is."""
    if not environment.devices or not (of := memory_of(recipe)):
        return
    if sum(count(recipe, side) * sum(parts.values()) for side, parts in of.items()) < SMALL:
        return
    total = host_bytes()
    from stages.device import memory_bytes, on_cpu

    on_host = {side: parts for side, parts in of.items() if on_cpu(getattr(recipe, side).device)}
    needed = sum(count(recipe, side) * sum(parts.values()) for side, parts in on_host.items())
    if total is not None and needed > total:
        yield _too_large(recipe, on_host, needed, total, "this machine has")
    for side in of.keys() - on_host.keys():
        room, parts = memory_bytes(getattr(recipe, side).device), sum(of[side].values())
        if room is not None and parts > room:
            yield _too_large(recipe, {side: of[side]}, parts, room, f"{side}.device has")


def count(recipe: Recipe, side: Engine) -> int:
    """Processes with an engine of this side."""
    return recipe.train.ranks if side == "train" else recipe.replicas


def _too_large(recipe: Recipe, of: dict[Engine, dict[str, int]], needed: int, room: int, where: str) -> Problem:
    side, part, size = max(
        ((side, part, count(recipe, side) * size) for side, parts in of.items() for part, size in parts.items()),
        key=lambda found: found[2],
    )
    wrong = f"takes {format_size(size)} for {part} of {side}, the largest part of {format_size(needed)}, and {where} "
    wrong += format_size(room)
    key, fix = "model.source", "use a smaller model, model.dtype = 'bfloat16', or a machine with more memory"
    share = 1 - (needed - room) / size  # of the part that would fit
    if side == "train" and part == "activations":
        key, least = "train.token_budget", (prompt_limits(recipe).tokens or 0) + recipe.rollout.max_tokens
        used = min(recipe.train.token_budget, recipe.train.groups_per_step * recipe.algorithm.group_size * least)
        checkpointing = "set train.activation_checkpointing = true"
        if (tokens := int(used * share * 0.95)) >= least:
            fix = f"use a value <= {tokens}"
            fix = fix if recipe.train.activation_checkpointing else f"{fix}, or {checkpointing}"
        elif not recipe.train.activation_checkpointing:
            fix = f"{checkpointing}, or lower rollout.max_tokens"
        else:
            fix = "lower rollout.max_tokens, or raise train.tp"
    elif part == "KV cache":
        key, rows = "rollout.max_rows", int(recipe.rollout.max_rows * share * 0.95)
        fix = f"use a value <= {rows}" if rows >= recipe.algorithm.group_size else "lower rollout.max_tokens"
    elif side == "train" and part in ("optimizer", "weights", "gradients") and recipe.model.dtype == "bfloat16":
        fix = "use a smaller model, train.precision = 'model', or a machine with more memory"
    return problem(recipe, key, wrong, fix)


def host_bytes() -> int | None:
    """Memory that processes of this machine or container may use; None where that is not known."""
    try:
        found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    except (OSError, ValueError):
        return None
    for path in map(Path, CGROUPS):
        try:
            found.append(int(path.read_text()))
        except (OSError, ValueError):  # there is none, or "max"
            continue
    return min(found)
