"""Checks of keys against one another."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator

from orchestration.recipe.checks.registry import check
from orchestration.recipe.planner import arena_bytes, heads_of
from orchestration.recipe.problems import Problem
from orchestration.recipe.schema import Recipe
from orchestration.recipe.sections import TLS_FILES
from orchestration.recipe.values import format_size
from pipeline.staleness import passing_steps


@check("algorithm.group_size", "rollout.max_rows")
def group_fits_engine(recipe: Recipe) -> Iterator[Problem]:
    size, rows = recipe.algorithm.group_size, recipe.rollout.max_rows
    if rows < size:
        fix = f"set rollout.max_rows >= {size}, or algorithm.group_size <= {rows}"
        yield Problem("rollout.max_rows", rows, f"is less than algorithm.group_size = {size}", fix)


@check("prompts.max_prompt_tokens", "rollout.max_tokens", "train.token_budget")
def row_fits_budget(recipe: Recipe) -> Iterator[Problem]:
    longest = (recipe.prompts.max_prompt_tokens or 0) + recipe.rollout.max_tokens
    if recipe.train.token_budget < longest:
        wrong = f"is less than the {longest} tokens that one prompt and response may have"
        yield Problem("train.token_budget", recipe.train.token_budget, wrong, f"use a value >= {longest}")


@check("rollout.temperature")
def training_explores(recipe: Recipe) -> Iterator[Problem]:
    if recipe.rollout.temperature == 0:
        wrong = "is greedy: the responses of a group would all be equal, and nothing learned"
        yield Problem("rollout.temperature", 0.0, wrong, "use a value > 0, for example 1.0")


@check("rollout", "pipeline.staleness", "pipeline.window", "train.groups_per_step")
def cuts_make_sense(recipe: Recipe) -> Iterator[Problem]:
    rollout, plan = recipe.rollout, recipe.staleness_plan
    if rollout.budget >= rollout.max_tokens:
        wrong = f"cuts nothing, as no response is longer than rollout.max_tokens = {rollout.max_tokens}"
        fix = f"use a value < {rollout.max_tokens}, or 0 for no budget"
        yield Problem("rollout.budget", rollout.budget, wrong, fix)
    asked = {"rollout.budget": (rollout.budget, 0), "rollout.on_update": (rollout.on_update, "keep")}
    if rollout.engine == "vllm" and rollout.stop and (rollout.budget or rollout.on_update == "cut"):
        wrong = "would be missed by vLLM where a cut parts one in two"
        yield Problem(
            "rollout.stop", rollout.stop, wrong, "set rollout.budget = 0 and rollout.on_update = 'keep', or stop = []"
        )
    for key, (value, default) in asked.items():
        if value != default and plan.slack == 0:
            wrong = (
                f"cuts responses, but with pipeline.staleness = {plan.bound} and pipeline.window = {plan.window} the run is "
                "the synchronous one bit for bit, and a continued response is rounded otherwise"
            )
            needed = passing_steps(plan.window, plan.groups_per_step) + 1
            yield Problem(key, value, wrong, f"set pipeline.staleness >= {needed}, or {key} = {json.dumps(default)}")


@check("pipeline.window", "pipeline.staleness", "train.groups_per_step")
def window_has_room(recipe: Recipe) -> Iterator[Problem]:
    plan = recipe.staleness_plan
    if plan.window > 1 and plan.slack == 0:
        needed = passing_steps(plan.window, plan.groups_per_step) + 1
        wrong = (
            f"lets no group pass under pipeline.staleness = {plan.bound}: "
            f"only the {plan.groups_per_step} groups of one step would be in flight"
        )
        yield Problem(
            "pipeline.window", plan.window, wrong, f"set pipeline.staleness >= {needed}, or pipeline.window = 1"
        )


@check(
    "pipeline.arena",
    "pipeline.window",
    "pipeline.staleness",
    "train.groups_per_step",
    "algorithm.group_size",
    "prompts.max_prompt_tokens",
    "rollout.max_tokens",
    "rollout.budget",
    "rollout.on_update",
    "checkpoint.every",
    "launch.placement",
)
def arena_has_room(recipe: Recipe) -> Iterator[Problem]:
    needed = arena_bytes(recipe)
    if recipe.pipeline.arena < needed:
        wrong = f"is {format_size(recipe.pipeline.arena)}, but {format_size(needed)} may be alive at once"
        fix = f"set pipeline.arena = '{-(-needed // 2**20)}MiB', or lower checkpoint.every or pipeline.staleness"
        yield Problem("pipeline.arena", recipe.pipeline.arena, wrong, fix)


@check("pipeline.serve", "sync.transport", *(f"pipeline.{name}" for name in TLS_FILES))
def tls_files_fit(recipe: Recipe) -> Iterator[Problem]:
    files = {f"pipeline.{name}": getattr(recipe.pipeline, name) for name in TLS_FILES}
    if not any(files.values()):
        return
    for key, value in files.items():
        if not value:
            yield Problem(key, value, "is missing", f"give all of {', '.join(files)}, or none for no TLS")
        elif not os.path.isfile(value):
            yield Problem(key, value, "is no file", "give the path of a PEM file")
    if not recipe.pipeline.serve and recipe.sync.transport != "collective":
        wrong = "serves nobody, so that TLS has nothing to protect"
        yield Problem("pipeline.serve", "", wrong, "set pipeline.serve = '0.0.0.0', or take the tls_ keys out")
    if all(os.path.isfile(value) for value in files.values()):
        try:
            recipe.pipeline.tls_contexts()
        except OSError as error:
            fix = "give a PEM certificate with its own private key, and the authority's certificate"
            yield Problem("pipeline.tls_certificate", recipe.pipeline.tls_certificate, f"cannot be used ({error})", fix)


@check("external", "evaluate.every", "train.dp", "train.tp")
def external_fits(recipe: Recipe) -> Iterator[Problem]:
    stages = recipe.external.stages
    for at, stage in enumerate(stages):
        if stage in stages[:at]:
            yield Problem(f"external.stages.{at}", stage, "is listed twice", "list it once")
    if "rollout" in stages and recipe.evaluate.every:
        wrong = "asks for evaluations, which the run's own rollout engine would answer"
        fix = "set evaluate.every = 0, or take 'rollout' out of external.stages"
        yield Problem("evaluate.every", recipe.evaluate.every, wrong, fix)
    if "update" in stages and recipe.train.ranks > 1:
        key = "train.dp" if recipe.train.dp > 1 else "train.tp"
        wrong = "lays out a trainer of the run's own, but external.stages holds 'update'"
        yield Problem(key, getattr(recipe.train, key[6:]), wrong, f"set {key} = 1")


@check("external", "algorithm")
def reference_is_asked(recipe: Recipe) -> Iterator[Problem]:
    if recipe.ours("reference"):
        return
    try:
        needed = recipe.needs_reference
    except Exception:  # reported for the algorithm itself
        return
    if not needed:
        wrong = f"holds 'reference', which algorithm.name = {recipe.algorithm.name!r} with these options never asks"
        fix = "set algorithm.options.kl_coef > 0, or take 'reference' out"
        yield Problem("external.stages", recipe.external.stages, wrong, fix)


@check("train.warmup_steps", "train.steps")
def schedule_fits(recipe: Recipe) -> Iterator[Problem]:
    if recipe.train.warmup_steps > recipe.train.steps:
        wrong = f"is more than train.steps = {recipe.train.steps}"
        yield Problem("train.warmup_steps", recipe.train.warmup_steps, wrong, f"use a value <= {recipe.train.steps}")


@check("evaluate", "prompts.held_out")
def evaluation_has_prompts(recipe: Recipe) -> Iterator[Problem]:
    evaluate = recipe.evaluate
    if evaluate.every and not recipe.prompts.held_out:
        wrong = "holds nothing out for evaluation"
        yield Problem("prompts.held_out", recipe.prompts.held_out, wrong, "use for example 0.1, or evaluate.every = 0")
    if evaluate.every and evaluate.samples > evaluate.prompts:
        fix = f"use a value <= {evaluate.prompts}"
        yield Problem("evaluate.samples", evaluate.samples, f"is more than evaluate.prompts = {evaluate.prompts}", fix)


@check("rollout.threads", "train.threads")
def threads_exist(recipe: Recipe) -> Iterator[Problem]:
    cores = os.cpu_count() or 1
    for key, threads in (("rollout.threads", recipe.rollout.threads), ("train.threads", recipe.train.threads)):
        if threads > cores:
            yield Problem(
                key, threads, f"is more than the {cores} cores of this machine", f"use 0 (automatic) .. {cores}"
            )


@check(
    "train.dp",
    "train.tp",
    "train.engine",
    "train.device",
    "train.groups_per_step",
    "algorithm.group_size",
    "launch.launcher",
)
def ranks_fit(recipe: Recipe) -> Iterator[Problem]:
    train, rows = recipe.train, recipe.train.groups_per_step * recipe.algorithm.group_size
    together = f"train.dp = {train.dp} times train.tp = {train.tp}"
    if train.dp > rows:
        wrong = f"leaves ranks without one of the {rows} samples of a step"
        yield Problem("train.dp", train.dp, wrong, f"use a value <= {rows}")
    if train.ranks > 1 and train.engine == "mock":
        key = "train.dp" if train.dp > 1 else "train.tp"
        yield Problem(key, getattr(train, key[6:]), "is more than the mock engine has", f"set {key} = 1")
    elif train.ranks > 1 and recipe.launch.launcher == "inline":
        wrong = f"keeps all workers in one process, but {together} is {train.ranks} ranks, a process each"
        yield Problem("launch.launcher", "inline", wrong, "set launch.launcher = 'process'")
    if train.ranks > 1 and ":" in train.device:
        fix = f"write {train.device.partition(':')[0]!r}: each rank takes one of them"
        yield Problem("train.device", train.device, f"is one device for {train.ranks} ranks", fix)


@check("train.tp", "model.source")
def heads_divide(recipe: Recipe) -> Iterator[Problem]:
    """Whether ``train.tp`` ranks can share the model's heads."""
    tp = recipe.train.tp
    heads = heads_of(recipe) if tp > 1 else {}
    uneven = {name: count for name, count in heads.items() if count % tp}
    if uneven:
        said = " and ".join(f"{name} = {count}" for name, count in uneven.items())
        wrong = f"cannot share the model's {said} evenly"
        both = math.gcd(*heads.values())
        fits = [str(size) for size in range(1, both + 1) if both % size == 0]
        yield Problem("train.tp", tp, wrong, f"use one of: {', '.join(fits)}")


@check("train.dp", "train.tp", "train.device")
def ranks_have_cores(recipe: Recipe) -> Iterator[Problem]:
    ranks, cores = recipe.train.ranks, os.cpu_count() or 1
    if ranks <= cores:
        return
    from stages.device import on_cpu  # brings torch, which other recipes are checked without

    if on_cpu(recipe.train.device):
        key = "train.dp" if recipe.train.dp > 1 else "train.tp"
        wrong = f"makes {ranks} ranks, which is more than the {cores} cores of this machine"
        yield Problem(key, getattr(recipe.train, key[6:]), wrong, f"keep train.dp times train.tp <= {cores}")


@check("train.precision", "model.dtype")
def precision_means_something(recipe: Recipe) -> Iterator[Problem]:
    if recipe.train.precision == "mixed" and recipe.model.dtype == "float32":
        wrong = "has no effect with model.dtype = 'float32', in which everything is float32"
        yield Problem("train.precision", "mixed", wrong, "set model.dtype = 'bfloat16', or train.precision = 'model'")


@check(
    "launch.placement",
    "external",
    "sync.transport",
    "rollout.engine",
    "rollout.workers",
    "rollout.device",
    "train.engine",
    "train.device",
    "train.dp",
    "train.tp",
)
def turns_can_be_taken(recipe: Recipe) -> Iterator[Problem]:
    if not recipe.colocated:
        return
    rollout, train, together = recipe.rollout, recipe.train, "launch.placement = 'colocated'"
    for key, engine in (("rollout.engine", rollout.engine), ("train.engine", train.engine)):
        if engine != "torch":
            wrong = f"cannot give its device away, as {together} asks for"
            fix = f"set {key} = 'torch', or launch.placement = 'separate'"
            yield Problem(key, engine, wrong, fix)
    if rollout.workers not in (1, train.ranks):
        wrong = f"is not the {train.ranks} ranks that train, each of which has a rollout engine with {together}"
        yield Problem("rollout.workers", rollout.workers, wrong, "leave it out: it follows from train.dp and train.tp")
    for stage in ("rollout", "update"):
        if stage in recipe.external.stages:
            wrong = f"gives {stage!r} to another program, while {together} has both of the run's own on one device"
            yield Problem("external.stages", recipe.external.stages, wrong, "set launch.placement = 'separate'")
    if recipe.sync.transport != "shared_memory":
        wrong = f"is between separate devices, and with {together} trainer and engine share theirs"
        yield Problem("sync.transport", recipe.sync.transport, wrong, "leave it out: they exchange slices")
    if rollout.device != train.device:
        wrong = f"is not train.device = {train.device!r}, which it takes turns with by {together}"
        yield Problem("rollout.device", rollout.device, wrong, f"set rollout.device = {train.device!r}")
