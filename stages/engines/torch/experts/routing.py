"""The experts that tokens go to: recorded in generation, and followed in training (router replay).

    rollout:   router ─▶ its top-k experts of each fed token ─▶ column routed_experts: fed tokens x layers x top-k numbers
    training:  router ─▶ its own logits ─▶ top-k answers with the column ─▶ weights of these experts, with gradients

Two engines that compute one policy in another order of sums choose other experts for a token whose best two are nearly
equal: a discrete step that importance weights do not see. A row's choices are those of all its fed tokens: the prompt, and
the response without its last token. Training computes the prompt of a piece of a group once, with the choices of its first
row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn
from torch.overrides import TorchFunctionMode

from stages.algorithms.batch import jagged_rows
from stages.engines.torch.packing import Feeding
from stages.flow.catalogue import ROUTED, expert_type

ROUTER = "TopKRouter"  # how transformers ends the names of routers that return (logits, weights, indices)


def routers_of(model: nn.Module) -> list[Any]:
    """The routers of ``model``, one for each layer with experts, in the order of the layers."""
    return [module for module in model.modules() if type(module).__name__.endswith(ROUTER)]


class RoutingRecorder:
    """Records what the routers of ``model`` choose. Raises ``ValueError`` for a model without routers that can be read."""

    def __init__(self, model: nn.Module) -> None:
        routers = routers_of(model)
        if not routers:
            raise ValueError(f"model: {type(model).__name__} has no routers whose choices can be recorded")
        self._dtype = getattr(torch, expert_type(max(router.num_experts for router in routers)))
        self._found: list[torch.Tensor] = [torch.empty(0)] * len(routers)
        for number, router in enumerate(routers):
            router.register_forward_hook(lambda _, __, output, number=number: self._keep(number, output))

    def _keep(self, number: int, output: tuple[torch.Tensor, ...]) -> None:
        self._found[number] = output[2]

    def last(self) -> torch.Tensor:
        """The choices of the last forward, uint8 or int16 [T, layers * top-k]."""
        return torch.cat(self._found, 1).to(self._dtype)


class RoutingReplay:
    """Makes the routers of a train engine's ``model`` follow the choices that ``feeding`` has, where it has some, and
    counts what they choose in training. ``agreed``: of the choices that were followed, those that the router would have
    made too."""

    def __init__(self, model: nn.Module, feeding: Feeding) -> None:
        self._feeding, self._routers = feeding, routers_of(model)
        self._counts: list[torch.Tensor] = []
        self._counting = self._followed = False
        for number, router in enumerate(self._routers):
            router.forward = self._following(number, router, router.forward)

    def rows(self, batch: TensorDictBase, tokens: Sequence[int]) -> list[torch.Tensor]:
        """The choices [fed tokens, layers * top-k] of each row of ``batch``, whose fed ``tokens`` are given; empty where it
        has none. Raises ``ValueError`` for choices of another number of tokens or of another model."""
        if ROUTED not in batch:
            return []
        width = sum(router.top_k for router in self._routers)
        rows = jagged_rows(batch, ROUTED, torch.tensor(tokens) * width)
        return [row.view(-1, width) for row in rows]

    def start(self) -> None:
        """Count from zero, until :meth:`stop`."""
        self._counting, self._followed = True, False
        experts = max((router.num_experts for router in self._routers), default=0)
        self._counts = [torch.zeros(experts + 1, dtype=torch.int64)] * len(self._routers)

    def stop(self) -> None:
        self._counting = False

    def metrics(self, total: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
        """Since :meth:`start`, with ``total`` to add a tensor up over all ranks: ``max_expert_load``, the largest share of a
        layer's choices that one expert has, over an equal share; and ``routing_agreement``, the share of the followed
        choices that agreed, where choices were followed. Empty for a model without routers."""
        if not self._counts:
            return {}
        counts = total(torch.stack([counts.cpu() for counts in self._counts])).double()
        load, chosen = counts[:, :-1], float(counts[:, :-1].sum())
        found = {"max_expert_load": float((load / load.mean(1, keepdim=True)).max())}
        if self._followed:
            found["routing_agreement"] = float(counts[:, -1].sum()) / chosen
        return found

    def _following(self, number: int, router: Any, plain: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*arguments: Any, **options: Any) -> Any:
            packed, k = self._feeding.packed, router.top_k
            if packed is None or packed.experts is None:
                output, agreed = plain(*arguments, **options), None
            else:
                before = sum(other.top_k for other in self._routers[:number])
                follow = _Following(packed.experts[:, before : before + k].long())
                with follow:
                    output = plain(*arguments, **options)
                if not torch.equal(output[2], follow.chosen):
                    raise ValueError(f"model: {type(router).__name__} chooses experts by other means than topk")
                agreed = follow.agreed
            if self._counting and torch.is_grad_enabled():
                chosen, counts = output[2].flatten(), self._counts[number].to(output[2].device)
                counts = counts.index_add(0, chosen, torch.ones_like(chosen))
                if agreed is not None:
                    counts[-1] += agreed
                    self._followed = True
                self._counts[number] = counts
            return output

        return forward


class _Following(TorchFunctionMode):
    """Answers ``topk`` of as many values as ``chosen`` [T, k] has in a row with these indices, and the values there."""

    def __init__(self, chosen: torch.Tensor) -> None:
        super().__init__()
        self.chosen = chosen
        self.agreed: torch.Tensor | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk) or found.indices.shape != self.chosen.shape:
            return found
        self.agreed = (found.indices[:, :, None] == self.chosen[:, None]).sum()
        return torch.return_types.topk((args[0].gather(-1, self.chosen), self.chosen))
