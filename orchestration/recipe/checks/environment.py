"""Checks of a recipe's environment: what it goes with, its code, and the template of its turns."""

from __future__ import annotations

from collections.abc import Iterator

from orchestration.recipe.checks.examples import dialogues_at_hand, tokenizer_at_hand
from orchestration.recipe.checks.machine import prompts_can_be_read
from orchestration.recipe.checks.registry import Environment, check, machine_check, problem
from orchestration.recipe.schema import Recipe
from pipeline.problems import Problem
from stages.environments.classes import environments
from stages.environments.interface import COLUMN
from stages.prompts.rows.files import PromptError
from stages.user_code import CodeUnusable

REWARD = "environment"  # the reward function that returns an environment's rewards


@check(
    *("environment", "rollout.max_tokens", "prompts.responses", "external.stages"),
    *("launch.placement", "train.router", "evaluate.every"),
)
def environment_goes_with_the_rest(recipe: Recipe) -> Iterator[Problem]:
    if not recipe.has_environment:
        keys = recipe.environment.model_dump(exclude_defaults=True)
        for name, value in keys.items():
            reason = "has no effect without environment.use"
            yield Problem(f"environment.{name}", value, reason, "take it out")
        return
    turn = recipe.rollout.max_tokens
    if recipe.longest_response <= turn:
        reason = f"has no room for a turn of rollout.max_tokens = {turn} and an observation"
        yield problem(recipe, "environment.max_tokens", reason, f"use a value > {turn}")
    others = {
        "prompts.responses": bool(recipe.prompts.responses),
        "external.stages": not recipe.runs_stage("rollout"),
        "launch.placement": recipe.colocated,
        "train.router": recipe.train.router == "replay",
    }
    for key in (key for key, is_set in others.items() if is_set):
        yield problem(recipe, key, "does not go with environment.use", f"take {key} out")
    if recipe.evaluate.every and recipe.environment.outside:
        reason = "asks for evaluations, and programs outside take trajectories of training alone"
        yield problem(recipe, "evaluate.every", reason, "set evaluate.every = 0")


@check("environment", "reward.functions", "train.engine", "external.stages")
def environment_is_sound(recipe: Recipe) -> Iterator[Problem]:
    """Import the classes, and make one of each."""
    section = recipe.environment
    if section.use is None:
        return
    try:
        factories = environments(section.use, section.options)
        declared = {name: factory.declare() for name, factory in factories.items()}
    except CodeUnusable as unusable:
        yield from unusable.problems
        return
    if any(declaration.requests for declaration in declared.values()):
        yield from _branches_are_trained(recipe)
    if any(function.name == REWARD for function in recipe.reward.functions):
        for name, declaration in declared.items():
            if not declaration.gives_reward:
                fix = "write get_reward(), or gives_reward = True and rewards in what step returns"
                reason = f"gives no reward, which reward function {REWARD!r} returns"
                yield Problem("environment.use", section.uses[name], reason, fix)


def _branches_are_trained(recipe: Recipe) -> Iterator[Problem]:
    """A program may go back; engines that are not the product's do not know branches."""
    reason = "does not know the branches of programs (docs/agents.md#branches)"
    if recipe.train.engine not in ("torch", "mock"):
        yield problem(recipe, "train.engine", reason, "use 'torch', or a class as the environment")
    if outside := sorted({"update", "reference"} & {*recipe.external.stages}):
        fix = "take it out, or use a class as the environment"
        yield Problem("external.stages", outside, f"{outside[0]!r} outside {reason}", fix)


@machine_check("environment.use", "prompts", after=(prompts_can_be_read,))
def rows_name_their_environment(recipe: Recipe, environment: Environment) -> Iterator[Problem]:
    names = recipe.environment.uses
    if not names or "" in names:
        return
    for key, rows in environment.prompts.items():
        if rows.has_columns and COLUMN not in rows.columns:
            reason = f"has no column {COLUMN!r}, with which a row chooses one of {sorted(names)}"
            yield Problem(f"{key}.path", rows.options.path, reason, "add it")


@machine_check("environment", "model.source", "prompts")
def turns_can_be_written(recipe: Recipe, environment: Environment) -> Iterator[Problem]:
    tokenizer = tokenizer_at_hand(recipe) if recipe.has_environment else None
    if tokenizer is None:
        return
    try:
        dialogues_at_hand(recipe, tokenizer)
    except CodeUnusable:  # reported for the code itself
        return
    except PromptError as refused:
        yield from refused.problems
