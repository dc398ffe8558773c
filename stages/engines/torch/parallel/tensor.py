"""Tensor parallelism by the model's own plan in transformers: DTensor splits matrices of layers
over ``tp`` ranks.

    embeddings ▸ own tokens ▸ norm ▸ all-gather ▸ attention ▸ reduce-scatter ▸ + ▸ norm ▸ all-gather
    ▸ MLP ▸ … ▸ all-gather

Between attention and MLP each rank has a slice of the tokens, [1, S / tp, H]: norms, residuals,
routers, and what is kept of them for the backward pass (sequence parallelism, arXiv 2205.05198).
Experts take the tokens of their rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from transformers import PreTrainedModel

from stages.adapters.options import is_adapted
from stages.engines.protocols import ModelRefused
from stages.engines.torch.model.attention_interface import PROBE
from stages.engines.torch.model.expert_load import expert_modules
from stages.engines.torch.model.packing import Feeding
from stages.engines.torch.parallel.collectives import own_slice

# transformers' names of what happens to a module's weights over the tensor-parallel ranks.
STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": partial(RowwiseParallel, output_layouts=Shard(-2)),
    # Between these two each rank computes the same: norms over all heads, or parts of a fused
    # matrix.
    "colwise_gather_output": partial(ColwiseParallel, output_layouts=Replicate()),
    "rowwise_split_input": partial(
        RowwiseParallel, input_layouts=Replicate(), output_layouts=Shard(-2)
    ),
}
# each rank has whole experts for its tokens (stages/engines/torch/parallel/experts.py)
EXPERTS = "moe_tp_experts"
# each rank has the whole weight, and sees the heads that it holds
SUMMED = "replicated_with_grad_allreduce"


def cuts(model: PreTrainedModel, tp: int) -> list[tuple[nn.Module, str]]:
    """Return the modules that ``tp`` ranks split and how, from the model's tensor-parallel plan in
    transformers. Embeddings and head stay whole. Raises ValueError for a plan that this engine does
    not support."""
    config = model.config.get_text_config()
    kind = type(model).__name__
    for name in ("num_attention_heads", "num_key_value_heads"):
        if (heads := getattr(config, name, 0)) % tp:
            problem = f"{kind} has {name} = {heads}, which {tp} ranks cannot share evenly"
            raise ModelRefused("tp", problem)
    return planned_cuts(model)


def planned_cuts(model: PreTrainedModel) -> list[tuple[nn.Module, str]]:
    """Return :func:`cuts` for any number of ranks: the numbers of heads are not looked at."""
    config = model.config.get_text_config()
    kind = type(model).__name__
    plan = config.base_model_tp_plan
    if not plan:
        raise ModelRefused("tp", f"{kind} comes without a tensor-parallel plan", "use tp = 1")
    embeddings = model.get_input_embeddings()  # transformers 5.16 plans to cut tied ones, too
    modules = [
        # the plan has * for a layer's number
        (name, module, plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name)))
        for name, module in model.base_model.named_modules()
        if module is not embeddings
    ]
    for name, _, style in modules:
        if style not in (None, SUMMED, EXPERTS, *STYLES):
            known = ", ".join([*STYLES, SUMMED, EXPERTS])
            problem = f"{kind} wants {name} {style!r}; this engine knows {known}"
            raise ModelRefused("tp", problem, "use tp = 1")
    return [(module, style) for _, module, style in modules if style not in (None, EXPERTS)]


def cut_matrices(model: PreTrainedModel, mesh: DeviceMesh, feeding: Feeding) -> set[str]:
    """Split the matrices of ``model``'s layers over the ranks of ``mesh``, and between them the
    tokens that ``feeding`` has. Returns the names of the parameters of which each rank gets the
    gradient of its tokens or heads alone: the sum over the ranks is the whole one."""
    planned = cuts(model, mesh.size())
    tokens = _Tokens(mesh, feeding)
    partial_ones = [module for module, style in planned if style == SUMMED]
    styles = {module: style for module, style in planned if style != SUMMED}
    rows = {module for module, style in styles.items() if style.startswith("row")}
    for stack in _stacks(model, styles):
        for block in (blocks := _blocks(stack, styles)):
            change = (
                tokens.whole if _shares_input(block, styles.keys() - rows) else tokens.whole_alike
            )
            block.register_forward_pre_hook(_on_input(change), with_kwargs=True)
            # the others' last matrix returns this rank's tokens
            if not rows & set(block.modules()):
                block.register_forward_hook(_on_output(tokens.own))
        inside = {module for block in blocks for module in block.modules()} | {
            stack,
            *expert_modules(stack),
        }
        partial_ones += [module for module in stack.modules() if module not in inside]
        stack[0].register_forward_pre_hook(_on_input(tokens.of_words), with_kwargs=True)
        # FSDP warns of views
        stack[-1].register_forward_hook(_on_output(lambda own: tokens.whole_alike(own).clone()))
    for module, style in styles.items():
        parts: list[Any] = [module]
        # the matrix with the side that is cut; the other one is on every rank
        if is_adapted(module):
            side: Any = module.lora_A if module in rows else module.lora_B
            parts = [module.base_layer, side["default"]]
            partial_ones += list(module.lora_B.children()) if module in rows else []  # type: ignore[union-attr]
        for part in parts:
            # every rank has the whole weight
            parallelize_module(part, mesh, STYLES[style](), src_data_rank=None)
    partial_ids = {
        id(parameter) for module in partial_ones for parameter in module._parameters.values()
    }
    return {name for name, parameter in model.named_parameters() if id(parameter) in partial_ids}


def _stacks(model: PreTrainedModel, cut: Collection[nn.Module]) -> list[nn.ModuleList]:
    """Return the lists of layers with modules that are ``cut``."""
    stacks = []
    inside = set[nn.Module]()
    for module in model.base_model.modules():
        if (
            isinstance(module, nn.ModuleList)
            and module not in inside
            and any(each in cut for each in module.modules())
        ):
            stacks.append(module)
            inside.update(module.modules())
    return stacks


def _blocks(stack: nn.ModuleList, cut: Collection[nn.Module]) -> list[nn.Module]:
    """Return the modules of the layers ``stack`` that compute with all tokens: attention, and those
    that have matrices ``cut``."""
    blocks = []
    inside = set[nn.Module]()
    for module in stack.modules():
        if module not in inside and (
            hasattr(module, "is_causal") or any(each in cut for each in module.children())
        ):
            blocks.append(module)
            inside.update(module.modules())
    return blocks


def _shares_input(block: nn.Module, columns: Collection[nn.Module]) -> bool:
    """Return whether ``block`` gives its input to modules that are split by columns alone, such as
    queries, keys and values. As one DTensor its gradients from them are summed over the ranks once,
    not each by itself. Adapters take no DTensor."""
    if any(is_adapted(child) for child in block.children()):
        return False
    linear = [child for child in block.children() if isinstance(child, nn.Linear)]
    among = [child for child in linear if child in columns]
    # the other one computes the block's output
    return bool(among) and len(linear) - len(among) == 1


class _Tokens:
    """The tokens of a micro-batch, of which each rank has a slice between blocks, by torch's chunk
    rule: dimension -2."""

    def __init__(self, mesh: DeviceMesh, feeding: Feeding) -> None:
        self._mesh = mesh
        self._feeding = feeding

    def whole(self, own: torch.Tensor) -> DTensor:
        """Return all ranks' tokens; their gradients are summed over the ranks."""
        # None: the model computes the probe, before it is fed anything else
        packed = self._feeding.packed
        count = PROBE if packed is None else packed.ids.shape[1]
        like = torch.empty(*own.shape[:-2], count, own.shape[-1], device="meta")
        at = [Shard(own.ndim - 2)]
        part = DTensor.from_local(
            own, self._mesh, at, run_check=False, shape=like.shape, stride=like.stride()
        )
        return part.redistribute(placements=[Replicate()])

    def whole_alike(self, own: torch.Tensor) -> torch.Tensor:
        """Return all ranks' tokens, from which all ranks compute the same."""
        return self.whole(own).to_local()

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        alike = DTensor.from_local(whole, self._mesh, [Replicate()], run_check=False)
        return alike.redistribute(placements=[Shard(whole.ndim - 2)]).to_local()

    def of_words(self, whole: torch.Tensor) -> torch.Tensor:
        """Return :meth:`own` of [1, S, H] from embeddings.

        Nothing is sent for their gradient: a rank has that of its tokens, times the ranks, since
        FSDP takes the mean over tensor-parallel ranks of what lies outside of layers.
        """
        group = self._mesh.get_group()
        local_tokens = own_slice(whole[0], group)[None].clone()
        if local_tokens.requires_grad:
            local_tokens.register_hook(lambda gradient: gradient * group.size())
        return local_tokens


def _on_input(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    def hook(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}

    return hook


def _on_output(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        return (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out)

    return hook
