"""AdamW (Loshchilov and Hutter, arXiv 1711.05101), of torch."""

from __future__ import annotations

from collections.abc import Set

import torch
from torch import nn

from stages.engines.torch.optimizers.interface import COUNT, Trained


class AdamW(torch.optim.AdamW):
    """AdamW of all parameters but those of the names ``without``; see
    :class:`~stages.engines.torch.optimizers.interface.EngineOptimizer`."""

    def __init__(
        self,
        trained: Trained,
        learning_rate: float,
        betas: tuple[float, float],
        weight_decay: float,
        *,
        without: Set[str] = frozenset(),
    ) -> None:
        groups = trained.groups(weight_decay, without)
        try:
            super().__init__(groups, lr=learning_rate, betas=betas, fused=True)
        except RuntimeError:  # this device has no fused kernel
            groups = trained.groups(weight_decay, without)
            super().__init__(groups, lr=learning_rate, betas=betas)

    def state_of(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        state = self.state[parameter]
        if not state:
            fused = bool(self.param_groups[0]["fused"])
            device = parameter.device if fused else None
            state[COUNT] = torch.zeros((), dtype=torch.float32, device=device)
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state  # type: ignore[no-any-return]

    def set_adam(
        self, *, learning_rate: float, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> None:
        """Set the options of the next steps."""
        for options in self.param_groups:
            options.update(lr=learning_rate, betas=betas, eps=eps)
        self.param_groups[0]["weight_decay"] = weight_decay
