"""The check of a generation request that all engines share."""

from __future__ import annotations

import torch

from stages.engines.protocols import GroupRequest


def check_request(request: GroupRequest, *, vocabulary: int, context: int) -> None:
    """Raise ``ValueError`` for a request that no engine with this vocabulary and context, both in tokens, can serve."""
    ids, params = request.prompt_ids, request.params
    where = f"group {request.group}: "
    if ids.dim() != 1 or ids.dtype != torch.int64 or not len(ids):
        raise ValueError(f"{where}prompt_ids is {ids.dtype} {tuple(ids.shape)}; give int64 [P] with P >= 1")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocabulary:
        raise ValueError(f"{where}prompt_ids has {low}..{high}; the model knows 0..{vocabulary - 1}")
    if not request.places or len(set(request.places)) != len(request.places):
        raise ValueError(f"{where}places is {request.places}; give at least one, each once")
    if min(params.temperature, params.top_k, params.budget, params.max_tokens - 1) < 0 or not 0 < params.top_p <= 1:
        raise ValueError(
            f"{where}{params}; max_tokens >= 1, temperature, top_k and budget >= 0, 0 < top_p <= 1 are needed"
        )
    if "" in params.stop:
        raise ValueError(f"{where}stop is {params.stop}; stop strings may not be empty")
    if len(ids) + params.max_tokens > context:
        raise ValueError(
            f"{where}{len(ids)} prompt tokens + max_tokens {params.max_tokens} > context {context}; shorten one"
        )
