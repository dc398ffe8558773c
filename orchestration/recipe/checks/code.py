"""Checks of the code that a recipe names, and of the options that it is called with."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from orchestration.recipe.checks.registry import check
from orchestration.recipe.field_problems import field_problem
from orchestration.recipe.problems import Problem, suggest, wrong_and_fix
from orchestration.recipe.schema import Recipe
from orchestration.recipe.sections import RolloutSection, TrainSection
from stages.engines.mock.options import MockRolloutOptions, MockTrainOptions
from stages.engines.registry import BUILT_IN, TOLD, EngineUnknown, Side, engine_names, find_factory
from stages.prompts.tasks import CONFIGS
from stages.user_code import place_of


def _said_of(name: str, error: Exception) -> tuple[str, str]:
    """Wrong and fix of a message that begins with whose it is and ``name``."""
    return wrong_and_fix(str(error).partition(f"{name!r} ")[2] or str(error))


@check("rollout.engine", "rollout.options", "train.engine", "train.options")
def engines_resolve(recipe: Recipe) -> Iterator[Problem]:
    sections: dict[Side, RolloutSection | TrainSection] = {"rollout": recipe.rollout, "train": recipe.train}
    for side, section in sections.items():
        key, name, options = f"{side}.engine", section.engine, section.options
        if name in BUILT_IN[side]:
            if options:
                yield Problem(f"{side}.options", options, f"has no effect with engine {name!r}", "remove the table")
            continue
        try:
            factory = find_factory(side, name)
        except EngineUnknown as error:
            wrong, fix = _said_of(name, error)
            named = f"{suggest(name, engine_names(side))}; or name a factory as 'module:factory'"
            yield Problem(key, name, wrong, fix if ":" in name else named)
            continue
        try:
            inspect.signature(factory).bind(recipe, **dict.fromkeys(TOLD[side]), **options)
        except (TypeError, ValueError) as error:
            takes = f"it is called with the recipe, {', '.join(TOLD[side])} and what {side}.options holds"
            at, value = (f"{side}.options", options) if options else (key, name)
            yield Problem(at, value, f"does not fit what makes the engine ({error})", takes)


@check("model.source", "rollout.engine", "train.engine")
def mock_goes_with_mock(recipe: Recipe) -> Iterator[Problem]:
    engines = {"rollout.engine": recipe.rollout.engine, "train.engine": recipe.train.engine}
    mock = recipe.model.source == "mock"
    for key, engine in engines.items():
        if mock and engine in ("torch", "vllm"):
            yield Problem(key, engine, "cannot run model.source = 'mock'", f"set {key} = 'mock', or choose a model")
        if not mock and engine == "mock":
            fix = f"set model.source = 'mock', or {key} = 'torch'"
            yield Problem(key, engine, f"has no use for model.source = {recipe.model.source!r}", fix)


@check("rollout.engine", "rollout.mock", "train.engine", "train.mock")
def mock_takes_options(recipe: Recipe) -> Iterator[Problem]:
    for key, section, options in (
        ("rollout.mock", recipe.rollout, MockRolloutOptions),
        ("train.mock", recipe.train, MockTrainOptions),
    ):
        if section.mock and section.engine != "mock":
            yield Problem(key, section.mock, f"has no effect with engine {section.engine!r}", "remove the table")
        yield from refusals(key, options, section.mock)


@check(
    "rollout.engine",
    "rollout.vllm",
    "rollout.top_k",
    "rollout.top_p",
    "rollout.temperature",
    "rollout.stop",
    "rollout.max_tokens",
    "prompts.max_prompt_tokens",
)
def vllm_fits(recipe: Recipe) -> Iterator[Problem]:
    rollout, options = recipe.rollout, recipe.rollout.vllm
    if rollout.engine != "vllm":
        given = options.model_dump(exclude_defaults=True)
        if given:
            yield Problem("rollout.vllm", given, f"has no effect with engine {rollout.engine!r}", "remove the table")
        return
    longest = (recipe.prompts.max_prompt_tokens or 0) + rollout.max_tokens
    if options.max_model_len and options.max_model_len < longest:
        wrong = f"is less than the {longest} tokens that one prompt and response may have"
        yield Problem("rollout.vllm.max_model_len", options.max_model_len, wrong, f"use a value >= {longest}")
    if (rollout.top_k or rollout.top_p < 1) and rollout.temperature != 1:
        wrong = "is not served together with top_k or top_p by vLLM, whose logprobs would not be those of the trainer"
        fix = "set rollout.temperature = 1.0, or rollout.top_k = 0 and rollout.top_p = 1.0"
        yield Problem("rollout.temperature", rollout.temperature, wrong, fix)
    if rollout.stop and options.pause == "abort":
        wrong = "would miss a stop string that an update of the weights cuts in two"
        yield Problem(
            "rollout.vllm.pause", options.pause, wrong, "set rollout.vllm.pause = 'keep', or rollout.stop = []"
        )
    if options.pause == "abort" and "kv_cache" in options.model_fields_set and options.kv_cache == "keep":
        wrong = "keeps nothing of responses that rollout.vllm.pause = 'abort' ends"
        yield Problem("rollout.vllm.kv_cache", "keep", wrong, "remove it, or set rollout.vllm.pause = 'keep'")


def refusals(key: str, constructor: Callable[..., Any], options: Mapping[str, Any]) -> Iterator[Problem]:
    """What ``constructor`` (a pydantic model, a dataclass, a function) does not take of ``options``."""
    try:
        allowed = list(inspect.signature(constructor).parameters)
    except (TypeError, ValueError) as error:
        yield Problem(key, options, f"cannot be checked ({error})", "name a class or a function")
        return
    if isinstance(constructor, type) and issubclass(constructor, BaseModel):
        try:
            constructor.model_validate(options, strict=True)
        except ValidationError as error:
            for item in error.errors():
                yield field_problem({**item, "loc": (*key.split("."), *item["loc"])}, allowed)
        except Exception as error:
            yield _raised(key, options, constructor, error)
        return
    unknown = [option for option in options if option not in allowed]
    for option in unknown:
        yield Problem(f"{key}.{option}", options[option], "is not a known key", suggest(option, allowed))
    try:
        constructor(**{option: value for option, value in options.items() if option not in unknown})
    except (TypeError, ValueError) as error:
        yield Problem(key, options, f"is refused ({error})", f"it takes {', '.join(allowed)}")
    except Exception as error:
        yield _raised(key, options, constructor, error)


def _raised(key: str, options: Mapping[str, Any], constructor: Any, error: Exception) -> Problem:
    """What the code of a user has raised that ``options`` were given to."""
    made_by = getattr(constructor, "__init__") if isinstance(constructor, type) else constructor  # noqa: B009
    return Problem(
        key, options, f"cannot be used: {error!r} was raised ({place_of(error, made_by)})", "correct its code"
    )


@check("prompts")
def task_takes_config(recipe: Recipe) -> Iterator[Problem]:
    prompts = recipe.prompts
    if prompts.source == "builtin":
        yield from refusals("prompts.config", CONFIGS[str(prompts.task)], prompts.config)


@check("reward.functions", "external")
def rewards_resolve(recipe: Recipe) -> Iterator[Problem]:
    from stages.rewards.registry import RewardError, RewardFunctions

    there = RewardFunctions()
    names = [function.name for function in recipe.reward.functions]
    for at, name in enumerate(names):
        key = f"reward.functions.{at}.name"
        if name in names[:at]:
            yield Problem(key, name, "is listed twice", "add up the weights")
        if not recipe.ours("reward"):
            continue  # the names of what another program scores
        try:
            there.find(name)
        except RewardError as error:
            wrong, fix = _said_of(name, error)
            yield Problem(key, name, wrong, fix or "put its directory on PYTHONPATH, or correct the name")
    if all(function.weight == 0 for function in recipe.reward.functions):
        yield Problem("reward.functions", None, "all have weight 0", "give at least one another weight")


@check("algorithm")
def algorithm_takes_options(recipe: Recipe) -> Iterator[Problem]:
    from stages.algorithms import algorithm_class

    name, options = recipe.algorithm.name, recipe.algorithm.options
    try:
        algorithm = algorithm_class(name)
    except ValueError as error:
        yield Problem("algorithm.name", name, *_said_of(name, error))
        return
    lacks = [method for method in ("advantages", "loss", "finish") if not hasattr(algorithm, method)]
    if lacks:
        fix = "see stages.algorithms.Algorithm"
        yield Problem("algorithm.name", name, f"is not an algorithm: it has no {' and no '.join(lacks)}", fix)
        return
    refused = list(refusals("algorithm.options", algorithm, options))
    yield from refused
    if not refused:
        try:
            _ = recipe.needs_reference
        except Exception as error:
            fix = "give the class a property needs_reference: whether its loss reads ref_logprobs"
            yield Problem("algorithm.name", name, f"has no needs_reference that can be read ({error!r})", fix)
    if name == "grpo" and recipe.algorithm.group_size < 2:
        size = recipe.algorithm.group_size
        yield Problem("algorithm.group_size", size, "leaves no one to compare with in a group", "use a value >= 2")
