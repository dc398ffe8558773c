"""Checks of adapters (``model.lora``): what trains and generates with them, and the layers that get
one."""

from __future__ import annotations

from collections.abc import Iterator

from orchestration.recipe.checks.registry import Environment, check, machine_check, problem
from orchestration.recipe.problems import value_or_none
from orchestration.recipe.schema import Recipe
from pipeline.compat.extras import install, is_installed
from pipeline.problems import Problem

NONE = "or model.lora.rank = 0"
VLLM_RANKS = 512  # the largest that vLLM has room for


@check("model.lora", "train.engine", "rollout.engine", "external")
def adapters_are_possible(recipe: Recipe) -> Iterator[Problem]:
    lora = recipe.model.lora
    engine = recipe.rollout.engine
    if recipe.adapters is None:
        for key in lora.model_dump(exclude_defaults=True):
            yield problem(
                recipe,
                f"model.lora.{key}",
                "has no effect without model.lora.rank",
                "set it, e.g. to 16",
            )
        return
    if recipe.train.engine != "torch":
        yield problem(recipe, "train.engine", "trains no adapters", f"use 'torch', {NONE}")
    if engine not in ("torch", "vllm") and recipe.runs_stage("rollout"):
        yield problem(
            recipe, "rollout.engine", "takes no adapters", f"use 'torch' or 'vllm', {NONE}"
        )
    if engine == "vllm" and lora.rank > VLLM_RANKS:
        yield problem(
            recipe,
            "model.lora.rank",
            f"is more than vLLM has room for ({VLLM_RANKS})",
            "use a lower one",
        )
    if others := [
        stage
        for stage in ("rollout", "update")
        if not recipe.runs_stage(stage) and stage in recipe.external.stages
    ]:
        reason = (
            f"leaves {others[0]!r} to a program that exchanges all weights of the model, not "
            f"adapters"
        )
        yield problem(recipe, "external.stages", reason, f"take it out, {NONE}")


@machine_check("model")
def adapters_fit_the_model(recipe: Recipe, environment: Environment) -> Iterator[Problem]:
    if (adapters := recipe.adapters) is None or recipe.model.source == "mock":
        return
    if not is_installed("peft"):
        yield problem(recipe, "model.lora.rank", "needs the package peft", install("lora"))
    from stages.adapters.names import adapted_layers, head_name
    from stages.model.load import empty_model

    if (model := value_or_none(lambda: empty_model(recipe.model.source))) is None:
        return
    try:
        layers = adapted_layers(model, adapters.targets)
    except ValueError as error:
        fix = (
            ("name some of these, or leave it out for all of them")
            if adapters.targets
            else "set model.lora.rank = 0"
        )
        yield problem(recipe, "model.lora.targets", str(error), fix)
        return
    if (head := head_name(model)) in layers:
        reason = f"names {head!r}, the output head, which not all engines of a run adapt"
        yield problem(recipe, "model.lora.targets", reason, "name layers before it alone")
    narrowest = min(layers, key=lambda name: min(layers[name]))
    if adapters.rank > (most := min(layers[narrowest])):
        reason = f"is more than the narrowest side of {narrowest}, which has {most} numbers"
        yield problem(
            recipe,
            "model.lora.rank",
            reason,
            f"use a value <= {most}, or leave that layer out of model.lora.targets",
        )
