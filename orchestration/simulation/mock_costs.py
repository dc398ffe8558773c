"""Costs and lengths of a recipe with mock engines: their options, and the very lengths that they
draw."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from orchestration.recipe.models import tokenizer_of
from orchestration.recipe.schema import Recipe
from orchestration.recipe.sizes.planner import prompt_limits
from orchestration.simulation.costs import ASSUMED, Costs, LengthsOf
from stages.engines.mock.engines import drawn_tokens
from stages.engines.mock.options import MockRolloutOptions, MockTrainOptions
from stages.prompts.sources import load_prompts
from stages.rollout.stage import group_seed

BETWEEN_STEPS = 0.05  # seconds, on a machine with two cores: docs/measurements/overlap.md
BETWEEN_STEPS_SOURCE = "measured with the mock engines on two cores"
PROMPTS = 64  # whose mean length counts


def mock_costs(recipe: Recipe, between_steps: float = BETWEEN_STEPS) -> Costs:
    """Of a recipe with mock engines: their options, in real seconds."""
    rollout = MockRolloutOptions(**{"max_rows": recipe.rollout.max_rows, **recipe.rollout.mock})
    train = MockTrainOptions(**recipe.train.mock)
    algorithm = recipe.typed_algorithm
    scale = rollout.time_scale
    learned = train.time_scale * algorithm.epochs
    known = {name: "the mock engines' options" for name in Costs.__dataclass_fields__}
    return Costs(
        row_rate=rollout.row_rate / scale,
        saturation_rows=rollout.saturation_rows,
        prefill_rate=rollout.prefill_rate / scale,
        swap_seconds=rollout.swap_seconds * scale,
        copy_seconds=rollout.copy_seconds * scale,
        step_seconds=train.step_seconds * algorithm.mini_batches * learned,
        token_seconds=train.token_seconds * learned,
        reference_token_seconds=train.logprob_token_seconds * train.time_scale,
        prompt_tokens=prompt_tokens_of(recipe),
        between_steps=between_steps,
        sources={
            **known,
            **ASSUMED,
            "between_steps": BETWEEN_STEPS_SOURCE,
            "prompt_tokens": "the recipe's prompts",
        },
    )


_prompt_tokens = dict[tuple[str, str, int], float]()


def prompt_tokens_of(recipe: Recipe) -> float:
    """Mean length of the recipe's first prompts, in tokens."""
    key = (recipe.prompts.model_dump_json(), recipe.model.source, recipe.seed)
    if key not in _prompt_tokens:
        prompts = load_prompts(
            recipe.prompts, tokenizer_of(recipe), recipe.seed, limits=prompt_limits(recipe)
        ).train
        _prompt_tokens[key] = fmean(len(prompts.prompt(number).ids) for number in range(PROMPTS))
    return _prompt_tokens[key]


def mock_lengths(recipe: Recipe) -> LengthsOf:
    """The very lengths that the mock engines of a run of ``recipe`` draw."""
    options = MockRolloutOptions(**{"max_rows": recipe.rollout.max_rows, **recipe.rollout.mock})
    limit = recipe.rollout.max_tokens
    places = range(recipe.algorithm.group_size)

    def lengths(group: int) -> Sequence[int]:
        seed = group_seed(recipe.seed, group)
        return [min(limit, drawn_tokens(options, seed, place)) for place in places]

    return lengths
