"""Check of a recipe against the memory of this machine: what cannot fit is refused, with the
largest part and a fix.

memory_of: parts of each process ─┬─▶ engines on the CPU, host parts of the others, shared memory ─▶ the host, or its cgroup
                                  └─▶ device parts of each engine on an accelerator ─▶ its device
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from orchestration.recipe.checks.machine import free_bytes
from orchestration.recipe.checks.registry import Environment, machine_check, problem
from orchestration.recipe.problems import value_or_none
from orchestration.recipe.schema import Recipe
from orchestration.recipe.sizes.memory_parts import CPU_PARTS, HOST_PARTS, Engine, Parts
from orchestration.recipe.sizes.planner import arena_bytes, memory_of, plan, prompt_limits
from orchestration.units import format_size
from pipeline.data.arena import shared_memory_directory
from pipeline.problems import Problem

# bytes that every machine has; for more, torch is imported and asked for devices
SMALL = 512 * 2**20
SHARED = "shared memory"  # of the node: no engine's own


@machine_check(
    *(
        "model",
        "train",
        "critic",
        "rollout",
        "algorithm",
        "prompts.max_prompt_tokens",
        "launch",
        "external",
    ),
    *("pipeline.arena", "sync.transport"),
)
def memory_has_room(recipe: Recipe, environment: Environment) -> Iterator[Problem]:
    """What lies in host memory, of all processes together, and each engine on its accelerator,
    against what there is."""
    if not environment.devices:
        return
    free = free_bytes(shared_memory_directory())
    # the arena is reported by itself
    if free is not None and recipe.pipeline.arena > free:
        return
    needs = needs_of(recipe)
    if needs is None:
        return
    for side, (device, parts) in needs.devices.items():
        from stages.device import memory_bytes

        room = memory_bytes(device)
        if room is not None and sum(parts.values()) > room:
            yield _too_large(recipe, {side: parts}, room, f"the device of {side} has")
    total = host_bytes()
    if total is not None and needs.host_bytes > total:
        yield _too_large(recipe, needs.host, total, "this machine or container has")


@dataclass(frozen=True)
class Needs:
    """Bytes that a run takes, by side and part: in ``host`` memory of all processes together, on
    ``devices`` of one engine of each side that computes on an accelerator, which is named."""

    host: Mapping[str, Parts]
    devices: Mapping[Engine, tuple[str, Parts]]

    @property
    def host_bytes(self) -> int:
        return sum(sum(parts.values()) for parts in self.host.values())


def needs_of(recipe: Recipe) -> Needs | None:
    """Return what a run takes; None where that is not known. What fits on any machine is taken to
    lie in host memory."""
    parts_of = value_or_none(lambda: memory_of(recipe))
    if not parts_of:
        return None
    shared = {"arena": recipe.pipeline.arena, "weight versions": plan(recipe).slot_bytes}
    total = sum(shared.values()) + sum(
        count(recipe, side) * sum(parts.values()) for side, parts in parts_of.items()
    )
    host: dict[str, Parts] = {SHARED: shared}
    devices: dict[Engine, tuple[str, Parts]] = {}
    for side, parts in parts_of.items():
        # The section's own device, or where that has none, as for the reference, where training
        # computes.
        device = getattr(getattr(recipe, side, None), "device", None) or recipe.train.device
        here = total < SMALL or is_on_cpu(device)
        engines = count(recipe, side)
        host[side] = {
            part: engines * size for part, size in parts.items() if here or part in HOST_PARTS
        }
        if not here:
            on_device = {
                part: size for part, size in parts.items() if part not in HOST_PARTS + CPU_PARTS
            }
            devices[side] = device, on_device
    return Needs(host, devices)


def is_on_cpu(device: str) -> bool:
    """Return whether an engine of this ``device`` computes on the CPU. Imports torch."""
    from stages.device import on_cpu

    return on_cpu(device)


def count(recipe: Recipe, side: Engine) -> int:
    """Processes with an engine of this side."""
    return {
        "train": recipe.train.ranks,
        "rollout": recipe.replicas,
        "reference": 1,
        "critic": recipe.critic.ranks,
    }[side]


def _too_large(recipe: Recipe, parts_of: Mapping[str, Parts], room: int, where: str) -> Problem:
    """``parts_of``: parts of all processes of each side together, which do not fit into ``room``."""
    needed = sum(sum(parts.values()) for parts in parts_of.values())
    size, side, part = max(
        (size, side, part) for side, parts in parts_of.items() for part, size in parts.items()
    )
    reason = (
        f"takes {format_size(size)} for {part} of {side}, the largest part of "
        f"{format_size(needed)}, and {where} "
    )
    reason += format_size(room)
    key, fix = _fix(recipe, side, part, 1 - (needed - room) / size)
    return problem(recipe, key, reason, fix)


def _fix(recipe: Recipe, side: str, part: str, share: float) -> tuple[str, str]:
    """The key that decides about ``part`` of ``side``, and what makes it fit, when only ``share``
    of it has room (none if that is negative)."""
    train = recipe.train
    rollout = recipe.rollout
    longest = train.tokens_of_rank((prompt_limits(recipe).tokens or 0) + recipe.longest_response)
    lower = f"lower {recipe.longest_response_key}"
    if part == "arena":
        least = arena_bytes(recipe)
        fits = share * recipe.pipeline.arena >= least
        return (
            "pipeline.arena",
            f"use '{-(-least >> 20)}MiB', which is enough" if fits else lower,
        )
    if part == "KV cache" or (side == "rollout" and part in ("activations", "logits")):
        rows = int(rollout.max_rows * share * 0.95)
        fits = rows >= recipe.algorithm.group_size
        return "rollout.max_rows", f"use a value <= {rows}" if fits else lower
    if side == "rollout" and recipe.replicas > 1 and not recipe.colocated:
        return (
            "rollout.workers",
            f"use {recipe.replicas - 1} or fewer, or a machine with more memory",
        )
    if side == "train" and part == "activations":
        checkpointing = (
            "" if train.activation_checkpointing else "set train.activation_checkpointing = true"
        )
        used = min(train.token_budget, recipe.trained_rows_per_step * longest)
        if (tokens := int(used * share * 0.95)) >= longest:
            return "train.token_budget", f"use a value <= {tokens}" + (
                f", or {checkpointing}" if checkpointing else ""
            )
        other = checkpointing or "raise train.cp or train.tp"
        return "train.token_budget", f"{other}, or {lower}"
    if side != "rollout" and part in ("activations", "logits"):
        return "train.token_budget", f"use a lower value, or {lower}"
    fix = "use a smaller model, or a machine with more memory"
    if recipe.model.dtype == "float32":
        fix = "use a smaller model, model.dtype = 'bfloat16', or a machine with more memory"
    elif side == "train" and recipe.mixed_precision:
        fix = "use a smaller model, train.precision = 'model', or a machine with more memory"
    return "model.source", fix


def host_bytes(root: Path = Path("/")) -> int | None:
    """Memory that processes of this machine and of this process's cgroup may use: the machine's, or
    the least limit of the cgroup and of those that it lies in (version 1 or 2). None where that is
    not known."""
    try:
        limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    except (OSError, ValueError):
        return None
    limits += filter(None, map(_number, _limit_files(root)))
    return min(limits)


def _limit_files(root: Path) -> Iterator[Path]:
    """Files in ``root`` that may have the limit of this process's cgroup, or of one that it lies
    in. A container sees its own as the outermost one."""
    folders = {
        "": ("sys/fs/cgroup", "memory.max"),
        "memory": ("sys/fs/cgroup/memory", "memory.limit_in_bytes"),
    }
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in [*lines, "0::/", "0:memory:/"]:
        _, controllers, path = line.split(":", 2)
        if controllers in folders:
            folder, name = folders[controllers]
            inside = Path(path.lstrip("/"))
            yield from (root / folder / part / name for part in (inside, *inside.parents))


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # there is none, or "max"
        return None
