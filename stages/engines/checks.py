"""Checks of requests and of weights that all engines share."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from stages.engines.bounds import temperature_problem, top_p_problem
from stages.engines.protocols import GroupRequest, WeightMismatch

Layout = Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # shape and dtype of each parameter, by name
SHOWN = 5  # problems in a message


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
    if wrong := temperature_problem(params.temperature) or top_p_problem(params.top_p):
        raise ValueError(f"{where}{wrong}")
    if min(params.top_k, params.budget, params.max_tokens - 1) < 0:
        raise ValueError(f"{where}{params}; max_tokens >= 1, top_k and budget >= 0 are needed")
    if "" in params.stop:
        raise ValueError(f"{where}stop is {params.stop}; stop strings may not be empty")
    if len(ids) + params.max_tokens > context:
        raise ValueError(
            f"{where}{len(ids)} prompt tokens + max_tokens {params.max_tokens} > context {context}; shorten one"
        )


def layout_of(weights: Mapping[str, torch.Tensor]) -> Layout:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in weights.items()}


def check_weights(weights: Mapping[str, torch.Tensor], expected: Layout) -> None:
    """Raise ``WeightMismatch`` unless ``weights`` have the names, shapes and dtypes ``expected``."""
    given = layout_of(weights)
    problems = [f"{name}: missing" for name in sorted(expected.keys() - given.keys())]
    problems += [f"{name}: unknown" for name in sorted(given.keys() - expected.keys())]
    for name in sorted(given.keys() & expected.keys()):
        if given[name] != expected[name]:
            (shape, dtype), (needed, of) = given[name], expected[name]
            problems.append(f"{name}: {dtype} {shape} offered, the engine has {of} {needed}")
    if problems:
        more = f" and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise WeightMismatch(
            "; ".join(problems[:SHOWN]) + more + "; offer the parameters of the same model, tied ones once"
        )
