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
    group = None if meshes.ep is None else meshes.ep.get_group()
    for module in modules:
        if module.num_experts % ep:
            raise ValueError(
                f"ep: {module.num_experts} experts, which {ep} ranks cannot share "
                f"evenly; use a divisor"
            )
        parameters = module._parameters
        for name, whole in parameters.items() if ep > 1 else ():
            # every rank has all
            shard = distribute_tensor(whole.detach(), meshes.ep, [Shard(0)], src_data_rank=None)
            parameters[name] = nn.Parameter(shard, requires_grad=whole.requires_grad)
        module.num_experts //= ep
        module.forward = partial(_dispatched, module, module.forward, group)
    return modules


def _dispatched(
    module: Any,
    experts_forward: Callable[..., torch.Tensor],
    group: dist.ProcessGroup | None,
    tokens: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Return the weighted sum [T, H] of the outputs of all experts for ``tokens`` [T, H].

    ``experts`` int64 [T, K] and ``weights`` [T, K] are the router's. ``experts_forward`` is the
    module's own forward, with the experts of this rank; None as ``group``: it has all.
    """
    experts_of_token = experts.shape[-1]
    expert_of_pair, order = experts.flatten().sort(stable=True)
    rows = tokens[order // experts_of_token]
    rows_to_rank = [len(rows)]
    rows_from_rank = [len(rows)]
    if group is not None:
        ranks = group.size()
        send_counts = torch.bincount(expert_of_pair, minlength=ranks * module.num_experts)
        receive_counts = torch.empty_like(send_counts)
        dist.all_to_all_single(receive_counts, send_counts, group=group)
        by_expert = torch.stack([send_counts, receive_counts]).view(2, ranks, -1)
        rows_to_rank, rows_from_rank = by_expert.sum(-1).tolist()
        rows = AllToAll.apply(rows, rows_to_rank, rows_from_rank, group)  # type: ignore[no-untyped-call]
        own_experts = torch.arange(module.num_experts, device=send_counts.device)
        expert_of_pair = own_experts.repeat(ranks).repeat_interleave(receive_counts)
    rows = _computed(module, experts_forward, rows, expert_of_pair[:, None])
    if group is not None:
        rows = AllToAll.apply(rows, rows_from_rank, rows_to_rank, group)  # type: ignore[no-untyped-call]

    place_of_pair = torch.empty_like(order)
    place_of_pair[order] = torch.arange(len(order), device=order.device)
    outputs = rows[place_of_pair].view(len(tokens), experts_of_token, tokens.shape[-1])
    return (outputs * weights[..., None]).sum(1).to(tokens.dtype)


def _computed(
    module: Any,
    experts_forward: Callable[..., torch.Tensor],
    rows: torch.Tensor,
    experts: torch.Tensor,
) -> torch.Tensor:
    """Return the outputs of this rank's ``experts`` [N, 1] for ``rows`` [N, H].

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
        return experts_forward(inputs, experts, inputs.new_ones(len(inputs), 1))[: len(rows)]
    finally:
        module._parameters.update(parameters)
