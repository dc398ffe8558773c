"""Tensor parallelism by the model's own plan in transformers: DTensor splits matrices of layers over ``tp`` ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from transformers import PreTrainedModel

from stages.adapters.training import is_adapted

# transformers' names of what happens to a module's weights over the tensor-parallel ranks.
STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    # Between these two each rank computes the same: norms over all heads, or parts of a fused matrix.
    "colwise_gather_output": partial(ColwiseParallel, output_layouts=Replicate()),
    "rowwise_split_input": partial(RowwiseParallel, input_layouts=Replicate()),
}
EXPERTS = (
    "moe_tp_experts"  # each rank computes whole experts for its slice of the tokens (stages/…/parallel/experts.py)
)
SUMMED = "replicated_with_grad_allreduce"  # each rank has the whole weight, and sees the heads that it holds


def cuts(model: PreTrainedModel, tp: int) -> list[tuple[nn.Module, str]]:
    """Returns the modules that ``tp`` ranks split and how, from the model's tensor-parallel plan in transformers. Embeddings
    and head stay whole. Raises ValueError for a plan that this engine does not support."""
    config, kind = model.config.get_text_config(), type(model).__name__
    for name in ("num_attention_heads", "num_key_value_heads"):
        if (heads := getattr(config, name, 0)) % tp:
            raise ValueError(f"tp: {kind} has {name} = {heads}, which {tp} ranks cannot share evenly")
    return planned_cuts(model)


def planned_cuts(model: PreTrainedModel) -> list[tuple[nn.Module, str]]:
    """:func:`cuts` for any number of ranks: the numbers of heads are not looked at."""
    config, kind = model.config.get_text_config(), type(model).__name__
    plan = config.base_model_tp_plan
    if not plan:
        raise ValueError(f"tp: {kind} comes without a tensor-parallel plan; use tp = 1")
    found = [
        (name, module, plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name)))  # the plan has * for a layer's number
        for name, module in model.base_model.named_modules()
    ]
    for name, _, style in found:
        if style not in (None, SUMMED, EXPERTS, *STYLES):
            known = ", ".join([*STYLES, SUMMED, EXPERTS])
            raise ValueError(f"tp: {kind} wants {name} {style!r}; this engine knows {known}; use tp = 1")
    return [(module, style) for _, module, style in found if style not in (None, EXPERTS)]


def cut_matrices(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Split the matrices of ``model``'s layers over the ranks of ``mesh``."""
    planned = cuts(model, mesh.size())
    _share_inputs(model, {module for module, style in planned if style.startswith("colwise")}, mesh)
    for module, style in planned:
        if style == SUMMED:
            _sum_gradients(module, mesh.get_group())
            continue
        parts: list[Any] = [module]
        if is_adapted(module):  # the matrix with the side that is cut; the other one is on every rank
            side: Any = module.lora_A if style.startswith("row") else module.lora_B
            parts = [module.base_layer, side["default"]]
        for part in parts:
            parallelize_module(part, mesh, STYLES[style](), src_data_rank=None)  # every rank has the whole weight


def _share_inputs(model: PreTrainedModel, columns: set[nn.Module], mesh: DeviceMesh) -> None:
    """Make one DTensor of the input of several modules that are split by columns, such as queries, keys and values: their
    gradients to it are summed over the ranks once, not each by itself."""

    def replicated(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if args:
            return (DTensor.from_local(args[0], mesh, [Replicate()], run_check=False), *args[1:]), kwargs
        if (given := kwargs.get("hidden_states")) is not None:
            kwargs = {**kwargs, "hidden_states": DTensor.from_local(given, mesh, [Replicate()], run_check=False)}
        return args, kwargs

    for block in model.modules():
        linear = [child for child in block.children() if isinstance(child, nn.Linear)]
        among = [child for child in linear if child in columns]
        if len(among) > 1 and len(linear) - len(among) == 1:  # the other one computes the block's output
            block.register_forward_pre_hook(replicated, with_kwargs=True)


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        summed = gradients[0].contiguous().clone()
        dist.all_reduce(summed, group=ctx.group)
        return summed, None


def _sum_gradients(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Sum the gradients of ``module``'s own weights over ``group`` in every backward, before they are accumulated. Each rank
    has the same weight and other inputs, as norms of queries and keys have: its own heads."""
    forward = module.forward

    def summing(*args: Any, **kwargs: Any) -> Any:
        weights = dict(module._parameters)
        try:
            for name, weight in weights.items():
                if weight is not None:
                    module._parameters[name] = _SumGradient.apply(weight, group)
            return forward(*args, **kwargs)
        finally:
            module._parameters.update(weights)

    module.forward = summing  # type: ignore[method-assign]
