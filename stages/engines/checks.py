"""Checks of requests and of weights that all engines share."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence

import torch

from stages.engines.bounds import temperature_fix, top_p_fix
from stages.engines.protocols import GroupRequest, RequestRefused, WeightMismatch

# shape and dtype of each parameter, by name
Layout = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
SHOWN = 5  # problems in a message


def check_request(
    request: GroupRequest, *, vocabulary: int, context: int, adapters: Collection[str] = ()
) -> None:
    """Raise RequestRefused for a request that no engine with this vocabulary and context, both in
    tokens, and sets of ``adapters`` can serve."""
    ids = request.prompt_ids
    params = request.params
    refused = functools.partial(RequestRefused, request.group)
    if ids.dim() != 1 or ids.dtype != torch.int64 or not len(ids):
        problem = f"prompt_ids is {ids.dtype} {tuple(ids.shape)}"
        raise refused("prompt_ids", problem, "give int64 [P] with P >= 1")
    if request.adapters and request.adapters not in adapters:
        problem = f"the engine has no adapters {request.adapters!r}"
        raise refused("adapters", problem, "put them first, or use the engine's own weights")
    low = int(ids.min())
    high = int(ids.max())
    if low < 0 or high >= vocabulary:
        fix = f"the model knows 0..{vocabulary - 1}"
        raise refused("prompt_ids", f"prompt_ids has {low}..{high}", fix)
    if not request.places or len(set(request.places)) != len(request.places):
        raise refused("places", f"places is {request.places}", "give at least one, each once")
    if fix := temperature_fix(params.temperature):
        raise refused("temperature", f"temperature is {params.temperature:g}", fix)
    if fix := top_p_fix(params.top_p):
        raise refused("top_p", f"top_p is {params.top_p:g}", fix)
    if min(params.top_k, params.budget, params.max_tokens - 1) < 0:
        fix = "max_tokens >= 1, top_k and budget >= 0 are needed"
        raise refused("max_tokens", f"{params}", fix)
    named: dict[str, Sequence[int]] = {
        "allowed_token_ids": params.allowed_token_ids,
        "bad_words": [token for word in params.bad_words for token in word],
        "logit_bias": [token for token, _ in params.logit_bias],
        "logprob_token_ids": params.logprob_token_ids,
    }
    for field, tokens in named.items():
        if tokens and not 0 <= min(tokens) <= max(tokens) < vocabulary:
            problem = f"{field} has {min(tokens)}..{max(tokens)}"
            raise refused(field, problem, f"the model knows 0..{vocabulary - 1}")
    if params.min_tokens > params.max_tokens:
        problem = f"min_tokens {params.min_tokens} > max_tokens {params.max_tokens}"
        raise refused("min_tokens", problem, "give less")
    if "" in params.stop:
        raise refused("stop", f"stop is {params.stop}", "stop strings may not be empty")
    turn_start = max(map(request.turn_start, request.places))
    if len(ids) + turn_start + params.max_tokens > context:
        before = f" + {turn_start} tokens of earlier turns" if turn_start else ""
        sum_of = f"{len(ids)} prompt tokens{before} + max_tokens {params.max_tokens}"
        raise refused("max_tokens", f"{sum_of} > context {context}", "shorten one")


def layout_of(weights: Mapping[str, torch.Tensor]) -> Layout:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in weights.items()}


def check_weights(weights: Mapping[str, torch.Tensor], expected: Layout) -> None:
    """Raise ``WeightMismatch`` unless ``weights`` have the names, shapes and dtypes
    ``expected``."""
    layout = layout_of(weights)
    problems = [f"{name}: missing" for name in sorted(expected.keys() - layout.keys())]
    problems += [f"{name}: unknown" for name in sorted(layout.keys() - expected.keys())]
    for name in sorted(layout.keys() & expected.keys()):
        if layout[name] != expected[name]:
            (shape, dtype), (expected_shape, expected_dtype) = layout[name], expected[name]
            problems.append(
                f"{name}: {dtype} {shape} offered, the engine has {expected_dtype} {expected_shape}"
            )
    if problems:
        more = f" and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise WeightMismatch(
            "; ".join(problems[:SHOWN]) + more + "; offer the parameters of the same model, tied "
            "ones once"
        )


def check_adapters(
    weights: Mapping[str, torch.Tensor], layers: Mapping[str, tuple[int, int]]
) -> tuple[int, set[str]]:
    """Return the rank of adapters ``weights``, matrices by their names of
    :mod:`stages.adapters.names`, and the layers that have one. ``layers``: (inputs, outputs) of the
    model's linear layers. Raises WeightMismatch where they are no adapters of these, all of one
    rank."""
    from stages.adapters.names import down_of, up_of

    ranks = {len(weight) for name, weight in weights.items() if ".lora_A." in name}
    if len(ranks) != 1:
        raise WeightMismatch(f"adapters have ranks {sorted(ranks)}; offer those of one rank")
    (rank,) = ranks
    adapted = {name.partition(".lora_")[0] for name in weights}
    shapes: dict[str, tuple[int, ...]] = {}
    for name in adapted & layers.keys():
        inputs, outputs = layers[name]
        shapes |= {down_of(name): (rank, inputs), up_of(name): (outputs, rank)}
    offered = {name: tuple(weight.shape) for name, weight in weights.items()}
    for name in sorted(offered.keys() | shapes.keys()):
        if offered.get(name) != shapes.get(name):
            raise WeightMismatch(
                f"{name}: {offered.get(name, 'missing')} offered, the model has "
                f"{shapes.get(name, 'no such linear layer')}"
            )
    return rank, adapted
