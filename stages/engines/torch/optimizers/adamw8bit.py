"""AdamW whose two moments have 8 bits (Dettmers et al., arXiv 2110.02861), of torchao.

Each block of 256 numbers has a scale of float32. Matrices in layers have such moments; embeddings
and the head keep theirs in full, as the paper has it: where most rows of a block get no gradient,
a second moment that was rounded to 0 would make a huge step. So do matrices of less than 4096
numbers, or of a number that is no multiple of 256.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pipeline.compat.extras import extra
from stages.engines.optimizers import BLOCK
from stages.engines.torch.optimizers.adamw import AdamW
from stages.engines.torch.optimizers.interface import COUNT, Trained, is_decayed
from stages.resharding.tensors import plain_parts

with extra("optimizers"):
    from torchao.optim import AdamW8bit as Library

TABLE = "qmap"  # of a moment: the numbers that its codes stand for, which are always the same


class AdamW8bit(torch.optim.Optimizer):
    """torchao's AdamW8bit of ``trained.hidden``, AdamW of all else; see
    :class:`~stages.engines.torch.optimizers.interface.EngineOptimizer`."""

    def __init__(
        self,
        trained: Trained,
        learning_rate: float,
        betas: tuple[float, float],
        weight_decay: float,
    ) -> None:
        hidden = {name: p for name, p in trained.policy.items() if name in trained.hidden}
        self._hidden = set(hidden.values())
        self._options: dict[str, Any] = {"betas": betas, "block_size": BLOCK}
        self._others = AdamW(trained, learning_rate, betas, weight_decay, without=hidden.keys())
        self._library = None
        groups = self._others.param_groups
        if hidden:
            assert all(is_decayed(name, parameter) for name, parameter in hidden.items())
            self._library = Library(
                [*hidden.values()], lr=learning_rate, weight_decay=weight_decay, **self._options
            )
            groups = [*groups, *self._library.param_groups]
        super().__init__(groups, {})
        self._others.state = self.state
        if self._library is not None:
            self._library.state = self.state

    def state_of(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """See :class:`~stages.engines.torch.optimizers.interface.EngineOptimizer`. A moment in 8
        bits has two parts: ``exp_avg.codes`` and ``exp_avg.scale``."""
        if parameter not in self._hidden:
            return self._others.state_of(parameter)
        state = self.state[parameter]
        if not state:
            self._begin(parameter)
        tensors = {COUNT: state[COUNT]}
        for moment in ("exp_avg", "exp_avg_sq"):
            for name, value in plain_parts(state[moment]):
                if name != TABLE:
                    tensors[f"{moment}.{name}" if name else moment] = value
        return tensors

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self._others.step()
        if self._library is not None:
            _step(self._library)

    def _begin(self, parameter: nn.Parameter) -> None:
        """Let torchao make the state of ``parameter``, which it does in a step: one without a
        gradient, a learning rate and a count."""
        gradient = parameter.grad
        parameter.grad = torch.zeros_like(parameter)
        once = Library([parameter], lr=0.0, weight_decay=0.0, **self._options)
        _step(once)
        parameter.grad = gradient
        self.state[parameter].update(once.state[parameter])
        self.state[parameter][COUNT].zero_()


def _step(optimizer: torch.optim.Optimizer) -> None:
    """Make torchao's step, which it compiles; on a CPU it is not, which would take minutes and a
    compiler of C++."""
    [parameter, *_] = optimizer.param_groups[0]["params"]
    is_compiled = parameter.device.type != "cpu"
    with torch.compiler.set_stance("default" if is_compiled else "force_eager"):
        optimizer.step()
