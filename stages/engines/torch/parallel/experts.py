"""Expert parallelism: each rank holds whole experts, and tokens go to them and come back by
all-to-all. None is dropped.

    router ─▶ (token, expert) pairs, by expert ─▶ all-to-all ─▶ own experts ─▶ all-to-all ─▶ weighted sum of each token

A layer's experts are dealt out to ``ep`` neighbours among all ranks of a pipeline stage; ranks with
the same experts shard them (FSDP2), in a unit of their own. Tensor parallelism does not cut an
expert.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from stages.engines.torch.model.expert_load import expert_modules
from stages.engines.torch.parallel.collectives import AllToAll
from stages.engines.torch.parallel.mesh import Meshes


def deal_experts(model: nn.Module, meshes: Meshes) -> list[nn.Module]:
    """Deal the experts of ``model`` out to the ranks of ``meshes``. Returns the modules to be
    sharded over ``meshes.experts``: none where ranks share neither experts nor tokens. Raises
    ValueError for a number of experts that the ranks cannot share evenly."""
    if meshes.ep is None and meshes.tp is None:
        return []
    ep = 1 if meshes.ep is None else meshes.ep.size()
    modules = expert_modules(model)
    if ep > 1 and not modules and not meshes.pipes:  # a pipeline stage may have other layers alone
        raise ValueError(f"ep: {type(model).__name__} has no experts; use ep = 1")
    for module in modules:
        plain = module.forward
        parameters = module._parameters
        if module.num_experts % ep:
            raise ValueError(
                f"ep: {module.num_experts} experts, which {ep} ranks cannot share "
                f"evenly; use a divisor"
            )
        for name, whole in parameters.items() if ep > 1 else ():
            # every rank has all
            shard = distribute_tensor(whole.detach(), meshes.ep, [Shard(0)], src_data_rank=None)
            parameters[name] = nn.Parameter(shard, requires_grad=whole.requires_grad)
        module.num_experts //= ep
        module.forward = partial(
            _dispatched, module, plain, None if meshes.ep is None else meshes.ep.get_group()
        )
    return modules


def _dispatched(
    module: Any,
    plain: Callable[..., torch.Tensor],
    ep: dist.ProcessGroup | None,
    tokens: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Return the output of ``plain``, the module's own forward, with all experts."""
    chosen = experts.shape[-1]
    pairs, order = experts.flatten().sort(stable=True)
    rows = tokens[order // chosen]
    sent = [len(pairs)]
    received = [len(pairs)]
    if ep is not None:
        going = torch.bincount(pairs, minlength=ep.size() * module.num_experts)
        coming = torch.empty_like(going)
        dist.all_to_all_single(coming, going, group=ep)
        sent, received = torch.stack([going, coming]).view(2, ep.size(), -1).sum(-1).tolist()
        rows = AllToAll.apply(rows, sent, received, ep)  # type: ignore[no-untyped-call]
        pairs = (
            torch.arange(module.num_experts, device=going.device)
            .repeat(ep.size())
            .repeat_interleave(coming)
        )
    rows = _computed(module, plain, rows, pairs[:, None])
    if ep is not None:
        rows = AllToAll.apply(rows, received, sent, ep)  # type: ignore[no-untyped-call]
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return (
        (rows[back].view(len(tokens), chosen, tokens.shape[-1]) * weights[..., None])
        .sum(1)
        .to(tokens.dtype)
    )


def _computed(
    module: Any, plain: Callable[..., torch.Tensor], rows: torch.Tensor, experts: torch.Tensor
) -> torch.Tensor:
    """Return the outputs of this rank's ``experts`` for ``rows`` [N, H].

    Without rows they compute a row of zeros: their gradients are waited for by the ranks that shard
    them.
    """
    inputs = rows if len(rows) else rows.sum(0, keepdim=True)
    experts = experts if len(rows) else experts.new_zeros(1, 1)
    parameters = dict(module._parameters)
    try:
        for name, weight in parameters.items():
            if isinstance(weight, DTensor):
                module._parameters[name] = weight.to_local()
        return plain(inputs, experts, inputs.new_ones(len(inputs), 1))[: len(rows)]
    finally:
        module._parameters.update(parameters)
