"""What balances the load of a model's experts: an auxiliary loss, and biases of the choice.

The loss (Switch Transformer, arXiv 2101.03961, Eq. 4 to 6):

    forward of all micro-batches, no gradient ─▶ f: tokens of each expert, of all ranks, over N tokens
    forward and backward of each              ─▶ + coefficient · E Σ f_i P_i, in the router's backward

P_i is the mean probability of expert i. Both are of the whole mini-batch, as is advised by arXiv
2501.11873: a loss of each micro-batch would ask each of them to use all experts, and would depend
on how the rows are divided. Each layer has its own loss, and the mean over layers counts.

The biases (DeepSeek-V3, arXiv 2408.15664, Algorithm 1) are added to an expert's score where experts
are chosen, not where their outputs are weighted: after each optimizer step they grow by a rate for
experts with fewer tokens than the mean, and fall for those with more. No gradient is involved.

Counted are the generated tokens that are fed, of all ranks: prompts, which are computed as often as
a group is divided, are not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from stages.engines.torch.model.expert_routing import routers_of
from stages.engines.torch.model.packing import Feeding

BIAS = "e_score_correction_bias"  # of a router, as transformers names it
Total = Callable[[torch.Tensor], torch.Tensor]


class RouterLoss:
    """Adds ``coefficient`` × the auxiliary loss to the gradients of the routers of ``model``.

    Raises ValueError for a model without routers whose logits can be read.
    """

    def __init__(
        self, model: nn.Module, feeding: Feeding, device: torch.device, coefficient: float
    ) -> None:
        routers = routers_of(model)
        if not routers:
            raise ValueError(
                f"router_loss: {type(model).__name__} has no routers whose logits can be read; "
                f"use router_loss = 0"
            )
        self._feeding = feeding
        self._coefficient = coefficient
        self._chosen = torch.tensor([float(router.top_k) for router in routers])
        experts = max(router.num_experts for router in routers)
        self._counts = torch.zeros(len(routers), experts, dtype=torch.int64).to(device)
        self._factors = torch.zeros(len(routers), experts).to(device)
        self._loss = torch.zeros(()).to(device)
        self._counts_only = False
        for layer, router in enumerate(routers):
            router.register_forward_hook(partial(self._add, layer))

    @contextmanager
    def counting(self, total: Total) -> Iterator[None]:
        """Count the tokens of each expert in the forward passes inside the context, in the place of
        those before. ``total`` adds up over all ranks."""
        self._counts.zero_()
        self._loss.zero_()
        self._counts_only = True
        try:
            yield
        finally:
            self._counts_only = False
        counts = total(self._counts).cpu().double()
        tokens = (counts.sum(1, keepdim=True) / self._chosen[:, None]).clamp(min=1)
        layers, experts = counts.shape
        # of the loss by the sum of an expert's probabilities: P_i is this sum over the tokens
        factors = self._coefficient / layers * experts * (counts / tokens) / tokens
        self._factors.copy_(factors)

    def metrics(self, total: Total) -> dict[str, float]:
        """Return ``router_loss``, with its coefficient, of the mini-batch."""
        return {"router_loss": float(total(self._loss[None]).sum())}

    def _add(self, layer: int, router: Any, _: Any, output: tuple[torch.Tensor, ...]) -> Any:
        packed = self._feeding.packed
        if packed is None or packed.counted is None:
            return None
        logits, weights, experts = output
        if self._counts_only:
            chosen = experts[packed.counted].flatten()
            self._counts[layer] += torch.bincount(chosen, minlength=self._counts.shape[1])
            return None
        if not torch.is_grad_enabled():
            return None
        factors = self._factors[layer, : router.num_experts]
        loss = (logits[packed.counted].float().softmax(-1) * factors).sum()
        is_recomputed = torch._C._current_graph_task_id() >= 0  # by a backward pass
        if not is_recomputed:
            self._loss += loss.detach()
        return logits, _WithLoss.apply(weights, loss), experts  # type: ignore[no-untyped-call]


class _WithLoss(torch.autograd.Function):
    """Returns ``weights``; its backward pass begins that of ``loss`` too, so that this needs no
    way to the end of the model, which another rank may have."""

    @staticmethod
    def forward(ctx: Any, weights: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.loss = loss.new_ones(())
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return gradient, ctx.loss


class RouterBias:
    """Moves the biases by which the routers of ``model`` choose, by ``rate`` a step.

    ``counts`` int64 [layers, experts]: tokens since the last step, of this process. Raises
    ValueError for a model without such biases.
    """

    def __init__(
        self, model: nn.Module, feeding: Feeding, device: torch.device, rate: float
    ) -> None:
        self._routers = biased_routers(model)
        if not self._routers:
            raise ValueError(
                f"router_bias_rate: the routers of {type(model).__name__} have no {BIAS}; "
                f"use router_bias_rate = 0"
            )
        self._feeding = feeding
        self._rate = rate
        experts = max(len(getattr(router, BIAS)) for router in self._routers)
        self.counts = torch.zeros(len(self._routers), experts, dtype=torch.int64).to(device)
        for layer, router in enumerate(self._routers):
            router.register_forward_hook(partial(self._count, layer))

    def biases(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Return the biases by their names in ``model``."""
        return {name: value for name, value in model.named_buffers() if name.endswith(BIAS)}

    @torch.no_grad()
    def step(self, total: Total) -> None:
        """Move the biases by the counts, which ``total`` adds up over all ranks."""
        counts = total(self.counts).to(self.counts.device).double()
        for router, tokens in zip(self._routers, counts, strict=True):
            bias = getattr(router, BIAS)
            tokens = tokens[: len(bias)]
            bias += self._rate * (tokens.mean() - tokens).sign().to(bias.dtype)
        self.counts.zero_()

    def _count(self, layer: int, _: Any, __: Any, output: tuple[torch.Tensor, ...]) -> None:
        packed = self._feeding.packed
        is_recomputed = torch._C._current_graph_task_id() >= 0  # by a backward pass
        if packed is None or packed.counted is None or is_recomputed:
            return
        if torch.is_grad_enabled():
            chosen = output[2][packed.counted].flatten()
            self.counts[layer] += torch.bincount(chosen, minlength=self.counts.shape[1])


def biased_routers(model: nn.Module) -> list[Any]:
    """Return the routers of ``model`` that choose by a bias, and return (logits, weights,
    indices)."""
    return [module for module in model.modules() if BIAS in module._buffers]


def biases_as_parameters(model: nn.Module) -> None:
    """Make the biases of routers parameters of ``model``, so that a rollout engine takes them with
    its other weights."""
    for router in biased_routers(model):
        bias = router._buffers.pop(BIAS)
        router.register_parameter(BIAS, nn.Parameter(bias, requires_grad=False))
