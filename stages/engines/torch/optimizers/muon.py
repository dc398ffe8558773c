"""Muon (Jordan et al., https://kellerjordan.github.io/posts/muon) of the matrices in layers, and
AdamW of all else.

    gradient ─▶ momentum, of this rank's part ─▶ whole matrix ─▶ Newton–Schulz ─▶ this rank's part
                                                                    └─▶ x 0.2 √max(rows, columns)

The factor gives an update the root mean square of AdamW's, so that both have one learning rate and
one weight decay (Moonlight, arXiv 2502.16982, Eq. 4). Each matrix of stacked experts is
orthogonalised by itself. torch.optim.Muon makes the same step, of whole matrices with two
dimensions; here ranks keep the momentum of their parts alone, and each of those that share a matrix
orthogonalises all of it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from stages.engines.torch.optimizers.adamw import AdamW
from stages.engines.torch.optimizers.interface import Trained
from stages.model.files import copy_part
from stages.resharding.tensors import whole

MOMENTUM = 0.95
STEPS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic iteration
EPS = 1e-7
RMS = 0.2  # root mean square of an AdamW update
BUFFER = "momentum_buffer"


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum of ``trained.hidden``, AdamW of all else; see
    :class:`~stages.engines.torch.optimizers.interface.EngineOptimizer`."""

    def __init__(
        self,
        trained: Trained,
        learning_rate: float,
        betas: tuple[float, float],
        weight_decay: float,
    ) -> None:
        self._whole_of = trained.whole_of
        hidden = {name: p for name, p in trained.policy.items() if name in trained.hidden}
        self._names = {parameter: name for name, parameter in hidden.items()}
        self._others = AdamW(trained, learning_rate, betas, weight_decay, without=hidden.keys())
        self._matrices: dict[str, Any] = {
            "params": [*hidden.values()],
            "lr": learning_rate,
            "weight_decay": weight_decay,
        }
        super().__init__([*self._others.param_groups, self._matrices], {})
        self._others.state = self.state

    def state_of(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        if parameter not in self._names:
            return self._others.state_of(parameter)
        state = self.state[parameter]
        if not state:
            state[BUFFER] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state  # type: ignore[no-any-return]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self._others.step()
        for parameter, name in self._names.items():
            if parameter.grad is None:
                continue
            momentum = self.state_of(parameter)[BUFFER].lerp_(parameter.grad, 1 - MOMENTUM)
            update = parameter.grad.lerp(momentum, MOMENTUM).bfloat16()
            part = self._whole_of(name, update)
            rows, columns = part.shape[-2:]
            update = _orthogonal_part(part)
            rate = self._matrices["lr"]
            parameter.mul_(1 - rate * self._matrices["weight_decay"])
            parameter.add_(update, alpha=-rate * RMS * math.sqrt(max(rows, columns)))


def _orthogonal_part(part: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of what :func:`orthogonal` gives for the matrices [..., m, n] that
    ``part`` is a part of. All ranks that share it call this."""
    if not isinstance(part, DTensor):
        return orthogonal(part)
    if not any(isinstance(each, Shard) and each.dim >= part.ndim - 2 for each in part.placements):
        return orthogonal(part.to_local())  # whole experts
    copy_part(part, orthogonal(whole(part)))
    return part.to_local()


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """Return about U Vᵀ of each of ``matrices`` [..., m, n] = U S Vᵀ, in bfloat16, by Newton–Schulz
    iterations. Singular values come out between about 0.7 and 1.2; zeros stay."""
    a, b, c = COEFFICIENTS
    rows, columns = matrices.shape[-2:]
    x = matrices.bfloat16().reshape(-1, rows, columns)
    if not x.numel():
        return matrices.bfloat16()
    x = x.mT if rows > columns else x
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=EPS)
    for _ in range(STEPS):
        gram = x @ x.mT
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, gram, x, beta=a)
    x = x.mT if rows > columns else x
    return x.reshape(matrices.shape)
