"""How fast the rollout engine of a recipe decodes and prefills on this machine, with nothing beside
it.

    few rows, many rows ─┬─ one token each  ─▶ seconds of a prefill, and of each of its tokens
                         └─ TOKENS each     ─▶ seconds of a token of all rows, and of each row

A run tells less: it decodes as many rows as it has, and what the time of its prompts is cannot be
told apart.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from statistics import fmean, median

from orchestration.recipe.models import tokenizer_of
from orchestration.recipe.schema import Recipe
from orchestration.recipe.sizes.planner import prompt_limits
from orchestration.simulation.costs import EngineProfile
from orchestration.workers.engines import rollout_engine
from stages.engines.protocols import GroupRequest, SamplingParams
from stages.prompts.sources import load_prompts

TOKENS = 64  # of a measured response, at most
REPEATS = 3
FEW = 8  # times fewer rows than there is room for
LEAST = 1e-6  # seconds of a token


def profile_engine(recipe: Recipe) -> EngineProfile:
    """Measure the rollout engine of ``recipe``, with its own prompts. Loads the model."""
    return asyncio.run(_profiled(recipe))


async def _profiled(recipe: Recipe) -> EngineProfile:
    size = recipe.algorithm.group_size
    rows = recipe.rollout.max_rows
    prompts = load_prompts(
        recipe.prompts, tokenizer_of(recipe), recipe.seed, limits=prompt_limits(recipe)
    ).train
    few = max(1, rows // FEW)
    tokens = min(TOKENS, recipe.rollout.max_tokens)
    numbers = itertools.count()
    prompted = list[int]()

    async def generated(rows: int, tokens: int) -> float:
        """Seconds of ``rows`` responses of ``tokens`` tokens each."""
        params = SamplingParams(max_tokens=tokens, temperature=recipe.rollout.temperature)
        requests = []
        for first in range(0, rows, size):
            number = next(numbers)
            places = tuple(range(min(size, rows - first)))
            requests.append(
                GroupRequest(number, places, prompts.prompt(number).ids, params, seed=number)
            )
        prompted.extend(len(request.prompt_ids) for request in requests)
        began = time.perf_counter()
        async for _ in engine.generate(requests):
            pass
        return time.perf_counter() - began

    async def seconds(rows: int, tokens: int) -> float:
        """The same, in the median, once memory is allocated and kernels are chosen."""
        return median([await generated(rows, tokens) for _ in range(1 + REPEATS)][1:])

    engine = rollout_engine(recipe, version=0)
    try:
        short = {of: await seconds(of, 1) for of in (few, rows)}
        long = {
            of: (await seconds(of, tokens) - short[of]) / max(1, tokens - 1) for of in (few, rows)
        }
    finally:
        await engine.close()
    by_row = max(0.0, long[rows] - long[few]) / max(1, rows - few)
    prompt = fmean(prompted)
    more = -(-rows // size) - -(-few // size)  # groups
    by_token = (
        max(0.0, short[rows] - short[few]) / (more * prompt) if more else short[rows] / prompt
    )
    return EngineProfile(
        token_seconds=max(long[few] - by_row * few, LEAST),
        row_seconds=by_row,
        prefill_seconds=max(0.0, short[few] - by_token * prompt * -(-few // size)),
        prefill_token_seconds=by_token,
        prompt_tokens=prompt,
    )
