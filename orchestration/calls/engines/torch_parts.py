"""The parts of an engine on torch. Sampling has a copy of the base's weights, which it packs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch.distributed import Store

from orchestration.calls.engines.parts import MAX_ROWS, Parts
from orchestration.calls.engines.ranks import Ranks, joined_store, wait_for_all
from orchestration.recipe.model_files import PLAIN_MODELS, end_tokens
from stages.calls.base import TorchBase
from stages.calls.interface import ServedBase
from stages.calls.model import TorchCalledModel
from stages.calls.sampler import EngineSampler
from stages.engines.torch.rollout import TorchRolloutEngine
from stages.model.load import Tokenizer, model_folder
from stages.parallel.layout import Layout

COLLECTIVE_SECONDS = 300.0
TOKEN_BUDGET = 4096  # tokens that a pass feeds at once: a client's call may have any number


async def open_parts(base: ServedBase, options: Mapping[str, Any]) -> Parts:
    """``options``: ``max_rows`` that decode at once (64), ``whole_models`` of rank 0 that have an
    engine for sampling at a time (1), ``sampling_device`` and ``sampling_threads`` (those of
    training), ``vllm`` (samples with vLLM: see
    :func:`~orchestration.calls.engines.vllm_parts.vllm_parts`), those of :func:`load_base`, and of
    :func:`start_ranks`."""
    options = dict(options)
    sampling = {
        "max_rows": options.pop("max_rows", MAX_ROWS),
        "threads": options.pop("sampling_threads", options.get("threads")),
        "device": options.pop("sampling_device", None),
        "vllm": options.pop("vllm", None),
        "most_whole": options.pop("whole_models", 1),
    }
    ranks = await start_ranks(base, options)
    return await asyncio.to_thread(_open, base, options, ranks, **sampling)


async def start_ranks(base: ServedBase, options: Mapping[str, Any]) -> Ranks | None:
    """Start the other ranks of training; None where there are none. ``options``: ``data_parallel``
    replicas (1), each of ``tensor_parallel`` ranks (1), which wait for one another for at most
    ``collective_seconds`` (300); and those of :func:`load_base`."""
    world = _layout(options).world
    if world == 1:
        return None
    ranks = Ranks(world, float(options.get("collective_seconds", COLLECTIVE_SECONDS)))
    await ranks.start("orchestration.calls.engines.torch_parts:open_rank", base, options)
    return ranks


async def open_rank(base: ServedBase, options: Mapping[str, Any]) -> Parts:
    """Open a rank beside the first one; see :class:`~orchestration.calls.engines.ranks.Ranks`."""
    options = dict(options)
    rank = options.pop("rank")
    store = joined_store(options.pop("port"))
    trained = await asyncio.to_thread(load_base, base, options, store, rank)
    return Parts(partial(TorchCalledModel, trained), None)


def load_base(
    base: ServedBase, options: Mapping[str, Any], store: Store | None, rank: int = 0
) -> TorchBase:
    """Load the base model, as ``rank`` of those that meet in ``store``; None: there is one rank.
    ``options``: of :func:`start_ranks`, and of :meth:`TorchBase.load`. Raises ModelRefused for one
    that ranks cannot share."""
    layout = _layout(options)
    options = {"token_budget": TOKEN_BUDGET, **options}
    timeout = float(options.pop("collective_seconds", COLLECTIVE_SECONDS))
    options.pop("data_parallel", None)
    tensor_parallel = options.pop("tensor_parallel", 1)
    if store is None:
        return TorchBase.load(base.source, context=base.context, **options)
    from stages.engines.torch.parallel.sharded import Sharded
    from stages.engines.torch.parallel.tensor import cuts

    wait_for_all(store, rank, layout.world)
    ranks = Sharded(layout.coordinates(rank), store=store, timeout=timeout)
    trained = TorchBase.load(base.source, context=base.context, ranks=ranks, **options)
    if tensor_parallel > 1:
        cuts(trained.model, tensor_parallel)
    return trained


def _layout(options: Mapping[str, Any]) -> Layout:
    dp = options.get("data_parallel", 1)
    return Layout.for_training(dp=dp, tp=options.get("tensor_parallel", 1))


def _open(
    base: ServedBase,
    options: Mapping[str, Any],
    ranks: Ranks | None,
    *,
    device: str | None,
    vllm: Mapping[str, Any] | None,
    most_whole: int,
    **sampling: Any,
) -> Parts:
    trained = load_base(base, options, None if ranks is None else ranks.store)
    new_model = partial(TorchCalledModel, trained)
    ends = _ends(base.source, trained.tokenizer)
    if vllm is not None:
        from orchestration.calls.engines.vllm_parts import vllm_parts

        sampling |= {**vllm, "most_whole": most_whole}
        return replace(vllm_parts(trained, base.source, new_model, ends, **sampling), ranks=ranks)

    def engine() -> TorchRolloutEngine:
        return TorchRolloutEngine(
            trained.whole_model(),
            trained.tokenizer,
            device=device or trained.device,
            context=trained.context,
            **sampling,
        )

    sampler = EngineSampler(engine(), ends, make_whole=engine, most_whole=most_whole)
    return Parts(new_model, sampler, ranks)


def _ends(source: str, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens that end a response, unless a client says otherwise."""
    ends = set() if source in PLAIN_MODELS else end_tokens(model_folder(source))
    if tokenizer.eos_token_id is not None:
        ends.add(int(tokenizer.eos_token_id))
    return sorted(ends)
