"""The parts of an engine on torch. Sampling has a copy of the base's weights, which it packs."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping
from functools import partial
from typing import Any

from orchestration.calls.engines.parts import Parts
from orchestration.recipe.model_files import PLAIN_MODELS, end_tokens
from stages.calls.base import TorchBase
from stages.calls.interface import ServedBase
from stages.calls.model import TorchCalledModel
from stages.calls.sampler import TorchSampler
from stages.engines.torch.rollout import TorchRolloutEngine
from stages.model.load import Tokenizer, model_folder

TOKEN_BUDGET = 4096  # tokens that a pass feeds at once: a client's call may have any number


async def open_parts(base: ServedBase, options: Mapping[str, Any]) -> Parts:
    """``options``: ``max_rows`` that decode at once (64), ``whole_models`` of rank 0 that have an
    engine for sampling at a time (1), and those of :meth:`TorchBase.load`."""
    return await asyncio.to_thread(_open, base, dict(options))


def _open(base: ServedBase, options: dict[str, Any]) -> Parts:
    max_rows = options.pop("max_rows", 64)
    whole_models = options.pop("whole_models", 1)
    options.setdefault("token_budget", TOKEN_BUDGET)
    trained = TorchBase.load(base.source, context=base.context, **options)
    engine = partial(
        TorchRolloutEngine,
        tokenizer=trained.tokenizer,
        max_rows=max_rows,
        threads=options.get("threads"),
        device=trained.device,
        context=trained.context,
    )
    sampler = TorchSampler(
        engine(copy.deepcopy(trained.model)),
        _ends(base.source, trained.tokenizer),
        make_whole=lambda: engine(copy.deepcopy(trained.model)),
        most_whole=whole_models,
    )
    return Parts(partial(TorchCalledModel, trained), sampler)


def _ends(source: str, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens that end a response, unless a client says otherwise."""
    ends = set() if source in PLAIN_MODELS else end_tokens(model_folder(source))
    if tokenizer.eos_token_id is not None:
        ends.add(int(tokenizer.eos_token_id))
    return sorted(ends)
