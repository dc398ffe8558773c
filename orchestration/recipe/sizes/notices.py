"""Notices: what a recipe may ask for, and is better otherwise.

``asyncdock check`` prints them, and a run logs them.
"""

from __future__ import annotations

from collections.abc import Iterator

from orchestration.recipe.flow import algorithm_of
from orchestration.recipe.model_files import KNOWN_MODELS, text_config, tokens_of
from orchestration.recipe.schema import Recipe
from pipeline.problems import Problem


def notices(recipe: Recipe, longest: int, change: int | None) -> Iterator[Problem]:
    """Return the notices of a sound ``recipe``.

    ``longest``: tokens of its longest row; ``change``: tokens above which its model takes the long
    factors of longrope.
    """
    if (
        recipe.train.precision == "model"
        and recipe.model.dtype != "float32"
        and recipe.runs_stage("update")
    ):
        wrong = (
            f"rounds updates to {recipe.model.dtype}: at usual learning rates most weights do "
            f"not change"
        )
        yield Problem("train.precision", "model", wrong, "leave it out, for float32 master weights")
    if recipe.runs_stage("update"):
        for metric, reason in algorithm_of(recipe).constants(recipe.oldest_trained).items():
            fix = (
                "set algorithm.options.mini_batches or epochs to 2 or more, or take it for what "
                "it is"
            )
            yield Problem("algorithm.options", None, f"{metric} {reason}", fix)
    are_greedy = recipe.evaluate.sampling == "greedy"
    if are_greedy and recipe.logprob_temperature != recipe.rollout.temperature:
        wrong = (
            "has no effect: prompts.responses are given, nothing is sampled, and evaluations "
            "are greedy"
        )
        yield Problem("rollout.temperature", recipe.rollout.temperature, wrong, "leave it out")
    confined = [function.name for function in recipe.reward.functions if function.is_sandboxed]
    stages = [stage.use for stage in recipe.stages if stage.sandbox]
    environments = [*recipe.environment.uses.values()] if recipe.environment.sandbox else []
    for key, names in (
        ("reward.functions", confined if recipe.runs_stage("reward") else []),
        ("stages", stages),
        ("environment.sandbox", environments),
    ):
        if not names:
            continue
        from orchestration.sandbox.sandbox import WAY_OUT, available

        if shortfall := available().shortfall:
            yield Problem(key, None, f"{names} get {shortfall}", WAY_OUT)
    if (
        recipe.rollout.engine != "torch"
        and not recipe.prompts.responses
        and recipe.model.vocabulary == "auto"
    ):
        yield from _unmasked(recipe)
    if change is not None and longest > change:
        wrong = (
            f"makes rows of {longest} tokens possible: longrope's long factors are used for all "
            f"rows, while transformers uses the short ones for sequences of up to {change} tokens"
        )
        key = recipe.longest_response_key
        fix = f"keep prompts.max_prompt_tokens + {key} <= {change} for the short ones"
        yield Problem(key, recipe.longest_response, wrong, fix)


def _unmasked(recipe: Recipe) -> Iterator[Problem]:
    """Where the embedding has more rows than the tokenizer has tokens, and the rollout engine
    samples of all."""
    source = recipe.model.source
    engine = recipe.rollout.engine
    if source in KNOWN_MODELS:
        return
    rows = text_config(source).get("vocab_size")
    tokens = tokens_of(source)
    if isinstance(rows, int) and tokens is not None and tokens < rows:
        reason = (
            f"samples of all {rows:,} tokens of the model, {rows - tokens:,} of which its "
            f"tokenizer does not have"
        )
        fix = (
            "take it for what it is: the trainer's logprobs are of all of them, too; or use "
            "rollout.engine = 'torch'"
        )
        yield Problem("rollout.engine", engine, reason, fix)
