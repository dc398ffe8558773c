"""Checks of what training has beside the default: another optimizer, what balances the load of a
model's experts, and a reference that moves."""

from __future__ import annotations

from collections.abc import Iterator

from orchestration.recipe.checks.registry import (
    Environment,
    check,
    is_set,
    machine_check,
    problem,
)
from orchestration.recipe.flow import needs_reference
from orchestration.recipe.model_files import experts_of
from orchestration.recipe.problems import value_or_none
from orchestration.recipe.schema import Recipe
from orchestration.recipe.sizes.planner import config_of
from pipeline.compat.extras import install, is_installed
from pipeline.problems import Problem
from stages.engines.optimizers import OPTIMIZERS

OPTIMIZER = "train.optimizer"
LOSS = "train.router_loss"
BIAS = "train.router_bias_rate"


@check(OPTIMIZER, "train", "critic", "algorithm")
def optimizer_is_possible(recipe: Recipe) -> Iterator[Problem]:
    name = recipe.train.optimizer
    if recipe.train.engine != "torch" and is_set(recipe, OPTIMIZER):
        reason = f"is not for train.engine = {recipe.train.engine!r}, which has its own"
        yield problem(recipe, OPTIMIZER, reason, "take it out, or set train.engine = 'torch'")
    alone = OPTIMIZERS[name].one_rank
    ranks = {"train": recipe.train.ranks}
    if value_or_none(lambda: recipe.trains_critic):
        ranks["critic"] = recipe.critic.ranks
    for section, count in ranks.items():
        if alone and count > 1:
            shared = [each for each, kind in OPTIMIZERS.items() if not kind.one_rank]
            fix = f"use one of {shared}, or one rank"
            yield problem(
                recipe, OPTIMIZER, f"is for one rank, and {section} has {count}: {alone}", fix
            )


@machine_check(OPTIMIZER)
def optimizer_is_installed(recipe: Recipe, environment: Environment) -> Iterator[Problem]:
    kind = OPTIMIZERS[recipe.train.optimizer]
    is_here = environment.devices and recipe.runs_stage("update")
    if is_here and kind.package and not is_installed(kind.package):
        yield problem(recipe, OPTIMIZER, f"needs the package {kind.package}", install(kind.extra))


@check("train", "model.source", "model.lora", "rollout.engine", "launch.placement", "external")
def experts_can_be_balanced(recipe: Recipe) -> Iterator[Problem]:
    train = recipe.train
    for key, value in ((LOSS, train.router_loss), (BIAS, train.router_bias_rate)):
        if not value:
            continue
        reasons = []
        if not experts_of(config_of(recipe.model.source))[0]:
            source = recipe.model.source
            reasons.append(f"is for a model with experts, which model.source = {source!r} has not")
        if train.engine != "torch":
            reasons.append(f"is for train.engine = 'torch', not {train.engine!r}")
        if recipe.adapters:
            reasons.append("is for routers that are trained, and model.lora.rank freezes them")
        if key == BIAS:
            reasons += _bias_reasons(recipe)
        for reason in reasons:
            yield problem(recipe, key, reason, f"set {key} = 0")


def _bias_reasons(recipe: Recipe) -> Iterator[str]:
    """Why biases that move cannot be, or cannot reach the rollout engines."""
    if recipe.train.router == "replay":
        yield "moves biases by the routers' choices, and train.router = 'replay' takes others"
    if recipe.train.layout.last_stage:
        yield "is for routers of all layers on each rank, and train.pp divides the layers"
    if recipe.colocated:
        yield "moves biases that launch.placement = 'colocated' does not pass on"
    if recipe.runs_stage("rollout") and recipe.rollout.engine != "torch":
        yield f"moves biases that rollout.engine = {recipe.rollout.engine!r} does not take"
    if not recipe.runs_stage("rollout") and not recipe.prompts.responses:
        yield "moves biases that a program outside does not take"


@machine_check("train", "model.source")
def routers_can_be_balanced(recipe: Recipe, environment: Environment) -> Iterator[Problem]:
    train = recipe.train
    source = recipe.model.source
    if not experts_of(config_of(source))[0] or not (train.router_loss or train.router_bias_rate):
        return
    from stages.engines.torch.model.balance import biased_routers
    from stages.engines.torch.model.expert_routing import routers_of
    from stages.model.load import empty_model

    if (model := value_or_none(lambda: empty_model(source))) is None:
        return
    kind = type(model).__name__
    if train.router_loss and not routers_of(model):
        reason = f"is for routers whose logits can be read, which {kind} has not"
        yield problem(recipe, LOSS, reason, f"set {LOSS} = 0")
    if train.router_bias_rate and not biased_routers(model):
        reason = f"is for routers that choose by a bias, which {kind} has not"
        yield problem(recipe, BIAS, reason, f"set {BIAS} = 0, or use {LOSS}")


@check("model", "algorithm", "stages", "external", "teacher", "train.engine", "launch")
def reference_can_move(recipe: Recipe) -> Iterator[Problem]:
    model = recipe.model
    if not model.reference_every:
        if model.reference_mix < 1:
            yield problem(
                recipe,
                "model.reference_mix",
                "has no effect without model.reference_every",
                "set that, or take this out",
            )
        return
    reasons = []
    if value_or_none(lambda: needs_reference(recipe)) is False:
        name = recipe.algorithm.name
        reasons.append(
            f"moves a reference, and with model.lora.rank = {model.lora.rank} that is the model "
            f"without its adapters"
            if recipe.adapters
            else f"moves a reference, and algorithm.name = {name!r} with these options reads none"
        )
    if model.reference is not None or recipe.teacher.url:
        reasons.append("moves a reference, and this one is another model, which stays")
    if recipe.train.engine != "torch":
        reasons.append(f"is for train.engine = 'torch', not {recipe.train.engine!r}")
    if outside := [each for each in ("reference", "update") if not recipe.runs_stage(each)]:
        reasons.append(f"is between this run's own stages, and {outside[0]!r} is not run by it")
    if recipe.launch.on_cluster:
        reasons.append("goes by files in the run's folder, which not all machines of it have")
    for reason in reasons:
        yield problem(recipe, "model.reference_every", reason, "set model.reference_every = 0")
