"""Checks of the code that a recipe names (engines, rewards, algorithm, task) and of the options
that it is called with."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from orchestration.recipe.checks.registry import Environment, check, machine_check, problem
from orchestration.recipe.flow import flow_of
from orchestration.recipe.problems import suggest, value_or_none
from orchestration.recipe.schema import Recipe
from orchestration.recipe.sections import StageSection
from orchestration.recipe.sections.environment import EnvironmentSection
from orchestration.recipe.sections.rewards import RewardFunction
from pipeline.problems import Problem
from stages.engines.mock.options import MockRolloutOptions, MockTrainOptions
from stages.engines.registry import (
    BUILT_IN,
    PARAMETERS,
    EngineUnknown,
    Side,
    engine_names,
    find_factory,
)
from stages.tasks.tasks import ASKING, HARMLESS, REWARDS, RUNNING, task_config
from stages.user_code import CodeUnusable, place_of

SIDES: tuple[Side, ...] = ("rollout", "train")


@check("rollout.engine", "rollout.options", "train.engine", "train.options")
def engines_are_found(recipe: Recipe) -> Iterator[Problem]:
    for side in SIDES:
        section = getattr(recipe, side)
        key = f"{side}.engine"
        name = section.engine
        options = section.options
        if name in BUILT_IN[side]:
            if options:
                yield problem(
                    recipe,
                    f"{side}.options",
                    f"has no effect with engine {name!r}",
                    "remove the table",
                )
            continue
        try:
            factory = find_factory(side, name)
        except EngineUnknown as error:
            [found] = error.problems
            known = f"{suggest(name, engine_names(side))}; or name a factory as 'module:factory'"
            yield found if ":" in name else replace(found, fix=known)
            continue
        try:
            inspect.signature(factory).bind(recipe, **dict.fromkeys(PARAMETERS[side]), **options)
        except (TypeError, ValueError) as error:
            fix = (
                f"it is called with the recipe, {', '.join(PARAMETERS[side])} and what "
                f"{side}.options holds"
            )
            key = f"{side}.options" if options else key
            yield problem(recipe, key, f"does not fit what makes the engine ({error})", fix)


@check("model.source", "rollout.engine", "train.engine")
def mock_goes_with_mock(recipe: Recipe) -> Iterator[Problem]:
    source = recipe.model.source
    for side in SIDES:
        key = f"{side}.engine"
        engine = getattr(recipe, side).engine
        if source == "mock" and engine in ("torch", "vllm"):
            yield problem(
                recipe,
                key,
                "cannot run model.source = 'mock'",
                f"set {key} = 'mock', or choose a model",
            )
        if source != "mock" and engine == "mock":
            fix = f"set model.source = 'mock', or {key} = 'torch'"
            yield problem(recipe, key, f"has no use for model.source = {source!r}", fix)


@check("rollout.engine", "rollout.mock", "train.engine", "train.mock")
def mock_takes_options(recipe: Recipe) -> Iterator[Problem]:
    for side, options in zip(SIDES, (MockRolloutOptions, MockTrainOptions), strict=True):
        section = getattr(recipe, side)
        key = f"{side}.mock"
        if section.mock and section.engine != "mock":
            yield problem(
                recipe, key, f"has no effect with engine {section.engine!r}", "remove the table"
            )
        yield from option_problems(key, options, section.mock)


@check("prompts")
def task_takes_config(recipe: Recipe) -> Iterator[Problem]:
    for key, part in recipe.prompts.parts().items():
        if part.source == "builtin":
            yield from option_problems(f"{key}.config", task_config(str(part.task)), part.config)


@check("reward.functions")
def rewards_are_there(recipe: Recipe) -> Iterator[Problem]:
    if recipe.reward.functions:
        return
    has_responses = bool(recipe.prompts.responses)
    scores = value_or_none(lambda: "reward" in flow_of(recipe))
    key, fix = (
        ("reward.functions", "name at least 1")
        if "reward" in recipe.model_fields_set
        else ("reward", "")
    )
    if not has_responses and scores is not False:
        yield Problem(key, None, "is missing", fix or "add a [reward] section")
    elif recipe.evaluate.every:
        reason = "is missing, and evaluate.every asks for evaluations, which score responses"
        yield Problem(
            key, None, reason, f"{fix or 'add a [reward] section'}, or set evaluate.every = 0"
        )
    elif scores:
        yield Problem(
            key,
            None,
            "is missing, and a stage or the algorithm reads rewards",
            fix or "add a [reward] section",
        )


@check("reward.workers", "algorithm", "stages", "external")
def reward_workers_score(recipe: Recipe) -> Iterator[Problem]:
    flow = value_or_none(lambda: flow_of(recipe))
    runs = flow is None or ("reward" in flow and recipe.runs_stage("reward"))
    if recipe.reward.workers > 1 and not runs:
        reason = "share the rows of the stage 'reward', which this run does not execute"
        yield problem(recipe, "reward.workers", reason, "set reward.workers = 1")


@check("reward.functions", "external")
def rewards_are_found(recipe: Recipe) -> Iterator[Problem]:
    from stages.rewards.registry import RewardFunctions, RewardUnknown, call_problem

    rewards = RewardFunctions()
    names = [function.name for function in recipe.reward.functions]
    for index, name in enumerate(names):
        key = f"reward.functions.{index}.name"
        if name in names[:index]:
            yield Problem(key, name, "is listed twice", "add up the weights")
        if not recipe.runs_stage("reward"):
            continue  # another program scores under these names
        try:
            function = rewards.find(name)
        except RewardUnknown as error:
            yield from (replace(found, key=key) for found in error.problems)
        else:
            if fault := call_problem(function):
                yield Problem(key, name, *fault)
            else:
                yield from _options_are_taken(recipe.reward.functions[index], function, index)
    if names and all(function.weight == 0 for function in recipe.reward.functions):
        yield Problem(
            "reward.functions", None, "all have weight 0", "give at least one another weight"
        )


def _options_are_taken(
    section: RewardFunction, function: Callable[..., Any], index: int
) -> Iterator[Problem]:
    """Find options that are no arguments of ``function``, or that the run itself gives it."""
    from stages.rewards.calls import named_by
    from stages.rewards.registry import RESERVED

    names = named_by(function)
    for option, value in section.options.items():
        key = f"reward.functions.{index}.options.{option}"
        if option in RESERVED:
            reason = "is an argument that reward functions get from the run"
            yield Problem(key, value, reason, "take it out")
        elif names is not None and option not in names:
            allowed = [name for name in names if name not in RESERVED]
            reason = f"is no argument of {section.name!r}"
            yield Problem(
                key, value, reason, suggest(option, allowed) if allowed else "take it out"
            )


def _stages_and_environments(
    recipe: Recipe,
) -> Iterator[tuple[str, str, StageSection | EnvironmentSection]]:
    """Key, name and table of each stage of the recipe's own, and of its environments."""
    for index, stage in enumerate(recipe.stages):
        yield f"stages.{index}", stage.use, stage
    if recipe.has_environment:
        yield "environment", ", ".join(recipe.environment.uses.values()), recipe.environment


@check("reward.functions", "reward.processes", "stages", "environment", "launch.launcher")
def sandboxes_are_of_use(recipe: Recipe) -> Iterator[Problem]:
    """What a model wrote is scored by installed code in a sandbox alone; what a sandbox lets
    through needs one."""
    for key, code, section in _stages_and_environments(recipe):
        if section.sandbox and recipe.launch.launcher == "inline":
            reason = f"leaves no process that could be in a sandbox, as that of {code!r} is to be"
            yield problem(recipe, "launch.launcher", reason, "use 'process'")
        for name in ("network", "read"):
            if getattr(section, name) and not section.sandbox:
                reason = f"has no effect on {code!r}, which is called without a sandbox"
                fix = f"leave it out, or set {key}.sandbox = true"
                yield Problem(f"{key}.{name}", getattr(section, name), reason, fix)
    for index, function in enumerate(recipe.reward.functions):
        key = f"reward.functions.{index}"
        evaluates = function.name in REWARDS and function.name not in HARMLESS | ASKING
        if evaluates and function.sandbox is False:
            reason = f"would let {function.name} score what a model wrote without a sandbox"
            yield Problem(f"{key}.sandbox", False, reason, "leave it out")
        elif function.is_sandboxed and not recipe.reward.processes and recipe.runs_stage("reward"):
            reason = (
                f"leaves no process that could be in a sandbox, as that of {function.name!r} "
                f"is to be"
            )
            yield problem(recipe, "reward.processes", reason, "use 1 or more")
        for name in ("network", "read"):
            if getattr(function, name) and not function.is_sandboxed:
                why = (
                    ("which needs none")
                    if function.name in HARMLESS
                    else "which is called without a sandbox"
                )
                fix = (
                    ("leave it out")
                    if function.name in HARMLESS
                    else (f"leave it out, or set {key}.sandbox = true")
                )
                yield Problem(
                    f"{key}.{name}",
                    getattr(function, name),
                    f"has no effect on {function.name!r}, {why}",
                    fix,
                )


def _sandboxed(recipe: Recipe) -> Iterator[tuple[str, str, list[str]]]:
    """Key, name and paths to be read of each stage, environment and function that is to be in a
    sandbox."""
    for key, code, section in _stages_and_environments(recipe):
        if section.sandbox:
            yield key, code, section.read
    for index, function in enumerate(recipe.reward.functions):
        if function.is_sandboxed and recipe.runs_stage("reward"):
            yield f"reward.functions.{index}", function.name, function.read


@machine_check("reward.functions", "prompts", "stages", "environment")
def sandboxes_can_be_had(recipe: Recipe, environment: Environment) -> Iterator[Problem]:
    sandboxed = [*_sandboxed(recipe)]
    if not environment.devices or not sandboxed:
        return
    from orchestration.sandbox.sandbox import WAY_OUT, available
    from stages.tasks.gym_answers import EVALUATES, EXECUTES

    for key, _, read in sandboxed:
        for place, path in enumerate(read):
            if not Path(path).expanduser().exists():
                yield Problem(f"{key}.read.{place}", path, "is not there", "correct the path")
    found = available()
    for key, name, _ in sandboxed:
        is_own = not key.startswith("reward.") or ":" in name
        if (name in RUNNING and found.shortfall) or (is_own and not found.mechanism):
            yield Problem(f"{key}.sandbox", True, f"{name} gets {found.shortfall}", WAY_OUT)
    if found.mechanism:
        return
    for key, part in recipe.prompts.parts().items():
        if part.source == "reasoning_gym" and part.task in {*EVALUATES, *EXECUTES}:
            yield Problem(
                f"{key}.task",
                part.task,
                f"is scored by evaluating answers, and gets {found.shortfall}",
                WAY_OUT,
            )


@check("algorithm")
def algorithm_takes_options(recipe: Recipe) -> Iterator[Problem]:
    from stages.algorithms import algorithm_class

    name = recipe.algorithm.name
    try:
        algorithm = algorithm_class(name)
    except CodeUnusable as error:
        yield from error.problems
        return
    yield from option_problems("algorithm.options", algorithm, recipe.algorithm.options)
    least = algorithm.least_group_size
    if recipe.algorithm.group_size < least:
        yield problem(
            recipe, "algorithm.group_size", f"is too small for {name}", f"use a value >= {least}"
        )


def option_problems(
    key: str, target: Callable[..., Any], options: Mapping[str, Any]
) -> Iterator[Problem]:
    """Problems of calling ``target`` (a pydantic model, a dataclass, a function) with the
    ``options`` of the recipe's ``key``."""
    try:
        allowed = list(inspect.signature(target).parameters)
    except (TypeError, ValueError) as error:
        yield Problem(key, options, f"cannot be checked ({error})", "name a class or a function")
        return
    is_model = isinstance(target, type) and issubclass(target, BaseModel)
    unknown = [] if is_model else [option for option in options if option not in allowed]
    for option in unknown:
        yield Problem(
            f"{key}.{option}", options[option], "is not a known key", suggest(option, allowed)
        )
    try:
        if is_model:
            target.model_validate(options, strict=True)  # type: ignore[attr-defined]
        else:
            target(**{option: value for option, value in options.items() if option not in unknown})
    except (TypeError, ValueError) as error:
        if is_model and isinstance(error, ValidationError):
            from orchestration.recipe.field_problems import field_problem

            yield from (field_problem(item, key, allowed) for item in error.errors())
        else:
            yield Problem(key, options, f"is refused ({error})", f"it takes {', '.join(allowed)}")
    except Exception as error:  # of a user's code
        made_by = getattr(target, "__init__") if isinstance(target, type) else target  # noqa: B009
        reason = f"cannot be used: {error!r} was raised ({place_of(error, made_by)})"
        yield Problem(key, options, reason, "correct its code")
