"""Checks of a recipe's own stages, and of the flow that follows from them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from orchestration.recipe.checks.code import option_problems
from orchestration.recipe.checks.registry import check, problem
from orchestration.recipe.flow import algorithm_of, declarations_of, flow_of, reward_reads
from orchestration.recipe.problems import value_or_none
from orchestration.recipe.schema import Recipe
from orchestration.recipe.sections import StageSection
from orchestration.recipe.sizes.planner import vocabulary_of
from pipeline.problems import Problem
from stages.flow.catalogue import ENDED, TEACHER_IDS, TRAJECTORY
from stages.flow.declarations import IN_TRAINING, FlowError, token_shape
from stages.flow.user_stage import stage_class
from stages.user_code import CodeUnusable


@check("stages")
def stages_resolve(recipe: Recipe) -> Iterator[Problem]:
    for at, section in enumerate(recipe.stages):
        try:
            stage = stage_class(section.use)
        except CodeUnusable as error:
            yield from (replace(found, key=f"stages.{at}.use") for found in error.problems)
            continue
        if taken := sorted(stage.model_fields.keys() & StageSection.model_fields.keys()):
            reason = f"has the option {taken[0]!r}, which is a key of every stage"
            yield Problem(
                f"stages.{at}.use", section.use, reason, "give the field of the class another name"
            )
            continue
        yield from option_problems(f"stages.{at}", stage, section.options)


@check(
    *("stages", "algorithm", "reward.functions", "external", "evaluate.every"),
    *("train.groups_per_step", "train.dp", "critic.dp"),
)
def flow_resolves(recipe: Recipe) -> Iterator[Problem]:
    try:
        flow_of(recipe)
        reads = reward_reads(recipe, declarations_of(recipe), required=True)
        if recipe.has_environment:  # its evaluations have trajectories
            reads = {name: reads[name] for name in reads.keys() - {**TRAJECTORY, **ENDED}.keys()}
    except FlowError as error:
        yield from error.problems
        return
    except Exception:  # reported for the algorithm, the reward or the stage itself
        return
    if reads and recipe.evaluate.every:
        reason = (
            f"asks for evaluations, which score responses without the stage that makes "
            f"{' and '.join(sorted(reads))}"
        )
        fix = "set evaluate.every = 0, or give the reward's parameter a default"
        yield Problem("evaluate.every", recipe.evaluate.every, reason, fix)
    algorithm = algorithm_of(recipe)
    groups = recipe.train.groups_per_step
    mini_batches = algorithm.mini_batches
    if mini_batches > groups:
        reason = f"is more than the {groups} groups of a step"
        fix = f"use at most {groups}, or set train.groups_per_step = {mini_batches} or more"
        yield Problem("algorithm.options.mini_batches", mini_batches, reason, fix)
    dp, key = max(
        (recipe.train.replicas, "train.dp"),
        (recipe.critic.replicas if recipe.trains_critic else 1, "critic.dp"),
    )
    if algorithm.unit == "group" and dp > groups:
        reason = (
            f"is more than the {groups} groups of a step, which this algorithm's loss takes whole"
        )
        yield Problem(
            key, dp, reason, f"use at most {groups}, or set train.groups_per_step = {dp} or more"
        )


@check("train.replay_groups", "external")
def replay_has_its_trainer(recipe: Recipe) -> Iterator[Problem]:
    if recipe.train.replay_groups and not recipe.runs_stage("update"):
        reason = "is for a trainer of the run's own, but external.stages has 'update'"
        fix = "set 0; an external trainer may keep the samples that it got"
        yield Problem("train.replay_groups", recipe.train.replay_groups, reason, fix)


@check("external", "algorithm", "stages", "model", "environment")
def teacher_tokens_fit(recipe: Recipe) -> Iterator[Problem]:
    algorithm = value_or_none(lambda: algorithm_of(recipe))
    if algorithm is None or TEACHER_IDS not in algorithm.loss_reads:
        return
    if algorithm.teacher_reads and recipe.has_environment:
        reason = "rewrites the prompts of single turns, and an environment answers here"
        yield problem(recipe, "algorithm.name", reason, "use 'gkd', or take the environment out")
    if algorithm.scores[TEACHER_IDS] not in IN_TRAINING and not recipe.runs_stage("reference"):
        reason = (
            f"has 'reference', which gives logprobs of sampled tokens alone, and "
            f"{recipe.algorithm.name} learns from the most probable ones"
        )
        yield problem(recipe, "external.stages", reason, "take it out")
    [k] = token_shape(algorithm.loss_reads[TEACHER_IDS])
    size = vocabulary_of(recipe)
    if size is not None and k > size:
        reason = f"is more than the {size} tokens that the model knows"
        yield Problem("algorithm.options.top_k", k, reason, f"set at most {size}")
